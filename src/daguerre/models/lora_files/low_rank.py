"""The nearest LoRA of a lower rank, by singular values: of a matrix, or of the product of two factors.

Eckart and Young 1936: of all matrices of rank r the product of the r largest singular values and vectors is nearest.
kohya's scripts also cut what is above the 0.99 quantile of a factor's numbers; nothing is cut here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from daguerre.models.lora_files.addition import DOWN, UP, Addition


@dataclass(frozen=True)
class Keep:
    """The rank that is kept of a layer."""

    rank: int | None = None
    """The most."""
    energy: float | None = None
    """The smallest rank that has this share of the sum of the squared singular values; above 0, up to 1."""

    def of(self, singular: Tensor) -> int:
        """The rank that is kept of singular values in falling order; at least 1."""
        count = len(singular)
        if self.energy is not None:
            shares = singular.square().cumsum(0) / singular.square().sum()
            # Less by a rounding: the whole energy must not ask for a rank more than there is.
            count = int((shares < self.energy * (1 - 1e-12)).sum()) + 1
        return max(1, min(count, len(singular), self.rank or len(singular)))


@dataclass(frozen=True)
class Fitted:
    """An addition of lower rank."""

    addition: Addition
    lost: float
    """Norm of what was left out."""
    norm: float
    """Norm of the whole."""


def of_weight(layer: str, change: Tensor, keep: Keep) -> Fitted:
    """The LoRA nearest to a change [out, in] or [out, in, height, width] of a layer's weight."""
    matrix = change.flatten(1).double()
    wide = matrix.shape[1] > matrix.shape[0]
    gram = (
        matrix @ matrix.T if wide else matrix.T @ matrix
    )  # its eigenvalues are the squares, and it is the smaller one
    squares, vectors = torch.linalg.eigh(gram)
    singular, vectors = squares.clamp(min=0).sqrt().flip(0), vectors.flip(1)
    rank = keep.of(singular)
    kept = vectors[:, :rank]
    across = kept.T @ matrix if wide else (matrix @ kept).T
    # What a vector gives is as long as its singular value; of small ones the root of an eigenvalue is rounding alone.
    root = across.norm(dim=1).sqrt()
    share = torch.where(root > 0, 1 / root, 0.0)[:, None] * across
    up, down = (kept * root, share) if wide else (share.T, (kept * root).T)
    return _fitted(layer, up, down, tuple(change.shape), singular, rank)


def of_product(addition: Addition, shape: tuple[int, ...], keep: Keep) -> Fitted:
    """The LoRA of lower rank nearest to a LoRA's own product, from its factors alone."""
    up, down = (addition.factors[name].flatten(1).double() for name in (UP, DOWN))
    (left, of_left), (right, of_right) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    u, singular, v = torch.linalg.svd(addition.scale * of_left @ of_right.T)
    rank = keep.of(singular)
    root = singular[:rank].sqrt()
    up, down = left @ (u[:, :rank] * root), (root[:, None] * v[:rank]) @ right.T
    return _fitted(addition.layer, up, down, shape, singular, rank)


def _fitted(layer: str, up: Tensor, down: Tensor, shape: tuple[int, ...], singular: Tensor, rank: int) -> Fitted:
    factors = {
        DOWN: down.reshape(rank, *shape[1:]).float().contiguous(),
        UP: up.reshape(shape[0], rank, *(1 for _ in shape[2:])).float().contiguous(),
    }
    return Fitted(Addition(layer, factors, 1.0), float(singular[rank:].norm()), float(singular.norm()))
