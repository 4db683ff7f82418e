"""Peak rates of a device: measured here and now, and those of its datasheet.

Model FLOP/s are divided by both. A measured rate is the best of several tries over random numbers (zeros run faster
than data does).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_TRIES = 5
_SECONDS_A_TRY = 0.2
_LONG = 0.05
"""Seconds of a product from which on a wider one has no other rate."""


@dataclass(frozen=True)
class Datasheet:
    """Rates of the maker: dense bf16 products accumulated in float32, and memory."""

    tflops: float
    gb_per_second: float


DATASHEETS: dict[str, Datasheet] = {
    "B200": Datasheet(2250, 8000),
    "GH200": Datasheet(989, 4000),
    "H200 NVL": Datasheet(836, 4800),
    "H200": Datasheet(989, 4800),
    "H100 NVL": Datasheet(836, 3900),
    "H100 PCIe": Datasheet(756, 2000),
    "H100": Datasheet(989, 3350),
    "A100-SXM4-40GB": Datasheet(312, 1555),
    "A100-PCIE-40GB": Datasheet(312, 1555),
    "A100 80GB PCIe": Datasheet(312, 1935),
    "A100": Datasheet(312, 2039),
    "L40S": Datasheet(362, 864),
    "L4": Datasheet(121, 300),
    "A10G": Datasheet(70, 600),
    "A10": Datasheet(125, 600),
    "RTX A6000": Datasheet(155, 768),
    "RTX 5090": Datasheet(209.5, 1792),
    "RTX 4090": Datasheet(165.2, 1008),
    "RTX 3090": Datasheet(71, 936),
}
"""By a part of the name that torch gives a device; the first that fits, so that longer names stand before shorter."""


def datasheet(name: str) -> Datasheet | None:
    """The datasheet of a device of this name; None for one that is not in the table."""
    words = f" {name.replace('NVIDIA', '')} "
    return next((sheet for part, sheet in DATASHEETS.items() if f" {part} " in words or f" {part}-" in words), None)


def product_flops(device: torch.device, dtype: torch.dtype, widest: int | None = None) -> float:
    """FLOP/s of a square matrix product of `dtype`, measured: up to 8192 wide on a GPU and 2048 on a CPU, where the
    faster of torch's two libraries counts (kernels/products.py). `widest` is 256 times a power of two."""
    widest = widest or (8192 if device.type == "cuda" else 2048)
    ways: list[Callable[[Tensor, Tensor], object]] = [torch.mm]
    if device.type == "cpu":
        ways.append(
            lambda left, right: F.conv2d(left.view(16, -1, 1, len(left)).permute(0, 3, 1, 2), right[:, :, None, None])
        )
    return max(_product_flops(way, device, dtype, widest) for way in ways)


def _product_flops(
    product: Callable[[Tensor, Tensor], object], device: torch.device, dtype: torch.dtype, widest: int
) -> float:
    """FLOP/s of one way to multiply. The product grows until it takes long: a CPU that has a type in software alone, as
    most have bf16, would need minutes for the widest, at the same rate."""
    width = 256
    while True:
        left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        run = partial(product, left, right)
        run()
        if width >= widest or _seconds(run, device, 1) > _LONG:
            return 2.0 * width**3 / best_seconds(run, device)
        width *= 2


def copy_bytes(device: torch.device, megabytes: int | None = None) -> float:
    """Bytes a second, read and written, of a copy inside the device's memory: 4 GB on a GPU, 256 MB on a CPU."""
    count = (megabytes or (4096 if device.type == "cuda" else 256)) * 1_000_000
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * count / best_seconds(lambda: target.copy_(source), device)


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one `run`, the best of several tries of about a fifth of a second each."""
    run()
    once = _seconds(run, device, 1)
    times = max(1, int(_SECONDS_A_TRY / max(once, 1e-6)))
    return min(_seconds(run, device, times) for _ in range(_TRIES))


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times


def synchronize(device: torch.device) -> None:
    """Waits for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
