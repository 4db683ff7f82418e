"""Frozen linear layers whose weights are kept in 4 or 8 bits, and widened for each product, or multiplied as they are.

form     codes                    a scale (float32) for        bits a weight     source
nf4      16 levels, 2 in a byte   64 weights: their largest    4.5               Dettmers et al. 2023, arXiv 2305.14314
int8     whole numbers to 127     a row: its largest / 127     8 + 32 / inputs   Dettmers et al. 2022, arXiv 2208.07339
float8   e4m3, to 448             a row: its largest / 448     8 + 32 / inputs   Micikevicius et al. 2022, 2209.05433

bitsandbytes computes nf4. The codes of int8 are those of its Linear8bitLt (LLM.int8()), those of float8 torchao's
Float8WeightOnlyConfig. The widened weight is never kept for the backward pass, which widens it again: torch would keep
it of every layer, and with that the memory that was to be saved.

int8_products and float8_products keep the codes of int8 and float8, the former of rotated weights, and round inputs to
8 bits as well, a scale for each row: products are of 8 bits then, forward and backward (eight_bits.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daguerre import deferred
from daguerre.errors import UserError, install
from daguerre.training.precision import eight_bits
from daguerre.types import CAST_APART

Form = Literal["nf4", "int8", "float8"]
"""Of codes."""
BLOCK = 64
"""Weights that share a scale in nf4."""
_TYPES = {"nf4": torch.uint8, "int8": eight_bits.INT8, "float8": eight_bits.FLOAT8}
_PRODUCTS = "_products"
"""Behind a form of codes: products are of 8 bits, too."""
SETTING = "training.base_precision"


def check(chosen: str, device: torch.device) -> None:
    """UserError where a value of base_precision needs a library that is not here, or what this device has not."""
    if chosen.endswith(_PRODUCTS):
        eight_bits.check(f"{SETTING}={chosen}", chosen.startswith("float8"), device)
    if chosen != "nf4":
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
    return eight_bits.coded(weight.float(), _TYPES[form])


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
        dtype = eight_bits.computed_in(x)
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


class _EightBits(torch.autograd.Function):
    """x W' + b of codes of 8 bits, forward and backward; gradients of x and b. x is what the codes are of: rotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor) -> Tensor:
        dtype = eight_bits.computed_in(x)
        ctx.save_for_backward(codes, scale)
        ctx.types = (x.dtype, None if bias is None else bias.dtype)
        left, of_rows = eight_bits.coded(x.flatten(0, -2).to(dtype), codes.dtype)
        y = eight_bits.product(left, codes.t()) * of_rows * scale.t()
        y = (y if bias is None else y + bias).to(dtype)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = db = None
        rows = dy.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            codes, scale = ctx.saved_tensors
            # Rows of the weight are what is summed over now: their scales go into the gradient before it is rounded.
            left, of_rows = eight_bits.coded(rows * scale.t(), codes.dtype)
            dx = (eight_bits.product(left, codes) * of_rows).to(ctx.types[0]).unflatten(0, dy.shape[:-1])
        if ctx.needs_input_grad[1]:
            db = rows.sum(0).to(ctx.types[1])
        return dx, db, None, None


class _Rotation(torch.autograd.Function):
    """x with its blocks of features rotated, in the type of autocast, and its gradient rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        ctx.block, ctx.dtype = block, x.dtype
        return eight_bits.rotated(x.to(eight_bits.computed_in(x)), block)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return eight_bits.rotated(dy, ctx.block).to(ctx.dtype), None


class QuantizedLinear(nn.Linear):
    """A linear layer of few bits, in the place of another one, whose bias it takes over."""

    codes: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, form: Form, device: torch.device | None = None) -> None:
        """Quantises on `device`, where codes and scales stay; by default where the layer is."""
        nn.Module.__init__(self)  # nn.Linear's own would make a whole matrix
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        codes, scale = quantize(self._in_codes(deferred.value(layer.weight).to(device)), form)
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

    def _in_codes(self, weight: Tensor) -> Tensor:
        """The weight as the codes have it; it has no memory where the layer has none."""
        return weight


class EightBitLinear(QuantizedLinear):
    """A linear layer whose products are of 8 bits, forward and backward, but those of a few rows."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The matrix that the codes stand for, [out, in] float32, made at each call."""
        return self._in_codes(super().weight)

    def forward(self, input: Tensor) -> Tensor:
        """x W' + b of rounded inputs."""
        if self._block > 1:
            input = _Rotation.apply(input, self._block)
        if input.numel() <= eight_bits.FEW_ROWS * self.in_features:
            return super().forward(input)
        return _EightBits.apply(input, self.bias, self.codes, self.scale)

    @property
    def _block(self) -> int:
        return eight_bits.block_of(self.in_features) if self.form == "int8" else 1

    def _in_codes(self, weight: Tensor) -> Tensor:
        return eight_bits.rotated(weight, self._block) if self._block > 1 else weight


def quantized(layer: nn.Linear, chosen: str, device: torch.device | None = None) -> QuantizedLinear:
    """The layer that takes the place of this one under a value of base_precision. Where products of 8 bits cannot have
    its sizes, it widens its weight."""
    form: Any = chosen.removesuffix(_PRODUCTS)
    multiplies = chosen != form and eight_bits.divides(layer)
    return (EightBitLinear if multiplies else QuantizedLinear)(layer, form, device)


def as_parameters(network: nn.Module) -> None:
    """Makes codes and scales frozen parameters, in place: FSDP2 splits parameters alone."""
    for _, layer in layers(network):
        for name in ("codes", "scale"):
            tensor = getattr(layer, name)
            delattr(layer, name)
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        setattr(layer, CAST_APART, True)  # the scale stays float32


def layers(network: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantised layers of a network, by name."""
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def tensors(network: nn.Module) -> list[Tensor]:
    """Codes and scales of a network's quantised layers."""
    return [tensor for _, tensor in codes(network)]


def codes(network: nn.Module) -> list[tuple[str, Tensor]]:
    """The same with their names."""
    found = [(name, layer, part) for name, layer in layers(network) for part in ("codes", "scale")]
    return [(f"{name}.{part}", getattr(layer, part)) for name, layer, part in found]


def numbers(network: nn.Module) -> int:
    """Weights that are quantised, beyond the network's parameters."""
    # Codes that FSDP2 splits are parameters.
    own = [p for _, layer in layers(network) for name, p in layer.named_parameters() if name != "bias"]
    return sum(layer.numbers for _, layer in layers(network)) - sum(p.numel() for p in own)
