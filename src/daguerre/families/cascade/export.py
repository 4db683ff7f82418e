"""The scheduler of diffusers' Stable Cascade pipelines, and where it generates otherwise than we do."""

from collections.abc import Mapping
from typing import Any

import torch

from daguerre.models.schedulers.betas import PREDICTIONS
from daguerre.models.schedulers.scheduler import EQUAL_IN_LAW, Scheduler, Schedulers, no_objective
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.levels.schedules import Cosine
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


class WuerstchenSchedulers(Schedulers):
    """DDPMWuerstchenScheduler, which has the cosine schedule without a shift, ancestral steps and eps alone."""

    def _objective_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        named, prediction = config.get("_class_name"), config.get("prediction_type", "epsilon")
        predictions = {theirs: ours for ours, theirs in PREDICTIONS.items() if ours != "flow"}
        law = config.get("s", Cosine.offset), config.get("scaler", 1.0)
        if named != WUERSTCHEN or prediction not in predictions or law != (Cosine.offset, 1.0):
            numbers = f"s {law[0]} and scaler {law[1]}"
            known = f"{', '.join(predictions)} by {WUERSTCHEN} with s {Cosine.offset} and scaler 1"
            raise no_objective(f"is {named} with {numbers}, which predicts {prediction}", known)
        return {"name": predictions[prediction], "schedule": {"name": "cosine"}}

    def scheduler_of(self, objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
        schedule, told, notices = objective.settings.schedule, objective.noise_conditioning, list[str]()
        levels = objective.sampled(sampling)
        if schedule.name == "cosine" and (shift := levels.schedule.settings.shift) != 1:
            notices.append(f"this run samples with shift {shift:g}, which diffusers does not have: images differ")
        if sampling.sampler != "euler_ancestral" and (sampling.sampler, sampling.eta) != ("ddim", 1.0):
            notices.append(f"this run samples with {sampling.sampler}, {WUERSTCHEN} by ancestral steps: images differ")
        if sampling.guidance_rescale:
            notices.append("diffusers' pipelines of Stable Cascade have no guidance_rescale: images differ")
        if told.name == "cosine_time" and schedule.name == "cosine":
            first = float(levels.c_noise(torch.ones((), dtype=torch.float64)))
            notices.append(
                f"at the first step diffusers tells the network the time 1, which no training has; this run {first:.4f}"
            )
        notices.append(EQUAL_IN_LAW)
        config: dict[str, Any] = {"s": Cosine.offset, "scaler": 1.0}
        if objective.settings.name in PREDICTIONS and objective.settings.name != "eps":
            # diffusers has no such attribute there, and says that it is ignored; objective_of reads it
            config["prediction_type"] = PREDICTIONS[objective.settings.name]
        chosen = Scheduler(WUERSTCHEN, config, notices)
        wrong = (
            "diffusers' pipelines of Stable Cascade take eps on cosine alone: their images of these weights are wrong"
        )
        if schedule.name != "cosine" or not isinstance(told.clock, Cosine) or told.clock.settings.shift != 1:
            return chosen.differing(
                f"this run predicts {objective.settings.name} on the schedule {schedule.name} with the noise "
                f"conditioning {told.name}, and {wrong}; use `daguerre generate`"
            )
        if objective.settings.name != "eps":
            reason = f"this run predicts {objective.settings.name} on the schedule cosine, and {wrong}"
            notices.insert(0, f"{reason}; use `daguerre generate`")
        return chosen
