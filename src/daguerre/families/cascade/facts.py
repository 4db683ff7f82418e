"""Facts of Stable Cascade's networks. EfficientNet, previewer, Stage A and ControlNets have none."""

from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet

from daguerre.families.cascade.lora_names import StageNames, architecture
from daguerre.models.network import Dims, Facts, layers
from daguerre.models.parts.facts import TEXT_ENCODERS

_CONV: Dims = ("conv_out", "conv_in")
STAGE = Facts(
    blocks=("SDCascadeResBlock", "SDCascadeAttnBlock", "SDCascadeTimestepBlock"),
    axes={
        **layers(("embed", None), "clip_txt_pooled_mapper", "clip_txt_mapper", "clip_img_mapper"),
        # The norm in the middle of a feed-forward layer goes over all its channels, so they are not split as `mlp`.
        **layers(("embed", None), "*_blocks.*.channelwise.4"),
        **layers((None, "embed"), "*_blocks.*.channelwise.0"),
        "*_blocks.*.channelwise.2.*": ("norm",),
        **layers(("conv_out",), "*_blocks.*.depthwise"),
        **layers(("embed", "time"), "*_blocks.*.mapper*"),
        **layers(_CONV, "embedding.1", "clf.1", "*scalers.*.1*", "*_repeat_mappers.*"),
        **layers(_CONV, "effnet_mapper.*", "pixels_mapper.*"),
        **layers(("heads", "embed"), "*_blocks.*.attention.to_[qkv]"),
        **layers(("embed", "heads"), "*_blocks.*.attention.to_out.0"),
        **layers(("embed", None), "*_blocks.*.kv_mapper.1"),
    },
    heads="heads",
    layers={"attention": ("to_q", "to_k", "to_v", "to_out.0")},
    readers=(("attention", "to_k", "to_v"),),  # queries read the image alone, keys and values the text as well
    names=StageNames(),
    architecture=architecture,
)
"""diffusers' StableCascadeUNet: Stage C and Stage B."""
FACTS: dict[type, Facts] = {StableCascadeUNet: STAGE, **TEXT_ENCODERS}
"""By class, for networks that no family has loaded."""
