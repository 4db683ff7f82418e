"""Single files of pretrained models of any family: which form a model has, and files that are converted and written.

For commands that are about no family in particular.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from daguerre.checkpoint.atomic import make_folder, replacing
from daguerre.errors import UserError, named
from daguerre.families.cascade import files as cascade_files
from daguerre.families.pretrained import split_files
from daguerre.families.stable_diffusion.single_file import configs, save
from daguerre.families.stable_diffusion.single_file.load import PICKLED as PICKLED
from daguerre.families.stable_diffusion.single_file.load import convert as convert
from daguerre.models.export import of_authors
from daguerre.models.weights import files, seals


def write(
    path: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    component: str | None = None,
    ignored: Sequence[str] = (),
    prefix: str | None = None,
) -> list[str]:
    """Writes the pipeline in `folder` as one file; returns messages for the user. `dtype` None keeps every dtype.
    `component` is the network that the file holds in place of the usual one (Stable Cascade, transformers),
    `ignored` patterns of tensors that are left out, `prefix` what comes before names in a file that holds a
    transformer; None: what its authors have there.

    A kill leaves nothing under `path`. UserError for what the layout has no place for.
    """
    tables = of_authors.chosen(folder, prefix)
    if tables and component is not None:
        if prefix is not None:
            raise UserError(f"prefix: it is for a transformer, not for component={component}; remove it", code="unused")
        return split_files.write(path, folder, component, dtype, variant, ignored)
    if (stage := cascade_files.chosen(folder, component)) is not None:
        cascade_files.write(path, files.read(folder / stage, variant, ignored), dtype)
        return [
            f"{path.name} holds the {stage} alone, as Stability's files do; the other networks are files of their own "
            "(component=NAME)",
            *(cascade_files.scale_notice(folder / stage) if stage == "vqgan" else []),
        ]
    if tables:
        return of_authors.write(path, folder, tables, dtype, variant, ignored, prefix)
    return save.write(path, folder, dtype, variant, ignored)


def component(path: Path) -> str | None:
    """The component whose weights a file of one network holds; None where the file does not say."""
    return cascade_files.component(path)


def write_network(
    path: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ignored: Sequence[str] = (),
) -> None:
    """Writes the network in `folder` alone as one file, in diffusers' names."""
    network = files.read(folder, variant, ignored)
    files.check_range(network, dtype, f"{folder.name} of {folder.parent}")
    tensors = {name: files.cast(tensor, dtype) for name, tensor in network.items()}
    make_folder(path.parent)
    with named(str(folder)), replacing(path) as made:
        seals.write(made, tensors)


def clip_words(architecture: str, tokenizer: str) -> dict[str, bytes]:
    """Files of a tokenizer of a published architecture that has CLIP's own words, by name."""
    return configs.tokenizer_files({"pad": configs.padding(architecture, tokenizer)})
