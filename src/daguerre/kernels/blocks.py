"""`torch.compile` of the blocks of which networks of diffusers consist, each for itself.

Blocks of one kind and shape share what was compiled, so that a network takes as long as its different blocks do, and
what splits or recomputes networks between blocks goes on to. run/preflight.py compares gradients with those of
blocks that are not compiled before a run trains with them. Compiled code is kept in the user's cache folder.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from daguerre import user_cache
from daguerre.errors import UserError, install
from daguerre.kernels import available

SHAPES = 256
"""Most shapes for which equal blocks are compiled: sizes of images."""
_repeated = False


def compile_blocks(net: nn.Module, names: Collection[str], device: torch.device, cache_dir: str | None = None) -> int:
    """Every block of diffusers whose class has one of these names is compiled when it is first called with gradients,
    for each shape by itself; returns how many blocks there are. Without gradients (sampling, validation) blocks compute
    uncompiled, as a few passes of other shapes are not worth the minutes, but for those of `repeated`.

    UserError without such a block, and where compiling needs what is not installed.
    """
    found = [module for module in net.modules() if _is_of_diffusers(module, names)]
    if not found:
        raise UserError(
            "training.compile=blocks: no block of the networks trained here can be compiled; remove it",
            code="unsupported",
            setting="training.compile",
        )
    _check_compiler(device)
    _keep_what_is_compiled(cache_dir)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, SHAPES)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than uncompiled blocks from then on, in silence
    # A graph that gives away its buffers can be walked once, and optimizer.in_backward=after_norm does so twice.
    torch._functorch.config.donated_buffer = False
    # Dropout draws as it does uncompiled. On a CPU inductor's own choice of layouts gives wrong gradients of some UNets
    # (torch 2.13).
    options = {"fallback_random": True} | ({"layout_optimization": False} if device.type == "cpu" else {})
    forwards: dict[Any, Callable[..., Any]] = {}
    for block in found:
        # torch does not look at hooks again: a block with others would run code that has none of them.
        hooked = tuple(name for name, module in block.named_modules() if module._forward_hooks)
        alike = type(block), tuple((name, p.shape) for name, p in block.named_parameters()), hooked
        if alike not in forwards:
            forwards[alike] = _forward(type(block), len(forwards), options)
        # A bound method: a copy of the module gets one of its own.
        setattr(block, "forward", MethodType(forwards[alike], block))  # noqa: B010
    return len(found)


@contextmanager
def repeated(there_are_gradients: bool) -> Iterator[None]:
    """Within the context of a loss that is trained by, blocks are compiled in its passes without gradient, too: those
    of a teacher, and of the student with other weights, come in every update."""
    global _repeated
    before, _repeated = _repeated, there_are_gradients
    try:
        yield
    finally:
        _repeated = before


def _is_of_diffusers(module: nn.Module, names: Collection[str]) -> bool:
    kinds = type(module).__mro__  # kernels stand in for a network's own
    return any(kind.__name__ in names and kind.__module__.startswith("diffusers.") for kind in kinds)


def _forward(kind: type[nn.Module], number: int, options: dict[str, Any]) -> Callable[..., Any]:
    """The forward pass of equal blocks, which share what is compiled of it. torch keeps what it compiled by
    the code that it compiled it of, and looks through all of that at each call: blocks that differ get a code each."""
    plain: Any = kind.forward
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{number}")
    own = FunctionType(code, plain.__globals__, code.co_name, plain.__defaults__, plain.__closure__)
    own.__kwdefaults__ = plain.__kwdefaults__
    compiled = torch.compile(own, dynamic=False, options=options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (compiled if _repeated or torch.is_grad_enabled() else plain)(self, *args, **kwargs)

    return forward


def _check_compiler(device: torch.device) -> None:
    needed = ""
    if device.type == "cpu" and not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")):
        needed = "a C++ compiler on a CPU: install g++, or remove it"
    if device.type == "cuda" and not available.installed():
        needed = f"Triton on a GPU: {install('triton')}; or remove it"
    if needed:
        raise UserError(f"training.compile=blocks needs {needed}", code="not_installed", setting="training.compile")


def _keep_what_is_compiled(cache_dir: str | None) -> None:
    """In the user's cache folder, unless the recipe or TORCHINDUCTOR_CACHE_DIR names another place; torch itself sets
    that to a temporary one when it is imported."""
    if cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir).expanduser().absolute())
    elif os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache.folder() / "compiled")
