"""The adversarial term of an autoencoder: a discriminator that is trained in the same update as what it judges.

Hinge losses and the adaptive weight of VQGAN (Esser et al. 2021, arXiv 2012.09841, eq. 6 and 7). The discriminator's
own loss is added to that of the autoencoder: it judges reconstructions through which no gradient flows, and what the
autoencoder learns from it flows through no weight of the discriminator. So one backward pass gives each its own
gradient, and optimizer, averages, checkpoints and devices know of no second network.

Shape letters: B samples, C channels, H and W height and width, P weights of the last layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from daguerre import devices
from daguerre.errors import UserError
from daguerre.objectives.networks.discriminator import PatchDiscriminator
from daguerre.objectives.networks.source import NetworkSource
from daguerre.objectives.settings import NetworkSettings
from daguerre.types import LossTerms

# Both numbers as in VQGAN's code (calculate_adaptive_weight).
LARGEST = 1e4
"""Largest adaptive weight."""
_SMALL = 1e-4
"""Added to the norm that is divided by."""


class AdversarialSettings(NetworkSettings):
    """A patch discriminator, which learns to tell images from reconstructions, while these learn to pass for images."""

    weight: float = Field(0.5, gt=0)
    """Weight of what the discriminator says of reconstructions; with adaptive, a factor on the balanced weight."""
    adaptive: bool = True
    """Balance the term: its gradient at the last layer is made as long as that of the other terms on reconstructions,
    as measured in the update before. Off: the weight as it is."""
    start_steps: int = Field(0, ge=0)
    """Updates without this term: what is nowhere near an image yet teaches the discriminator nothing."""
    channels: int = Field(64, ge=4, multiple_of=4)
    """Channels of the discriminator's first layer."""
    layers: int = Field(3, ge=1, le=6)
    """Convolutions of the discriminator that halve the sides: how large the patches are (3: about 54 pixels)."""

    def network(self, source: NetworkSource) -> nn.Module:
        """A discriminator with random weights, which is trained."""
        return source.seeded(lambda: PatchDiscriminator(self.channels, self.layers), "objective.adversarial")


def judged(discriminator: nn.Module, images_BCHW: Tensor, learns: bool) -> Tensor:
    """Mean logit [B] of each image; see `PatchDiscriminator.forward`."""
    return discriminator(images_BCHW, learns).float().mean((1, 2, 3))


def discriminator_loss(discriminator: nn.Module, images_BCHW: Tensor, again_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Hinge loss [B] by which the discriminator learns, and the share [B] of patches that it tells right."""
    real, fake = (discriminator(each.detach(), True).float() for each in (images_BCHW, again_BCHW))
    loss_B = 0.5 * (functional.relu(1.0 - real) + functional.relu(1.0 + fake)).mean((1, 2, 3))
    return loss_B, 0.5 * ((real > 0).float() + (fake < 0).float()).mean((1, 2, 3))


def last_layer_gradients(losses: tuple[Tensor, Tensor], last: Tensor) -> Tensor:
    """Gradients [2, P] of the sums of two losses [B] for the weights of the last layer. The graph stays."""
    # Sums, not means: they add up over micro-batches and devices of any size. The update's own backward pass comes
    # later and needs the same graph.
    gradients = [torch.autograd.grad(each.sum(), last, retain_graph=True)[0].float().flatten() for each in losses]
    return torch.stack(gradients).detach()


@dataclass(eq=False)
class Balance:
    """Learns in addition to the weights: updates so far, and the adaptive weight for the next one.

    The weight is |gradient of the reconstruction's terms| / (|gradient of the adversarial one| + 1e-4) at the last
    layer, of means over the whole global batch, at most 1e4: VQGAN's, one update late. So it is a function of global
    batches alone, however they are cut, and a run that goes on has it from its checkpoint.
    """

    settings: AdversarialSettings
    updates: int = 0

    def __post_init__(self) -> None:
        # 0: nothing is measured before the first update, so that one has no such term.
        self.weight = torch.zeros((), dtype=torch.float32, device="cpu")
        self._sums: Tensor | None = None

    def factor(self, device: torch.device) -> Tensor | float:
        """The factor of the adversarial term in this update: 0 before its start."""
        if self.updates < self.settings.start_steps:
            return 0.0
        if not self.settings.adaptive:
            return self.settings.weight
        self.weight = self.weight.to(device)
        return self.settings.weight * self.weight

    @property
    def started(self) -> float:
        """1, or 0 before the start."""
        return float(self.updates >= self.settings.start_steps)

    @torch.no_grad()
    def observe(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Adds the gradients of a micro-batch, those of empty slots with them: they are black images everywhere."""
        if "gradients" in terms.observed:
            gradients = terms.observed["gradients"]
            gradients = gradients.to(devices.widest(gradients.device))
            # The count of samples travels as one more column: one reduction serves both.
            gradients = torch.cat([gradients, gradients.new_full((2, 1), len(valid_B))], 1)
            self._sums = gradients if self._sums is None else self._sums + gradients

    @torch.no_grad()
    def absorb(self, total: Callable[[Tensor], Tensor], skip: Tensor) -> None:
        self.updates += 1
        if self._sums is None:
            return
        sums, self._sums = total(self._sums), None
        others_norm, own_norm = (sums[:, :-1] / sums[:, -1:]).norm(dim=1)
        weight = (others_norm / (own_norm + _SMALL)).clamp(0.0, LARGEST).float()
        # An overflow of fp16 in one update must not become the weight of all that follow.
        keep = skip.to(weight.device) | ~torch.isfinite(weight)
        self.weight = torch.where(keep, self.weight.to(weight.device), weight)

    def state(self) -> dict[str, Tensor]:
        return {
            "adversarial_weight": self.weight.clone(),
            "adversarial_updates": torch.tensor(self.updates, dtype=torch.int64, device="cpu"),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what `state` gave. UserError where a checkpoint has none."""
        if tensors.keys() != {"adversarial_weight", "adversarial_updates"}:
            raise UserError(
                "objective.adversarial: the checkpoint holds no state of an adversarial term: set "
                "objective.adversarial to that of its run, or start a new run from it with init_from",
                code="changed",
                setting="objective.adversarial",
            )
        self.weight = tensors["adversarial_weight"].float().clone()
        self.updates = int(tensors["adversarial_updates"])
