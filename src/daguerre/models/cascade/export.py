"""The scheduler of diffusers' Stable Cascade pipelines, and where it generates otherwise than we do."""

from typing import Any

import torch

from daguerre.models.export.scheduler import PREDICTIONS, Scheduler
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.settings import SamplingSettings

WUERSTCHEN = "DDPMWuerstchenScheduler"
UNKNOWN = ("guidance_rescale", "eta")
"""Settings of sampling that diffusers' pipelines of Stable Cascade do not take."""
OF_STAGE_B = """\
# diffusers 0.42 cannot open such a folder by itself, nor one that it has written: it has moved the class of Stage A.
from diffusers import DDPMWuerstchenScheduler, StableCascadeDecoderPipeline, StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

kinds = {{"decoder": StableCascadeUNet, "vqgan": PaellaVQModel, "scheduler": DDPMWuerstchenScheduler}}
kinds |= {{"text_encoder": CLIPTextModelWithProjection, "tokenizer": CLIPTokenizer}}
parts = {{name: kind.from_pretrained("path/to/this/folder", subfolder=name) for name, kind in kinds.items()}}
pipe = StableCascadeDecoderPipeline(**parts)
image = pipe(image_embeddings, "a prompt", {call}).{result}  # with those of a StableCascadePriorPipeline
"""
"""How Stage B is opened by diffusers."""


def scheduler(objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
    """DDPMWuerstchenScheduler, which has the cosine schedule without a shift, ancestral steps and eps alone."""
    schedule, notices = objective.settings.schedule, []
    if objective.settings.name != "eps" or schedule.name != "cosine":
        notices.append(
            f"this run predicts {objective.settings.name} on the schedule {schedule.name}, and diffusers' pipelines of "
            "Stable Cascade take eps on cosine alone: their images of these weights are wrong; use `daguerre generate`"
        )
    levels = objective.sampled(sampling.shift)
    if schedule.name == "cosine" and (shift := levels.schedule.settings.shift) != 1:
        notices.append(f"this run samples with shift {shift:g}, which diffusers does not have: images differ")
    if sampling.sampler != "euler_ancestral" and (sampling.sampler, sampling.eta) != ("ddim", 1.0):
        notices.append(f"this run samples with {sampling.sampler}, {WUERSTCHEN} by ancestral steps: images differ")
    if sampling.guidance_rescale:
        notices.append("diffusers' pipelines of Stable Cascade have no guidance_rescale: images differ")
    if objective.noise_conditioning.name == "cosine_time" and schedule.name == "cosine":
        first = float(levels.c_noise(torch.ones((), dtype=torch.float64)))
        notices.append(
            f"at the first step diffusers tells the network the time 1, which no training has; this run {first:.4f}"
        )
    notices.append("the fresh noise is torch's own, so images are equal in distribution only")
    config: dict[str, Any] = {"s": 0.008, "scaler": 1.0}
    if objective.settings.name != "eps":  # diffusers has no such attribute there, and says that it is ignored
        config["prediction_type"] = PREDICTIONS[objective.settings.name]
    return Scheduler(WUERSTCHEN, config, notices)
