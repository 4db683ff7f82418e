"""Files that `generate use=` puts on a model, each with its strength: LoRAs (loras.py), and new tokens.

`use='{style.safetensors: 0.8, toy.safetensors: 1, "<hat>=old.pt": 1, runs/my_run: 1}'`: a file is one of the two, by
what is in it; a run's folder, a config of Stable Cascade's code and a file of OneTrainer's may have both. A token is
there or not, so its strength is 1; with a LoRA the strength is the LoRA's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from daguerre import digests
from daguerre.assembly.parts import Components
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.generation import loras
from daguerre.generation.load import Loading
from daguerre.models.lora_files import numbered
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE
from daguerre.models.parts.text import new_tokens, token_files

_LORAS = (KOHYA_FILE, DIFFUSERS_FILE, "adapter_config.json")


class _Tokens(NamedTuple):
    """A file of tokens, or an export's folder."""

    path: Path
    name: str | None
    """The token's name, where the command gives one."""


def added(loading: Loading, use: Mapping[str, float]) -> Loading:
    """The same weights with these files and runs. UserError if one cannot be used."""
    tokens: list[_Tokens] = []
    of_loras: dict[str, float] = {}
    for place, strength in use.items():
        name, path = _named(place)
        found = token_files.find(path)
        if found is not None:
            tokens.append(_Tokens(found, name))
        if found is None or _has_lora(path):
            of_loras[place.partition("=")[2] if name else place] = strength
        elif strength != 1:
            raise UserError(
                f"use: {place} is a new token, which a prompt has or has not: its strength is 1, not {strength:g}",
                setting="use",
            )
    loading = loras.added(loading, of_loras)
    if not tokens:
        return loading
    digests = {str(each.path): _digest(each.path) for each in tokens}
    return replace(
        loading,
        description=f"{loading.description}, with the tokens of {' and '.join(digests)}",
        provenance={**loading.provenance, "tokens": digests},
        parts=lambda: _with_tokens(loading.parts(), tokens),
    )


def unprompted(parts: Components, prompts: Iterable[str]) -> list[str]:
    """A line about new tokens of a model, where no prompt, positive or negative, has one of them; else none."""
    readers = () if parts.family.text is None else parts.family.text.encoders
    names = dict.fromkeys(name for reader in readers for name in new_tokens.names(reader))
    if not names or any(name in prompt.lower() for prompt in prompts for name in names):
        return []
    return [f"no prompt has the new token {' or '.join(names)}, so the images show nothing of what was learnt"]


def _named(place: str) -> tuple[str | None, Path]:
    """The name and the path of `<toy>=toy.safetensors`; of a path alone no name."""
    name, mark, path = place.partition("=")
    if mark and name and not Path(place).expanduser().exists():
        return name, loras.located(path)
    return None, loras.located(place)


def _has_lora(place: Path) -> bool:
    """True if there is a LoRA with the tokens of a place."""
    if not place.is_dir():
        return numbered.config(place) is not None or token_files.beside_a_lora(place)
    folder = place
    places = (folder, folder / "adapter", *(folder / "adapter").glob("*/"))
    return any((each / name).is_file() for each in places for name in _LORAS)


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files of tokens."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if (config := numbered.config(path)) is not None:
        files.append(config.file)
    return digests.sha256(files)


@torch.no_grad()
def _with_tokens(parts: Components, tokens: list[_Tokens]) -> Components:
    """Adds rows to the embeddings. UserError for files of other models and for names that clash."""
    readers = () if parts.family.text is None else parts.family.text.encoders
    new: dict[str, Any] = {}
    existing: dict[str, Any] = {}
    for path, given in tokens:
        of_file, of_vocabulary = token_files.read(path, readers, given)
        for token, rows in of_file.items():
            name = new_tokens.as_read(readers[0], token)
            if name in new:
                raise UserError(f"use: two files have a token {name}: name one as in '<b>=FILE'", setting="use")
            new[name] = rows
            counts = (f"{counted(len(vectors), 'vector')} for {encoder}" for encoder, vectors in rows.items())
            print(f"{path}: {name}, {', '.join(counts)}")
        existing |= of_vocabulary
    for reader in readers:
        own = {name: rows[reader.name] for name, rows in new.items() if reader.name in rows}
        old = {name: rows[reader.name] for name, rows in existing.items() if reader.name in rows}
        try:
            new_tokens.check_names(reader, [*own])
        except UserError as error:
            raise UserError(f"use: {error}; a name is given as in '<toy>=FILE'", setting="use") from None
        if own or old:
            new_tokens.attach(reader, own, old)
    return parts
