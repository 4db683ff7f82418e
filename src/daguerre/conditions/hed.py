"""The condition `hed`: soft edges by HED (Xie and Tu 2015, arXiv 1504.06375), in the form of ControlNet's authors.

The network is ControlNetHED of lllyasviel/Annotators: five blocks of a VGG, each with a map of edges; their mean is the
answer. Width of each block follows from the weights.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np

from daguerre.conditions import network
from daguerre.conditions.condition import ConditionSettings, Draw, grey_to_rgb
from daguerre.conditions.network import NetworkFile

if TYPE_CHECKING:
    from torch import Tensor

_LAYERS = (2, 2, 3, 3, 3)
"""Convolutions of each block."""
_LEAST_PX = 16
"""Each block but the first halves the image."""
_SHADES = 2


class Settings(NetworkFile, ConditionSettings):
    """White soft edges on black, by a network."""

    name: Literal["hed"] = "hed"
    """Soft edges, by a network."""
    safe: bool = False
    """Only black, grey and white (softedge_hedsafe), so that no detail of the image hides in faint shades."""


def names() -> list[str]:
    """The names of the weights, as ControlNetHED has them."""
    layers = [
        f"block{k}.{i}" for k, n in enumerate(_LAYERS, 1) for i in (*(f"convs.{i}" for i in range(n)), "projection")
    ]
    return ["norm", *(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))]


def check(settings: Settings) -> None:
    """UserError where the network is not there, or is another one."""
    network.check_file(settings, settings.name)


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: 255 sigmoid(mean of the five maps, each resized to the image), rounded down."""
    weights = network.tensors(settings, settings.name, names())
    _check_shapes(settings, weights)
    height, width = pixels_HWC.shape[:2]
    more = [(0, max(0, _LEAST_PX - side)) for side in (height, width)]
    edges_HW = _edges(weights, np.pad(pixels_HWC, (*more, (0, 0)), mode="edge"))[:height, :width]
    if settings.safe:
        edges_HW = np.floor(edges_HW * (_SHADES + 1)) / _SHADES
    return grey_to_rgb((edges_HW * 255).clip(0, 255).astype(np.uint8))


def _check_shapes(settings: Settings, weights: "dict[str, Tensor]") -> None:
    """UserError unless each layer takes what the one before gives."""
    channels = 3
    for block, layers in enumerate(_LAYERS, 1):
        for own in (*(f"block{block}.convs.{i}" for i in range(layers)), f"block{block}.projection"):
            width, side = (1, 1) if own.endswith("projection") else (len(weights[f"{own}.weight"]), 3)
            if weights[f"{own}.weight"].shape != (width, channels, side, side) or weights[f"{own}.bias"].shape != (
                width,
            ):
                raise network.fault(settings.name, f"{settings.path}: {own} has a shape that does not fit", "damaged")
            channels = channels if own.endswith("projection") else width


def _edges(weights: "dict[str, Tensor]", pixels_HWC: np.ndarray) -> np.ndarray:
    """[H, W] float64 in (0, 1)."""
    import torch
    from torch.nn import functional

    x_BCHW = torch.from_numpy(pixels_HWC.transpose(2, 0, 1)[None].astype(np.float32)) - weights["norm"]
    maps = []
    with torch.inference_mode():
        for block, layers in enumerate(_LAYERS, 1):
            if block > 1:
                x_BCHW = functional.max_pool2d(x_BCHW, 2)
            for own in (f"block{block}.convs.{i}" for i in range(layers)):
                x_BCHW = functional.conv2d(x_BCHW, weights[f"{own}.weight"], weights[f"{own}.bias"], padding=1).relu()
            own = f"block{block}.projection"
            found = functional.conv2d(x_BCHW, weights[f"{own}.weight"], weights[f"{own}.bias"])
            maps.append(functional.interpolate(found, pixels_HWC.shape[:2], mode="bilinear", align_corners=False)[0, 0])
        mean_HW = torch.stack(maps).mean(0).double().numpy()
    return 1 / (1 + np.exp(-mean_HW))
