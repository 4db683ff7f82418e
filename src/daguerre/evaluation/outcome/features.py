"""Features of images by the model that is trained itself, for those who have no other network at hand.

An image is encoded, noised a little, always by the same noise, and given to the base's denoiser with an empty prompt.
The output of the block in the middle of the pass, averaged over places, is its vector: what diffusion models see of a
picture is used for matching in this way (Tang et al. 2023, arXiv 2306.03881).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daguerre.assembly.parts import Components
from daguerre.errors import UserError
from daguerre.generation import generate
from daguerre.samplers.draw import initial_noise
from daguerre.types import Prompt

QUANTILE = 0.25
"""Of the objective's law of times; 0 is the clean end."""
_BATCH = 8


@dataclass
class ModelFeatures:
    """The base's own features: a feature network (`evaluation/metric.py`) of images of one size."""

    parts: Callable[[], Components]
    """The model with its adapters; loaded when the first image is seen."""
    label = "model"

    @property
    def about(self) -> dict[str, Any]:
        return {"network": "the base's own, middle block of its denoiser", "quantile": QUANTILE}

    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """[n, d] float32."""
        parts = self.parts()
        with parts.attached.at(0.0):
            return np.concatenate([self._rows(parts, images[i : i + _BATCH]) for i in range(0, len(images), _BATCH)])

    @torch.no_grad()
    def _rows(self, parts: Components, images: Sequence[np.ndarray]) -> np.ndarray:
        family, objective = generate.generative(parts)
        pixels_BCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        seeds = [0] * len(images)
        x0_BCHW = family.encode_images(pixels_BCHW.to(parts.device), seeds)
        shape = tuple(x0_BCHW.shape[1:])
        objective = objective.at(shape)
        t = objective.times(torch.tensor(QUANTILE, dtype=torch.float64, device="cpu"))
        a, s = (float(each) for each in objective.path(t))
        x_BCHW = a * x0_BCHW + s * initial_noise(seeds, shape, "features").to(x0_BCHW)
        cond, _ = family.encode_prompts([Prompt("")] * len(images), tuple(pixels_BCHW.shape[1:]))
        scale_B = torch.ones(len(images), device=parts.device)  # of networks that read a scale: no guidance
        seen: list[Tensor] = []
        with ExitStack() as stack, parts.autocast():
            for block in _blocks(parts):
                handle = block.register_forward_hook(lambda module, given, output: seen.append(_pooled(output)))
                stack.callback(handle.remove)
            objective.predict(parts.net, x_BCHW, t, family.guidance.with_scale(cond, scale_B))
        return seen[len(seen) // 2].float().cpu().numpy()


def _blocks(parts: Components) -> list[nn.Module]:
    """The blocks of the denoiser."""
    denoiser = next(each for each in parts.family.networks.values() if each.denoises)
    names = {*denoiser.facts.blocks}
    return [m for m in denoiser.module.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def check(parts: Components) -> None:
    """UserError for a model whose own features cannot be taken."""
    if not parts.family.encodes:
        raise UserError(
            "this model has no features of its own to compare images by, as it does not read images: give "
            "networks.dinov2=PATH or networks.clip=PATH",
            code="unsupported",
            setting="networks",
        )


def _pooled(output: Any) -> Tensor:
    """[B, D]: the mean over places of what a block gives; streams of several kinds of tokens one behind the other."""
    tensors = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
    means = [each.mean((2, 3)) if each.ndim == 4 else each.flatten(1, -2).mean(1) for each in tensors if each.ndim > 2]
    return torch.cat(means, dim=1)
