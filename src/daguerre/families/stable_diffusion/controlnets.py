"""The ControlNets of Stable Diffusion and SDXL, whose residuals go to the UNet's skips."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ControlNetModel
from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet, controlnet_files
from daguerre.families.stable_diffusion.facts import CONTROLNET
from daguerre.models.controlnets import controlled
from daguerre.models.controlnets.controlled import Residuals, Wanted
from daguerre.models.controlnets.places import SINGLE_FILE
from daguerre.models.export.about import About
from daguerre.models.family import ImageCodec
from daguerre.models.network import Facts
from daguerre.models.weights import load
from daguerre.types import Cond


@dataclass(frozen=True, eq=False)
class OfUNet:
    """The ControlNets that fit a UNet."""

    component: str
    unet: Any
    images: ImageCodec
    long_prompts: bool
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are left out of its files."""
    facts: ClassVar[Facts] = CONTROLNET
    copied: ClassVar[frozenset[str]] = frozenset()
    own: ClassVar[frozenset[str]] = frozenset({"size"})

    def new(self, wanted: Wanted, seed: int) -> Any:
        """A copy of the UNet's first half, in the layers that both have, or random weights."""
        self._check()
        numbers = controlnet.numbers(self.unet, controlnet.embedding_channels(self._factor), wanted.size or "large")
        network = load.seeded(lambda: load.build(ControlNetModel, numbers), seed, "adapter")
        if wanted.init == "base":
            controlnet.copy_from(self.unet, network)
        return network

    def read(self, place: str, wanted: Wanted) -> Any:
        """In any layout."""
        self._check()
        return controlnet_files.read(place, controlnet_files.Base(self.unet, self._factor, self.ignored))

    def write(self, folder: Path, network: Any, about: About, scale: float) -> None:
        """The folder that diffusers' `ControlNetModel.from_pretrained` reads, and in it a single file in the original
        layout for ComfyUI and A1111."""
        controlnet_files.write(folder, network, about)
        (folder / "README.md").write_text(_CARD.replace("SCALE", f"{scale:g}"), encoding="utf-8")

    def check(self, network: Any, pixels_BCHW: Tensor) -> None:
        """Any picture will do."""

    def hint(self, network: Any, pixels_BCHW: Tensor) -> Tensor:
        """[B, 3, H, W], in pixels."""
        return controlled.hint(pixels_BCHW)

    def blank(self, network: Any, hint: Tensor) -> Tensor:
        """Black."""
        return torch.zeros_like(hint)

    def count(self, network: Any) -> int:
        return len(network.controlnet_down_blocks) + 1

    def residuals(
        self, network: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, hint: Tensor, scale: float
    ) -> Residuals:
        added = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
        down, middle = network(
            x_BCHW,
            c_noise_B,
            encoder_hidden_states=cond["text"],
            controlnet_cond=hint,
            conditioning_scale=scale,
            added_cond_kwargs=added,
            return_dict=False,
        )
        return [*down, middle]

    @property
    def _factor(self) -> int:
        return controlnet.factor_of(self.images)

    def _check(self) -> None:
        if self.long_prompts:
            raise UserError(
                "model.long_prompts=true: diffusers' ControlNet cannot tell the tokens of a long prompt from those "
                "that only pad the batch, so its images would depend on the other prompts: set it to false",
                code="conflict",
                setting="model.long_prompts",
            )


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

`{SINGLE_FILE}` has the same weights in the original layout, for ComfyUI and A1111.
"""
