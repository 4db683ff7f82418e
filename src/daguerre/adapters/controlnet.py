"""ControlNet (Zhang et al. 2023, arXiv 2302.05543): a network that lets a control image decide where things are.

It reads the control image (edges, a depth map ...) and adds residuals to the skips of the UNet, which is frozen. It
starts as a copy of the UNet's first half, behind convolutions of zeros, so that training starts from the base model's
images. Only the ControlNet is trained and saved, in float32. Several in a recipe add up, each with its control image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from diffusers import ControlNetModel
from pydantic import Field
from torch import Tensor, nn

from daguerre import keys
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.checkpoint.export import replaced
from daguerre.conditions.condition import Images, OptionalCondition
from daguerre.errors import UserError
from daguerre.models import controlnet, controlnet_files
from daguerre.models.controlnet import Controlled, Size
from daguerre.models.frozen import keep_evaluating
from daguerre.models.weights import load
from daguerre.settings import ADDRESS, Unused
from daguerre.types import Batch, Cond

if TYPE_CHECKING:
    from daguerre.models.export.about import About
    from daguerre.models.family import Family
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


class Settings(AdapterSettings):
    """Trains a ControlNet beside a frozen UNet."""

    name: Literal["controlnet"] = "controlnet"
    """Name of the adapter."""
    controlnet_model_name_or_path: Annotated[str | None, ADDRESS] = None
    """The ControlNet that training starts from: a folder of diffusers, a run, a .safetensors file, or a hub id. null: a
    new one."""
    init: Literal["base", "random"] = "base"
    """Weights of a new one: those of the base model's UNet, in the layers that both have, or random ones."""
    size: Size = "large"
    """Transformer blocks of a new one: large has those of the UNet, mid one at each place of the deepest level (the
    form of diffusers' controlnet-canny-sdxl-1.0-mid), small none."""
    condition: OptionalCondition = None
    """The condition that computes the control image from the training image, such as canny. null: the data source
    stores it."""
    image: Literal["control", "control_2", "control_3", "control_4"] = "control"
    """The control image that it reads: of several ControlNets the second may read control_2."""
    conditioning_scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The residuals are multiplied by it, in training and, by default, where images are generated."""
    conditioning_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the samples whose control image is black in training, so that the ControlNet learns to do without."""

    separate: ClassVar[bool] = True
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("init", "size"),
            lambda own: own.controlnet_model_name_or_path is not None,
            "controlnet_model_name_or_path gives a whole ControlNet",
        ),
    )

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """None: the UNet stays as it is, and other adapters may train it."""
        return ()


@dataclass(frozen=True, eq=False)
class ControlNet(Trainable):
    """A ControlNet beside a UNet."""

    net: Controlled
    names: frozenset[str]
    name: str
    """In the net's state, and in the conditioning."""
    network: Any
    settings: Settings
    float32 = True
    strengths = (0.0, 0.5)

    @property
    def images(self) -> Images:
        """Its control image."""
        return {self.settings.image: self.settings.condition}

    def condition(self, batch: Batch, cond: Cond) -> Cond:
        """Adds the control image as the network reads it, [B, 3, H, W]."""
        hint_BCHW = controlnet.hint(batch.images[self.settings.image])
        dropped_B = batch.draws.get(self._dropped) if self.network.training else None
        if dropped_B is not None:
            hint_BCHW = torch.where(dropped_B[:, None, None, None], 0.0, hint_BCHW)
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
        """The folder that diffusers' `ControlNetModel.from_pretrained` reads, and in it a single file in the original
        layout for ComfyUI and A1111."""
        with replaced(folder) as fresh:
            controlnet_files.write(fresh, self.network, about)
            card = _CARD.replace("SCALE", f"{self.settings.conditioning_scale:g}")
            (fresh / "README.md").write_text(card, encoding="utf-8")
        return []


_CARD = f"""\
---
library_name: diffusers
tags: [controlnet]
---

A ControlNet trained with Daguerre, for the base model that it was trained on:

```python
controlnet = ControlNetModel.from_pretrained("path/to/this/folder")
pipe = StableDiffusionControlNetPipeline.from_pretrained("path/to/base", controlnet=controlnet)  # or ...XLControlNet...
pipe("a prompt", image=control_image, controlnet_conditioning_scale=SCALE)
```

`{controlnet_files.SINGLE_FILE}` has the same weights in the original layout, for ComfyUI and A1111.
"""


def attach(settings: Settings, model: Family, seed: int) -> ControlNet:
    """Puts a ControlNet beside the UNet, which is not changed. UserError where the family has none, or for a ControlNet
    that does not fit."""
    component, denoiser = controlnet.unet_of(model)
    if getattr(getattr(model.pretrained, "settings", None), "long_prompts", False):
        raise UserError(
            "model.long_prompts=true: diffusers' ControlNet cannot tell the tokens of a long prompt from those that "
            "only pad the batch, so its images would depend on the other prompts: set it to false",
            code="conflict",
            setting="model.long_prompts",
        )
    name = _free("controlnet", model.net)
    network = _network(settings, model, denoiser, seed, name)
    network.requires_grad_(True)
    if component not in dict(model.net.named_children()):
        keep_evaluating(denoiser)
    net = Controlled(model.net, name, network, settings.conditioning_scale, {component: denoiser})
    names = frozenset(f"{name}.{own}" for own in network.state_dict())
    return ControlNet(net, names, name, network, settings)


def _network(settings: Settings, model: Family, denoiser: Any, seed: int, name: str) -> Any:
    """The ControlNet that training starts from."""
    factor = controlnet.factor_of(model)
    if settings.controlnet_model_name_or_path is not None:
        base = controlnet_files.Base(denoiser, factor)
        return controlnet_files.read(settings.controlnet_model_name_or_path, base)
    numbers = controlnet.numbers(denoiser, controlnet.embedding_channels(factor), settings.size)
    own_seed = int(keys.words(seed, name, 0, count=1)[0] >> 1)
    network = load.seeded(lambda: load.build(ControlNetModel, numbers), own_seed, "adapter")
    if settings.init == "base":
        controlnet.copy_from(denoiser, network)
    return network


def _free(name: str, net: nn.Module) -> str:
    """The name, or with the first number from 2 that no other ControlNet of the net has."""
    taken = dict(net.named_children())
    return next(each for each in (name, *(f"{name}_{n}" for n in range(2, len(taken) + 3))) if each not in taken)
