"""Stage C and Stage B of Stable Cascade as the denoiser of a family: diffusers' StableCascadeUNet.

Shape letters: B samples, C channels, H and W height and width, T tokens, D and P features.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from daguerre.families.cascade import facts
from daguerre.families.cascade.codec import STAGE_A_PX, STEP_PX, at_cells
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.family import Exporter, Family, ImageCodec
from daguerre.models.parts.facts import CLIP_IMAGE
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.types import Cond


def denoise(unet: Any, effnet: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The prediction [B, C, H, W] of a StableCascadeUNet for latents, the time in [0, 1] and text [B, T, D], pooled
    [B, P]; `image` [B, P] of Stage C; of Stage B `effnet` [B, C, h, w], or `pixels` [B, 3, H, W] in [0, 1] of which an
    EfficientNet that is trained makes it, and `effnet_kept` [B]. `residuals` are a ControlNet's
    (controlnets/stage_c.py)."""
    cond = _compressed(effnet, x_BCHW, cond)
    inputs: dict[str, Any] = {"residuals": residuals} if residuals else {}
    if "effnet" in cond:
        inputs |= {"effnet": cond["effnet"]}
    else:
        inputs |= {"clip_text": cond["text"], "clip_img": cond["image"][:, None]}
    prediction: Tensor = unet(x_BCHW, c_noise_B, clip_text_pooled=cond["pooled"][:, None], **inputs, return_dict=False)[
        0
    ]
    return prediction


def _compressed(effnet: Any, x_BCHW: Tensor, cond: Cond) -> Cond:
    """Conditioning with cond["effnet"]: where it holds pixels, the EfficientNet makes it, with gradients."""
    if "pixels" not in cond:
        return cond
    height, width = (side * STAGE_A_PX // STEP_PX for side in x_BCHW.shape[2:])
    made = at_cells(effnet, cond["pixels"], (height, width))
    return {**cond, "effnet": cond["effnet_kept"][:, None, None, None] * made}


def family(
    components: ComponentLoader,
    denoiser: str,
    modules: Mapping[str, Any],
    images: ImageCodec,
    texts: TextConditioning,
    exporter: Exporter,
    **more: Any,
) -> Family:
    """The family of these networks, in which the denoiser is trained. `more` are further parts of a Family."""
    known = {"prior": facts.STAGE, "decoder": facts.STAGE, "image_encoder": CLIP_IMAGE}
    for module in modules.values():
        module.requires_grad_(False)
    of_denoiser = partial(denoise, modules[denoiser], modules["effnet"])
    return trained_net.family(components, of_denoiser, modules, known, images, texts, exporter, **more)
