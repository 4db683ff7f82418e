"""ControlNets where images are generated: how strong each is, at which steps, and those that a run did not train.

`generate RUN|BASE controlnets='{PLACE: 0.7}'`; `controlnet_conditioning_scale`, `control_guidance_start`,
`control_guidance_end` and `guess_mode` mean what they mean in diffusers' pipelines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from daguerre import plugins
from daguerre.assembly.parts import Components, beside
from daguerre.conditions.condition import ConditionSettings, computed, drawing
from daguerre.errors import UserError
from daguerre.generation.load import Loading
from daguerre.generation.loras import check_strength
from daguerre.generation.prompts import CONTROL_FROM
from daguerre.models.controlnets import controlled
from daguerre.models.controlnets.places import digest
from daguerre.samplers.known import Known
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import CONTROLS, Cond

ADAPTER = "controlnet"


OPTIONS = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end", "guess_mode")
"""Names of diffusers' pipelines."""


@dataclass(frozen=True)
class Control:
    """The part of a ControlNet in an image."""

    scale: float
    """Its residuals are multiplied by it."""
    start: float = 0.0
    end: float = 1.0
    """It acts from this share of the steps to that one."""
    guess_mode: bool = False
    """Shallow residuals are weakened, and the unguided side has none."""


@dataclass(frozen=True)
class Steering:
    """The ControlNets in all images of a command."""

    controls: tuple[Control, ...] = ()
    """One for each ControlNet of the net; () for none, or as each was trained."""
    condition: ConditionSettings | None = None
    """Computes control images of photos for ControlNets that have no condition of their own."""

    @property
    def metadata(self) -> dict[str, Any]:
        """For the JSON of each image."""
        if not self.controls:
            return {}
        found: dict[str, Any] = {
            "controlnet_conditioning_scale": [each.scale for each in self.controls],
            "control_guidance_start": [each.start for each in self.controls],
            "control_guidance_end": [each.end for each in self.controls],
            "guess_mode": self.controls[0].guess_mode,
        }
        return found if self.condition is None else found | {"condition": self.condition.model_dump(mode="json")}


AS_TRAINED = Steering()


def steering(
    parts: Components,
    given: Mapping[str, Any],
    added: Sequence[float],
    condition: str | dict[str, Any] | None,
    inputs: Mapping[str, int],
) -> Steering:
    """The options of a command, for the ControlNets of these parts.

    Args:
        given: OPTIONS that the command gives, by name.
        added: strengths of the last ControlNets, which the command has put there.
        condition: the condition of photos, as the command gives it.
        inputs: requests with an image of each name.

    Raises:
        UserError: for options without a ControlNet, and for control images that are missing, or that nothing reads.
    """
    nets, chosen = controlled.beside(parts.net), None if condition is None else _condition(condition)
    _check_images(parts, inputs, chosen)
    if idle := [name for name in OPTIONS if name in given] if not nets else []:
        raise UserError(
            f"{idle[0]} is for ControlNets, and this model has none: add one with controlnets='{{PLACE: 0.7}}', or "
            f"remove {idle[0]}",
            code="unused",
            setting=idle[0],
        )
    own = [net.scale for net in nets[: len(nets) - len(added)]]
    if "controlnet_conditioning_scale" in given:
        if not own:
            raise UserError(
                "controlnet_conditioning_scale: controlnets='{PLACE: 0.7}' gives each ControlNet its scale",
                code="unused",
                setting=OPTIONS[0],
            )
        own = _each(given, OPTIONS[0], len(own), 1.0)
        for scale in own:
            check_strength(OPTIONS[0], "a ControlNet", scale, least=0)
    starts, ends = (_each(given, name, len(nets), usual) for name, usual in zip(OPTIONS[1:3], (0.0, 1.0), strict=True))
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start < end <= 1:
            raise UserError(
                f"control_guidance_start is {start:g} and control_guidance_end {end:g}: give shares of the steps, the "
                "start below the end, between 0 and 1",
                setting=OPTIONS[1],
            )
    guess = bool(given.get("guess_mode", False))
    controls = zip([*own, *added], starts, ends, strict=True)
    return Steering(tuple(Control(scale, start, end, guess) for scale, start, end in controls), chosen)


def _each(given: Mapping[str, Any], name: str, count: int, usual: float) -> list[float]:
    """One number for each of so many ControlNets."""
    value = given.get(name, usual)
    found = list(value) if isinstance(value, list) else [value] * count
    if len(found) != count:
        raise UserError(
            f"{name} has {len(found)} numbers and there are {count} ControlNets: give one, or as many",
            code="conflict",
            setting=name,
        )
    return [float(number) for number in found]


def _condition(given: str | dict[str, Any]) -> ConditionSettings:
    """`canny` or `{name: canny, low: 50}`. UserError for one that does not exist, or other settings."""
    settings = {"name": given} if isinstance(given, str) else given
    try:
        found: ConditionSettings = plugins.find("conditions", str(settings.get("name"))).Settings.model_validate(
            settings
        )
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"condition={given}: {what}", setting="condition") from error
    return found


def _check_images(parts: Components, inputs: Mapping[str, int], condition: ConditionSettings | None) -> None:
    """UserError for control images that are missing, and for those that nothing reads."""
    read = parts.attached.images
    if idle := [name for name in CONTROLS if inputs.get(name) and name not in read]:
        known = f"it reads {', '.join(read)}" if read else "it has no ControlNet: add one with controlnets='{PLACE: 1}'"
        raise UserError(f"{idle[0]} is read by nothing in this model; {known}", code="unused", setting=idle[0])
    if inputs.get(CONTROL_FROM) and not read:
        raise UserError(
            f"{CONTROL_FROM} is read by nothing in this model: it has no ControlNet",
            code="unused",
            setting=CONTROL_FROM,
        )
    for name, own in read.items():
        if inputs.get(name):
            continue
        if not inputs.get(CONTROL_FROM):
            raise UserError(
                f"this model reads a control image: give {name}=PICTURE, or {CONTROL_FROM}=PHOTO of "
                "which it is computed",
                code="missing",
                setting=name,
            )
        if own is None and condition is None:
            raise UserError(
                f"{CONTROL_FROM} is a photo, and this ControlNet has no condition that computes a control image of it: "
                f"say which, such as condition=canny, or give {name}=PICTURE",
                code="missing",
                setting="condition",
            )
    photo = inputs.get(CONTROL_FROM)
    if condition is not None and not (photo and any(own is None for own in read.values())):
        why = "every ControlNet here has the condition of its training" if photo else f"without {CONTROL_FROM}=PHOTO"
        raise UserError(f"condition has no effect: {why}; remove it", code="unused", setting="condition")


def with_computed(
    parts: Components, images: Mapping[str, np.ndarray], seed: int, condition: ConditionSettings | None
) -> dict[str, np.ndarray]:
    """The images of a request with control images that are computed of its photo, [H, W, 4] uint8, in place of the
    photo."""
    found = {name: image for name, image in images.items() if name != CONTROL_FROM}
    for name, own in parts.attached.images.items() if CONTROL_FROM in images else ():
        settings = own or condition
        if name not in found and settings is not None:
            found[name] = computed(settings, images[CONTROL_FROM], drawing(parts.seed, name, (seed, 0, 0)))
    return found


def added(loading: Loading, places: Mapping[str, float]) -> Loading:
    """The same weights with ControlNets of these places, by strength. UserError if one cannot be used."""
    if not places:
        return loading
    for place, strength in places.items():
        check_strength("controlnets", place, strength, least=0)
    described = " and ".join(f"{place} x {strength:g}" for place, strength in places.items())
    provenance: dict[str, Any] = {
        "controlnets": {place: [strength, digest(place)] for place, strength in places.items()}
    }
    return replace(
        loading,
        description=f"{loading.description}, with {described}",
        provenance={**loading.provenance, **provenance},
        parts=lambda: _beside(loading.parts(), list(places)),
    )


def _beside(parts: Components, places: Sequence[str]) -> Components:
    """With a ControlNet of each place, which reads the first control image that no other one reads."""
    free = [name for name in CONTROLS if name not in parts.attached.images]
    if len(places) > len(free):
        raise UserError(
            f"controlnets: {len(places)} of them, and control images left are: {', '.join(free) or 'none'}. At most "
            f"{len(CONTROLS)} ControlNets can be used at once",
            code="conflict",
            setting="controlnets",
        )
    kind = plugins.find("adapters", ADAPTER).Settings
    adapters = {
        place: kind(controlnet_model_name_or_path=place, image=image)
        for place, image in zip(places, free, strict=False)
    }
    return beside(parts, adapters)


def steered(
    parts: Components,
    steering: Steering,
    shape: tuple[int, ...],
    settings: SamplingSettings,
    known: Known | None,
    sides: tuple[Cond, Cond | None],
) -> tuple[Cond, Cond | None]:
    """The conditioning of both sides, with the residuals of each ControlNet scaled as `steering` says, for latents of
    this shape. Steps are those that run: fewer from an image."""
    if not steering.controls:
        return sides
    assert parts.objective.diffusion is not None, "generate.generative has refused it"
    objective = parts.objective.diffusion.at(shape, settings)
    grid = objective.grid(settings.num_inference_steps, settings.timestep_spacing)
    c_noise_N = objective.c_noise((known.steps(grid) if known else grid).t_N).to(torch.float32)
    cond, null = dict(sides[0]), None if sides[1] is None else dict(sides[1])
    for own, control in zip(controlled.beside(parts.net), steering.controls, strict=True):
        count, pooled = own.kind.count(own.network), own.network.config.get("global_pool_conditions", False)
        row_R = torch.full((count,), control.scale)
        if control.guess_mode and not pooled:
            row_R = row_R * torch.logspace(-1, 0, count)
        unguided_R = torch.zeros(count) if control.guess_mode or pooled else row_R
        levels_2 = _levels(c_noise_N, control).to(parts.device)
        for side, own_R in ((cond, row_R), (null, unguided_R)):
            if side is not None:
                rows = len(side[own.name])
                side[controlled.scales(own.name)] = own_R.to(parts.device).expand(rows, -1)
                side[controlled.levels(own.name)] = levels_2.expand(rows, -1)
    return cond, null


def _levels(c_noise_N: Tensor, control: Control) -> Tensor:
    """The lowest and the highest c_noise of the steps at which a ControlNet acts, [2]: halfway to those where it does
    not. Step i of N acts from start <= i / N to (i + 1) / N <= end, as in diffusers."""
    count = len(c_noise_N)
    acting = [i for i in range(count) if not (i / count < control.start or (i + 1) / count > control.end)]
    if not acting:
        return torch.tensor([math.inf, -math.inf])
    first, last = acting[0], acting[-1]
    begin = (c_noise_N[first - 1] + c_noise_N[first]) / 2 if first else c_noise_N[0] - _sign(c_noise_N) * math.inf
    end = (
        (c_noise_N[last] + c_noise_N[last + 1]) / 2 if last + 1 < count else c_noise_N[-1] + _sign(c_noise_N) * math.inf
    )
    return torch.stack([begin, end]).sort().values


def _sign(c_noise_N: Tensor) -> float:
    """1 if c_noise rises from the noisiest step to the last, else -1."""
    return 1.0 if c_noise_N[-1] > c_noise_N[0] else -1.0
