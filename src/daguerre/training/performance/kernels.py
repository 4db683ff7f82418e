"""Speed of a run's networks on a device: chooses kernels, memory layout and compiling; `kernels` does the work."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from daguerre.errors import UserError, install
from daguerre.kernels import attention, available, biases, blocks, channels_last, narrow, products, rotary, swap
from daguerre.kernels.blocks import repeated as repeated  # for the loss, which knows no kernels
from daguerre.training.precision import dtypes
from daguerre.training.settings import TrainingSettings


def apply(
    settings: TrainingSettings,
    net: nn.Module,
    frozen: Iterable[nn.Module],
    block_classes: Collection[str],
    device: torch.device,
    teachers: Iterable[nn.Module] = (),
) -> None:
    """Prepares the trained networks `net` and the frozen ones for this device, once, before they are sharded.
    `block_classes` are the names of blocks that may be compiled: of the net, and of frozen networks that are called in
    each update, the `teachers`. UserError if the device cannot."""
    fused = uses_triton(settings, device)
    # A network that is trained whole is also one of the family's: it must not be changed twice.
    every = list({id(network): network for network in (net, *frozen)}.values())
    last = channels_are_last(settings, fused, device)
    layout(every, fused, last)
    for network in every:
        # cuDNN converts weights of another layout in every pass; on a CPU that costs less than the layout itself.
        if last and device.type == "cuda":
            channels_last.weights(network)
        if settings.kernels == "auto" and device.type == "cpu":
            swap.responses(network)
            if products.faster():
                products.enable(network)
        # Not with compile: compiled code cannot pause to measure.
        if settings.attention == "measured" or (
            settings.attention == "auto" and device.type == "cuda" and not settings.compile
        ):
            attention.enable(network)
    if settings.frozen_precision == "bf16":
        if not dtypes.has_bf16(device):
            raise UserError(
                "training.frozen_precision=bf16: this GPU has no bf16; set it to no",
                code="unsupported",
                setting="training.frozen_precision",
            )
        at_once = device.type == "cuda" and settings.kernels != "plain"
        if not narrow.enable(every, device, at_once):
            raise UserError(
                "training.frozen_precision=bf16: there is no frozen encoder, because every encoder is trained: "
                "remove it",
                code="unused",
                setting="training.frozen_precision",
            )
    if fused and device.type == "cuda" and not settings.compile:  # compiled code casts as it computes
        narrow.cast_by_block(net, device)
    # Last: what is compiled are the blocks with all kernels in their places.
    if settings.compile:
        for network in (net, *teachers):
            blocks.compile_blocks(network, block_classes, device, settings.compile_cache_dir)


def store(settings: TrainingSettings, encoder: nn.Module) -> None:
    """Stores a frozen text encoder, whose files have bfloat16, in the type in which it encodes."""
    if settings.frozen_precision == "bf16":
        narrow.store(encoder)


def layout(networks: Iterable[nn.Module], fused: bool, last: bool) -> None:
    """Sets norms, gates and rotary positions as one operator each, in the type of their input (`fused`), and channels
    last, which decide the activations that are kept for the backward pass. Asks no device."""
    for network in networks:
        if fused:
            swap.norms(network)
            swap.gates(network)
            swap.rows(network)
            swap.divisors(network)
            swap.responses(network, gelu=True)
        if fused and last:
            swap.pointwise(network)
            swap.shifts(network)
        if fused:
            biases.enable(network)
            rotary.enable(network)
        if last:
            channels_last.enable(network)


def uses_triton(settings: TrainingSettings, device: torch.device) -> bool:
    """True if norms and gates are Triton kernels. UserError if they were asked for and cannot be."""
    if settings.kernels != "triton":
        return settings.kernels == "auto" and available.triton(device)
    if not available.installed():
        text = f"training.kernels=triton: Triton is not installed: {install('triton')}; or use auto"
        raise UserError(text, code="not_installed", setting="training.kernels")
    if not available.triton(device):
        raise UserError(
            "training.kernels=triton: a CPU can run Triton kernels only for tests (TRITON_INTERPRET=1, which is "
            "slow); use auto or plain",
            code="unsupported",
            setting="training.kernels",
        )
    return True


def channels_are_last(settings: TrainingSettings, fused: bool, device: torch.device) -> bool:
    """True if activations are channels last. `auto`: on a CPU, and on a GPU with Triton's norms (torch's put channels
    first again)."""
    if settings.channels_last == "auto":
        return fused or device.type == "cpu"
    return settings.channels_last
