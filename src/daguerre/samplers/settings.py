"""Settings of sampling: for the pictures a run draws of itself and for `generate`. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from daguerre.settings import FREE, Settings


class SamplingSettings(Settings):
    """How pictures are drawn. Nothing here changes what is learnt."""

    sampler: Literal["ddim", "euler", "heun", "dpmpp_2m"] = Field("ddim", json_schema_extra=FREE)
    """Name of the sampler: a file in samplers."""
    num_inference_steps: int = Field(30, ge=1, json_schema_extra=FREE)
    """Steps of the sampler; Heun calls the network twice a step."""
    eta: float = Field(0.0, ge=0, le=1, json_schema_extra=FREE)
    """DDIM's share of fresh noise: 0 is deterministic, 1 ancestral. Other samplers refuse it."""
    guidance_scale: float = Field(5.0, ge=1, json_schema_extra=FREE)
    """Classifier-free guidance: uncond + scale * (cond - uncond); 1 is none."""
    guidance_rescale: float = Field(0.0, ge=0, le=1, json_schema_extra=FREE)
    """Share by which the guided prediction's spread is brought back to the unguided one (arXiv 2305.08891, eq. 15-16)."""
    timestep_spacing: Literal["trailing", "leading", "linspace"] = Field("trailing", json_schema_extra=FREE)
    """How steps are laid on a discrete schedule (arXiv 2305.08891, table 2)."""
    prompts: list[str] | None = Field(None, json_schema_extra=FREE)
    """What is drawn at each save; null: captions of the first held-out samples."""
    negative_prompt: str = Field("", json_schema_extra=FREE)
    """Prompt of the unguided side; the empty one is what caption dropout trains."""
    num_images: int = Field(8, ge=0, json_schema_extra=FREE)
    """Pictures at each save (spread over the prompts), or pictures of one prompt in `generate`."""
    batch_size: int = Field(16, ge=1, json_schema_extra=FREE)
    """Pictures drawn at once. It changes memory and speed, not pictures."""
    seed: int = Field(0, ge=0, json_schema_extra=FREE)
    """Picture i starts from the noise of seed + i alone."""
