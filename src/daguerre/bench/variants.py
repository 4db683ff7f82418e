"""A variant of a recipe that can be timed: what `train` builds and moves, without folder, loader and checkpoints.

The update is the run's own (training/step.py) around the run's own parts, optimizer, averages and clipping.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from daguerre.assembly import recorded
from daguerre.assembly.batch_sizes import BatchSizes, batch_sizes, check_uncut_batches
from daguerre.assembly.parts import Components, begin, build, outline
from daguerre.assembly.roles import in_training
from daguerre.bench import inputs as bench_inputs
from daguerre.bench import random_model
from daguerre.bench.inputs import Inputs
from daguerre.bench.options import Options
from daguerre.config.config import Config
from daguerre.models.placement import frozen
from daguerre.run.preflight import check_compiled_code
from daguerre.training import device, oom, step
from daguerre.training.performance import flops
from daguerre.training.settings import TrainingSettings
from daguerre.types import Batch, LossTerms


class Variant(Protocol):
    """Something that is timed in turn with others."""

    samples: int
    """Images of one update."""
    flops_per_sample: float
    """Model FLOPs of one image; 0 where they are not known."""
    compute: torch.dtype
    """Type of the matrix products."""

    def begin(self) -> None:
        """Sets what holds for the whole process: called before its updates when another variant had its own."""

    def step(self) -> None:
        """One update; it need not be done when this returns, but queued on the device."""

    def waited(self) -> float:
        """Seconds that updates have waited for data since the last call."""
        return 0.0

    def close(self) -> None:
        """Ends workers; the variant is not used any more."""


@dataclass(frozen=True)
class SyntheticParts(Components):
    """Components whose loss is that of a benchmark's inputs."""

    inputs: Inputs

    @classmethod
    def around(cls, parts: Components, inputs: Inputs) -> "SyntheticParts":
        """Those components with these inputs."""
        return cls(**{field.name: getattr(parts, field.name) for field in fields(parts)}, inputs=inputs)

    def loss(self, net: nn.Module, batch: Batch) -> LossTerms:
        """Loss of one of these micro-batches."""
        return self.inputs.loss(self, net, batch)


class Update(Variant):
    """The training step of a recipe."""

    def __init__(self, config: Config, options: Options, folder: Path) -> None:
        self._stack = ExitStack()
        self._waited = 0.0
        config, self.notice = random_model.at_hand(config, folder)
        self.config = config
        self.parts = built(config, random_weights=bool(self.notice), trains=True)
        sizes = batch_sizes(config)
        check_uncut_batches(config, sizes, self.parts.objective, self.parts.net)
        self.samples, self.compute = sizes.whole, self.parts.numerics.compute
        self.flops_per_sample = step_flops(config, self.parts)
        self._inputs = self._prepared(options, sizes)
        self.state = begin(config, self.parts)
        self.parts = in_training(self.parts, self.state)
        self.state.recorder = recorded.recorder(config, self.parts)
        self.state.net.train()
        self._uncompared = bool(config.training.compile)

    def _prepared(self, options: Options, sizes: BatchSizes) -> Inputs:
        if options.inputs == "loader":
            return bench_inputs.loaded(self.config, self.parts, sizes, self._stack)
        if options.inputs == "pixels":
            return bench_inputs.pixels(self.config, self.parts, sizes)
        ring = bench_inputs.encoded_ring(self.config, self.parts, sizes, bool(self.notice))
        for network in frozen(self.parts.net, self.parts.networks).values():
            if network.role not in ("loss", "assistant"):  # those are called in each update
                network.module.to("meta")  # gives its memory back
        oom.free()
        return bench_inputs.latents(sizes, ring)

    def begin(self) -> None:
        """Sets how float32 is multiplied, and how much memory may be taken."""
        device.prepare(self.config.training, self.parts.device)

    def step(self) -> None:
        start = time.perf_counter()
        micro_batches = next(self._inputs.updates)
        self._waited += time.perf_counter() - start
        if self._uncompared:  # here, as compiling is part of the first updates
            check_compiled_code(SyntheticParts.around(self.parts, self._inputs), micro_batches[0])
            self._uncompared = False
        step.update(
            self.state,
            micro_batches,
            partial(self._inputs.loss, self.parts),
            learning_rate=self.config.optimizer.learning_rate,
            max_grad_norm=self.config.training.max_grad_norm,
            autocast=self.parts.autocast,
        )

    def loss(self) -> float:
        """Mean loss since this was last asked; waits for the device."""
        return self.state.meter.read()["learning/loss"]

    def waited(self) -> float:
        """Seconds in the loader."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        self._stack.close()


class Encode(Variant):
    """The frozen networks on images and captions, which an update without cached latents adds."""

    def __init__(self, config: Config, options: Options, folder: Path) -> None:
        config, self.notice = random_model.at_hand(config, folder)
        self._training = config.training
        self.parts = built(config, random_weights=bool(self.notice))
        self.samples = batch_sizes(config).micro
        self.compute = torch.bfloat16 if config.training.frozen_precision == "bf16" else torch.float32
        shape = bench_inputs.image_shape(config)
        self._batch = device.on(self.parts.device, bench_inputs.random_batch(self.parts, self.samples, shape))
        first = self._batch.rows(0, 1)
        self.flops_per_sample = float(flops.count(lambda: self._encode(first)))

    def _encode(self, batch: Batch) -> object:
        with self.parts.autocast():
            return self.parts.example(batch)

    def begin(self) -> None:
        """Sets how float32 is multiplied, and how much memory may be taken."""
        device.prepare(self._training, self.parts.device)

    def step(self) -> None:
        self._encode(self._batch)


KINDS: dict[str, Callable[[Config, Options, Path], Variant]] = {"step": Update, "encode": Encode}
"""Variants by `part`."""


def built(config: Config, random_weights: bool, trains: bool = False) -> Components:
    """The parts of a run. Random weights are initialized on their device: billions of them take long on a CPU."""
    init_device = device.choose_device(config.training.device) if random_weights else None
    return build(config, init_device=init_device, trains=trains)


def step_flops(config: Config, parts: Components) -> float:
    """Model FLOPs of one image in an update: forward and backward pass of what is trained, counted without computing.

    How it is computed (recomputation, kernels) does not count: the training section is left at its defaults for a CPU,
    whichever device is at hand, as what a GPU has of its own is of no use without memory.
    """
    training = TrainingSettings.model_validate(
        {"duration": config.training.duration, "global_batch_size": 1, "device": "cpu"}
    )
    bare = outline(config.model_copy(update={"training": training}))
    batch = bench_inputs.random_batch(parts, 1, bench_inputs.image_shape(config))
    example = parts.example(device.on(parts.device, batch)).map(lambda rows: rows.to("meta"))
    bare.net.train()
    # The student with other weights takes as many as the student's own forward pass, and none backward.
    others = dict.fromkeys(bare.objective.needs.networks, torch.no_grad()(bare.net.forward))
    bare = replace(bare, others={**bare.others, **others})
    return float(flops.count(lambda: bare.loss_of(bare.net, example).loss_B.sum().backward()))
