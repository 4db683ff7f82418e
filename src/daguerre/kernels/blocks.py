"""`torch.compile` of the blocks of which networks of diffusers consist, each for itself.

Blocks of one kind and shape share what was compiled, so that a network takes as long as its different blocks do, and
what splits or recomputes networks between blocks goes on to. Compiled code is kept in the user's cache folder.
"""

from __future__ import annotations

import os
import shutil

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
    """Every block is compiled when it is first called, for each shape by itself; returns how many blocks there are.

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
    for block in found:
        block.compile(dynamic=False)
    return len(found)


def _keep_what_is_compiled() -> None:
    """In the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another place; torch itself sets that to a
    temporary one when it is imported."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache.folder() / "compiled")
