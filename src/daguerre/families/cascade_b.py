"""Stage B of Stable Cascade: the latents of an EfficientNet to those of Stage A, which decodes images.

Pernias et al. 2023 (arXiv 2306.00637). It compresses images together with Stage A and the EfficientNet, and decodes
what Stage C, the family cascade_c, generates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from daguerre import keys as keyed
from daguerre.families.cascade import batch_norms, export, facts, net, sizes
from daguerre.families.cascade import load as cascade_load
from daguerre.families.cascade.codec import STEP_PX, StageA, read_by_stage_b, scaled, scaled_size
from daguerre.families.cascade.settings import READS, CascadeSettings
from daguerre.models.components import ComponentLoader
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family, Moments
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.settings import BASE, Component, ComponentSpec
from daguerre.settings import FREE, Unused
from daguerre.types import IMAGE, Batch, Cond, Prompt

FACTS = facts.FACTS


class Settings(CascadeSettings):
    """Stage B of Stable Cascade."""

    family: Literal["cascade_b"] = "cascade_b"
    """Name of the family."""
    decoder: Component = BASE
    """Stage B, by diffusers' name."""
    size: Literal["3B", "700M"] | None = None
    """Size of a decoder that starts from random weights (decoder=null), as Stability's configs name them: 3B has 1.6
    billion parameters. null: the base's."""
    vqgan: Component = BASE
    """Stage A, frozen; its weights are float32."""
    effnet_dropout: float = Field(0.1, ge=0, le=1)
    """Share of samples whose compressed image is dropped (zeros), independent of captions."""
    effnet_scale: tuple[float, float] = (0.5, 1.0)
    """Each image is compressed at a scale between these two, drawn each time: 1024 px at 0.5 to 1 are 16 to 32
    cells a side. Lower ones train a higher compression."""
    reconstruction_scale: float = Field(0.75, gt=0, le=2, json_schema_extra=FREE)
    """The scale at which an image is compressed that is made again, by `generate` and for the sample images of a run:
    0.75 makes 24 cells of 1024 px, a 42nd of each side, as Stability's notebook does."""

    reconstructs: ClassVar[bool] = True
    decoding: ClassVar[tuple[str, ...]] = ("reconstruction_scale",)
    pipeline_class: ClassVar[str] = "StableCascadeDecoderPipeline"
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"sampler": "euler_ancestral", "num_inference_steps": 10, "guidance_scale": 1.1},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "decoder": ComponentSpec("denoiser", trainable=True),
        **CascadeSettings.components,
        "effnet": ComponentSpec("image_encoder", trainable=True),
        "vqgan": ComponentSpec("autoencoder"),
    }
    unused_when: ClassVar[tuple[Unused, ...]] = (
        *CascadeSettings.unused_when,
        Unused(
            ("size",), lambda own: own.decoder is not None, "the size is that of model.decoder, unless that is null"
        ),
    )

    @field_validator("effnet_scale")
    @classmethod
    def _range_rises(cls, scale: tuple[float, float]) -> tuple[float, float]:
        low, high = scale
        if not 0 < low <= high <= 2:
            raise ValueError(f"[{low:g}, {high:g}] must rise, from above 0 up to 2, such as [0.5, 1]")
        return scale


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", READS)
    texts = TextConditioning((encoder,))
    networks = {"decoder": cascade_load.network(components, "decoder", sizes.STAGE_B.get(settings.size or ""))}
    networks |= texts.networks | {name: cascade_load.network(components, name) for name in ("effnet", "vqgan")}
    cascade_load.check_widths(settings.components, networks, encoder)
    if isinstance(settings.effnet, str):
        batch_norms.keep(networks["effnet"])
    reading = _Reading(networks["effnet"], settings.effnet_scale, settings.reconstruction_scale, seed)
    exporter = PipelineExporter(
        settings,
        {"latent_dim_scale": 10.67},
        {},
        unlisted=("effnet",),
        example=export.OF_STAGE_B,
        unknown=export.UNKNOWN,
    )
    return net.family(
        components, "decoder", networks,
        StageA(networks["vqgan"], settings.effnet_dropout),
        texts, exporter,
        batch_condition=reading.of_batch, prompt_condition=reading.of_prompts, prompt_images=(IMAGE,),
        uncached_images="Stage B is conditioned on each image at another scale each time (model.effnet_scale)",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Reading:
    """The compressed image that Stage B reads."""

    effnet: Any
    trained_scale: tuple[float, float]
    """Range of scales in training."""
    scale: float
    """Scale of an image that is made again."""
    seed: int

    @torch.no_grad()
    def of_batch(self, batch: Batch, moments: Moments) -> Cond:
        """`effnet` [B, 16, H/8, W/8] of a batch, each image at its own scale; zeros where it is dropped. For an
        EfficientNet that is trained `pixels`, all at the scale of the first image, and `effnet_kept` [B]."""
        low, high = self.trained_scale
        scales_B = low + (high - low) * keyed.batch_uniforms(self.seed, "effnet scale", batch.keys)  # never on a device
        if any(p.requires_grad for p in self.effnet.parameters()):
            size = scaled_size(self.effnet, batch.pixels_BCHW, float(scales_B[0]))
            return {"pixels": scaled(batch.pixels_BCHW, size), "effnet_kept": batch.draws["effnet_kept"]}
        made = self._read(batch.pixels_BCHW, scales_B.tolist())
        return {"effnet": batch.draws["effnet_kept"].to(made.device)[:, None, None, None] * made}

    @torch.no_grad()
    def of_prompts(self, prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], unguided: bool) -> Cond:
        """The same of the images of prompts; zeros without an image, and on the unguided side."""
        _, height, width = pixel_shape
        channels = int(self.effnet.config.latent_channels)
        rows = torch.zeros(len(prompts), channels, height // STEP_PX, width // STEP_PX)
        for row, prompt in enumerate(prompts):
            if IMAGE in prompt.images and not unguided:
                pixels_CHW = torch.from_numpy(prompt.images[IMAGE]).permute(2, 0, 1)
                rows[row] = self._read(pixels_CHW[None].to(self.effnet.device), [self.scale])[0].cpu()
        return {"effnet": rows}

    def _read(self, pixels_BCHW: Tensor, scales: Sequence[float]) -> Tensor:
        height, width = (side // STEP_PX for side in pixels_BCHW.shape[2:])
        with torch.autocast(pixels_BCHW.device.type, enabled=False):
            return read_by_stage_b(self.effnet, pixels_BCHW, scales, (height, width))
