"""Text and JSON of `daguerre plan`: mesh, rules, where parameters go, and bytes, for a terminal of 100 columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daguerre import formatting
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import PARAMETER_AXES, Rules, axes_of
from daguerre.formatting import counted
from daguerre.memory.static import KINDS, MemoryCount, ResidentTensor

_WIDTH = 100
_PATTERN = 43
_EXAMPLES = 2


@dataclass(frozen=True)
class Group:
    """Parameters of one pattern that are split the same way."""

    component: str
    pattern: str
    split: str
    parameters: int
    all_numbers: int
    numbers: int
    """On the fullest device."""


def format_size(count: float) -> str:
    """Bytes as `12.35 GB`, `3.20 MB` or `900 B`."""
    return formatting.scaled(count, {" GB": 1e9, " MB": 1e6, " kB": 1e3}, " B", ",.2f")


def format_number(count: float) -> str:
    """A count as `2,567.46 M`, `12.30 k` or `320`."""
    return formatting.scaled(count, {" M": 1e6, " k": 1e3}, form=",.2f")


def format_split(held: ResidentTensor, mesh: Mesh) -> str:
    """The split of each dim, such as `heads/tensor, embed/fsdp`; `*` where no rule names the dim."""
    placed = held.placed
    if placed.tensor is None and placed.fsdp is None:
        return "whole"
    dims = [*placed.dims, *[None] * (len(placed.shape) - len(placed.dims))]
    texts = []
    for dim, logical in enumerate(dims):
        name = "+".join(axes_of(logical))
        axes = [axis for axis, where in (("tensor", placed.tensor), ("fsdp", placed.fsdp)) if where == dim]
        mark = "" if placed.by_rule or "fsdp" not in axes else "*"
        if axes:
            texts.append(f"{name or f'dim {dim}'}/{'+'.join(axes)}{mark}")
        elif name and dim < 2:
            texts.append(name)
    return ", ".join(texts)


def groups(count: MemoryCount) -> list[Group]:
    """One for each pattern and way of splitting, in the order of the networks."""
    found: dict[tuple[str, str, str], list[ResidentTensor]] = {}
    for each in count.held:
        key = (each.component, each.pattern or "(no logical axes)", format_split(each, count.mesh))
        found.setdefault(key, []).append(each)
    return [
        Group(*key, len(some), sum(h.all_numbers for h in some), sum(h.numbers for h in some))
        for key, some in found.items()
    ]


def describe_mesh(mesh: Mesh) -> list[str]:
    each = mesh.devices // mesh.nodes
    lines = [
        f"{counted(mesh.devices, 'device')}, {counted(mesh.nodes, 'node')} of {each}; axes from the outside in: "
        + ", ".join(mesh.order)
    ]
    for axis in AXES:
        between, inside = mesh.dcn[axis], mesh.ici[axis]
        lines.append(f"{axis:<8} {mesh.degree(axis):>5}  = {between} between nodes x {inside} inside a node")
    return lines


def describe_rules(axis_rules: Rules, mesh: Mesh, notices: Sequence[str]) -> list[str]:
    """Rules that split something on this mesh, and those without effect on it."""
    acting: list[str] = []
    idle: list[str] = []
    seen: set[tuple[str, str]] = set()
    for name, axes in axis_rules:
        if name == "out_channels" and notices:
            continue  # the notice below is about it
        many = [axis for axis in axes if mesh.degree(axis) > 1 and (name, axis) not in seen]
        seen |= {(name, axis) for axis in axes}
        (acting if many else idle).append(f"{name} -> {', '.join(axes) or 'nothing'}")
    lines = []
    if acting:
        lines += wrap("used: " + "; ".join(acting))
    if idle:
        lines += wrap("no effect, as these axes have one device: " + "; ".join(idle))
    unnamed = [name for name in PARAMETER_AXES if name not in dict(axis_rules)]
    if mesh.degree("fsdp") > 1 and unnamed:
        lines += wrap(f"without a rule: {', '.join(unnamed)}")
    return lines + wrapped(notices)


def describe_parameters(count: MemoryCount, every: bool) -> list[str]:
    """A table of parameters by pattern, or of every one."""
    lines = []
    sorted_groups = groups(count)
    for component, held in count.components():
        trained = sum(each.all_numbers for each in held if each.is_trained)
        total = sum(each.all_numbers for each in held)
        whole = all(each.numbers == each.all_numbers for each in held)
        kinds = "frozen" if not trained else "trained" if trained == total else f"{trained:,} of them trained"
        where = ", whole on each device" if whole else ""
        lines.append(f"{component}: {counted(len(held), 'parameter')}, {total:,} numbers, {kinds}{where}")
        if whole and not every:
            continue
        if every:
            for each in held:
                shape = " x ".join(map(str, each.placed.shape)) or "one number"
                split = format_split(each, count.mesh)
                lines.append(f"  {each.placed.name} [{shape}]: {split}, {format_number(each.numbers)} a device")
        else:
            lines.append(_row(f"  {'pattern':<{_PATTERN}}", "count", "numbers", "dims/axis", "a device"))
            lines += [
                _row(
                    f"  {_shortened(g.pattern, _PATTERN):<{_PATTERN}}", str(g.parameters), format_number(g.all_numbers),
                    g.split, format_number(g.numbers),
                )
                for g in sorted_groups
                if g.component == component
            ]  # fmt: skip
    if any("*" in format_split(each, count.mesh) for each in count.held):
        lines += wrap(
            "*: no rule splits this dim, or it does not divide: fsdp splits every parameter, then along its first dim, "
            "with uneven parts padded"
        )
    return lines


def _row(first: str, count: str, numbers: str, split: str, here: str) -> str:
    return f"{first} {count:>5} {numbers:>10}  {_shortened(split, 24):<24}{here:>10}"


def describe_problems(problems: Iterable[tuple[str, str]], every: bool) -> list[str]:
    """Parameters that cannot be split as the rules say, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in problems:
        by_reason.setdefault(why, []).append(name)
    lines = []
    for why, names in by_reason.items():
        shown = names if every else names[:_EXAMPLES]
        more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
        lines += wrap(f"{why}: {', '.join(shown)}{more}")
    return lines


def resident_table(count: MemoryCount, optimizer: str) -> list[str]:
    """Bytes of a model by kind, with shares of the sum."""
    words = {"moments": f"state of {optimizer}", "frozen": "frozen networks", "averages": "averages (EMA)"}
    words |= {"quantized": "layers of few bits", "reference": "weights before update 1"}
    lines = [
        f"{words.get(kind, kind):<24} {format_size(taken):>12} {taken / count.whole:>8.1%}  "
        f"{'#' * round(40 * taken / count.whole)}".rstrip()
        for kind in KINDS
        if (taken := count.bytes_of(kind))
    ]
    return [*lines, f"{'in all':<24} {format_size(count.whole):>12}"]


def document(count: MemoryCount, axis_rules: Rules, every: bool) -> dict[str, object]:
    mesh = count.mesh
    found: dict[str, object] = {
        "mesh": {
            "devices": mesh.devices,
            "nodes": mesh.nodes,
            "dcn": dict(mesh.dcn),
            "ici": dict(mesh.ici),
            "batch_parts": mesh.batch_ranks,
        },
        "rules": [[name, list(axes)] for name, axes in axis_rules],
        "groups": [vars(group) for group in groups(count)],
        "not_split": [{"parameter": name, "why": why} for name, why in count.problems],
        "bytes_per_device": {kind: count.bytes_of(kind) for kind in KINDS} | {"total": count.whole},
    }
    if every:
        found["parameters"] = [
            {
                "name": each.placed.name,
                "shape": list(each.placed.shape),
                "tensor_dim": each.placed.tensor,
                "fsdp_dim": each.placed.fsdp,
                "by_rule": each.placed.by_rule,
                "numbers_per_device": each.numbers,
                "bytes_per_device": {"host": sum(each.kinds.values())} if each.waits else dict(each.kinds),
            }
            for each in count.held
        ]
    return found


def wrapped(texts: Iterable[str]) -> list[str]:
    """Each text in lines of a terminal's width."""
    return [line for text in texts for line in wrap(text)]


def wrap(text: str) -> list[str]:
    """A text in lines of a terminal's width."""
    return formatting.wrapped(text, _WIDTH - 4)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
