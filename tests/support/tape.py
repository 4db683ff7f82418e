"""A device that records, on a CPU: what a CUDA graph is for `training/performance/recording.py`, with tensors of torch.

A recording is a list of operators with their very arguments and results. Replayed, each computes from the same memory
and leaves its result in the memory of the result that was recorded. So a number of the host that a pass has read stays
what it was, as in a CUDA graph, and reading one of the device's is an error. The random state may be asked for, and set
to what it was at some place of the recording: torch's graphs hold it as the distance from the state of the replay.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daguerre.training.performance.recording import Graphs


class Tape(Graphs):
    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with _Written() as written, mock.patch.multiple(torch, **written.chance()):
            work()
        self.recorded += 1
        # A GPU does nothing while it records. Here it is done then, and the first replay, on that batch, does nothing.
        done = True

        def replay() -> None:
            nonlocal done
            self.replayed += 1
            if done:
                done = False
                return
            with torch._C._AutoDispatchBelowAutograd():
                for func, args, kwargs, made in written.calls:
                    _keep(func(*args, **kwargs), made)

        return replay


class _Written(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), (
            "the host reads a number of the device"
        )
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def chance(self) -> dict[str, Any]:
        """torch's functions of the random state, which are no operators, as they are recorded."""
        known: list[Tensor] = []

        def get_rng_state() -> Tensor:
            known.append(torch.default_generator.get_state())
            self.calls.append((torch.default_generator.get_state, (), {}, known[-1]))
            return known[-1]

        def set_rng_state(state: Tensor) -> None:
            assert any(state is each for each in known), "a random state from outside of the recording"
            torch.default_generator.set_state(state)
            self.calls.append((torch.default_generator.set_state, (state,), {}, torch.default_generator))

        return {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}


def _keep(fresh: Any, made: Any) -> None:
    for new, old in zip(tree_leaves(fresh), tree_leaves(made), strict=True):
        # Views, and what is changed in place, are there already.
        if isinstance(new, Tensor) and new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
            old.copy_(new)
