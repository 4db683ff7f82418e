"""Noise by key, and offset noise."""

from __future__ import annotations

import numpy as np
import torch

from daguerre import keys as keyed
from daguerre.objectives.noise import noise
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
