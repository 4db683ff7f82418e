"""Stage C and Stage B of Stable Cascade as the net of a family: diffusers' StableCascadeUNet.

Shape letters: B samples, C channels, H and W height and width, T tokens, D and P features.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from daguerre.models import sharding_axes
from daguerre.models.cascade.codec import STAGE_A_PX, STEP_PX, at_cells
from daguerre.models.components import ComponentLoader
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.family import Exporter, Family, ImageCodec
from daguerre.models.text_conditioning import TextConditioning
from daguerre.types import Cond

BLOCKS = ("SDCascadeResBlock", "SDCascadeAttnBlock", "SDCascadeTimestepBlock", *sharding_axes.BLOCKS)
"""Class names of the blocks of these networks and of their text encoder."""


class Stage(nn.Module):
    """A StableCascadeUNet. Its weights are named `prior.` or `decoder.`, those of a trained encoder `text_encoder.`."""

    def __init__(
        self, name: str, texts: TextConditioning, all_of: Mapping[str, Any], trained: Mapping[str, Any]
    ) -> None:
        """`all_of` are the networks of which those in `trained` are trained; `name` is the denoiser's."""
        super().__init__()
        for component, network in trained.items():
            self.add_module(component, network)
        self._trained = frozenset(trained)
        self._all = (all_of[name], texts, all_of["effnet"])  # in a tuple: what is frozen is not registered

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W] for latents, the time in [0, 1] and conditioning: text [B, T, D] (or tokens),
        pooled [B, P]; `image` [B, P] of Stage C; of Stage B `effnet` [B, C, h, w], or `pixels` [B, 3, H, W] in [0, 1]
        of which an EfficientNet that is trained makes it, and `effnet_kept` [B]."""
        return self.denoise(x_BCHW, c_noise_B, self.compressed(x_BCHW, self.features(cond)))

    def features(self, cond: Cond) -> Cond:
        """Conditioning with cond["text"]: where it holds tokens, the text encoder makes it, with gradients if it is
        trained."""
        return cond if "text" in cond else {**cond, **self._all[1].features(cond, self._trained)}

    def compressed(self, x_BCHW: Tensor, cond: Cond) -> Cond:
        """Conditioning with cond["effnet"]: where it holds pixels, the EfficientNet makes it, with gradients."""
        if "pixels" not in cond:
            return cond
        height, width = (side * STAGE_A_PX // STEP_PX for side in x_BCHW.shape[2:])
        made = at_cells(self._all[2], cond["pixels"], (height, width))
        return {**cond, "effnet": cond["effnet_kept"][:, None, None, None] * made}

    def denoise(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
        """The prediction from features. `residuals` are a ControlNet's (controlnets/stage_c.py)."""
        own: dict[str, Any] = {"residuals": residuals} if residuals else {}
        if "effnet" in cond:
            own |= {"effnet": cond["effnet"]}
        else:
            own |= {"clip_text": cond["text"], "clip_img": cond["image"][:, None]}
        unet = self._all[0]
        return unet(x_BCHW, c_noise_B, clip_text_pooled=cond["pooled"][:, None], **own, return_dict=False)[0]


def family(
    components: ComponentLoader,
    denoiser: str,
    networks: Mapping[str, Any],
    images: ImageCodec,
    texts: TextConditioning,
    exporter: Exporter,
    **more: Any,
) -> Family:
    """The family of these networks, in which the denoiser is trained. `more` are further parts of a Family."""
    make_net = partial(Stage, denoiser, texts, networks)
    whole = Family(
        networks, components.settings.components, make_net({}), images, exporter,
        text=texts, pretrained=components, make_net=make_net, unread=texts.unread, block_classes=BLOCKS, **more,
    )  # fmt: skip
    for network in networks.values():
        network.requires_grad_(False)
    return whole.training(components.settings.trainable()[:1])
