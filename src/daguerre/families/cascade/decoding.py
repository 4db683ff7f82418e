"""Stage B and Stage A as the decoder of Stage C's latents: a diffusion of its own behind the one that made them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from daguerre import plugins
from daguerre.families.cascade import codec
from daguerre.families.cascade.net import denoise
from daguerre.models import interpolation
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import FREE, Choice
from daguerre.types import Latents

_OF_STAGES = ("num_inference_steps", "guidance_scale", "guidance_rescale", "shift", "sampler", "prediction")


class DecodingSettings(Choice):
    """The way from Stage C's latents to images."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(_OF_STAGES, ("stages",))

    name: Literal["previewer", "stages"] = Field("previewer", json_schema_extra=FREE)
    """previewer: at once, with a quarter of the detail of what is trained on; stages: by Stage B and Stage A."""
    num_inference_steps: int = Field(10, ge=1, json_schema_extra=FREE)
    """Stage B's steps."""
    guidance_scale: float = Field(1.1, ge=1, allow_inf_nan=False, json_schema_extra=FREE)
    """Stage B's guidance, away from no compressed image and the negative prompt; 1: no guidance."""
    guidance_rescale: float = Field(0.0, ge=0, le=1, json_schema_extra=FREE)
    """Stage B's rescale of guidance."""
    shift: float = Field(1.0, gt=0, allow_inf_nan=False, json_schema_extra=FREE)
    """Shift of the noise levels that Stage B visits."""
    sampler: Literal["euler_ancestral", "ddim", "euler", "heun", "dpmpp_2m"] = Field(
        "euler_ancestral", json_schema_extra=FREE
    )
    """Stage B's sampler."""
    prediction: Literal["eps", "x0", "v"] = Field("eps", json_schema_extra=FREE)
    """The objective that Stage B was trained with."""

    def sampling(self) -> SamplingSettings:
        """The settings of Stage B's sampling."""
        rescale = self.guidance_rescale if self.guidance_scale > 1 else 0.0
        return SamplingSettings(
            sampler=self.sampler,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            guidance_rescale=rescale,
            shift=self.shift,
        )

    def objective(self) -> Diffusion:
        """The objective whose levels and predictions these are."""
        own = plugins.find("objectives", self.prediction)
        built: Diffusion = own.build(own.Settings.model_validate({"schedule": {"name": "cosine"}}))
        return built.with_noise_conditioning("cosine_time", 1.0)


@dataclass(frozen=True, eq=False)
class Stages:
    """Stage B and Stage A."""

    unet: Any
    vqgan: Any
    texts: TextConditioning
    settings: DecodingSettings

    def __call__(self, latents: Latents, size_px: tuple[int, int]) -> Tensor:
        """RGB in [0, 1], [B, 3, H, W]: Stage B gets the latents and the prompt of each row. Its noise is of each
        row's own seed."""
        device, sampling = latents.x0_BCHW.device, self.settings.sampling()
        prompts = latents.prompts
        texts = [prompt.text for prompt in prompts] + [prompt.negative for prompt in prompts]
        features = self.texts.features(self.texts.tokens([*texts, *interpolation.ends(prompts)]))
        pooled = interpolation.between({"pooled": features["pooled"]}, prompts)["pooled"]
        given = latents.x0_BCHW.float()
        cond = {"pooled": pooled[: len(given)], "effnet": given}
        null = {"pooled": pooled[len(given) :], "effnet": given.new_zeros(given.shape)}
        shape = (int(self.vqgan.config.latent_channels), *(side // codec.STAGE_A_PX for side in size_px))
        seeds, objective = list(latents.seeds), self.settings.objective()
        x0 = draw(
            objective,
            partial(denoise, self.unet, None),
            cond,
            null,
            shape,
            seeds,
            sampling,
            device,
            purpose="sample/decoder",
        )
        return codec.pixels(self.vqgan, x0)
