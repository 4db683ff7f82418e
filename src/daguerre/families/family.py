"""The contract of every family: read this before adding one.

A family is one file of facts in this folder: which networks there are, which of them is trained, how a batch becomes
clean samples and conditioning, how clean samples become pictures, and what a stranger needs to use the result.
A file is a family when it defines `Settings` (a `FamilySettings` whose `family` is the file's name) and

    def load(settings: Settings, seed: int) -> Family

which builds the networks on the CPU in float32, or, under `torch.device("meta")`, without memory and weights. It may
only read the place that the settings name (a shipped folder, a local one, a hub id) and says what it looked for if that
is not there (UserError). Random weights are drawn from `seed` alone, and the caller's random state is left as it was.

Everything meets in one line of the train command, and the loop sees nothing but it:

    loss_fn(net, batch) = objective.loss(net, *family.encode(batch), batch.draws)

A family knows no objective, no sampler, no data source and no optimizer. Cond is its own affair: what `encode` and
`encode_prompts` put in is what `net` takes out; everybody else hands it on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from daguerre.types import Batch, Cond

if TYPE_CHECKING:
    import numpy as np
    import torch

    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


class Family(ABC):
    """Networks around one trainable `net`. Subclasses are final: no family inherits from another."""

    net: nn.Module
    """net(x_BCHW, c_noise_B, cond) -> y_BCHW. Holds all that can be trained and nothing that is frozen. Its state-dict
    names are `COMPONENT.` and the library's own name in that component, so that an export only drops the prefix."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Moves every network, in place, and returns the family."""

    @abstractmethod
    def parts(self) -> dict[str, nn.Module]:
        """Every network by its component name, trained or frozen, for parameter counts."""

    @abstractmethod
    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, h, w) of the clean sample of a picture (3, H, W). UserError if pictures of that size do not fit."""

    @abstractmethod
    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """What `encode` needs of chance, on the CPU, by `daguerre.keys`; keys [B, 3], pixel_shape (3, H, W)."""

    @abstractmethod
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        """Clean samples [B, C, h, w] float32, as the objective noises them, and their conditioning.

        No gradient flows into either, and autocast does not reach in: frozen parts run in float32, or as
        training.frozen_precision says, which is put into them from outside. `batch` is on the family's device and
        `batch.draws` holds what `draws` gave. Sample i depends on its own row alone.
        """

    @abstractmethod
    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """Writes what the networks' usual library opens, with the net's CURRENT weights, in place of `folder`.

        The old content or the new one is there at any moment. Returns what a person must be told: where the
        library cannot do what the run does, and what it does instead.
        """

    @abstractmethod
    def remarks(self, objective: Objective) -> list[str]:
        """What a person should know before this objective is trained from these weights, a line each."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Files without which the weights are worth nothing (a tokenizer's), by relative path, for checkpoints."""

    @abstractmethod
    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        """Which texts are longer than the family reads: by index, what is done ("cut to 77 tokens"). {} for none."""


class TextToImage(Family):
    """A family that draws pictures from prompts."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str], pixel_shape: tuple[int, ...]) -> Cond:
        """Conditioning of prompts for pictures (3, H, W), one row each, on the family's device; equal to what `encode`
        makes of captions. Prompts that are to be drawn together are given together: all rows have one shape."""

    @abstractmethod
    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 of clean samples."""
