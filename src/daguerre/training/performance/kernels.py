"""How the networks of a run are made fast: which kernels they compute with, layout of pictures, compiling.

What each setting means on a device is decided here; the work is done by `kernels`, from outside the networks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from daguerre.errors import UserError, install
from daguerre.kernels import attention, available, blocks, channels_last, narrow, products, swap
from daguerre.training.precision import dtypes
from daguerre.training.settings import TrainingSettings


def apply(
    settings: TrainingSettings,
    net: nn.Module,
    frozen: Iterable[nn.Module],
    block_classes: Collection[str],
    device: torch.device,
) -> None:
    """Prepares the trained networks `net`, and what is frozen beside them, for this device. `block_classes` are the
    names of what may be compiled. To be called once, before they are split over devices; UserError for what the device
    cannot."""
    fused = uses_triton(settings, device)
    every = list({id(network): network for network in (net, *frozen)}.values())
    layout(every, fused, pictures_are_last(settings, fused, device))
    for network in every:
        if settings.kernels == "auto" and device.type == "cpu":
            products.enable(network)
        if settings.attention == "measured" or (
            settings.attention == "auto" and device.type == "cuda" and not settings.compile
        ):
            attention.enable(network)
    if settings.frozen_precision == "bf16":
        _narrow(every, device)
    if settings.compile:
        blocks.compile_blocks(net, block_classes, device, settings.compile_cache_dir)


def _narrow(networks: Iterable[nn.Module], device: torch.device) -> None:
    if not dtypes.has_bf16(device):
        raise UserError("training.frozen_precision=bf16: this GPU has no bf16; it has to be no")
    if not narrow.enable(networks, device):
        raise UserError(
            "training.frozen_precision=bf16: nothing frozen encodes here, every encoder is trained: remove it"
        )


def layout(networks: Iterable[nn.Module], fused: bool, last: bool) -> None:
    """What decides which activations are kept for the backward pass: norms and gates as one operator each, and pictures
    with their channels last. Asks no device."""
    for network in networks:
        if fused:
            swap.norms(network)
            swap.gates(network)
        if last:
            channels_last.enable(network)


def uses_triton(settings: TrainingSettings, device: torch.device) -> bool:
    """Whether norms and gates are Triton kernels. UserError where they were asked for and cannot be."""
    if settings.kernels != "triton":
        return settings.kernels == "auto" and available.triton(device)
    if not available.installed():
        raise UserError(f"training.kernels=triton: Triton is not installed: {install('triton')}; or use auto")
    if not available.triton(device):
        raise UserError(
            "training.kernels=triton: a CPU computes no Triton kernels but for tests (TRITON_INTERPRET=1, which is "
            "slow); use auto or plain"
        )
    return True


def pictures_are_last(settings: TrainingSettings, fused: bool, device: torch.device) -> bool:
    """Whether pictures keep their channels last: by default where no norm gives them back otherwise."""
    if settings.channels_last == "auto":
        return fused or device.type == "cpu"
    return settings.channels_last
