"""Matrix products of 8 bits: whole numbers (int8), or float8 of a GPU from compute capability 8.9 on, and of a CPU.

Numbers are rounded to 8 bits times a scale (float32), which a row has for itself, or all have together; the products of
codes are summed in 32 bits, and scaled after that. A scale cannot differ along what is summed over.

Inputs of int8 are rotated first. A row has one scale, so a feature that is a hundred times the others, which some
features of transformers are, leaves these few codes. Multiplied by an orthogonal matrix, features and weights are
spread over all features of a block, and the product is the same (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
float8 has the same relative error for small and large numbers, and needs no rotation.
"""

from functools import cache

import torch
from torch import Tensor

from daguerre.errors import UserError

INT8, FLOAT8, GRADIENT = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
"""GRADIENT has two bits of precision in place of three, and a range of 2^32: for gradients that share a scale."""
LARGEST = {INT8: 127.0, FLOAT8: 448.0, GRADIENT: 57344.0}
MULTIPLE = 16
"""Of which a GPU's products of 8 bits have rows of the weight, columns, and summed rows of a batch."""
FEW_ROWS = 16
"""Rows up to which a product is left wide: a GPU has none of int8, and as a weight is all that is read then, nothing
would be gained."""
ROTATED = 256
"""Most features of a rotated block."""


def check(setting: str, is_float8: bool, device: torch.device) -> None:
    """UserError where a device has no products of this kind; `setting` is what asks for them, as `name=value`."""
    if device.type != "cuda":
        return
    capability, needed = torch.cuda.get_device_capability(device), (8, 9) if is_float8 else (7, 5)
    other = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
    if torch.version.hip is None and capability >= needed:
        return
    kind = "float8" if is_float8 else "int8"
    raise UserError(
        f"{setting}: products of {kind} need a GPU of NVIDIA from compute capability {needed[0]}.{needed[1]} on, or a "
        f"CPU, and this is {other}: use another device or another value",
        code="unsupported",
        setting=setting.partition("=")[0],
    )


def divides(layer: torch.nn.Linear) -> bool:
    """True of a layer whose sizes products of 8 bits can have."""
    return layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0


def coded(x: Tensor, dtype: torch.dtype, dim: int | None = -1) -> tuple[Tensor, Tensor]:
    """Codes of a matrix in an 8-bit type, and their scales (float32, of as many dims): one for each row (`dim` -1) or
    column (0), which is what the codes may be summed along, or one for all (None). Numbers that are not finite make
    their scale so, and with that the product."""
    largest = x.abs().amax((0, 1) if dim is None else dim, keepdim=True).float()
    scale = largest / LARGEST[dtype]
    shares = x / torch.where(largest > 0, scale, 1.0)  # a row of zeros
    return (shares.round() if dtype == INT8 else shares).to(dtype), scale


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """The product [M, N] of codes, summed in 32 bits: int32 of int8, float32 of float8."""
    whole, left_MK = left_MK.dtype == INT8, left_MK.contiguous()
    # Kernels of a GPU want the numbers of a row on the left and of a column on the right together in memory, and so
    # does torch.compile of float8 on a CPU. Products of int8 there take any order, and need no copy.
    if left_MK.device.type == "cuda" or not whole:
        right_KN = right_KN.t().contiguous().t()
    if whole:
        return torch._int_mm(left_MK, right_KN)
    one = torch.ones((), dtype=torch.float32, device=left_MK.device)
    return torch._scaled_mm(left_MK, right_KN, one, one, out_dtype=torch.float32)


def computed_in(x: Tensor) -> torch.dtype:
    """The type of autocast, else that of x: a function of our own is in none of autocast's lists."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def block_of(features: int) -> int:
    """The largest power of 4 up to ROTATED that divides so many features; 1: they are not rotated."""
    block = 1
    while block < ROTATED and features % (4 * block) == 0:
        block *= 4
    return block


# An operator of its own, so that the matrix is made once: a traced pass would make it at each call.
@torch.library.custom_op("daguerre::rotated", mutates_args=())
def rotated(x: Tensor, block: int) -> Tensor:
    """x [..., features] with each block of so many features (a power of 4) multiplied by the regular Hadamard matrix
    of that order, whose rows all have one sum: a feature that all others share is spread, too. It is symmetric and
    orthogonal, so that rotating twice gives x."""
    return (x.unflatten(-1, (-1, block)) @ _hadamard(block, x.dtype, x.device)).flatten(-2)


@rotated.register_fake
def _(x: Tensor, block: int) -> Tensor:
    return x.new_empty(x.shape)


@cache
def _hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # All numbers are plus or minus a power of two, which every type has.
    quarter = torch.full((4, 4), 0.5) - torch.eye(4).flip(0)
    whole = torch.ones(1, 1)
    while len(whole) < block:
        whole = torch.kron(whole, quarter)
    return whole.to(device, dtype)
