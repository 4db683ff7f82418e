"""Files that people give as LoRAs and that are none, by the names of their tensors."""

import re
from collections.abc import Iterable
from pathlib import Path

from daguerre.errors import UserError

_KINDS = (
    (r"(emb_params|clip_[lg]|string_to_param.*|<.*>)", "an embedding (textual inversion), not a LoRA"),
    (r"lora_controlnet", "a Control-LoRA, which is not supported"),
    (r"lllite_.*", "a ControlNet-LLLite, which sd-scripts and its nodes for ComfyUI read, and is not supported here"),
    (r".*\.processor\.to_(q|k|v|out\.0)_custom_diffusion\..*", "weights of Custom Diffusion, which is not supported"),
    (r"(image_proj|image_proj_model|ip_adapter)\..*", "an IP-Adapter, which is not supported"),
    (r"(320|640|768|1024|1280)\.(0|1|linear\.\d+)\..*", "a hypernetwork, which is not supported"),
    (r"(control_model\..*|input_hint_block\..*|controlnet_cond_embedding\..*)", "a ControlNet, not a LoRA"),
    (
        r"(model\.diffusion_model\..*|first_stage_model\..*|(down_blocks|input_blocks)\..*\.(weight|bias))",
        "a whole model, not a LoRA: `daguerre convert extract` makes one of its difference from a base",
    ),
    (
        r"bundle_emb\..*",
        "a LoRA with new tokens in it: `daguerre convert lora` and `daguerre convert tokens` write each apart",
    ),
)
"""Names of tensors, and what a file with one of them is."""
_MODELS = (
    (
        r"(lora_unet_(double|single)_blocks_.*|transformer\.(single_)?transformer_blocks\..*|"
        r"diffusion_model\.(double|single)_blocks\..*)",
        "Flux or a like transformer",
    ),
    (r"lora_prior_.*", "Stable Cascade"),
)
"""Names of tensors, and the models that have them."""
_FACTOR = re.compile(r".*(lora|hada|lokr|alpha).*")
_OTHERS = (
    (r"(a1|a2|b1|b2|bm)\.weight", "a GLoRA (LyCORIS)"),
    (r"(on_input|ia3_l)", "an (IA)^3"),
    (r"(oft_blocks|oft_diag|rescale)", "an OFT or a BOFT (LyCORIS, sd-scripts)"),
    (r"(oft_R|oft_r|oft_s)(\..+)?", "an OFT"),
    (r"boft_\w+", "a BOFT"),
    (r"vera_(lambda_[bd]|[AB])", "a VeRA"),
    (r"(lora_E|ranknum)", "an AdaLoRA"),
    (r"lora_embedding_[AB]", "a LoRA of an embedding"),
    (r"(p_layer|q_layer|lambda_layer|base_[pq])(\..+)?", "a T-LoRA (LyCORIS)"),
    (r"(hra_u|c3a_kernel|fourierft_spectrum|waveft_spectrum|miss_block|bone_block|shira_weight|loraga_\w+|road_\w+|"
     r"delora_\w+|randlora_\w+|vblora_\w+)(\..+)?", "an adapter of peft of another kind"),
    (r"(set_weight|set_bias|reshape_weight)", "a patch of ComfyUI that replaces or reshapes weights"),
    (r"(.+\.)?(scale_weight|weight_scale|input_scale)", "a file of scaled numbers of few bits"),
)  # fmt: skip
"""Ends of tensors' names of other kinds of adapters, and what a file with one of them is."""
_ADVICE = (
    "Merge it into a model with the program that made it, and make a LoRA of that: `daguerre convert extract MERGED "
    "base=BASE rank=64 out=style.safetensors`"
)


def check_is_lora(path: Path, names: Iterable[str]) -> None:
    """UserError for a file of another kind, with its name; of an adapter that is not read with what to do."""
    names = [*names]
    if (kind := _kind(names)) is not None:
        raise UserError(f"{path} is {kind}", code="unsupported")
    for pattern, kind in _OTHERS:
        marked = re.compile(rf"(.*\.)?{pattern}(\.default)?")
        if (name := next(filter(marked.fullmatch, names), None)) is not None:
            raise UserError(f"{path} is {kind}, which is not supported: it has {name}. {_ADVICE}", code="unsupported")


def check_model(path: Path, names: Iterable[str]) -> None:
    """UserError for a LoRA with names of another model's layers, once its own model has none of them."""
    for name in names:
        if (model := next((model for pattern, model in _MODELS if re.fullmatch(pattern, name)), None)) is not None:
            raise UserError(f"{path} is a LoRA for {model}, which this model is not", code="unsupported")


def no_weight(what: str) -> UserError:
    """The error of who would add it to weights."""
    return UserError(
        f"{what} is a T-LoRA, which adds something else at each noise level, so that no weight holds it: it cannot be "
        "merged, converted, or used with others (use=). `daguerre generate RUN` applies it as it was trained; the "
        "files of adapter/ are for programs that let all ranks act everywhere",
        code="unsupported",
    )


def _kind(names: Iterable[str]) -> str | None:
    for name in names:
        for pattern, kind in _KINDS:
            is_model = "whole model" in kind
            if re.fullmatch(pattern, name) and not (is_model and _FACTOR.fullmatch(name)):
                return kind
    return None
