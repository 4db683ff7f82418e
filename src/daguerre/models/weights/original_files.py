"""Files of one network in its authors' layout: read and written with the names of its library."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder, replacing
from daguerre.errors import named
from daguerre.models.weights import beside, seals
from daguerre.models.weights.opening import opened
from daguerre.models.weights.original_names import FileNames, Links, Shape, packed, unpacked


def read(
    path: Path,
    names: FileNames,
    shapes: Mapping[str, Shape],
    ignored: Sequence[str] = (),
    say: Callable[[str], object] | None = None,
) -> dict[str, Tensor]:
    """The weights of a network in its library's names, from a file in those or in its authors' names.

    Weights of 8-bit floats are multiplied by their scales. What the file lacks is left out, so that `weights.load.fill`
    names it; other networks in the file stay unread.

    Args:
        shapes: those of the network's tensors.
        ignored: patterns of tensors that are left out.
        say: gets a line about tensors that are not read, in parts of which others are.

    Raises:
        UserError: for a file that cannot be read, and for tensors that change what the weights mean.
    """
    seals.check(path, large=True)
    with opened(path) as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    kept, _ = beside.without(held, ignored)
    tensors = beside.multiplied(kept, metadata)
    if shapes.keys() <= tensors.keys():
        rest = [name for name in tensors if name not in shapes]
        beside.check(path, tensors, {*shapes}, rest)
        _tell(path, "", shapes, rest, say)
        return {name: tensors[name] for name in shapes}
    with named(str(path)):
        prefix, links = names.links_in(tensors, shapes)
    used = {prefix + link.original: link for link in links if prefix + link.original in tensors}
    rest = [name for name in tensors if name.startswith(prefix) and name not in used]
    beside.check(path, tensors, {*used}, rest, [prefix])
    _tell(path, prefix, used, rest, say)
    parts = (unpacked(link, tensors[name], shapes) for name, link in used.items())
    return {name: part for each in parts for name, part in each.items()}


def _tell(
    path: Path, prefix: str, used: Collection[str], rest: Sequence[str], say: Callable[[str], object] | None
) -> None:
    """Says which of the `rest` stand in a part with some that are `used`: other parts are of another network, or of its
    training alone."""
    parts = {name.removeprefix(prefix).partition(".")[0] for name in used}
    for line in beside.unread(path, [name for name in rest if name.removeprefix(prefix).partition(".")[0] in parts]):
        if say is not None:
            say(line)


def write(
    path: Path, tensors: Mapping[str, Tensor], links: Links, dtype: torch.dtype | None = None, prefix: str = ""
) -> None:
    """Writes a network's weights in its authors' layout; `dtype` None keeps every dtype, `prefix` is what comes before
    each name (`model.diffusion_model.` in files for ComfyUI)."""
    made = {prefix + link.original: packed(link, tensors, dtype) for link in links(tensors)}
    make_folder(path.parent)
    with replacing(path) as fresh:
        seals.write(fresh, made)
