"""Where pretrained networks come from: a folder shipped with the package, a local folder, or a hub id.

Finds a folder in diffusers' layout and loads one network of it, frozen and in float32. Nothing is guessed: what is
missing, does not fit or would be left at random weights is an error that says so. Knows no particular family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn

from daguerre.errors import UserError

SHIPPED = Path(__file__).parent.parent / "assets"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# Their bars and notices would tear our progress line, and what they warn of is an error here.
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

Needed = Mapping[str, Sequence[str]]
"""Files of a pipeline by component folder, such as {"vae": ["config.json", "diffusion_pytorch_model.safetensors"]}."""


def locate(name: str, needed: Needed) -> Path:
    """The folder that `name` means and that holds all files in `needed`.

    A shipped name comes first, then a local folder, then the hub: its local cache, and only then the network.
    UserError says what was looked for, where, and what to do.
    """
    if name in shipped():
        return _complete(SHIPPED / name, name, needed)
    if Path(name).is_dir():
        return _complete(Path(name), name, needed)
    if _HUB_ID.fullmatch(name):
        return _complete(_from_hub(name, needed), name, needed)
    raise UserError(
        f"there is no folder {name!r}, and it is no hub id (OWNER/NAME); shipped are: {', '.join(shipped())}. "
        "Give one of these, a folder in diffusers' layout, or a hub id"
    )


def shipped() -> list[str]:
    """Names of the pipelines that come with the package."""
    return sorted(folder.name for folder in SHIPPED.glob("[!_.]*") if folder.is_dir())


def missing_files(folder: Path, needed: Needed) -> list[str]:
    """What of `needed` is not in `folder`, as COMPONENT/FILE."""
    return [
        f"{part}/{file}" for part, files in needed.items() for file in files if not (folder / part / file).is_file()
    ]


def _complete(folder: Path, name: str, needed: Needed) -> Path:
    if missing := missing_files(folder, needed):
        raise UserError(
            f"{name} ({folder}) lacks {', '.join(missing)}; needed is a folder in diffusers' layout with "
            f"{', '.join(needed)} and weights in safetensors. Point to a complete one, or copy the missing files there"
        )
    return folder


def _from_hub(name: str, needed: Needed) -> Path:
    patterns = [f"{part}/{file}" for part, files in needed.items() for file in files]
    patterns += ["tokenizer/*.json", "tokenizer/*.txt", "scheduler/*.json"]
    try:
        cached = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        if not missing_files(cached, needed):
            return cached
    except OSError:
        pass  # not in the cache: ask the hub
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except OSError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"there is no folder {name!r}, and the hub did not give the model {name!r}: {reason}. Its files are not "
            f"in the local cache {huggingface_hub.constants.HF_HUB_CACHE}. Offline: on a machine with a connection "
            f"run `hf download {name} --local-dir DIR`, copy DIR here and give its path, or take one that is shipped: "
            f"{', '.join(shipped())}"
        ) from error


def load_frozen(kind: Any, folder: Path) -> Any:
    """`load` for a network that is not trained: in evaluation mode, without gradients."""
    return load(kind, folder).eval().requires_grad_(False)


def load(kind: Any, folder: Path) -> Any:
    """The network of class `kind` in `folder`, on the CPU in float32. UserError if a weight is missing."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if kind.__module__.startswith("diffusers"):
        options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}  # True needs accelerate
    try:
        with torch.random.fork_rng(devices=[]):  # it fills the weights at random before it reads them
            net, info = kind.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{folder} cannot be read as {kind.__name__}: {error}") from error
    wrong = [str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]]]
    if wrong:
        raise UserError(
            f"{folder} does not hold all weights of the {kind.__name__} that its config.json describes; missing or of "
            f"another shape: {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}. Copy the folder anew"
        )
    return net


def seeded(build: Any, seed: int) -> nn.Module:
    """`build()` with torch's initial weights drawn from `seed`; torch's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
