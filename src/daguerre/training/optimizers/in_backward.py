"""Updates during the backward pass: each gradient moves its parameter as soon as it is whole, and is freed.

So the largest gradient is held in place of all (Lv et al. 2023, arXiv 2306.09782). What an optimizer computes for one
parameter is what it computes for all at once, to the bit: its groups are cut into parts of one parameter each.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from daguerre.training.optimizers.one_pass import Average
from daguerre.training.optimizers.optimizer import Optimizer, OptimizerPart, seat
from daguerre.training.precision.stochastic_rounding import Place, room


@contextmanager
def spent(parameters: Iterable[nn.Parameter], use: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Within the context each gradient of a backward pass is dropped as soon as it is whole and `use` has seen it."""

    def whole(p: Tensor) -> None:
        use(p)  # type: ignore[arg-type]  # the hook hands its parameter back
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(whole) for p in parameters]
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
        self._average = average if optimizer.moves_averages else None
        self._seats = _seats(optimizer)
        self._left = dict.fromkeys(self._seats)
        optimizer.set_rate(learning_rate)

    def move(self, p: nn.Parameter, skip: Tensor, factor: Tensor | None) -> None:
        """Moves a parameter by its gradient times `factor`, unless `skip` (0-dim bool on the device)."""
        own = self._seats[p]
        del self._left[p]
        # A copy: what a group counts is the same for all of its parameters, and moves on in `finish`.
        place = Place(self._number, own.piece, own.start)
        self._optimizer.move(own.part, [{**own.group, "params": [p]}], place, skip, factor, self._average)

    def finish(self, skip: Tensor) -> bool:
        """Moves on what groups count, and the averages of parameters that no gradient reached. Returns whether the
        average was moved."""
        for part in self._optimizer.parts:
            for group in part.optimizer.param_groups:
                rest = {**group, "params": [p for p in group["params"] if p in self._left]}
                self._optimizer.move(part, [rest], Place(self._number, 0), skip, None, self._average)
                group.update({name: rest[name] for name in part.counters})
        return self._average is not None


def _seats(optimizer: Optimizer) -> dict[nn.Parameter, _Seat]:
    found: dict[nn.Parameter, _Seat] = {}
    for index, part in enumerate(optimizer.parts):
        for turn, group in enumerate(part.optimizer.param_groups):
            start = 0
            for p in group["params"]:
                found[p] = _Seat(part, group, seat(index, turn), start)
                start += room(p)
    return found
