"""Names of a network's tensors in the files of its authors, for those of its library: one table for both directions.

Each `Link` is a tensor of the authors' file and the library's tensors that it is made of, so reading is the inverse of
writing, equal to the bit. A family writes a `NameTable` next to the class that the names belong to.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from daguerre.checkpoint.safetensors import Later
from daguerre.errors import UserError
from daguerre.models.weights import files

Form = Literal["same", "convolution", "transposed", "fused", "swapped", "flat"]
Shape = tuple[int, ...]


class Link(NamedTuple):
    """One tensor of the original layout."""

    original: str
    names: tuple[str, ...]
    """Its tensors in the library's names: one, or the parts of a fused projection, which follow each other in its
    rows."""
    form: Form = "same"
    """`convolution`: a matrix that the original has as a 1x1 convolution; `swapped`: the two halves of its rows in the
    other order; `flat`: rows that the original has one behind the other, as a vector."""


Layers = tuple[str, ...]
"""Layers of a network that another program has as one: the parts of a fused projection, or a single one."""
Spelling = tuple[str, Layers, bool]
"""A name in a file, the layers that it means, and whether it names them in the original layout."""
Links = Callable[[Iterable[str]], list[Link]]
"""The links of a network whose tensors have these names in its library."""
_NUMBER = re.compile(r"\.(\d+)\.")
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "")
"""What files put before the names of a denoiser in the original layout; the first is that of files of whole models, the
third NVIDIA's."""
FLAT = ("lora_unet_", "lycoris_")
"""What files of LoRAs put before such names, and before diffusers', with `_` for each dot."""


class FileNames(ABC):
    """Names that files of one network have for its tensors."""

    marks: Mapping[str, str] = MappingProxyType({})
    """Originals by which a file tells whether its network has a part, and the switch of it in the config."""

    def told(self, names: Collection[str]) -> dict[str, bool]:
        """Numbers of a config that a file with tensors of these names tells."""
        return {}

    @abstractmethod
    def links_in(self, held: Collection[str], names: Iterable[str]) -> tuple[str, list[Link]]:
        """The prefix of a file with tensors of the names `held`, and the links of a network with these `names`."""


@dataclass(frozen=True)
class PrefixedNames(FileNames):
    """Names that are the library's, but for the wrappers that are named before them: of a model that also speaks or
    sees, programs write `model.`, `language_model.`, both, or none."""

    wrappers: tuple[str, ...]
    apart: tuple[str, ...] = ()
    """Beginnings of names that a file has without a wrapper."""

    def links(self, names: Iterable[str]) -> list[Link]:
        """The tensors of a file that is written: the first wrapper is before every name that does not stand apart."""
        bare = {name: self._bare(name) for name in names}
        return [Link(f"{'' if own.startswith(self.apart) else self.wrappers[0]}{own}", (n,)) for n, own in bare.items()]

    def links_in(self, held: Collection[str], names: Iterable[str]) -> tuple[str, list[Link]]:
        """No prefix, and links of what the file has. UserError where it has a name twice."""
        spelt: dict[str, str] = {}
        for name in held:
            if (other := spelt.setdefault(self._bare(name), name)) != name:
                raise UserError(f"it has {self._bare(name)} twice: {other} and {name}", code="conflict")
        return "", [Link(spelt[bare], (name,)) for name in names if (bare := self._bare(name)) in spelt]

    def _bare(self, name: str) -> str:
        while start := next((each for each in self.wrappers if name.startswith(each)), ""):
            name = name.removeprefix(start)
        return name


@dataclass(frozen=True, eq=False)
class NameTable(FileNames):
    """Names of a network that numbers its blocks the same way in both layouts."""

    layers: Mapping[str, str | tuple[str, ...]]
    """The library's layers by the original one, without `.weight` and `.bias`; the first `*` is the number of a block.
    Several are the parts of a fused projection."""
    swapped: frozenset[str] = frozenset()
    """The library's layers whose two halves of rows are in the other order there."""
    scales: frozenset[str] = frozenset()
    """Original layers whose weight is called `scale`."""
    text_encoders: str = "te"
    prefix: str = ""
    """What its authors' files have before every name."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The library's parameters outside of layers by the original name."""
    flat: frozenset[str] = frozenset()
    """Originals among these that are a vector, row by row."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Originals by which a file tells whether its network has a part, and the switch of it in the config."""
    omi: Mapping[str, str] = field(default_factory=dict)
    """Names of layers in OMI, the layout of OneTrainer's LoRAs until 2026, where they are not the originals."""
    others: bool = False
    """Whether layers that the table does not have, and parameters outside of layers, have the same name in both."""

    @cached_property
    def _originals(self) -> dict[str, str]:
        pairs = [(original, self.parts(original)) for original in self.layers]
        return {layer: original for original, layers in pairs for layer in layers}

    @cached_property
    def _parameters(self) -> dict[str, str]:
        return {name: original for original, name in self.parameters.items()}

    def parts(self, original: str) -> tuple[str, ...]:
        """The library's layers that an original one is made of, as the table has both."""
        layers = self.layers[original]
        return (layers,) if isinstance(layers, str) else layers

    def links_in(self, held: Collection[str], names: Iterable[str]) -> tuple[str, list[Link]]:
        """The prefix of a file with tensors of the names `held`, and the original tensors of a network with these."""
        links = self.links(names)
        # A name without a prefix is also in files with one, so the prefix with the most names is the file's.
        return max(PREFIXES, key=lambda start: sum(start + link.original in held for link in links)), links

    def links(self, names: Iterable[str]) -> list[Link]:
        """The original tensors of a network with these names. UserError for a name that the table does not have."""
        found: dict[str, Link] = {}
        for name in names:
            layer, _, tensor = name.rpartition(".")
            # The number of a block is the first one; `ff.net.0` and `to_out.0` behind it belong to the layer's name.
            number = match[1] if (match := _NUMBER.search(name)) else ""
            own = self._parameters.get(name) or self._parameters.get(_NUMBER.sub(".*.", name, count=1))
            if own is not None:
                link = Link(own.replace("*", number), (name,), "flat" if own in self.flat else "same")
                found[link.original] = link
                continue
            original = self._originals.get(layer) or self._originals.get(_NUMBER.sub(".*.", layer, count=1))
            if original is None and self.others:
                found[name] = Link(name, (name,))
                continue
            if original is None:
                raise UserError(f"the original layout has no name for {name}", code="unsupported")
            parts = tuple(f"{part.replace('*', number)}.{tensor}" for part in self.parts(original))
            form: Form = "fused" if len(parts) > 1 else "swapped" if self.swapped & {*self.parts(original)} else "same"
            end = "scale" if original in self.scales else tensor
            link = Link(f"{original.replace('*', number)}.{end}", parts, form)
            found[link.original] = link
        return [*found.values()]

    def told(self, names: Collection[str]) -> dict[str, bool]:
        """Numbers of a config that a file with tensors of these names tells."""
        return {
            switch: any(f"{prefix}{original}" in names for prefix in PREFIXES)
            for original, switch in self.marks.items()
        }

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        """Names of layers in files of LoRAs (models/network.py, Names)."""
        for layer in layers:
            yield from spelled(layer, (layer,), (f"{component}.", *PREFIXES), (*FLAT, f"lora_{component}_"))
        behind = f"{component}."
        for original, parts in self._layers(layers).items():
            yield from spelled(original, parts, (*PREFIXES, behind), FLAT, is_original=True)
            if len(parts) > 1:  # the parts of a fused projection in OMI, by their numbers
                yield from ((f"{behind}{original}.{i}", (part,), True) for i, part in enumerate(parts))
            if (other := self.omi.get(original)) is not None:
                yield f"{behind}{other}", parts, True

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        """The names of sd-scripts, which are those of the original layout."""
        return {f"lora_unet_{flat(original)}": parts for original, parts in self._layers(layers).items()}

    def _layers(self, layers: Sequence[str]) -> dict[str, Layers]:
        links = self.links([f"{layer}.weight" for layer in layers])
        return {link.original.rpartition(".")[0]: tuple(n.rpartition(".")[0] for n in link.names) for link in links}


def flat(name: str) -> str:
    """A name as sd-scripts has it, without dots."""
    return name.replace(".", "_")


def spelled(
    name: str, layers: Layers, dotted: Iterable[str], flattened: Iterable[str], is_original: bool = False
) -> Iterator[Spelling]:
    """Names of layers in files of LoRAs: `name` behind each of the beginnings `dotted`, and without dots behind each of
    the `flattened`."""
    yield from ((f"{start}{name}", layers, is_original) for start in dotted)
    yield from ((f"{start}{flat(name)}", layers, is_original) for start in flattened)


def unpacked(link: Link, tensor: Tensor, shapes: Mapping[str, Shape] | None = None) -> dict[str, Tensor]:
    """The library's tensors that an original one is made of; only halves that swap are copied.

    Args:
        shapes: those that the network has for its tensors; None where the parts of what is fused are equal. An original
            of another size comes back in shapes that the network does not have, which `weights.load.fill` then names.
    """
    if link.form == "fused":
        rows = [shapes[name][0] for name in link.names] if shapes else []
        # By the network's own rows: keys and values may have fewer heads than queries.
        parts = tensor.split(rows) if sum(rows) == len(tensor) else tensor.chunk(len(link.names))
        return dict(zip(link.names, parts, strict=True))
    (name,) = link.names
    if link.form == "swapped":
        return {name: torch.cat(tensor.chunk(2)[::-1])}
    if link.form == "convolution":
        return {name: tensor.reshape(squeezed(tuple(tensor.shape)))}
    if link.form == "flat":
        fits = shapes is not None and prod(shapes[name]) == tensor.numel()
        return {name: tensor.reshape(shapes[name]) if shapes is not None and fits else tensor}
    return {name: tensor.T if link.form == "transposed" else tensor}


def packed(link: Link, network: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor | Later:
    """The original tensor of the library's ones, in `dtype` (None: as they are). What is put together is made when the
    file is written, so that no second copy of the network is held."""
    first = network[link.names[0]]
    if link.form in ("fused", "swapped"):
        parts = [network[name] for name in link.names] if link.form == "fused" else [*reversed(first.chunk(2))]
        to = first.dtype if dtype is None else dtype
        shape = (sum(len(part) for part in parts), *first.shape[1:])
        return Later(to, shape, lambda: torch.cat([part.to(to) for part in parts]))
    if link.form == "convolution" and first.ndim == 2:
        first = first[:, :, None, None]
    if link.form == "flat":
        first = first.flatten()
    return files.cast(first.T if link.form == "transposed" else first, dtype)


def original_shape(link: Link, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of the original tensor, of those of the library's; a 1x1 convolution as a matrix."""
    first = shapes[link.names[0]]
    if link.form == "fused":
        return (sum(shapes[name][0] for name in link.names), *first[1:])
    if link.form == "flat":
        return (prod(first),)
    return tuple(reversed(first)) if link.form == "transposed" else first


def squeezed(shape: Shape) -> Shape:
    """Without the trailing ones of a 1x1 convolution, which is a matrix in some files."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
