"""Names of Stability's single files for the weights of diffusers' Stable Cascade networks, both ways.

As in families/stable_diffusion/single_file/keys.py each `Link` is a tensor of the file and what it is made of. What is
not listed has the same name in both.
"""

import re
from collections.abc import Iterable

from daguerre.models.weights.original_names import Link

_NAMES = {"clip_txt_pooled_mapper": "clip_mapper", "vquantizer.embedding": "vquantizer.codebook"}
"""Of Stage B and Stage A: diffusers' name and the file's. Stage C has the first as diffusers has it."""
_QUERY = re.compile(r"(.+\.attention)\.to_q\.(weight|bias)")
_KINDS = (
    (r"lora_|embeddings\.(embeddings|indices)$|weights\.\d+\.lora_", "a LoRA of Stage C"),
    (r"projections\.\d+\.|backbone\.\d+\..*projections|.*\.conv_projections", "a ControlNet of Stage C"),
    (r"cond_mapper\.\d+\.|blocks\.\d+\.(attention|channelwise|mapper)\b|effnet_mappers\.", "Wuerstchen v2's weights"),
    (r"(model\.diffusion_model\.)?(input|output)_blocks\.", "a UNet of Stable Diffusion"),
    (r"clip_txt_mapper\.", "prior"),
    (r"effnet_mapper\.", "decoder"),
    (r"vquantizer\.", "vqgan"),
    (r"backbone\.0\.0\.", "effnet"),
    (r"blocks\.0\.", "previewer"),
)
STAGES = {
    "prior": "Stage C",
    "decoder": "Stage B",
    "vqgan": "Stage A",
    "effnet": "the EfficientNet encoder",
    "previewer": "the previewer",
}
"""What people call the components."""


def links(names: Iterable[str]) -> list[Link]:
    """The tensors of Stability's file of a network with these names of diffusers."""
    names = list(names)
    is_b = not any(name.startswith("clip_txt_mapper.") for name in names)
    return [link for name in names if (link := _link(name, is_b)) is not None]


def _link(name: str, is_b: bool) -> Link | None:
    if match := _QUERY.fullmatch(name):
        three = tuple(f"{match[1]}.to_{part}.{match[2]}" for part in "qkv")
        return Link(f"{match[1]}.attn.in_proj_{match[2]}", three, "fused")
    if re.search(r"\.attention\.to_[kv]\.", name):
        return None
    original = name.replace(".attention.to_out.0.", ".attention.attn.out_proj.")
    for ours, theirs in _NAMES.items() if is_b else ():
        original = re.sub(rf"^{re.escape(ours)}\.", f"{theirs}.", original)
    return Link(original, (name,))


_PACKED = {"prior": "model.diffusion_model.", "decoder": "model.diffusion_model.", "vqgan": "vae."}
"""Before a network's names in a file of ComfyUI, which holds several."""
_BESIDE = ("model.diffusion_model.", "text_encoder.", "clip_l_vision.", "vae.")


def unpacked(names: Iterable[str], component: str) -> dict[str, str]:
    """The file's names by those that a file of the component alone has: of ComfyUI's files, which hold the text
    encoder and others as well, without its place in them. Names that no such file has stay, to be refused."""
    names, prefix = list(names), _PACKED.get(component)
    if prefix is None or not any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    return {
        name.removeprefix(prefix): name for name in names if name.startswith(prefix) or not name.startswith(_BESIDE)
    }


def own_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """diffusers' names for each tensor of a file, whichever of both layouts it is in."""
    back = {theirs: ours for ours, theirs in _NAMES.items()}
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+\.attention)\.attn\.in_proj_(weight|bias)", name):
            found[name] = tuple(f"{match[1]}.to_{part}.{match[2]}" for part in "qkv")
            continue
        own = re.sub(r"\.attention\.attn\.(to_[qkv])\.", r".attention.\1.", name)  # as ComfyUI saves it
        own = own.replace(".attention.attn.out_proj.", ".attention.to_out.0.")
        for theirs, ours in back.items():
            own = re.sub(rf"^{re.escape(theirs)}\.", f"{ours}.", own)
        found[name] = (own,)
    return found


def kind(names: Iterable[str]) -> str | None:
    """The component whose weights a file with these names holds, or what else it is; None where nothing is known."""
    names = list(names)
    return next((what for pattern, what in _KINDS if any(re.match(pattern, name) for name in names)), None)
