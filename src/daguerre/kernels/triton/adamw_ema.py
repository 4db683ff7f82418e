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

BLOCK = 1024
"""Numbers that one program computes."""
_WARPS = 8  # 4 numbers a thread: the widest load, 16 bytes; of more the registers are the limit
_THREADS = 32 * _WARPS


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
        BLOCK=BLOCK,
        NARROW=_THREADS,
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
def _kernel(
    addresses, pieces, sizes, count, corrections, skips, factors,
    learning_rate, decay, beta1, rest1, beta2, rest2, epsilon, average,
    CLIPS: tl.constexpr, AVERAGES: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(pieces + 2 * program).to(tl.int64)
    start = tl.load(pieces + 2 * program + 1).to(tl.int64) * BLOCK
    size = tl.load(sizes + tensor)
    weights = tl.load(addresses + tensor)
    gradients = tl.load(addresses + count + tensor)
    first = tl.load(addresses + 2 * count + tensor)
    second = tl.load(addresses + 3 * count + tensor)
    averages = tl.load(addresses + 4 * count + tensor) if AVERAGES else weights
    skip = tl.load(skips) != 0
    factor = tl.load(factors) if CLIPS else 1.0
    rate = learning_rate / tl.load(corrections)
    root = tl.sqrt_rn(tl.load(corrections + 1))
    # A mask that ends at any number makes each load and store 4 bytes wide, and so does an address of any number. Of
    # most tensors only the last piece takes that way, a number a thread at a time, which leaves registers to the other.
    if (start + BLOCK <= size) & (((weights | gradients | first | second | averages) & 15) == 0):
        _update(
            weights, gradients, first, second, averages, start + tl.arange(0, BLOCK), None, 16,
            skip, factor, rate, root, decay, beta1, rest1, beta2, rest2, epsilon, average, CLIPS, AVERAGES,
        )  # fmt: skip
    else:
        for done in range(0, BLOCK, NARROW):
            at = start + done + tl.arange(0, NARROW)
            _update(
                weights, gradients, first, second, averages, at, at < size, 4,
                skip, factor, rate, root, decay, beta1, rest1, beta2, rest2, epsilon, average, CLIPS, AVERAGES,
            )  # fmt: skip


@triton.jit
def _update(
    weights, gradients, first, second, averages, at, there, BYTES: tl.constexpr,
    skip, factor, rate, root, decay, beta1, rest1, beta2, rest2, epsilon, average,
    CLIPS: tl.constexpr, AVERAGES: tl.constexpr,
):  # fmt: skip
    """Loshchilov and Hutter 2019, algorithm 2, in the order in which torch computes it, of the numbers `at` that are
    `there` (None: all) of tensors whose addresses are multiples of so many bytes."""
    weights = _pointer(weights, BYTES) + at
    first = _pointer(first, BYTES) + at
    second = _pointer(second, BYTES) + at
    averages = _pointer(averages, BYTES) + at
    p = tl.load(weights, mask=there)
    g = tl.load(_pointer(gradients, BYTES) + at, mask=there)
    m = tl.load(first, mask=there)
    v = tl.load(second, mask=there)
    a = tl.load(averages, mask=there) if AVERAGES else p
    if CLIPS:
        g = g * factor
    moved_m = beta1 * m + rest1 * g
    moved_v = beta2 * v + rest2 * g * g
    moved = p - decay * p
    moved = moved - rate * moved_m / (tl.sqrt_rn(moved_v) / root + epsilon)
    moved = tl.where(skip, p, moved)
    if AVERAGES:
        # As torch.lerp: exact at both ends.
        near = a + average * (moved - a)
        far = moved - (moved - a) * (1.0 - average)
        tl.store(averages, tl.where(average < 0.5, near, far), mask=there)
    tl.store(weights, moved, mask=there)
    tl.store(first, tl.where(skip, m, moved_m), mask=there)
    tl.store(second, tl.where(skip, v, moved_v), mask=there)


@triton.jit
def _pointer(address, BYTES: tl.constexpr):
    # The hint is the pointer's: a number's would be lost on the way.
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), BYTES)
