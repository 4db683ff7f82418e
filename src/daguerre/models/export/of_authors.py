"""Writes the transformer of a pipeline as one file in its authors' layout, which ComfyUI reads, too, together with the
networks that its authors have in the same file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder, replacing
from daguerre.checkpoint.safetensors import Later
from daguerre.errors import UserError, named
from daguerre.models.network import facts_by_name
from daguerre.models.weights import files, seals
from daguerre.models.weights.original_names import NameTable, packed


def chosen(folder: Path, prefix: str | None = None) -> dict[str, NameTable]:
    """The networks of a pipeline that such a file holds, with their names there; {} for pipelines of other kinds.
    UserError for a prefix of those."""
    configs = {path.parent.name: files.read_json(path) for path in sorted(folder.glob("*/config.json"))}
    names = {name: facts_by_name(str(config.get("_class_name"))).names for name, config in configs.items()}
    found = {name: table for name, table in names.items() if isinstance(table, NameTable)}
    if prefix is not None and not found:
        raise UserError(
            f"prefix={prefix}: it is for a transformer in its authors' names, which {folder.name} has not: remove it",
            code="unused",
            setting="prefix",
        )
    return found


def write(
    path: Path,
    folder: Path,
    tables: Mapping[str, NameTable],
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ignored: Sequence[str] = (),
    prefix: str | None = None,
) -> list[str]:
    """Writes the networks that are `chosen`; returns messages for the user. Arguments are those of
    families/pretrained/single_files.py."""
    tensors: dict[str, Tensor | Later] = {}
    for component, names in tables.items():
        network = files.read(folder / component, variant, ignored)
        files.check_range(network, dtype, f"{component} of {folder}")
        links = names.links(sorted(network))
        start = names.prefix if prefix is None else prefix
        tensors |= {f"{start}{link.original}": packed(link, network, dtype) for link in links}
    make_folder(path.parent)
    with named(str(folder)), replacing(path) as made:
        seals.write(made, tensors)
    return [
        f"{path.name} has the weights of {' and '.join(tables)}, under the names that the model's authors gave them; "
        "autoencoder and text encoders are files of their own in other programs (component=NAME)"
    ]
