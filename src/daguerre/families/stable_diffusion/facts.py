"""Facts of Stable Diffusion's own networks: diffusers' UNet2DConditionModel and the ControlNets of it."""

from dataclasses import replace

from diffusers import ControlNetModel, UNet2DConditionModel

from daguerre.families.stable_diffusion.lora_names import UNetNames, architecture
from daguerre.models.network import Dims, Facts, Segment, layers
from daguerre.models.parts.facts import TEXT_ENCODERS

_CONV: Dims = ("conv_out", "conv_in")
_NORM: Dims = ("norm",)
_GATED: Dims = ((Segment("mlp"), Segment("mlp")), "embed")
"""GEGLU: the first half of the rows is gated by the second, so a device needs the same part of both."""
UNET = Facts(
    blocks=("BasicTransformerBlock", "ResnetBlock2D"),
    axes={
        "*.transformer_blocks.*.attn*.to_[qkv].weight": ("heads", "embed"),
        **layers(("embed", "heads"), "*.transformer_blocks.*.attn*.to_out.0"),
        **layers(_GATED, "*.transformer_blocks.*.ff.net.0.proj"),
        **layers(("embed", "mlp"), "*.transformer_blocks.*.ff.net.2"),
        "*.transformer_blocks.*.norm[123].*": _NORM,
        "*.attentions.*.norm.*": _NORM,
        **layers(("embed", None), "*.attentions.*.proj_*"),
        **layers(_CONV, "*.resnets.*.conv[12]", "*.resnets.*.conv_shortcut", "*samplers.*.conv"),
        "*.resnets.*.norm[12].*": _NORM,
        **layers(("conv_out", "time"), "*.time_emb_proj"),
        **layers(("time", None), "time_embedding.linear_*", "add_embedding.linear_*"),
        "time_embedding.cond_proj.weight": (None, None),
        "*conv_norm_out.*": _NORM,
        **layers(_CONV, "*conv_in", "conv_out"),
    },
    heads="heads",
    layers={
        "attention": ("to_q", "to_k", "to_v", "to_out.0"),
        "ff": ("ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
        "conv": ("conv1", "conv2", "conv_shortcut", "time_emb_proj", "downsamplers.*.conv", "upsamplers.*.conv"),
    },
    readers=(("attn1", "to_q", "to_k", "to_v"), ("attn2", "to_k", "to_v")),
    names=UNetNames(),
    architecture=architecture,
)
"""Stable Diffusion 1, 2 and XL. `ff` has also what leads into a transformer and out of it."""
CONTROLNET = replace(
    UNET,
    axes={
        **UNET.axes,
        **layers(_CONV, "controlnet_cond_embedding.blocks.*", "controlnet_cond_embedding.conv_out"),
        **layers(_CONV, "controlnet_*_block*"),
    },
    layers={},
    names=None,
)
"""diffusers' ControlNetModel, a copy of the UNet's first half between convolutions of its own."""
FACTS: dict[type, Facts] = {UNet2DConditionModel: UNET, ControlNetModel: CONTROLNET, **TEXT_ENCODERS}
"""By class, for networks that no family has loaded."""
