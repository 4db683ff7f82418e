"""A frozen autoencoder that loses what the data show is told before the first update, with its number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from daguerre.assembly.parts import build, load
from daguerre.config import config as configs
from daguerre.data.dataset import open_dataset
from daguerre.run import reconstruction


@pytest.fixture(autouse=True)
def few_samples_are_looked_at() -> None:
    """As many as in a run."""


def parts_and_data(*given):
    config = configs.load("quickstart", ["loader.num_workers=0", *given]).config
    parts = build(config, torch.device("cpu"), networks=load(config))
    return config, parts, open_dataset(config.data, "train")


@pytest.fixture
def photos(tmp_path):
    """Smooth colours with texture, as photos have and eight flat colours do not."""
    rng = np.random.default_rng(0)
    for i in range(6):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize(
            (96, 80), Image.Resampling.BICUBIC
        )
        noise = rng.normal(0, 25, (80, 96, 3))
        pixels = np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"photo {i}")
    return tmp_path


def test_the_quickstarts_own_images_are_made_again_well():
    config, parts, data = parts_and_data()
    assert reconstruction.notices(config, parts, data) == []
    found = list(reconstruction._psnr_db(parts, data))
    assert len(found) == 8
    assert np.mean(found) > 30


def test_photos_behind_the_quickstarts_autoencoder_are_told(photos):
    config, parts, data = parts_and_data("data.source=folder", f"data.path={photos}", "data.held_out_fraction=0")
    (line,) = reconstruction.notices(config, parts, data)
    measured = float(line.partition("PSNR of ")[2].partition(" dB")[0])
    assert 8 < measured < reconstruction.POOR_DB
    assert "daguerre train quickstart_vae" in line
    assert "model.vae=runs/my_vae/pipeline" in line
    assert "longer" in line
    assert "model.vae=autoencoder" in line


def test_the_small_autoencoder_for_any_pictures_says_its_quality(tmp_path):
    """Emoji-like drawings that it was never trained on; the number is in the lines of the start."""
    for i in range(6):
        picture = Image.new("RGB", (128, 128), (250, 240, 220))
        draw = ImageDraw.Draw(picture)
        draw.ellipse((20 + i, 30, 100, 110 - 3 * i), fill=(30 * i, 90, 160), outline=(20, 20, 20), width=3)
        draw.polygon([(10, 120), (64, 60 + 5 * i), (118, 120)], fill=(120, 200 - 20 * i, 60))
        picture.save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"drawing {i}")
    own = ["data.source=folder", f"data.path={tmp_path}", "data.held_out_fraction=0"]
    quality = {}
    for given in ([], ["model.vae=autoencoder"]):
        (line,) = reconstruction.notices(*parts_and_data(*own, *given))
        quality[*given] = float(line.partition("PSNR of ")[2].partition(" dB")[0])
    assert "Take one" not in line
    assert quality["model.vae=autoencoder",] > quality[()] + 6


def test_an_adapter_is_not_sent_to_another_autoencoder(photos):
    """Its frozen UNet draws the latents of its own autoencoder."""
    config = configs.load("quickstart", ["loader.num_workers=0", "data.source=folder", f"data.path={photos}"]).config
    parts = build(config, torch.device("cpu"), networks=load(config))
    data = open_dataset(config.data, "train")
    lora = configs.load(
        "sd15_lora", ["model.pretrained_model_name_or_path=quickstart", "data.path=x", "data.source=folder"]
    )
    (line,) = reconstruction.notices(config.model_copy(update={"adapters": lora.config.adapters}), parts, data)
    assert "quickstart_vae" not in line
    assert "take a base that knows such images" in line


def test_a_family_that_trains_its_autoencoder_is_left_alone():
    config = configs.load("quickstart_vae").config
    parts = build(config, torch.device("cpu"), networks=load(config))
    assert reconstruction.notices(config, parts, open_dataset(config.data, "train")) == []


def test_full_fine_tuning_keeps_the_autoencoder_of_its_base(photos):
    """Its denoiser was trained on that one's latents, of which another autoencoder has other numbers and meanings."""
    config, parts, data = parts_and_data("data.source=folder", f"data.path={photos}", "data.held_out_fraction=0")
    tuned = config.model_copy(update={"model": config.model.model_copy(update={"unet": "base"})})
    (line,) = reconstruction.notices(tuned, parts, data)
    assert "quickstart_vae" not in line
    assert "take a base that knows such images" in line
