"""The Triton kernel of `adamw_ema`: all tensors of a group in one launch.

A table of addresses says where each tensor is, a second one which piece of which tensor each program computes. No
program writes what another one reads, so the result does not depend on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from daguerre.kernels.adamw_ema import Rule, Tensors

BLOCK = 4096
"""Numbers that one program computes."""
_WARPS = 8
_ALIGNED_BYTES = 16


def move(tensors: Tensors, rule: Rule, skip: Tensor, factor: Tensor | None) -> None:
    """As `adamw_ema.move`; every tensor of a row has the same layout."""
    averages = tensors.averages if rule.average else ()
    columns = [tensors.parameters, tensors.gradients, tensors.exp_avg, tensors.exp_avg_sq, averages or ()]
    device = tensors.step.device
    addresses = [tensor.data_ptr() for column in columns for tensor in column]
    pieces, sizes = _pieces(tuple(p.numel() for p in tensors.parameters), device)
    step = tensors.step + 1.0
    corrections = torch.stack([1.0 - b ** step.double() for b in (rule.beta1, rule.beta2)]).float()
    _kernel[(len(pieces),)](
        _sent(addresses, device),
        pieces,
        sizes,
        len(tensors.parameters),
        corrections,
        skip.to(torch.int32),
        factor.float() if factor is not None else step,
        rule.learning_rate,
        rule.learning_rate * rule.weight_decay,
        rule.beta1,
        1.0 - rule.beta1,
        rule.beta2,
        1.0 - rule.beta2,
        rule.epsilon,
        rule.average,
        CLIPS=factor is not None,
        AVERAGES=bool(averages),
        ALIGNED=all(address % _ALIGNED_BYTES == 0 for address in addresses),
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
    tensors.step.add_(1.0 - skip.float())


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device, without waiting for it."""
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _pieces(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """[programs, 2] int32, tensor and piece of it; and the tensors' sizes, int64."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    piece = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    table = torch.stack([tensor, piece], 1).to(torch.int32).contiguous()
    return table.to(device), torch.tensor(sizes, dtype=torch.int64, device=device)


@triton.jit
def _place(addresses, column, count, tensor, ALIGNED: tl.constexpr):
    """Pointer to the start of a tensor of a column."""
    address = tl.load(addresses + column * count + tensor)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _kernel(
    addresses, pieces, sizes, count, corrections, skips, factors,
    learning_rate, decay, beta1, rest1, beta2, rest2, epsilon, average,
    CLIPS: tl.constexpr, AVERAGES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(pieces + 2 * program).to(tl.int64)
    piece = tl.load(pieces + 2 * program + 1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.load(sizes + tensor)
    weights = _place(addresses, 0, count, tensor, ALIGNED) + at
    first = _place(addresses, 2, count, tensor, ALIGNED) + at
    second = _place(addresses, 3, count, tensor, ALIGNED) + at
    skip = tl.load(skips) != 0
    p = tl.load(weights, mask=there, other=0.0)
    g = tl.load(_place(addresses, 1, count, tensor, ALIGNED) + at, mask=there, other=0.0)
    m = tl.load(first, mask=there, other=0.0)
    v = tl.load(second, mask=there, other=0.0)
    if CLIPS:
        g = g * tl.load(factors)
    # Loshchilov and Hutter 2019, algorithm 2, in the order in which torch computes it.
    moved_m = beta1 * m + rest1 * g
    moved_v = beta2 * v + rest2 * g * g
    root = tl.sqrt_rn(moved_v) / tl.sqrt_rn(tl.load(corrections + 1))
    moved = p - decay * p
    moved = moved - (learning_rate / tl.load(corrections)) * moved_m / (root + epsilon)
    moved = tl.where(skip, p, moved)
    tl.store(weights, moved, mask=there)
    tl.store(first, tl.where(skip, m, moved_m), mask=there)
    tl.store(second, tl.where(skip, v, moved_v), mask=there)
    if AVERAGES:
        averages = _place(addresses, 4, count, tensor, ALIGNED) + at
        a = tl.load(averages, mask=there, other=0.0)
        # As torch.lerp: exact at both ends.
        near = a + average * (moved - a)
        far = moved - (moved - a) * (1.0 - average)
        tl.store(averages, tl.where(average < 0.5, near, far), mask=there)
