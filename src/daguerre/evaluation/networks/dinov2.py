"""DINOv2 (Oquab et al. 2023, arXiv 2304.07193): its class token, by transformers' Dinov2Model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from daguerre.evaluation.networks import transformers
from daguerre.evaluation.networks.place import NetworkPlace, digest_of_files, folder_of, short
from daguerre.evaluation.networks.resize import pillow_bicubic

SIDE_PX = 224
PUBLISHED = "facebook/dinov2-large"
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

Resize = Literal["pillow_bicubic", "antialias_bicubic"]


@dataclass(frozen=True, eq=False)
class Network:
    """DINOv2 on a device."""

    model: Any
    name: str
    digest: str
    resize: Resize
    mean: list[float]
    std: list[float]
    device: torch.device

    @property
    def label(self) -> str:
        return f"dinov2-{short(self.digest)}-{self.resize}"

    @property
    def about(self) -> dict[str, Any]:
        return {"network": self.name, "digest": self.digest, "resize": f"{self.resize} to {SIDE_PX} px"}

    @torch.inference_mode()
    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """[n, d] float32 of images [H, W, 3] uint8: the class token after the last norm."""
        x_BCHW = torch.stack([_resized(image, self.resize) for image in images]) / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        found = self.model(pixel_values=((x_BCHW - mean) / std).to(self.device)).last_hidden_state[:, 0]
        rows: np.ndarray = found.float().cpu().numpy()
        return rows


def load(place: NetworkPlace, device: torch.device, resize: Resize) -> Network:
    """DINOv2 of a folder, or of the hub's cache. UserError where it is missing."""
    folder = folder_of(place, "dinov2", PUBLISHED)
    digest = place.checked(digest_of_files(folder))
    model = transformers.load(folder, "Dinov2Model", ("dinov2",))
    mean, std = transformers.processor(folder, _MEAN, _STD)
    return Network(model.to(device), Path(place.path).name, digest, resize, mean, std, device)


def _resized(pixels_HWC: np.ndarray, resize: Resize) -> Tensor:
    """[3, 224, 224] float32 in 0..255."""
    if resize == "pillow_bicubic":
        return pillow_bicubic(pixels_HWC, SIDE_PX)
    x_BCHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].float()
    size = (SIDE_PX, SIDE_PX)
    found = functional.interpolate(x_BCHW, size, mode="bicubic", align_corners=False, antialias=True)
    return found[0].clamp(0, 255)
