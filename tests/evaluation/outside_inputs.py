"""Images and vectors that other codes were given, too: record_outside.py."""

from __future__ import annotations

import numpy as np

from daguerre import keys


def images() -> list[np.ndarray]:
    """Random images [H, W, 3] uint8: smaller than the network's input, as large, and partly larger."""
    sizes = ((64, 64), (299, 299), (350, 200))
    return [_pixels(i, height, width) for i, (height, width) in enumerate(sizes)]


def pair() -> tuple[np.ndarray, np.ndarray]:
    """Two images [48, 40, 3] uint8 that are somewhat alike."""
    first = _pixels(7, 48, 40)
    return first, np.clip(first.astype(int) + _pixels(8, 48, 40) // 4 - 32, 0, 255).astype(np.uint8)


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Two sets of vectors of 24 numbers, [300, 24] and [260, 24] float64, of different distributions."""
    first, second = (keys.normals(0, "vectors", i, count=n * 24).reshape(n, 24) for i, n in enumerate((300, 260)))
    return first.astype(np.float64), second.astype(np.float64) * np.linspace(0.6, 1.4, 24) + 0.2


def _pixels(number: int, height: int, width: int) -> np.ndarray:
    words = keys.words(0, "outside images", number, count=height * width * 3)
    return (words % np.uint64(256)).astype(np.uint8).reshape(height, width, 3)


def vgg_weights() -> dict[str, np.ndarray]:
    """Random weights of LPIPS by published names: `features.N.weight` and `.bias` of VGG16, `linN.model.1.weight`."""
    pool = keys.normals(0, "vgg weights", 0, count=1 << 18)
    found, before, number = {}, 3, 0
    for level, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for _ in range(count):
            scale = np.float32((2 / (9 * before)) ** 0.5)
            found[f"features.{number}.weight"] = np.resize(pool, (width, before, 3, 3)) * scale
            found[f"features.{number}.bias"] = np.resize(pool[number + 1 :], width) * np.float32(0.1)
            before, number = width, number + 2
        found[f"lin{level}.model.1.weight"] = np.abs(np.resize(pool[level:], (1, width, 1, 1)))
        number += 1
    return found
