"""An adapter of the tests that reads a control image: a 1x1 convolution of it is added to what the net is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from daguerre import plugins
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.conditions.condition import Images, OptionalCondition
from daguerre.data.images.kinds import ControlName

SEEN: list[dict[str, Tensor]] = []
"""The images of each batch that an adapter of this kind was given."""


class Settings(AdapterSettings):
    """An adapter that reads a control image."""

    name: Literal["hinted"] = "hinted"
    """Name of the adapter."""
    image: ControlName = "control"
    """The control image."""
    condition: OptionalCondition = None
    """How it is computed. null: the data source stores it."""

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        return tuple(trainable[:1])


class Net(nn.Module):
    def __init__(self, base: nn.Module, channels: int, image: str) -> None:
        super().__init__()
        self.base, self.image = (base,), image
        self.hint = nn.Conv2d(3, channels, 1, bias=False)

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
        hint = adaptive_avg_pool2d(cond[self.image], x_BCHW.shape[2:]) if self.image in cond else None
        return self.base[0](x_BCHW if hint is None else x_BCHW + self.hint(hint).to(x_BCHW), c_noise_B, cond)


@dataclass(frozen=True, eq=False)
class Hinted(Trainable):
    net: nn.Module
    settings: Settings
    names: frozenset[str] = frozenset({"hint.weight"})

    @property
    def images(self) -> Images:
        return {self.settings.image: self.settings.condition}

    def condition(self, batch: Any, cond: Any) -> Any:
        SEEN.extend([dict(batch.images)] if "image" in batch.images else [])  # not of one that is generated
        pixels = batch.images[self.settings.image]
        known = pixels[:, 3:] >= 128
        return {**cond, self.settings.image: torch.where(known, pixels[:, :3] / 255, -1.0)}

    def export(self, folder: Path, objective: Any, sampling: Any, about: Any) -> list[str]:
        return []


def attach(settings: Settings, model: Any, seed: int) -> Hinted:
    for parameter in model.net.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    net = Net(model.net, model.latent_shape((3, 64, 64))[0], settings.image)
    if not net.hint.weight.is_meta:
        nn.init.normal_(net.hint.weight, std=0.1, generator=generator)
    return Hinted(net, settings)


@contextmanager
def known() -> Iterator[None]:
    """Within the context the adapter is one of an installed package's."""
    here = Path(__file__)
    with pytest.MonkeyPatch.context() as patch:
        there = {"hinted": plugins.Outside(__name__, here, here, "hints", "1.0")}
        patch.setattr(plugins, "outside", lambda kind: there if kind == "adapters" else {})
        yield
