"""The contract of every captioner: captions by field, of each picture its own."""

import inspect
from typing import Any

import numpy as np
import pytest
from PIL import Image

from daguerre.captioning.captioner import CaptionerSettings
from daguerre.contracts import contract


def pictures() -> list[Image.Image]:
    """Pictures as `daguerre caption` gives them: upright, of any size, RGB or RGBA."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    plain = [Image.new("RGB", (32, 20), (200, 20, 20)), Image.fromarray(noise), Image.new("RGB", (1, 1), (0, 0, 255))]
    return [*plain, Image.new("RGBA", (16, 16), (10, 200, 30, 0))]


class CaptionerContract(contract.SettingsContract):
    """A captioner's promises."""

    kind = "captioners"
    start = CaptionerSettings

    @pytest.fixture
    def captioner(self, plugin: Any, given: Any) -> Any:
        """The captioner on the CPU."""
        return plugin.load(plugin.Settings(**given), "cpu")

    def test_load_has_the_arguments(self, plugin: Any) -> None:
        assert list(inspect.signature(plugin.load).parameters) == ["settings", "device"]

    def test_each_picture_has_captions_of_the_same_fields(self, captioner: Any, name: str) -> None:
        found = captioner.captions(pictures())
        assert len(found) == len(pictures())
        for captions in found:
            assert [*captions] == [*found[0]]
            assert next(iter(captions)) == name, "the first field is the usual one, and has the captioner's name"
            assert all(isinstance(text, str) and "\n" not in text for text in captions.values())
        assert [*captioner.captions(pictures()[:1])[0]] == [*found[0]]

    def test_captions_follow_their_pictures(self, captioner: Any) -> None:
        """Nothing is drawn, and neither the place in the list nor the others in it count."""
        found = captioner.captions(pictures())
        assert captioner.captions(pictures()) == found
        assert captioner.captions(pictures()[:1]) == found[:1]
        assert captioner.captions(pictures()[::-1]) == found[::-1]

    def test_pictures_stay_as_they_are(self, captioner: Any) -> None:
        given = pictures()
        captioner.captions(given)
        assert [(each.mode, each.size, each.tobytes()) for each in given] == [
            (each.mode, each.size, each.tobytes()) for each in pictures()
        ]
