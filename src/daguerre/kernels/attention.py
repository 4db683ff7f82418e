"""Chooses the fastest of torch's attention kernels for each shape, by measuring once on this machine.

The answer is kept in the user's cache folder, one small file a question: a run that goes on computes with the kernels
with which it began, and of several processes the first to answer decides for all.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode

from daguerre import documents, user_cache

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ROUNDS, _WARM = 5, 2


@dataclass(frozen=True)
class Question:
    """Facts that decide how fast a kernel is."""

    device: str
    """Name of the device, and its torch."""
    dtype: str
    queries: tuple[int, int, int, int]
    """Batch, heads, rows, features."""
    keys: int
    """Rows of keys and values."""
    masked: bool
    trained: bool
    """A backward pass follows."""


def choose(question: Question, measure: Callable[[str], float | None]) -> str:
    """The fastest kernel: as it was found before, or by `measure` (seconds; None for one that cannot)."""
    text = json.dumps(asdict(question), sort_keys=True)
    place = user_cache.folder() / "attention" / hashlib.sha256(text.encode()).hexdigest()[:32]
    if (known := _read(place)) is not None:
        return known
    seconds = {name: found for name in KERNELS if (found := measure(name)) is not None}
    best = min(seconds, key=lambda name: seconds[name]) if seconds else "math"
    return _first(place, {"kernel": best, "seconds": seconds, "question": asdict(question)})


def _read(place: Path) -> str | None:
    """The kernel that was found before; None where nothing was, or the file is damaged or of another version."""
    try:
        name = str(documents.read_object(place)["kernel"])
    except (OSError, ValueError, KeyError):
        return None
    return name if name in KERNELS else None


def _first(place: Path, answer: dict[str, Any]) -> str:
    """Writes the answer unless another process was faster, and returns what holds now."""
    own = place.with_name(f"{place.name}.{os.getpid()}")
    place.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    try:
        with suppress(FileExistsError):
            os.link(own, place)
        if (held := _read(place)) is None:  # damaged
            os.replace(own, place)
            return str(answer["kernel"])
        return held
    finally:
        own.unlink(missing_ok=True)


def seconds(name: str, question: Question, dtype: torch.dtype, device: torch.device) -> float | None:
    """Time of one kernel on random numbers, forward and backward; None where it cannot."""
    batch, heads, _, features = question.queries
    rows = (question.queries[2], question.keys, question.keys)
    q, k, v = (
        torch.randn(batch, heads, n, features, dtype=dtype, device=device, requires_grad=question.trained) for n in rows
    )
    mask = torch.zeros(batch, 1, 1, question.keys, dtype=dtype, device=device) if question.masked else None

    def once() -> None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if question.trained:
            torch.autograd.grad(y, (q, k, v), y)

    with sdpa_kernel(KERNELS[name]), torch.enable_grad():
        try:
            times = [_timed(once, device) for _ in range(_WARM + _ROUNDS)]
        except RuntimeError:  # no such kernel for this shape, or no memory for it
            return None
    return statistics.median(times[_WARM:])


def _timed(once: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    once()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def fastest(question: Question, dtype: torch.dtype, device: torch.device) -> SDPBackend:
    """The kernel for a question, asked once a process."""
    return KERNELS[choose(question, lambda name: seconds(name, question, dtype, device))]


class Measured(Attention):
    """diffusers' attention, by the kernel that is the fastest for its shapes."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """As diffusers' attention; where operators are counted or tensors have no memory, nothing is measured."""
        if hidden_states.is_meta or _get_current_dispatch_mode() is not None:
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        order = self._kernels(hidden_states, keys, attention_mask is not None)
        with sdpa_kernel(order, set_priority=True):
            return super().forward(hidden_states, encoder_hidden_states, attention_mask, **cross_attention_kwargs)

    def _kernels(self, x: Tensor, keys: Tensor, masked: bool) -> list[SDPBackend]:
        """The fastest first; the others stand in for it where it cannot."""
        device = x.device
        mixed = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if mixed else x.dtype
        rows, features = x.shape[1] if x.ndim == 3 else x.shape[2:].numel(), self.inner_dim // self.heads
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        of_keys = keys.shape[1] if keys.ndim == 3 else keys.shape[2:].numel()
        question = Question(
            f"{name}, torch {torch.__version__}", str(dtype), (x.shape[0], self.heads, rows, features), of_keys,
            masked, torch.is_grad_enabled(),
        )  # fmt: skip
        best = fastest(question, dtype, device)
        return [best, *(kernel for kernel in KERNELS.values() if kernel != best)]


def enable(net: nn.Module) -> int:
    """Every attention of diffusers measures; returns how many there are."""
    found = [module for module in net.modules() if type(module) is Attention]
    for module in found:
        module.__class__ = Measured
    return len(found)
