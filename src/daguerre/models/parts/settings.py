"""Settings of families that have text encoders, a transformer and an autoencoder. No torch here."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from daguerre.models.settings import BASE, Component, ComponentSpec, LatentSettings, PretrainedSettings
from daguerre.settings import ADDRESS


class CaptionedSettings(PretrainedSettings):
    """Settings of families that read captions by a text encoder; each further one has settings of its own with a
    number, such as text_encoder_2."""

    text_encoder: Component = BASE
    """The text encoder: CLIP's or T5's."""
    tokenizer: Annotated[str, ADDRESS] = BASE
    """The tokenizer that belongs to it."""


class ReadingSettings(CaptionedSettings):
    """Settings of families whose recipes may choose what is read of the text encoder, where it is a CLIP."""

    text_encoder_layer: int | None = Field(None, le=-1)
    """Which hidden state is read: -1 the last, -2 the one before. null: the family's own."""
    text_encoder_final_norm: bool | None = None
    """Whether the encoder's last norm is applied to that hidden state. null: the family's own."""
    long_prompts: bool = False
    """Read prompts of any length in windows of 75 tokens, each with its own start and end; off: cut them, counted."""


class TransformerSettings(CaptionedSettings, LatentSettings):
    """Settings of families with a transformer that is trained by flow matching, an autoencoder and text encoders."""

    transformer: Component = BASE
    """The transformer: also a single file of its authors or ComfyUI, whose numbers are the base's."""
    vae: Component = BASE
    """The autoencoder, frozen; its weights are float32."""
    assistant: Annotated[str | None, ADDRESS] = None
    """A LoRA that acts, frozen, where losses are computed, and not in images and exports: one that undoes a
    distillation, so that distilled weights can be trained. A file, a run's folder, OWNER/NAME/FILE.safetensors of the
    hub, or OWNER/NAME."""

    time_scale: ClassVar[float] = 1.0  # diffusers' transformers multiply by 1000 themselves
    overflows_float16: ClassVar[bool] = True
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "transformer": ComponentSpec("denoiser", trainable=True),
        "vae": ComponentSpec("autoencoder"),
        "text_encoder": ComponentSpec("text_encoder", trainable=True),
        "tokenizer": ComponentSpec("tokenizer"),
    }
    """Each is a field, too: where it comes from."""
