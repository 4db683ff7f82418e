"""Stable Diffusion 1.x and 2.x: a KL autoencoder, a text encoder and a UNet with cross attention.

The networks are diffusers' and transformers' own, in the folder layout of a diffusers pipeline. The UNet is trained,
the text encoder beside it or instead of it if the settings say so; the autoencoder (models/vae.py) is frozen. Where
they come from is in models/components.py, how captions are read in models/text_conditioning.py, which scheduler goes
into an export in models/export/scheduler.py.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from daguerre.models import text_encoder, vae
from daguerre.models import unet as models_unet
from daguerre.models.components import Components
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.settings import UNetSettings
from daguerre.models.text_conditioning import Texts
from daguerre.models.text_encoder import TextReader
from daguerre.models.vae import VAE


class Settings(UNetSettings):
    """Stable Diffusion 1.x or 2.x."""

    family: Literal["sd"] = "sd"
    """Name of the family."""

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = Components(settings, seed)
    autoencoder = vae.load(components)
    reader = text_encoder.load(components, "text_encoder", "tokenizer", layer=-1, final_norm=True)
    texts = Texts((reader,))
    unet = models_unet.load(components, autoencoder, texts)
    index = {
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
    }
    replaced = {"text_encoder": lambda: _as_read(reader), "vae": lambda: _as_scaled(autoencoder)}
    exporter = PipelineExporter(settings.pipeline_class, index, replaced, tuple(_differences(reader)))
    return models_unet.family(components, unet, autoencoder, texts, exporter)


def _as_read(reader: TextReader) -> nn.Module:
    """The text encoder without the layers that are not read: StableDiffusionPipeline reads the last one."""
    shorter = reader.layer != -1 and reader.final_norm
    return text_encoder.cut_to(reader, reader.layers + reader.layer + 1) if shorter else reader.encoder


def _as_scaled(autoencoder: VAE) -> nn.Module:
    """The autoencoder without statistics: StableDiffusionPipeline applies the scaling factor alone."""
    return vae.folded(autoencoder.net) if autoencoder.has_statistics else autoencoder.net


def _differences(reader: TextReader) -> list[str]:
    """Notices where StableDiffusionPipeline reads captions otherwise."""
    found = []
    if reader.long:
        found.append("StableDiffusionPipeline cuts prompts to one window; this run reads them whole")
    if not reader.final_norm:
        found.append("StableDiffusionPipeline applies the text encoder's last norm, which this run leaves out")
    return found
