"""Linear layers that are trained, multiplied in float8 (training.float8). Weights, gradients and all else keep their
types: optimizer, averages, checkpoints and exports see nothing of it.

A layer has three products: the result, the gradient of its input, and that of its weight. For each both factors are
rounded to float8: `tensorwise` by one scale for a whole matrix, gradients of results as e5m2, all else as e4m3
(Micikevicius et al. 2022, arXiv 2209.05433); `rowwise` by a scale for each row or column that is not summed over, all
as e4m3: finer, with more passes over the numbers. These are the recipes of torchao.float8, which has them too.
"""

from collections.abc import Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daguerre.training.precision import eight_bits

Scaling = Literal["tensorwise", "rowwise"]
SETTING = "training.float8"


def check(chosen: str, device: torch.device) -> None:
    """UserError where a value of training.float8 needs what this device has not."""
    if chosen != "no":
        eight_bits.check(f"{SETTING}={chosen}", is_float8=True, device=device)


class Float8Linear(nn.Linear):
    """nn.Linear whose products are of float8, but those of a few rows."""

    scaling: Scaling

    def forward(self, input: Tensor) -> Tensor:
        """x W' + b of rounded inputs and weights."""
        if input.numel() <= eight_bits.FEW_ROWS * self.in_features:
            return F.linear(input, self.weight, self.bias)
        return _Float8.apply(input, self.weight, self.bias, self.scaling == "rowwise")


def enable(layers: Collection[nn.Module], scaling: Scaling) -> int:
    """Makes those of the layers multiply so that are trained and have sizes that products of 8 bits can have; returns
    how many do."""
    found = [m for m in layers if type(m) is nn.Linear and m.weight.requires_grad and eight_bits.divides(m)]
    for layer in found:
        layer.__class__ = Float8Linear
        setattr(layer, "scaling", scaling)  # noqa: B010 (mypy: of a module, a tensor)
    return len(found)


class _Float8(torch.autograd.Function):
    """x W' + b in the type of autocast, else of x; gradients of x, W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by_rows: bool) -> Tensor:
        dtype = eight_bits.computed_in(x)
        rows = x.flatten(0, -2).to(dtype)
        ctx.save_for_backward(rows, weight)
        ctx.types, ctx.by_rows = (x.dtype, weight.dtype, None if bias is None else bias.dtype), by_rows
        y = _product(rows, weight.t(), eight_bits.FLOAT8, by_rows)
        y = (y if bias is None else y + bias).to(dtype)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dw = db = None
        rows, weight = ctx.saved_tensors
        given, gradient = dy.flatten(0, -2), eight_bits.FLOAT8 if ctx.by_rows else eight_bits.GRADIENT
        if ctx.needs_input_grad[0]:
            dx = _product(given, weight, gradient, ctx.by_rows).to(ctx.types[0]).unflatten(0, dy.shape[:-1])
        if ctx.needs_input_grad[1]:
            # Rows are what is summed over: those that are missing to a multiple are zero.
            more = (0, 0, 0, -len(rows) % eight_bits.MULTIPLE)
            dw = _product(F.pad(given, more).t(), F.pad(rows, more), gradient, ctx.by_rows).to(ctx.types[1])
        if ctx.needs_input_grad[2]:
            db = given.sum(0).to(ctx.types[2])
        return dx, dw, db, None


def _product(left_MK: Tensor, right_KN: Tensor, left_type: torch.dtype, by_rows: bool) -> Tensor:
    """The product [M, N] float32 of matrices that are rounded to float8; the right one as e4m3."""
    left, of_left = eight_bits.coded(left_MK, left_type, -1 if by_rows else None)
    right, of_right = eight_bits.coded(right_KN, eight_bits.FLOAT8, 0 if by_rows else None)
    return eight_bits.product(left, right) * of_left * of_right
