"""Matrix products of float32 on a CPU, by the library that convolves.

torch has two libraries there: products go to MKL, convolutions to oneDNN. On processors of AMD with AVX-512 MKL uses
AVX2 alone, oneDNN all of it. A product is a convolution of size 1, so a large one may take the faster of the two; small
ones are not worth its call. On a processor without AVX-512 MKL is the faster one, two to three times.
"""

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daguerre import system

SMALLEST = 15_000_000
"""Multiplications from which on it pays: rows x inputs x outputs."""
IMAGES = 16
"""Rows are given as so many images: with fewer, torch computes convolutions of size 1 by itself if it has one thread
alone."""


class Product(nn.Linear):
    """nn.Linear whose large products are convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear, up to rounding."""
        if not _pays(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(IMAGES, -1, 1, input.shape[-1]).permute(0, 3, 1, 2)
        y = F.conv2d(rows, self.weight[:, :, None, None], self.bias)
        return y.permute(0, 2, 3, 1).reshape(*input.shape[:-1], -1)


@cache
def faster() -> bool:
    """True if convolutions compute products faster than torch's own on this processor: one of AMD with AVX-512."""
    vendor = system.cpu_facts() or platform.processor()
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in vendor


def _pays(x: Tensor, weight: Tensor) -> bool:
    whole = not isinstance(weight, DTensor)
    plain = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    divides = x.numel() // weight.shape[1] % IMAGES == 0
    return whole and plain and divides and x.numel() * weight.shape[0] >= SMALLEST


def enable(net: nn.Module) -> int:
    """Every nn.Linear becomes such a product; returns how many did. For networks on a CPU."""
    found = [module for module in net.modules() if type(module) is nn.Linear]
    for module in found:
        module.__class__ = Product
    return len(found)
