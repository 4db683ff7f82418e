"""Warnings where an objective and pretrained weights do not agree, by the scheduler's config of the weights."""

from collections.abc import Collection, Mapping
from typing import Any

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.models.components import ComponentLoader
from daguerre.models.schedulers.betas import PREDICTIONS
from daguerre.models.schedulers.scheduler import other_sampling
from daguerre.models.settings import BASE, DistilledSettings
from daguerre.objectives import edm
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.levels import noise_conditioning
from daguerre.objectives.objective import Objective
from daguerre.objectives.settings import DiffusionSettings, ScheduleSettings


def compatibility_warnings(
    components: ComponentLoader, trained: Collection[str], objective: Objective, null: bool = True
) -> list[str]:
    """A line for each difference between how the weights were trained and are going to be (`null`: in the empty text,
    too), and for each component that starts from random weights and is not among `trained`."""
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
    # Random weights were trained with nothing.
    if components.settings.denoises_anew or diffusion is None:
        return warnings
    warnings += [*_told_by_index(components, null), *_unmarked(components)]
    config = components.scheduler()
    if config is None:
        return warnings
    was = _trained_as(components, config)
    lines = [was] if isinstance(was, str) else differences(was, diffusion)
    return [*warnings, *lines, *other_sampling(config)]


def _unmarked(components: ComponentLoader) -> list[str]:
    """A line for a denoiser from elsewhere that does not say whether it was distilled."""
    settings = components.settings
    if not isinstance(settings, DistilledSettings) or settings.is_distilled is not None:
        return []
    places = {name: settings.places[name] for name in settings.networks("denoiser")}
    return [
        f"model.{name}={place} does not say whether it was distilled to few steps, which training undoes, and is taken "
        "for a base: model.is_distilled=false says that it is one, true that it is not"
        for name, place in places.items()
        if isinstance(place, str) and place != BASE
    ]


def _told_by_index(components: ComponentLoader, null: bool) -> list[str]:
    """A line for each setting that the base's index tells otherwise."""
    settings = components.settings
    told = components.index if settings.told_by_index else {}
    return [
        f"the base's model_index.json says {theirs}: {str(told[theirs]).lower()}, and model.{ours} is "
        f"{str(getattr(settings, ours)).lower()}: set model.{ours}={str(told[theirs]).lower()} to train it as it was"
        for theirs, ours in settings.told_by_index.items()
        if theirs in told and told[theirs] != getattr(settings, ours) and (null or ours not in settings.of_null)
    ]


def prediction_warning(components: ComponentLoader, objective: Objective) -> str | None:
    """A message if the pretrained network predicts something else than is trained; None also where nobody compares."""
    config = None if components.settings.denoises_anew else components.scheduler()
    if config is None or objective.diffusion is None:
        return None
    was = _trained_as(components, config)
    return None if isinstance(was, str) else _predicts(was, objective.diffusion)


def _trained_as(components: ComponentLoader, config: Mapping[str, Any]) -> DiffusionSettings | str:
    """The settings of the objective that a scheduler's config stands for; where there are none, the reason."""
    try:
        section = components.settings.schedulers.objective_of(config)
    except UserError as error:
        # A warning and no refusal: training needs nothing of their scheduler, only this comparison does.
        return f"the objective of the pretrained network cannot be compared: {error}"
    settings: DiffusionSettings = plugins.find("objectives", section["name"]).Settings.model_validate(section)
    return settings


def differences(was: DiffusionSettings, objective: Diffusion) -> list[str]:
    """A line for each difference in what the network learns, and in the noise levels at which it does."""
    predicts = _predicts(was, objective)
    return [*([] if predicts is None else [predicts]), *_levels(was.schedule, objective)]


def _predicts(was: DiffusionSettings, objective: Diffusion) -> str | None:
    now = objective.settings
    if isinstance(was, edm.Settings):
        return _predicts_edm(was, now)
    if was.name == now.name:
        return None
    known = noise_conditioning.NAMES[was.schedule.name]
    if now.schedule.name == "edm" and objective.noise_conditioning.name != known:
        return (
            f"the pretrained network takes the {known} of a noise level as input, but EDM gives it ln(sigma)/4, so it "
            f"has to relearn the noise levels; model.noise_conditioning={known} gives it the {known} of each level"
        )
    return (
        f"the pretrained network predicts {PREDICTIONS[was.name]} (objective.name={was.name}), this recipe trains "
        f"{now.name}: it has to relearn the meaning of its output"
    )


def _predicts_edm(was: edm.Settings, now: DiffusionSettings) -> str | None:
    """A message if the network is EDM's, of Playground v2.5 or CosXL, and is trained otherwise."""
    told = f"objective.prediction={was.prediction} objective.sigma_data={was.sigma_data:g}"
    if not isinstance(now, edm.Settings):
        return (
            f"the pretrained network was trained with EDM's scaling and noise levels (objective.name=edm {told} "
            f"objective.schedule.sigma_max={was.schedule.sigma_max:g}), this recipe trains {now.name}: it has to "
            "relearn the meaning of its input and output"
        )
    if (was.prediction, was.sigma_data) != (now.prediction, now.sigma_data):
        ours = f"objective.prediction={now.prediction} objective.sigma_data={now.sigma_data:g}"
        return f"the pretrained network was trained with {told}, this recipe trains {ours}"
    return None


def _levels(was: ScheduleSettings, objective: Diffusion) -> list[str]:
    """A line for each difference between the noise levels; those of EDM are said with its scaling."""
    now, told = objective.settings.schedule, objective.noise_conditioning.name
    # A network that is given its own number of each level knows the levels of any schedule.
    if was.name == "edm" or (now.name != was.name and told == noise_conditioning.NAMES[was.name]):
        return []
    if now.name != was.name:
        if now.name == "edm":
            return []  # what the network predicts has said it
        levels = "a beta schedule" if was.name == "scaled_linear" else f"schedule {was.name}"
        return [f"the pretrained network was trained with the noise levels of {levels}, not {now.name}"]
    lines = [
        f"the pretrained network was trained with {name} {getattr(was, name)}, this recipe has {getattr(now, name)}"
        for name in ("beta_start", "beta_end", "num_train_timesteps")
        if getattr(was, name) != getattr(now, name)
    ]
    if objective.schedule.variance_preserving and now.shift != was.shift and told == "auto":
        lines.append(_shifted(noise_conditioning.NAMES[was.name]))
    if was.zero_terminal_snr and not now.zero_terminal_snr:
        lines.append(
            "the pretrained network was trained with zero terminal SNR: set objective.schedule.zero_terminal_snr"
        )
    return lines


def _shifted(number: str) -> str:
    return (
        f"objective.schedule.shift gives each {number} another noise level than in pretraining: "
        f"model.noise_conditioning={number} gives the network the {number} of the level"
    )
