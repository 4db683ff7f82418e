"""A Stable Diffusion that reads reference images: each is a further token beside those of the caption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from daguerre.families import sd
from daguerre.models.family import Family
from daguerre.types import REFERENCES, References

RULE = References(most=2, max_px=24 * 24, step_px=8)
WIDTH = 48
"""Of a token of the tiny text encoder."""


def tokens(moments: Any) -> dict[str, Tensor]:
    """The mean of each reference image's latent, [B, 4], as a token."""
    # Contiguous, as rows of a cache are: a sum over another layout in memory rounds otherwise.
    means = [moments[f"{name}.mean"].contiguous().mean((2, 3)) for name in REFERENCES if f"{name}.mean" in moments]
    return {"pictures": torch.stack([pad(mean, (0, WIDTH - 4)) for mean in means], 1)} if means else {}


def reading(family: Family, rule: References = RULE) -> Family:
    """The family with reference images."""
    make = family.make_net

    def make_net(inside: Any) -> Any:
        net = make(inside)

        class Reading(type(net)):  # type: ignore[misc]
            """The net, its state dict as it was."""

            def forward(self, x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
                pictures = cond.get("pictures")
                told = {name: rows for name, rows in cond.items() if name != "pictures"}
                if pictures is not None:
                    told["text"] = torch.cat([told["text"], pictures], 1)
                return super().forward(x, c_noise, told)

        net.__class__ = Reading
        return net

    return replace(family, references=rule, reference_condition=tokens, make_net=make_net)


class PictureText:
    """A text conditioner that reads the mean colours of the reference images with the caption."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.encoders, self.networks = inner.encoders, inner.networks
        self.rules, self.truncated, self.files, self.tokens = inner.rules, inner.truncated, inner.files, inner.tokens

    def tokens_of(self, texts: Any, references: Any) -> Any:
        means = [pixels.float().mean((1, 2, 3)) / 255 for pixels in references]
        return {**self.inner.tokens(texts), **({"colours": torch.stack(means, 1)} if means else {})}

    def features(self, tokens: Any, trained: Any = ()) -> Any:
        own = {name: rows for name, rows in tokens.items() if name != "colours"}
        found = dict(self.inner.features(own, trained))
        if "colours" in tokens:
            weights = torch.arange(1.0, tokens["colours"].shape[1] + 1, device=tokens["colours"].device)
            found["text"] = found["text"] * (1 + (tokens["colours"] * weights).sum(1))[:, None, None]
        return found


def installed(monkeypatch: Any, rule: References = RULE, in_text: bool = False) -> None:
    """`sd` reads them, while a test runs; also `in_text`, with the captions."""
    load = sd.load

    def loaded(settings: Any, seed: int) -> Family:
        family = reading(load(settings, seed), rule)
        return replace(family, text=PictureText(family.text)) if in_text else family

    monkeypatch.setattr(sd, "load", loaded)


def add_references(folder: Path) -> None:
    """None, one or two reference images for each image of a folder, of several sizes."""
    for number, path in enumerate(sorted(folder.glob("??.png"))):
        for i, name in enumerate(REFERENCES[: number % 3]):
            size = (8 + 8 * (number % 2), 16 + 8 * i, 3)
            pixels = np.random.default_rng([number, i]).integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(pixels).save(path.with_suffix(f".{name}.png"))
