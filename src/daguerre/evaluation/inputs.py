"""Inputs of metrics, of a model or of a folder of images: computed in blocks, kept in a folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daguerre.checkpoint.atomic import locked
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError
from daguerre.evaluation import images as image_sets
from daguerre.evaluation import reference
from daguerre.evaluation.blocks import Blocks
from daguerre.evaluation.images import ImageSet, SourceImages
from daguerre.evaluation.metric import Draw, FeatureNetwork, Incomplete, Redraw, TextNetwork
from daguerre.evaluation.networks import clip, dinov2, inception, lpips
from daguerre.evaluation.networks.place import NetworkPlace
from daguerre.evaluation.reconstructions import Reconstructions
from daguerre.evaluation.reference import Statistics
from daguerre.evaluation.settings import CompareSettings, EvaluationSettings
from daguerre.generation.jobs import WHOLE, TaskShard

NETWORKS: dict[str, Callable[..., Any]] = {
    "inception": inception.load,
    "clip": clip.load,
    "dinov2": dinov2.load,
    "lpips": lpips.load,
}
_NEEDED = {
    "inception": f"{inception.PUBLISHED} (or `random`)",
    "clip": clip.PUBLISHED,
    "dinov2": dinov2.PUBLISHED,
    "lpips": lpips.PUBLISHED,
}


@dataclass(frozen=True)
class MeasuredInputs:
    """Inputs of metrics from images by sample id."""

    settings: EvaluationSettings
    folder: Path
    part: TaskShard
    device: torch.device
    images: ImageSet
    source: SourceSettings | None = None
    drawing: Draw | None = None
    losing: Callable[[Sequence[float], int], dict[str, np.ndarray]] | None = None
    against: SourceImages | None = None
    redraw: Redraw | None = None
    checking: bool = False
    """Computes nothing, so that what is missing is reported before hours of work."""

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.folder, self.images.total, self.part)

    def network(self, name: str, **options: Any) -> Any:
        return network(self.settings, name, self.device, **options)

    def features(self, network: FeatureNetwork) -> np.ndarray:
        self._check_only()
        return self.blocks.array(f"features-{network.label}", lambda ids: features_of(network, self.images, ids))

    def text_features(self, network: TextNetwork) -> np.ndarray:
        # Quick beside images, so one process does all of them: the one that finds the images complete.
        self._check_only()
        texts, blocks = self.images.texts, Blocks(self.folder, self.images.total, WHOLE)
        with locked(self.folder / ".texts.lock"):
            return blocks.array(
                f"texts-{network.label}", lambda ids: network.compute_texts(texts[ids.start : ids.stop])
            )

    def reference(self, network: FeatureNetwork) -> Statistics:
        if self.settings.reference is None:
            raise UserError(
                "no reference given: metrics that compare two sets of images need reference=FILE, statistics that "
                "`daguerre reference DATA out=FILE` writes (docs/evaluate.md)",
                code="missing",
                setting="reference",
            )
        if self.images.total < 2:
            raise UserError(
                "there is 1 image to measure, and statistics of a set need two or more: a run that holds out more "
                "samples (data.held_out_fraction), or prompts_file=FILE with more prompts",
                code="empty",
                setting="num_images",
            )
        return reference.of_file(self.settings.reference, network.label)

    def pairs(self, name: str, score: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
        if isinstance(self.images, Reconstructions):
            again = self.images
            self._check_only()
            return self.blocks.array(
                name, lambda ids: np.array([*map(score, again.of(ids), again.originals(ids))], dtype=np.float64)
            )
        if self.against is None or not isinstance(self.images, SourceImages):
            raise UserError(
                f"metric {name} compares images one by one: evaluate the run of an autoencoder, or a folder of images "
                "and give against=FOLDER with those that they should equal, under the same names",
                code="missing",
                setting="against",
            )
        self._check_only()
        images, others = self.images, self.against
        partners = image_sets.matched(images, others)

        def scores(ids: range) -> np.ndarray:
            return np.array([self._score(score, images, others, i, partners[i]) for i in ids], dtype=np.float64)

        return self.blocks.array(name, scores)

    def _score(self, score: Any, images: SourceImages, others: SourceImages, i: int, partner: int) -> float:
        (first,), (second,) = images.of(range(i, i + 1)), others.of(range(partner, partner + 1))
        if first.shape != second.shape:
            raise UserError(
                f"{images.names[i]} has {first.shape[1]}x{first.shape[0]} px and its partner "
                f"{second.shape[1]}x{second.shape[0]}: pairs need one size; crop_px=PX cuts both",
                code="conflict",
            )
        return float(score(first, second))

    @property
    def draw(self) -> Draw:
        if self.drawing is None:
            raise UserError("this metric draws images of its own prompts: evaluate a run", code="unsupported")
        self._check_only()
        return self.drawing

    def losses(self, quantiles: Sequence[float], num_samples: int) -> dict[str, np.ndarray]:
        if self.losing is None:
            raise UserError("metric validation_loss needs a run: its weights and its data", code="unsupported")
        self._check_only()
        return self.losing(quantiles, num_samples)

    def _check_only(self) -> None:
        if self.checking:
            raise Incomplete


def features_of(network: FeatureNetwork, images: ImageSet, ids: range) -> np.ndarray:
    """[len(ids), d]: features of a block. UserError with the image for numbers that are not finite: one of them would
    make every number of its metrics NaN."""
    rows = network.compute(images.of(ids))
    odd = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if odd.size:
        i = ids[int(odd[0])]
        name = images.place(i) if isinstance(images, SourceImages) else f"image {i} ({images.texts[i]!r})"
        raise UserError(
            f"{name}: the features of {network.label} are not finite, so its weights are damaged: give other files in "
            "networks",
            code="damaged",
        )
    return rows


def network(settings: EvaluationSettings | CompareSettings, name: str, device: torch.device, **options: Any) -> Any:
    """The network of this name with the weights that the settings name. UserError where they name none."""
    places = {str(key): own for key, own in settings.networks.items()}
    if name not in places:
        raise UserError(
            f"networks.{name}.path is missing: a metric needs {_NEEDED[name]}. Give the place of its weights; nothing "
            "is downloaded by itself (docs/evaluate.md)",
            code="missing",
            setting=f"networks.{name}.path",
        )
    return _opened(name, places[name], device, tuple(sorted(options.items())))


@lru_cache(maxsize=8)
def _opened(name: str, place: NetworkPlace, device: torch.device, options: tuple[tuple[str, Any], ...]) -> Any:
    return NETWORKS[name](place, device, **dict(options))
