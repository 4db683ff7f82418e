"""Linear layers with an addition as one operator of autograd each, or several that read one input as one for all.

A layer by itself takes 3 products forward and 5 backward, as the last one adds to the gradient that the base gives its
input. Queries, keys and values together take 3 and 6 in place of 9 and 20 (with two sums of gradients).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Product(torch.autograd.Function):
    """x W' + bias + strength (x A') B' of n layers, with gradients of x, A and B.

    Not left to torch, which would give each of n parts of a result a gradient as large as the whole, and would copy
    the whole if something is added to a part of it in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, strength: float
    ) -> tuple[Tensor, ...]:
        """n results [rows, out] for x [rows, in], weight [n out, in], bias [n out], a [n, rank, in] and
        b [n, out, rank]; factors of one layer have no n. x and the factors have one type."""
        n = len(b) if b.ndim == 3 else 1
        weight = weight.to(x.dtype)
        y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        inner = F.linear(x, a.flatten(0, -2))
        _add(n, _parts(y, n), _parts(inner, n), b.mT, alpha=strength)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.n, ctx.strength = n, strength
        return y.chunk(n, 1) if n > 1 else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        n, dx, da, db = ctx.n, None, None, None
        dy = torch.cat(grads, 1) if n > 1 else grads[0]
        d_inner = torch.empty_like(inner)
        _add(n, _parts(d_inner, n), _parts(dy, n), b, beta=0, alpha=ctx.strength)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dy, weight).addmm_(d_inner, a.flatten(0, -2))
        if ctx.needs_input_grad[3]:
            da = torch.mm(d_inner.t(), x).view_as(a)
        if ctx.needs_input_grad[4]:
            db = torch.empty_like(b)
            _add(n, db, _parts(dy, n).mT, _parts(inner, n), beta=0, alpha=ctx.strength)
        return dx, None, None, da, db, None


def traced(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, strength: float) -> tuple[Tensor, ...]:
    """The same for torch.compile, which knows what becomes of a part of a result, but not of one that is changed in
    place."""
    n = len(b) if b.ndim == 3 else 1
    y, inner = F.linear(x, weight, bias), F.linear(x, a.flatten(0, -2))
    if n == 1:
        return (torch.addmm(y, inner, b.t(), alpha=strength),)
    added = torch.bmm(_parts(inner, n), b.mT).transpose(0, 1).flatten(1)
    return (y + strength * added).chunk(n, 1)


def _add(n: int, made: Tensor, left: Tensor, right: Tensor, **rule: float) -> None:
    """Adds products of n layers in place. A batch of one would take the host longer."""
    (made.addmm_ if n == 1 else made.baddbmm_)(left, right, **rule)


def _parts(rows: Tensor, n: int) -> Tensor:
    """[n, rows, width] of [rows, n width], in the same memory; of one layer the rows as they are."""
    return rows if n == 1 else rows.view(len(rows), n, -1).transpose(0, 1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Frozen tensors of one shape as one that has the rows of all, in their own memory. Tensors that lie apart are
    moved there first: they keep names and numbers, and whoever writes into one of them writes into the whole."""
    first, count = tensors[0], len(tensors)
    if count == 1:
        return first
    # Asked at each pass, as a network may have been moved, or its weights replaced.
    places = {(t.untyped_storage()._cdata, t.storage_offset() - i * t.numel()) for i, t in enumerate(tensors)}
    if len(places) > 1 or not first.is_contiguous():
        for tensor, rows in zip(tensors, torch.cat([t.data for t in tensors]).chunk(count), strict=True):
            tensor.data = rows
    shape = (count * len(first), *first.shape[1:])
    return first.data.as_strided(shape, first.stride(), first.storage_offset())
