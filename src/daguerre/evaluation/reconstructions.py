"""Held-out images and what an autoencoder or Stage B makes of them: pairs for PSNR, SSIM, LPIPS, images for FID."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from daguerre.assembly.parts import Components
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.models.pixel_codec import levels
from daguerre.samplers.settings import SamplingSettings
from daguerre.training import device
from daguerre.types import IMAGE, Batch, Prompt

_BATCH = 8


@dataclass(eq=False)
class Reconstructions:
    """The first held-out images at the size that is trained on, and the images again. A latent that is drawn, is drawn
    by the sample's key; a diffusion that makes image i again starts from the noise of its seed + i."""

    dataset: Dataset
    most: int
    parts: Callable[[], Components]
    sampling: SamplingSettings
    """Of a diffusion."""
    stop: Callable[[], bool]

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
            found += self._drawn(parts, batch, len(found)) if parts.family.generates else _decoded(parts, batch)
        return found

    def _drawn(self, parts: Components, batch: Batch, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """By a diffusion conditioned on the compressed image; the first image has this number."""
        own, originals = self.sampling, [*batch.pixels_BCHW.permute(0, 2, 3, 1).contiguous().numpy()]
        size_px, scale = batch.pixel_shape[1:], own.guidance_scale
        asked = [
            ImageRequest(i, Prompt(text, own.negative_prompt, {IMAGE: image}), own.seed + i, size_px, scale)
            for i, (text, image) in enumerate(zip(batch.texts, originals, strict=True), first)
        ]
        again = (image.pixels_HWC for image in generate.generate(parts, own, asked, self.stop))
        return zip(originals, again, strict=True)


def _decoded(parts: Components, batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By an autoencoder."""
    given = device.on(parts.device, replace(batch, draws=parts.draws(batch)))
    example = parts.example(given)
    x0_BCHW = example.clean[IMAGE]
    with parts.autocast():
        again = parts.net(x0_BCHW, x0_BCHW.new_zeros(len(x0_BCHW)), example.cond[IMAGE]).images_BCHW
    return zip(*(levels(each).cpu().numpy() for each in (x0_BCHW, again.float())), strict=True)
