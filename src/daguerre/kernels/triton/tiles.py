"""Parts of the Triton kernels of this folder: the numbers that a program holds, and how it reads them."""

from __future__ import annotations

import triton
import triton.language as tl


def whole_columns(width: int, most: int, fewest: int) -> int:
    """Columns of rows of this width that a program holds: the largest power of two that divides it, at most `most`, so
    that no lane stays empty; where that is less than `fewest`, one that is not less than the width, at most `most`."""
    whole = width & -width
    return min(most, whole if whole >= fewest else triton.next_power_of_2(width))


@triton.jit
def loaded(pointer, at, there, DOUBLE: tl.constexpr):
    """Numbers in the type of the arithmetic; 0 where there are none."""
    return tl.load(pointer + at, mask=there, other=0.0).to(tl.float64 if DOUBLE else tl.float32)


@triton.jit
def tile(S, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Beginning of this program's image, of images [B, S, C] of rows of channels; its channels; and offsets in the
    image of the numbers of its block, with the mask of those that exist. Only the first may be more than 32 bits hold.
    """
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    image = tl.program_id(2).to(tl.int64) * S * C
    return image, c, s[:, None] * C + c[None, :], (s[:, None] < S) & (c[None, :] < C)
