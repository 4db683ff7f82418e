"""Settings of sampling: for the images that a run generates and for `generate`. No torch here."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from daguerre import plugins
from daguerre.documents import first_fault
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE, Named, Settings, Unused

SCHEDULERS = {
    "DDIMScheduler": "ddim",
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "HeunDiscreteScheduler": "heun",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "unipc",
    "LCMScheduler": "lcm",
}
"""diffusers' schedulers and the samplers here that give the same images."""
CHURN = ("s_churn", "s_tmin", "s_tmax", "s_noise")
"""Settings of Heun's fresh noise."""


@lru_cache
def keywords(sampler: str) -> tuple[str, ...]:
    """Keyword-only arguments of a sampler's `sample`: what it takes beyond denoiser, noise and grid.

    Read from the file's syntax tree, so that settings are checked without importing torch.
    """
    file = plugins.file_of(plugins.module("samplers", sampler))
    assert file is not None
    tree = plugins.parsed(file)
    defs = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "sample")
    return tuple(argument.arg for argument in next(defs).args.kwonlyargs)


def empirical_shift(area_px: float, num_steps: int) -> float:
    """The shift e^mu with which FLUX.2 is sampled, for images of this area in pixels and this number of steps.

    Source: black-forest-labs/flux2 (src/flux2/sampling.py). mu is a straight line in the number of tokens, which stand
    for 16 x 16 pixels, at 10 steps and at 200, and between these in the number of steps.
    """
    tokens = area_px / 16**2
    few, many = 8.73809524e-5 * tokens + 1.89833333, 1.6927e-4 * tokens + 0.45666666
    mu = many if tokens > 4300 else few + (many - few) * (num_steps - 10) / 190
    return math.exp(mu)


class SamplingSettings(Settings):
    """Sampling. Nothing here changes what is learnt."""

    sampler: Annotated[str, Named("samplers")] = Field("ddim", json_schema_extra=FREE)
    """Name of the sampler: a file in samplers."""
    num_inference_steps: int = Field(30, ge=1, json_schema_extra=FREE)
    """Steps of the sampler; Heun calls the network twice a step."""
    eta: float = Field(0.0, ge=0, le=1, json_schema_extra=FREE)
    """DDIM's share of fresh noise: 0 is deterministic, 1 ancestral. Other samplers refuse it."""
    s_churn: float = Field(0.0, ge=0, allow_inf_nan=False, json_schema_extra=FREE)
    """Heun's fresh noise over all steps (arXiv 2206.00364, algorithm 2); 0: no noise. Other samplers refuse it."""
    s_tmin: float = Field(0.0, ge=0, allow_inf_nan=False, json_schema_extra=FREE)
    """With s_churn: the lowest noise level sigma = s/a to which noise is added."""
    s_tmax: float | None = Field(None, ge=0, allow_inf_nan=False, json_schema_extra=FREE)
    """With s_churn: the highest such level. null: no bound."""
    s_noise: float = Field(1.0, gt=0, allow_inf_nan=False, json_schema_extra=FREE)
    """With s_churn: standard deviation of the noise that is added; a little above 1 makes up for lost detail."""
    guidance_scale: float = Field(5.0, ge=0, allow_inf_nan=False, json_schema_extra=FREE)
    """Scale of the guidance, in the notation of the family's own pipeline. Classifier-free guidance is uncond + scale *
    (cond - uncond); 1 does not guide, nor does 0, as models of few steps have it in diffusers."""
    guidance_rescale: float = Field(0.0, ge=0, le=1, json_schema_extra=FREE)
    """Share by which the guided prediction's spread is brought back to the conditional one's (2305.08891, eq. 16)."""
    timestep_spacing: Literal["trailing", "leading", "linspace"] | list[float] = Field(
        "trailing", json_schema_extra=FREE
    )
    """How steps are laid on a discrete schedule (arXiv 2305.08891, table 2); or the noise levels themselves, noisiest
    first, as shares of noise in (0, 1]: those that weights were distilled to."""
    shift: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["empirical"] | None = Field(
        None, json_schema_extra=FREE
    )
    """Shift of the noise levels that are visited, in place of objective.schedule.shift and what follows the size: above
    1 more steps at much noise. empirical: FLUX.2's, of the size and num_inference_steps. null: as in training."""
    height: int | None = Field(None, ge=1, json_schema_extra=FREE)
    """Height of an image in pixels; which there are is the family's affair. null: data.resolution."""
    width: int | None = Field(None, ge=1, json_schema_extra=FREE)
    """Width of an image in pixels. null: data.resolution."""
    prompts: list[str] | None = Field(None, json_schema_extra=FREE)
    """What is generated at each save; null: captions of the first held-out samples."""
    prompts_file: Annotated[str | None, ADDRESS] = Field(None, min_length=1, json_schema_extra=FREE)
    """File of prompts in place of `prompts`: text with one a line, or CSV, TSV or JSONL with a column `prompt`."""
    negative_prompt: str = Field("", json_schema_extra=FREE)
    """Prompt of the unguided side; the empty one is what caption dropout trains."""
    num_images: int = Field(8, ge=0, json_schema_extra=FREE)
    """Images at each save (spread over the prompts), or images of one prompt in `generate`."""
    batch_size: int = Field(16, ge=1, json_schema_extra=FREE)
    """Images generated at once. It changes memory and speed, not images."""
    seed: int = Field(0, ge=0, le=1 << 62, json_schema_extra=FREE)
    """Image i starts from the noise of seed + i alone."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("s_tmin", "s_tmax", "s_noise"), lambda own: own.s_churn == 0, "no effect while s_churn is 0"),
        Unused(("shift",), lambda own: own.levels is not None, "timestep_spacing has the noise levels themselves"),
        Unused(("prompts",), lambda own: None not in (own.prompts, own.prompts_file), "prompts_file has the prompts"),
    )

    @field_validator("sampler")
    @classmethod
    def _sampler_exists(cls, sampler: str) -> str:
        plugins.check("samplers", sampler)
        return sampler

    @property
    def levels(self) -> list[float] | None:
        """The noise levels that are visited, as shares of noise; None where they follow from the schedule."""
        return self.timestep_spacing if isinstance(self.timestep_spacing, list) else None

    @property
    def churn(self) -> dict[str, Any]:
        """The settings of churn; none without churn."""
        return {name: getattr(self, name) for name in CHURN} if self.s_churn > 0 else {}

    def shift_at(self, area_px: float) -> float | None:
        """The shift of the levels that are visited for images of this area in pixels; None: as in training."""
        return empirical_shift(area_px, self.num_inference_steps) if self.shift == "empirical" else self.shift

    def size_px(self, resolution: int) -> tuple[int, int]:
        """Height and width of the images of a run of this resolution."""
        return self.height or resolution, self.width or resolution

    @model_validator(mode="after")
    def _levels_fall(self) -> SamplingSettings:
        if (levels := self.levels) is None:
            return self
        if not levels or levels != sorted({*levels}, reverse=True) or not 0 < levels[-1] <= levels[0] <= 1:
            raise ValueError(f"timestep_spacing is {levels}: give shares of noise that fall, from 1 at most to above 0")
        if len(levels) != self.num_inference_steps:
            raise ValueError(
                f"timestep_spacing has {len(levels)} noise levels and num_inference_steps is "
                f"{self.num_inference_steps}: set num_inference_steps={len(levels)}, or timestep_spacing=trailing"
            )
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> SamplingSettings:
        """Refuses what the rest of these settings would make idle; a value that says "none" is never refused."""
        for name in ("eta", "s_churn"):
            if getattr(self, name) > 0 and name not in keywords(self.sampler):
                takes = ", ".join(sampler for sampler in plugins.names("samplers") if name in keywords(sampler))
                raise ValueError(
                    f"{name} is {getattr(self, name)} but {self.sampler} does not use it: set {name}=0, or "
                    f"sampler={takes}"
                )
        # Refused here, as no noise level would be between them and churn would silently do nothing.
        if self.s_tmax is not None and self.s_tmin > self.s_tmax:
            raise ValueError(
                f"s_tmin is {self.s_tmin:g} and s_tmax is {self.s_tmax:g}: noise is added between these levels, so "
                "s_tmin must be the smaller one"
            )
        return self

    def changed(self, values: Mapping[str, Any]) -> SamplingSettings:
        """These settings with other values, by name; prompts take the place of a file. UserError for what cannot be."""
        given = self.model_dump(exclude_unset=True)
        if values.get("prompts") is not None:
            given.pop("prompts_file", None)
        try:
            return type(self).model_validate({**given, **values})
        except ValidationError as error:
            raise UserError(f"sampling: {first_fault(error)}", setting="sampling") from error
