"""Updates during the backward pass: each gradient moves its parameter as soon as it is whole, and is freed.

So the largest gradient is held in place of all (Lv et al. 2023, arXiv 2306.09782). What an optimizer computes for one
parameter is what it computes for all at once, to the bit: its groups are cut into parts of one parameter each.
Parameters that wait in the host's memory (training.swap_blocks) are on the device for it, with their state.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daguerre.training.optimizers.one_pass import Average
from daguerre.training.optimizers.optimizer import Optimizer, OptimizerPart, seat
from daguerre.training.performance import swapping
from daguerre.training.precision.stochastic_rounding import Place, room


@contextmanager
def spent(parameters: Iterable[nn.Parameter], use: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Within the context each gradient of a backward pass is dropped as soon as it is whole and `use` has seen it."""

    def whole(leaf: Tensor, p: nn.Parameter) -> None:
        with swapping.with_gradient(p):
            use(p)
            p.grad = None

    hooks = [swapping.leaf(p).register_post_accumulate_grad_hook(partial(whole, p=p)) for p in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Seat(NamedTuple):
    """The place of a parameter in the optimizer."""

    part: OptimizerPart
    group: dict[str, Any]
    piece: int
    """Number of its group among what is rounded together."""
    start: int
    """Numbers of the group before it."""


class PiecewiseUpdate:
    """Update `number` of an optimizer whose parts have no groups that go together, one parameter after the other. Equal
    to `Optimizer.step`, which moves all, to the bit."""

    def __init__(self, optimizer: Optimizer, learning_rate: float, number: int, average: Average | None) -> None:
        self._optimizer, self._number = optimizer, number
        self._average = average
        self._seats = _seats(optimizer)
        self._left = dict.fromkeys(self._seats)
        optimizer.set_rate(learning_rate)

    def move(self, p: nn.Parameter, skip: Tensor, factor: Tensor | None) -> None:
        """Moves a parameter by its gradient times `factor`, unless `skip` (0-dim bool on the device)."""
        own = self._seats[p]
        del self._left[p]
        # A copy: what a group counts is the same for all of its parameters, and moves on in `finish`.
        place, part = Place(self._number, own.piece, own.start), own.part
        average = self._average.tensors[p] if self._average else None
        with swapping.with_state(p, part.optimizer.state, part.constants, average):
            self._optimizer.move(part, [{**own.group, "params": [p]}], place, skip, factor, self._of_optimizer)
            self._follow([p])

    def finish(self, skip: Tensor) -> bool:
        """Moves on what groups count, and the averages of parameters that no gradient reached. Returns whether the
        average was moved."""
        swapping.wait_until_back(self._seats)
        for part in self._optimizer.parts:
            for group in part.optimizer.param_groups:
                rest = {**group, "params": [p for p in group["params"] if p in self._left]}
                self._optimizer.move(part, [rest], Place(self._number, 0), skip, None, self._of_optimizer)
                group.update({name: rest[name] for name in part.counters})
        self._follow(self._left)
        return self._average is not None

    @property
    def _of_optimizer(self) -> Average | None:
        """The average, if the optimizer moves it with the weights."""
        return self._average if self._optimizer.moves_averages else None

    @torch.no_grad()
    def _follow(self, parameters: Collection[nn.Parameter]) -> None:
        """Moves the averages of these parameters, if the optimizer does not."""
        if self._average and not self._optimizer.moves_averages:
            for p in parameters:  # one by one, as each is widened
                self._average.tensors[p].lerp_(p.float(), self._average.share)


def _seats(optimizer: Optimizer) -> dict[nn.Parameter, _Seat]:
    found: dict[nn.Parameter, _Seat] = {}
    for index, part in enumerate(optimizer.parts):
        for turn, group in enumerate(part.optimizer.param_groups):
            start = 0
            for p in group["params"]:
                found[p] = _Seat(part, group, seat(index, turn), start)
                start += room(p)
    return found
