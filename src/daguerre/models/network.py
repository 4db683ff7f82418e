"""The contract of every network: a module, its role, and the facts that shared code must know of it.

Facts are data, written once for a class of networks, next to the family (or in models/parts/) that brings the class.
Shared code reads them of the network at hand, and never guesses them from names of classes or parameters: a network
without facts trains on one device, and a mesh splits its parameters along dim 0 and says so (models/placement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from torch import nn

from daguerre import plugins
from daguerre.distributed.sharding_rules import HEAD as HEAD  # these three for the tables of families
from daguerre.distributed.sharding_rules import Dims as Dims
from daguerre.distributed.sharding_rules import Segment as Segment
from daguerre.models.hosts import host
from daguerre.models.settings import ComponentSpec, Role
from daguerre.models.weights.original_names import Layers, Spelling

if TYPE_CHECKING:
    from daguerre.objectives.networks.teacher import Teacher

EMPTY: Mapping[str, str] = MappingProxyType({})
TIME = "timestep"
"""The argument by which a denoiser is called with its c_noise [B], where that is not its second one."""
Class = TypeVar("Class", bound=type)
Table = dict[str, Dims]
"""The logical axes of parameters, by pattern of their names."""


class Names(Protocol):
    """Names that files of LoRAs of other programs have for the layers of a class of networks.

    `networks` are all of the model, by component: the names of a text encoder depend on how many there are.
    """

    @property
    def text_encoders(self) -> str:
        """The prefix that sd-scripts' names have for the only text encoder of a model with this denoiser: `te`."""

    @property
    def swapped(self) -> frozenset[str]:
        """Layers whose two halves of outputs are in the other order in the original layout."""

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        """Every name that a file may have for these layers of the component."""

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        """The names that sd-scripts has for these layers, each with the layers that it means."""


class Architecture(NamedTuple):
    """A model by the names that headers of files have for it."""

    modelspec: str
    """Stability's ModelSpec 1.0.1, `modelspec.architecture` without the kind of the file."""
    kohya: Mapping[str, str] = EMPTY
    """`ss_*` keys of sd-scripts that say which model it is."""
    implementation: str = "diffusers"
    """`modelspec.implementation`."""


@dataclass(frozen=True)
class Facts:
    """Facts of a class of networks. All are optional: without them the features that read them are refused or said."""

    blocks: tuple[str, ...] = ()
    """Class names of the blocks that the network consists of: FSDP gathers and frees them one at a time,
    training.base_precision quantises the layers in them, training.compile=blocks compiles those of diffusers."""
    called: tuple[str, ...] = ()
    """Class names of modules deep inside that are called by themselves, such as the decoder of a language model that
    also sees: FSDP gathers for their calls what they have outside of blocks."""
    axes: Mapping[str, Dims] = field(default_factory=dict)
    """Logical axes of each parameter (distributed/sharding_rules.py): one pattern must mean it. A pattern that means
    none is fine, as a class has parts that only some of its configs have. Empty: a mesh splits along dim 0."""
    heads: str = ""
    """The attribute by which attention modules count their heads. Heads are split whole, and a module whose heads are
    split gets the count of its device."""
    kv_heads: str = ""
    """The attribute by which they count the heads of keys and values, where several heads of queries share one."""
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of the layers that an adapter's preset (`attention`, `ff`, `conv`) stands for."""
    readers: tuple[tuple[str, ...], ...] = ()
    """Layers that read one input, as one row each: a pattern of the names of their modules, then their names there, in
    the order in which they are called. With a LoRA they are computed as one product."""
    names: Names | None = None
    """Names of its layers in LoRAs of other programs than diffusers and peft; None where there are no such files."""
    unknown_to_diffusers: tuple[str, ...] = ()
    """Patterns of the layers that diffusers' `load_lora_weights` does not find in a file with kohya's names, which it
    says by a warning alone."""
    architecture: Callable[[nn.Module, str], Architecture | None] | None = None
    """The model with this denoiser, by the network and what it predicts (`eps`, `v`, `flow`; empty: unknown); None for
    one with other numbers than any that has a name."""
    other_models: tuple[Architecture, ...] = ()
    """Further models whose denoiser has this class and these numbers, which only a file's header tells apart."""
    unread: frozenset[str] = frozenset()
    """Names of the parameters that no output depends on, such as a text encoder's layers behind the one that is read.
    Never trained, as they would have no gradient."""
    of_references: frozenset[str] = frozenset()
    """Names of the parameters that only reference images reach: an update without any leaves them, with their moments
    and their decay, as they are."""
    published_bf16: bool = False
    """Whether published files have its weights in bfloat16: of a frozen text encoder that computes in it
    (training.frozen_precision) they are stored so."""
    float32: tuple[str, ...] = ()
    """Patterns of the parameters that stay float32 where weights are stored in 16 bits, as the library keeps them."""

    @property
    def counts(self) -> frozenset[str]:
        """The attributes by which attention modules count heads."""
        return frozenset({self.heads, self.kv_heads} - {""})


def architecture_of(known: Iterable[tuple[nn.Module, Facts]], prediction: str) -> Architecture | None:
    """The model of the first of these networks whose facts name one, by what it predicts; None without."""
    naming = ((network, facts.architecture) for network, facts in known)
    return next((named(network, prediction) for network, named in naming if named is not None), None)


@dataclass(frozen=True, eq=False)
class Network:
    """A network of a family, or one that an adapter or a loss brings."""

    module: nn.Module
    role: Role
    facts: Facts = Facts()
    trainable: bool = False
    """Whether adapters can train it, or add to it."""
    teacher: Teacher | None = None
    """How a denoiser is called that a loss compares the student with; None: it is called itself."""

    @property
    def denoises(self) -> bool:
        """True for the denoiser of the model, and for that of a teacher."""
        return self.role == "denoiser" or self.teacher is not None

    @property
    def spec(self) -> ComponentSpec:
        """Role and trainability, as settings declare them."""
        return ComponentSpec(self.role, self.trainable)

    @property
    def readers(self) -> Iterator[list[nn.Module]]:
        """The layers of each module that read one input, in the order in which they are called."""
        for name, module in self.module.named_modules():
            own = dict(module.named_children())
            for pattern, *layers_there in self.facts.readers:
                # Attention without keys of its own, as some configs have it, has not all of these layers.
                if fnmatchcase(f".{name}", f"*.{pattern}") and own.keys() >= {*layers_there}:
                    yield [own[layer] for layer in layers_there]

    @property
    def unread(self) -> list[nn.Parameter]:
        """The parameters that no output depends on, also once an adapter has wrapped their layers."""
        return [p for name, p in self._own if name in self.facts.unread]

    @property
    def of_references(self) -> list[nn.Parameter]:
        """The parameters that only reference images reach, with those that an adapter has added to their layers."""
        return [p for name, p in self.module.named_parameters() if host(name)[0] in self.facts.of_references]

    @property
    def float32(self) -> list[nn.Parameter]:
        """The parameters that stay float32, whatever type the others are stored in."""
        return [p for name, p in self._own if any(fnmatchcase(name, each) for each in self.facts.float32)]

    @property
    def _own(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters without those that an adapter has added."""
        # Facts name parameters as the library does: adapters that wrap a layer change its name.
        hosts = ((host(name), p) for name, p in self.module.named_parameters())
        return [(name, p) for (name, factor), p in hosts if not factor]


@cache
# By the class itself, not by its name: libraries have classes of one name with other parameters.
def _known() -> dict[type, Facts]:
    return {kind: facts for table in plugins.declared("families", "FACTS") for kind, facts in table.items()}


def facts_of(module: nn.Module) -> Facts:
    """Facts of a network that no family has loaded, such as one that a file is converted for: those that a family has
    written for its class (`FACTS`); without any for another class."""
    return _known().get(type(module), Facts())


def facts_by_name(kind: str) -> Facts:
    """Facts of a network of which only the name of its class is known, as a config has it."""
    return next((facts for known, facts in _known().items() if known.__name__ == kind), Facts())


def class_of(name: str) -> type | None:
    """The class of this name for which a family has written facts; None where none has."""
    return next((kind for kind in _known() if kind.__name__ == name), None)


def stands_for(library: type) -> Callable[[Class], Class]:
    """Decorates a class with another forward pass of a library's: for all that reads a class's name (configs, indexes
    of pipelines, files of adapters) it is the library's."""

    def stands(kind: Class) -> Class:
        kind.__name__ = kind.__qualname__ = library.__name__
        kind.__module__ = library.__module__
        return kind

    return stands


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
