"""Models that files of LoRAs are converted for: their networks without memory, and their weights layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import configs, load
from daguerre.models.lora_files.addition import Addition
from daguerre.models.lora_files.read import read
from daguerre.models.network import class_of
from daguerre.models.parts.text import token_files
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.names import spellings
from daguerre.models.parts.text.token_files import Embeddings
from daguerre.models.parts.text.tokenizers import AbsentTokenizer
from daguerre.models.weights import architectures, index, unfilled
from daguerre.models.weights.files import read_json

Networks = dict[str, nn.Module]
Found = TypeVar("Found")

_EXTENDED = ("unet", "prior", "decoder", "transformer", "text_conditioner", "text_encoder", "text_encoder_2")
"""Components that LoRAs are for."""


def folder(place: str, ignored: Sequence[str] = ()) -> Path:
    """A model in diffusers' layout: the folder itself, that of a run, or a single file converted to one, once, without
    the tensors whose names fit `ignored`. UserError for no such place."""
    path = Path(place).expanduser()
    if path.is_file():
        return load.folder(path, pickled=False, ignored=ignored)
    found = next((each for each in (path, RunFolder(path).pipeline) if index.find(each) is not None), None)
    if found is None:
        missing = "there is no such place" if not path.exists() else "it has no model_index.json, nor has its pipeline/"
        raise UserError(
            f"{place}: {missing}. Give a model as a .safetensors file, as a folder in diffusers' layout, or as a run "
            "that trained a whole network. To download one: `daguerre fetch OWNER/NAME -o DIR`",
            code="missing",
        )
    return found


def given(place: str | None, ignored: Sequence[str]) -> Path | None:
    """`folder` of a base that was given; None without one. UserError for patterns of tensors of no base."""
    if place is not None:
        return folder(place, ignored)
    if ignored:
        raise UserError(
            f"ignore_tensors={[*ignored]} has no effect: only a base is read by it; give base=FILE, or remove it",
            code="unused",
            setting="ignore_tensors",
        )
    return None


def networks(model: Path) -> Networks:
    """Denoiser and text encoders of a folder in diffusers' layout, on the meta device: those that files of LoRAs have
    names for."""
    there = [name for name in _EXTENDED if (model / name / "config.json").is_file()]
    made = {name: _outline(name, read_json(model / name / "config.json")) for name in there}
    return {name: network for name, network in made.items() if network is not None}


def _outline(name: str, config: Mapping[str, Any]) -> nn.Module | None:
    """A network without memory; None for a text encoder of a kind for which other programs write no LoRAs."""
    if name not in configs.KINDS:
        kind: Any = class_of(str(config.get("_class_name")))
        with unfilled.outlining():
            return None if kind is None else kind.from_config(dict(config))
    of_clip = str(config.get("model_type", "clip")).startswith("clip")
    if of_clip or "_class_name" in config:
        return configs.outline(name, config)
    other: Any = class_of(str((config.get("architectures") or [""])[0]))
    with unfilled.outlining():
        return None if other is None else other(other.config_class(**config))


@cache
def _published(name: str) -> Networks:
    """`networks` of a published architecture: made once for all files, as nobody changes networks without memory."""
    return networks(architectures.FOLDER / name)


def fitting(path: Path, base: Path | None) -> tuple[Networks, dict[str, list[Addition]]]:
    """The networks that a LoRA is for, and its additions: those of `base`, or of the first published architecture that
    has all of its layers. UserError if it is for none."""
    return _fitting(path, base, lambda made: (made, read(path, made, tokens_apart=True)))


def fitting_tokens(path: Path, base: Path | None, name: str | None) -> tuple[Networks, Embeddings, Embeddings]:
    """The networks that new tokens are for, as `fitting` finds them; the tokens, and trained ones of the vocabulary.

    Args:
        path: a file, or the folder of an export.
        base: the folder of the model that they are for.
        name: the token's name, in place of the one that the file has.
    """

    def taken(made: Networks) -> tuple[Networks, Embeddings, Embeddings]:
        readers = [
            TextEncoder(component, network, AbsentTokenizer(0), {})
            for component, network in made.items()
            if component.startswith("text_encoder") and type(network) in configs.KINDS.values()  # CLIP's alone
        ]
        files = {file.name for file in path.glob(f"{token_files.LEARNED}*.safetensors")} if path.is_dir() else set()
        if files and len(files) != len(readers):
            raise UserError(f"{path} has tokens for {len(files)} text encoders", code="unsupported")
        return made, *token_files.read(path, readers, name)

    return _fitting(path, base, taken)


def _fitting(path: Path, base: Path | None, taken: Callable[[Networks], Found]) -> Found:
    """Takes a file for the networks of `base`, or for the first published architecture that it is for. UserError if it
    is for none."""
    if base is not None:
        return taken(networks(base))
    refused: dict[str, UserError] = {}
    for name in architectures.names():
        try:
            return taken(_published(name))
        except UserError as error:
            # A damaged file is damaged for every model: its own error says more.
            if error.code not in ("unknown", "unsupported"):
                raise
            refused[name] = error
    if len({*map(str, refused.values())}) == 1:
        raise next(iter(refused.values()))
    first, why = next(iter(refused.items()))
    raise UserError(
        f"{path}: give the model that it was trained on, for the names and shapes of its layers: base=RUN, base=FOLDER "
        f"or base=FILE.safetensors. It fits none of the {len(refused)} published ones; as one of {first}: {why}",
        code="unknown",
        setting="base",
    )


def tensor_names(network: nn.Module) -> Mapping[str, str]:
    """The weight or bias by each name that a file may have for it."""
    own = [name for name, _ in network.named_parameters()]
    return {spelt: name for name in own for spelt in spellings(name)}


def file_names(network: nn.Module) -> Mapping[str, str]:
    """The linear layer or convolution by the name that a file may have for its weight: text encoders' files have a
    level that transformers 5.6 and later leave out."""
    own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return {f"{spelt}.weight": layer for layer in own for spelt in spellings(layer)}
