"""Warnings where an objective and pretrained weights do not agree, by the scheduler's config of the weights."""

from collections.abc import Collection
from typing import Any

from daguerre.models.components import ComponentLoader
from daguerre.models.export.scheduler import PREDICTIONS
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
    if components.settings.denoises_anew or not isinstance(objective, Diffusion):
        return warnings
    config = components.scheduler()
    return warnings + ([] if config is None else _differences(config, objective))


def prediction_warning(components: ComponentLoader, objective: Objective) -> str | None:
    """A message if the pretrained network predicts something else than is trained; None also where nobody compares."""
    config = None if components.settings.denoises_anew else components.scheduler()
    return None if config is None or not isinstance(objective, Diffusion) else _predicts(config, objective)


def _predicts(config: dict[str, Any], objective: Diffusion) -> str | None:
    was, now = config.get("prediction_type", "epsilon"), PREDICTIONS.get(objective.settings.name)
    is_edm = "EDM" in config.get("_class_name", "")
    if objective.settings.schedule.name == "edm" and (is_edm or objective.noise_conditioning.name != "timestep"):
        return None if is_edm else _OTHER_CONDITIONING
    if was == now:
        return None
    ours = {theirs: name for name, theirs in PREDICTIONS.items()}.get(was, was)
    return (
        f"the pretrained network predicts {was} (objective.name={ours}), this recipe trains {objective.settings.name}: "
        "it has to relearn the meaning of its output"
    )


def _differences(config: dict[str, Any], objective: Diffusion) -> list[str]:
    settings = objective.settings
    warnings = [text for text in [_predicts(config, objective)] if text is not None]
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
