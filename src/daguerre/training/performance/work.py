"""Counts what a device is given to do, operator by operator: operations, bytes, launches; and the time that follows.

Works on real tensors and on torch's fake ones. The time is a roofline's: an operator takes as long as its products or
its bytes need, whichever is more, and the host takes its time for each launch meanwhile. Nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daguerre.training.performance import flops
from daguerre.training.performance.peak_rates import Rates

_READS_ROWS = ("embedding", "index", "index_select", "gather", "embedding_dense_backward")
"""Operators that read few rows of their first input."""
_WITHOUT_NUMBERS = ("empty", "new_empty", "_unsafe_view")
"""Beginnings of the names of operators that move nothing; the last is a view, though torch does not mark it as one."""


@dataclass(frozen=True)
class Work:
    """Operators by (kind, floating-point operations, bytes), and how often each ran."""

    launches: Mapping[tuple[str, int, int], int] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        return Work(Counter(self.launches) + Counter(other.launches))

    def __mul__(self, times: int) -> Work:
        return Work({key: count * times for key, count in self.launches.items()})

    @property
    def flops(self) -> int:
        """Operations of products, convolutions and attention, those among them that are computed again."""
        return sum(count * operations for (_, operations, _), count in self.launches.items())

    @property
    def bytes(self) -> int:
        """Bytes that are read or written by operators one after the other, as they run uncompiled."""
        return sum(count * size for (_, _, size), count in self.launches.items())

    @property
    def count(self) -> int:
        """Operators that are launched."""
        return sum(self.launches.values())

    def seconds(self, rates: Rates) -> float:
        """Seconds on a device of these rates."""
        on_device = sum(
            count * max(operations / rates.flops, size / rates.bytes)
            for (_, operations, size), count in self.launches.items()
        )
        return max(on_device, self.count * rates.launch_seconds)


NOTHING = Work()
"""No work."""


class Watched(TorchDispatchMode):
    """Within it, all that is launched is counted; `work` has it."""

    def __init__(self) -> None:
        super().__init__()
        self._found: Counter[tuple[str, int, int]] = Counter()

    @property
    def work(self) -> Work:
        return Work(dict(self._found))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        formula, made_of_others = flops.known(func)
        if made_of_others:
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        size = _bytes(func, args, kwargs, result)
        if size or formula is not None:
            operations = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            self._found[func._overloadpacket.__name__, operations, size] += 1
        return result


def _bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that an operator reads and writes; 0 of one that makes a view, or memory without numbers."""
    schema, name = func._schema, func._overloadpacket.__name__
    aliases = [returned.alias_info for returned in schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases) or name.startswith(_WITHOUT_NUMBERS):
        return 0
    fresh = _sizes(result) if not any(aliases) else 0
    if name in _READS_ROWS:
        return 2 * fresh
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return fresh + _sizes([*given.values()]) + _sizes([given.get(name) for name in written])


def _sizes(tree: Any) -> int:
    """Bytes of tensors; of one that is expanded those that are in memory."""
    tensors: Iterable[Tensor] = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)
