"""The passes before the first update: arithmetic of a sample, seconds, and a check of compiled blocks. Weights, running
statistics and random numbers stay as they are."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from daguerre.assembly.parts import Components
from daguerre.distributed.parallelize import local
from daguerre.errors import UserError
from daguerre.training.optimizers.in_backward import spent
from daguerre.training.performance import flops, peak_rates
from daguerre.training.precision import quantized
from daguerre.types import Batch

_WRONG = {torch.float32: (1e-2, 1e-3), torch.bfloat16: (0.3, 1e-2), torch.float16: (0.3, 1e-2)}
"""Least error of a wrong gradient, as shares of its own norm and of the whole gradient's. Code that was compiled
wrongly is off by all of it; roundings by a thousandth of this in float32, by a tenth in 16 bits."""


_PASSES = 2
"""Passes of which the last is timed, where the first one compiles, or a GPU loads its kernels: what is done once would
be taken for time of each. A CPU has nothing of that kind to do."""


def seconds(parts: Components, batch: Batch, compiles: bool = False) -> float:
    """Seconds of one forward and backward pass of a micro-batch."""
    took = 0.0
    with _untouched(parts):
        for _ in range(_PASSES if compiles or parts.device.type != "cpu" else 1):
            start = time.perf_counter()
            _gradients(parts, batch, lambda name, gradient: None)
            peak_rates.synchronize(parts.device)
            took = time.perf_counter() - start
    return took


@torch.no_grad()
def training_flops_per_sample(parts: Components, batch: Batch) -> float:
    """Floating-point operations of one training sample, as `flops.count_update` has them."""
    # Without dropout and without moving running statistics: this pass must leave no trace.
    parts.net.eval()
    example = parts.example(batch)
    with parts.autocast():
        return flops.count_update(lambda net: parts.loss_of(net, example), parts.net) / len(batch.names)


@torch.no_grad()
def check_compiled_code(parts: Components, batch: Batch) -> None:
    """UserError if gradients of compiled blocks are not those without compiling: some releases of torch compile some
    networks wrongly, silently. It sees the shapes of this batch alone. Gradients that are not finite uncompiled are
    left to other guards."""
    # On the host: a second set of gradients may have no room on the device.
    compiled, numbers = dict[str, Tensor](), dict[str, tuple[float, float]]()
    with _untouched(parts):
        _gradients(parts, batch, lambda name, gradient: compiled.update({name: gradient.cpu()}))

    def compare(name: str, plain: Tensor) -> None:
        apart = compiled.pop(name).to(plain.device) - plain
        numbers[name] = float(plain.float().norm()), float(apart.float().norm())

    with torch.compiler.set_stance("force_eager"), _untouched(parts):
        _gradients(parts, batch, compare)
    finite = {name: each for name, each in numbers.items() if math.isfinite(each[0])}
    of_own, of_whole = _WRONG[parts.numerics.compute]
    most = of_whole * math.hypot(*(norm for norm, _ in finite.values()))
    # `not <=`, so that NaN counts as wrong.
    wrong = [name for name, (norm, apart) in finite.items() if not apart <= of_own * norm + most]
    if wrong:
        raise UserError(
            f"training.compile=blocks: torch {torch.__version__} compiled these networks wrongly: gradients of "
            f"{len(wrong)} of {len(numbers)} parameters differ from the uncompiled ones, {wrong[0]} for one. Train "
            "with training.compile=false, or use another version of torch",
            code="unsupported",
            setting="training.compile",
        )


def _gradients(parts: Components, batch: Batch, use: Callable[[str, Tensor], None]) -> None:
    """`use` gets each gradient of a micro-batch with its name (this device's part, where several split it), after which
    it is dropped: a run that moves weights in the backward pass may have no room for all."""
    names = {p: name for name, p in parts.net.named_parameters() if p.requires_grad}

    def give(p: nn.Parameter) -> None:
        if p.grad is not None:
            use(names[p], local(p.grad))

    with torch.enable_grad(), spent(names, give):
        _pass(parts, batch)
    for p in names:  # FSDP2 puts its parts there by itself
        give(p)
        p.grad = None


def _pass(parts: Components, batch: Batch) -> None:
    with parts.autocast():
        loss = parts.loss(parts.net, batch).loss_B.mean()
    parts.numerics.scaler(parts.device).scaled(loss).backward()


@contextmanager
def _untouched(parts: Components) -> Iterator[None]:
    """Context of passes as training makes them: what they compile is then what training computes with."""
    # Codes of few bits are buffers too, of the size of the base, and no pass moves them.
    codes, mode = {id(each) for each in quantized.tensors(parts.net)}, parts.net.training
    statistics = [(buffer, buffer.clone()) for buffer in parts.net.buffers() if id(buffer) not in codes]
    parts.net.train()
    # Dropout draws from torch's generator, from which training goes on afterwards.
    with torch.random.fork_rng([parts.device] if parts.device.type == "cuda" else []):
        try:
            yield
        finally:
            parts.net.train(mode)
            for buffer, before in statistics:
                buffer.copy_(before)
