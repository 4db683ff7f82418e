"""The contract between a family and the schedulers of its diffusers pipeline, in both directions.

`Schedulers.objective_of` reads a scheduler's config as the objective that a network was trained with;
`Schedulers.scheduler_of` writes the scheduler that generates what an objective and a sampler generate here. Both are
data: diffusers itself is not imported. A family names one of them in its settings class (`schedulers`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from daguerre import documents, plugins
from daguerre.errors import UserError
from daguerre.formatting import shown
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.settings import SamplingSettings

EQUAL_IN_LAW = "the fresh noise is torch's own, so images are equal in distribution only"
_DIFFERS = "differs_from_training"
"""Key of a config with which diffusers computes another function of the weights than was trained, and the reason."""


@dataclass(frozen=True)
class Scheduler:
    """A diffusers scheduler by class name and config."""

    class_name: str
    config: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    """Differences of its images from ours beyond 2/255 in fp32."""

    def differing(self, reason: str) -> "Scheduler":
        """The scheduler of a pipeline that cannot give the network what it was trained with, for this reason."""
        # diffusers ignores keys that it does not know. Without this one, opening the folder again would silently give
        # another objective than the one that the weights were trained with.
        return replace(self, config=self.config | {_DIFFERS: reason}, notices=[reason, *self.notices])


class Schedulers(ABC):
    """The schedulers of a pipeline class; an objective and its scheduler are each other's inverse, or one refuses."""

    def objective_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The section `objective` of a recipe, for a network that was trained with a scheduler of this config (the
        content of scheduler_config.json). UserError with the reason if there is no such objective here."""
        if _DIFFERS in config:
            raise UserError(
                f"its scheduler does not describe how it was trained: {config[_DIFFERS]}. Give its run or its recipe",
                code="unsupported",
            )
        check_kinds(config)
        # Checked as a recipe is: a number of a file that no objective takes is the file's damage, not a traceback.
        section = self._objective_of(config)
        try:  # the numbers are those of a file
            plugins.find("objectives", section["name"]).Settings.model_validate(section)
        except ValidationError as error:
            raise UserError(
                f"its scheduler's config is damaged: {documents.first_fault(error)}", code="damaged"
            ) from error
        return section

    def sampling_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the section `sampling` that a pipeline with such a scheduler visits other noise levels by than
        those of the objective."""
        return {}

    @abstractmethod
    def _objective_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The section `objective` for a config that describes the training. UserError as from `objective_of`."""

    @abstractmethod
    def scheduler_of(self, objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
        """The scheduler that comes nearest to sampling this objective with these settings; its notices say where its
        images differ from ours."""


def follows_size(objective: Diffusion, sampling: SamplingSettings) -> bool:
    """True if this sampling visits other noise levels for images of another size."""
    is_trained = objective.settings.schedule.resolution_shift.name != "none"
    return is_trained if sampling.shift is None else sampling.shift == "empirical"


def no_objective(what: str, known: str) -> UserError:
    """The error for a scheduler that trains `what`; `known` are those that an objective here stands for."""
    return UserError(
        f"its scheduler {what}, for which there is no objective here; known are {known}. Give its recipe or run",
        code="unsupported",
    )


_SAMPLED_THE_SAME = (
    *("DDIM", "PNDM", "DDPM", "EulerDiscrete", "HeunDiscrete", "LMSDiscrete", "DPMSolverMultistep", "UniPCMultistep"),
    *("DPMSolverSinglestep", "DEISMultistep", "EDMEuler", "EDMDPMSolverMultistep", "DDPMWuerstchen"),
    *("FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"),
)
"""Schedulers for models that any sampler of the same noise levels serves."""
_LCM = "lcm, with few num_inference_steps and the guidance_scale of its page,"
_BY_SAMPLER = {"LCM": _LCM, "FlowMatchLCM": _LCM, "EulerAncestralDiscrete": "euler_ancestral"}
_SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
"""Keys of configs that lay steps on other noise levels than the spacings that there are here."""


_CLIPPING = {
    "thresholding": "limits each estimate of the image by its own largest values (thresholding)",
    "clip_sample": "cuts each estimate of the image at a fixed value (clip_sample)",
}
"""Keys of configs that change each step's estimate, and the words for it."""


_TEXTS = ("_class_name", "prediction_type", "beta_schedule", "time_shift_type", "sigma_schedule", "algorithm_type")
_FLAGS = (
    *("use_flow_sigmas", "use_dynamic_shifting", "invert_sigmas", "stochastic_sampling", "rescale_betas_zero_snr"),
    *_SPACINGS,
    *_CLIPPING,
)
_NUMBERS = (
    *("num_train_timesteps", "beta_start", "beta_end", "sigma_min", "sigma_max", "sigma_data", "rho", "s", "scaler"),
    *("shift", "flow_shift", "shift_terminal", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
)
_LARGEST = 1e15


def check_kinds(config: Mapping[str, Any]) -> None:
    """UserError for a value that is read here and is of another kind than diffusers has there: "false" would be true,
    and a list has no name. null is what a key that is not there is."""
    kinds: dict[str, tuple[type, ...]] = {**dict.fromkeys(_TEXTS, (str,)), **dict.fromkeys(_FLAGS, (bool,))}
    for name, value in config.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
        fits = is_number if name in _NUMBERS else isinstance(value, kinds.get(name, object))
        if value is not None and not fits:
            wanted = "text" if name in _TEXTS else "true or false" if name in _FLAGS else "a finite number"
            said = f"{name} is {shown(value)}, and must be {wanted}"
            raise UserError(f"its scheduler's config is damaged: {said}", code="damaged")


def other_sampling(config: Mapping[str, Any]) -> list[str]:
    """A line for a scheduler's config that asks for another kind of sampling than is used here unless it is chosen."""
    check_kinds(config)
    named = str(config.get("_class_name")).removesuffix("Scheduler")
    lines = []
    if config.get("stochastic_sampling"):
        lines.append(f"its scheduler adds fresh noise (stochastic_sampling): sampler={_LCM} samples as it does")
    elif named in _BY_SAMPLER:
        lines.append(f"its scheduler is {named}Scheduler: sampler={_BY_SAMPLER[named]} samples as it does")
    elif named not in (*_SAMPLED_THE_SAME, "None"):
        lines.append(f"its scheduler is {named}Scheduler, which no sampler here is: images differ from diffusers'")
    if named.startswith("EDM") and config.get("sigma_schedule", "karras") != "karras":
        kind = config["sigma_schedule"]
        lines.append(f"its scheduler lays its steps as {kind} says; here they are laid as karras says, by rho")
    lines += [
        f"its scheduler lays its steps by {key}, which no spacing here does" for key in _SPACINGS if config.get(key)
    ]
    lines += [f"its scheduler {what}, and nothing here does" for key, what in _CLIPPING.items() if config.get(key)]
    if str(kind := config.get("algorithm_type")).startswith("sde"):
        lines.append(f"its scheduler adds fresh noise (algorithm_type={kind}): sampler=dpmpp_2m_sde samples as it does")
    return lines
