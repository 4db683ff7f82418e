"""Names of the layers of Stable Diffusion's UNets in files of LoRAs: diffusers', and those of the original layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import keys
from daguerre.models.network import Architecture
from daguerre.models.weights.original_names import FLAT, PREFIXES, Layers, Spelling, flat, spelled

_TWICE = "unet.unet."
"""Start of names in files of older versions of diffusers."""
_KINDS = nn.Linear | nn.Conv2d | nn.LayerNorm | nn.GroupNorm


def original_names(unet: nn.Module) -> dict[str, str]:
    """Names of a UNet's layers in the original layout (SGM's)."""
    links = keys.unet([f"{name}.weight" for name, layer in unet.named_modules() if isinstance(layer, _KINDS)])
    return {link.names[0].removesuffix(".weight"): link.original.removesuffix(".weight") for link in links}


@dataclass(frozen=True)
class UNetNames:
    """sd-scripts names the layers of 1.x and 2.x as diffusers does, those of SDXL as the original layout."""

    text_encoders: str = "te"
    swapped: frozenset[str] = frozenset()

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        for layer in layers:
            yield from spelled(layer, (layer,), (f"{component}.", _TWICE, ""), FLAT)
        try:
            originals = original_names(networks[component])
        except UserError:  # a UNet with parts for which the original layout has no place
            return
        for layer, original in originals.items():
            yield from spelled(original, (layer,), (*PREFIXES, "unet.", _TWICE), FLAT, is_original=True)

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        unet = networks[component]
        is_sdxl = getattr(getattr(unet, "config", None), "addition_embed_type", None) == "text_time"
        paths = original_names(unet) if is_sdxl else {layer: layer for layer in layers}
        return {f"lora_unet_{flat(paths[layer])}": (layer,) for layer in layers}


def architecture(network: nn.Module, prediction: str) -> Architecture:
    """Stable Diffusion 1.x, 2.x or XL: of a UNet, or a ControlNet of one."""
    config: Any = network.config
    if config.addition_embed_type == "text_time":
        generative_models = "https://github.com/Stability-AI/generative-models"
        version = {"ss_base_model_version": "sdxl_base_v1-0", "ss_v2": "False"}
        return Architecture("stable-diffusion-xl-v1-base", version, generative_models)
    if config.cross_attention_dim == 1024:  # the width of OpenCLIP's encoder, by which 2.x differs from 1.x
        version = {"ss_base_model_version": "sd_v2", "ss_v2": "True"}
        v = prediction == "v"
        return Architecture(f"stable-diffusion-v2-{'768-v' if v else '512'}", version)
    return Architecture("stable-diffusion-v1", {"ss_base_model_version": "sd_v1", "ss_v2": "False"})
