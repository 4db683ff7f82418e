"""A patch discriminator: tells images from reconstructions of them, patch by patch.

Isola et al. 2017 (arXiv 1611.07004), with GroupNorm in place of norms over the batch: what it says of an image depends
on that image alone, so that batches may be cut. Shape letters: B samples, C channels, H and W height and width.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

_SLOPE = 0.2
_WIDEST = 8
"""Largest factor on the first width."""
_GROUPS = 32


class PatchDiscriminator(nn.Module):
    """Images [B, 3, H, W] in [-1, 1] to logits [B, 1, H / 2^layers, W / 2^layers]: above 0 for a patch of a real image.

    Args:
        channels: of the first layer; each further one has twice as many, at most 8 times.
        layers: convolutions that halve the sides; two follow that do not.
    """

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        widths = [3, *(channels * min(2**number, _WIDEST) for number in range(layers + 1))]
        sides = [(4, 2)] * layers + [(3, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, kernel, stride, 1)
            for before, after, (kernel, stride) in zip(widths, widths[1:], sides, strict=False)
        )
        self.groups = [math.gcd(_GROUPS, width) for width in widths[2:]]  # groups must divide the channels
        self.norms = nn.ModuleList(map(nn.GroupNorm, self.groups, widths[2:]))
        self.head = nn.Conv2d(widths[-1], 1, 3, 1, 1)
        for conv in (*self.convs, self.head):
            nn.init.normal_(conv.weight, std=0.02)  # as pix2pix (Isola et al.) begins
            nn.init.zeros_(conv.bias)

    def forward(self, x_BCHW: Tensor, learns: bool = True) -> Tensor:
        """The logits. Unless it `learns`, its weights get no gradient from them, and the images get theirs all the
        same."""

        def weights(layer: Any) -> tuple[Tensor, Tensor]:
            weight, bias = layer.weight, layer.bias  # under autocast of a GPU copies, which are no parameters
            return (weight, bias) if learns else (weight.detach(), bias.detach())

        for number, conv in enumerate(self.convs):
            x_BCHW = functional.conv2d(x_BCHW, *weights(conv), stride=2 if number < self.layers else 1, padding=1)
            # No norm behind the first layer, as in pix2pix.
            if number:
                norm = self.norms[number - 1]
                x_BCHW = functional.group_norm(x_BCHW, self.groups[number - 1], *weights(norm))
            x_BCHW = functional.leaky_relu(x_BCHW, _SLOPE)
        return functional.conv2d(x_BCHW, *weights(self.head), padding=1)
