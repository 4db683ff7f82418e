"""Splits of parameters over the axes of the mesh, a dim each: patterns, logical axes and rules, all of them
data.

A family says what the dims of its parameters are (`*.attn1.to_q.weight` is (heads, embed)); the recipe says where such
a dim goes (`heads` to `tensor`, `embed` to `fsdp`). Nothing here touches a tensor: shapes alone. What is done with the
result is distributed/parallelize.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod

from daguerre.distributed.mesh import Axis, Mesh
from daguerre.errors import UserError


@dataclass(frozen=True)
class Segment:
    """A stretch of a dim in which several things lie one after the other, such as the halves of a gated layer."""

    axis: str | None
    """Its logical axis."""
    length: int | None = None
    """None: an equal share of what segments with a length leave."""
    unit: int = 1
    """Elements that stay together, such as the width of a head."""


Dim = str | None | tuple[Segment, ...]
"""The logical axis of a dim, None for one that is never split, or its segments: each device gets its part of every
one."""
Dims = tuple[Dim, ...]
"""A parameter's; none for the last dims that are never split, as those of a convolution's kernel."""
Rules = Sequence[tuple[str, Sequence[str]]]
"""(logical axis, mesh axes it is split over), the first that fits first."""

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a part in each dim, and its shape."""

HEAD = "head"
"""The logical axis of a parameter that every head uses, such as the norm of queries: each device of a tensor group has
it whole, but sees only its own heads, so that gradients are summed over the group."""
PARAMETER_AXES = ("embed", "heads", "mlp", "conv_in", "conv_out", "norm", "time", "vocabulary", "positions")
"""Logical axes that dims of parameters have."""
ACTIVATION_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "conv_batch": ("data", "fsdp"),
    "activation_batch": ("data", "fsdp"),
    "activation_heads": ("tensor",),
    "activation_kv": ("tensor",),
    "out_channels": (),
}
"""Logical axes of activations, and the mesh axes over which the engine splits them; where it cannot, a rule that asks
for it is refused by name, unless its axis has one device. `out_channels` are those of convolutions."""

DEFAULT: Sequence[tuple[str, Sequence[Axis]]] = (
    ("batch", ("data",)),
    ("activation_batch", ("data", "fsdp")),
    ("activation_heads", ("tensor",)),
    ("activation_kv", ("tensor",)),
    ("embed", ("fsdp",)),
    ("heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("conv_batch", ("data", "fsdp")),
    ("out_channels", ("tensor",)),
    ("conv_out", ("fsdp",)),
)
"""MaxDiffusion's table, and `mlp`, which its own code leaves out."""


@dataclass(frozen=True)
class ParameterSplit:
    """The split of one parameter."""

    name: str
    shape: tuple[int, ...]
    dims: Dims
    tensor: int | None
    """The dim that is split over `tensor`; None where each device of a tensor group has it whole."""
    fsdp: int | None
    """The dim that is split over `fsdp`; None where there is no such axis, or nothing to split."""
    by_rule: bool
    """True if a rule chose the fsdp dim; if not, it is dim 0, as the engine needs one."""
    partial: bool = False
    """Whether the devices of a tensor group each see a part of what the parameter is used on (`HEAD`)."""

    def order(self, degree: int) -> list[int]:
        """The element of the tensor dim that is put at each place, so that each of `degree` equal parts holds its part
        of every segment; [] where all stay where they are."""
        if self.tensor is None or degree == 1 or not isinstance(dim := self.dims[self.tensor], tuple) or len(dim) == 1:
            return []
        lengths = _lengths(dim, self.shape[self.tensor])
        stretches = [range(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
        return [
            element
            for part in range(degree)
            for each in stretches
            for element in each[part * len(each) // degree : (part + 1) * len(each) // degree]
        ]

    def elements(self, mesh: Mesh) -> int:
        """Elements on the fullest device: uneven parts of dim 0 are rounded up, as FSDP2 pads them."""
        shape = list(self.shape)
        for dim, axis in ((self.tensor, "tensor"), (self.fsdp, "fsdp")):
            if dim is not None:
                shape[dim] = -(-shape[dim] // mesh.degree(axis))
        return prod(shape)


def logical(patterns: Mapping[str, Dims], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Dims]:
    """The dims of each parameter by the one pattern that means it. UserError where a parameter has none or several."""
    found: dict[str, Dims] = {}
    odd: list[str] = []
    for name, shape in shapes.items():
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if len(matching) != 1:
            odd.append(f"{name} {shape}: {', '.join(matching) or 'no pattern'}")
        elif len(patterns[matching[0]]) > len(shape):
            odd.append(f"{name} {shape}: {matching[0]} says {patterns[matching[0]]}")
        else:
            found[name] = patterns[matching[0]]
    if odd:
        raise UserError(
            "logical axes: each parameter must match exactly one pattern of its network's facts (models/network.py):\n"
            + "\n".join(f"  {line}" for line in odd)
        )
    return found


def check(rules: Rules, mesh: Mesh) -> list[str]:
    """Notices about these rules on this mesh. UserError for axes that do not exist and for splits of
    activations that the engine cannot do."""
    notices = []
    for name, axes in rules:
        many = [axis for axis in axes if mesh.degree(axis) > 1]
        if name == "out_channels" and many:
            notices.append(
                f"the rule out_channels -> {', '.join(many)} has no effect: convolutions are not split by channel; "
                f"each of the {mesh.degree('tensor')} devices of a tensor group computes them whole"
            )
        elif name in ACTIVATION_AXES and (cannot := [axis for axis in many if axis not in ACTIVATION_AXES[name]]):
            able = ", ".join(ACTIVATION_AXES[name])
            raise UserError(
                f"logical_axis_rules: {name} -> {', '.join(cannot)} is not supported: Daguerre splits {name} over "
                f"{able}: change the rule, or give the axis one device",
                code="unsupported",
                setting="mesh.logical_axis_rules",
            )
    return notices


def check_data_sharding(axes: Sequence[str], mesh: Mesh) -> None:
    """UserError where a batch cannot be cut over these axes of the mesh."""
    if "tensor" in axes and mesh.degree("tensor") > 1:
        raise UserError(
            f"mesh.data_sharding: the {mesh.degree('tensor')} devices of a tensor group compute the same part of the "
            "batch together, so the batch cannot be split over tensor: remove it",
            code="conflict",
            setting="mesh.data_sharding",
        )
    if left := [axis for axis in ("data", "fsdp") if axis not in axes and mesh.degree(axis) > 1]:
        raise UserError(
            f"mesh.data_sharding: {' and '.join(left)}, with {mesh.degree(left[0])} devices, is missing: its devices "
            "would all compute the same samples. Add it, or give the axis one device",
            code="conflict",
            setting="mesh.data_sharding",
        )


def place(
    shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, Dims], rules: Rules, mesh: Mesh, heads: Mapping[str, int]
) -> tuple[list[ParameterSplit], list[str]]:
    """Splits each parameter by the rules; also a line for each that could not be split as they say.

    `heads` are the attention heads of the parameters that have a `heads` dim: heads are split whole.
    """
    placed, notices = [], []
    for name, shape in shapes.items():
        tensor = _dim(dims[name], rules, "tensor") if mesh.degree("tensor") > 1 else None
        if tensor is not None:
            problem = _indivisible(shape[tensor], dims[name][tensor], mesh, heads.get(name))
            _refuse_apart(name, dims[name][tensor], rules, problem)
            if problem:
                axes = "+".join(axes_of(dims[name][tensor]))
                notices.append(f"{name}: {axes} -> tensor is not possible: {problem}")
                tensor = None
        fsdp = _dim(dims[name], rules, "fsdp")
        by_rule = fsdp is not None and fsdp != tensor and shape[fsdp] % mesh.degree("fsdp") == 0
        if mesh.degree("fsdp") == 1:
            placed.append(ParameterSplit(name, shape, dims[name], tensor, None, False))
            continue
        # FSDP2 splits other dims than 0 only evenly.
        placed.append(ParameterSplit(name, shape, dims[name], tensor, fsdp if by_rule else 0, by_rule))
    return placed, notices


def axes_of(dim: Dim) -> tuple[str, ...]:
    """The logical axes of a dim, each once."""
    segments = dim if isinstance(dim, tuple) else (Segment(dim),)
    return tuple(dict.fromkeys(each.axis for each in segments if each.axis is not None))


def _dim(dims: Dims, rules: Rules, axis: str) -> int | None:
    """The dim that the first fitting rule sends to an axis of the mesh."""
    for name, axes in rules:
        if axis in axes and (fitting := [number for number, dim in enumerate(dims) if name in axes_of(dim)]):
            return fitting[0]
    return None


def _lengths(segments: tuple[Segment, ...], whole: int) -> list[int]:
    """The length of each segment of a dim. UserError where they do not add up."""
    known = sum(each.length or 0 for each in segments)
    open_ones = sum(each.length is None for each in segments)
    share, rest = divmod(whole - known, open_ones or 1)
    if rest or (not open_ones and share):
        raise UserError(f"logical axes: segments {segments} do not make up a dim of {whole}")
    return [share if each.length is None else each.length for each in segments]


def _indivisible(length: int, dim: Dim, mesh: Mesh, heads: int | None) -> str:
    degree = mesh.degree("tensor")
    if heads is not None and heads % degree:
        return f"{heads} heads over {degree} devices"
    segments = dim if isinstance(dim, tuple) else (Segment(dim),)
    for segment, own in zip(segments, _lengths(segments, length), strict=True):
        if own % (degree * segment.unit):
            return f"{own // segment.unit} {segment.axis} over {degree} devices"
    return ""


def _refuse_apart(name: str, dim: Dim, rules: Rules, problem: str) -> None:
    """UserError where a dim of several axes cannot follow all of the layers whose outputs it reads, or gives: some of
    these would be split, and this one not."""
    axes = axes_of(dim)
    apart = [axis for axis in axes if not any(axis == name and "tensor" in over for name, over in rules)]
    if len(axes) > 1 and (apart or problem):
        why = problem or f"the rules split {', '.join(axis for axis in axes if axis not in apart)} alone"
        raise UserError(
            f"{name} has {' and '.join(axes)} in one dim, so tensor splits both or neither, and {why}: choose a "
            "mesh.ici_tensor_parallelism that divides both, and logical_axis_rules that split both",
            code="conflict",
            setting="mesh.ici_tensor_parallelism",
        )


def own_region(placed: ParameterSplit, mesh: Mesh, rank: int) -> Region:
    """The part that a rank holds, also of the parameter's averages and moments. Tensor parallel cuts first and evenly,
    FSDP2 then cuts each such part into chunks of which the last may be short or empty.

    Elements of a dim with segments count in the order that they were put into.
    """
    offsets, shape, place = [0] * len(placed.shape), list(placed.shape), mesh.place(rank)
    for axis, dim in (("tensor", placed.tensor), ("fsdp", placed.fsdp)):
        if dim is not None:
            begin, shape[dim] = _chunk(shape[dim], mesh.degree(axis), place[axis])
            offsets[dim] += begin
    return tuple(offsets), tuple(shape)


def _chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and length of a part, as torch.chunk cuts."""
    each = -(-length // parts)
    begin = min(length, part * each)
    return begin, min(length - begin, each)
