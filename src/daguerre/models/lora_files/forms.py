"""The forms in which LoRAs are written, each read back as it is written."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from torch import nn

from daguerre.checkpoint.atomic import sync_folder
from daguerre.fresh import hidden, naming
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import diffusers, kohya, peft
from daguerre.models.lora_files.addition import Addition
from daguerre.models.lora_files.read import read

Form = Literal["kohya", "diffusers", "peft"]
Networks = Mapping[str, nn.Module]
Additions = Mapping[str, list[Addition]]
_WRITE: dict[str, Callable[[Path, Networks, Additions, About], None]] = {
    "kohya": kohya.write,
    "diffusers": diffusers.write,
    "peft": lambda path, networks, additions, about: peft.write(path, additions),
}


def write(form: Form, path: Path, networks: Networks, additions: Additions, about: About = UNKNOWN) -> None:
    """Writes additions and reads them back: what is applied of them is what was given.

    Args:
        form: kohya and diffusers are files, peft is a folder with one for each component.
        networks: all components of the model, without additions of their own.

    Raises:
        UserError: for additions that this form cannot hold.
        RuntimeError: if something else was written than was given.
    """
    with beside(path) as fresh:
        _WRITE[form](fresh, networks, additions, about)
        compare(fresh, networks, additions)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A new name next to a file or folder; what the block has written there stands at the end, safe on disk, as `path`.
    If the block raises, nothing is left."""
    # Beside it, as a rename is at once only within one file system.
    with naming(path), TemporaryDirectory(prefix=hidden(path, ".").name, dir=path.parent) as temporary:
        fresh = Path(temporary) / path.name
        yield fresh
        os.replace(fresh, path)
    sync_folder(path.parent)  # a rename is on disk with its folder alone


def compare(path: Path, networks: Networks, additions: Additions) -> None:
    """Reads a file or folder. RuntimeError if what is applied of it is not what these additions are."""
    found = read(path, networks, all_ranks=True)
    given = {(component, each.name): each for component, own in additions.items() for each in own}
    # A fused projection is read as additions to all of its parts, also to those that were given none.
    there = {
        (component, each.name): each
        for component, own in found.items()
        for each in own
        if (component, each.name) in given or each.factors[each.strong].any()
    }
    wrong = [place for place in given.keys() | there.keys() if place not in there or place not in given]
    if wrong or (wrong := [place for place, each in given.items() if not each.agrees(there[place])]):
        raise RuntimeError(f"{path.name} does not hold {'.'.join(wrong[0])} with the strength that it has")
