"""Files of new tokens (textual inversion): those of diffusers, A1111, ComfyUI and kohya's sd-scripts, read and written.

    {NAME: [n, D]}                          diffusers, one file a text encoder (and one token a file)
    {"emb_params": [n, D]}                  A1111, ComfyUI and sd-scripts; the file's name is the token's
    {"clip_l": [n, D], "clip_g": [n, D]}    the same of SDXL; of one text encoder, such as Stable Cascade's, one of them
    {"string_to_param": {"*": [n, D]}}      A1111's older, pickled one, which is read as tensors alone
    {"bundle_emb.NAME.clip_l": [n, D]}      OneTrainer and A1111, in the file of a LoRA; `KEY` is any of the above
    a config of Stable Cascade's LoRA       whose file has offsets alone: models/lora_files/numbered.py

Every tensor of a file is used, or the file is refused. What is written is read back and compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.errors import UserError
from daguerre.models.export.about import About
from daguerre.models.lora_files import header, numbered
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.weights import pickled, seals
from daguerre.models.weights.opening import opened

Embeddings = dict[str, dict[str, Tensor]]
"""Rows [n, D] of each token, by token and text encoder."""
_CASCADE = "stable-cascade-v1"
"""Start of the architectures of Stable Cascade, whose only text encoder programs call clip_g."""
LEARNED, EXISTING = "learned_embeds", "existing_tokens"
"""Starts of the names of the files of new tokens for diffusers, and of trained tokens of the vocabulary."""
_ANY_NAME = ("emb_params", "*")
"""Keys that are no token's name: the file has it."""
_SDXL = ("clip_l", "clip_g")
_PROGRAMS = {"clip_l": "clip_l", "clip_g": "clip_g", "t5xxl": "t5xxl", "t5": "t5xxl"}
"""Keys of text encoders in files of several: ComfyUI's, and what OneTrainer writes in their place."""
_XL = "stable-diffusion-xl"
"""Start of modelspec's architectures with these two text encoders."""
_OF_LAYERS = re.compile(r"lora|hada_|lokr_|\.(weight|bias|alpha|diff|dora_scale|oft_blocks)$")
"""Found in names of tensors of additions to layers, and of whole networks."""
BUNDLED = "bundle_emb."
"""Start of the names of tokens in the file of a LoRA."""
_PICKLED = (".pt", ".bin")
_TRIGGER, _ARCHITECTURE = "modelspec.trigger_phrase", "modelspec.architecture"


def keys(readers: Sequence[TextEncoder]) -> dict[str, str]:
    """Names of text encoders in a file with embeddings for several, by component."""
    kinds = [reader.kind for reader in readers]
    return {
        reader.name: reader.kind.file_keys[min(kinds[:number].count(reader.kind), len(reader.kind.file_keys) - 1)]
        for number, reader in enumerate(readers)
    }


def write(
    folder: Path,
    new: Embeddings,
    existing: Embeddings,
    metadata: Mapping[str, str],
    named: Mapping[str, str] | None = None,
) -> None:
    """Writes the files of tokens into a folder. RuntimeError if one does not hold what was trained.

    Args:
        metadata: of the model: modelspec's architecture and so on.
        named: `keys` of the model's text encoders; None: they are CLIPs.
    """
    encoders = list(next(iter([*new.values(), *existing.values()])))
    of_cascade = metadata.get(_ARCHITECTURE, "").startswith(_CASCADE)
    own_keys: tuple[str, ...] = _SDXL[1:] if of_cascade else _ANY_NAME[:1]
    if len(encoders) > 1:
        own_keys = _SDXL if named is None else tuple(named[encoder] for encoder in encoders)
    for start, tokens in ((LEARNED, new), (EXISTING, existing)):
        for encoder in encoders if tokens else ():
            _write(folder / _of_encoder(start, encoder), {name: own[encoder] for name, own in tokens.items()}, metadata)
    names = file_names(new)
    for name, own in new.items():
        keys = dict(zip(own_keys, encoders, strict=True))
        told = {**metadata, "modelspec.title": names[name], _TRIGGER: name}
        _write(folder / f"{names[name]}.safetensors", {key: own[encoder] for key, encoder in keys.items()}, told)


def file_names(tokens: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """A name for the file of each token, which A1111 and ComfyUI take for the token's: without what some file systems
    do not have."""
    found: dict[str, str] = {}
    for name in tokens:
        plain = re.sub(r"[^\w.+-]+", "", name).strip(".") or "token"
        taken = {*found.values(), LEARNED, EXISTING}
        found[name] = next(each for each in (plain, *(f"{plain}-{n}" for n in range(2, 1000))) if each not in taken)
    return found


def metadata(networks: Mapping[str, Any], about: About) -> dict[str, str]:
    """modelspec 1.0.1 of tokens for a model of these components: by it other programs show and sort files."""
    return {**header.of_model(networks, about, "textual-inversion"), "modelspec.implementation": "diffusers"}


_CARD = """\
---
library_name: diffusers
tags: [textual_inversion]
---

New tokens trained with Daguerre, for the base model that they were trained on: {names}.

```python
from safetensors.torch import load_file

{calls}
```

{files}: for A1111, ComfyUI and sd-scripts, which take the file's name for the token's.
"""
_CALL = """\
for token, rows in load_file("path/to/this/folder/{file}.safetensors").items():
    pipe.load_textual_inversion({{token: rows}}, text_encoder=pipe.{encoder}, tokenizer=pipe.{tokenizer})"""


def card(new: Embeddings, encoders: Sequence[str]) -> str:
    """README.md: how diffusers reads the tokens."""
    calls = []
    for encoder in encoders:
        mark = encoder.removeprefix("text_encoder")
        calls.append(_CALL.format(file=LEARNED + mark, encoder=encoder, tokenizer=f"tokenizer{mark}"))
    files = [f"`{name}.safetensors`" for name in file_names(new).values()]
    return _CARD.format(names=", ".join(f"`{name}`" for name in new), calls="\n".join(calls), files=", ".join(files))


def find(path: Path) -> Path | None:
    """A file of tokens, or the folder of a run's export that has some; None where there are none. UserError for a file
    that cannot be read."""
    if path.is_dir():
        places = (path, path / "adapter", *sorted((path / "adapter").glob("*/")))
        starts = (LEARNED, EXISTING)
        return next((p for p in places if any(next(p.glob(f"{s}*.safetensors"), None) for s in starts)), None)
    if path.suffix in _PICKLED and path.is_file():
        return path
    if numbered.with_words(path):
        return path
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    with opened(path) as file:  # names alone: it may be a large LoRA
        names = [*file.keys()]
    return None if any(map(_OF_LAYERS.search, names)) and not any(n.startswith(BUNDLED) for n in names) else path


def beside_a_lora(path: Path) -> bool:
    """True for a file of a LoRA that has tokens in it."""
    if path.suffix != ".safetensors":
        return False
    with opened(path) as file:
        return any(map(_OF_LAYERS.search, file.keys()))


def read(path: Path, readers: Sequence[TextEncoder], name: str | None = None) -> tuple[Embeddings, Embeddings]:
    """The new tokens of a file or of an export's folder, and its trained tokens of the vocabulary.

    Args:
        path: the file or folder.
        readers: the model's text encoders.
        name: the token's name, in place of the one that the file has.

    Raises:
        UserError: for a file that is not wholly understood, or made for another model.
    """
    if (found_words := numbered.with_words(path)) is not None:
        by, config = found_words
        own, of_vocabulary = by.words(path, config, readers[0])
        encoder = readers[0].name
        by_encoder = [{word: {encoder: rows} for word, rows in each.items()} for each in (own, of_vocabulary)]
        return by_encoder[0], by_encoder[1]
    if not path.is_dir():
        return _read_file(path, readers, name), {}
    found: list[Embeddings] = []
    for start in (LEARNED, EXISTING):
        tokens: Embeddings = {}
        for reader in readers:
            file = path / _of_encoder(start, reader.name)
            if not file.is_file():
                continue
            own, told = _tensors(file)
            _check_model(file, told, readers)
            for token, rows in own.items():
                tokens.setdefault(token, {})[reader.name] = _checked(file, token, rows, reader)
        found.append(tokens)
    return found[0], found[1]


def _of_encoder(start: str, encoder: str) -> str:
    """`learned_embeds.safetensors`, of a second text encoder `learned_embeds_2.safetensors`."""
    return f"{start}{encoder.removeprefix('text_encoder')}.safetensors"


def _read_file(path: Path, readers: Sequence[TextEncoder], name: str | None) -> Embeddings:
    tensors, metadata = _tensors(path)
    _check_model(path, metadata, readers)
    found: Embeddings = {}
    if not (bundled := _bundled(path, tensors, len(readers))):
        return _read(path, tensors, metadata, readers, name)
    if name and len(bundled) > 1:
        raise UserError(f"{path} has {len(bundled)} tokens, which cannot all be called {name}: remove the name")
    for token, own in bundled.items():
        found |= _read(path, own, metadata, readers, name or token)
    return found


def _bundled(path: Path, tensors: Mapping[str, Tensor], encoders: int) -> dict[str, dict[str, Tensor]]:
    """Tensors of each token in the file of a LoRA, by the keys of a file of its own."""
    found: dict[str, dict[str, Tensor]] = {}
    for full in (name for name in tensors if name.startswith(BUNDLED)):
        token, _, key = full.removeprefix(BUNDLED).replace(".string_to_param.", ".").rpartition(".")
        if key.endswith("_out"):
            raise UserError(
                f"{path}: {full} is added behind the text encoder (an output embedding of OneTrainer's), which is not "
                "supported",
                code="unsupported",
            )
        found.setdefault(token, {})[key] = tensors[full]
    if encoders == 1 and all(len(own) == 1 for own in found.values()):
        return {token: {_ANY_NAME[0]: next(iter(own.values()))} for token, own in found.items()}
    return found


def _read(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    readers: Sequence[TextEncoder],
    name: str | None,
) -> Embeddings:
    if not tensors:
        raise UserError(f"{path} has no embeddings in it", code="empty")
    of_one_encoder = len(tensors) == len(readers) == 1
    named = keys(readers)
    if {*tensors} & {*_PROGRAMS} and not of_one_encoder:
        tensors = {_PROGRAMS.get(key, key): rows for key, rows in tensors.items()}
        if {*tensors} != {*named.values()}:
            of_sdxl = ", which SDXL's two text encoders read" if {*tensors} == {*_SDXL} else ""
            raise UserError(
                f"{path} has embeddings for {', '.join(sorted(tensors))}{of_sdxl}; this model has "
                f"{', '.join(reader.name for reader in readers)}",
                code="unsupported",
            )
        own = {r.name: _checked(path, named[r.name], tensors[named[r.name]], r) for r in readers}
        # The header's trigger phrase before the file's name, which people change.
        return {name or metadata.get(_TRIGGER, path.stem): own}
    if len(readers) != 1:
        raise UserError(
            f"{path} has embeddings for one text encoder, but this model has {len(readers)}: give a file with "
            f"{' and '.join(named.values())}, or the folder of a run",
            code="unsupported",
        )
    if name and len(tensors) > 1:
        raise UserError(f"{path} has {len(tensors)} tokens, which cannot all be called {name}: remove the name")
    found = {}
    for key, rows in tensors.items():
        token = name or (metadata.get(_TRIGGER, path.stem) if key in (*_ANY_NAME, *_PROGRAMS) else key)
        found[token] = {readers[0].name: _checked(path, key, rows, readers[0])}
    return found


def _check_model(path: Path, metadata: Mapping[str, str], readers: Sequence[TextEncoder]) -> None:
    """UserError for a file for another model by its header: SDXL's first text encoder is as wide as that of SD 1.x."""
    made_for = metadata.get(_ARCHITECTURE, "").partition("/")[0]
    # Width alone does not tell: rows for SDXL's first encoder fit SD 1.5's, and mean something else there.
    if made_for and made_for.startswith(_XL) != (tuple(keys(readers).values()) == _SDXL):
        raise UserError(
            f"{path} was made for another model ({made_for}), and this one has "
            f"{' and '.join(reader.name for reader in readers)}",
            code="unsupported",
        )


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a file, and what its header says."""
    if path.suffix in _PICKLED:
        found: Any = pickled.read(path)
        found = found.get("string_to_param", found)
        return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}, {}
    seals.check(path)
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _checked(path: Path, key: str, rows: Tensor, reader: TextEncoder) -> Tensor:
    """Rows [n, D] of a text encoder."""
    rows = rows.detach()[None] if rows.ndim == 1 else rows.detach()
    width = reader.encoder.get_input_embeddings().weight.shape[1]
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        raise UserError(
            f"{path} was made for another model: {key} is {tuple(rows.shape)}, and embeddings of the {reader.name} "
            f"here are {width} numbers wide",
            code="unsupported",
        )
    if rows.is_complex() or not torch.isfinite(rows.float()).all():
        raise UserError(f"{path}: {key} is complex, or has NaN or infinity in it", code="damaged")
    return rows.to(torch.float32)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    kept = {name: rows.detach().to("cpu", torch.float32, copy=True).contiguous() for name, rows in tensors.items()}
    seals.write(path, kept, metadata)
    found, _ = _tensors(path)
    if found.keys() != kept.keys() or not all(torch.equal(found[name], rows) for name, rows in kept.items()):
        raise RuntimeError(f"{path.name} does not hold what was trained")
