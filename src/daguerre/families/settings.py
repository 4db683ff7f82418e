"""Settings that every family shares. No torch here."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from daguerre.settings import Settings


class FamilySettings(Settings):
    """What every family's `Settings` starts from. A family's file adds its own fields and narrows `family`."""

    family: str
    """Name of the family: a file in families."""


class LatentSettings(FamilySettings):
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
