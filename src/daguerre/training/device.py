"""The device of a run, settings of the whole process there, and moving batches to it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from daguerre import devices
from daguerre.errors import UserError
from daguerre.training.precision import float8, quantized
from daguerre.training.settings import TrainingSettings, bytes_of
from daguerre.types import Batch, waits


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU of CUDA or ROCm if there is one. UserError for a GPU that is not there."""
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError(
                "training.device=mps, but torch sees no Apple GPU: it needs macOS on Apple silicon; use cpu or cuda",
                code="resources",
                setting="training.device",
            )
        return torch.device("mps")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(
            "training.device=cuda, but torch sees no GPU; use training.device=cpu, or install a CUDA build of torch "
            "(`daguerre doctor` shows what is there)",
            code="resources",
            setting="training.device",
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def of(net: nn.Module) -> torch.device:
    """The device on which a net computes: that of its parameters that do not wait in the host's memory."""
    return next(p.device for p in net.parameters() if not waits(p))


def prepare(settings: TrainingSettings, device: torch.device) -> None:
    """Sets the precision of float32 products and the limit of memory. UserError for a limit above the device's, and for
    products of few bits whose library is not here, or which the device has not."""
    if device.type == "mps":
        _check_apple(settings)
    quantized.check(settings.base_precision, device)
    float8.check(settings.float8, device)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    if device.type == "cuda":
        # torch wants a number here: `cuda` alone is the GPU that this process uses.
        index = torch.cuda.current_device() if device.index is None else device.index
        # Also where there is no limit: that of an earlier variant of `bench` in this process must not outlive it.
        torch.cuda.set_per_process_memory_fraction(_share(settings, device), index)
    elif settings.max_device_memory is not None:
        raise UserError(
            f"training.max_device_memory={settings.max_device_memory} has no effect on {devices.name(device)}, whose "
            "memory is limited by the system: remove it",
            code="unused",
            setting="training.max_device_memory",
        )


NOT_ON_APPLE: Mapping[str, tuple[object, str]] = {
    # setting: its value that is fine there, and what is missing
    "compile": (False, "no backend of torch.compile was tried there"),
    "swap_blocks": (0, "its memory is that of the host: blocks that wait there save nothing"),
    "offload_activations": (False, "its memory is that of the host: activations that wait there save nothing"),
    "capture": (False, "CUDA graphs are recorded on CUDA alone"),
    "base_precision": ("no", "codes of few bits were not tried there"),
    "float8": ("no", "the GPU has no products of float8"),
}
"""Settings of `training` that are refused on an Apple GPU."""


def _check_apple(settings: TrainingSettings) -> None:
    for name, (fine, why) in NOT_ON_APPLE.items():
        value = getattr(settings, name)
        if value != fine:
            raise UserError(
                f"training.{name}={value} on training.device=mps: {why}; leave it out",
                code="unsupported",
                setting=f"training.{name}",
            )


def _share(settings: TrainingSettings, device: torch.device) -> float:
    """The share of the GPU's memory that may be taken."""
    if settings.max_device_memory is None:
        return 1.0
    limit, total = bytes_of(settings.max_device_memory), torch.cuda.get_device_properties(device).total_memory
    if limit > total:
        raise UserError(
            f"training.max_device_memory={settings.max_device_memory}: {torch.cuda.get_device_name(device)} has "
            f"{total / 1e9:.1f} GB; set less, or null for all of it",
            code="resources",
            setting="training.max_device_memory",
        )
    return limit / total


def on(device: torch.device, batch: Batch) -> Batch:
    """The batch with its tensors by name on `device`. A GPU gets them by a stream of its own, from pinned memory, while
    it still computes what it was given before: nobody waits for it."""
    with _sending(device) as sent:
        return batch.map(sent)


@contextmanager
def _sending(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within the context the function sends a tensor apart from what is computed; afterwards the device waits for all
    that was sent."""
    if device.type != "cuda":
        yield lambda tensor: tensor.to(device)
        return
    computing, sending = torch.cuda.current_stream(device), _stream(device)

    def sent(tensor: Tensor) -> Tensor:
        # The host waits for a copy of pageable memory, whatever is asked for; what is pinned already is not copied.
        host = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        on_device = host.to(device, non_blocking=True)
        on_device.record_stream(computing)  # so that its memory is not given away before it was read
        return on_device

    with torch.cuda.stream(sending):
        yield sent
    computing.wait_stream(sending)  # a wait of the device, not of the host


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all batches: freed memory is kept for the stream that took it, so a new stream would never find any.
    return torch.cuda.Stream(device)
