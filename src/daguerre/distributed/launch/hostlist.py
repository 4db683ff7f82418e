"""Names of nodes as SLURM writes them: `node[001-003,007],gpu-[1-2]-[a,b]` and what they stand for. Nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from daguerre.errors import UserError

_MOST = 1 << 16
"""More nodes than any list means; a longer range is a slip."""
_NAME = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)-(\d+)")


def expand(text: str) -> list[str]:
    """All names of a list, in its order. UserError for a list that cannot be read."""
    names: list[str] = []
    for part in _parts(text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # plain, inside brackets, plain, ...
        choices = [[piece] if i % 2 == 0 else list(_choices(piece, text)) for i, piece in enumerate(pieces)]
        names += ["".join(chosen) for chosen in product(*choices)]
        if len(names) > _MOST:
            raise UserError(f"{_shown(text)} names more than {_MOST} nodes")
    return names


def _parts(text: str) -> list[str]:
    """The list at its commas, but for those inside brackets."""
    listed = text.strip()
    found = [match[0] for match in _NAME.finditer(listed)]
    if not found or ",".join(found) != listed:
        raise UserError(f"{_shown(text)} is no list of nodes: SLURM writes node[001-003,007],other")
    return found


def _choices(inside: str, text: str) -> Iterator[str]:
    """What a pair of brackets stands for: numbers keep their leading zeros."""
    for item in inside.split(","):
        bounds = _RANGE.fullmatch(item)
        if bounds is None:
            if not re.fullmatch(r"\w+", item):
                raise UserError(f"{_shown(text)}: [{inside}] is no range of nodes, such as [001-003,007]")
            yield item
            continue
        first, last = int(bounds[1]), int(bounds[2])
        if not first <= last < first + _MOST:
            raise UserError(f"{_shown(text)}: the range {item} runs backwards, or is longer than {_MOST}")
        yield from (f"{number:0{len(bounds[1])}d}" for number in range(first, last + 1))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:76] + " ...")
