"""Questions about devices that are no CPU and no CUDA: what Apple's GPUs (`mps`) have, and waiting for either.

Nothing here was run on such a GPU: what is said of `mps` is from torch's own tables and documentation.
"""

import torch


def widest(device: torch.device) -> torch.dtype:
    """The type in which sums over many updates are kept: float64, but float32 where a device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronize(device: torch.device) -> None:
    """Waits for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def name(device: torch.device) -> str:
    """The device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "an Apple GPU" if device.type == "mps" else "a CPU"
