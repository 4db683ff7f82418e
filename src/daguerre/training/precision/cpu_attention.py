"""Attention in float32 on a CPU, inside forward passes of 16 bits.

torch's attention of 16 bits is slow on a CPU, in its backward pass above all: it takes 2 to 6 times as long as in
float32 on one that computes bf16 in software, and 3 to 20 times on one with AMX, where it is a quarter of an update.
"""

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library


@cache
def enable() -> Library:
    """From now on autocast on a CPU leaves attention to float32. The answer must live, or the change is undone."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # it is meant
        library.impl("scaled_dot_product_attention", _attention, "AutocastCPU", allow_override=True)
    return library


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """The result in autocast's type, as autocast gives it, of float32 numbers."""
    mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    with torch.autocast("cpu", enabled=False):
        found = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), mask, dropout_p, is_causal, **others
        )
    return found.to(torch.get_autocast_dtype("cpu"))
