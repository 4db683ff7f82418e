"""Operators of torch of our own: `torch.compile` and tensors without memory see their shapes alone.

An operator has no gradient; a `torch.autograd.Function` around two of them has. torch.library.custom_op gives both at
once, but costs the host 82 microseconds forward and backward in place of 36, and a GPU waits for the host wherever
launches are short.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("daguerre", "FRAGMENT")


def operator(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `daguerre::NAME` of a schema in torch's notation, "NAME(Tensor x, float epsilon) -> Tensor".

    `compute` gives its results on any device, none of them a view of another or of what was given; `shapes` gives
    tensors of the same shapes, types and layouts for tensors without memory.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"daguerre::{name}", shapes, lib=_LIBRARY)
    found: Callable[..., Any] = getattr(torch.ops.daguerre, name).default
    return found


def wide_type(x: Tensor) -> torch.dtype:
    """The type of the arithmetic on numbers like these: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
