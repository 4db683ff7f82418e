"""Loads feature networks of transformers from folders: safetensors alone, nothing of the hub, no code of a stranger."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from daguerre import documents
from daguerre.errors import UserError
from daguerre.models.weights import files


def load(folder: Path, model_class: str, kinds: tuple[str, ...], dtype: torch.dtype = torch.float32) -> Any:
    """The network in evaluation mode. UserError for a folder of another kind, or a damaged one."""
    kind = files.read_json(folder / "config.json").get("model_type")
    if kind not in kinds:
        raise UserError(f"{folder} holds a {kind}, and a {' or '.join(kinds)} is needed", code="unsupported")
    files.check_whole(folder)
    files.check_numbers(folder, None)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = None  # a stranger's may name code that the library would fetch and run
        model, info = getattr(transformers, model_class).from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (*documents.MISREAD, StrictDataclassError) as error:
        raise UserError(f"{folder} cannot be read as a {model_class}: {str(error)[:300]}", code="damaged") from error
    if missing := sorted([*info["missing_keys"], *info["mismatched_keys"]]):
        raise UserError(f"{folder} lacks {len(missing)} of the network's weights, such as {missing[0]}", code="damaged")
    return model.to(dtype).eval().requires_grad_(False)


def processor(folder: Path, mean: list[float], std: list[float]) -> tuple[list[float], list[float]]:
    """Mean and deviation of the pixels in 0..1, as preprocessor_config.json says, or the usual ones."""
    path = folder / "preprocessor_config.json"
    found: Mapping[str, Any] = files.read_json(path) if path.is_file() else {}
    return found.get("image_mean", mean), found.get("image_std", std)
