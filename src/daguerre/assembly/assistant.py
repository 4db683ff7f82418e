"""The assistant: a frozen LoRA of the denoiser that acts in training alone (`model.assistant`).

Weights that were distilled to few steps forget the distillation when they are trained directly. With a LoRA that undoes
it, so that the weights need many steps again, training learns only what the data show; once the LoRA is off, images
come in few steps as before. It acts in every pass that is trained or validated, and in no generated image or export.

Its products are added to what layers give, never to their weights: these stay as they are to the bit, in few bits and
where they are trained, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daguerre.adapters.adapter import Attached
from daguerre.config.config import Config
from daguerre.distributed.mesh import Mesh
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.models.family import Family
from daguerre.models.lora_files import contents, read
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, DOWN, UP, Addition
from daguerre.models.network import Network
from daguerre.models.settings import ASSISTANT
from daguerre.models.weights import resolve

_SETTING = f"model.{ASSISTANT}"


class Product(nn.Module):
    """The frozen factors of one layer."""

    def __init__(self, addition: Addition) -> None:
        super().__init__()
        self.layer, self.acts = addition.layer, True
        self.down = nn.Parameter(addition.factors[DOWN].float(), requires_grad=False)
        self.up = nn.Parameter(addition.factors[UP].float() * addition.scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] by both, [..., out]."""
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up)


class Assistant(nn.Module):
    """The products of all layers."""

    def __init__(self, additions: Iterable[Addition]) -> None:
        super().__init__()
        self.products: Any = nn.ModuleList(map(Product, additions))

    def attach(self, denoiser: nn.Module) -> None:
        """Makes the layers of the denoiser add their products, also those that an adapter has wrapped."""
        for product in self.products:
            layer = denoiser.get_submodule(product.layer)
            # Not a part of the layer, whose names and exports stay as they are. A hook alike for all layers, with what
            # differs on the layer: blocks that are alike are compiled once.
            vars(layer)[ASSISTANT] = product
            layer.register_forward_hook(_add)

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Within the context nothing is added."""
        before = [product.acts for product in self.products]
        for product in self.products:
            product.acts = False
        try:
            yield
        finally:
            for product, acts in zip(self.products, before, strict=True):
                product.acts = acts


def _add(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    product = layer.assistant
    return y + product(inputs[0]).to(y.dtype) if product.acts else y


def opened(config: Config, family: Family) -> Network | None:
    """The assistant of a recipe, before adapters change the names of layers; None without one. UserError for a file
    that is not wholly a LoRA of the denoiser's linear layers."""
    place = getattr(config.model, ASSISTANT, None)
    if place is None:
        return None
    file = contents.find(located(place, _SETTING))
    with torch.device("cpu"):  # its numbers are few, and its digest is asked for
        found = read.read(file, family.components)
    (denoiser,) = config.model.networks("denoiser")
    for component, additions in found.items():
        for each in additions:
            _check(file, component, denoiser, each, family)
    module = Assistant(sorted(found[denoiser], key=lambda each: each.layer))
    return Network(module.to("meta") if resolve.without_weights() else module, ASSISTANT)


def located(place: str, setting: str) -> Path:
    """The file that a setting names, or the folder that holds one.

    A repository of the hub alone means the file that diffusers writes."""
    if Path(place).expanduser().exists():
        return Path(place).expanduser()
    name = f"{place}/{DIFFUSERS_FILE}" if place.count("/") == 1 and resolve.is_hub_id(place) else place
    try:
        return resolve.file(name, resolve.Options())
    except UserError as error:
        raise type(error)(f"{setting}: {error}", code=error.code, setting=setting) from error


def _check(file: Path, component: str, denoiser: str, addition: Addition, family: Family) -> None:
    name, why = f"{component}.{addition.layer}", ""
    if component != denoiser:
        why = f"and an assistant acts on the {denoiser} alone"
    elif addition.tensor != "weight" or addition.factors.keys() != {DOWN, UP}:
        why = f"of which it has {', '.join(addition.factors)}, and an assistant is a product of two matrices alone"
    elif not isinstance(family.components[component].get_submodule(addition.layer), nn.Linear):
        why = "which is no linear layer"
    if why:
        raise UserError(
            f"{_SETTING}={file} adds to {name}, {why}: give a plain LoRA of the {denoiser}'s linear layers",
            code="unsupported",
            setting=_SETTING,
        )


def added(family: Family, attached: Attached, network: Network | None) -> tuple[Family, Attached]:
    """The family with the assistant among its networks, so that all that counts, moves and compares networks knows
    it. It acts once it is attached."""
    if network is None:
        return family, attached
    return replace(family, networks={**family.networks, ASSISTANT: network}), attached


def attach(family: Family, dtype: torch.dtype) -> None:
    """Makes the assistant act, in the type in which the net computes, on the layers that stay: call it when all others
    have put theirs in their places."""
    if (own := _of(family)) is not None:
        (denoiser,) = (network.module for network in family.networks.values() if network.role == "denoiser")
        own.to(dtype).attach(denoiser)


def _of(family: Family) -> Any:
    return family.components.get(ASSISTANT)


@contextmanager
def absent(family: Family) -> Iterator[None]:
    """Within the context the denoiser is without the assistant: for images that are generated."""
    own = _of(family)
    with nullcontext() if own is None else own.absent():
        yield


def check_mesh(family: Family, mesh: Mesh) -> None:
    """UserError for a mesh that splits layers over `tensor`, of whose parts the factors are not."""
    if _of(family) is not None and mesh.degree("tensor") > 1:
        raise UserError(
            f"{_SETTING}: its factors are whole on each device, and a mesh with tensor splits the layers that they are "
            "added to: set mesh.ici_tensor_parallelism=1 (and mesh.dcn_tensor_parallelism=1), and fsdp in its place",
            code="unsupported",
            setting=_SETTING,
        )


def notices(config: Config, family: Family) -> list[str]:
    """A line about an assistant."""
    if (own := _of(family)) is None:
        return []
    place = getattr(config.model, ASSISTANT)
    return [
        f"{_SETTING}={place} acts on {counted(len(own.products), 'layer')} where losses are computed, and not in "
        "images and exports"
    ]
