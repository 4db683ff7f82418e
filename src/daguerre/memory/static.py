"""Bytes that a model in training takes on the fullest device of a mesh, counted parameter by parameter.

What stays between updates: weights, gradients' room, the optimizer's state, averages, frozen networks, buffers. What a
step takes in addition is memory/peak.py. Exact but for what an allocator rounds up.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torch import nn

from daguerre import plugins
from daguerre.assembly import assistant, offloaded, swapped
from daguerre.assembly.parts import Components
from daguerre.caching import cache
from daguerre.config.config import Config
from daguerre.distributed import sharding_rules
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import ParameterSplit, own_region
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.hosts import host
from daguerre.models.placement import describe_unknown, frozen, of_net, placement
from daguerre.objectives.objective import REFERENCE
from daguerre.training.optimizers import optimizer
from daguerre.training.precision import quantized
from daguerre.training.precision.quantized import QuantizedLinear
from daguerre.types import waits

KINDS = ("weights", "gradients", "moments", "averages", "reference", "frozen", "quantized", "buffers")
"""Kinds of bytes, in the order of a report."""
_SAVED = ("weights", "moments", "averages")
"""Kinds of bytes that a checkpoint holds, of what is trained."""
_AVERAGE = 4
"""Bytes of a number in an average."""
_FULLEST = 0
"""The rank that holds most: uneven parts are cut so that the last ones are the small ones."""


@dataclass(frozen=True)
class ResidentTensor:
    """The part of a parameter that the fullest device holds."""

    component: str
    placed: ParameterSplit
    pattern: str
    """That names its dims; "" where its network has no logical axes."""
    numbers: int
    """Elements on this device."""
    kinds: Mapping[str, int]
    """Bytes by what they are for."""
    waits: bool = False
    """They are in the host's memory, and count for no device."""

    @property
    def all_numbers(self) -> int:
        return prod(self.placed.shape)

    @property
    def is_trained(self) -> bool:
        return "gradients" in self.kinds

    @property
    def saved_bytes(self) -> int:
        """Bytes of it in a checkpoint."""
        return sum(self.kinds[kind] for kind in _SAVED) if self.is_trained else 0


@dataclass(frozen=True)
class MemoryCount:
    """A model on the fullest device of a mesh."""

    mesh: Mesh
    held: tuple[ResidentTensor, ...]
    buffers: int
    """Bytes; each device has them all."""
    problems: tuple[tuple[str, str], ...]
    """(parameter, why it could not be split as the rules say)."""
    notices: tuple[str, ...]
    """About the rules on this mesh."""

    def bytes_of(self, kind: str) -> int:
        here = (each for each in self.held if not each.waits)
        return self.buffers if kind == "buffers" else sum(each.kinds.get(kind, 0) for each in here)

    @property
    def whole(self) -> int:
        return sum(map(self.bytes_of, KINDS))

    @property
    def on_host(self) -> int:
        """Bytes of what waits in the host's memory, of each process."""
        return sum(sum(each.kinds.values()) for each in self.held if each.waits)

    @property
    def trained(self) -> list[ResidentTensor]:
        return [each for each in self.held if each.is_trained]

    @property
    def saved_bytes(self) -> int:
        """Bytes of a checkpoint: weights, moments and averages of what is trained, on all devices together.

        Each element is written once, and about as much by each device. With checkpoint.background a copy of that is
        in the memory of its host while it is written, and is kept for the next one.
        """
        return sum(each.saved_bytes * each.all_numbers // max(1, each.numbers) for each in self.trained)

    def components(self) -> Iterator[tuple[str, list[ResidentTensor]]]:
        for name in dict.fromkeys(each.component for each in self.held):
            yield name, [each for each in self.held if each.component == name]


def count(config: Config, parts: Components, mesh: Mesh) -> MemoryCount:
    """The count of a model, which may be without memory. Raises UserError for what cannot be trained on this mesh."""
    assistant.check_mesh(parts.family, mesh)
    axis_rules = config.mesh.logical_axis_rules
    notices = sharding_rules.check(axis_rules, mesh)
    net = of_net(parts.net, parts.networks, axis_rules, mesh)
    held = []
    for placed, (name, p) in zip(net.placed, parts.net.named_parameters(), strict=True):
        kinds = _in_net(config, parts, name, p)
        own = _held(placed.name.partition(".")[0], placed, net.patterns[placed.name], mesh, kinds)
        held.append(replace(own, waits=waits(p)))
    problems, unknown = list(net.problems), [*net.unknown]
    absent = {name for codec in cache.expected(config, parts.family).values() for name in codec.networks}
    if absent:
        notices.append(f"not in memory while a run trains on its cache: {', '.join(sorted(absent))}")
    notices += offloaded.notices(parts.family)
    notices += swapped.notices(config, parts.swaps, mesh.devices // mesh.nodes)
    still = frozen(parts.net, parts.networks)
    for component, network in still.items():
        if component in absent:
            continue
        found = placement(network, axis_rules, mesh)
        is_split = config.mesh.shard_frozen and component not in parts.family.uneven
        unknown += [component] if is_split and not network.facts.axes else []
        problems += [(f"{component}.{name}", why) for name, why in found.problems if is_split]
        for placed, p in zip(found.placed, network.module.parameters(), strict=True):
            split = replace(placed, name=f"{component}.{placed.name}")
            split = split if is_split else replace(split, tensor=None, fsdp=None)
            kinds = partial(_frozen, p.element_size())
            away = waits(p) or encoders.waiting(network.module) is not None
            held.append(replace(_held(component, split, found.patterns[placed.name], mesh, kinds), waits=away))
    for component, module in parts.family.components.items():
        is_split = component not in still or (config.mesh.shard_frozen and component not in parts.family.uneven)
        held += _quantized(component, module, mesh.degree("fsdp") if is_split else 1)
    notices += describe_unknown(unknown, mesh)
    result = MemoryCount(mesh, tuple(held), _buffers(parts, absent), tuple(problems), tuple(notices))
    _check_optimizer(config, parts, result)
    return result


Shape = tuple[int, ...]
_Kinds = Callable[[str, Shape], dict[str, int]]
"""Bytes by what they are for, of a part of a parameter: its name, and the part's shape."""


def _held(component: str, placed: ParameterSplit, pattern: str, mesh: Mesh, kinds: _Kinds) -> ResidentTensor:
    shape = own_region(placed, mesh, _FULLEST)[1]
    return ResidentTensor(component, placed, pattern, prod(shape), kinds(placed.name, shape))


def _frozen(size: int, name: str, shape: Shape) -> dict[str, int]:
    return {"frozen": prod(shape) * size}


def _quantized(component: str, network: nn.Module, devices: int) -> Iterator[ResidentTensor]:
    """The layers of few bits, whose codes and scales so many devices share, along the first dim."""
    for name, layer in quantized.layers(network):
        shape = (layer.out_features, layer.in_features)
        placed = ParameterSplit(
            f"{component}.{host(f'{name}.weight')[0]}", shape, (), None, 0 if devices > 1 else None, False
        )
        held = sum(-(-len(each) // devices) * each[:1].nbytes for each in (layer.codes, layer.scale))
        kind = f"linear layers in {layer.form}"
        numbers = -(-layer.numbers // devices)
        away = waits(layer.codes) or encoders.waiting(network) is not None
        yield ResidentTensor(component, placed, kind, numbers, {"quantized": held}, away)


def _in_net(config: Config, parts: Components, name: str, p: nn.Parameter) -> _Kinds:
    """A parameter of the net that is not trained (behind the layer that is read, or the base of an adapter) has neither
    gradient nor average."""
    size = 4 if name in parts.float32 else parts.numerics.weights.itemsize
    if not p.requires_grad:
        return lambda name, shape: {"weights": prod(shape) * size}
    averages = config.ema.enabled + len(config.ema.post_hoc)
    refers = REFERENCE in parts.objective.needs.networks
    state_bytes = plugins.find("optimizers", config.optimizer.name).state_bytes
    return lambda name, shape: {
        "weights": prod(shape) * size,
        # Of those that are used in the backward pass the largest is counted where it is made: in a step (peak.py).
        "gradients": 0 if config.optimizer.in_backward else prod(shape) * size,
        "moments": state_bytes(config.optimizer, name, shape),
        "averages": prod(shape) * _AVERAGE * averages,
        **({"reference": prod(shape) * size} if refers else {}),
    }


def _buffers(parts: Components, absent: Collection[str]) -> int:
    there = [m for name, m in parts.family.components.items() if name not in absent and encoders.waiting(m) is None]
    modules = {id(m): m for network in (*there, parts.net) for m in network.modules()}
    own = [b for m in modules.values() if not isinstance(m, QuantizedLinear) for b in m.buffers(recurse=False)]
    return sum(b.nbytes for b in {id(b): b for b in own if not waits(b)}.values())


def _check_optimizer(config: Config, parts: Components, found: MemoryCount) -> None:
    """UserError for an optimizer that needs whole parameters where the mesh splits them, and for what else it
    refuses: patterns of names, libraries that are not here."""
    trained = {name: p for name, p in parts.net.named_parameters() if p.requires_grad}
    built = optimizer.build(config.optimizer, trained)
    splits = any(
        each.kinds.get("gradients") and (each.placed.tensor is not None or each.placed.fsdp is not None)
        for each in found.held
    )
    if splits and not all(part.elementwise for part in built.parts):
        raise UserError(
            f"optimizer.name={config.optimizer.name} works on whole parameters, and {found.mesh} splits them over "
            "devices: use adamw, lion or schedule_free, or data parallelism alone (mesh.ici_fsdp_parallelism=1 "
            "mesh.ici_tensor_parallelism=1)",
            code="conflict",
            setting="optimizer.name",
        )
