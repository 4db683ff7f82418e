"""Peak memory of a training step, found by computing one on fake tensors: shapes without memory.

It is the code of a real step on the real networks: encoding, forward and backward pass, clipping, optimizer, averages.
Effects of a mesh (sharded gradients, gathered parameters, buckets) are added where they arise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from daguerre import plugins
from daguerre.assembly.parts import Components, begin
from daguerre.assembly.roles import in_training
from daguerre.caching import cache
from daguerre.config.config import Config
from daguerre.data.loading.collate import absent, largest_reference
from daguerre.data.plan.buckets import Bucket, buckets
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.parallelize import blocks
from daguerre.distributed.sharding_rules import own_region
from daguerre.memory.static import MemoryCount, ResidentTensor
from daguerre.models.network import block_classes
from daguerre.models.placement import frozen_modules
from daguerre.training import step
from daguerre.training.memory_tracker import Live, use_cuda_types
from daguerre.training.passes import backward
from daguerre.training.performance.work import NOTHING, Watched, Work
from daguerre.training.precision import quantized
from daguerre.training.state import TrainState
from daguerre.types import IMAGE, OF_IMAGES, OF_TEXTS, Batch, wait, waits

_STAND_IN = "adamw"
"""For an optimizer whose updates cannot be computed without memory."""
CAPTION = "an image of something " * 25
"""Longer than encoders read, unless they read in windows: then captions are counted as of one window."""
_MOST = 4096
"""Larger micro-batches are not looked for."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a step, on the fullest device, in bytes."""

    micro: int
    """Samples of a micro-batch."""
    held: int
    """Stays between updates, without gradients."""
    passes: int
    """In addition, while losses and gradients are computed."""
    update: int
    """In addition, while weights are moved."""
    gathered: int
    """Whole parameters that fsdp has gathered for a moment; counted in `passes`."""
    pass_work: Work = NOTHING
    """What a device is given to do for a micro-batch."""
    update_work: Work = NOTHING
    """The same, while weights are moved."""
    reference: Bucket | None = None
    """The size that each reference image was counted in."""
    kept: int = 0
    """Bytes of `passes` besides gradients that stay while weights are moved, as those of recorded passes do."""
    sent: int = 0
    """Bytes of blocks that wait which are copied to the device for a micro-batch, while others compute."""

    @property
    def whole(self) -> int:
        """All tensors at once."""
        return self.held + max(self.passes, self.kept + self.update)


class SimulatedStep:
    """Steps of one recipe, computed without memory."""

    def __init__(
        self,
        config: Config,
        parts: Components,
        count: MemoryCount,
        accumulates: bool,
        on_gpu: bool,
        say: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`say` gets a line for each thing that takes its time."""
        self._config, self._parts, self._count = config, parts, count
        self._accumulates, self._say = accumulates, say
        self._sends_ahead = False
        self._mode, self._live = FakeTensorMode(allow_non_fake_inputs=True), Live()
        self._reference = largest_reference(parts.images, config.data, largest_bucket(config))
        self._given = _sample(config, parts, self._reference)
        self._gathered = gathered_bytes(parts, count, config.mesh.shard_frozen)
        units = blocks(parts.net, block_classes(parts.networks.values()))
        inside = {id(p) for unit in units for p in unit.parameters()}
        apart = {name for name, p in parts.net.named_parameters() if p.requires_grad and id(p) not in inside}
        self._together = apart if count.mesh.degree("fsdp") > 1 else set()
        if on_gpu:
            for module in (parts.net, *frozen_modules(parts.net, parts.networks).values()):
                use_cuda_types(module)
        with self._mode, self._live:
            without_memory(parts)
            self._given = _from_cache(config, parts, self._given)
            self._state = _begun(config, parts)
            self._parts = in_training(parts, self._state)
            if parts.objective.needs.null:
                text = parts.objective.needs.null_caption
                parts.null.rows = parts.family.encode_null(text)  # once, before the first pass
        self._held = {each.placed.name: each for each in count.trained}

    def peak(self, micro: int) -> Peak:
        """The peak of a step with micro-batches of this size."""
        self._say(f"computing a step with micro-batches of {micro}")
        with self._mode, self._live:
            if self._parts.swaps and not self._sends_ahead:
                # From the second pass on it is known which block comes next, and trained ones have their moments.
                self._every_pass(micro)
                self._sends_ahead = True
            for swap in self._parts.swaps.values():
                swap.drop()
            before = self._sent
            with Watched() as passing:
                passes = self._every_pass(micro)
            with Watched() as moving:
                update = 0 if self._config.optimizer.in_backward else self._update()
        gradients = self._count.bytes_of("gradients")
        held, kept = self._count.whole - gradients, 0
        if self._config.training.capture:
            shapes = len(buckets(self._config.data))
            # A shape that comes later is computed before it is recorded, while recordings hold their memory.
            passes = passes if shapes == 1 else 2 * passes + (shapes - 1) * gradients
            kept = passes - gradients
        return Peak(
            micro, held, passes + self._gathered, update, self._gathered, passing.work, moving.work, self._reference,
            kept, self._sent - before,
        )  # fmt: skip

    @property
    def _sent(self) -> int:
        """Bytes of blocks that were copied to the device until now."""
        return sum(swap.sent_bytes for swap in self._parts.swaps.values())

    def _every_pass(self, micro: int) -> int:
        return self._moving_passes(micro) if self._config.optimizer.in_backward else self._passes(micro)

    def _passes(self, micro: int) -> int:
        """Most bytes in addition to what is held, in the last micro-batch of an update."""
        state, live = self._state, self._live
        base = live.now
        live.reset()
        with sharded_gradients(state.trained, self._held, self._count.mesh, self._accumulates, self._together):
            state.net.train()
            batch = self._batch(micro)
            backward(state.net, [batch], self._parts.loss, micro, self._parts.autocast, state.see, state.scaler)
        return live.peak - base

    def _moving_passes(self, micro: int) -> int:
        """Most bytes in addition to what is held, in an update that is made in the backward pass."""
        state, live, settings = self._state, self._live, self._config.optimizer
        base = live.now
        live.reset()
        state.net.train()
        step.move_in_backward(
            state, self._batch(micro), self._parts.loss, micro, learning_rate=0.0,
            max_grad_norm=self._config.training.max_grad_norm, autocast=self._parts.autocast,
        )  # fmt: skip
        taken = getattr(plugins.find("optimizers", settings.name), "update_bytes", None)
        shapes = [(name, tuple(each.placed.shape)) for name, each in self._held.items()]
        return live.peak - base + (max(taken(settings, *each) for each in shapes) if taken else 0)

    def _update(self) -> int:
        """Most bytes in addition to what is held, while weights are moved; what a device holds of the parameters
        decides."""
        state, live = self._state, self._live
        own = self._count.bytes_of("gradients")
        taken = getattr(plugins.find("optimizers", self._config.optimizer.name), "update_bytes", None)
        if taken is not None:
            shapes = ((name, own_region(each.placed, self._count.mesh, 0)[1]) for name, each in self._held.items())
            return own + sum(taken(self._config.optimizer, name, shape) for name, shape in shapes)
        base = live.now
        live.reset()
        for p in state.parameters:
            p.grad = torch.zeros_like(p)
        whole = live.now - base
        _, factor = step.clip(state.parameters, self._config.training.max_grad_norm, state.scaler.inverse())
        state.move(0.0, torch.ones((), dtype=torch.bool), factor)
        return (live.peak - base) * own // whole

    def _batch(self, micro: int) -> Batch:
        """Samples of the largest bucket, shapes alone."""
        first = [0] * micro
        return self._given.map(
            lambda tensor: torch.empty((micro, *tensor.shape[1:]), dtype=tensor.dtype),
            host=lambda value: value * micro if isinstance(value, list) else value[first],
        )


@contextmanager
def sharded_gradients(
    trained: Mapping[str, Tensor], held: Mapping[str, ResidentTensor], mesh: Mesh, accumulates: bool, together: set[str]
) -> Iterator[None]:
    """Within the context a backward pass leaves of each gradient the part that a device keeps; afterwards nothing.

    `together` names parameters outside the blocks of a network that fsdp splits: their gradients wait for each other.
    """
    kept: list[Tensor] = []
    in_place = accumulates and mesh.degree("fsdp") == 1

    def keep(numbers: int, like: Tensor) -> None:
        kept.append(torch.empty(numbers, dtype=like.dtype))

    def made(p: Tensor, own: int, waiting: int) -> None:
        p.grad = None
        keep(waiting, p)
        if not in_place:
            keep(own, p)
        if mesh.degree("data") > 1:
            keep(own, p)  # its place in a buffer that is summed over the data axis

    hooks = []
    for name, p in trained.items():
        own = held[name].numbers
        whole = held[name].all_numbers // (1 if held[name].placed.tensor is None else mesh.degree("tensor"))
        if accumulates:  # FSDP2 keeps whole gradients until the last micro-batch
            keep(own if in_place else whole, p)
        waiting = whole if name in together and not accumulates else 0
        hooks.append(p.register_post_accumulate_grad_hook(partial(made, own=own, waiting=waiting)))
    try:
        yield
        for name in together:
            keep(held[name].all_numbers, trained[name])  # and are then put into one buffer
    finally:
        for hook in hooks:
            hook.remove()


def gathered_bytes(parts: Components, count: MemoryCount, shard_frozen: bool) -> int:
    """Bytes of the parameters that fsdp gathers: of each network those outside its blocks, which stay gathered for a
    step; and of the current block and the next one, the parameters and the buffer that they came in."""
    mesh = count.mesh
    if mesh.degree("fsdp") == 1:
        return 0
    split = {each.placed.name for each in count.held if each.placed.tensor is not None}
    still = frozen_modules(parts.net, parts.networks) if shard_frozen else {}
    networks = {"": parts.net} | {name: network for name, network in still.items() if name not in parts.family.uneven}
    classes = block_classes(parts.networks.values())
    outside, largest = 0, 0
    for component, network in networks.items():
        prefix = f"{component}." if component else ""
        sizes = {
            id(p): p.numel() * p.element_size() // (mesh.degree("tensor") if f"{prefix}{name}" in split else 1)
            for name, p in network.named_parameters()
        }
        sizes |= {id(codes): codes.nbytes for codes in quantized.tensors(network)}
        units = blocks(network, classes)
        own = [[id(t) for t in (*unit.parameters(), *quantized.tensors(unit))] for unit in units]
        inside = {key for keys in own for key in keys}
        outside += sum(size for key, size in sizes.items() if key not in inside)
        largest = max([largest, *(sum(sizes[key] for key in keys) for keys in own)])
    return outside + 4 * largest


def largest_bucket(config: Config) -> Bucket:
    return max(buckets(config.data), key=lambda bucket: bucket.area_px)


def images_at_once(config: Config, micro: int) -> int:
    """Samples of the largest bucket in a micro-batch of `micro`: its pixels may be limited."""
    limit = config.loader.max_pixels
    return micro if limit is None else max(1, min(micro, limit // largest_bucket(config).area_px))


def _sample(config: Config, parts: Components, reference: Bucket | None) -> Batch:
    """One sample of the largest bucket, with as many reference images of this size as one may have; only shapes
    matter."""
    bucket = largest_bucket(config)
    pixels = torch.empty((1, 3, bucket.height_px, bucket.width_px), dtype=torch.uint8)
    texts = ["" if getattr(config.model, "long_prompts", False) else CAPTION]
    keys, sizes = np.zeros((1, 3), np.int64), np.array([[0, 0, 0, 0, bucket.height_px, bucket.width_px]], np.int32)
    images = {IMAGE: pixels} | absent(parts.images, 1, bucket, reference)
    one = Batch(keys, images, texts, torch.ones(1), texts, sizes)
    one = replace(one, columns={name: torch.zeros(1) for name in parts.columns})
    return replace(one, draws=parts.draws(one))


@torch.no_grad()
def _from_cache(config: Config, parts: Components, given: Batch) -> Batch:
    """The sample with features in place of what a cache has encoded of it."""
    family, halves, features = parts.family, cache.expected(config, parts.family), dict[str, Tensor]()
    if "images" in halves:
        features |= {OF_IMAGES + name: rows for name, rows in family.images.encode(given.pixels_BCHW).items()}
    if "texts" in halves and family.text is not None:
        made = family.text.features(family.text.tokens(given.texts))
        features |= {OF_TEXTS + name: rows for name, rows in made.items()}
    images = {name: tensor for name, tensor in given.images.items() if name != IMAGE or "images" not in halves}
    return replace(given, images=images, features=features)


def without_memory(parts: Components) -> None:
    """Replaces parameters and buffers by fake tensors on the CPU, within a mode that makes such."""
    networks = [*parts.family.components.values(), parts.net]
    modules = {id(module): module for network in networks for module in network.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def filled(tensor: Any) -> Any:
        if id(tensor) not in made:
            fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_trained = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (nn.Parameter(fresh, tensor.requires_grad) if is_trained else fresh, tensor)
            if waits(tensor):
                wait(made[id(tensor)][0])
        return made[id(tensor)][0]

    for module in modules.values():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: filled(tensor) for name, tensor in tensors.items() if tensor is not None})


def _begun(config: Config, parts: Components) -> TrainState:
    """The state after an update, with moments."""
    simulated = not hasattr(plugins.find("optimizers", config.optimizer.name), "update_bytes")
    stand_in = plugins.find("optimizers", _STAND_IN).Settings
    settings = config.optimizer if simulated else stand_in(in_backward=config.optimizer.in_backward)
    state = begin(config, parts, optimizer=settings)
    for p in state.parameters:
        if not waits(p):
            p.grad = torch.zeros_like(p)
    state.move(0.0, torch.ones((), dtype=torch.bool), None)
    return state


def largest_that_fits(steps: SimulatedStep, first: Peak, left: Callable[[Peak], float]) -> Peak | None:
    """The largest micro-batch for which bytes are `left`, proved by its own peak; None where one sample has no room.

    A peak is the largest of sums that grow linearly with the batch, so it is convex: past two peaks it lies on their
    line or above, between them on it or below. What does not fit by the line of two that fit need not be simulated.
    """
    fit: list[Peak] = []
    over: list[Peak] = []  # both lists: the nearest to the limit last
    newest = first
    while True:
        (fit if left(newest) >= 0 else over).append(newest)
        below = fit[-1].micro if fit else 0
        above = over[-1].micro if over else _MOST + 1
        most = min(above - 1, _crossing(fit[-2:], left))
        if most <= below:
            return fit[-1] if fit else None
        if fit and over:
            # One sum may be the largest where it fits and another where it does not: both sides close in.
            guess = (_crossing([fit[-1], over[-1]], left) + min(most, _crossing(over[-2:], left)) + 1) // 2
        else:
            by_line = _crossing(fit[-2:] or over[-2:], left)
            guess = by_line if by_line <= _MOST else 2 * below or above // 2
        newest = steps.peak(min(max(guess, below + 1), most))


def _crossing(two: Sequence[Peak], left: Callable[[Peak], float]) -> int:
    """The largest micro-batch that fits by the line of two peaks; more than any where there is no such line."""
    if len(two) < 2 or (left(two[0]) - left(two[1])) * (two[1].micro - two[0].micro) <= 0:
        return _MOST + 1
    one, other = two
    each = (left(one) - left(other)) / (other.micro - one.micro)
    return min(int(other.micro + left(other) // each), _MOST)
