"""Tells if the Triton kernels (triton/) can be used here, and loads them. No kernel here."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch


@cache
def installed() -> bool:
    """True if the `triton` library is there; CUDA builds of torch bring it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """True if Triton computes kernels by its interpreter, on tensors of the CPU: TRITON_INTERPRET=1, to test them."""
    return installed() and os.environ.get("TRITON_INTERPRET") == "1"


def triton(device: torch.device) -> bool:
    """True if Triton kernels compute on tensors of this device."""
    return (installed() and device.type == "cuda") or (interpreted() and device.type == "cpu")


def module(name: str) -> ModuleType:
    """A module of the folder triton/; to be asked for where `triton` says yes only."""
    return import_module(f"daguerre.kernels.triton.{name}")
