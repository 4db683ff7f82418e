"""Settings that Stage C and Stage B of Stable Cascade share."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from daguerre.families.cascade import sizes
from daguerre.families.cascade.export import WuerstchenSchedulers
from daguerre.models.parts.settings import ReadingSettings
from daguerre.models.reading import Reading
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import Component, ComponentSpec, DenoiserSettings
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance

STABILITY = "stabilityai/stable-cascade"
READS = Reading(layers=(-1,), final_norm=False, masked=True, pooled="projected")
"""Stable Cascade's reading of its text encoder."""


class CascadeSettings(ReadingSettings, DenoiserSettings):
    """Settings of the stages of Stable Cascade, which read captions by OpenCLIP's bigG."""

    noise_conditioning: Literal["auto", "timestep", "log_sigma", "cosine_time", "flow_time"] = "cosine_time"
    """The network's noise-level input: Stable Cascade's time, from 0 to 1 without a factor, or
    another as in other families."""
    effnet: Component = f"{STABILITY}/effnet_encoder.safetensors"
    """The EfficientNet that makes Stage C's latents of images, frozen; its weights are float32. Of given numbers, what
    is not given is EfficientNet-V2-S."""

    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    schedulers: ClassVar[Schedulers] = WuerstchenSchedulers()
    time_scale: ClassVar[float] = 1.0
    files_tell_numbers: ClassVar[bool] = True
    overflows_float16: ClassVar[bool] = True
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "text_encoder": ComponentSpec("text_encoder", trainable=True),
        "tokenizer": ComponentSpec("tokenizer"),
        "effnet": ComponentSpec("image_encoder"),
    }

    @classmethod
    def published(cls, file: str) -> Mapping[str, Any] | None:
        return sizes.named(file)
