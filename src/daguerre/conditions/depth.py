"""The condition `depth`: how near everything is, by a network for depth of transformers (DPT, Depth Anything)."""

from typing import Literal

import numpy as np
from PIL import Image

from daguerre.conditions import network
from daguerre.conditions.condition import Draw, grey_to_rgb
from daguerre.conditions.network import Network, NetworkSettings

_TYPES = ("dpt", "depth_anything")


class Settings(NetworkSettings):
    """Near things white, far ones black: the network's inverse depth from its least to its largest value."""

    name: Literal["depth"] = "depth"
    """Near things white, far ones black, by a network."""


def check(settings: Settings) -> None:
    """UserError where the network is not there, or is another one."""
    network.check(settings, settings.name, _TYPES)


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the prediction, resized to the image by a bicubic filter and stretched to 0 to 255."""
    found = network.opened(settings, settings.name, "AutoModelForDepthEstimation", _TYPES)
    size = pixels_HWC.shape[1], pixels_HWC.shape[0]
    small = np.asarray(Image.fromarray(pixels_HWC).resize(_size(found, size), Image.Resampling.BICUBIC))
    (depth_Bhw,) = found.predict(found.normalised(small)[None], "predicted_depth")
    depth_HW = network.resized(depth_Bhw[0], *pixels_HWC.shape[:2])
    low, high = float(depth_HW.min()), float(depth_HW.max())
    return grey_to_rgb(np.rint((depth_HW - low) / ((high - low) or 1.0) * 255).astype(np.uint8))


def _size(found: Network, size: tuple[int, int]) -> tuple[int, int]:
    """Width and height that the network is given, by the rules of transformers' DPTImageProcessor."""
    wanted, multiple = found.processor.get("size"), int(found.processor.get("ensure_multiple_of", 1))
    if not isinstance(wanted, dict) or not {"width", "height"} <= wanted.keys():
        wanted = {"width": 384, "height": 384}
    across, down = wanted["width"] / size[0], wanted["height"] / size[1]
    if found.processor.get("keep_aspect_ratio", False):
        across = down = across if abs(1 - across) < abs(1 - down) else down
    width, height = (
        max(1, round(side * scale / multiple)) * multiple for side, scale in zip(size, (across, down), strict=True)
    )
    return width, height
