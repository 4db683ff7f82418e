"""The masked loss against its closed forms, for every objective whose elements have errors of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from losses import loss_of
from pydantic import ValidationError

from daguerre import plugins
from daguerre.objectives import autoencoder, contrastive, eps, masks
from daguerre.objectives.settings import MaskSettings
from daguerre.objectives.wrapper import WrapperSettings
from daguerre.types import LossTerms

KEYS = np.array([[number, 0, 0] for number in range(6)], dtype=np.int64)
SHAPE = (4, 3, 5)
FACTOR = 8
WEIGHTINGS = ["none", "min_snr", "soft_min_snr", "debiased", "p2", "adaptive"]
KINDS = {name: plugins.find("objectives", name).Settings for name in plugins.names("objectives")}
# Losses around diffusion may need a teacher: test_wrappers.py has their masks.
ELEMENTWISE = [
    name for name, kind in KINDS.items() if not issubclass(kind, WrapperSettings) and "mask" not in kind().unused()
]


def images(levels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks [B, 1, 24, 40] uint8 of levels [B, 1, 3, 5] of clean samples, block by block."""
    return {"mask": levels.repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3).to(torch.uint8)}


def loss(name: str, mask, levels=None, weighting: str = "none", named_images=None) -> LossTerms:
    """Of an untrained net, at the draws of `KEYS`; `levels` are those of the masks."""
    module = plugins.find("objectives", name)
    own = {"mask": mask} | ({} if weighting == "none" else {"weighting": {"name": weighting}})
    objective = module.build(module.Settings(**own))
    x0 = torch.randn(len(KEYS), *SHAPE, generator=torch.Generator().manual_seed(0))
    draws = objective.draws(7, KEYS, SHAPE).tensors
    if levels is not None or named_images is not None:
        draws |= objective.elements.draws(named_images or images(levels), SHAPE)

    def net(x, c_noise, cond):
        y = 0.3 * x + 0.1 * x.roll(1, 3)
        return autoencoder.Reconstructed(y, {}) if name == "autoencoder" else y

    return loss_of(objective, net, x0, {}, draws)


def level(value: int) -> torch.Tensor:
    return torch.full((len(KEYS), 1, *SHAPE[1:]), value)


def halves() -> torch.Tensor:
    """The left 2 of 5 columns count."""
    return torch.where(torch.arange(5) < 2, 255, 0).expand(len(KEYS), 1, 3, 5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_mask_that_is_all_white_is_none_to_the_bit(name, weighting, normalise):
    if name == "autoencoder" and weighting != "none":
        pytest.skip("it has no noise levels")
    plain = loss(name, None, weighting=weighting)
    white = loss(name, {"normalise": normalise, "outside_weight": 0.3}, level(255), weighting)
    assert torch.equal(plain.loss_B, white.loss_B)
    for part in ("raw_loss_B", "log_snr_B", "quantile_B"):
        assert getattr(plain, part) is getattr(white, part) is None or torch.equal(
            getattr(plain, part), getattr(white, part)
        )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_black_mask_leaves_the_outside_weight(name):
    plain = loss(name, None).loss_B
    for outside in (0.0, 0.1, 0.25):
        torch.testing.assert_close(loss(name, {"outside_weight": outside}, level(0)).loss_B, outside * plain)
    normalised = loss(name, {"outside_weight": 0.25, "normalise": True}, level(0)).loss_B
    torch.testing.assert_close(normalised, plain, rtol=1e-5, atol=0)
    nothing = loss(name, {"outside_weight": 0.0, "normalise": True}, level(0)).loss_B
    assert nothing.tolist() == [0.0] * len(KEYS)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_half_mask_counts_its_half(name):
    plain = loss(name, None).loss_B
    inside, outside = (loss(name, {"outside_weight": 0.0}, m).loss_B for m in (halves(), 255 - halves()))
    torch.testing.assert_close(inside + outside, plain)
    assert not torch.allclose(inside, 0.4 * plain)
    torch.testing.assert_close(loss(name, {"outside_weight": 0.1}, halves()).loss_B, inside + 0.1 * outside)
    normalised = loss(name, {"outside_weight": 0.0, "normalise": True}, halves()).loss_B
    torch.testing.assert_close(normalised, inside / 0.4)
    usual = loss(name, {"normalise": True}, halves()).loss_B  # outside_weight is .1
    torch.testing.assert_close(usual, (inside + 0.1 * outside) / (0.4 + 0.1 * 0.6))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights_of_noise_levels_multiply_what_the_mask_leaves(weighting):
    plain, raw = loss("v", None, weighting=weighting).loss_B, loss("v", None).loss_B
    masked, raw_masked = (loss("v", {}, halves(), of).loss_B for of in (weighting, "none"))
    torch.testing.assert_close(masked / raw_masked, plain / raw)


def test_adaptive_weights_observe_the_masked_loss():
    terms = loss("eps", {"outside_weight": 0.2}, level(0), "adaptive")
    torch.testing.assert_close(terms.raw_loss_B, 0.2 * loss("eps", None).loss_B)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**20))
@hypothesis_settings(max_examples=50, deadline=None)
def test_the_weight_of_an_element_is_the_mean_of_its_block_or_the_outside_weight(tall, wide, factor, seed):
    mask = np.random.default_rng(seed).integers(0, 256, (2, 1, tall * factor, wide * factor), dtype=np.uint8)
    found = masks.Masked(MaskSettings(outside_weight=0.4)).draws({"mask": torch.from_numpy(mask)}, (4, tall, wide))
    (weight,) = found.values()
    blocks = mask.reshape(2, 1, tall, factor, wide, factor).mean((3, 5)) / 255
    assert weight.dtype == torch.float32
    assert weight.shape == (2, 1, tall, wide)
    np.testing.assert_allclose(weight, np.maximum(blocks, 0.4), rtol=1e-6)


def test_a_sample_is_weighed_by_its_own_mask_in_any_batch():
    levels = torch.stack([halves()[0], level(0)[0], level(255)[0], *level(128)[3:]])
    objective = eps.build(eps.Settings(mask={}))
    whole = objective.elements.draws(images(levels), SHAPE)["element_weight"]
    for row in range(len(KEYS)):
        own = objective.elements.draws(images(levels[row : row + 1]), SHAPE)["element_weight"]
        assert torch.equal(own[0], whole[row])
    assert objective.elements.images == ("mask",)
    assert eps.build(eps.Settings()).elements.images == ()


def test_the_gradient_is_that_of_the_weighted_errors():
    objective = eps.build(eps.Settings(mask={"outside_weight": 0.1}))
    x0 = torch.randn(len(KEYS), *SHAPE, generator=torch.Generator().manual_seed(0))
    draws = objective.draws(7, KEYS, SHAPE).tensors
    draws |= objective.elements.draws(images(halves()), SHAPE)
    y = torch.zeros(len(KEYS), *SHAPE, requires_grad=True)
    loss_of(objective, lambda x, c, cond: y, x0, {}, draws).loss_B.sum().backward()
    weight = torch.where(torch.arange(5) < 2, 1.0, 0.1)
    torch.testing.assert_close(y.grad, -2 * weight * draws["noise"] / np.prod(SHAPE))


def test_the_kl_of_an_autoencoder_knows_no_mask():
    objective = autoencoder.build(autoencoder.Settings(mask={"outside_weight": 0.0}, kl_weight=2.0))
    x0 = torch.randn(len(KEYS), *SHAPE)
    draws = objective.elements.draws(images(level(0)), SHAPE)
    kl_B = torch.arange(6.0)
    terms = loss_of(objective, lambda x, c, cond: autoencoder.Reconstructed(x + 1, {"kl": kl_B}), x0, {}, draws)
    torch.testing.assert_close(terms.loss_B, 2.0 * kl_B)


def test_what_cannot_be_masked_says_so():
    with pytest.raises(ValidationError, match="whole images are compared"):
        contrastive.Settings(mask={})
    assert "mask" not in contrastive.Settings().model_dump()
    for bad in (1.0, -0.1, 2):
        with pytest.raises(ValidationError, match="outside_weight"):
            MaskSettings(outside_weight=bad)  # with 1 all would count alike
    assert "mask" not in eps.Settings().model_dump()
    assert eps.Settings(mask={}).model_dump()["mask"] == {"outside_weight": 0.1, "normalise": False}
