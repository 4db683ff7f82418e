"""Frozen linear layers whose weights are kept in 4 or 8 bits, and widened for each product.

form     codes                    a scale (float32) for        bits a weight     source
nf4      16 levels, 2 in a byte   64 weights: their largest    4.5               Dettmers et al. 2023, arXiv 2305.14314
int8     whole numbers to 127     a row: its largest / 127     8 + 32 / inputs   Dettmers et al. 2022, arXiv 2208.07339
float8   e4m3, to 448             a row: its largest / 448     8 + 32 / inputs   Micikevicius et al. 2022, 2209.05433

bitsandbytes computes nf4. The codes of int8 are those of its Linear8bitLt (LLM.int8()), whose inputs are not rounded
here; those of float8 are torchao's Float8WeightOnlyConfig. The widened weight is never kept for the backward pass,
which widens it again: torch would keep it of every layer, and with that the memory that was to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daguerre.errors import UserError, install

Form = Literal["nf4", "int8", "float8"]
BLOCK = 64
"""Weights that share a scale in nf4."""
_LARGEST = {"int8": 127.0, "float8": 448.0}
_TYPES = {"nf4": torch.uint8, "int8": torch.int8, "float8": torch.float8_e4m3fn}
SETTING = "training.base_precision"


def check_installed(form: str) -> None:
    """UserError where this form needs a library that is not here."""
    if form != "nf4":
        return
    try:
        import bitsandbytes  # noqa: F401 (an optional extra)
    except ImportError:
        raise UserError(
            f"{SETTING}=nf4 needs bitsandbytes: {install('bitsandbytes')}; or use int8 or float8, which need nothing",
            code="not_installed",
            setting=SETTING,
        ) from None


def quantize(weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of a matrix [out, in]; of one without memory their shapes alone."""
    rows, columns = weight.shape
    if weight.device.type == "meta":
        count = rows * columns
        shapes = ((-(-count // 2), 1), (-(-count // BLOCK),)) if form == "nf4" else ((rows, columns), (rows, 1))
        return weight.new_empty(shapes[0], dtype=_TYPES[form]), weight.new_empty(shapes[1], dtype=torch.float32)
    if form == "nf4":
        from bitsandbytes.functional import quantize_4bit  # an optional extra

        # Without QLoRA's quantisation of the scales: .37 of 4.5 bits a weight less, for one more table to keep.
        codes, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
        return codes, state.absmax
    scale = weight.float().abs().amax(1, keepdim=True) / _LARGEST[form]
    shares = weight.float() / torch.where(scale > 0, scale, 1.0)  # a row of zeros
    return (shares.round() if form == "int8" else shares).to(_TYPES[form]), scale


def dequantize(codes: Tensor, scale: Tensor, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] that codes stand for, in this type."""
    if form == "nf4":
        return _from_nf4(codes, scale, shape, dtype)
    return codes.to(dtype).mul_(scale)


# With a form for tensors without memory of our own, so that `plan` counts nf4 where bitsandbytes is not installed.
@torch.library.custom_op("daguerre::from_nf4", mutates_args=())
def _from_nf4(codes: Tensor, scale: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scale, BLOCK, "nf4", shape, dtype)


@_from_nf4.register_fake
def _(codes: Tensor, scale: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


class _Product(torch.autograd.Function):
    """x W' + b in the type of autocast, else of x; gradients of x and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, form: Form, out: int) -> Tensor:
        kind = x.device.type
        # A function of our own is in none of autocast's lists, so it asks itself.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.save_for_backward(codes, scale)
        ctx.form, ctx.shape, ctx.types = form, (out, x.shape[-1]), (x.dtype, None if bias is None else bias.dtype)
        weight = dequantize(codes, scale, form, ctx.shape, dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = db = None
        if ctx.needs_input_grad[0]:
            codes, scale = ctx.saved_tensors
            dx = (dy @ dequantize(codes, scale, ctx.form, ctx.shape, dy.dtype)).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            db = dy.flatten(0, -2).sum(0).to(ctx.types[1])
        return dx, db, None, None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer of few bits, in the place of another one, whose bias it takes over."""

    codes: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, form: Form, device: torch.device | None = None) -> None:
        """Quantises on `device`, where codes and scales stay; by default where the layer is."""
        nn.Module.__init__(self)  # nn.Linear's own would make a whole matrix
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        codes, scale = quantize(layer.weight.detach().to(device), form)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The matrix that the codes stand for, [out, in] float32, made at each call."""
        return dequantize(self.codes, self.scale, self.form, (self.out_features, self.in_features), torch.float32)

    @property
    def numbers(self) -> int:
        """Weights that the codes stand for."""
        return self.in_features * self.out_features

    @property
    def held_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def forward(self, input: Tensor) -> Tensor:
        """x W' + b with the widened weight, as nn.Linear has it."""
        return _Product.apply(input, self.bias, self.codes, self.scale, self.form, self.out_features)


def layers(network: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantised layers of a network, by name."""
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def numbers(network: nn.Module) -> int:
    """Weights that are quantised, which are no parameters."""
    return sum(layer.numbers for _, layer in layers(network))
