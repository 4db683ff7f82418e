"""Full training: every parameter of the family's net that it uses is trained. Adds nothing to the networks."""

from __future__ import annotations

from typing import Literal

from torch import nn

from daguerre.adapters.settings import AdapterSettings


class Settings(AdapterSettings):
    """Trains all weights of the net."""

    name: Literal["full"] = "full"
    """Name of the adapter."""


def apply(settings: Settings, net: nn.Module) -> nn.Module:
    """Marks what is trained and returns the module whose state the run saves: the net itself, as the family made it.

    Only what the family leaves out, such as layers behind the hidden state that is read, stays untrained.
    """
    return net
