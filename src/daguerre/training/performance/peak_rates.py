"""Peak rates of a device: measured here and now, and those of its datasheet.

Model FLOP/s are divided by both. A measured rate is the best of several tries over random numbers (zeros run faster
than data does).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from daguerre import devices
from daguerre.formatting import counted

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
    "RTX 4080 SUPER": Datasheet(104.4, 736),
    "RTX 4080": Datasheet(97.5, 717),
    "RTX 4070 Ti SUPER": Datasheet(88.2, 672),
    "RTX 4070 Ti": Datasheet(80.2, 504),
    "RTX 4070 SUPER": Datasheet(71, 504),
    "RTX 4070": Datasheet(58.3, 504),
    "RTX 4060 Ti": Datasheet(44.1, 288),
    "RTX 4060": Datasheet(30.2, 272),
    "RTX 3090": Datasheet(71, 936),
}
"""By a part of the name that torch gives a device; the first that fits, so that longer names stand before shorter."""


@dataclass(frozen=True)
class Rates:
    """Rates that a forecast assumes."""

    device: str
    flops: float
    """Floating-point operations of products a second."""
    bytes: float
    """Bytes of memory read or written a second."""
    launch_seconds: float
    """Of the host, for each operator."""
    link: float
    """Bytes a second between the memory of the host and that of the device."""

    def __str__(self) -> str:
        return (
            f"{self.device}, products at {self.flops / 1e12:,.3g} TFLOP/s, memory at {self.bytes / 1e9:,.0f} GB/s, "
            f"{self.link / 1e9:,.0f} GB/s from the host, {self.launch_seconds * 1e6:.0f} us a launch"
        )


_PRODUCTS, _MEMORY = 0.6, 0.8
"""Shares of a datasheet that a training step reaches: assumed; on an H100 products and copies have reached these."""
_GPU_LAUNCH_SECONDS, _CPU_LAUNCH_SECONDS = 12e-6, 5e-6
_LINK = 25e9
"""Bytes a second from pinned memory over PCIe 4.0 with 16 lanes: assumed of every card."""
_USUAL = (
    *((9, "RTX 4060"), (13, "RTX 4070"), (17, "RTX 4080"), (26, "RTX 4090"), (34, "RTX 5090"), (50, "L40S")),
    *((90, "H100"), (150, "H200")),
)
"""A usual card by the most gigabytes of its memory."""
_FLOAT32 = 0.5
"""Rate of products in float32 by TF32, and of a card's own in it, to that in 16 bits: not more than this."""


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
    devices.synchronize(device)


def of_card(name: str, dtype: torch.dtype) -> Rates:
    """The rates that are assumed of a card in `DATASHEETS`."""
    sheet = DATASHEETS[name]
    products = sheet.tflops * 1e12 * _PRODUCTS * (_FLOAT32 if dtype == torch.float32 else 1)
    return Rates(f"a card such as {name}", products, sheet.gb_per_second * 1e9 * _MEMORY, _GPU_LAUNCH_SECONDS, _LINK)


def assumed(card: int | None, gpu: bool, dtype: torch.dtype) -> Rates:
    """The rates of a usual card of so many bytes, or of this machine's CPU, on which both are measured in a moment."""
    if gpu:
        return of_card(next((name for size, name in _USUAL if (card or 80e9) <= size * 1e9), "B200"), dtype)
    return _of_this_cpu(dtype)


@cache
def _of_this_cpu(dtype: torch.dtype) -> Rates:
    """Measured once a process, so that all forecasts of a plan assume the same."""
    device = torch.device("cpu")
    left, right = (torch.randn(512, 512).to(dtype) for _ in range(2))
    source = torch.zeros(16_000_000, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: torch.mm(left, right), device, 1) for _ in range(_TRIES))
    copy = min(_seconds(lambda: target.copy_(source), device, 1) for _ in range(_TRIES))
    threads = f"this CPU with {counted(torch.get_num_threads(), 'thread')}, measured for a moment"
    memory = 2 * len(source) / copy * _MEMORY
    return Rates(threads, 2 * 512**3 / product * _PRODUCTS, memory, _CPU_LAUNCH_SECONDS, memory / 2)
