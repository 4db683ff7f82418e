"""Scaling and statistics of latents: their numbers, their inverse, and how an export carries them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from pydantic import ValidationError

from daguerre import keys as keyed
from daguerre import plugins
from daguerre.errors import UserError
from daguerre.families import sd
from daguerre.models.components import ComponentLoader
from daguerre.models.parts import kl, vae
from daguerre.models.parts.vae import VAE
from daguerre.models.settings import ScaledSettings
from daguerre.samplers.settings import SamplingSettings

MEAN, STD = [-1.6574, 1.886, -1.383, 2.5155], [8.4927, 5.9022, 6.5498, 5.2299]
PLAYGROUND = {"scaling_factor": 0.5, "latents_mean": MEAN, "latents_std": STD}
SMALL = {"scaling_factor": 0.8, "latents_mean": [0.3, -0.2, 0.1, 0.5], "latents_std": [0.7, 1.3, 0.9, 2.0]}
KEYS = np.array([[1, 0, 0], [2, 0, 0]], dtype=np.int64)


def load(folder: Path, **values: object) -> VAE:
    place = str(folder / "vae")
    return vae.load(ComponentLoader(sd.Settings(pretrained_model_name_or_path="quickstart", vae=place, **values), 0))


def pixels() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16), dtype=np.uint8))


def encoded(made: VAE) -> torch.Tensor:
    with torch.no_grad():
        return made.latents(made.encode(pixels()), made.random_inputs(5, KEYS, (3, 16, 16)))


def decoded(made: VAE, x0: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return made.decode(tiny_models.latents(x0)).numpy().astype(int)


def latents() -> torch.Tensor:
    return torch.from_numpy(keyed.batch_normals(0, "test", KEYS, (4, 8, 8)))


@pytest.mark.parametrize("values", [PLAYGROUND, SMALL])
def test_latents_are_centred_and_scaled_by_channel(tiny_sd: Path, values: dict):
    """z = (x - mean) scale / std of the same draw from the posterior."""
    plain = encoded(load(tiny_sd)) / 0.6
    mean, std = (torch.tensor(values[f"latents_{name}"]).reshape(4, 1, 1) for name in ("mean", "std"))
    expected = (plain - mean) * values["scaling_factor"] / std
    torch.testing.assert_close(encoded(load(tiny_sd, **values)), expected, rtol=1e-5, atol=1e-6)


def test_numbers_of_playgrounds_statistics(tiny_sd: Path):
    """A raw latent of 0 and one of 10 in each channel: (x - mean) / 2 / std."""
    made = load(tiny_sd, sample_posterior=False, **PLAYGROUND)
    with torch.no_grad():
        made.net.quant_conv.weight.zero_()
    for raw, expected in (
        (0.0, [0.0975779, -0.1597709, 0.1055757, -0.2404922]),
        (10.0, [0.6863188, 0.6873708, 0.8689578, 0.7155491]),
    ):
        with torch.no_grad():
            made.net.quant_conv.bias.fill_(raw)
        np.testing.assert_allclose(encoded(made)[0, :, 3, 4], expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("values", [PLAYGROUND, SMALL])
def test_decoding_is_the_inverse_as_in_sdxls_pipeline(tiny_sd: Path, values: dict):
    made = load(tiny_sd, **values)
    mean, std = (torch.tensor(values[f"latents_{name}"]).view(1, 4, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        raw = latents() * std / values["scaling_factor"] + mean
        expected = VaeImageProcessor().postprocess(made.net.decode(raw).sample, output_type="np") * 255
    assert np.abs(decoded(made, latents()) - expected.round()).max() <= 1


def shifted(tiny_sd: Path, folder: Path) -> Path:
    """An autoencoder with a shift_factor, as FLUX's and SD3's have one."""
    net = AutoencoderKL.from_pretrained(tiny_sd / "vae", low_cpu_mem_usage=False)
    net.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    net.save_pretrained(folder / "vae")
    return folder


def test_a_shift_is_that_of_fluxs_pipelines(tiny_sd: Path, tmp_path: Path):
    """FluxImg2ImgPipeline's arithmetic on the way in, FluxPipeline's on the way out."""
    made, plain = load(shifted(tiny_sd, tmp_path)), load(tiny_sd, scaling_factor=1.0)
    assert torch.equal(encoded(made), (encoded(plain) - 0.1159) * 0.3611)
    with torch.no_grad():
        raw = latents() / 0.3611 + 0.1159
        expected = VaeImageProcessor().postprocess(made.net.decode(raw).sample, output_type="np") * 255
    assert np.abs(decoded(made, latents()) - expected.round()).max() <= 1


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_shift_moves_into_the_weights_of_pipelines_that_know_none(kind: str, tiny_sd: Path, tmp_path: Path):
    base = tiny_sd if kind == "sd" else tiny_models.write_sdxl(tmp_path / "base")
    module, vae_place = plugins.find("families", kind), str(shifted(tiny_sd, tmp_path) / "vae")
    family = module.load(module.Settings(pretrained_model_name_or_path=str(base), vae=vae_place), seed=1)
    objective = plugins.find("objectives", "eps")
    family.export(tmp_path / "out", objective.build(objective.Settings()), SamplingSettings())
    config = json.loads((tmp_path / "out" / "vae" / "config.json").read_text())
    assert config["shift_factor"] is None
    again = module.load(module.Settings(pretrained_model_name_or_path=str(tmp_path / "out")), seed=1)
    torch.testing.assert_close(encoded(again.images), encoded(family.images), rtol=1e-4, atol=1e-5)
    assert np.abs(decoded(again.images, latents()) - decoded(family.images, latents())).max() <= 1


def test_a_shift_and_statistics_are_refused_together(tiny_sd: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"has shift_factor 0\.1159"):
        load(shifted(tiny_sd, tmp_path), **SMALL)


def test_a_scaling_factor_of_its_own(tiny_sd: Path):
    torch.testing.assert_close(encoded(load(tiny_sd, scaling_factor=0.3)), encoded(load(tiny_sd)) / 2)


def test_the_config_says_them_and_is_read_back(tiny_sd: Path, tmp_path: Path):
    """diffusers' own keys, so that SDXL's pipeline applies them; no tensor is added to the weights."""
    made = load(tiny_sd, **SMALL)
    made.net.save_pretrained(tmp_path / "vae")
    written = json.loads((tmp_path / "vae" / "config.json").read_text())
    assert {name: written[name] for name in SMALL} == SMALL
    plain = AutoencoderKL.from_pretrained(tiny_sd / "vae", low_cpu_mem_usage=False)
    assert made.net.state_dict().keys() == plain.state_dict().keys()
    again = load(tmp_path)
    assert torch.equal(encoded(again), encoded(made))
    off = load(tmp_path, scaling_factor=0.6, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    assert torch.equal(encoded(off), encoded(load(tiny_sd)))


@pytest.mark.parametrize("has_convs", [True, False])
def test_the_statistics_move_into_the_weights_where_a_pipeline_has_none(tiny_sd: Path, tmp_path: Path, has_convs: bool):
    """The folded autoencoder, saved and told nothing, is the same function both ways."""
    plain = AutoencoderKL.from_pretrained(tiny_sd / "vae", low_cpu_mem_usage=False)
    numbers = {name: value for name, value in plain.config.items() if not name.startswith("_")}
    made_of = AutoencoderKL(**numbers | {"use_quant_conv": has_convs, "use_post_quant_conv": has_convs})
    made_of.save_pretrained(tmp_path / "vae")
    made = load(tmp_path, **SMALL)
    kl.folded(made.net).save_pretrained(tmp_path / "folded" / "vae")
    folded = load(tmp_path / "folded")
    assert made.has_statistics
    assert not folded.has_statistics
    torch.testing.assert_close(encoded(folded), encoded(made), rtol=1e-4, atol=1e-5)
    assert np.abs(decoded(folded, latents()) - decoded(made, latents())).max() <= 1


def test_an_export_draws_the_same_in_the_stock_pipeline(tiny_sd: Path, tmp_path: Path):
    family = sd.load(sd.Settings(pretrained_model_name_or_path=str(tiny_sd), **SMALL), seed=1)
    module, folder = plugins.find("objectives", "edm"), tmp_path / "pipeline"
    family.export(folder, module.build(module.Settings()), SamplingSettings())
    pipe = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    with torch.no_grad():
        theirs = pipe.vae.decode(latents() / pipe.vae.config.scaling_factor).sample
    theirs = VaeImageProcessor().postprocess(theirs, output_type="np") * 255
    assert np.abs(theirs.round() - family.decode(tiny_models.latents(latents())).astype(int)).max() <= 1
    again = sd.load(sd.Settings(pretrained_model_name_or_path=str(folder)), seed=1)
    torch.testing.assert_close(encoded(again.images), encoded(family.images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"latents_mean": MEAN}, "latents_mean is given without latents_std"),
        ({"latents_std": STD}, "latents_std is given without latents_mean"),
        ({"latents_mean": MEAN, "latents_std": STD[:3]}, "4 numbers and latents_std 3"),
        ({"latents_mean": MEAN, "latents_std": [1.0, 0.0, 1.0, 1.0]}, "every number must be above 0"),
        ({"scaling_factor": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict, said: str):
    with pytest.raises(ValidationError, match=said):
        ScaledSettings(family="sd", **values)


def test_statistics_must_fit_the_autoencoder(tiny_sd: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"latents_mean must have one number for each of the 4 latent channels.*got 2"):
        load(tiny_sd, latents_mean=[0.0, 0.0], latents_std=[1.0, 1.0])
    folder = shutil.copytree(tiny_sd, tmp_path / "copy")
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_mean": MEAN}))
    with pytest.raises(ValueError, match=r"latents_std must have one number.*got none"):
        load(folder)
