"""Which device and precision a run computes with, and the way of a batch onto the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from daguerre.training.settings import TrainingSettings
from daguerre.training.step import Autocast
from daguerre.types import Batch


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one. ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "training.device=cuda, but torch sees no GPU; use training.device=cpu, or install a CUDA build of torch "
            "(`daguerre doctor` shows what is there)"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def choose_autocast(settings: TrainingSettings, device: torch.device) -> tuple[Autocast, str]:
    """The context of a forward pass, and its name for people: `bf16` or `fp32`."""
    bf16 = settings.mixed_precision == "bf16" or (settings.mixed_precision == "auto" and device.type == "cuda")
    if not bf16:
        return nullcontext, "fp32"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError("this GPU has no bf16; use training.mixed_precision=no")

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    return autocast, "bf16"


def moved(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches with pixels and draws on `device`; `valid_B` stays on the CPU."""
    for batch in batches:
        yield on(device, batch)


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch with pixels and draws on `device`."""
    draws = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.draws.items()}
    return replace(batch, pixels_BCHW=batch.pixels_BCHW.to(device, non_blocking=True), draws=draws)
