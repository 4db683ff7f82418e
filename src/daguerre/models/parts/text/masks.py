"""Masks of text encoders: made as they are given, without reading them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils, modeling_attn_mask_utils

_MAKERS: tuple[Any, ...] = (masking_utils, modeling_attn_mask_utils)
"""Modules of transformers that make masks, and ask `is_tracing` before they read one."""


@contextmanager
def unread(device: torch.device) -> Iterator[None]:
    """Within the context no mask on a GPU is read by the host, which would wait for all that the GPU was given before.

    transformers leaves out a mask that hides nothing, and reads each one for it, but not while something is traced. A
    CPU reads its masks at no cost, and goes on to compute as transformers has it.
    """
    if device.type != "cuda":
        yield
        return
    before = [module.is_tracing for module in _MAKERS]
    try:
        for module in _MAKERS:
            module.is_tracing = lambda tensor=None: True
        yield
    finally:
        for module, own in zip(_MAKERS, before, strict=True):
            module.is_tracing = own
