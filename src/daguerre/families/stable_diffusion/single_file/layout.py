"""The layout of a single-file checkpoint of Stable Diffusion: where each network is, and which files are no such one.

Normalizes names of a UNet or an autoencoder alone, which have no prefix, and of old transformers. Names inside a
network are those of families/stable_diffusion/single_file/keys.py.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from daguerre.families.stable_diffusion.single_file import keys
from daguerre.models.weights.original_names import Links

UNET = "model.diffusion_model."
VAE = "first_stage_model."


class Place(NamedTuple):
    """Place of a network in the file."""

    prefix: str
    links: Links


_IMAGE_NETWORKS = {"unet": Place(UNET, keys.unet), "vae": Place(VAE, keys.vae)}
LAYOUTS: dict[str, dict[str, Place]] = {
    "sd1": {**_IMAGE_NETWORKS, "text_encoder": Place("cond_stage_model.transformer.", keys.clip)},
    "sd2": {**_IMAGE_NETWORKS, "text_encoder": Place("cond_stage_model.model.", keys.open_clip)},
    "sdxl": {
        **_IMAGE_NETWORKS,
        "text_encoder": Place("conditioner.embedders.0.transformer.", keys.clip),
        "text_encoder_2": Place("conditioner.embedders.1.model.", keys.open_clip),
    },
}
"""Networks by layout and component: Stable Diffusion 1.x, 2.x and SDXL."""

V_PREDICTION = "v_pred"
"""An empty tensor of this name marks a UNet that predicts v; ComfyUI and A1111 read it."""
ZERO_TERMINAL_SNR = "ztsnr"
"""An empty tensor that marks a UNet which was trained with zero terminal SNR."""
PLAYGROUND = ("edm_mean", "edm_std")
"""Statistics of the latents, in files of Playground v2.5: those are EDM's F."""

EDM_V = ("edm_vpred.sigma_max", "edm_vpred.sigma_min")
"""Noise levels between which CosXL is sampled: such files predict v as EDM does, with sigma_data 1. The second may be
missing."""

_BESIDE = re.compile(
    r"model_ema\..*|first_stage_model\.loss\..*|.*\.position_ids|.*logit_scale|.*\.attn_mask|alphas_cumprod.*|betas"
    r"|(sqrt|log)_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor|denoiser\..*|v_pred|ztsnr"
    r"|embedding_manager\..*|cond_stage_model\.model\.(text_projection|transformer\.resblocks\.\d+\..*)"
    r"|cond_stage_model\.transformer\.text_model\.encoder\.layers\.\d+\..*"
    r"|cond_stage_model\.transformer\.text_projection\.weight|conditioner\.embedders\.0\.transformer\.text_projection\..*"
)
"""Names that files may hold in addition to the networks: schedules, averaged weights, the layers of OpenCLIP that 2.x
does not use."""
_OTHERS = (
    (r"(lora_|.*\.lora_|.*\.lora\.|base_model\.)", "LoRA weights, not a whole model"),
    (r"(control_model\.|controlnet_|input_hint_block)", "a ControlNet"),
    (r"(model\.diffusion_model\.)?joint_blocks\.", "Stable Diffusion 3"),
    (r"(model\.diffusion_model\.)?(double_blocks|double_layers|single_blocks)\.", "Flux or another transformer"),
    (
        r"(model\.diffusion_model\.)?(clip_txt_mapper|effnet_mapper|down_blocks\.\d+\.\d+\.channelwise)",
        "a stage of Stable Cascade, for model.prior of the recipe cascade_c or model.decoder of cascade_b",
    ),
    (r"(noise_augmentor|embedder\.model\.visual)", "Stable unCLIP"),
    (r"down_blocks\.\d+\.motion_modules\.", "an AnimateDiff motion module"),
    (r"(string_to_param|emb_params|clip_l$|clip_g$|<.*>$)", "a textual-inversion embedding"),
    (r"conditioner\.embedders\.0\.model\.", "the SDXL refiner"),
)
_INPUT_CHANNELS = {
    5: "a depth-to-image model (5 input channels)",
    7: "an upscaler (7 input channels)",
    8: "InstructPix2Pix (8 input channels)",
    9: "an inpainting model (9 input channels)",
}


def normalized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the names that a whole checkpoint of today gives them."""
    bare = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}  # of DistributedDataParallel
    prefix, tensors = "", _of_vae(bare if len(bare) == len(tensors) else tensors)
    if not any(name.startswith((UNET, VAE)) for name in tensors):
        if any(name.startswith("input_blocks.") for name in tensors):
            prefix = UNET
        elif any(re.match(r"encoder\.down\.|decoder\.up\.", name) for name in tensors):
            prefix = VAE
    return {_renamed(prefix + name): tensor for name, tensor in tensors.items()}


def _of_vae(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file that holds an autoencoder alone, without what programs put before its names, and with the names of today
    for its attention; any other file as it is."""
    bare = {_WITHIN.sub("", _BEFORE_VAE.sub("", name)): tensor for name, tensor in tensors.items()}
    is_one = any(_IN_VAE.match(name) for name in bare) and all(_OF_VAE.match(name) for name in bare)
    if not is_one or len(bare) < len(tensors):
        return tensors
    return {_VAE_ATTENTION.sub(lambda match: f"{match[1]}{_TODAY[match[2]]}.", name): v for name, v in bare.items()}


_BEFORE_VAE = re.compile(r"((module|model|vae|first_stage_model|autoencoder)\.)+(?=\w)")
_WITHIN = re.compile(r"^(?:encoder|decoder)\.(?=(?:post_)?quant_conv\.)")
"""Where Black Forest Labs' FLUX.2 has the convolutions that others have outside of encoder and decoder."""
_OF_VAE = re.compile(r"(encoder|decoder|quant_conv|post_quant_conv|bn|loss)\.")
_IN_VAE = re.compile(r"(encoder|decoder)\.(down|up|mid)(_blocks?)?\.")
_VAE_ATTENTION = re.compile(
    r"(.+\.mid_block\.attentions\.0\.(?=query|key|value|proj_attn)|.+\.mid\.attn_1\.(?=to_|group_norm))"
    r"(query|key|value|proj_attn|to_q|to_k|to_v|to_out\.0|group_norm)\."
)
_TODAY = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_TODAY |= {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out", "group_norm": "norm"}
"""Names of the attention of an autoencoder in older versions of diffusers, and of mixed layouts."""


def _renamed(name: str) -> str:
    """`text_model.` where old transformers had none, `first_stage_model.` where the VAE is called `vae.`, and
    `model.diffusion_model.` where a UNet by itself is `diffusion_model.`."""
    name = re.sub(r"^(?=diffusion_model\.)", "model.", name)
    name = re.sub(
        r"^(cond_stage_model\.transformer\.|conditioner\.embedders\.0\.transformer\.)"
        r"(?=embeddings\.|encoder\.|final_layer_norm\.)",
        r"\1text_model.",
        name,
    )
    return re.sub(r"^vae\.(?=(encoder|decoder|quant_conv|post_quant_conv)\.)", VAE, name)


def components(names: Iterable[str]) -> tuple[str, ...]:
    """The networks that normalized names hold; () where none has a name of the original layout."""
    names = list(names)
    own = layout_of(names)
    layouts = [LAYOUTS[own]] if own else LAYOUTS.values()
    places = {(name, place.prefix) for layout in layouts for name, place in layout.items()}
    found = {component for component, prefix in places if any(name.startswith(prefix) for name in names)}
    return tuple(name for name in LAYOUTS["sdxl"] if name in found)


def layout_of(names: Iterable[str]) -> str | None:
    """The layout of normalized names; None where the networks in it look the same in several.

    Merges carry names of other layouts along, so a UNet says whether it is SDXL's, whatever else is there.
    """
    names = list(names)
    if any(name.startswith(f"{UNET}label_emb.") for name in names):
        return "sdxl"
    has_unet = any(name.startswith(f"{UNET}input_blocks.") for name in names)
    marks: dict[str, tuple[str, ...]] = {name: (places["text_encoder"].prefix,) for name, places in LAYOUTS.items()}
    marks["sdxl"] = () if has_unet else (*marks["sdxl"], LAYOUTS["sdxl"]["text_encoder_2"].prefix)
    return next((layout for layout, mark in marks.items() if any(name.startswith(mark) for name in names)), None)


def other_model(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The name of another model than Stable Diffusion 1.x, 2.x or SDXL's base with these tensors; None if none is."""
    first = shapes.get(f"{UNET}input_blocks.0.0.weight", ())
    if len(first) == 4 and first[1] in _INPUT_CHANNELS:
        return _INPUT_CHANNELS[first[1]]
    return next((what for pattern, what in _OTHERS if any(re.match(pattern, name) for name in shapes)), None)


def unused(names: Iterable[str], used: set[str]) -> list[str]:
    """Names that are neither part of the networks nor known to belong to a file."""
    return sorted(name for name in names if name not in used and not _BESIDE.fullmatch(name))


def averaged_name(name: str) -> str:
    """The name of the average of a UNet's weight in files that hold both."""
    return "model_ema." + "".join(name.split(".")[1:])
