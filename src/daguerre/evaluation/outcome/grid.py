"""`daguerre compare`: saved updates of a run at several strengths, and the base; resumed where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from daguerre.assembly.parts import Components
from daguerre.checkpoint.store import Store
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.evaluation import images as image_sets
from daguerre.evaluation import inputs
from daguerre.evaluation.blocks import BLOCK, Blocks
from daguerre.evaluation.evaluate import digest_of
from daguerre.evaluation.formulas.outcome import Features
from daguerre.evaluation.images import GeneratedImages
from daguerre.evaluation.outcome import features, outcome, prompts
from daguerre.evaluation.outcome.features import ModelFeatures
from daguerre.evaluation.outcome.outcome import Cell
from daguerre.evaluation.outcome.prompts import Lists
from daguerre.evaluation.settings import CompareSettings
from daguerre.formatting import counted
from daguerre.generation import load
from daguerre.generation.generate import ImageRequest
from daguerre.generation.jobs import WHOLE
from daguerre.generation.load import Loading, Model
from daguerre.generation.output_dir import Folder
from daguerre.report.outcome import Shown
from daguerre.training import device
from daguerre.training.precision import dtypes

_NETWORKS: dict[str, dict[str, str]] = {"dinov2": {"resize": "pillow_bicubic"}, "clip": {"crop": "shorter_side"}}
"""Feature networks that compare images, the first that is given, and how each reads them."""
_SIDE_BY_SIDE = 8
"""Images of each list that the page has of the base and of the best cell."""
_SHOWN = {"trained": "training captions", "new": "new prompts", "base": "prompts of the base"}


@dataclass
class Grid:
    """A run of an adapter, and the updates and strengths at which it is compared with its base."""

    model: Model
    config: Config
    settings: CompareSettings
    root: Path
    """Folder of the results."""
    stop: Callable[[], bool] = lambda: False
    _loaded: tuple[str, Components] | None = None

    def run(self) -> dict[str, Any]:
        """The document (`outcome.document`), of which the file is written, too. UserError; generate.Stopped for a
        signal, after which the same command goes on."""
        names = self._names
        newest = self._parts(names[-1])
        outcome.check(newest, self.settings.strengths)
        if isinstance(self._network, ModelFeatures):
            features.check(newest)
        folder = self.folder
        if not folder.continues(self._protocol):
            folder.begin(self._protocol)
        with folder.locked(WHOLE):
            total = sum(map(len, self._requests.values())) * len(self._cells)
            print(
                f"compares {total:,} images of {counted(len(names), 'saved update')}, at each strength, and of the base"
            )
            pictures = self.lists.pictures
            of_pictures = self._features("pictures", pictures, pictures.total)
            first, *others = self._cells
            base = self._of(*first)
            cells = {Cell(_step(name), strength): self._of(name, strength) for name, strength in others}
            more = {"run": self.model.name, "images": self.settings.num_images, **self._protocol}
            ordered = {cell: cells[cell] for cell in sorted(cells)}
            found = outcome.document(self.lists, self._network, of_pictures, base, ordered, more)
            outcome.write(folder.path, found)
        return found

    def shown(self, best: Mapping[str, Any] | None) -> list[Shown]:
        """The first image of each list by each set of weights; by the base and the `best` one ({"step", "strength"}, or
        the only one) of several different prompts of each list."""
        base, *every = self._cells
        chosen = [one for one in every if best and (_step(one[0]), one[1]) == (best["step"], best["strength"])]
        whole = [base, *(chosen or every[: len(every) == 1])]
        return [
            Shown(which, 0 if strength == 0 else _step(name), strength, Image.fromarray(pixels_HWC), number)
            for name, strength in self._cells
            for which, own in self._images(name, strength).items()
            for number, pixels_HWC in _different(own, self.lists.by_name[which].texts, (name, strength) in whole)
        ]

    @property
    def folder(self) -> Folder:
        """Of this protocol; further updates and strengths are added to it."""
        return Folder(self.root / f"compare-{digest_of(self._protocol)}")

    @cached_property
    def lists(self) -> Lists:
        """Prompts and pictures."""
        own = self.settings
        return prompts.lists(self.config, own.num_images, own.source, own.prompts_file, own.base_prompts_file)

    @cached_property
    def _requests(self) -> dict[str, list[ImageRequest]]:
        return self.lists.requests(self.config)

    @cached_property
    def _names(self) -> list[str]:
        """Checkpoints, oldest first."""
        assert self.model.run is not None
        there = {_step(name): name for name in Store(self.model.run.checkpoints).names()}
        wanted = self.settings.updates
        if wanted and (absent := sorted({*wanted} - there.keys())):
            kept = ", ".join(map(str, sorted(there))) or "none yet"
            raise UserError(
                f"updates: {absent[0]} is not saved; there are: {kept}. checkpoint.keep says how many a run keeps",
                code="unknown",
                setting="updates",
            )
        if not there:
            raise UserError(f"{self.model.name} has no checkpoint yet: wait for its first save", code="missing")
        return [there[step] for step in sorted(wanted or there)]

    @cached_property
    def _cells(self) -> list[tuple[str, float]]:
        """Checkpoints and strengths in the order in which they draw: the base, which has strength 0, and behind it the
        newest update, whose weights are loaded then."""
        each = [(name, strength) for name in self._names[::-1] for strength in self.settings.strengths]
        return [(self._names[-1], 0.0), *each]

    @cached_property
    def _protocol(self) -> dict[str, Any]:
        sampling, training = self.config.sampling, self.config.training
        lists = {name: image_sets.digest_of_requests(own) for name, own in self._requests.items()}
        return {
            "lists": lists,
            "source": self.lists.source,
            "pictures_sha256": self.lists.pictures.digest,
            "sampling": sampling.model_dump(mode="json", exclude={"prompts", "prompts_file", "num_images"}),
            "precision": str(dtypes.choose(training, device.choose_device(training.device))),
            "weights": self._loading(self._names[-1]).provenance["weights"],
        }

    def _loading(self, name: str) -> Loading:
        assert self.model.run is not None
        return load.of_checkpoint(load.newest(self.model.run, name), self.model.run, self.config, self.settings.weights)

    def _parts(self, name: str) -> Components:
        """The model with the weights of a checkpoint; one is held at a time."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # before another is read
            loading = self._loading(name)
            print(f"comparing {loading.description}")
            self._loaded = name, loading.parts()
        return self._loaded[1]

    def _images(self, name: str, strength: float) -> dict[str, GeneratedImages]:
        provenance = {**self._loading(name).provenance, "adapter_strength": strength}
        # The base draws the same whatever was trained.
        cell = "base" if strength == 0 else f"{name}-strength-{strength:g}"
        weights = "the base" if strength == 0 else f"update {_step(name):,} at strength {strength:g}"
        part = self._cells.index((name, strength)) + 1
        return {
            which: GeneratedImages(
                self.folder.path / "images" / f"{cell}-{which}",
                own,
                self.config.sampling,
                WHOLE,
                lambda: self._parts(name),
                {} if strength == 0 else provenance,
                self.stop,
                f"drawing for the comparison, part {part} of {len(self._cells)}: {weights}, {_SHOWN[which]}",
            )
            for which, own in self._requests.items()
        }

    def _of(self, name: str, strength: float) -> Features:
        """Features of what one set of weights draws."""
        found = []
        for which, own in self._images(name, strength).items():
            with self._parts(name).attached.at(strength):
                own.make()
            found.append(self._features(f"{own.folder.name}", own, len(self._requests[which])))
        return Features(*found)

    def _features(self, name: str, images: Any, total: int) -> np.ndarray:
        blocks, network = Blocks(self.folder.path, total, WHOLE), self._network
        return blocks.array(f"features-{network.label}-{name}", lambda ids: inputs.features_of(network, images, ids))

    @cached_property
    def _network(self) -> Any:
        where = device.choose_device(self.config.training.device)
        for name, options in _NETWORKS.items():
            if name in self.settings.networks:
                return inputs.network(self.settings, name, where, **options)
        return ModelFeatures(lambda: self._parts(self._loaded[0] if self._loaded else self._names[-1]))


def _different(images: GeneratedImages, texts: Sequence[str], several: bool) -> Iterator[tuple[int, np.ndarray]]:
    """The first image, or the first of each of several prompts, with their numbers."""
    first = {text: number for number, text in reversed([*enumerate(texts)])}
    for number in sorted(first.values())[: _SIDE_BY_SIDE if several else 1]:
        yield number, images.of(range(number, number + 1))[number % BLOCK]


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])
