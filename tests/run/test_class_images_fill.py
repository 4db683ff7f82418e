"""A folder brought to a number of images: what is there counts, what is half there is drawn anew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_drawings
from PIL import Image

from daguerre.assembly.parts import Components
from daguerre.data.dataset import open_dataset
from daguerre.data.sources import folder as folder_source
from daguerre.generation import generate
from daguerre.run.class_images import Filled, fill
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Prompt

PROMPT = "a photo of a dog"
SAMPLING = SamplingSettings(num_inference_steps=2, batch_size=2, seed=5)
SIZE = (32, 48)


@pytest.fixture(scope="module")
def built(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Components:
    return tiny_drawings.build(tmp_path_factory.mktemp("r"), tiny_sd)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_missing_images_are_drawn_and_the_folder_can_be_trained_on(built, tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "mine.jpg")
    (tmp_path / "mine.txt").write_text("my dog")
    found = fill(built, SAMPLING, [PROMPT], tmp_path, 4, size_px=SIZE, provenance={"base": "tiny"})
    assert found == Filled(kept=1, generated=3, missing=0)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == [f"drawn-0000{i}.png" for i in range(3)]
    document = json.loads((tmp_path / "drawn-00001.json").read_text())
    assert (document["prompt"], document["seed"], document["base"]) == (PROMPT, 6, "tiny")
    assert pixels(tmp_path / drawn[0]).shape == (*SIZE, 3)
    settings = folder_source.Settings(path=str(tmp_path), resolution=32, held_out_fraction=0.0)
    assert open_dataset(settings, "train").count == 4
    source = folder_source.open_source(settings, "train")
    assert {source.record(number).texts["text"] for number in range(4)} == {PROMPT, "my dog"}
    assert fill(built, SAMPLING, [PROMPT], tmp_path, 4, size_px=SIZE, provenance={}) == Filled(
        kept=4, generated=0, missing=0
    )
    assert fill(built, SAMPLING, [PROMPT], tmp_path, 2, size_px=SIZE, provenance={}) == Filled(
        kept=4, generated=0, missing=0
    )


def test_several_prompts_are_drawn_in_turn_and_each_image_has_its_own_as_caption(built, tmp_path):
    several = [PROMPT, "a cat", "a red car"]
    fill(built, SAMPLING, several, tmp_path, 4, size_px=SIZE, provenance={})
    for i, asked in enumerate([*several, PROMPT]):
        assert (tmp_path / f"drawn-0000{i}.txt").read_text() == f"{asked}\n"
        document = json.loads((tmp_path / f"drawn-0000{i}.json").read_text())
        assert (document["prompt"], document["seed"]) == (asked, 5 + i)
    alone = fill(built, SAMPLING, [PROMPT], tmp_path / "alone", 1, size_px=SIZE, provenance={})
    assert alone.generated == 1
    assert np.abs(pixels(tmp_path / "drawn-00000.png") - pixels(tmp_path / "alone" / "drawn-00000.png")).max() <= 1


def test_what_is_half_there_is_drawn_anew(built, tmp_path):
    fill(built, SAMPLING, [PROMPT], tmp_path / "a", 3, size_px=SIZE, provenance={})
    expected = pixels(tmp_path / "a" / "drawn-00001.png")
    broken = tmp_path / "a" / "drawn-00001.png"
    broken.write_bytes(broken.read_bytes()[:-9])
    (tmp_path / "a" / "drawn-00002.json").unlink()
    assert fill(built, SAMPLING, [PROMPT], tmp_path / "a", 3, size_px=SIZE, provenance={}) == Filled(
        kept=1, generated=2, missing=0
    )
    assert np.abs(pixels(broken) - expected).max() <= 1


def test_it_stops_between_batches_and_keeps_what_is_drawn(built, tmp_path):
    asked = iter([False, True])
    found = fill(built, SAMPLING, [PROMPT], tmp_path, 5, size_px=SIZE, provenance={}, stop=lambda: next(asked))
    assert found == Filled(kept=0, generated=2, missing=3)
    assert fill(built, SAMPLING, [PROMPT], tmp_path, 5, size_px=SIZE, provenance={}) == Filled(
        kept=2, generated=3, missing=0
    )
    wanted = [generate.ImageRequest(i, Prompt(PROMPT), 5 + i, SIZE, SAMPLING.guidance_scale) for i in range(5)]
    for drawn in generate.generate_batch(built, SAMPLING, wanted):
        found_px = pixels(tmp_path / f"drawn-0000{drawn.request.number}.png")
        assert np.abs(found_px - drawn.pixels_HWC).max() <= 1
