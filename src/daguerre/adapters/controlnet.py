"""ControlNet (Zhang et al. 2023, arXiv 2302.05543): a network that lets a control image decide where things are.

It reads the control image (edges, a depth map ...) and adds residuals inside the denoiser, which is frozen. Its last
layers start at zero, so that training starts from the base model's images. Only the ControlNet is trained and saved,
in float32. Several in a recipe add up, each with its control image. The networks, and where residuals go, are the
family's (models/controlnets/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from daguerre import keys
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.checkpoint.export import replaced
from daguerre.conditions.condition import ControlImages, OptionalCondition
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.controlnets import controlled
from daguerre.models.controlnets.controlled import Bottleneck, Controlled, ControlNets, Reads, Size, Wanted
from daguerre.models.frozen import keep_evaluating
from daguerre.models.network import Network
from daguerre.models.weights import resolve
from daguerre.settings import ADDRESS, Unused
from daguerre.types import AdapterInputs, Cond

if TYPE_CHECKING:
    from daguerre.models.export.about import About
    from daguerre.models.family import Family
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


class Settings(AdapterSettings):
    """Trains a ControlNet for a frozen denoiser."""

    of_weights = frozenset({"init", "size", "blocks", "bottleneck", "reads"})

    name: Literal["controlnet"] = "controlnet"
    """Name of the adapter."""
    controlnet_model_name_or_path: Annotated[str | None, ADDRESS] = None
    """The ControlNet that training starts from: a folder of diffusers, a run, a .safetensors file, or a hub id. null: a
    new one."""
    init: Literal["base", "random"] = "base"
    """Weights of a new one: those of the base model, in the layers that both have (of Stable Cascade those of its
    EfficientNet), or random ones."""
    size: Size | None = None
    """Of Stable Diffusion and SDXL, transformer blocks of a new one: large (null) has those of the UNet, mid one at
    each place of the deepest level (the form of diffusers' controlnet-canny-sdxl-1.0-mid), small none."""
    blocks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | Literal["all"] | None = None
    """Of Stable Cascade: numbers of the residual blocks before which it adds something, from 0 on, or all. null: as
    Stability has it, eight of them at both ends (0, 4, 8, 12, 51, 55, 59, 63 of 64), or those that a file is for."""
    bottleneck: Bottleneck | None = None
    """Of Stable Cascade, how a new one reads the control image: effnet (null) by an EfficientNet, simple by two
    convolutions, large by eight wide blocks; the last two read what has a latent's size already."""
    reads: Reads | None = None
    """Of Stable Cascade, what a new one reads of the control image: grey (one channel), colour (null, three), holes
    (four: colours and what is unknown), latent (what the EfficientNet makes of it), faces (512: condition faces)."""
    latent_factor: float | None = Field(None, ge=1, le=32)
    """With reads=latent: the control image is made so many times smaller before the EfficientNet reads it. null: 2."""
    condition: OptionalCondition = None
    """The condition that computes the control image from the training image, such as canny. null: the data source
    stores it."""
    image: Literal["control", "control_2", "control_3", "control_4"] = "control"
    """The control image that it reads: of several ControlNets the second may read control_2."""
    conditioning_scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The residuals are multiplied by it, in training and, by default, where images are generated."""
    conditioning_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the samples whose control image is left out in training, so that the ControlNet learns to do without."""

    separate: ClassVar[bool] = True
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("init", "size", "bottleneck", "reads"),
            lambda own: own.controlnet_model_name_or_path is not None,
            "controlnet_model_name_or_path gives a whole ControlNet",
        ),
        Unused(
            ("init",),
            lambda own: own.bottleneck in ("simple", "large"),
            "a bottleneck of this kind has no layers of the base model",
        ),
    )

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """None: the denoiser stays as it is, and other adapters may train it."""
        return ()

    @property
    def learnt(self) -> bool:
        return self.controlnet_model_name_or_path is not None

    @property
    def wanted(self) -> Wanted:
        """Options passed to the family."""
        return Wanted(self.init, self.size, self.blocks, self.bottleneck, self.reads, self.latent_factor)


@dataclass(frozen=True, eq=False)
class ControlNet(Trainable):
    """A ControlNet of a frozen denoiser."""

    net: Controlled
    names: frozenset[str]
    name: str
    """In the net's state, and in the conditioning."""
    network: Any
    settings: Settings
    kind: ControlNets
    float32 = True
    strengths = (0.0, 0.5)

    @property
    def added_networks(self) -> dict[str, Network]:
        """The ControlNet."""
        return {self.name: Network(self.network, "control", self.kind.facts, trainable=True)}

    @property
    def images(self) -> ControlImages:
        """Its control image."""
        return {self.settings.image: self.settings.condition}

    def check(self, inputs: AdapterInputs) -> None:
        """As its kind does."""
        self.kind.check(self.network, inputs.images[self.settings.image])

    def condition(self, inputs: AdapterInputs, cond: Cond) -> Cond:
        """Adds the control image as the network reads it, [B, C, H, W]."""
        hint_BCHW = self.kind.hint(self.network, inputs.images[self.settings.image])
        dropped_B = inputs.draws.get(self._dropped) if self.network.training else None
        if dropped_B is not None:
            hint_BCHW = torch.where(dropped_B[:, None, None, None], self.kind.blank(self.network, hint_BCHW), hint_BCHW)
        return {**cond, self.name: hint_BCHW}

    def random_inputs(self, seed: int, keys_B3: np.ndarray, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """[B] bool: True for a sample whose control image is left out in training."""
        if not self.settings.conditioning_dropout:
            return {}
        numbers_B = keys.batch_uniforms(seed, self._dropped, keys_B3)
        return {self._dropped: torch.from_numpy(numbers_B < self.settings.conditioning_dropout)}

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """Its residuals times a number."""
        before = self.net.scale
        self.net.scale = before * strength
        try:
            yield
        finally:
            self.net.scale = before

    @property
    def _dropped(self) -> str:
        return f"{self.name}.dropped"

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings, about: About) -> list[str]:
        """The files that other programs read."""
        with replaced(folder) as fresh:
            self.kind.write(fresh, self.network, about, self.settings.conditioning_scale)
        return []


def attach(settings: Settings, model: Family, seed: int) -> ControlNet:
    """Adds a ControlNet to the denoiser, which is not changed. UserError where the family has none, or for a
    ControlNet that does not fit."""
    kind = controlled.of(model)
    _check_own(settings, kind)
    name, denoiser = _free("controlnet", model.net), model.components[kind.component]
    if settings.controlnet_model_name_or_path is None:
        with nullcontext() if resolve.without_weights() else encoders.present(model, names=kind.copied):
            network = kind.new(settings.wanted, int(keys.words(seed, name, 0, count=1)[0] >> 1))
    else:
        network = kind.read(settings.controlnet_model_name_or_path, settings.wanted)
    network.requires_grad_(True)
    if kind.component not in dict(model.net.named_children()):
        keep_evaluating(denoiser)
    net = Controlled(model.net, name, network, settings.conditioning_scale, kind, denoiser)
    names = frozenset(f"{name}.{own}" for own in network.state_dict())
    return ControlNet(net, names, name, network, settings, kind)


def _check_own(settings: Settings, kind: ControlNets) -> None:
    """UserError for a setting that this family's ControlNets do not have."""
    special = ("size", "blocks", "bottleneck", "reads", "latent_factor")
    if odd := [own for own in special if getattr(settings, own) is not None and own not in kind.own]:
        able = ", ".join(own for own in special if own in kind.own)
        raise UserError(
            f"adapter.{odd[0]}: ControlNets of this family have no such setting (they have {able}): remove it",
            code="unused",
            setting=f"adapter.{odd[0]}",
        )


def _free(name: str, net: nn.Module) -> str:
    """The name, or with the first number from 2 that no other ControlNet of the net has."""
    taken = dict(net.named_children())
    return next(each for each in (name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))) if each not in taken)
