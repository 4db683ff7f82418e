"""The ways to a network that the settings of a loss may go; `assembly/` has them: it knows files and the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class NetworkSource(Protocol):
    """Opens the networks of a loss."""

    @property
    def without_weights(self) -> bool:
        """True where networks have numbers alone, on the meta device: no file is read."""

    def seeded(self, make: Callable[[], nn.Module], setting: str) -> nn.Module:
        """The network that `make` builds, its random weights drawn from the run's seed. UserError, which names the
        setting, for numbers that make no network."""

    def tensors(self, place: str) -> Mapping[str, Tensor] | None:
        """All tensors of the files of weights in a folder, or of one file; None where there is no file."""

    def teacher(self, place: str) -> Any:
        """The frozen denoiser of the model at a place, as a `Network` (models/network.py) with its facts. UserError for
        a model of another family than the student's, or with other text encoders."""
