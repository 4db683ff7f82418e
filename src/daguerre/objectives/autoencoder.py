"""Objective `autoencoder`: an image is made small and made again; no diffusion.

Absolute and squared errors (Kingma and Welling 2014, arXiv 1312.6114), a perceptual distance (LPIPS), a discriminator
(objectives/adversarial.py), and what keeps the latents in order: a KL, or the terms of a codebook. Which networks do
that is a family's affair. Shape letters: B samples, C channels, H and W height and width.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from daguerre import digests
from daguerre.errors import UserError
from daguerre.objectives import adversarial, masks
from daguerre.objectives.adversarial import AdversarialSettings, Balance
from daguerre.objectives.masks import ElementMean
from daguerre.objectives.networks import lpips
from daguerre.objectives.networks.source import NetworkSource
from daguerre.objectives.objective import Example, Nets, NothingLearnt, Objective
from daguerre.objectives.settings import NetworkSettings, ObjectiveSettings
from daguerre.settings import ADDRESS
from daguerre.types import IMAGE, LossTerms, Stateful

WEIGHTS = {"kl": 1e-3, "codebook": 1.0, "commitment": 0.25}
"""Weights of the terms on latents where a recipe sets none, by name (VQ-VAE, arXiv 1711.00937: 1 and 0.25)."""
DISCRIMINATOR, LPIPS = "discriminator", "lpips"
# Equal images have 106 dB: an infinite PSNR would leave no mean of a batch.
_LEAST_SQUARE = 1e-10


class PerceptualSettings(NetworkSettings):
    """LPIPS (arXiv 1801.03924): a distance by the features of VGG16, whose weights are files of this machine."""

    path: Annotated[str, ADDRESS] = Field(min_length=1)
    """A folder with `vgg.pth` of the package lpips and `vgg16-397923af.pth` of torchvision, or one file that holds
    both. Nothing is downloaded."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{8,64}$")
    """SHA-256 of the weights, or its first digits: others are refused. A run records it in any case."""
    weight: float = Field(1.0, gt=0)
    """Weight of the distance that is added to the mean absolute error."""

    @property
    def place(self) -> str:
        return self.path

    def network(self, source: NetworkSource) -> nn.Module:
        """LPIPS, frozen."""
        setting = "objective.perceptual"
        if source.without_weights:
            return lpips.Lpips().eval().requires_grad_(False)
        if (tensors := source.tensors(self.path)) is None:
            raise UserError(
                f"{setting}.path={self.path}: there is no such file here, and nothing is downloaded by itself. Needed "
                f"is a folder with {lpips.PUBLISHED}: give its place, or train without this term ({setting}=null)",
                code="missing",
                setting=f"{setting}.path",
            )
        weights = lpips.weights(tensors, self.path)
        if not (digest := digests.of_tensors(weights)).startswith(self.digest or ""):
            raise UserError(
                f"{self.path} has the weights {digest}, and {setting}.digest={self.digest} asks for others",
                code="changed",
                setting=f"{setting}.digest",
            )
        return lpips.filled(weights)


class Settings(ObjectiveSettings):
    """Reconstruction of images in [-1, 1] through a latent."""

    reconstructs: ClassVar[bool] = True

    name: Literal["autoencoder"] = "autoencoder"
    """Images are reconstructed."""
    absolute_weight: float = Field(1.0, ge=0)
    """Weight of the mean absolute error."""
    square_weight: float = Field(1.0, ge=0)
    """Weight of the mean squared error."""
    kl_weight: float | None = Field(None, ge=0)
    """Weight of the latent's KL, a mean over its elements in nats: more makes latents smoother and images softer.
    null: 0.001 where the encoder of a KL autoencoder is trained."""
    codebook_weight: float | None = Field(None, ge=0)
    """Weight of the term that moves the vectors of a codebook to the latents that they stand for. null: 1 where there
    is a codebook."""
    commitment_weight: float | None = Field(None, ge=0)
    """Weight of the term that keeps latents near the vectors of the codebook. null: 0.25 where there is one."""
    perceptual: PerceptualSettings | None = Field(None, exclude_if=lambda own: own is None)
    """Images should have the features of those that they are made of. Default: no such term."""
    adversarial: AdversarialSettings | None = Field(None, exclude_if=lambda own: own is None)
    """Images should pass for real ones; `{}` for the usual values. Default: no such term."""

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.absolute_weight == self.square_weight == 0 and self.perceptual is None:
            raise ValueError("nothing would be learnt: absolute_weight and square_weight are 0; set one above 0")
        if self.mask is not None and (self.perceptual is not None or self.adversarial is not None):
            raise ValueError(
                "mask weighs the errors of pixels, and perceptual and adversarial look at whole images: remove mask, "
                "or these two"
            )
        return self

    @property
    def networks(self) -> Mapping[str, NetworkSettings]:
        by_role = {DISCRIMINATOR: self.adversarial, LPIPS: self.perceptual}
        return {name: own for name, own in by_role.items() if own is not None}

    def in_use(self) -> Self:
        return self.model_copy(update={"perceptual": None})


class Reconstructed(NamedTuple):
    """Images that a net made again, and its own terms of the loss."""

    images_BCHW: Tensor
    """The images again, in [-1, 1] but for what is too dark or bright."""
    latent_terms: Mapping[str, Tensor]
    """Terms [B] on the latents by name (`WEIGHTS`)."""


class Autoencoder(nn.Module):
    """A net that this objective trains: called with images, it gives `Reconstructed`."""

    latent_terms: frozenset[str] = frozenset()
    """Names of the terms that it gives."""

    @property
    def last_layer(self) -> Tensor:
        """Weights of the layer that makes the images."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Reconstruction(Objective):
    """absolute_weight mean |x' - x| + square_weight mean (x' - x)^2 + the other terms, for each sample. Nothing is
    drawn: there is no noise level, and the latent's noise is the family's."""

    settings: Settings
    elements: ElementMean = field(init=False)
    learnt: Stateful = field(init=False)
    follows_updates: bool = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings.adversarial
        object.__setattr__(self, "elements", masks.build(self.settings.mask))
        object.__setattr__(self, "learnt", NothingLearnt() if settings is None else Balance(settings))
        object.__setattr__(self, "follows_updates", settings is not None)

    def check(self, net: nn.Module) -> None:
        assert isinstance(net, Autoencoder), "assembly/parts.py has asked"
        for name in WEIGHTS.keys() - net.latent_terms:
            if getattr(self.settings, f"{name}_weight") is not None:
                known = ", ".join(f"{each}_weight" for each in sorted(net.latent_terms))
                raise UserError(
                    f"objective.{name}_weight has no effect: what is trained here has "
                    f"{f'other terms on its latents ({known})' if known else 'no term on its latents'}: remove it",
                    code="unused",
                    setting=f"objective.{name}_weight",
                )

    def loss(self, nets: Nets, example: Example[Any]) -> LossTerms:
        """The loss of images [B, 3, H, W]; the net gives `Reconstructed`."""
        x_BCHW = example.clean[IMAGE].float()
        nowhere_B, weight_B1HW = x_BCHW.new_zeros(len(x_BCHW)), example.draws.element_weight
        settings, reconstructed = self.settings, nets.student(x_BCHW, nowhere_B, example.cond[IMAGE])
        assert isinstance(reconstructed, Reconstructed)
        again_BCHW = reconstructed.images_BCHW.float()
        absolute_B = self.elements.mean((again_BCHW - x_BCHW).abs(), weight_B1HW)
        square_B = self.elements.mean((again_BCHW - x_BCHW).square(), weight_B1HW)
        metrics = {"absolute_error": absolute_B, "square_error": square_B, "psnr": psnr(again_BCHW, x_BCHW)}
        loss_B = settings.absolute_weight * absolute_B + settings.square_weight * square_B
        if settings.perceptual is not None:
            # LPIPS squares small differences of features, of which 16 bits would keep little. Without memory, where
            # FLOPs are counted, there is no autocast.
            with nullcontext() if x_BCHW.is_meta else torch.autocast(x_BCHW.device.type, enabled=False):
                metrics[LPIPS] = nets[LPIPS](again_BCHW, x_BCHW)
            loss_B = loss_B + settings.perceptual.weight * metrics[LPIPS]
        observed: dict[str, Tensor] = {}
        plain_B, more_B = loss_B, nowhere_B
        if isinstance(self.learnt, Balance):
            more_B, observed = self._adversarial(self.learnt, nets, loss_B, again_BCHW, x_BCHW, metrics)
        for name, term_B in reconstructed.latent_terms.items():
            weight = getattr(settings, f"{name}_weight")
            plain_B = plain_B + (WEIGHTS[name] if weight is None else weight) * term_B.float()
            metrics[name] = term_B.float()
        return LossTerms(
            loss_B=plain_B + more_B,
            quantile_B=nowhere_B,
            metrics={name: value.detach() for name, value in metrics.items()},
            raw_loss_B=plain_B,  # the discriminator changes what a validation of before would have said
            observed=observed,
        )

    def _adversarial(
        self,
        learnt: Balance,
        nets: Nets,
        loss_B: Tensor,
        again_BCHW: Tensor,
        x_BCHW: Tensor,
        metrics: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The addition to the loss [B] of reconstructions for the discriminator, and what is observed for the balance.
        A pass without gradients measures nothing."""
        discriminator = nets[DISCRIMINATOR]
        its_loss_B, right_B = adversarial.discriminator_loss(discriminator, x_BCHW, again_BCHW)
        fooled_B = -adversarial.judged(discriminator, again_BCHW, learns=False)
        factor = learnt.factor(x_BCHW.device)
        metrics |= {"discriminator_loss": its_loss_B, "discriminator_right": right_B}
        # A factor on the device is not read by the host.
        metrics["adversarial_weight"] = x_BCHW.new_zeros(len(x_BCHW)) + factor
        observed = {}
        if loss_B.requires_grad and learnt.settings.adaptive:
            observed["gradients"] = adversarial.last_layer_gradients((loss_B, fooled_B), nets.student.last_layer)
        return factor * fooled_B + learnt.started * its_loss_B, observed


@torch.no_grad()
def psnr(again_BCHW: Tensor, x_BCHW: Tensor) -> Tensor:
    """Peak signal to noise [B] in dB of images in [-1, 1], before they are rounded to 256 levels."""
    square_B = (again_BCHW.clamp(-1, 1) - x_BCHW).square().mean((1, 2, 3))
    return 10.0 * torch.log10(4.0 / square_B.clamp(min=_LEAST_SQUARE))


def build(settings: Settings) -> Reconstruction:
    return Reconstruction(settings)
