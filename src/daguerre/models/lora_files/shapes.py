"""The shapes that factors of additions to a weight must have, each by itself: factors of another layer, transposed or
flattened ones are never reshaped to fit.

Only sizes of 1 at the end may be there or not: a 1x1 convolution and a linear layer have the same factors.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from daguerre.models.lora_files.addition import COLUMNS, DIFF, DOWN, MAGNITUDE, MIDDLE, UP

_LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
_ONE = ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})
_TWO = ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"})
WHOLE: tuple[set[str], ...] = (
    {DIFF},
    {DOWN, UP},
    {DOWN, UP, MIDDLE},
    _LOHA,
    _LOHA | {"hada_t1", "hada_t2"},
    *(one | two for one in _ONE for two in _TWO),
)
"""The factors that together are an addition, without the lengths of DoRA."""
Shape = tuple[int, ...]


def of_weight(module: nn.Module) -> Shape:
    """The shape of a layer's weight."""
    if isinstance(module, nn.Linear):  # one that keeps codes of few bits would make its weight
        return module.out_features, module.in_features
    assert isinstance(module.weight, Tensor)
    return tuple(module.weight.shape)


def misfit(factors: Mapping[str, Tensor], weight: Sequence[int]) -> str:
    """The first factor of a whole addition whose own shape does not go with a weight of this shape, as a sentence;
    empty where all do."""
    there = {name: plain(value.shape) for name, value in factors.items()}
    if (short := next((name for name, shape in there.items() if len(shape) < 1 or 0 in shape), None)) is not None:
        return f"{short} is {list(factors[short].shape)}, which is no factor"
    for name, axis in ((MAGNITUDE, 0), (COLUMNS, 1)):
        length = there.pop(name, None)
        if length is not None and not (len(weight) > 1 and _is_vector(length, weight[axis])):
            return f"{name} is {list(factors[name].shape)}, and not the lengths of {weight[axis]} vectors"
    for name, allowed in _expected(there, tuple(weight)).items():
        if there[name] not in {plain(shape) for shape in allowed}:
            fitting = " or ".join(str(list(shape)) for shape in allowed) or "nothing"
            return f"{name} is {list(factors[name].shape)}, where {fitting} goes with the weight and the other factors"
    return ""


def _is_vector(shape: Shape, size: int) -> bool:
    """True of one dimension of this size, and any number of sizes of 1."""
    return math.prod(shape) == size and sum(each != 1 for each in shape) < 2


def plain(shape: Sequence[int]) -> Shape:
    """Without sizes of 1 behind the second dimension."""
    sizes = [*shape]
    while len(sizes) > 2 and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes)


def _expected(there: Mapping[str, Shape], weight: Shape) -> dict[str, list[Shape]]:
    """The shapes that each factor may have, by the rank that one of them shows."""
    if DIFF in there:
        return {DIFF: [weight]}
    if len(weight) < 2:
        return {name: [] for name in there}
    if DOWN in there:
        return _of_lora(there, weight)
    return _of_loha(there, weight) if "hada_w1_a" in there else _of_lokr(there, weight)


def _of_lora(there: Mapping[str, Shape], weight: Shape) -> dict[str, list[Shape]]:
    out, inputs, *kernel = weight
    rank = there[DOWN][0]
    if MIDDLE not in there:
        return {DOWN: [(rank, inputs, *kernel)], UP: [(out, rank)]}
    middles: list[Shape] = [(rank, rank, *kernel)] if kernel else []
    return {DOWN: [(rank, inputs)], UP: [(out, rank)], MIDDLE: middles}


def _of_loha(there: Mapping[str, Shape], weight: Shape) -> dict[str, list[Shape]]:
    out, inputs, *kernel = weight
    rank = there["hada_w1_b"][0]
    if "hada_t1" not in there:
        return {f"hada_w{half}_{side}": [(out, rank) if side == "a" else (rank, inputs * math.prod(kernel))]
                for half in "12" for side in "ab"}  # fmt: skip
    middles: list[Shape] = [(rank, rank, *kernel)] if kernel else []
    sides = {"a": (rank, out), "b": (rank, inputs)}
    halves: dict[str, list[Shape]] = {f"hada_w{half}_{side}": [sides[side]] for half in "12" for side in "ab"}
    return {**halves, "hada_t1": middles, "hada_t2": middles}


def _of_lokr(there: Mapping[str, Shape], weight: Shape) -> dict[str, list[Shape]]:
    """Shapes of the factors of kron(one, two): sizes of `one` divide those of the weight, and `two` has the rest."""
    out, inputs, *kernel = weight
    found: dict[str, list[Shape]] = {}
    if "lokr_w1" in there:
        first = there["lokr_w1"]
        rows, columns = first if len(first) == 2 else (0, 0)
        found["lokr_w1"] = [first] if rows else []
    else:
        rows, rank, columns = there["lokr_w1_a"][0], there["lokr_w1_b"][0], there["lokr_w1_b"][-1]
        found |= {"lokr_w1_a": [(rows, rank)], "lokr_w1_b": [(rank, columns)]}
    if not rows or not columns or out % rows or inputs % columns:
        return {**found, next(iter(found)): []}
    rest_out, rest_in = out // rows, inputs // columns
    if "lokr_w2" in there:
        return {**found, "lokr_w2": [(rest_out, rest_in, *kernel)]}
    rank = there["lokr_w2_b"][0]
    if "lokr_t2" in there:
        middles: list[Shape] = [(rank, rank, *kernel)] if kernel else []
        return {**found, "lokr_w2_a": [(rank, rest_out)], "lokr_w2_b": [(rank, rest_in)], "lokr_t2": middles}
    flat, whole = (rank, rest_in * math.prod(kernel)), (rank, rest_in, *kernel)
    return {**found, "lokr_w2_a": [(rest_out, rank)], "lokr_w2_b": [flat, *([whole] if kernel else [])]}
