"""The metric of emoji: the nearest real picture, the colour of what was held out, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_feature_networks
import torch
from emoji_fonts import colour_font

from daguerre.data.sources.emoji import Emoji, Settings
from daguerre.errors import UserError
from daguerre.evaluation.inputs import network
from daguerre.evaluation.metric import DrawnInputs, FeatureNetwork
from daguerre.evaluation.metrics import emoji
from daguerre.evaluation.settings import EvaluationSettings


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    font = colour_font(tmp_path_factory.mktemp("font") / "few.ttf")
    return Settings(font=str(font), resolution=32, checked_prompts=50)


def values(source: Settings, drawn: Callable[[Emoji, np.ndarray], np.ndarray]) -> dict[str, float]:
    real = {**emoji.trained_on(source), **emoji.trained_on(source, "held_out")}
    by_name = {one.name: drawn(one, picture) for one, picture in real.items()}

    def draw(texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
        return [by_name[text] for text in texts]

    (result,) = emoji.evaluate(emoji.Settings(), DrawnInputs(source, draw)).values()
    assert result.count == len(real)
    return {row.name: row.value for row in result.rows}


def test_the_pictures_of_the_font_are_all_found(source: Settings) -> None:
    found = values(source, lambda one, picture: picture)
    assert set(found.values()) == {1.0}
    assert {*found} == {"known", "known_top5", "held_out", "held_out_top5", "held_out_colour", "copies"}


def test_a_little_noise_is_no_copy_but_is_found(source: Settings) -> None:
    found = values(source, lambda one, picture: np.clip(picture.astype(int) - 12, 0, 255).astype(np.uint8))
    assert (found["known"], found["copies"]) == (1.0, 0.0)


def test_one_picture_for_all_is_right_once(source: Settings) -> None:
    known = emoji.trained_on(source)
    first = next(iter(known.values()))
    found = values(source, lambda one, picture: first)
    assert found["known"] == pytest.approx(1 / len(known))
    assert (found["held_out"], found["copies"]) == (0.0, 1.0)


def test_a_blank_picture_has_no_colour(source: Settings) -> None:
    assert values(source, lambda one, picture: np.full_like(picture, 255))["held_out_colour"] == 0.0


def test_what_is_held_out_is_compared_with_its_own_cell(source: Settings) -> None:
    real = [*emoji.trained_on(source), *emoji.trained_on(source, "held_out")]
    names = {one.name: [real[number].name for number in emoji.other_colours(one, real)] for one in real}
    assert names["yellow circle"] == ["red circle", "yellow circle"]
    assert names["red apple"] == []
    tones = [name for name in names if name.startswith("waving hand, ")]
    assert len(tones) == 5
    assert {*names[tones[0]]} == {*tones}


@pytest.mark.parametrize(("rank", "most", "share"), [(1, 1, 1.0), (2, 1, 0.0), (5, 5, 1.0), (6, 5, 0.0)])
def test_the_share_among_the_nearest(rank: int, most: int, share: float) -> None:
    away = np.arange(8, dtype=np.float32)[None]
    assert emoji.among(away, [rank - 1], most) == share


def test_distances_are_roots_of_mean_squares() -> None:
    images = [np.full((48, 48, 3), 10, np.uint8), np.full((64, 64, 3), 40, np.uint8)]
    np.testing.assert_allclose(emoji.distances(emoji.small(images), emoji.small(images)), [[0, 30], [30, 0]])


def test_the_colour_is_that_of_what_is_shown() -> None:
    image = np.full((32, 32, 3), 250, np.uint8)
    image[8:20, 8:20] = (200, 30, 90)
    image[8:10, 8:10] = (0, 0, 0)
    assert emoji.colour(image, "#ffffff").tolist() == [200, 30, 90]


def test_features_of_a_network_are_compared_by_their_direction(source: Settings, tmp_path: Path) -> None:
    """With real weights' own classes, through what `evaluate` hands a metric: one and the same picture is nearest."""
    place = str(tiny_feature_networks.dinov2(tmp_path / "dinov2"))
    known, held_out = (emoji.trained_on(source, split) for split in ("train", "held_out"))
    pictures = {one.name: picture for one, picture in {**known, **held_out}.items()}

    class Evaluated(DrawnInputs):
        def network(self, name: str, **options: Any) -> FeatureNetwork:
            settings = EvaluationSettings.model_validate({"networks": {name: place}})
            return network(settings, name, torch.device("cpu"), **options)

    inputs = Evaluated(source, lambda texts, references=(): [pictures[text] for text in texts])
    ((name, result),) = emoji.evaluate(emoji.Settings(by="dinov2"), inputs).items()
    assert name.startswith("emoji-dinov2-")
    assert {row.name: (row.value, row.must) for row in result.rows}["known"] == (1.0, None)
    found = emoji.features([*pictures.values()], inputs.network("dinov2", resize="pillow_bicubic"))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


def test_other_sources_are_refused() -> None:
    with pytest.raises(UserError, match="not trained on it"):
        emoji.evaluate(emoji.Settings(), DrawnInputs(None, lambda texts, references=(): []))
