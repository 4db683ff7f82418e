"""`daguerre convert config` of public configs for models of flow matching: what arrives, and their tiny twins train.

Each file of tests/support/public_configs has the keys and values of one, where it comes from and the digest of the
original; prompts are other words. Of commands in guides the digest is the guide's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import recipe_values
import tiny_families
from data_sets import folder as images

from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import converted as conversion
from daguerre.errors import UserError
from daguerre.foreign import base_models, converters, files, flows, signs
from daguerre.foreign.reader import Reading, leaves
from daguerre.foreign.trainers import kohya

FOLDER = Path(__file__).parents[1] / "support" / "public_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
LOGIT = {"objective.times.name": "logit_normal"}
BY_SIZE = {"objective.schedule.resolution_shift.name": "linear_mu"}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
OF_LORA = {"training.weights_dtype": "bfloat16", "training.frozen_precision": "bf16"}
FLUX_BLOCKS = ["transformer.transformer_blocks.*", "transformer.single_transformer_blocks.*"]
ONETRAINER = {**LOGIT, "training.per_device_batch_size": 2, "data.resolution": 512, "cache.path": "auto"}
RANK_16 = {"adapters.lora.rank": 16, "adapters.lora.alpha": 1.0, **OF_LORA}
SIMPLETUNER = {
    **LOGIT,
    "training.per_device_batch_size": 1,
    "cache.path": "auto",
    "training.gradient_checkpointing": True,
}
MUSUBI = {
    "optimizer.name": "adamw_8bit",
    "training.duration": "16 epochs",
    "data.resolution": 723,
    "cache.path": "auto",
}
MUSUBI |= {"training.mixed_precision": "bf16", "data.buckets.aspects": "auto", "seed": 42}
EXPECTED: dict[str, dict[str, Any]] = {
    "ai_toolkit_flux_24gb": {
        "model.family": "flux",
        "training.base_precision": "float8",
        "sampling.guidance_scale": 4,
        **LOGIT,
        **OF_LORA,
        "adapters.lora.rank": 16,
        "adapters.lora.alpha": 16,
        "ema.decay": 0.99,
        "data.resolution": 1024,
        "adapters.lora.targets": FLUX_BLOCKS,
        "cache.path": "auto",
        "cache.texts": False,
        "optimizer.name": "adamw_8bit",
        "optimizer.learning_rate": 1e-4,
        "data.caption_dropout": 0.05,
        "training.duration": "2000 steps",
    },
    "ai_toolkit_qwen_image_24gb": {
        "model.family": "qwen_image",
        "cache.path": "auto",
        "cache.images": None,
        "sampling.sampler": "euler",
        "adapters.lora.targets": ["transformer.transformer_blocks.*"],
        "sampling.guidance_scale": 3,
    },
    "ai_toolkit_qwen_image_edit_2509": {
        "model.family": "qwen_image_edit",
        "model.pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2509",
        "model.references": 3,
        "data.reference_dir.reference_3": "/path/to/control/images/folder3",
        "adapters.lora.targets": ["transformer.transformer_blocks.*"],
        "cache.path": "auto",
        "cache.images": False,
        "sampling.guidance_scale": 3,
    },
    "musubi_flux_2": {
        "model.family": "flux2",
        "model.transformer": "path/to/dit_model",
        "adapters.lora.rank": 32,
        **LOGIT,
        "adapters.lora.alpha": 1.0,
        "adapters.lora.targets": "attention+ff",
        **MUSUBI,
        **BY_SIZE,
        **OF_LORA,
        "sampling.shift": "empirical",
    },
    "musubi_krea2": {
        "model.family": "krea2",
        "objective.schedule.shift": 2.5,
        "adapters.lora.targets": "all",
        **LOGIT,
        **MUSUBI,
        "adapters.lora.alpha": 32,
    },
    "musubi_qwen_image": {"model.family": "qwen_image", "objective.schedule.shift": 2.2, "adapters.lora.rank": 16},
    "musubi_qwen_image_edit": {
        "model.family": "qwen_image_edit",
        "model.pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2511",
        "model.references": 1,
        "data.reference_dir": "/path/to/control_dir",
        "objective.schedule.shift": 2.2,
        "adapters.lora.rank": 16,
    },
    "musubi_zimage": {
        "model.family": "z_image",
        "objective.schedule.shift": 2.0,
        "sampling.shift": 6.0,
        **LOGIT,
        **MUSUBI,
        "adapters.lora.targets": ["transformer.layers.*.attention.*", "transformer.layers.*.feed_forward.*"],
    },
    "musubi_zimage_full": {
        "model.family": "z_image",
        "optimizer.name": "adafactor",
        "optimizer.in_backward": "after_norm",
        "training.max_grad_norm": None,
        "objective.times.name": "uniform",
        "objective.schedule.shift": 1.0,
        "lr_scheduler.warmup": "10 steps",
    },
    "onetrainer_anima": {
        "model.family": "anima",
        "training.base_precision": "int8_products",
        **ONETRAINER,
        **RANK_16,
        "adapters.lora.targets": ["transformer.*attn1*", "transformer.*attn2*", "transformer.*ff*"],
        "objective.schedule.shift": 1.0,
        "sampling.shift": 3.0,
    },
    "onetrainer_anima_full": {"model.family": "anima", "optimizer.learning_rate": 1e-6, **ONETRAINER},
    "onetrainer_krea2_full": {
        "model.family": "krea2",
        "optimizer.name": "adafactor",
        "optimizer.learning_rate": 1e-5,
        "training.weights_dtype": "bfloat16",
        **ONETRAINER,
        "adapters.lora.name": None,
    },
    "onetrainer_flux": {"model.family": "flux", "training.base_precision": "nf4", **LOGIT, **BY_SIZE, **RANK_16},
    "onetrainer_flux2": {"model.family": "flux2", **ONETRAINER, **BY_SIZE, **RANK_16, "training.compile": "blocks"},
    "onetrainer_flux2_full": {
        "model.family": "flux2",
        "training.weights_dtype": "bfloat16",
        "training.compile": "blocks",
        **ONETRAINER,
        "optimizer.name": "adafactor",
        "optimizer.learning_rate": 1e-6,
        **BY_SIZE,
    },
    "onetrainer_krea2": {
        "model.family": "krea2",
        "optimizer.learning_rate": 3e-4,
        "training.attention": "cudnn",
        **ONETRAINER,
        "adapters.lora.targets": ["transformer.*attn*", "transformer.*ff*"],
    },
    "onetrainer_qwen": {"model.family": "qwen_image", "training.base_precision": "float8", **ONETRAINER, **RANK_16},
    "onetrainer_z_image": {
        "model.family": "z_image",
        "training.base_precision": "float8",
        **ONETRAINER,
        **RANK_16,
        "adapters.lora.targets": ["transformer.layers.*.attention.*", "transformer.layers.*.feed_forward.*"],
    },
    "onetrainer_z_image_full": {"model.family": "z_image", "training.weights_dtype": "bfloat16", **ONETRAINER},
    "sd_scripts_anima": {
        "model.family": "anima",
        "model.text_encoder": "<path to Qwen3-0.6B model or directory>",
        **LOGIT,
        "training.weights_dtype": "bfloat16",
        "model.transformer": "<path to Anima DiT model>",
        "cache.path": "auto",
        "data.resolution": 1024,
        "adapters.lora.rank": 8,
        "adapters.lora.alpha": 1,
        "adapters.lora.targets": "attention+ff",
        "optimizer.name": "adamw_8bit",
        "training.duration": "10 epochs",
        "training.gradient_checkpointing": True,
    },
    "sd_scripts_flux": {
        "model.family": "flux",
        "model.text_encoder_2": "<path to T5-XXL model>",
        "model.vae": "<path to AE model>",
        "model.training_guidance": 1.0,
        "adapters.lora.rank": 16,
        "adapters.lora.alpha": 1.0,
        **LOGIT,
        **BY_SIZE,
        "adapters.lora.ranks.text_encoder": 16,
        "adapters.lora.targets": [*FLUX_BLOCKS, "text_encoder.*"],
    },
    "simpletuner_anima": {
        "model.family": "anima",
        "objective.schedule.shift": 3.0,
        "adapters.lora.rank": 64,
        **SIMPLETUNER,
        "adapters.lora.targets": ATTENTION,
        "training.weights_dtype": "bfloat16",
    },
    "simpletuner_flux": {"model.pretrained_model_name_or_path": "black-forest-labs/FLUX.1-Krea-dev", **SIMPLETUNER},
    "simpletuner_flux3": {
        "model.family": "flux3",
        "objective.schedule.shift": 6.93,
        "adapters.lora.targets": ATTENTION,
        **LOGIT,
        "sampling.width": 512,
        "training.per_device_batch_size": 9,
    },
    "simpletuner_krea2": {"model.family": "krea2", "training.base_precision": "int8", **SIMPLETUNER, **OF_LORA},
    "simpletuner_qwen_image": {"model.family": "qwen_image", "adapters.lora.rank": 8, **SIMPLETUNER},
    "simpletuner_qwen_image_edit": {
        "model.family": "qwen_image_edit",
        "model.pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2509",
        "model.references": 3,
        "data.reference_dir.reference": "/datasets/reference-images-a",
        "data.reference_dir.reference_3": "/datasets/reference-images-c",
        "data.captions.lines": "drawn",
        "objective.schedule.shift": 1.73,
        "adapters.lora.targets": ATTENTION,
        "training.base_precision": "int8",
        **SIMPLETUNER,
    },
    "simpletuner_qwen_image_21": {
        "model.family": "qwen_image_21",
        "model.assistant": "SimpleTuner/Qwen-Image-2.1-training-assistant-v3",
        **BY_SIZE,
        **SIMPLETUNER,
    },
    "simpletuner_z_image": {
        "model.family": "z_image",
        "objective.schedule.shift": 3.0,
        "sampling.shift": 6.0,
        **SIMPLETUNER,
    },
}
"""What must arrive: None for what must not be set."""
NO_DATA = {"data_backend_config"}
LOST: dict[str, set[str]] = {
    "ai_toolkit_qwen_image_24gb": {"config.process.0.model.qtype"},
    "ai_toolkit_qwen_image_edit_2509": {
        "config.process.0.model.qtype",
        "config.process.0.train.timestep_type",
    },
    "onetrainer_anima_full": {"text_encoder.weight_dtype", "layer_filter"},
    "onetrainer_krea2_full": {"text_encoder.weight_dtype", "layer_filter"},
    "sd_scripts_flux": {"mixed_precision"},
    "onetrainer_anima": {"text_encoder.weight_dtype", "quantization.layer_filter"},
    "onetrainer_krea2": {"text_encoder.weight_dtype", "quantization.layer_filter"},
    "onetrainer_flux": {"text_encoder_2.weight_dtype"},
    "onetrainer_flux2_full": set(),
    **{f"onetrainer_{name}": {"text_encoder.weight_dtype"} for name in ("flux2", "qwen", "z_image", "z_image_full")},
    **{f"simpletuner_{name}": {"max_grad_norm", *NO_DATA} for name in ("anima", "z_image")},
    "simpletuner_qwen_image": {"max_grad_norm", "base_model_precision", *NO_DATA},  # int2
    "simpletuner_flux": NO_DATA,
    "simpletuner_krea2": {"max_grad_norm", "fuse_qkv_projections", *NO_DATA},
    "simpletuner_flux3": {"crepa_enabled", "data_backend_sampling", *NO_DATA},
    "simpletuner_qwen_image_21": {"crepa_enabled", "data_backend_sampling", *NO_DATA},
}
"""Keys whose meaning is lost, each with its reason; a name on the hub for the result is lost in all of SimpleTuner."""


def written(name: str, folder: Path) -> Path:
    """The config as a file of its program, with its data sets."""
    public = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    path: Path = folder / public["file"]
    if "words" in public:
        text = "accelerate launch " + " ".join(f"'{word}'" for word in public["words"])
        text = re.sub(r"(?<=dataset_config)[=' ]+[\w./]+(?:\.toml)?", "=data.toml", text)
        (folder / "data.toml").write_text(_toml(public["data"]), encoding="utf-8")
    else:
        text = json.dumps(public["tree"])
    for name, document in public.get("beside", {}).items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return path


def _toml(data: dict[str, Any]) -> str:
    """A file of data sets: [general], [[datasets]] and their subsets."""

    def lines(group: dict[str, Any]) -> list[str]:
        return [f"{name} = {json.dumps(value)}" for name, value in group.items() if name != "subsets"]

    out = ["[general]", *lines(data["general"])]
    for group in data["datasets"]:
        out += ["[[datasets]]", *lines(group)]
        for subset in group.get("subsets", []):
            out += ["[[datasets.subsets]]", *lines(subset)]
    return "\n".join(out)


def read(path: Path) -> tuple[dict[str, Any], Reading]:
    tree, _ = files.read(path)
    trainer = signs.trainer(tree)
    assert trainer is not None
    return dict(leaves(tree)), converters.converted(trainer, tree, str(path))


def test_there_are_twenty_of_five_trainers_each_with_its_origin():
    assert len(NAMES) >= 20
    assert set(EXPECTED) == set(NAMES)
    for name in NAMES:
        public = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert re.fullmatch(r"[0-9a-f]{64}", public["sha256"])
        assert re.search(r"[\w.-]+/[\w.-]+@[0-9a-f]{12}:|simpletuner 4\.10\.1 of PyPI: ", public["source"])


@pytest.mark.parametrize("name", NAMES)
def test_every_key_arrives_or_is_told(name, tmp_path):
    given, reading = read(written(name, tmp_path))
    assert {line.key for line in reading.lines} == set(given)
    lost = {line.key for line in reading.lines if line.kind == "refused"}
    assert lost - {"hub_model_id"} == LOST.get(name, set())
    assert not [line for line in reading.lines if "reads no such key" in line.text or not line.text]
    (tmp_path / "ours.yaml").write_text(
        configs.as_yaml(conversion.typed(configs.Config, reading.values)), encoding="utf-8"
    )
    values = recipe_values.values(tmp_path / "ours.yaml")
    found = {path: values.get(path) for path in EXPECTED[name]}
    assert found == EXPECTED[name]


LAWS = {
    "uniform": {"objective.times.name": "uniform"},
    "sigmoid": LOGIT,
    "shift": LOGIT | {"objective.schedule.shift": 2.5},
    "sigma": {"objective.times.name": "uniform", "objective.schedule.shift": 2.5},
    "flux2_shift": LOGIT | BY_SIZE,
    "krea2_shift": LOGIT | BY_SIZE | {"objective.schedule.resolution_shift.high_px": 1280.0},
}


@pytest.mark.parametrize("law", LAWS)
def test_laws_of_times_of_kohyas_programs(law):
    family = "flux2" if law == "flux2_shift" else "krea2"
    reading = Reading({"timestep_sampling": law, "discrete_flow_shift": 2.5})
    reading.assume({"model.family": family})
    flows.sd_scripts(reading, "sigma", 1.0)
    assert {path: value for path, value in reading.values.items() if path != "model.family"} == LAWS[law]
    assert not reading.rest


def test_a_normal_number_in_a_falling_list_of_levels_has_its_mean_turned():
    """The place in the list is the sigmoid of a normal number, and the list falls: a mean of 0.5 there is -0.5."""
    given = {"timestep_sampling": "sigma", "weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 0.8}
    reading = Reading(given)
    reading.assume({"model.family": "z_image"})
    flows.sd_scripts(reading, "sigma", 1.0)
    assert (reading.values["objective.times.mean"], reading.values["objective.times.std"]) == (-0.5, 0.8)


@pytest.mark.parametrize(("family", "ours"), [("z_image", 3.0), ("krea2", 3.0), ("flux2", 4.0), ("anima", 4.0)])
def test_guidance_is_in_the_notation_of_the_family(family, ours):
    assert flows.guided(family, 4.0) == ours


@pytest.mark.parametrize("several", [False, True])
def test_control_images_become_reference_images(several, tmp_path):
    """Of musubi-tuner, one of an image; several are numbered there and refused with what to do."""
    folder = tmp_path / "control"
    folder.mkdir()
    (folder / ("a_0.png" if several else "a.png")).write_bytes(b"")
    given = {"model_version": "klein-base-4b", "network_module": "networks.lora_flux_2"}
    given |= {"datasets.0.image_directory": "images", "datasets.0.control_directory": str(folder)}
    reading = Reading(given)
    converters.CONVERT["musubi-tuner"](reading)
    (line,) = [line for line in reading.lines if line.key.endswith("control_directory")]
    assert reading.values["model.references"] == 1
    assert (line.kind, reading.values.get("data.reference_dir")) == (
        ("refused", None) if several else ("carried", str(folder))
    )


def test_control_paths_of_ai_toolkit_become_reference_images():
    process = "config.process.0"
    given = {"job": "extension", f"{process}.model.arch": "flux2_klein_4b", f"{process}.datasets.0.folder_path": "a"}
    given |= {f"{process}.datasets.0.control_path": ["b", "c"]}
    given |= {f"{process}.model.name_or_path": "black-forest-labs/FLUX.2-klein-base-4B"}
    reading = Reading(given)
    converters.CONVERT["ai-toolkit"](reading)
    assert reading.values["model.references"] == 2
    assert reading.values["data.reference_dir"] == {"reference": "b", "reference_2": "c"}


def of_simpletuner(model: dict[str, Any], *sets: dict[str, Any]) -> Reading:
    tree = {"model_type": "lora", **model, "data_backends": list(sets)}
    reading = Reading(dict(leaves(tree)))
    converters.CONVERT["SimpleTuner"](reading)
    return reading


def kinds(reading: Reading, ends: str) -> list[str]:
    return [line.kind for line in reading.lines if line.key.endswith(ends)]


KLEIN = {"model_family": "flux2", "model_flavour": "klein-4b"}
OF_HUB = {"type": "huggingface", "dataset_name": "me/pairs", "resolution": 512}


def test_a_data_set_of_the_hub_becomes_ours_with_its_columns():
    """Those of SimpleTuner; the picture of the same rows is a column of the same source."""
    columns = {"caption_column": "instruction", "image_column": "after"}
    left = OF_HUB | {"id": "a", "split": "train", "revision": "v2", "dataset_config": "small", "huggingface": columns}
    right = OF_HUB | {"id": "b", "dataset_type": "conditioning", "conditioning_type": "reference_loose"}
    right |= {"huggingface": {"image_column": "before"}}
    reading = of_simpletuner(KLEIN, left | {"conditioning_data": ["b"]}, right)
    found = {path: value for path, value in reading.values.items() if path.startswith("data.")}
    assert found == {
        "data.source": "huggingface",
        "data.name": "me/pairs",
        "data.config": "small",
        "data.revision": "v2",
        "data.split": "train",
        "data.image_column": "after",
        "data.caption_column": "instruction",
        "data.reference_column": "before",
        "data.caption_dropout": 0.1,
        "data.held_out_fraction": 0,
        "data.resolution": 512,
        "data.buckets.aspects": "auto",
    }
    assert reading.values["model.references"] == 1
    assert not [line for line in reading.lines if line.kind == "refused" and line.key.startswith("data_backends")]


def test_what_a_data_set_of_the_hub_does_more_is_lost_by_its_name():
    more = {"filter_func": {"collection": "x", "quality_thresholds": {"sharp": 4}}, "fallback_caption_column": "c"}
    more |= {"composite_image_config": {"enabled": True, "image_count": 2}, "width_column": "w"}
    reading = of_simpletuner(KLEIN, OF_HUB | {"id": "a", "huggingface": more})
    for name in ("collection", "thresholds.sharp", "fallback_caption_column", "composite_image_config.enabled"):
        assert kinds(reading, name) == ["refused"], name
    assert kinds(reading, "width_column") == ["notice"]


def test_pictures_that_cannot_be_references_are_refused():
    """Pictures in a folder for images of the hub, and those that are made of the images."""
    folder = {"id": "b", "dataset_type": "conditioning", "conditioning_type": "reference_strict"}
    folder |= {"type": "local", "instance_data_dir": "pictures"}
    mixed = of_simpletuner(KLEIN, OF_HUB | {"id": "a", "conditioning_data": ["b"]}, folder)
    assert kinds(mixed, "conditioning_data") == ["refused"]
    made = {"type": "superresolution", "conditioning_type": "reference_strict", "captions": ["x"]}
    reading = of_simpletuner(KLEIN, OF_HUB | {"id": "a", "conditioning": made})
    assert kinds(reading, "conditioning.type") == ["refused"]
    assert "model.references" not in reading.values


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        ("SimpleTuner", {"model_family": "qwen_image", "model_flavour": "edit-v1"}),
        ("SimpleTuner", {"model_family": "qwen_image", "model_flavour": "edit-v2+"}),
        ("musubi-tuner", {"model_version": "edit", "network_module": "networks.lora_qwen_image"}),
        ("musubi-tuner", {"edit": True, "network_module": "networks.lora_qwen_image"}),
        ("ai-toolkit", {"job": "extension", "config.process.0.model.arch": "qwen_image_edit"}),
    ],
)
def test_the_first_edit_model_is_refused_by_its_name(trainer, given):
    with pytest.raises(UserError, match="Qwen-Image-Edit"):
        converters.CONVERT[trainer](Reading(given))


def test_a_list_of_images_names_its_control_images(tmp_path):
    """Of musubi-tuner: one or several of an image, in columns of their own; edit_plus is Edit-2509."""
    table = tmp_path / "list.jsonl"
    table.write_text(
        '{"image_path": "a", "caption": "b", "control_path_0": "c", "control_path_1": "d"}\n', encoding="utf-8"
    )
    reading = Reading(
        {"edit_plus": True, "network_module": "networks.lora_qwen_image", "datasets.0.image_jsonl_file": str(table)}
    )
    converters.CONVERT["musubi-tuner"](reading)
    assert reading.values["model.pretrained_model_name_or_path"] == "Qwen/Qwen-Image-Edit-2509"
    assert reading.values["data.reference_column"] == {"reference": "control_path_0", "reference_2": "control_path_1"}
    assert reading.values["model.references"] == 2


def test_a_network_for_flux_is_read_on_the_command_line(tmp_path):
    """kohya's networks for other models mean their layers; that of FLUX.1 was refused once."""
    found = configs.load("flux_lora", ["network_module=networks.lora_flux", "network_dim=8"]).config.adapters["lora"]
    assert found.targets == [*FLUX_BLOCKS, "text_encoder.*"]
    assert (found.rank, found.ranks) == (8, {"text_encoder": 8})


@pytest.mark.parametrize(("given", "side"), [(512, 512), ("512,512", 512), ([960, 544], 723), ("x", None)])
def test_a_resolution_is_the_side_of_a_square_of_its_area(given, side):
    assert kohya.side(given) == side


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # a slower kernel, where Qwen3 is trained
@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_twin_of_a_converted_config_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, reading = read(written(name, tmp_path))
    family = str(reading.values["model.family"])
    model = tiny_families.settings(family, tmp_path)
    reading.assume_over({f"model.{name}": value for name, value in model.items()})
    others = ("transformer", "vae", "text_encoder", "text_encoder_2", "training_guidance", "max_sequence_length")
    for part in (*others, "assistant"):
        if part not in model:
            reading.values.pop(f"model.{part}", None)
    short = {"run_name": "twin", "output_dir": "runs", "training.duration": "2 steps", "training.compile": False}
    short |= {"data.path": str(images(tmp_path / "images", 12)), "data.resolution": 64, "loader.num_workers": 0}
    short |= {"sampling.num_images": 0, "checkpoint.every": None, "lr_scheduler.warmup": "0 steps"}
    short |= {"data.buckets.aspects": "square", "training.attention": "auto", "cache.path": "cache"}
    reading.assume_over(short)
    if pictures := reading.values.get("data.reference_dir"):
        there = str(images(tmp_path / "pictures", 12))
        ours = dict.fromkeys(pictures, there) if isinstance(pictures, dict) else there
        reading.assume_over({"data.reference_dir": ours})
    for path in [path for path in reading.values if path.startswith("data.buckets.") and "aspects" not in path]:
        del reading.values[path]
    if reading.values.get("training.base_precision") == "nf4":  # which needs a GPU
        reading.assume_over({"training.base_precision": "int8"})
    if str(reading.values.get("optimizer.name")).endswith("_8bit"):
        reading.assume_over({"optimizer.name": "adamw"})
    assert base_models.is_flow(family)
    Path("ours.yaml").write_text(configs.as_yaml(conversion.typed(configs.Config, reading.values)), encoding="utf-8")
    assert main.run(["train", "ours.yaml"]) == 0
    assert json.loads(Path("runs/twin/status.json").read_text())["step"] == 2
