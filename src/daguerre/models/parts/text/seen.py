"""Images among the tokens of texts, for a language model that reads both.

Shape letters: B texts, T tokens, D features, S tokens of one image.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """Images among the tokens of texts, the same ones' places in each."""

    starts: tuple[int, ...]
    """The first token of each."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of the tokens of each."""
    embedded: tuple[Tensor, ...]
    """[B, S, D] of each, in place of the embeddings of its tokens."""
    deeper: tuple[Tensor, ...] = ()
    """[B, S of all, D], added to the output of each of the first layers."""

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Begin and end of the tokens of each."""
        counts = (rows * columns for rows, columns in self.grids)
        return [(start, start + count) for start, count in zip(self.starts, counts, strict=True)]

    def places(self, n_tokens: int, device: torch.device) -> Tensor:
        """[3, 1, T]: the place of each token in time, on rows and on columns. An image stands at one time, and the text
        after it continues from its longer side."""
        parts, place, begin = [], 0, 0
        for (start, end), (rows, columns) in zip(self.stretches, self.grids, strict=True):
            parts.append(torch.arange(place, place := place + start - begin, device=device).expand(3, -1))
            axes = (torch.arange(n, device=device) for n in (1, rows, columns))
            parts.append(torch.cartesian_prod(*axes).mT + place)
            place, begin = place + max(rows, columns), end
        parts.append(torch.arange(place, place + n_tokens - begin, device=device).expand(3, -1))
        return torch.cat(parts, 1)[:, None]

    def put(self, embedded_BTD: Tensor) -> Tensor:
        """The embeddings of tokens, with the images'."""
        parts, begin = [], 0
        for (start, end), own_BSD in zip(self.stretches, self.embedded, strict=True):
            parts += [embedded_BTD[:, begin:start], own_BSD.to(embedded_BTD)]
            begin = end
        return torch.cat([*parts, embedded_BTD[:, begin:]], 1)

    def without(self, rows_BT: Tensor, dropped: int) -> Tensor:
        """[B, T, ...] without the tokens of images, of texts whose first tokens were dropped."""
        bounds = [0, *(place - dropped for stretch in self.stretches for place in stretch), rows_BT.shape[1]]
        return torch.cat([rows_BT[:, a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)], 1)
