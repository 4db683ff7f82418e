"""The most memory that tensors take in an update that is really computed, as torch's allocator counts it.

Beside what operations return, this has what kernels take for themselves through the allocator, which a count of tensors
cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from daguerre.assembly.parts import Components, begin, build
from daguerre.config.config import Config
from daguerre.data.loading.collate import absent, largest_reference
from daguerre.data.plan.buckets import buckets
from daguerre.training import step
from daguerre.types import IMAGE, Batch


def batch(config: Config, parts: Components, samples: int) -> Batch:
    bucket = max(buckets(config.data), key=lambda each: each.area_px)
    keys = np.zeros((samples, 3), dtype=np.int64)
    pixels = torch.zeros(samples, 3, bucket.height_px, bucket.width_px, dtype=torch.uint8)
    images = {IMAGE: pixels} | absent(
        parts.images, samples, bucket, largest_reference(parts.images, config.data, bucket)
    )
    names = ["an image of something " * 25] * samples
    sizes = np.full((samples, 6), bucket.height_px, dtype=np.int32)
    made = Batch(keys, images, names, torch.ones(samples), names, sizes)
    return replace(made, draws=parts.draws(made))


def measured(config: Config, samples: int, micro_batches: int = 1) -> int:
    """Bytes at the fullest moment of the third update."""
    parts = build(config, trains=True)
    state = begin(config, parts)
    state.net.train()
    given = [batch(config, parts, samples)] * micro_batches

    def update() -> None:
        rate, norm = config.optimizer.learning_rate, config.training.max_grad_norm
        step.update(state, given, parts.loss, learning_rate=rate, max_grad_norm=norm, autocast=parts.autocast)

    for _ in range(2):
        update()
    networks = [parts.net, *parts.family.components.values()]
    held = [*(t for m in networks for t in [*m.parameters(), *m.buffers()])]
    held += [*state.optimizer.tensors().values(), *(t for some in state.ema.tensors().values() for t in some.values())]
    held += [*given[0].images.values(), *given[0].draws.values()]
    return storages(held) + peak(update)


def peak(act: Callable[[], None]) -> int:
    """Most bytes that the allocator gave out at once, beside what it had given before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    now = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory under these tensors, each piece once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())
