"""Noise by key: offset and pyramid noise, the perturbation of the input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quick_cases import chosen
from torch.nn.functional import interpolate

from daguerre import keys as keyed
from daguerre.objectives.noise import noise, perturbation
from daguerre.objectives.settings import NoiseSettings

KEYS = np.array([[i, i % 3, 0] for i in range(400)], dtype=np.int64)


def test_noise_is_the_keyed_normal_numbers():
    got = noise(NoiseSettings(), 3, KEYS[:5], (4, 2, 3))
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), keyed.batch_normals(3, "noise", KEYS[:5], (4, 2, 3)))


def test_offset_is_one_number_a_sample_and_channel():
    plain = noise(NoiseSettings(), 3, KEYS, (2, 3, 3))
    added = (noise(NoiseSettings(offset=0.1), 3, KEYS, (2, 3, 3)) - plain).numpy()
    per_channel = added.mean((2, 3))
    np.testing.assert_allclose(added, np.broadcast_to(per_channel[:, :, None, None], added.shape), atol=1e-6)
    assert abs(per_channel.std() - 0.1) < 0.01
    assert abs(np.corrcoef(per_channel.T)[0, 1]) < 0.15
    expected = 0.1 * keyed.batch_normals(3, "noise/offset", KEYS, (2,))
    np.testing.assert_allclose(per_channel, expected, atol=1e-6)


def test_offset_per_sample_is_one_number_for_all_channels():
    settings = NoiseSettings(offset=0.1, offset_per="sample")
    added = (noise(settings, 3, KEYS, (2, 3, 3)) - noise(NoiseSettings(), 3, KEYS, (2, 3, 3))).numpy()
    expected = 0.1 * keyed.batch_normals(3, "noise/offset", KEYS, (1, 1, 1))
    np.testing.assert_allclose(added, np.broadcast_to(expected, added.shape), atol=1e-6)


def test_pyramid_is_the_sum_of_coarser_grids_at_unit_variance():
    """Stable Cascade's formula by torch's own nearest resize: 0.75^i of grids of sides / 2^i up to 16."""
    keys, shape = KEYS[:6], (2, 64, 32)
    total, power = torch.from_numpy(keyed.batch_normals(3, "noise", keys, shape)), 1.0
    for level in range(1, 6):
        coarse = torch.from_numpy(keyed.batch_normals(3, f"noise/pyramid/{level}", keys, (2, 64 >> level, 32 >> level)))
        total, power = total + 0.75**level * interpolate(coarse, size=(64, 32)), power + 0.75 ** (2 * level)
    torch.testing.assert_close(noise(NoiseSettings(pyramid=0.75), 3, keys, shape), total / power**0.5)


@pytest.mark.parametrize(
    ("shape", "size"),
    chosen([((1, 7, 5), 16), ((3, 1, 4), 16), ((1, 32, 48), 4), ((1, 8, 8), 1)], lambda shape, size: shape[2] < 48),
)
def test_every_number_of_a_pyramid_has_unit_variance(shape: tuple[int, ...], size: int):
    keys = np.array([[i, 0, 0] for i in range(3000)], dtype=np.int64)
    drawn = noise(NoiseSettings(pyramid=0.75, pyramid_size=size), 3, keys, shape)
    assert drawn.shape == (3000, *shape)
    assert drawn.dtype == torch.float32
    assert (drawn.var(0) - 1).abs().max() < 0.2  # seven standard deviations of a variance of 3000
    assert torch.equal(drawn[5:6], noise(NoiseSettings(pyramid=0.75, pyramid_size=size), 3, keys[5:6], shape))


def test_grids_above_the_size_are_left_out():
    small, all_ = (NoiseSettings(pyramid=0.75, pyramid_size=size) for size in (2, 8))
    plain = noise(NoiseSettings(), 3, KEYS[:2], (1, 16, 16))
    blocks = (noise(small, 3, KEYS[:2], (1, 16, 16)) * (1 + 0.75**6 + 0.75**8) ** 0.5 - plain)[0, 0]
    assert (blocks[:8, :8] - blocks[0, 0]).abs().max() < 1e-5
    assert not torch.equal(noise(small, 3, KEYS[:2], (1, 16, 16)), noise(all_, 3, KEYS[:2], (1, 16, 16)))


def test_perturbation_is_its_own_keyed_numbers():
    got = perturbation(NoiseSettings(input_perturbation=0.1), 3, KEYS[:5], (4, 2, 3)).numpy()
    np.testing.assert_allclose(got, 0.1 * keyed.batch_normals(3, "noise/perturbation", KEYS[:5], (4, 2, 3)), rtol=1e-6)
