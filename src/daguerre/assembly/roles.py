"""The networks of a loss that are the student with other weights: its first ones, and their moving averages.

They are no modules of their own. The student's parameters get the other weights for one pass, as they do for sample
images, so that adapters, kernels and meshes need not know of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from daguerre.assembly.parts import Components
from daguerre.objectives.objective import AVERAGE, REFERENCE
from daguerre.training.state import TrainState
from daguerre.types import Cond


@dataclass(frozen=True, eq=False)
class OtherWeights:
    """The student with other weights in it: called as a `Net`, in evaluation mode and without gradient."""

    state: TrainState
    weights: Mapping[str, Tensor]
    """This device's parts of the trained parameters, by name."""
    role: str

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """y [B, C, h, w]. Several devices call it together, before the student: what the student's pass keeps for its
        backward pass would be written over where parameters are split."""
        net, was_training = self.state.net, self.state.net.training
        # Validation has put the averages into the net already, and the student's own weights in their place.
        weights = {} if self.role == AVERAGE and not was_training else self.weights
        # Without dropout: what the student is compared with must be one function.
        net.eval()
        # Autocast remembers narrow copies of parameters, and cannot see that their memory is exchanged.
        torch.clear_autocast_cache()
        try:
            with self.state.sharding.swapped(net, self.state.trained, weights):
                y_BCHW: Tensor = net(x_BCHW, c_noise_B, cond)
        finally:
            torch.clear_autocast_cache()
            net.train(was_training)
        return y_BCHW


def in_training(parts: Components, state: TrainState) -> Components:
    """The parts with the roles that the loss needs of the student's own weights, before a checkpoint is restored: the
    present ones are the reference, stored in the type in which they are trained and split as they are."""
    roles: dict[str, OtherWeights] = {}
    for role in parts.objective.needs.networks:
        if role == REFERENCE:
            # Only what is trained: with a LoRA these are its first factors alone, as the rest never changes.
            first = {name: p.detach().clone() for name, p in state.trained.items()}
            roles[role] = OtherWeights(state, first, role)
        elif role == AVERAGE:
            roles[role] = OtherWeights(state, state.ema.averages, role)
    return replace(parts, others={**parts.others, **roles})
