"""Names of the original layout (LDM's, in one file) for the weights of diffusers' and transformers' networks.

One table for both directions: each `Link` is a tensor of the original layout and what it is made of, so an import is
the inverse of an export and equal to the bit. diffusers has the names of first and last layers, and converters for
importing alone, with which tests compare this table. Sources: CompVis/latent-diffusion, Stability-AI/generative-models
and, for the text encoders of 2.x and the second one of SDXL, OpenCLIP.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

from daguerre.errors import UserError
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.weights.original_names import Form, Link

_NAMES: Any = DIFFUSERS_TO_LDM_MAPPING
"""Original names of first and last layers, by diffusers' or transformers'."""
_UNET_ENDS: dict[str, str] = _NAMES["unet"]["layers"] | _NAMES["unet"]["addition_embed_type"]
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_MIDDLE = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE_BLOCK = re.compile(r"mid_block\.((?:resnets|attentions)\.\d+)\.(.+)")


def unet(names: Iterable[str]) -> list[Link]:
    """The links of a UNet2DConditionModel. UserError for parts that the original has no place for."""
    names = list(names)
    numbered = _numbered_blocks(names)
    return [Link(_unet_name(name, numbered), (name,)) for name in names]


def _unet_name(name: str, numbered: dict[tuple[str, int, int], str]) -> str:
    if name in _UNET_ENDS:
        return _UNET_ENDS[name]
    if match := _MIDDLE_BLOCK.fullmatch(name):
        if match[1] in _MIDDLE:
            return f"middle_block.{_MIDDLE[match[1]]}.{_inside(match[1], match[2])}"
    elif match := _BLOCK.fullmatch(name):
        side, block, part, layer, inside = match[1], int(match[2]), match[3], int(match[4]), match[5]
        if part in ("resnets", "attentions") and (side, block, layer) in numbered:
            return f"{numbered[side, block, layer]}.{int(part == 'attentions')}.{_inside(part, inside)}"
        if part == "downsamplers" and inside in ("conv.weight", "conv.bias"):
            return f"{numbered[side, block, -1]}.0.op.{inside.rpartition('.')[2]}"
        if part == "upsamplers" and inside in ("conv.weight", "conv.bias"):
            return f"{numbered[side, block, -1]}.{inside}"
    raise _without_place(name, "UNet")


def _inside(part: str, name: str) -> str:
    """The name inside a residual block; transformers inside the UNet have the same names in both layouts."""
    if part.startswith("attentions"):
        return name
    stem, _, last = name.rpartition(".")
    if stem not in _RESNET:
        raise _without_place(name, "UNet's residual blocks")
    return f"{_RESNET[stem]}.{last}"


def _numbered_blocks(names: list[str]) -> dict[tuple[str, int, int], str]:
    """The original numbers every layer through: (down or up, block, layer) to its name; layer -1 is the resampler.

    Going down a resampler is a layer of its own; going up it is the last part of the layer before it.
    """
    found = [match for name in names if (match := _BLOCK.fullmatch(name))]
    layers = sorted({(m[1], int(m[2]), int(m[4])) for m in found if m[3] == "resnets"})
    resampled = {(m[1], int(m[2])) for m in found if m[3].endswith("samplers")}
    attended = {(m[1], int(m[2]), int(m[4])) for m in found if m[3] == "attentions"}
    numbered, count = {}, {"down": 1, "up": 0}
    for side, block, layer in layers:
        stem = "input_blocks" if side == "down" else "output_blocks"
        numbered[side, block, layer] = f"{stem}.{count[side]}"
        count[side] += 1
        if (side, block) in resampled and (side, block, layer + 1) not in layers:
            if side == "down":
                numbered[side, block, -1] = f"{stem}.{count[side]}"
                count[side] += 1
            else:
                place = 1 + ((side, block, layer) in attended)
                numbered[side, block, -1] = f"{stem}.{count[side] - 1}.{place}"
    return numbered


_VAE = re.compile(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)samplers\.0)\.(.+)")
_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OLD_VAE_ATTENTION = {"query": "q", "key": "k", "value": "v", "proj_attn": "proj_out"}


def vae(names: Iterable[str]) -> list[Link]:
    """The links of an AutoencoderKL. UserError for parts that the original has no place for."""
    names = list(names)
    levels = 1 + max((int(match[3]) for name in names if (match := _VAE.fullmatch(name))), default=-1)
    return [_vae_link(name, levels) for name in names]


def _vae_link(name: str, levels: int) -> Link:
    if name in _NAMES["vae"]:
        return Link(_NAMES["vae"][name], (name,))
    if name.startswith("bn."):  # the statistics of FLUX.2's latents
        return Link(name, (name,))
    if match := _VAE.fullmatch(name):
        half, way, block, layer, inside = match.groups()
        level = int(block) if way == "down" else levels - 1 - int(block)
        part = f"{way}sample" if layer is None else f"block.{layer}"
        return Link(f"{half}.{way}.{level}.{part}.{inside.replace('conv_shortcut', 'nin_shortcut')}", (name,))
    if match := _VAE_MIDDLE.fullmatch(name):
        half, part, number, inside = match.groups()
        stem, _, last = inside.rpartition(".")
        if part == "resnets":
            return Link(f"{half}.mid.block_{int(number) + 1}.{inside}", (name,))
        if number == "0" and (own := (_VAE_ATTENTION | _OLD_VAE_ATTENTION).get(stem)):
            form: Form = "convolution" if last == "weight" and own != "norm" else "same"
            return Link(f"{half}.mid.attn_1.{own}.{last}", (name,), form)
    raise _without_place(name, "autoencoder")


def clip(names: Iterable[str]) -> list[Link]:
    """The links of a CLIPTextModel with OpenAI's names, as 1.x and the first encoder of SDXL have it."""
    return [Link(with_wrapper(name), (name,)) for name in names if not name.endswith("position_ids")]


_LAYER = re.compile(r"text_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_FUSED = ("q_proj", "k_proj", "v_proj")


def open_clip(names: Iterable[str]) -> list[Link]:
    """The links of a CLIPTextModel or CLIPTextModelWithProjection with OpenCLIP's names, as 2.x and SDXL have it."""
    return [link for name in names if not name.endswith("position_ids") for link in _open_clip_links(name)]


def _open_clip_links(name: str) -> Iterator[Link]:
    wrapped = with_wrapper(name)
    ends = _NAMES["openclip"]["layers"]
    if wrapped in ends:
        yield Link(ends[wrapped], (name,), "transposed" if wrapped == "text_projection.weight" else "same")
    elif (match := _LAYER.fullmatch(wrapped)) and match[2] in _IN_LAYER:
        yield Link(f"transformer.resblocks.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}", (name,))
    elif match and match[2] == "self_attn.q_proj":
        three = tuple(name.replace("q_proj", part) for part in _FUSED)
        yield Link(f"transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}", three, "fused")
    elif not (match and match[2] in ("self_attn.k_proj", "self_attn.v_proj")):
        raise _without_place(name, "text encoder")


def _without_place(name: str, network: str) -> UserError:
    return UserError(f"the original layout has no place for {name!r} of the {network}", code="unsupported")


_EMBEDDING = re.compile(r"controlnet_cond_embedding\.(conv_in|blocks\.(\d+)|conv_out)\.(weight|bias)")
_ZERO = re.compile(r"controlnet_down_blocks\.(\d+)\.(weight|bias)|controlnet_mid_block\.(weight|bias)")


def controlnet(names: Iterable[str]) -> list[Link]:
    """Of a ControlNetModel, as lllyasviel/ControlNet names it. UserError for parts that the original has no place
    for."""
    names = list(names)
    last = 1 + sum(name.startswith("controlnet_cond_embedding.blocks.") and name.endswith(".weight") for name in names)
    numbered = _numbered_blocks(names)
    return [Link(_controlnet_name(name, last, numbered), (name,)) for name in names]


def _controlnet_name(name: str, last: int, numbered: dict[tuple[str, int, int], str]) -> str:
    """Activations stand between the layers of the embedding, and count."""
    if match := _EMBEDDING.fullmatch(name):
        layer = {"conv_in": 0, "conv_out": last}.get(match[1], 1 + int(match[2] or 0))
        return f"input_hint_block.{2 * layer}.{match[3]}"
    if match := _ZERO.fullmatch(name):
        return f"middle_block_out.0.{match[3]}" if match[1] is None else f"zero_convs.{match[1]}.0.{match[2]}"
    return _unet_name(name, numbered)
