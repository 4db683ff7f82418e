"""Writes the transformer of a pipeline as one file in its authors' layout, which ComfyUI reads, too, together with the
networks that its authors have in the same file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder, write_atomically
from daguerre.checkpoint.safetensors import Later, encode
from daguerre.models.network import facts_by_name
from daguerre.models.weights import files
from daguerre.models.weights.original_names import NameTable, packed


def chosen(folder: Path) -> dict[str, NameTable]:
    """The networks of a pipeline that such a file holds, with their names there; {} for pipelines of other kinds."""
    configs = {path.parent.name: files.read_json(path) for path in sorted(folder.glob("*/config.json"))}
    names = {name: facts_by_name(str(config.get("_class_name"))).names for name, config in configs.items()}
    return {name: table for name, table in names.items() if isinstance(table, NameTable)}


def write(
    path: Path,
    folder: Path,
    tables: Mapping[str, NameTable],
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Writes the networks that are `chosen`; returns messages for the user. Arguments are those of `save.write`."""
    tensors: dict[str, Tensor | Later] = {}
    for component, names in tables.items():
        network = files.read(folder / component, variant, ignored)
        files.check_range(network, dtype, f"{component} of {folder}")
        links = names.links(sorted(network))
        tensors |= {f"{names.prefix}{link.original}": packed(link, network, dtype) for link in links}
    make_folder(path.parent)
    write_atomically(path, encode(tensors))
    return [
        f"{path.name} holds {' and '.join(tables)} in their authors' names; autoencoder and text encoders are files of "
        "their own in other programs"
    ]
