"""Held-out images beside what a trained autoencoder makes of them: pairs for PSNR, SSIM and LPIPS, images for FID."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from daguerre.build.parts import Components
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.models.pixel_codec import levels
from daguerre.training import device

_BATCH = 8


@dataclass(eq=False)
class Reconstructions:
    """The first held-out images at the size that is trained on, and the images again. A latent that is drawn, is drawn
    by the sample's key."""

    dataset: Dataset
    most: int
    parts: Callable[[], Components]

    @cached_property
    def total(self) -> int:
        return len(self.texts)

    @cached_property
    def texts(self) -> Sequence[str]:
        return loader.fixed_captions(self.dataset, self.most)

    def of(self, ids: range) -> list[np.ndarray]:
        """[H, W, 3] uint8: the images again."""
        return [self._pairs[i][1] for i in ids]

    def originals(self, ids: range) -> list[np.ndarray]:
        """[H, W, 3] uint8: what they were made of."""
        return [self._pairs[i][0] for i in ids]

    @cached_property
    @torch.no_grad()
    def _pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        parts, found = self.parts(), list[tuple[np.ndarray, np.ndarray]]()
        for batch in loader.fixed_batches(self.dataset, self.most, lambda _: _BATCH):
            given = device.on(parts.device, replace(batch, draws=parts.draws(batch)))
            x0_BCHW, cond = parts.encode(given)
            with parts.autocast():
                again = parts.net(x0_BCHW, x0_BCHW.new_zeros(len(x0_BCHW)), cond).images_BCHW
            found += zip(levels(x0_BCHW), levels(again.float()), strict=True)
        return found
