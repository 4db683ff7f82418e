"""The place of each parameter of a model on a mesh, by the logical axes of its network and the recipe's rules.

Works on networks with and without memory, and touches no tensor. distributed/parallelize.py splits parameters by the
result; memory/static.py counts what it takes of a device.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from daguerre.distributed import sharding_rules
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import HEAD, ParameterSplit, Rules, axes_of
from daguerre.errors import UserError
from daguerre.models import hosts as named_hosts
from daguerre.models.network import Network


@dataclass(frozen=True)
class Placement:
    """The places of the parameters of one network, or of a net of several."""

    placed: tuple[ParameterSplit, ...]
    """The place of each parameter, in the network's order."""
    patterns: Mapping[str, str]
    """The pattern that means a parameter, by its name; "" where the network has no logical axes."""
    problems: tuple[tuple[str, str], ...]
    """(parameter, why it could not be split as the rules say)."""
    unknown: tuple[str, ...] = ()
    """The networks of a net that have no logical axes."""


def placement(network: Network, axis_rules: Rules, mesh: Mesh) -> Placement:
    """Places of the parameters of a network, by its own names. UserError where names and patterns do not fit together.

    Parameters of a network without logical axes are split over `fsdp` along dim 0. A single number stays whole.
    """
    own = {name: tuple(p.shape) for name, p in network.module.named_parameters()}
    shapes = own | _few_bits(network.module)
    table = network.facts.axes
    hosts = {name: named_hosts.host(name) for name in shapes}
    # A LoRA's two factors are cut like the weight's rows and columns; a Hadamard or Kronecker product has no such dims.
    odd = next((name for name, (_, factor) in hosts.items() if factor == named_hosts.OTHER), None)
    if odd and mesh.degree("tensor") > 1:
        raise UserError(
            f"{odd} cannot follow its layer when that is split over the mesh's tensor axis: only adapters of kind lora "
            "and rslora can. Set mesh.ici_tensor_parallelism=1 (and mesh.dcn_tensor_parallelism=1)",
            code="unsupported",
        )
    whole = {host: shapes[name] for name, (host, factor) in hosts.items() if not factor}
    of_host = sharding_rules.logical(table, whole) if table else dict.fromkeys(whole, ())
    dims = {name: named_hosts.of_factor(of_host.get(host, ()), factor) for name, (host, factor) in hosts.items()}
    attention = _attention(network)
    heads = {name: count for name, (_, count) in attention.items()}
    placed, messages = sharding_rules.place(shapes, dims, axis_rules, mesh, heads)
    placed = _partial(_with_hosts(placed, hosts), attention)
    meant = {name: next((each for each in table if fnmatchcase(hosts[name][0], each)), "") for name in own}
    patterns = {name: name if hosts[name][1] == named_hosts.ROWS else pattern for name, pattern in meant.items()}
    problems = [line.partition(": ") for line in messages]
    return Placement(
        # FSDP2 cannot cut a single number, such as a learnt scale.
        tuple(each if each.shape else replace(each, fsdp=None) for each in placed if each.name in own),
        patterns,
        tuple((name, why) for name, _, why in problems),
    )


def _attention(network: Network) -> dict[str, tuple[str, int]]:
    """The attention module that a parameter is in, and its heads, by the parameter's name."""
    found: dict[str, tuple[str, int]] = {}
    for name, module in network.module.named_modules():
        # Of a module itself: diffusers' networks also answer with the numbers of their configs.
        if network.facts.heads and isinstance(count := vars(module).get(network.facts.heads), int):
            # Where several heads share a key, a device that has a key's heads needs all that share it.
            count = getattr(module, network.facts.kv_heads, count) if network.facts.kv_heads else count
            found |= {f"{name}.{parameter}": (name, count) for parameter, _ in module.named_parameters()}
    return found


def _partial(placed: list[ParameterSplit], attention: Mapping[str, tuple[str, int]]) -> list[ParameterSplit]:
    """Marks what all heads use in attention whose heads are split."""
    split = {
        attention[each.name][0]
        for each in placed
        if each.name in attention and each.tensor is not None and "heads" in axes_of(each.dims[each.tensor])
    }
    return [
        replace(each, partial=HEAD in each.dims and each.name in attention and attention[each.name][0] in split)
        for each in placed
    ]


def _few_bits(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that linear layers keep as codes, which are no parameters but have their logical axes."""
    # A LoRA follows the axes of its layer's weight, which is no parameter here.
    found = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    return {f"{n}.weight": (m.out_features, m.in_features) for n, m in found.items() if "weight" not in m._parameters}


def _with_hosts(placed: list[ParameterSplit], hosts: Mapping[str, tuple[str, str]]) -> list[ParameterSplit]:
    """Factors that are added to a weight follow it over `tensor`: B where its rows are split, A where its columns."""
    tensor = {hosts[each.name][0]: each.tensor for each in placed if not hosts[each.name][1]}
    found = []
    for each in placed:
        host, factor = hosts[each.name]
        if factor.startswith("lora_"):
            dim = 0 if factor == "lora_B" else 1
            own = dim if tensor[host] == dim else None
            each = replace(each, tensor=own, fsdp=0 if own is not None and each.fsdp == own else each.fsdp)
        found.append(each)
    return found


def of_net(net: nn.Module, networks: Mapping[str, Network], axis_rules: Rules, mesh: Mesh) -> Placement:
    """Places of the parameters of the trained net, by its names: `COMPONENT.` and the component's own. Parameters of no
    network have no logical axes either."""
    # By identity: the net has its parameters under `COMPONENT.`, or under names of a wrapper's own.
    own = {id(p): name for name, p in net.named_parameters()}
    found: dict[str, ParameterSplit] = {}
    patterns: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    unknown: list[str] = []
    for component, network in networks.items():
        names = {name: own[id(p)] for name, p in network.module.named_parameters() if id(p) in own}
        if names:
            unknown += [] if network.facts.axes else [component]
            inner = placement(network, axis_rules, mesh)
            found |= {names[each.name]: replace(each, name=names[each.name]) for each in inner.placed}
            patterns |= {names[name]: pattern for name, pattern in inner.patterns.items()}
            problems += [(names[name], why) for name, why in inner.problems]
    rest = {name: tuple(p.shape) for name, p in net.named_parameters() if name not in found}
    for each in sharding_rules.place(rest, dict.fromkeys(rest, ()), axis_rules, mesh, {})[0]:
        found[each.name] = each if each.shape else replace(each, fsdp=None)
    placed = tuple(found[name] for name, _ in net.named_parameters())
    unknown += dict.fromkeys(name.partition(".")[0] for name in rest)
    return Placement(placed, dict.fromkeys(rest, "") | patterns, tuple(problems), tuple(unknown))


def describe_unknown(names: Collection[str], mesh: Mesh) -> list[str]:
    """A notice about networks without logical axes; none where there are none, or the mesh splits no parameters."""
    parts = []
    if mesh.degree("fsdp") > 1:
        parts.append(f"split over the {mesh.degree('fsdp')} devices of fsdp along dim 0")
    if mesh.degree("tensor") > 1:
        parts.append(f"computed whole by each of the {mesh.degree('tensor')} devices of a tensor group")
    if not names or not parts:
        return []
    return [f"{', '.join(names)}: no logical axes are known, so their parameters are {' and '.join(parts)}"]


def frozen(net: nn.Module, networks: Mapping[str, Network]) -> dict[str, Network]:
    """The networks that are no part of the net."""
    in_net = {id(p) for p in net.parameters()}
    return {n: each for n, each in networks.items() if not any(id(p) in in_net for p in each.module.parameters())}


def frozen_modules(net: nn.Module, networks: Mapping[str, Network]) -> dict[str, nn.Module]:
    """The modules of the networks that are no part of the net."""
    return {name: network.module for name, network in frozen(net, networks).items()}
