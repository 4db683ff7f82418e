"""The weights from which Stable Cascade's networks start, as its code draws them; diffusers' own start otherwise.

Convolutions and matrices are Xavier's (Glorot and Bengio 2010), conditioning is N(0, 0.02), and the last layer is zero,
so that the first prediction is exactly 0.
"""

from math import sqrt
from typing import Any

import torch
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from torch import nn

_MAPPERS = ("clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper", "effnet_mapper", "pixels_mapper")
_ATTENTION_GAIN = sqrt(0.5)
"""Query, key and value are drawn as one matrix of three times the rows."""


@torch.no_grad()
def initialise(unet: Any) -> Any:
    """A StableCascadeUNet with the weights of a fresh Stage C or Stage B, by torch's random state."""
    for name, layer in unet.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            gain = _ATTENTION_GAIN if name.endswith((".to_q", ".to_k", ".to_v")) else 1.0
            nn.init.xavier_uniform_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for mapper in _MAPPERS:
        for layer in getattr(unet, mapper, nn.Identity()).modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(layer.weight, std=0.02)
    nn.init.xavier_uniform_(unet.embedding[1].weight, 0.02)
    nn.init.zeros_(unet.clf[1].weight)
    depth = sum(unet.config.down_num_layers_per_block)
    for module in unet.modules():
        if hasattr(module, "channelwise"):
            module.channelwise[-1].weight.mul_(sqrt(1 / depth))
        if hasattr(module, "mapper"):  # of noise levels
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.zeros_(layer.weight)
    return unet


@torch.no_grad()
def initialise_stage_a(vqgan: Any) -> Any:
    """A PaellaVQModel with the weights of a fresh Stage A: Xavier's in its blocks, whose gains are zero."""
    for module in vqgan.modules():
        if hasattr(module, "gammas"):
            for layer in module.modules():
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    nn.init.xavier_uniform_(layer.weight)
                    assert layer.bias is not None
                    nn.init.zeros_(layer.bias)
    return vqgan


STARTS: dict[Any, Any] = {StableCascadeUNet: initialise, PaellaVQModel: initialise_stage_a}
"""By class: what gives a network the weights from which it starts."""
