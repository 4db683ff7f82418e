"""Stable Diffusion 1.x and 2.x: a KL autoencoder, a text encoder and a UNet with cross attention.

The networks are diffusers' and transformers' own, in the folder layout of a diffusers pipeline. The UNet or the text
encoder or both are trained; the autoencoder is frozen.
"""

from typing import ClassVar, Literal

from daguerre.families.stable_diffusion import facts
from daguerre.families.stable_diffusion import unet as sd_unet
from daguerre.families.stable_diffusion.settings import UNetSettings
from daguerre.families.stable_diffusion.single_file import load as single_file
from daguerre.models.components import ComponentLoader
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.parts import kl, vae
from daguerre.models.parts.text import clip
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.betas import BetaSchedulers
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance

_READS = Reading(layers=(-1,), final_norm=True)
"""StableDiffusionPipeline's reading of the text encoder."""
FACTS = facts.FACTS
ORIGINAL_LAYOUT = single_file


class Settings(UNetSettings):
    """Stable Diffusion 1.x or 2.x."""

    family: Literal["sd"] = "sd"
    """Name of the family."""

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    schedulers: ClassVar[Schedulers] = BetaSchedulers()


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", _READS)
    texts = TextConditioning((encoder,))
    unet = sd_unet.load(components, autoencoder, texts)
    replaced = {
        "text_encoder": lambda: clip.as_read(encoder.encoder, encoder.reading, _READS),
        "vae": lambda: kl.scaled(autoencoder.net),
    }
    notices = []
    if encoder.reading.long:
        notices.append("StableDiffusionPipeline truncates prompts to 77 tokens; this run reads all tokens")
    if not encoder.reading.final_norm:
        notices.append("StableDiffusionPipeline applies the text encoder's last norm, which this run does not")
    index = {"requires_safety_checker": False, "safety_checker": [None, None]}
    exporter = PipelineExporter(settings, index, replaced, tuple(notices))
    return sd_unet.family(components, unet, autoencoder, texts, exporter)
