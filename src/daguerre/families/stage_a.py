"""Stage A of Stable Cascade in training: an autoencoder with a codebook, whose latents Stage B is trained on.

diffusers' PaellaVQModel (Rampas et al. 2022, arXiv 2211.07292; VQ-VAE, arXiv 1711.00937). Its loss is
objectives/autoencoder.py. Shape letters: B samples, C channels, H and W height and width, K vectors of the codebook, N
cells.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from daguerre.checkpoint.export import replaced
from daguerre.families.cascade import batch_norms
from daguerre.families.cascade import load as cascade_load
from daguerre.families.cascade.codec import STAGE_A_PX, check_sides
from daguerre.families.cascade.settings import STABILITY
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Family
from daguerre.models.network import named
from daguerre.models.pixel_codec import PixelCodec
from daguerre.models.settings import BASE, Component, ComponentSpec, PretrainedSettings
from daguerre.models.weights import load as weights_load
from daguerre.objectives import autoencoder as reconstruction
from daguerre.objectives.autoencoder import Reconstructed
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Unused
from daguerre.types import Cond


class Settings(PretrainedSettings):
    """Stage A of Stable Cascade, which is trained."""

    family: Literal["stage_a"] = "stage_a"
    """Name of the family."""
    pretrained_model_name_or_path: Annotated[str, ADDRESS] = STABILITY
    """The pipeline whose Stage A is trained, where vqgan is `base`."""
    vqgan: Component = BASE
    """Stage A: `base`, a place, Stability's single file, or numbers for random weights. From random weights the norm of
    its latents goes by each batch, which then cannot be cut."""

    pipeline_class: ClassVar[str] = "PaellaVQModel"
    files_tell_numbers: ClassVar[bool] = True
    overflows_float16: ClassVar[bool] = True
    components: ClassVar[Mapping[str, ComponentSpec]] = {"vqgan": ComponentSpec("autoencoder")}
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *PretrainedSettings.unused_when,
        Unused(("scheduler",), lambda own: True, "nothing is noised here"),
    )


class StageA(reconstruction.Autoencoder):
    """A PaellaVQModel as a net: the clean sample is the image itself."""

    latent_terms = frozenset({"codebook", "commitment"})

    def __init__(self, vqgan: Any) -> None:
        super().__init__()
        self.vqgan = vqgan

    @property
    def last_layer(self) -> Any:
        return self.vqgan.out_block[0].weight

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Reconstructed:
        """The image again [B, 3, H, W], by way of the nearest vectors of the codebook. In evaluation by way of the
        latents as they are, which is how Stable Cascade decodes them."""
        z_BCHW = self.vqgan.encode((x_BCHW + 1) / 2, return_dict=False)[0]
        q_BCHW = self.quantised(z_BCHW.detach())
        distance_BCHW = (q_BCHW - z_BCHW.detach()).square(), (q_BCHW.detach() - z_BCHW).square()
        codebook_B, commitment_B = (each.flatten(1).mean(1) for each in distance_BCHW)
        if self.training:
            z_BCHW = z_BCHW + (q_BCHW - z_BCHW).detach()  # gradients pass straight through
        again_BCHW = self.vqgan.decode(z_BCHW, return_dict=False)[0] * 2 - 1
        return Reconstructed(again_BCHW, {"codebook": codebook_B, "commitment": commitment_B})

    def quantised(self, z_BCHW: Tensor) -> Tensor:
        """For each cell the nearest vector of the codebook, with a gradient for that vector."""
        book_KC = self.vqgan.vquantizer.embedding.weight
        z_NC = z_BCHW.permute(0, 2, 3, 1).reshape(-1, z_BCHW.shape[1]).float()
        with torch.no_grad():
            nearest_N = torch.cdist(z_NC, book_KC.float()).argmin(1)
        batch, _, height, width = z_BCHW.shape
        return book_KC[nearest_N].reshape(batch, height, width, -1).permute(0, 3, 1, 2).to(z_BCHW.dtype)


@dataclass(frozen=True)
class Images(PixelCodec):
    """Images of sizes that Stage A can divide."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the image itself. UserError if its sides do not divide."""
        check_sides(pixel_shape, STAGE_A_PX, "Stage A")
        return pixel_shape


def _export(family: Family, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
    """`vqgan/` as diffusers' PaellaVQModel reads it."""
    network: Any = family.components["vqgan"]
    with replaced(folder) as fresh:
        network.save_pretrained(fresh / "vqgan", safe_serialization=True)
    return []


def _spread(book_KC: Tensor, seed: int) -> None:
    """Draws a codebook as the latents are spread, which have unit variance: of vectors that all begin near 0, as the
    library draws them, few would ever be the nearest to a latent."""
    if not book_KC.is_meta:
        with torch.no_grad():
            weights_load.seeded(book_KC.normal_, seed, "model.vqgan")


def load(settings: Settings, seed: int) -> Family:
    """Stage A of these settings, all of which is trained. UserError if it cannot be read or built."""
    components = ComponentLoader(settings, seed)
    network = cascade_load.network(components, "vqgan")
    if not isinstance(settings.vqgan, str):
        _spread(network.vquantizer.embedding.weight, seed)
    if isinstance(settings.vqgan, str):
        batch_norms.keep(network)
    network.requires_grad_(True)
    return Family(
        named({"vqgan": network}, settings.components, {}), StageA(network), Images(), _export,
        trained=frozenset(settings.components), pretrained=components.reading,
    )  # fmt: skip
