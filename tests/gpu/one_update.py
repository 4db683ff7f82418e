"""One update of recipes on a GPU that is not there: python one_update.py LIBRARY < jobs > results, JSON both ways.

A job is {"recipe": NAME, "overrides": [...]}. The project's own loop trains networks of the recipe's numbers, as
`daguerre train` would on an H100: it encodes a batch, computes the loss and its gradients, clips, moves weights,
moments and averages; and it validates the batch. A result is of the second update, as the first one makes what later
ones find, or of the third, which training.capture records: `kernels` (how many of each operator are launched), `work`
(operators with their floating-point operations and bytes, and how often each ran, without the one-launch kernel),
`samples` (of the update), `waits` and `validation_waits` (what the host waits for), `adamw` (how many parameters are
AdamW's), `one_pass` (how many of them the one-launch kernel moves) and `misplaced` (tensors of the optimizer that lie
in memory otherwise than their parameter, as they are made and as a checkpoint gives them back).
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fake_cuda

fake_cuda.load(Path(sys.argv[1]))

import torch  # noqa: E402
import watch as watching  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

PINNED = fake_cuda.pretend()

from daguerre.assembly import parts as build  # noqa: E402
from daguerre.assembly import roles  # noqa: E402
from daguerre.assembly.batch_sizes import batch_sizes  # noqa: E402
from daguerre.assembly.parts import Components  # noqa: E402
from daguerre.bench import inputs  # noqa: E402
from daguerre.config import config as configs  # noqa: E402
from daguerre.data.loading import loader  # noqa: E402
from daguerre.kernels import attention, available  # noqa: E402
from daguerre.training import device as devices  # noqa: E402
from daguerre.training import loop  # noqa: E402
from daguerre.training.optimizers import optimizer  # noqa: E402
from daguerre.training.performance import recording  # noqa: E402
from daguerre.training.performance.recording import Graphs  # noqa: E402
from daguerre.training.performance.work import Watched  # noqa: E402
from daguerre.training.state import TrainState  # noqa: E402
from daguerre.types import Batch, wait, waits  # noqa: E402


class OnePass:
    """Stands for the Triton kernel of AdamW, which takes addresses; counts the parameters that it is given."""

    moved = 0

    def move(self, tensors: Any, rule: Any, skip: Tensor, factor: Tensor | None) -> None:
        self.moved += sum(p.numel() for p in tensors.parameters)
        tensors.step.add_(1.0 - skip.float())


class AsItIs(Graphs):
    """Records on a device that does nothing."""

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None


ONE_PASS = OnePass()
# It would be told that tensors are fake, and spare questions that it asks of real ones.
import_utils.is_fake_tensor = lambda tensor: False
available.installed = lambda: True
available.module = lambda name: {"adamw_ema": ONE_PASS}[name]
optimizer.check_finite = lambda what, tensors: None  # there are no numbers, and asking for each takes long
attention.fastest = lambda question, dtype, device: attention.KERNELS["efficient"]  # nothing can be measured here


def on_host(*given: Any, **named: Any) -> Tensor:
    """Pinned memory of the host, which is real."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(*given, **named).pin_memory()


def on_the_device(networks: list[nn.Module]) -> None:
    """Gives parameters and buffers of networks without memory a place on `cuda`, in place, but for those that wait in
    the host's memory. Shared ones stay shared."""
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            make, place = (on_host, "cpu") if waits(tensor) else (torch.empty_strided, "cuda")
            empty = make(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            if waits(tensor):
                wait(made[id(tensor)])
            kept.append(tensor)
        return made[id(tensor)]

    kept: list[Tensor] = []  # so that no id is given twice
    for network in networks:
        for module in network.modules():
            for own in (module._parameters, module._buffers):
                own.update({name: moved(tensor) for name, tensor in own.items() if tensor is not None})


def misplaced(state: TrainState) -> list[str]:
    """The tensors of the optimizer that have the shape of their parameter and other strides. Weights of 16 bits are
    widened for an update to what is contiguous, and so are their moments."""
    own = (
        (p, name, t)
        for part in state.optimizer.parts
        for p, of in part.optimizer.state.items()
        for name, t in of.items()
    )
    alike = [(p, name, t) for p, name, t in own if isinstance(t, Tensor) and t.shape == p.shape]
    wanted = torch.preserve_format if state.optimizer.rounding is None else torch.contiguous_format
    return [
        f"{name} {tuple(t.shape)}: {t.stride()}, but the weight {p.stride()}"
        for p, name, t in alike
        if t.stride() != torch.empty_like(p, memory_format=wanted).stride()
    ]


class Parts(Components):
    """The same, with the draws of a batch that was made outside of what computes nothing."""

    def draws(self, batch: Batch, quantile: float | None = None) -> Mapping[str, Tensor]:
        return batch.draws


def update(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """The result of one job."""
    config = configs.load(recipe, overrides).config
    parts = build.outline(config)
    sizes, shape = batch_sizes(config), inputs.image_shape(config)
    host = [inputs.random_batch(parts, sizes.micro, shape, first=i * sizes.micro) for i in range(sizes.accumulation)]
    unsent = replace(host[0], draws={name: rows.clone() for name, rows in host[0].draws.items()})
    host = [loader.pinned(batch) for batch in host]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    seen = watching.Watch(fake, PINNED)
    watching.see_constants(seen)
    numbers = loop.LoopConfig(
        total_steps=10**6, learning_rate=1e-5, warmup_steps=0, lr_scheduler=config.lr_scheduler,
        max_grad_norm=config.training.max_grad_norm, max_nonfinite_steps=10, logs=lambda step: False,
    )  # fmt: skip
    parts.numerics.store(parts.net, parts.attached.float32)
    with fake, seen:
        on_the_device([*parts.family.components.values(), parts.net])
        state = build.begin(config, parts)
        parts = roles.in_training(parts, state)
        if config.training.capture:
            state.recorder = recording.Recorder(AsItIs())

        def updates() -> Any:
            while True:
                yield [devices.on(parts.device, batch) for batch in host]

        steps = loop.train(state, updates(), parts.loss, numbers, parts.autocast)
        for _ in range(recording.BEFORE if state.recorder else 1):
            next(steps)  # the first one makes what later ones find: moments, streams
        seen.forget()
        ONE_PASS.moved = 0
        with Watched() as watched:
            next(steps)
        kernels, waits = dict(seen.kernels), dict(seen.waits)
        wrong = misplaced(state)
        state.optimizer.load({name: t.contiguous() for name, t in state.optimizer.tensors().items()})
        wrong += misplaced(state)
        seen.forget()
        with torch.no_grad():
            own = {each.name: getattr(parts, each.name) for each in fields(parts)}
            for _ in Parts(**own).losses_at(unsent, [0.5]):
                pass
        validation_waits = dict(seen.waits)
    return {
        "recipe": recipe,
        "kernels": kernels,
        "work": [[*key, count] for key, count in watched.work.launches.items()],
        "samples": sizes.whole,
        "waits": waits,
        "validation_waits": validation_waits,
        # Weights of 16 bits are widened a few at a time, and moved by the optimizer's own kernels.
        "adamw": sum(p.numel() for part in state.optimizer.parts if part.one_pass for p in part.parameters)
        * (state.optimizer.rounding is None),
        "one_pass": ONE_PASS.moved,
        "misplaced": wrong,
    }


def main() -> None:
    for job in json.load(sys.stdin):
        print(json.dumps(update(job["recipe"], job["overrides"])), flush=True)


if __name__ == "__main__":
    main()
