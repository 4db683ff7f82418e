"""LPIPS (Zhang et al. 2018, arXiv 1801.03924) as a network of the evaluation: the distance of two images."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daguerre.evaluation.networks.place import NetworkPlace, missing, short
from daguerre.models.parts import lpips
from daguerre.objectives.networks.lpips import PUBLISHED, Lpips, filled


@dataclass(frozen=True, eq=False)
class Network:
    """LPIPS on a device."""

    net: Lpips
    digest: str
    published: bool
    device: torch.device

    @property
    def label(self) -> str:
        return f"{'' if self.published else 'other-'}vgg-{short(self.digest)}"

    @property
    def about(self) -> dict[str, Any]:
        weights = "" if self.published else ", weights that are not known to be the published ones"
        return {"network": f"LPIPS 0.1, VGG16{weights}", "digest": self.digest, "resize": "none"}

    @torch.inference_mode()
    def distance(self, first_HWC: np.ndarray, second_HWC: np.ndarray) -> float:
        """The distance of two images [H, W, 3] uint8 of one size, 16 pixels a side at least."""
        pair = [torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1 for image in (first_HWC, second_HWC)]
        return float(self.net(*(image.to(self.device) for image in pair)))


def load(place: NetworkPlace, device: torch.device) -> Network:
    """LPIPS of a place. UserError where a file is missing or holds something else."""
    if (found := lpips.read(place.path)) is None:
        raise missing(place, "lpips", f"a folder with {PUBLISHED}")
    return Network(filled(found.tensors).to(device), place.checked(found.digest), found.published, device)
