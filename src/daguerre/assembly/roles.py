"""The networks of a loss that are the student with other weights: its first ones, and their moving averages.

They are no modules of their own. The student's parameters get the other weights for one pass, as they do for sample
images, so that adapters, kernels and meshes need not know of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from daguerre.assembly import base_digests, first_weights
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.models.frozen import in_evaluation
from daguerre.objectives.objective import AVERAGE, REFERENCE
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.training.state import TrainState
from daguerre.types import Cond


@dataclass(frozen=True, eq=False)
class OtherWeights:
    """The student with other weights in it: called as a `Net`, in evaluation mode and without gradient."""

    net: nn.Module
    trained: Mapping[str, nn.Parameter]
    """This device's parts of the trained parameters, by name."""
    sharding: Sharding
    weights: Mapping[str, Tensor]
    """What takes their place, parts of the same shapes."""
    role: str

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """y [B, C, h, w]. Several devices call it together, before the student: what the student's pass keeps for its
        backward pass would be written over where parameters are split."""
        net = self.net
        # Validation has put the averages into the net already, and the student's own weights in their place.
        weights = {} if self.role == AVERAGE and not net.training else self.weights
        # Autocast remembers narrow copies of parameters, and cannot see that their memory is exchanged.
        torch.clear_autocast_cache()
        try:
            # Without dropout: what the student is compared with must be one function.
            with in_evaluation(net), self.sharding.swapped(net, self.trained, weights):
                y_BCHW: Tensor = net(x_BCHW, c_noise_B, cond)
        finally:
            torch.clear_autocast_cache()
        return y_BCHW


def in_training(parts: Components, state: TrainState) -> Components:
    """The parts with the roles that the loss needs of the student's own weights, before a checkpoint is restored: the
    present ones are the reference, stored in the type in which they are trained and split as they are."""
    roles: dict[str, OtherWeights] = {}
    for role in parts.objective.needs.networks:
        if role == REFERENCE:
            # Only what is trained: with a LoRA these are its first factors alone, as the rest never changes.
            weights: Mapping[str, Tensor] = {name: p.detach().clone() for name, p in state.trained.items()}
        elif role == AVERAGE:
            weights = state.ema.averages
        else:
            continue
        roles[role] = OtherWeights(state.net, state.trained, state.sharding, weights, role)
    return replace(parts, others={**parts.others, **roles})


def of_checkpoint(parts: Components, config: Config, recorded: base_digests.Base, checkpoint: str) -> Components:
    """The parts with the reference that the loss of a checkpoint needs, before its weights are loaded: made again from
    the base and `init_from`, as a run that goes on does. UserError where it is another one than `recorded`."""
    if REFERENCE not in parts.objective.needs.networks:
        return parts
    first_weights.take(parts.attached, config.init_from)
    base_digests.check_same_reference(recorded, base_digests.reference(parts.net, config), checkpoint)
    trained = {name: p for name, p in parts.net.named_parameters() if p.requires_grad}
    first = {name: p.detach().clone() for name, p in trained.items()}
    reference = OtherWeights(parts.net, trained, UNSHARDED, first, REFERENCE)
    return replace(parts, others={**parts.others, REFERENCE: reference})
