"""Norms over the batch in networks of Stable Cascade that are trained.

Those of a network that was trained before keep its statistics, so that its latents stay where they were and samples of
a batch do not meet; those of one from random weights go by each batch.
"""

from typing import Any

from torch import nn


class KeptBatchNorm2d(nn.BatchNorm2d):
    """A norm by running statistics, which training leaves as they are."""

    def train(self, mode: bool = True) -> Any:
        """Stays in evaluation mode."""
        return super().train(False)


def keep(network: nn.Module) -> None:
    """Makes the norms of a network keep their statistics, in place."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = KeptBatchNorm2d
            module.eval()
