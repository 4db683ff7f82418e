"""Tiny twins of the shipped recipes: a recipe as it stands, with networks and data that a CPU trains in seconds.

No recipe is named here. What a twin needs follows from what its recipe says: a pretrained place on the hub becomes a
tiny pipeline of the same kind, a component from elsewhere a file of tiny weights, a data set a local one that the same
source reads. Objective, optimizer, averages, filters, captions and sampler stay the recipe's own.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tiny_networks
from emoji_fonts import colour_font
from PIL import Image
from safetensors.torch import load_file, save_file
from shards import write as write_tar
from tiny_cascade import EFFNET, PREVIEWER, VQGAN, write_decoder, write_prior
from tiny_families.anima import write as write_anima
from tiny_families.flux import write as write_flux
from tiny_families.flux2 import reading as read_flux2
from tiny_families.flux2 import write as write_flux2
from tiny_families.flux3 import reading as read_flux3
from tiny_families.flux3 import write as write_flux3
from tiny_families.krea2 import LAYERS as KREA2_LAYERS
from tiny_families.krea2 import write as write_krea2
from tiny_families.qwen_image import write as write_qwen_image
from tiny_families.qwen_image_21 import write as write_qwen_image_21
from tiny_families.qwen_image_edit import write as write_qwen_image_edit
from tiny_families.z_image import write as write_z_image
from tiny_models import write_sd, write_sdxl

from daguerre import trees
from daguerre.config import recipe
from daguerre.models.weights import architectures
from daguerre.objectives.networks.lpips import Lpips

KLEIN = ("flux2_klein_base_4b", "flux2_klein_base_9b")
KINDS: dict[str, Callable[[Path], Path]] = {
    "sd1": lambda folder: write_sd(folder, version=1),
    "sd2_base": lambda folder: write_sd(folder, version=2, prediction_type="epsilon"),
    "sd21": lambda folder: write_sd(folder, version=2),
    "sdxl": write_sdxl,
    "cascade_c": write_prior,
    "cascade_b": write_decoder,
    "flux1_dev": write_flux,
    "z_image": write_z_image,
    **dict.fromkeys(KLEIN, write_flux2),
    "qwen_image": write_qwen_image,
    "qwen_image_21": write_qwen_image_21,
    "qwen_image_edit_2511": write_qwen_image_edit,
    "anima": lambda folder: write_anima(folder, conditioner={"min_sequence_length": 512}),
    "krea2": write_krea2,
    "flux3_klein_base": write_flux3,
}
"""Tiny pipelines by the architecture that they stand for."""
IMAGES = 8
RESOLUTION_PX = 16
SIZES = {"data.resolution": 96, "sampling.height": 64, "sampling.width": 64}
BESIDE: dict[str, dict[str, Any]] = {
    "cascade_c": {"model.effnet": EFFNET, "model.previewer": PREVIEWER, **SIZES},
    "cascade_b": {"model.effnet": EFFNET, **SIZES},
    **{kind: {f"model.{name}": value for name, value in read_flux2().items()} for kind in KLEIN},
    "qwen_image_21": SIZES,
    "flux3_klein_base": {f"model.{name}": value for name, value in read_flux3().items()},
    "krea2": {"model.text_encoder_select_layers": [*KREA2_LAYERS]},
}
"""By architecture: networks that the family takes from elsewhere, and sizes that its networks can have."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "stage_a": {"model.vqgan": VQGAN},
    "previewer": {"model.previewer": {"hidden_channels": 16}, "model.effnet": EFFNET, "data.resolution": 64},
}
"""By family, for recipes without a base: tiny networks."""
SHORT = {
    "training.duration": "2 steps",
    "training.global_batch_size": 2,
    "training.per_device_batch_size": 2,
    "lr_scheduler.warmup": "1 step",
    "loader.num_workers": 0,
    "checkpoint.every": "2 steps",
    "logging.every": "1 step",
    "logging.tensorboard": "false",
}
"""A run of two updates, then saved."""


@cache
def tree(name: str) -> trees.Tree:
    """What a recipe and those that it extends say, settings of an only source in `data`; not to be changed."""
    merged = recipe.tree(name)
    shared = {name: value for name, value in merged["data"].items() if name != "sources"}
    mix = merged["data"].get("sources", {})
    return {**merged, "data": {**shared, **mix["images"]}} if [*mix] == ["images"] else merged


def left_to_users(name: str) -> list[str]:
    """Settings that a recipe leaves to its user, with a place that is not there."""
    return [f"{path}=somewhere" for path, value in trees.paths(tree(name)) if value == "???"]


def sources(data: trees.Tree) -> dict[str, trees.Tree]:
    """The sources of a recipe's data, by the path of their settings."""
    mix = data.get("sources")
    return {"data": data} if mix is None else {f"data.sources.{name}": own for name, own in mix.items()}


def base(name: str) -> str | None:
    """The place on the hub that a recipe starts from; None for recipes whose networks are small themselves."""
    place = tree(name)["model"].get("pretrained_model_name_or_path", "")
    return place if "/" in place and _run_of(place) is None else None


def begun_from(name: str) -> str | None:
    """The recipe whose run, in the same output folder, a recipe starts from: by its checkpoint or its pipeline."""
    said = tree(name)
    places = (said.get("init_from"), said["model"].get("pretrained_model_name_or_path"))
    return next((run for place in places if (run := _run_of(place or ""))), None)


def _run_of(place: str) -> str | None:
    found = re.fullmatch(r"\$\{output_dir\}/(\w+)(/pipeline)?", place)
    return found[1] if found else None


@dataclass(frozen=True)
class Twins:
    """Makes what twins need in a folder, each thing once."""

    folder: Path
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of networks of conditions that were made, by the condition's name."""

    def overrides(self, name: str) -> list[str]:
        """What turns a recipe into its twin, as arguments of `daguerre train`."""
        said = tree(name)
        changes = SHORT | self._images(said) | self.conditions(said)
        if base(name) is not None:
            changes |= self._data(said) | self._model(said["model"])
        elif said["data"].get("path") == "???":
            changes |= self._data(said) | self._autoencoder(said)
        else:
            for setting, own in sources(said["data"]).items():
                changes |= self._source(setting, own, False) if own.get("source") == "folder" else {}
        return [f"{path}={value}" for path, value in changes.items()]

    def pipeline(self, kind: str) -> Path:
        """A tiny pipeline of an architecture."""
        path = self.folder / kind
        return path if path.exists() else KINDS[kind](path)

    def _images(self, said: trees.Tree) -> dict[str, Any]:
        """Few images and little validation, where the recipe has them at all."""
        changes: dict[str, Any] = {"validation.compared_images": 0}
        if said.get("sampling", {}).get("num_images", 8):
            changes |= {"sampling.num_images": 1, "sampling.num_inference_steps": 2}
        if isinstance(levels := said.get("sampling", {}).get("timestep_spacing"), list):
            changes["sampling.num_inference_steps"] = len(levels)
        if said.get("validation", {}).get("every", ""):
            changes |= {"validation.every": "2 steps", "validation.num_samples": 2}
        for setting, own in sources(said["data"]).items():
            if own.get("source") == "shapes":
                changes[f"{setting}.checked_prompts"] = 2
                changes |= {f"{setting}.kept_prompts": 2} if "kept_prompts" in own else {}
            if own.get("source") == "emoji":
                changes[f"{setting}.font"] = self._font()
                changes |= {f"{setting}.checked_prompts": 2} if said["model"]["family"] in ("sd", "dit") else {}
            if "generate" in own:
                changes[f"{setting}.generate.count"] = 3
        return changes

    def _font(self) -> Path:
        path = self.folder / "few.ttf"
        return path if path.exists() else colour_font(path)

    def conditions(self, said: trees.Tree) -> dict[str, Any]:
        """Tiny networks for conditions that ask for some."""
        changes: dict[str, Any] = {}
        for adapter, own in said.get("adapters", {}).items():
            condition = own.get("condition")
            settings = condition if isinstance(condition, dict) else {}  # a name alone asks for none
            wanted = [path.rpartition("path")[0] for path, value in trees.paths(settings) if value == "???"]
            for place in wanted:
                made = self._network(condition["name"], place.strip("."))
                changes |= {f"adapters.{adapter}.condition.{place}{key}": value for key, value in made.items()}
        return changes

    def _network(self, condition: str, part: str) -> dict[str, str]:
        if part:
            return tiny_networks.of_faces(part)
        folder = self.folder / condition
        if not folder.exists():
            folder.mkdir()
            self.networks[condition] = getattr(tiny_networks, condition)(folder)
        return {key: value for key, value in self.networks[condition].items() if isinstance(value, str)}

    def _model(self, model: trees.Tree) -> dict[str, Any]:
        found = architectures.find(model["pretrained_model_name_or_path"])
        assert found is not None, "the numbers of a recipe's base ship with the package: architectures/"
        changes: dict[str, Any] = {"model.pretrained_model_name_or_path": self.pipeline(found.name)}
        changes |= BESIDE.get(found.name, {})
        for component, place in model.items():
            if component not in ("family", "pretrained_model_name_or_path") and "/" in str(place):
                assert place.endswith(".safetensors"), f"model.{component}: teach twins.py this kind of place"
                changes[f"model.{component}"] = self._weights(found.name, component, Path(place).name)
        return changes

    def _autoencoder(self, said: trees.Tree) -> dict[str, Any]:
        """Tiny networks of a recipe that trains an autoencoder, and LPIPS with random weights."""
        changes = dict(OF_FAMILY.get(said["model"]["family"], {}))
        if "/" in str(said["model"].get("vae")):
            changes["model.vae"] = self.pipeline("sd1")
        if said["objective"].get("perceptual", {}).get("path") == "???":
            changes["objective.perceptual.path"] = self._lpips()
        if "adversarial" in said["objective"]:
            changes |= {"objective.adversarial.channels": 4, "objective.adversarial.start_steps": 1}
        return changes

    def _lpips(self) -> Path:
        path = self.folder / "lpips.safetensors"
        if not path.exists():
            published = {re.sub(r"^lin\.(\d)", r"lin\1.model.1", n): w for n, w in Lpips().state_dict().items()}
            save_file(published, path)
        return path

    def _weights(self, kind: str, component: str, name: str) -> Path:
        """One component's weights in a file: those of the tiny pipeline, changed a little."""
        path = self.folder / f"{kind}-{component}-{name}"
        if not path.exists():
            weights = load_file(next((self.pipeline(kind) / component).glob("*.safetensors")))
            save_file({key: value * 1.01 for key, value in weights.items()}, path)
        return path

    def _data(self, said: trees.Tree) -> dict[str, Any]:
        in_pairs = said["objective"]["name"] == "dpo"
        changes = [self._source(setting, own, in_pairs) for setting, own in sources(said["data"]).items()]
        return {path: value for part in changes for path, value in part.items()} | {"data.resolution": RESOLUTION_PX}

    def _source(self, setting: str, data: trees.Tree, in_pairs: bool) -> dict[str, Any]:
        """What is read in place of a source; images that are drawn before training are drawn."""
        if "generate" in data:
            return {}
        labelled = "idx_to_prompt" in data
        edits = "-edits" * ("reference_column" in data)
        path = self.folder / f"{data['source']}-{'labels' if labelled else 'captions'}{edits}{'-pairs' * in_pairs}"
        if edits and not path.exists():
            _edits(path, data)
        if in_pairs and not path.exists():
            _pairs(path)
        if not path.exists():
            {"huggingface": _hugging_face, "webdataset": shards, "folder": _folder}[data["source"]](path, labelled)
        by_name = {f"{setting}.name": "null"} if data.get("name") and data["source"] != "folder" else {}
        return by_name | {f"{setting}.path": path}


def _image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _folder(path: Path, labelled: bool) -> None:
    """Images without captions."""
    path.mkdir()
    for i in range(IMAGES):
        (path / f"{i}.png").write_bytes(_image(i))


def _hugging_face(path: Path, labelled: bool) -> None:
    """A data set as it comes from the hub, with captions or with the labels of ImageNet's classes."""
    datasets.disable_progress_bars()
    columns: dict[str, Any] = {"image": [{"bytes": _image(i), "path": None} for i in range(IMAGES)]}
    kinds: dict[str, Any] = {"image": datasets.Image()}
    if labelled:
        columns["label"] = [i * 100 for i in range(IMAGES)]
        kinds["label"] = datasets.ClassLabel(num_classes=1000)
    else:
        columns["text"] = [f"noise number {i}" for i in range(IMAGES)]
        kinds["text"] = datasets.Value("string")
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(path)


def _edits(path: Path, data: trees.Tree) -> None:
    """A data set of pictures, captions and results, in the columns that a recipe names."""
    datasets.disable_progress_bars()
    columns: dict[str, Any] = {data["caption_column"]: [f"edit number {i}" for i in range(IMAGES)]}
    kinds: dict[str, Any] = {data["caption_column"]: datasets.Value("string")}
    for first, name in ((0, data["image_column"]), (IMAGES, data["reference_column"])):
        columns[name] = [{"bytes": _image(first + i), "path": None} for i in range(IMAGES)]
        kinds[name] = datasets.Image()
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(path)


def _pairs(path: Path) -> None:
    """A data set of pairs in the columns of Pick-a-Pic; the last one is a tie."""
    datasets.disable_progress_bars()
    columns: dict[str, Any] = {"caption": [f"pair number {i}" for i in range(IMAGES)]}
    kinds: dict[str, Any] = {"caption": datasets.Value("string"), "label_0": datasets.Value("float64")}
    columns["label_0"] = [0.5 if i == IMAGES - 1 else i % 2 for i in range(IMAGES)]
    for first, name in ((0, "jpg_0"), (IMAGES, "jpg_1")):
        columns[name] = [_image(first + i) for i in range(IMAGES)]
        kinds[name] = datasets.Value("binary")
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(path)


def shards(path: Path, labelled: bool) -> None:
    """Two shards as img2dataset writes them from LAION: every other sample carries a watermark."""
    path.mkdir()
    for shard in range(2):
        files = []
        for i in range(shard * IMAGES, (shard + 1) * IMAGES):
            about = {"pwatermark": 0.9 if i % 2 else 0.1, "original_width": 1024, "original_height": 768}
            words = ("cls", str(i)) if labelled else ("txt", f"noise number {i}")
            members = {"png": _image(i), words[0]: words[1].encode(), "json": json.dumps(about).encode()}
            files += [(f"{i:05}.{extension}", content) for extension, content in members.items()]
        write_tar(path / f"{shard:05}.tar", files)
