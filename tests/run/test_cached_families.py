"""Every family beside a cache: what it learns is what it learns without one, to the bit, or the pair is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_families
import yaml
from adapter_runs import assert_equal
from PIL import Image
from tiny_cascade import EFFNET, VQGAN, stage_b, stage_c, write_decoder, write_prior
from tiny_models import write_sd, write_sdxl

from daguerre import errors, plugins
from daguerre.checkpoint.store import Store
from daguerre.cli import main

IMAGES = 6
TODAY = ("anima", "dit", "flux", "flux2", "flux3", "krea2", "qwen_image", "qwen_image_21", "z_image")
MODELS = {
    "sd": lambda place: {"family": "sd", "pretrained_model_name_or_path": str(write_sd(place))},
    "sdxl": lambda place: {"family": "sdxl", "pretrained_model_name_or_path": str(write_sdxl(place))},
    "cascade_c": lambda place: stage_c(write_prior(place)) | {"image_embedding_dropout": 0.3},
    "cascade_b": lambda place: stage_b(write_decoder(place)),
    **{name: lambda place, name=name: {"family": name, **tiny_families.settings(name, place)} for name in TODAY},
}
OBJECTIVES = dict.fromkeys(TODAY, "flow")
"""Of families that are not trained on the noise."""
NEVER = {
    "autoencoder": ["quickstart_vae"],
    "clip": ["quickstart_text"],
    "stage_a": ["cascade_a", f"model.vqgan={json.dumps(VQGAN)}"],
    "previewer": ["cascade_previewer", 'model.previewer={"hidden_channels": 16}', f"model.effnet={EFFNET}"],
}
"""Families that train the networks which others have frozen, and recipes of them."""
ELSEWHERE = {"qwen_image_edit"}
"""Families that read a reference image with each sample: test_qwen_references.py has runs with a cache."""
TOKENS = ["adapter.name=tokens", "adapter.placeholder_token=<toy>", "adapter.initializer_token=image"]


class Runs:
    """Runs of one family, on a few images of their own."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        (folder / "images").mkdir()
        noise = np.random.default_rng(0)
        for number in range(IMAGES):
            pixels = noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
            (folder / "images" / f"{number}.txt").write_text(f"<toy> image {number}")
        own = {
            "data": {"source": "folder", "path": str(folder / "images"), "resolution": 64, "caption_dropout": 0.3},
            "training": {"duration": "3 steps", "global_batch_size": 2, "per_device_batch_size": 1},
            "lr_scheduler": {"warmup": "0 steps"},
            "checkpoint": {"export": False},
            "validation": {"every": "3 steps", "num_samples": 1, "num_levels": 2},
            "sampling": {"num_images": 0},
            "logging": {"every": "1 steps", "tensorboard": False},
        }
        model, objective = MODELS[family](folder / "base"), {"name": OBJECTIVES.get(family, "eps")}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": model, "objective": objective, **own}))

    def train(self, name: str, *more: str) -> int:
        place = [f"output_dir={self.folder}", f"run_name={name}"]
        return main.run(["train", str(self.folder / "recipe.yaml"), *place, *more])

    def cached(self, name: str, *more: str) -> int:
        return self.train(name, f"cache.path={self.folder / 'cache'}", "cache.dtype=float32", *more)

    def weights(self, name: str) -> dict:
        store = Store(self.folder / name / "checkpoints")
        return store.load(store.root / "step-00000003", ["model"]).tensors["model"]

    def losses(self, name: str) -> list[float]:
        lines = map(json.loads, (self.folder / name / "metrics" / "metrics.jsonl").read_text().splitlines())
        return [line[key] for line in lines for key in ("learning/loss", "validation/loss") if key in line]


CASES = [
    pytest.param("cascade_c", [], ["image", "text"], "", id="cascade_c"),
    pytest.param("cascade_b", [], ["text"], "at another scale each time", id="cascade_b"),
    pytest.param("sd", TOKENS, ["image"], "text_encoder is trained", id="tokens"),
    pytest.param("cascade_c", TOKENS, ["image"], "text_encoder is trained", id="cascade_c-tokens"),
    pytest.param("sdxl", ["adapter.name=lora"], ["image", "text"], "", id="sdxl-lora"),
    pytest.param("sd", ["training.frozen_precision=bf16"], ["image", "text"], "", id="bf16"),
    *(pytest.param(name, ["adapter.name=lora"], ["image", "text"], "", id=f"{name}-lora") for name in TODAY),
]


@pytest.mark.long  # of the quick tests, test_cached_runs.py has one family
@pytest.mark.parametrize(
    ("family", "given", "halves", "notice"),
    CASES,
)
def test_a_family_learns_the_same_on_a_cache(tmp_path, capsys, family, given, halves, notice):
    runs = Runs(tmp_path, family)
    assert runs.train("plain", *given) == errors.DONE
    capsys.readouterr()
    for name in ("filling", "cached"):
        assert runs.cached(name, *given) == errors.DONE
        said = capsys.readouterr().out
        assert notice in said
        found = sorted(path.parent.name for path in (tmp_path / "cache").glob("*/encoder.json"))
        assert [folder.partition("s-")[0] for folder in found] == halves
        assert runs.losses(name) == runs.losses("plain")
        assert len(runs.losses(name)) == 4
        assert_equal(runs.weights(name), runs.weights("plain"))
    assert "cached " not in said  # the second run had nothing to encode


@pytest.mark.long
def test_reference_images_of_dit_learn_the_same_on_a_cache(tmp_path):
    """Those of FLUX.2, FLUX.3 and Qwen-Image have tests beside their families."""
    runs, given = Runs(tmp_path, "dit"), ["adapter.name=lora", "model.references=1"]
    for number in range(0, IMAGES, 2):
        shutil.copyfile(tmp_path / "images" / f"{number}.png", tmp_path / "images" / f"{number + 1}.reference.png")
    assert runs.train("without", "adapter.name=lora", "model.references=0") == errors.DONE
    assert runs.train("plain", *given) == errors.DONE
    for name in ("filling", "cached"):
        assert runs.cached(name, *given) == errors.DONE
        assert runs.losses(name) == runs.losses("plain") != runs.losses("without")
        assert_equal(runs.weights(name), runs.weights("plain"))


@pytest.mark.long
def test_captions_of_several_windows_are_padded_and_masked_as_without_a_cache(tmp_path):
    """In batches of several, in which the encoders round differently."""
    runs, given = Runs(tmp_path, "sd"), ["training.per_device_batch_size=2"]
    for number in range(0, IMAGES, 2):
        (tmp_path / "images" / f"{number}.txt").write_text("a long caption " * (number + 4))
    for name, train, more in (
        ("plain", runs.train, ["model.long_prompts=true"]),
        ("cached", runs.cached, ["model.long_prompts=true"]),
        ("cut", runs.train, []),
    ):
        assert train(name, *given, *more) == errors.DONE
    assert runs.losses("cached") == pytest.approx(runs.losses("plain"), rel=1e-6)
    assert runs.losses("cut") != pytest.approx(runs.losses("plain"), rel=1e-4)


@pytest.mark.long
def test_captions_of_several_lengths_are_padded_and_masked_as_without_a_cache(tmp_path):
    """Krea 2's, in batches of several, in which the language model rounds differently."""
    runs, given = Runs(tmp_path, "krea2"), ["adapter.name=lora", "training.per_device_batch_size=2"]
    for number in range(IMAGES):
        (tmp_path / "images" / f"{number}.txt").write_text("a red circle " * (number + 1))
    assert runs.train("plain", *given) == errors.DONE
    assert runs.cached("cached", *given) == errors.DONE
    assert runs.losses("cached") == pytest.approx(runs.losses("plain"), rel=1e-6)


@pytest.mark.long
def test_in_16_bits_captions_that_are_kept_in_16_bits_move_losses_by_this_rounding(tmp_path):
    """Krea 2 normalises features before its first product; kept in float32 they are the same to the bit."""
    runs = Runs(tmp_path, "krea2")
    given = ["adapter.name=lora", "training.mixed_precision=bf16"]
    assert runs.train("plain", *given) == errors.DONE
    assert runs.cached("cached", *given) == errors.DONE
    assert runs.train("rounded", f"cache.path={tmp_path / 'narrow'}", *given) == errors.DONE
    assert runs.losses("cached") == runs.losses("plain") != runs.losses("rounded")
    assert runs.losses("rounded") == pytest.approx(runs.losses("plain"), rel=5e-4)


@pytest.mark.parametrize("family", sorted(NEVER))
def test_a_family_that_trains_its_encoders_is_refused(tmp_path, capsys, family):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / "0.png")
    (tmp_path / "images" / "0.txt").write_text("an image")
    data = ["data.source=folder", f"data.path={tmp_path / 'images'}", "data.held_out_fraction=0"]
    place = [f"output_dir={tmp_path}", f"cache.path={tmp_path / 'cache'}"]
    assert main.run(["cache", *NEVER[family], *data, *place]) == errors.REFUSED
    assert "cache.path: images are not cached: no frozen network" in capsys.readouterr().err


def test_every_family_is_tested_beside_a_cache():
    assert {*MODELS, *NEVER, *ELSEWHERE} == {*plugins.names("families")}
