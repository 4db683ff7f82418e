"""Images of a folder that belong to other ones, such as masks: beside the pictures, or in a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from daguerre.data import skipped
from daguerre.data.images import kinds
from daguerre.types import MASK
from daguerre.unicode import printable

TWICE = "duplicate: second mask of one picture"
LONE = "mask without a picture of its name"


@dataclass(frozen=True)
class Beside:
    """Which images belong to which pictures."""

    files: frozenset[str]
    """Those that lie among the pictures."""
    by_stem: Mapping[str, Mapping[str, str]]
    """{path of the picture without extension: {name: path}}."""

    def of(self, path: str) -> Mapping[str, str]:
        """{name: path} of a picture's, sorted."""
        return self.by_stem.get(os.path.splitext(path)[0], {})


def beside(images: Iterable[str], mask_dir: str | None, suffixes: tuple[str, ...], counts: skipped.Counts) -> Beside:
    """What of `images` (paths inside a folder) belongs to others, and the masks in `mask_dir`, which come first."""
    owners = {path: kinds.owner(os.path.splitext(path)[0]) for path in images}
    stems = {os.path.splitext(path)[0] for path, found in owners.items() if found is None}
    mine = {path: found for path, found in owners.items() if found is not None and found[0] in stems}
    found: dict[str, dict[str, str]] = {}
    for path, stem in _in(mask_dir, suffixes) if mask_dir else ():
        if stem not in stems:
            skipped.add(counts, LONE, printable(path), damage=False)
        elif found.setdefault(stem, {}).setdefault(MASK, path) != path:
            skipped.add(counts, TWICE, printable(path), damage=False)
    for path, (stem, name) in mine.items():
        if found.setdefault(stem, {}).setdefault(name, path) != path:
            skipped.add(counts, TWICE, printable(path), damage=False)
    return Beside(frozenset(mine), {stem: dict(sorted(of.items())) for stem, of in found.items()})


def _in(folder: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(absolute path, path inside the folder without extension) of the images in a folder, sorted."""
    for inside, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(suffixes) and not name.startswith("."):
                path = os.path.join(inside, name)
                yield path, os.path.splitext(os.path.relpath(path, folder))[0]
