"""The contract of every network: a module, its role, and the facts that shared code must know of it.

Facts are data, written once for a class of networks, next to the family (or in models/parts/) that brings the class.
Shared code reads them of the network at hand, and never guesses them from names of classes or parameters: a network
without facts trains on one device, and a mesh splits its parameters along dim 0 and says so (models/placement.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from daguerre.distributed.sharding_rules import Dims
from daguerre.models.hosts import host
from daguerre.models.settings import ComponentSpec, Role
from daguerre.models.weights.original_names import Link

Table = dict[str, Dims]
"""The logical axes of parameters, by pattern of their names."""


class Names(Protocol):
    """Names that files of other programs have for the tensors of a network, such as a `NameTable`."""

    def links(self, names: Iterable[str]) -> list[Link]:
        """The tensors of such a file that stand for the network's tensors of these names: read both ways."""


@dataclass(frozen=True)
class Facts:
    """Facts of a class of networks. All are optional: without them the features that read them are refused or said."""

    blocks: tuple[str, ...] = ()
    """Class names of the blocks that the network consists of: FSDP gathers and frees them one at a time,
    training.base_precision quantises the layers in them, training.compile=blocks compiles those of diffusers."""
    axes: Mapping[str, Dims] = field(default_factory=dict)
    """Logical axes of each parameter (distributed/sharding_rules.py): one pattern must mean it. A pattern that means
    none is fine, as a class has parts that only some of its configs have. Empty: a mesh splits along dim 0."""
    heads: str = ""
    """The attribute by which attention modules count their heads. Heads are split whole, and a module whose heads are
    split gets the count of its device."""
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of the layers that an adapter's preset (`attention`, `ff`, `conv`) stands for."""
    names: Names | None = None
    """Names of its tensors in files of other programs; None where there are no such files."""
    unread: frozenset[str] = frozenset()
    """Names of the parameters that no output depends on, such as a text encoder's layers behind the one that is read.
    Never trained, as they would have no gradient."""


@dataclass(frozen=True, eq=False)
class Network:
    """A network of a family, or one that an adapter or a loss brings."""

    module: nn.Module
    role: Role
    facts: Facts = Facts()
    trainable: bool = False
    """Whether adapters can train it, or add to it."""

    @property
    def spec(self) -> ComponentSpec:
        """Role and trainability, as settings declare them."""
        return ComponentSpec(self.role, self.trainable)

    @property
    def unread(self) -> list[nn.Parameter]:
        """The parameters that no output depends on, also once an adapter has wrapped their layers."""
        hosts = ((host(name), p) for name, p in self.module.named_parameters())
        return [p for (name, factor), p in hosts if name in self.facts.unread and not factor]


def named(
    modules: Mapping[str, nn.Module], specs: Mapping[str, ComponentSpec], facts: Mapping[str, Facts]
) -> dict[str, Network]:
    """The networks of these modules, with the roles of `specs` and, where there are any, their facts."""
    return {
        name: Network(module, specs[name].role, facts.get(name, Facts()), specs[name].trainable)
        for name, module in modules.items()
    }


def block_classes(networks: Iterable[Network]) -> frozenset[str]:
    """Class names of the blocks of all these networks."""
    return frozenset(name for network in networks for name in network.facts.blocks)


def layers(dims: Dims, *names: str) -> Table:
    """The axes of linear layers or convolutions: these of the weight, and the first of them of the bias."""
    return {f"{name}.{part}": axes for name in names for part, axes in (("weight", dims), ("bias", dims[:1]))}
