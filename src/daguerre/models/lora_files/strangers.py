"""Files that people give as LoRAs and that are none, by the names of their tensors."""

import re
from collections.abc import Iterable
from pathlib import Path

from daguerre.errors import UserError

_KINDS = (
    (r"(emb_params|clip_[lg]|string_to_param.*|<.*>)", "an embedding (textual inversion), not a LoRA"),
    (r"lora_controlnet", "a Control-LoRA, which is not supported"),
    (r"(control_model\..*|input_hint_block\..*|controlnet_cond_embedding\..*)", "a ControlNet, not a LoRA"),
    (
        r"(model\.diffusion_model\..*|first_stage_model\..*|(down_blocks|input_blocks)\..*\.(weight|bias))",
        "a whole model, not a LoRA: `daguerre convert extract` makes one of its difference from a base",
    ),
    (
        r"(lora_unet_(double|single)_blocks_.*|transformer\.(single_)?transformer_blocks\..*|"
        r"diffusion_model\.(double|single)_blocks\..*)",
        "a LoRA for Flux or a like transformer, which this model is not",
    ),
    (r"lora_prior_.*", "a LoRA for Stable Cascade, which this model is not"),
    (
        r"bundle_emb\..*",
        "a LoRA with new tokens in it: `daguerre convert lora` and `daguerre convert tokens` write each apart",
    ),
)
"""Names of tensors, and what a file with one of them is."""
_FACTOR = re.compile(r".*(lora|hada|lokr|alpha).*")


def check_is_lora(path: Path, names: Iterable[str]) -> None:
    """UserError for a file of another kind, with its name."""
    if (kind := _kind(names)) is not None:
        raise UserError(f"{path} is {kind}", code="unsupported")


def _kind(names: Iterable[str]) -> str | None:
    for name in names:
        for pattern, kind in _KINDS:
            is_model = "whole model" in kind
            if re.fullmatch(pattern, name) and not (is_model and _FACTOR.fullmatch(name)):
                return kind
    return None
