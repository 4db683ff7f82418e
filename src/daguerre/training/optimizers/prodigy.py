"""Prodigy (Mishchenko and Defazio 2023, arXiv 2306.06101), by prodigyopt: it estimates the learning rate itself."""

import math
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart, not_installed
from daguerre.training.settings import AdamSettings


class Settings(AdamSettings):
    """Prodigy (Mishchenko and Defazio 2023): AdamW whose learning rate follows from how far the weights have come."""

    made_with: ClassVar[tuple[str, ...]] = ("d0",)  # where the estimate begins, and the unit of the sums it is made of
    needs_all_gradients: ClassVar[str] = (
        "prodigy estimates its learning rate from the gradients of all weights before it moves one"
    )

    name: Literal["prodigy"] = "prodigy"
    """Name of the optimizer."""
    learning_rate: float = Field(1.0, gt=0)
    """Factor of the learning rate that it estimates; leave it at 1."""
    beta3: float | None = Field(None, ge=0, lt=1)
    """Decay of what the estimate is made of; null for the root of beta2."""
    d0: float = Field(1e-6, gt=0)
    """First estimate."""
    d_coef: float = Field(1.0, gt=0)
    """Factor of the estimate: .5 or 2 are the way to tune it."""
    growth_rate: float | None = Field(None, gt=1)
    """Largest factor by which the estimate grows in an update; null for any."""
    use_bias_correction: bool = False
    """Correct the moments' bias as Adam does."""
    safeguard_warmup: bool = False
    """Leave the learning rate out of the estimate's divisor; use it with a warm-up."""

    @field_validator("learning_rates", "learning_rate_factors")
    @classmethod
    def _one_for_all(cls, rates: dict[str, float]) -> dict[str, float]:
        if rates:
            raise ValueError(
                "prodigy estimates one learning rate for all parameters: remove it, or use another optimizer"
            )
        return rates


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, which reads numbers from the device in every update. UserError without prodigyopt."""
    try:
        import prodigyopt
    except ImportError:
        raise not_installed("prodigy", "prodigyopt") from None
    optimizer = prodigyopt.Prodigy(
        decay_groups(settings, trained),
        betas=(settings.beta1, settings.beta2),
        beta3=settings.beta3,
        eps=settings.epsilon,
        d0=settings.d0,
        d_coef=settings.d_coef,
        growth_rate=settings.growth_rate or float("inf"),
        use_bias_correction=settings.use_bias_correction,
        safeguard_warmup=settings.safeguard_warmup,
    )
    # One estimate for all parameters, which the library keeps in its groups.
    counters = ("k", "d", "d_max", "d_numerator", "d_denom", "d_hat")
    return [OptimizerPart(optimizer, "asked", counters, groups_together=True)]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of one parameter's state: two moments (one where beta1 is 0), where it started, and a sum of gradients.
    One that starts as zeros keeps no start."""
    return (12 if settings.beta1 == 0 else 16) * math.prod(shape)


def update_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes taken during an update: next to nothing. `daguerre plan` cannot compute it without memory."""
    return 0
