"""The ControlNets of Stage C of Stable Cascade, whose residuals are added before some of its blocks.

A ControlNet reads the picture alone, neither the noisy latent nor its level. Pictures have the size that images have
in training: 32 px for each cell of the latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from daguerre.errors import UserError
from daguerre.families.cascade.codec import compressed
from daguerre.families.cascade.controlnets import faces, stage_c
from daguerre.families.cascade.controlnets import files as stage_c_files
from daguerre.families.cascade.controlnets.stage_c import StageCControlNet
from daguerre.models.controlnets import controlled
from daguerre.models.controlnets.controlled import Bottleneck, Reads, Residuals, Wanted
from daguerre.models.controlnets.places import SINGLE_FILE
from daguerre.models.export.about import About
from daguerre.models.network import Facts
from daguerre.models.weights import load
from daguerre.types import Cond

_USUAL: dict[Reads, Bottleneck] = {"latent": "large", "faces": "simple"}
"""The bottleneck of what has a latent's size already; of pictures it is effnet."""
_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True, eq=False)
class OfStageC:
    """The ControlNets that fit a Stage C."""

    component: str
    unet: Any
    effnet: Any
    """The EfficientNet that makes Stage C's latents."""
    absent: Callable[[], bool] = lambda: False
    """Whether the EfficientNet is left out of memory, as a cache has its latents."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are left out of its files."""
    facts: ClassVar[Facts] = Facts()
    copied: ClassVar[frozenset[str]] = frozenset({"effnet"})
    own: ClassVar[frozenset[str]] = frozenset({"blocks", "bottleneck", "reads", "latent_factor"})

    def new(self, wanted: Wanted, seed: int) -> Any:
        """With the weights of the EfficientNet in the layers that both have, or random ones; its projections end in
        zeros."""
        widths = self._opened()
        blocks = stage_c_files.chosen_blocks(wanted, len(widths)) or stage_c_files.usual_blocks(len(widths))
        reads, bottleneck = _kind(wanted)
        _check_factor(wanted, reads)
        self._check_there(reads)
        channels = {own: count for count, own in self._channels.items()}[reads]
        own = self.effnet.config
        numbers = {name: own[name] for name in ("stem_channels", "stages", "feature_channels")}
        network: Any = load.seeded(
            lambda: StageCControlNet(
                channels=channels, blocks=blocks, widths=[widths[number] for number in blocks], bottleneck=bottleneck,
                reads=reads, latent_factor=wanted.latent_factor or 2.0, **numbers,
            ),
            seed,
            "adapter",
        )  # fmt: skip
        if wanted.init == "base" and bottleneck == "effnet":
            _copy(self.effnet, network)
        return network

    def read(self, place: str, wanted: Wanted) -> Any:
        """Of Stability's file, or ours."""
        network = stage_c_files.read(place, wanted, self._opened(), self._channels, self.ignored)
        _check_factor(wanted, network.config.reads)
        self._check_there(network.config.reads)
        return network

    def write(self, folder: Path, network: Any, about: About, scale: float) -> None:
        """A single file in Stability's names."""
        stage_c_files.write(folder, network, about)
        blocks = ", ".join(map(str, network.config.blocks))
        card = _CARD.format(blocks=blocks, scale=scale)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def check(self, network: Any, pixels_BCHW: Tensor) -> None:
        """Of faces: every cell is one, or empty."""
        if network.config.reads == "faces":
            faces.check(pixels_BCHW)

    def hint(self, network: Any, pixels_BCHW: Tensor) -> Tensor:
        """[B, C, H, W]: grey or colours in [0, 1], and -1 where nothing is known; holes: there white, and 1 in a fourth
        channel; [B, C, H/32, W/32] of latents and faces."""
        reads: Reads = network.config.reads
        if reads == "faces":
            return faces.vectors(pixels_BCHW)
        rgb_BCHW, unknown_B1HW = pixels_BCHW[:, :3].float() / 255, pixels_BCHW[:, 3:] < 128
        if reads == "holes":
            return torch.cat([torch.where(unknown_B1HW, 1.0, rgb_BCHW), unknown_B1HW.float()], 1)
        if reads == "latent":
            return self._latent(rgb_BCHW, network.config.latent_factor)
        hint_BCHW = controlled.hint(pixels_BCHW)
        if reads == "colour":
            return hint_BCHW
        red, green, blue = (share * hint_BCHW[:, i : i + 1] for i, share in enumerate(_GREY))
        return red + green + blue

    def _latent(self, rgb_BCHW: Tensor, factor: float) -> Tensor:
        """The EfficientNet's latent of the picture made smaller, brought back to the size of the picture's own."""
        small_BCHW = functional.interpolate(rgb_BCHW, scale_factor=1 / factor, mode="nearest")
        with torch.no_grad(), torch.autocast(rgb_BCHW.device.type, enabled=False):
            latent_BCHW = compressed(self.effnet, small_BCHW).float()
        return functional.interpolate(latent_BCHW, scale_factor=factor, mode="nearest")

    def blank(self, network: Any, hint: Tensor) -> Tensor:
        """Nothing known of holes; black, zeros and no face."""
        return torch.ones_like(hint) if network.config.reads == "holes" else torch.zeros_like(hint)

    def count(self, network: Any) -> int:
        return len(network.config.blocks)

    def residuals(
        self, network: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, hint: Tensor, scale: float
    ) -> Residuals:
        found: list[Tensor | None] = [None] * len(stage_c.residual_blocks(self.unet))
        for number, y_BCHW in zip(network.config.blocks, network(hint), strict=True):
            found[number] = y_BCHW * scale
        return found

    def _check_there(self, reads: Reads) -> None:
        """UserError where the EfficientNet would be asked for each picture, and is left out of memory."""
        if reads == "latent" and self.absent():
            raise UserError(
                "adapter.reads=latent: the EfficientNet reads every control image, and a cache of images leaves it out "
                "of memory: set cache.images=false",
                code="conflict",
                setting="cache.images",
            )

    @property
    def _channels(self) -> dict[int, Reads]:
        """By channels of a picture: how it is read."""
        return {1: "grey", 3: "colour", 4: "holes", int(self.effnet.config.latent_channels): "latent", 512: "faces"}

    def _opened(self) -> list[int]:
        """The widths of Stage C's blocks, which take residuals from now on."""
        stage_c.take_residuals(self.unet)
        return stage_c.residual_blocks(self.unet)


def _kind(wanted: Wanted) -> tuple[Reads, Bottleneck]:
    """UserError for a bottleneck that cannot read this."""
    usual: dict[Bottleneck, Reads] = {bottleneck: reads for reads, bottleneck in _USUAL.items()}
    reads = wanted.reads or usual.get(wanted.bottleneck or "effnet", "colour")
    bottleneck = wanted.bottleneck or _USUAL.get(reads, "effnet")
    if (reads in _USUAL) == (bottleneck == "effnet"):
        of_pictures = ", ".join(own for own in ("grey", "colour", "holes") if own not in _USUAL)
        raise UserError(
            f"adapter.bottleneck={bottleneck} cannot read {reads}: effnet reads pictures ({of_pictures}), and simple "
            f"and large what has a latent's size already ({', '.join(_USUAL)})",
            code="conflict",
            setting="adapter.bottleneck",
        )
    return reads, bottleneck


def _check_factor(wanted: Wanted, reads: Reads) -> None:
    if wanted.latent_factor is not None and reads != "latent":
        raise UserError(
            f"adapter.latent_factor is for reads=latent, and this ControlNet reads {reads}: remove it",
            code="unused",
            setting="adapter.latent_factor",
        )


@torch.no_grad()
def _copy(effnet: Any, network: Any) -> None:
    """The EfficientNet's layers. Of the first one the filters of red, green and blue, as far as there are channels; the
    filters of further ones are zeros."""
    own = {name: tensor for name, tensor in effnet.state_dict().items() if name.startswith("backbone.")}
    first = "backbone.0.0.weight"
    theirs, channels = own[first], network.config.channels
    padded = theirs.new_zeros(len(theirs), max(3, channels), *theirs.shape[2:])
    padded[:, :3] = theirs
    own[first] = padded[:, :channels]
    network.load_state_dict(own, strict=False)


_CARD = f"""\
---
tags: [controlnet, stable-cascade]
---

A ControlNet for Stage C of Stable Cascade, trained with Daguerre. `{SINGLE_FILE}` has the names of Stability's own
files; its code needs to be told

```yaml
controlnet_blocks: [{{blocks}}]
controlnet_checkpoint_path: {SINGLE_FILE}
```

and adds what the network gives as it is; it was trained with the factor {{scale:g}}. Stage C of one billion parameters
needs a change there, as its ControlNets have 2048 channels by name. diffusers has no ControlNet for Stable Cascade.
"""
