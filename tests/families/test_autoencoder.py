"""The autoencoder in training: its draw, its KL, its export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from losses import loss_of
from safetensors.torch import load_file

from daguerre.errors import UserError
from daguerre.families import autoencoder
from daguerre.models.family import Family
from daguerre.objectives import autoencoder as objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch

NUMBERS = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 3,
    "norm_num_groups": 4,
    "sample_size": 16,
}
KEYS = np.array([[3, 0, 0], [4, 0, 0]], dtype=np.int64)


@pytest.fixture
def family() -> Family:
    return autoencoder.load(autoencoder.Settings(vae=NUMBERS, export_half=True), seed=5)


def batch(family: Family) -> Batch:
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = family.random_inputs(0, KEYS, (3, 16, 16))
    return Batch(KEYS, {"image": pixels}, ["", ""], torch.ones(2), ["a", "b"], np.zeros((2, 6)), draws)


def test_weights_follow_from_the_seed(family: Family) -> None:
    again = autoencoder.load(autoencoder.Settings(vae=NUMBERS), seed=5)
    other = autoencoder.load(autoencoder.Settings(vae=NUMBERS), seed=6)
    name = "vae.encoder.conv_in.weight"
    assert torch.equal(family.net.state_dict()[name], again.net.state_dict()[name])
    assert not torch.equal(family.net.state_dict()[name], other.net.state_dict()[name])


def test_the_loss_is_error_and_kl_of_one_draw(family: Family) -> None:
    x, cond = family.encode(batch(family))
    settings = objective.Settings(kl_weight=0.5, square_weight=2.0)
    terms = loss_of(objective.build(settings), family.net, x, cond, {})
    posterior = family.net.vae.encode(x).latent_dist
    again = family.net.vae.decode(posterior.mean + posterior.std * cond["posterior"]).sample
    kl = posterior.kl() / posterior.mean[0].numel()
    expected = (again - x).abs().mean((1, 2, 3)) + 2.0 * (again - x).square().mean((1, 2, 3)) + 0.5 * kl
    torch.testing.assert_close(terms.loss_B, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(terms.metrics["kl"], kl.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_without_its_kl_latents_stray_further_from_a_normal_law() -> None:
    """After 8 updates at a rate at which both move."""
    found = {}
    for weight in (0.1, 0.0):
        own = autoencoder.load(autoencoder.Settings(vae=NUMBERS), seed=5)
        x, cond = own.encode(batch(own))
        made = objective.build(objective.Settings(kl_weight=weight))
        optimizer = torch.optim.Adam(own.net.parameters(), 3e-3)
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(made, own.net, x, cond, {}).loss_B.mean().backward()
            optimizer.step()
        with torch.no_grad():
            found[weight] = float(loss_of(made, own.net, x, cond, {}).metrics["kl"].mean())
    assert found[0.0] > 2 * found[0.1], found


@pytest.mark.long
def test_the_export_gives_latents_of_unit_variance(family: Family, tmp_path: Path) -> None:
    x, cond = family.encode(batch(family))
    family.net.train()
    for _ in range(800):
        with torch.no_grad():
            family.net(x, x, cond)
    made = objective.build(objective.Settings())
    assert family.export(tmp_path / "out", made, SamplingSettings()) == []
    vae = AutoencoderKL.from_pretrained(tmp_path / "out" / "vae", low_cpu_mem_usage=False)
    stored = load_file(tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert next(family.net.parameters()).dtype == torch.float32
    latents = vae.encode(x).latent_dist.mean * vae.config.scaling_factor
    assert latents.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.02)


def test_evaluation_leaves_the_measured_spread(family: Family) -> None:
    x, cond = family.encode(batch(family))
    family.net.eval()
    family.net(x, x, cond)
    assert family.net.mean_square.item() == 1.0


def test_bad_numbers_and_sizes_are_refused(family: Family) -> None:
    with pytest.raises(UserError, match=r"model\.vae: AutoencoderKL has no latent_chanels"):
        autoencoder.load(autoencoder.Settings(vae={"latent_chanels": 4}), seed=0)
    with pytest.raises(UserError, match="multiple of 2"):
        family.latent_shape((3, 15, 16))
