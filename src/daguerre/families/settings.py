"""Settings that families share. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from daguerre.settings import ADDRESS, FREE, Idle, Settings

SINGLE_FILES = (".safetensors", ".ckpt", ".pt", ".bin")
"""How the name of a file ends that holds a model, or one of its networks."""
BASE = "base"
"""A component of `pretrained_model_name_or_path`."""
Component = Annotated[str | dict[str, Any] | None, ADDRESS]
"""Where a network comes from: `base`, another place, the numbers of its config, or null: the base's numbers."""


class FamilySettings(Settings):
    """What every family's `Settings` starts from. A family's file adds its own fields and narrows `family`."""

    family: str
    """Name of the family: a file in families."""


class DenoiserSettings(FamilySettings):
    """What families share whose network is trained by diffusion."""

    noise_conditioning: Literal["auto", "timestep", "log_sigma", "cosine_time", "flow_time"] = "auto"
    """The number by which the network is told the noise level. auto: the time of the objective's own schedule;
    timestep: the index of the level in the table without a shift, which Stable Diffusion's networks know; log_sigma:
    ln(sigma)/4 (EDM); cosine_time: Stable Cascade's time; flow_time: s / (a + s)."""
    time_scale: ClassVar[float] = 1000.0
    """What times in [0, 1] are multiplied by: diffusers' UNets embed numbers from 0 to 1000."""


class LatentSettings(DenoiserSettings):
    """What families that train on the latents of a frozen autoencoder share: z = (x - mean) scaling_factor / std."""

    sample_posterior: bool = True
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off: take the posterior's mean."""
    scaling_factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Latents are multiplied by this. null: the autoencoder's own."""
    latents_mean: list[float] | None = None
    """Mean of each latent channel, subtracted before scaling. null: the autoencoder's own, if it has one."""
    latents_std: list[float] | None = None
    """Standard deviation of each latent channel, divided by before scaling. null: the autoencoder's own, if it has
    one. Zeros for the mean and ones here switch the autoencoder's off."""

    @model_validator(mode="after")
    def _statistics_are_whole(self) -> Self:
        mean, std = self.latents_mean, self.latents_std
        if (mean is None) != (std is None):
            given, absent = ("latents_mean", "latents_std") if std is None else ("latents_std", "latents_mean")
            raise ValueError(f"{given} is given without {absent}: give both, one number a latent channel, or neither")
        if mean is not None and std is not None and len(mean) != len(std):
            raise ValueError(
                f"latents_mean has {len(mean)} numbers and latents_std {len(std)}: give one a latent channel"
            )
        if std is not None and not all(number > 0 for number in std):
            raise ValueError(f"latents_std is {std}: every number must be above 0")
        return self


class PretrainedSettings(LatentSettings):
    """What families share whose networks are those of a diffusers pipeline: a UNet, an autoencoder, text encoders.

    A component is `base` (it comes from pretrained_model_name_or_path), another place (a pipeline's folder, the
    component's own folder, a hub id, a .safetensors file, OWNER/NAME/FILE.safetensors of the hub), the numbers of its
    config (random weights drawn from the run's seed), or null (random weights, with the base's own numbers).
    """

    pretrained_model_name_or_path: Annotated[str, ADDRESS]
    """The base: `quickstart` (shipped), a folder in diffusers' layout, a hub id such as
    `stabilityai/stable-diffusion-2-base`, which is read from the local cache first, or a single-file checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of a base on the hub. null: its main branch."""
    variant: str | None = None
    """Weights of the base in another form, such as `fp16`: files named diffusion_pytorch_model.fp16.safetensors."""
    pickled_weights: bool = Field(False, json_schema_extra=FREE)
    """Also take old pickled files (.bin, .ckpt) where there are no others: read as tensors alone, converted once."""
    unet: Component = BASE
    """The UNet. Of given numbers, channels, cross_attention_dim and sample_size follow from the other networks; what
    else is not given takes diffusers' defaults."""
    vae: Component = BASE
    """The autoencoder, frozen; its weights are float32."""
    text_encoder: Component = BASE
    """The text encoder: CLIP's or T5's."""
    tokenizer: Annotated[str, ADDRESS] = BASE
    """The tokenizer that belongs to it."""
    scheduler: Annotated[str | None, ADDRESS] = Field(BASE, json_schema_extra=FREE)
    """Place of the scheduler's config that the pretrained UNet was trained with: where the objective differs from it,
    a line says so. null: no comparison."""
    train_unet: bool = True
    """Train the UNet."""
    train_text_encoder: bool = False
    """Train the text encoder with it."""
    text_encoder_layer: int | None = Field(None, le=-1)
    """Which hidden state is read: -1 the last, -2 the one before. null: the family's own."""
    text_encoder_final_norm: bool | None = None
    """Whether the encoder's last norm is applied to that hidden state. null: the family's own."""
    long_prompts: bool = False
    """Read prompts of any length in windows of 75 tokens, each with its own start and end; off: cut them, counted."""

    trainable: ClassVar[tuple[str, ...]] = ("train_unet", "train_text_encoder")
    components: ClassVar[tuple[str, ...]] = ("unet", "vae", "text_encoder")
    """Fields that are networks."""
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer",)
    """Fields that are tokenizers."""
    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(
            ("variant",),
            lambda own: own.pretrained_model_name_or_path.endswith(SINGLE_FILES),
            "a single file has none",
        ),
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not any(getattr(self, name) for name in self.trainable):
            raise ValueError(f"nothing is trained: set one of {', '.join(self.trainable)} to true")
        return self
