"""Inputs of a benchmark's updates: random latents, random images, or the recipe's own data.

Random numbers are on the device before the clock starts, in a ring of a few micro-batches. The recipe's data comes
through its loader, so that waiting for it is real.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.dataset import open_dataset
from daguerre.data.loading import loader
from daguerre.data.loading.collate import absent
from daguerre.data.plan.buckets import Bucket, buckets
from daguerre.data.skipped import Skips
from daguerre.errors import UserError
from daguerre.objectives.objective import Example
from daguerre.training import device
from daguerre.types import IMAGE, Batch, Cond, LossTerms

RING = 4
"""Micro-batches that are used in turn."""
_ENCODED_AT_ONCE = 8
_WORDS = ["a", "small", "red", "green", "castle", "forest", "river", "portrait", "drawing", "of", "with", "under"]


@dataclass(frozen=True)
class Encoded:
    """A micro-batch whose clean samples and conditioning are there already."""

    batch: Batch
    """Its features are the tensors of `example`, in their order."""
    example: Example[Any]

    @property
    def x0_BCHW(self) -> Tensor:
        """Clean samples of the images that are trained on."""
        return self.example.clean[IMAGE]

    @property
    def cond(self) -> Cond:
        """Their conditioning."""
        return self.example.cond[IMAGE]


@dataclass(frozen=True)
class Inputs:
    """Updates of a benchmark."""

    updates: Iterator[list[Batch]]
    """The micro-batches of one update after the other, without end."""
    loss: Callable[[Components, nn.Module, Batch], LossTerms]
    """Loss of one of these micro-batches, by the parts of the update: a loss may read the student's first weights."""


def latents(sizes: BatchSizes, ring: Sequence[Encoded]) -> Inputs:
    """Updates from encoded micro-batches, as a cache of latents would give them, with text features."""
    like = ring[0].example

    def loss(parts: Components, net: nn.Module, batch: Batch) -> LossTerms:
        rows = iter(batch.features.values())
        return parts.loss_of(net, like.map(lambda _: next(rows)))

    return Inputs(_in_turn([each.batch for each in ring], sizes), loss)


def pixels(config: Config, parts: Components, sizes: BatchSizes) -> Inputs:
    """Updates from random images and captions, which the frozen networks encode in each update."""
    ring = [device.on(parts.device, batch) for batch in _ring(config, parts, sizes)]
    return Inputs(_in_turn(ring, sizes), Components.loss)


def loaded(config: Config, parts: Components, sizes: BatchSizes, stack: ExitStack) -> Inputs:
    """Updates from the recipe's data from its beginning, by its loader; the stack ends the loader's workers. UserError
    next to a cache."""
    if config.cache.path is not None:
        raise UserError(
            "inputs=loader reads images and encodes them: remove cache.path, or measure updates on a cache by "
            "inputs=latents (the default)",
            code="conflict",
            setting="cache.path",
        )
    dataset = open_dataset(config.data, "train", parts.images, parts.columns)
    loading = loader.Loading(
        dataset, config.loader, config.seed, sizes.whole, sizes.micro, parts.draws, parts.family.truncated,
        Skips(config.data.max_skipped), pinned=parts.device.type == "cuda", images=parts.images,
        columns=parts.columns, layout=parts.family.layout,
    )  # fmt: skip
    loading.skips.begin()
    batches = stack.enter_context(loading.updates(0))
    return Inputs(([device.on(parts.device, batch) for batch in update] for update in batches), Components.loss)


def _in_turn(ring: list[Batch], sizes: BatchSizes) -> Iterator[list[Batch]]:
    batches = cycle(ring)
    while True:
        yield list(islice(batches, sizes.accumulation))


def encoded_ring(config: Config, parts: Components, sizes: BatchSizes, random_weights: bool) -> list[Encoded]:
    """Encoded micro-batches. The frozen networks are not needed afterwards.

    Clean samples are those of random images; for networks with random weights, whose latents are next to nothing,
    numbers from a normal distribution.
    """
    return [_encoded(parts, batch, random_weights) for batch in _ring(config, parts, sizes)]


def image_shape(config: Config) -> Bucket:
    """The largest bucket of the recipe: it decides time and memory."""
    return max(buckets(config.data), key=lambda bucket: bucket.area_px)


def _ring(config: Config, parts: Components, sizes: BatchSizes) -> list[Batch]:
    """Micro-batches on the CPU. As many different ones as one update has, up to RING."""
    shape = image_shape(config)
    return [
        random_batch(parts, sizes.micro, shape, first=i * sizes.micro) for i in range(max(2, min(RING, sizes.whole)))
    ]


def random_batch(parts: Components, size: int, shape: Bucket, first: int = 0) -> Batch:
    """Images of noise with captions of a few words, and the random numbers for them, on the CPU."""
    chance = np.random.default_rng(first)
    pixels_BHWC = chance.integers(0, 256, (size, shape.height_px, shape.width_px, 3), dtype=np.uint8)
    # Control images are empty: not every picture is one that a ControlNet reads.
    images = {IMAGE: torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)} | absent(parts.images, size, shape)
    texts = [" ".join(chance.choice(_WORDS, 12)) for _ in range(size)]
    batch = Batch(
        keys=np.array([[first + i, 0, 0] for i in range(size)], np.int64),
        images=images,
        # As a loader gives them: what cannot be computed together is no micro-batch.
        texts=texts if parts.family.layout is None else texts[:1] * size,
        valid_B=torch.ones(size),
        names=[f"random {first + i}" for i in range(size)],
        sizes=np.array([[shape.height_px, shape.width_px, 0, 0, shape.height_px, shape.width_px]] * size, np.int32),
        columns={name: torch.zeros(size) for name in parts.columns},
    )
    return replace(batch, draws=parts.draws(batch))


def _encoded(parts: Components, batch: Batch, random_weights: bool) -> Encoded:
    """Encoded a few samples at a time: images take more memory than latents."""
    whole = device.on(parts.device, batch)
    made = [
        parts.example(whole.rows(start, start + _ENCODED_AT_ONCE))
        for start in range(0, len(batch.names), _ENCODED_AT_ONCE)
    ]
    clean = {name: torch.cat([part.clean[name] for part in made]) for name in made[0].clean}
    if random_weights and clean[IMAGE].shape != batch.pixels_BCHW.shape:
        chance = torch.Generator().manual_seed(0)
        clean = {name: torch.randn(rows.shape, generator=chance).to(rows) for name, rows in clean.items()}
    cond, null = (
        {name: {key: torch.cat([part[name][key] for part in each]) for key in own} for name, own in each[0].items()}
        for each in ([part.cond for part in made], [part.null for part in made])
    )
    example = Example(clean, cond, parts.objective.drawn.of(whole.draws), whole.columns, null)
    features: dict[str, Tensor] = {}
    example.map(lambda rows: features.setdefault(f"example.{len(features)}", rows))
    return Encoded(replace(whole, images={}, features=features), example)
