"""The conditioning of the empty caption, for losses that lead away from it, as guidance does.

It is encoded once, or read from the cache, and kept: a frozen text encoder always gives the same. Shape letters: B
samples, T tokens, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from daguerre.models.family import Family
from daguerre.types import Cond

_MASK = "_mask"


@dataclass(eq=False)
class NullCaption:
    """The rows of the empty caption, from their first use on."""

    rows: Cond | None = None
    """[1, ...] by name, on the family's device; None: not made yet. Those of a cache are put here."""

    def beside(self, family: Family, cond: Cond, text: str = "") -> tuple[Cond, Cond]:
        """Both sides, as the function `beside` gives them; with a text in place of the empty caption. Several devices
        call it together, as they may share a text encoder."""
        # At the first use: with a cache the rows come from there, and no encoder is ever loaded.
        if self.rows is None:
            self.rows = family.encode_null(text)
        return beside(cond, self.rows)


def beside(cond: Cond, rows: Cond) -> tuple[Cond, Cond]:
    """Conditioning of B samples, and the same with `rows` [1, ...] of the empty caption in place of their captions; the
    shapes are equal. Where lengths differ, the shorter texts [B, T, D] are filled up with zeros, as cached ones are,
    and NAME_mask [B, T] is False there."""
    count = len(next(iter(cond.values())))
    texts = [name for name in rows if not name.endswith(_MASK)]
    # A mask belongs to its text: that of the captions says nothing of the empty one.
    others = {name: row for name, row in cond.items() if name.removesuffix(_MASK) not in texts}
    sides = [{**cond}, {**others, **{name: row.expand(count, *row.shape[1:]) for name, row in rows.items()}}]
    for name in texts:
        lengths, mask = [side[name].shape[1:2] for side in sides], f"{name}{_MASK}"
        if lengths[0] == lengths[1] and not any(mask in side for side in sides):
            continue
        for side, (length,) in zip(sides, lengths, strict=True):
            more = max(lengths)[0] - length
            all_BT = torch.ones((count, length), dtype=torch.bool, device=side[name].device)
            side[mask] = pad(side.get(mask, all_BT), (0, more))
            side[name] = pad(side[name], (0, 0, 0, more))
    return sides[0], sides[1]
