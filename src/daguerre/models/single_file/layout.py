"""What a single-file checkpoint of Stable Diffusion holds: where each network stands in it, and what it is not.

Files of the wild are brought to one spelling here: a UNet or an autoencoder alone without its prefix, CLIP's names of
old transformers, averaged weights beside the plain ones. Names inside a network are models/single_file/keys.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from daguerre.models.single_file import keys
from daguerre.models.single_file.keys import Link

UNET = "model.diffusion_model."
VAE = "first_stage_model."


class Place(NamedTuple):
    """Where a network stands in the file."""

    prefix: str
    links: Callable[[Iterable[str]], list[Link]]


_UNET = Place(UNET, keys.unet)
_VAE = Place(VAE, keys.vae)
LAYOUTS: dict[str, dict[str, Place]] = {
    "sd1": {
        "unet": _UNET,
        "vae": _VAE,
        "text_encoder": Place("cond_stage_model.transformer.", keys.clip),
    },
    "sd2": {
        "unet": _UNET,
        "vae": _VAE,
        "text_encoder": Place("cond_stage_model.model.", keys.open_clip),
    },
    "sdxl": {
        "unet": _UNET,
        "vae": _VAE,
        "text_encoder": Place("conditioner.embedders.0.transformer.", keys.clip),
        "text_encoder_2": Place("conditioner.embedders.1.model.", keys.open_clip),
    },
}
"""Networks by layout and component: Stable Diffusion 1.x, 2.x and SDXL."""

V_PREDICTION = "v_pred"
"""An empty tensor of this name says that the UNet predicts v; ComfyUI and A1111 read it."""
ZERO_TERMINAL_SNR = "ztsnr"
"""Likewise, that it was trained with zero terminal SNR."""
PLAYGROUND = ("edm_mean", "edm_std")
"""Statistics of the latents, in files of Playground v2.5: those are EDM's F."""

_KNOWN_REST = re.compile(
    r"model_ema\..*|first_stage_model\.loss\..*|.*\.position_ids|.*logit_scale|.*\.attn_mask|alphas_cumprod.*|betas"
    r"|(sqrt|log)_\w+|posterior_\w+|lvlb_weights|logvar|scale_factor|denoiser\..*|v_pred|ztsnr|edm_(mean|std)"
    r"|edm_vpred\..*|embedding_manager\..*|cond_stage_model\.model\.(text_projection|transformer\.resblocks\.\d+\..*)"
    r"|cond_stage_model\.transformer\.text_model\.encoder\.layers\.\d+\..*"
    r"|cond_stage_model\.transformer\.text_projection\.weight|conditioner\.embedders\.0\.transformer\.text_projection\..*"
)
"""What may stand beside the networks: schedules, averaged weights, the layers of OpenCLIP that 2.x does not use."""

_OTHERS = (
    (r"(lora_|.*\.lora_|.*\.lora\.|base_model\.)", "LoRA weights, which change a model and are none"),
    (r"(control_model\.|controlnet_|input_hint_block)", "a ControlNet"),
    (r"(model\.diffusion_model\.)?joint_blocks\.", "Stable Diffusion 3"),
    (r"(model\.diffusion_model\.)?(double_blocks|double_layers|single_blocks)\.", "Flux or another transformer"),
    (r"(clip_txt_mapper|effnet_mapper|down_blocks\.\d+\.\d+\.channelwise)", "a stage of Stable Cascade"),
    (r"(noise_augmentor|embedder\.model\.visual)", "Stable unCLIP"),
    (r"down_blocks\.\d+\.motion_modules\.", "an AnimateDiff motion module"),
    (r"(string_to_param|emb_params|clip_l$|clip_g$|<.*>$)", "a textual-inversion embedding"),
)
_CHANNELS = {
    5: "a depth-to-image model (5 input channels)",
    7: "an upscaler (7 input channels)",
    8: "InstructPix2Pix (8 input channels)",
    9: "an inpainting model (9 input channels)",
}


def tidy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors under the names that a whole checkpoint of today gives them."""
    prefix = _missing_prefix(tensors)
    return {_respelt(prefix + name): tensor for name, tensor in tensors.items()}


def _missing_prefix(names: Iterable[str]) -> str:
    names = set(names)
    if any(name.startswith((UNET, VAE)) for name in names):
        return ""
    if any(name.startswith("input_blocks.") for name in names):
        return UNET
    return VAE if any(re.match(r"encoder\.down\.|decoder\.up\.", name) for name in names) else ""


def _respelt(name: str) -> str:
    """`text_model.` where old transformers had none, `vae.` as it was first called."""
    for prefix in ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer."):
        if name.startswith((f"{prefix}embeddings.", f"{prefix}encoder.", f"{prefix}final_layer_norm.")):
            return f"{prefix}text_model.{name.removeprefix(prefix)}"
    return re.sub(r"^vae\.(?=(encoder|decoder|quant_conv|post_quant_conv)\.)", VAE, name)


def components(names: Iterable[str]) -> tuple[str, ...]:
    """Which networks tidy names hold; () where none has a name of the original layout."""
    places = {component: place.prefix for layout in LAYOUTS.values() for component, place in layout.items()}
    found = {name for name, prefix in places.items() if any(n.startswith(prefix) for n in names)}
    if any(name.startswith(LAYOUTS[layout]["text_encoder"].prefix) for layout in LAYOUTS for name in names):
        found.add("text_encoder")
    return tuple(name for name in ("unet", "vae", "text_encoder", "text_encoder_2") if name in found)


def layout_of(names: Iterable[str]) -> str | None:
    """Which layout tidy names have; None where the networks in it look alike in several."""
    names = list(names)
    for layout, places in LAYOUTS.items():
        if any(name.startswith(places["text_encoder"].prefix) for name in names):
            return layout
    if any(name.startswith((f"{UNET}label_emb.", LAYOUTS["sdxl"]["text_encoder_2"].prefix)) for name in names):
        return "sdxl"
    return None


def refused(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What another thing than Stable Diffusion 1.x, 2.x or SDXL's base a file of these tidy names is; None if none."""
    for pattern, what in _OTHERS:
        if any(re.match(pattern, name) for name in shapes):
            return what
    first = shapes.get(f"{UNET}input_blocks.0.0.weight", (0, 4))
    if len(first) == 4 and first[1] in _CHANNELS:
        return _CHANNELS[first[1]]
    if any(name.startswith("conditioner.embedders.0.model.") for name in shapes):
        return "the SDXL refiner"
    return None


def unused(names: Iterable[str], used: set[str]) -> list[str]:
    """Names that are neither part of the networks nor known to stand beside them."""
    return sorted(name for name in names if name not in used and not _KNOWN_REST.fullmatch(name))


def averaged_name(name: str) -> str:
    """Where the average of a UNet's weight stands in files that hold both."""
    return "model_ema." + "".join(name.split(".")[1:])
