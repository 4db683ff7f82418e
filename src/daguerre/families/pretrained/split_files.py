"""Files that hold one network of a pipeline other than its denoiser, as ComfyUI keeps text encoders and autoencoders.

The names are those by which such files are read in place of a base's network, so that a file which is written here and
read back is the same network to the bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from daguerre.checkpoint.atomic import make_folder, replacing
from daguerre.errors import UserError, named
from daguerre.families.stable_diffusion.single_file import keys
from daguerre.models.parts import vae
from daguerre.models.parts.text import encoder
from daguerre.models.weights import files, seals
from daguerre.models.weights.original_names import Link, packed

_CONVOLUTIONS = {"quant_conv": "encoder.", "post_quant_conv": "decoder."}
_INSIDE = {"AutoencoderKLFlux2": _CONVOLUTIONS}
"""By class: layers that are within another part in its authors' files."""


def write(
    path: Path,
    folder: Path,
    component: str,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Writes a text encoder or the autoencoder of the pipeline in `folder`; returns messages for the user. Arguments
    are those of families/pretrained/single_files.py. UserError for another component."""
    there = [place.parent.name for place in sorted(folder.glob("*/config.json"))]
    allowed = [name for name in there if name == "vae" or name.startswith("text_encoder")]
    if component not in allowed:
        raise UserError(
            f"component={component}: {folder.name} has no such network that a file of its own can hold; it has "
            f"{', '.join(allowed) or 'none'}, and its denoiser without component=",
            code="unknown",
            setting="component",
        )
    network = files.read(folder / component, variant, ignored)
    files.check_range(network, dtype, f"{component} of {folder}")
    links = _links(files.read_json(folder / component / "config.json"), sorted(network))
    make_folder(path.parent)
    with named(str(folder / component)), replacing(path) as made:
        seals.write(made, {link.original: packed(link, network, dtype) for link in links})
    return [f"{path.name} holds the {component} alone, in the names that ComfyUI's file of it has"]


def _links(config: dict[str, Any], names: Sequence[str]) -> list[Link]:
    """The tensors of the file of a network with this config and tensors of these names."""
    if (library := config.get("_class_name")) is None:
        table = encoder.kind_of(str(config.get("model_type"))).file_names
        return [Link(name, (name,)) for name in names] if table is None else table.links(names)
    kind = vae.kind_of(str(library))
    if kind.names is not None:
        return kind.names.links_in((), names)[1]
    if not kind.original:
        return [Link(name, (name,)) for name in names]
    inside = _INSIDE.get(str(library), {})
    return [
        link._replace(original=inside.get(link.original.partition(".")[0], "") + link.original)
        for link in keys.vae(names)
    ]
