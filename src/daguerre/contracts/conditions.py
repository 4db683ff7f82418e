"""The contract of every condition: a pure function of an image and of draws."""

import inspect
from typing import Any

import numpy as np
import pytest

from daguerre.conditions.condition import ConditionSettings, Draw, computed, drawing
from daguerre.contracts import contract

SIZES = [(64, 64), (37, 53), (1, 1), (1, 40), (70, 3), (130, 96)]


def scene(height: int, width: int, number: int = 0) -> np.ndarray:
    """[height, width, 3] uint8."""
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    shade = np.stack([x * 255 / width, y * 255 / height, 127 + 100 * np.sin((x + 2 * y) / 9)], axis=2)
    for _ in range(4):
        cy, cx, radius = random.uniform(0, 1, 3) * (height, width, min(height, width) / 3)
        inside = (y - cy) ** 2 + (x - cx) ** 2 < radius**2
        shade[inside] = random.uniform(0, 255, 3)
    shade[:, width // 3 : width // 3 + 2] = 20  # a dark line
    return (shade + random.normal(0, 3, shade.shape)).clip(0, 255).astype(np.uint8)


def draw(seed: int = 3, image: str = "control", key: tuple[int, int, int] = (5, 1, 0)) -> Draw:
    return drawing(seed, image, key)


class ConditionContract(contract.SettingsContract):
    """A condition's promises."""

    kind = "conditions"
    start = ConditionSettings

    def test_its_function_has_the_arguments(self, plugin: Any) -> None:
        assert list(inspect.signature(plugin.apply).parameters) == ["settings", "pixels_HWC", "draw"]

    @pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
    def test_it_is_a_pure_function_of_image_and_draw(self, plugin: Any, given: Any, size: tuple[int, int]) -> None:
        pixels = scene(*size)
        before = pixels.copy()
        pixels.setflags(write=False)
        made = computed(plugin.Settings(**given), pixels, draw())
        assert (made.dtype, made.shape) == (np.uint8, (*size, 4))
        assert {*np.unique(made[:, :, 3])} <= {0, 255}
        assert not made[made[:, :, 3] == 0].any()  # nothing is told of what is unknown
        assert np.array_equal(pixels, before)
        assert np.array_equal(computed(plugin.Settings(**given), pixels, draw()), made)
        assert not np.shares_memory(made, pixels)

    def test_chance_comes_from_the_key_alone(self, plugin: Any, given: Any) -> None:
        pixels = scene(64, 64)
        asked: list[str] = []

        def watched(purpose: str, count: int) -> np.ndarray:
            asked.append(purpose)
            return draw()(purpose, count)

        first = computed(plugin.Settings(**given), pixels, watched)
        others = [draw(seed=4), draw(image="control_2"), draw(key=(6, 1, 0)), draw(key=(5, 2, 0)), draw(key=(5, 1, 1))]
        same = [np.array_equal(first, computed(plugin.Settings(**given), pixels, other)) for other in others]
        assert same == [not asked] * len(others)
