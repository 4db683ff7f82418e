"""`torch.compile` of the blocks of which networks of diffusers consist, each for itself.

Blocks of one kind and shape share what was compiled, so that a network takes as long as its different blocks do, and
what splits or recomputes networks between blocks goes on to. commands/first_pass.py compares gradients with those of
blocks that are not compiled before a run trains with them. Compiled code is kept in the user's cache folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from daguerre import user_cache
from daguerre.errors import UserError

KINDS = (ResnetBlock2D, BasicTransformerBlock)
SHAPES = 128
"""Most shapes of one kind of block that are compiled: sizes of a network times sizes of pictures."""


def compile_blocks(net: nn.Module, device: torch.device) -> int:
    """Every block is compiled when it is first called with gradients, for each shape by itself; returns how many blocks
    there are. Without gradients (drawing, validation) blocks compute uncompiled: a few passes of other shapes are not
    worth the minutes.

    UserError where there is none, and where compiling needs what is not installed.
    """
    found = [module for module in net.modules() if isinstance(module, KINDS)]
    if not found:
        raise UserError("training.compile=blocks: no block of the networks trained here can be compiled; remove it")
    if device.type == "cpu" and not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        raise UserError("training.compile=blocks needs a C++ compiler on a CPU: install g++, or remove it")
    _keep_what_is_compiled()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 2 * SHAPES)
    # On a CPU inductor's own choice of layouts gives wrong gradients of some UNets (torch 2.13).
    options = {"layout_optimization": False} if device.type == "cpu" else None
    forwards = {kind: _forward(kind, options) for kind in {type(block) for block in found}}
    for block in found:
        # A bound method: a copy of the module gets one of its own.
        setattr(block, "forward", MethodType(forwards[type(block)], block))  # noqa: B010
    return len(found)


def _forward(kind: type[nn.Module], options: dict[str, Any] | None) -> Callable[..., Any]:
    """The forward pass of blocks of a kind, which share what is compiled of it."""
    compiled = torch.compile(kind.forward, dynamic=False, options=options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else kind.forward)(self, *args, **kwargs)

    return forward


def _keep_what_is_compiled() -> None:
    """In the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another place; torch itself sets that to a
    temporary one when it is imported."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache.folder() / "compiled")
