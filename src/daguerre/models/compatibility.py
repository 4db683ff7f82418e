"""Warnings where an objective and pretrained weights do not agree, by the scheduler's config of the weights."""

from collections.abc import Collection, Mapping
from typing import Any

from daguerre.models.components import ComponentLoader
from daguerre.models.export.scheduler import EDM_PREDICTIONS, PREDICTIONS
from daguerre.models.weights.files import read_json
from daguerre.objectives import edm
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Objective


def compatibility_warnings(components: ComponentLoader, trained: Collection[str], objective: Objective) -> list[str]:
    """A line for each difference between how the weights were trained and are going to be, and for each component that
    starts from random weights and is not among `trained`."""
    places = components.settings.places
    warnings = [
        f"model.{name} has random weights and is not trained, which only makes sense in a test"
        for name in places
        if components.is_random(name) and name not in trained
    ]
    warnings += [
        f"model.{name} starts from random weights: sizes that are not given are diffusers' defaults, not those of "
        f"the base model; model.{name}=null uses the base model's"
        for name, place in places.items()
        if isinstance(place, dict) and components.base_has(name)
    ]
    diffusion = objective.diffusion
    if components.settings.denoises_anew or diffusion is None:
        return warnings
    warnings += _told_by_index(components)
    config = components.scheduler()
    return warnings + ([] if config is None else [*_differences(config, diffusion), *other_sampling(config)])


def _told_by_index(components: ComponentLoader) -> list[str]:
    """A line for each setting that the base's index tells otherwise."""
    settings = components.settings
    if not settings.told_by_index or not components.of_base():
        return []
    path = components.base / "model_index.json"
    index = read_json(path) if path.is_file() else {}
    return [
        f"the base's model_index.json says {theirs}: {str(index[theirs]).lower()}, and model.{ours} is "
        f"{str(getattr(settings, ours)).lower()}: set model.{ours}={str(index[theirs]).lower()} to train it as it was"
        for theirs, ours in settings.told_by_index.items()
        if theirs in index and index[theirs] != getattr(settings, ours)
    ]


_SAMPLED_ALIKE = (
    *("DDIM", "PNDM", "DDPM", "EulerDiscrete", "HeunDiscrete", "LMSDiscrete", "DPMSolverMultistep", "UniPCMultistep"),
    *("DPMSolverSinglestep", "DEISMultistep", "EDMEuler", "EDMDPMSolverMultistep", "DDPMWuerstchen"),
    "FlowMatchEulerDiscrete",
)
"""Schedulers for models that any sampler of the same noise levels serves."""
_BY_SAMPLER = {
    "LCM": "lcm, with few num_inference_steps and the guidance_scale of its page,",
    "EulerAncestralDiscrete": "euler_ancestral",
}


def other_sampling(config: Mapping[str, Any]) -> list[str]:
    """A line for a scheduler's config that asks for another kind of sampling than is used here unless it is chosen."""
    named = str(config.get("_class_name")).removesuffix("Scheduler")
    lines = []
    if named in _BY_SAMPLER:
        lines.append(f"its scheduler is {named}Scheduler: sampler={_BY_SAMPLER[named]} samples as it does")
    elif named not in (*_SAMPLED_ALIKE, "None"):
        lines.append(f"its scheduler is {named}Scheduler, which no sampler here is: images differ from diffusers'")
    if named.startswith("EDM") and config.get("sigma_schedule", "karras") != "karras":
        kind = config["sigma_schedule"]
        lines.append(f"its scheduler lays its steps as {kind} says; here they are laid as karras says, by rho")
    return lines


def prediction_warning(components: ComponentLoader, objective: Objective) -> str | None:
    """A message if the pretrained network predicts something else than is trained; None also where nobody compares."""
    config = None if components.settings.denoises_anew else components.scheduler()
    return None if config is None or objective.diffusion is None else _predicts(config, objective.diffusion)


def _predicts(config: dict[str, Any], objective: Diffusion) -> str | None:
    was, now = config.get("prediction_type", "epsilon"), PREDICTIONS.get(objective.settings.name)
    if str(config.get("_class_name")).startswith("EDM"):
        return _predicts_edm(config, objective)
    if objective.settings.schedule.name == "edm" and objective.noise_conditioning.name != "timestep":
        return _OTHER_CONDITIONING
    if was == now:
        return None
    ours = {theirs: name for name, theirs in PREDICTIONS.items()}.get(was, was)
    return (
        f"the pretrained network predicts {was} (objective.name={ours}), this recipe trains {objective.settings.name}: "
        "it has to relearn the meaning of its output"
    )


def of_edm(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The objective of a scheduler of EDM; None for what it cannot predict."""
    kinds = {theirs: ours for ours, theirs in EDM_PREDICTIONS.items()}
    if (prediction := config.get("prediction_type", "epsilon")) not in kinds:
        return None
    usual = {"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}
    schedule = {"name": "edm", **{name: config.get(name, value) for name, value in usual.items()}}
    own = {"prediction": kinds[prediction], "sigma_data": config.get("sigma_data", 0.5)}
    return {"name": "edm", **own, "schedule": schedule}


def _predicts_edm(config: dict[str, Any], objective: Diffusion) -> str | None:
    """A message if the network is EDM's, of Playground v2.5 or CosXL, and is trained otherwise."""
    was, now = of_edm(config), objective.settings
    if was is None:
        return f"the pretrained network predicts {config.get('prediction_type')} with EDM's scaling, which is not known"
    told = f"objective.prediction={was['prediction']} objective.sigma_data={was['sigma_data']:g}"
    if not isinstance(now, edm.Settings):
        return (
            f"the pretrained network was trained with EDM's scaling and noise levels (objective.name=edm {told} "
            f"objective.schedule.sigma_max={was['schedule']['sigma_max']:g}), this recipe trains {now.name}: it has to "
            "relearn the meaning of its input and output"
        )
    if (was["prediction"], was["sigma_data"]) != (now.prediction, now.sigma_data):
        ours = f"objective.prediction={now.prediction} objective.sigma_data={now.sigma_data:g}"
        return f"the pretrained network was trained with {told}, this recipe trains {ours}"
    return None


def _differences(config: dict[str, Any], objective: Diffusion) -> list[str]:
    settings = objective.settings
    warnings = [text for text in [_predicts(config, objective)] if text is not None]
    if str(config.get("_class_name")).startswith("EDM"):
        return warnings
    told = objective.noise_conditioning.name
    if config.get("_class_name") == "DDPMWuerstchenScheduler":
        own = "the pretrained network was trained with the noise levels of schedule cosine, not"
        return warnings + ([] if settings.schedule.name == "cosine" else [f"{own} {settings.schedule.name}"])
    if settings.schedule.name == "edm" or (settings.schedule.name != "scaled_linear" and told == "timestep"):
        return warnings
    if settings.schedule.name != "scaled_linear":
        return [
            *warnings,
            "the pretrained network was trained with the noise levels of a beta schedule, not "
            f"{settings.schedule.name}",
        ]
    for theirs, name in (("beta_start", "beta_start"), ("beta_end", "beta_end"), ("num_train_timesteps",) * 2):
        if theirs in config and config[theirs] != getattr(settings.schedule, name):
            ours = getattr(settings.schedule, name)
            warnings.append(
                f"the pretrained network was trained with {theirs} {config[theirs]}, this recipe has {ours}"
            )
    if settings.schedule.shift != 1 and told == "auto":
        warnings.append(_SHIFTED)
    if bool(config.get("rescale_betas_zero_snr")) and not settings.schedule.zero_terminal_snr:
        warnings.append(
            "the pretrained network was trained with zero terminal SNR: set objective.schedule.zero_terminal_snr"
        )
    return warnings


_OTHER_CONDITIONING = (
    "the pretrained network takes timesteps from 0 to 999 as input, but EDM gives it ln(sigma)/4, so it has to relearn "
    "the noise levels; model.noise_conditioning=timestep gives it the timestep of each level"
)
_SHIFTED = (
    "objective.schedule.shift gives each timestep another noise level than in pretraining: "
    "model.noise_conditioning=timestep gives the UNet the timestep of the level"
)
