"""Where each parameter of a model goes on a mesh: the families' logical axes and the recipe's rules, brought together.

Works on networks with and without memory, and touches no tensor. What is done with the result is parallel/apply.py;
what it takes of a device is plan_bytes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from daguerre.families import logical_axes
from daguerre.parallel import rules
from daguerre.parallel.mesh import Mesh
from daguerre.parallel.rules import Placed, Rules


@dataclass(frozen=True)
class Placement:
    """Of one network, or of a net of several."""

    placed: tuple[Placed, ...]
    """In the network's order."""
    patterns: Mapping[str, str]
    """The pattern that means a parameter, by its name; "" where no table knows the network."""
    problems: tuple[tuple[str, str], ...]
    """(parameter, why it could not be split as the rules say)."""


def placement(network: nn.Module, axis_rules: Rules, mesh: Mesh) -> Placement:
    """Where the parameters of a network go, by its own names. UserError where names and patterns do not fit together.

    A network that no table knows has no logical axes: its parameters are split over `fsdp` along dim 0. A single number
    stays whole.
    """
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    table = logical_axes.patterns(network)
    dims = rules.logical(table, shapes) if table else dict.fromkeys(shapes, ())
    placed, said = rules.place(shapes, dims, axis_rules, mesh, logical_axes.heads(network))
    patterns = {name: next((each for each in table if fnmatchcase(name, each)), "") for name in shapes}
    problems = [line.partition(": ") for line in said]
    return Placement(
        tuple(each if each.shape else replace(each, fsdp=None) for each in placed),
        patterns,
        tuple((name, why) for name, _, why in problems),
    )


def of_net(net: nn.Module, components: Mapping[str, nn.Module], axis_rules: Rules, mesh: Mesh) -> Placement:
    """Where the parameters of the trained net go, by its names: `COMPONENT.` and the component's own."""
    own = {id(p): name for name, p in net.named_parameters()}
    found: dict[str, Placed] = {}
    patterns: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for network in components.values():
        names = {name: own[id(p)] for name, p in network.named_parameters() if id(p) in own}
        if names:
            inner = placement(network, axis_rules, mesh)
            found |= {names[each.name]: replace(each, name=names[each.name]) for each in inner.placed}
            patterns |= {names[name]: pattern for name, pattern in inner.patterns.items()}
            problems += [(names[name], why) for name, why in inner.problems]
    rest = {name: tuple(p.shape) for name, p in net.named_parameters() if name not in found}
    for each in rules.place(rest, dict.fromkeys(rest, ()), axis_rules, mesh, {})[0]:
        found[each.name] = each if each.shape else replace(each, fsdp=None)
    placed = tuple(found[name] for name, _ in net.named_parameters())
    return Placement(placed, dict.fromkeys(rest, "") | patterns, tuple(problems))


def frozen(net: nn.Module, components: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The components that are no part of the net."""
    in_net = {id(p) for p in net.parameters()}
    return {name: other for name, other in components.items() if not any(id(p) in in_net for p in other.parameters())}
