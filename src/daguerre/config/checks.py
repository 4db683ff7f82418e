"""Checks that no section of the config can make alone: settings of two sections, or of the whole run, that do not fit.

What one section can check is in that section's settings class. A check gets the sections it needs, so that it also runs
where others are faulty, and all problems can be reported at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

from daguerre.adapters.settings import AdapterSettings
from daguerre.config.errors import Problem
from daguerre.data.settings import DataSettings
from daguerre.models.settings import FamilySettings
from daguerre.objectives.settings import ObjectiveSettings
from daguerre.samplers.settings import SamplingSettings
from daguerre.storage import address
from daguerre.training.settings import (
    EMASettings,
    LRSchedulerSettings,
    OptimizerSettings,
    ProfilerSettings,
    TrainingSettings,
    ValidationSettings,
    largest_divisor,
)


def problems(sections: Mapping[str, Any]) -> list[Problem]:
    """The problems among these sections; a check whose sections are not all there is left out."""
    found: list[Problem] = []
    for needed, check in CHECKS.items():
        if all(name in sections for name in needed):
            found += check(*(sections[name] for name in needed))
    return found


def _batches(training: TrainingSettings) -> list[Problem]:
    """The global batch is the per-device batch times the accumulation times the devices, which nobody knows yet."""
    path = "training.global_batch_size"
    whole, part = training.global_batch_size, training.per_device_batch_size
    accumulation = training.gradient_accumulation_steps
    if whole is None:
        text = (
            "must be given (or training.per_device_batch_size): samples of one update\nAllowed: a whole number from 1"
        )
        return [] if part else [Problem(path, text)]
    if part and accumulation > 1 and whole % (part * accumulation):
        product = f"per_device_batch_size {part} x gradient_accumulation_steps {accumulation}"
        return [Problem(path, f"is not a multiple of {product}: remove one of the three", whole)]
    name, divisor = ("per_device_batch_size", part) if part else ("gradient_accumulation_steps", accumulation)
    if whole % divisor:
        text = f"must be a multiple of {name}, which is {divisor}: {largest_divisor(whole, divisor)} would divide it"
        return [Problem(path, text, whole)]
    return []


def _warmup(training: TrainingSettings, lr_scheduler: LRSchedulerSettings) -> list[Problem]:
    """Warm-up and decay fit into the run, as far as durations of the same unit can be compared."""
    duration = training.duration
    # With `up to` they may be shorter than their epochs: the run itself tells (`summary.describe_warmup`).
    warmup, decay = (None if own and own.at_most else own for own in (lr_scheduler.warmup, lr_scheduler.decay))
    if warmup and warmup.unit == duration.unit and warmup.number > duration.number:
        text = f"is longer than the run: training.duration is {str(duration)!r}; set lr_scheduler.warmup to less"
        return [Problem("lr_scheduler.warmup", text, str(warmup))]
    risen = warmup.number if warmup and decay and warmup.unit == decay.unit else 0
    if decay and decay.unit == duration.unit and risen + decay.number > duration.number:
        text = "is longer than the run" + (f" after its warm-up of {str(warmup)!r}" if risen else "")
        return [Problem("lr_scheduler.decay", f"{text}: training.duration is {str(duration)!r}", str(decay))]
    return []


def _masks(data: DataSettings, objective: ObjectiveSettings) -> list[Problem]:
    """Checks that masks are named only for a loss that reads them."""
    if objective.mask is not None:
        return []
    given = [
        (f"data.sources.{name}.{field}", getattr(own, field))
        for name, own in data.sources.items()
        for field in ("mask_dir", "mask_column")
        if getattr(own, field, None) is not None
    ]
    given += [("data.alpha_mask", True)] if data.alpha_mask else []
    text = "has no effect without objective.mask: remove it, or set objective.mask={} (docs/objectives.md)"
    return [Problem(path, text, value) for path, value in given]


def _raw_validation(validation: ValidationSettings, ema: EMASettings, optimizer: OptimizerSettings) -> list[Problem]:
    """The raw weights are measured, too, where there is an average of them."""
    if not validation.raw_weights or ema.enabled or optimizer.averages_weights:
        return []
    text = "no average of the weights is kept (ema.enabled=false), so that the loss is that of the raw ones: remove it"
    return [Problem("validation.raw_weights", text, True)]


def _own_averages(optimizer: OptimizerSettings, ema: EMASettings, schedule: LRSchedulerSettings) -> list[Problem]:
    """An optimizer that averages by itself needs no other averages, and weighs updates by their learning rates."""
    if not optimizer.averages_weights:
        return []
    found = []
    if ema.enabled:
        text = (
            f"optimizer {optimizer.name!r} has its own averaged weights, and an EMA of the weights at which it "
            "computes gradients is of no use: set ema.enabled=false (its averages are used wherever an EMA would be)"
        )
        found.append(Problem("ema.enabled", text, True))
    if ema.post_hoc:
        text = f"optimizer {optimizer.name!r} has its own averaged weights, so these averages are of no use: remove it"
        found.append(Problem("ema.post_hoc", text, list(ema.post_hoc)))
    if schedule.name != "constant":
        text = f"the averages of optimizer {optimizer.name!r} replace a decaying learning rate: set it to constant"
        found.append(Problem("lr_scheduler.name", text, schedule.name))
    return found


def _in_backward(optimizer: OptimizerSettings, training: TrainingSettings) -> list[Problem]:
    """Refuses what needs all gradients at once where each is freed as soon as it has moved its weights. Accumulation
    that follows from batch sizes, and devices, are known later (`batch_sizes.check_uncut_batches`)."""
    if not optimizer.in_backward:
        return []
    path, found = "optimizer.in_backward", []
    if training.capture:
        text = (
            "moves weights inside the backward pass, and training.capture=true records passes that leave gradients: "
            "remove one of them"
        )
        found.append(Problem(path, text, optimizer.in_backward))
    if training.gradient_accumulation_steps > 1:
        text = (
            "frees each gradient before the next micro-batch could be added to it: remove "
            "training.gradient_accumulation_steps, or this"
        )
        found.append(Problem(path, text, optimizer.in_backward))
    if optimizer.in_backward == "at_once" and training.max_grad_norm is not None:
        text = (
            "moves weights before the norm of all gradients is known, so that none can be clipped: set "
            "training.max_grad_norm=null, or optimizer.in_backward=after_norm"
        )
        found.append(Problem(path, text, "at_once"))
    if optimizer.in_backward == "at_once" and (
        training.weights_dtype == "float16" or training.mixed_precision == "fp16"
    ):
        text = (
            "moves weights before it is known whether the loss was scaled too much, which float16 finds out by "
            "overflows: compute in bf16 (training.mixed_precision=bf16), or set optimizer.in_backward=after_norm"
        )
        found.append(Problem(path, text, "at_once"))
    return found


def _adapters(model: FamilySettings, adapters: Mapping[str, AdapterSettings]) -> list[Problem]:
    """Each part of a component has one adapter that trains it or adds to it, and the family can train the component."""
    found, owners = [], dict[str, list[str]]()
    for name, own in adapters.items():
        able = [n for n, spec in model.components.items() if (spec.trainable if own.part == "all" else spec.extensible)]
        reached = own.reaches(model.trainable())
        if able and not reached and not own.separate:
            found.append(
                Problem(f"adapters.{name}", f"nothing would be trained: name at least one of {', '.join(able)}")
            )
        for component in reached:
            if component not in able:
                there = f"there are {', '.join(able)}" if able else "it always trains all of its networks"
                frozen = "it reads or makes images, and what is trained relies on it as it is; "
                why = frozen if component in model.components else ""
                text = f"{component} is not a component that model.family={model.family} can train; {why}{there}"
                found.append(Problem(f"adapters.{name}", text))
                continue
            for other in owners.setdefault(component, []):
                if "all" in (own.part, adapters[other].part) or own.part == adapters[other].part:
                    text = (
                        f"both {other} ({adapters[other].name}) and {name} ({own.name}) cover the {component}, but "
                        f"only one adapter can train or extend its {_of(own, adapters[other])}: remove one of them "
                        f"(adapters.{name}=null), or give them different components"
                    )
                    found.append(Problem(f"adapters.{name}", text))
            owners[component].append(name)
    return found


def _random_base(model: FamilySettings, adapters: Mapping[str, AdapterSettings]) -> list[Problem]:
    """An adapter needs a network that can do something already, to add to it or to learn with it."""
    trainable, found = model.trainable(), []
    whole = {name for own in adapters.values() if own.part == "all" for name in own.reaches(trainable)}
    for adapter, own in adapters.items():
        for name in dict.fromkeys([*model.networks("denoiser"), *own.reaches(trainable)]):
            if name in whole or isinstance(model.places.get(name, ""), str):
                continue
            text = (
                f"model.{name} has random weights, and with this adapter alone they stay as they are: whatever is "
                f"added to noise is noise. Take weights, such as those of a run (model.{name}=runs/NAME/pipeline, or "
                f"all of its networks by model.pretrained_model_name_or_path and model.{name}=base), or train the "
                f"{name} whole: adapters.{adapter}=null adapter.name=full"
            )
            found.append(Problem(f"adapters.{adapter}", text))
    return found


def _adapters_of_model(model: FamilySettings, adapters: Mapping[str, AdapterSettings]) -> list[Problem]:
    return _adapters(model, adapters) or _random_base(model, adapters)


def _of(one: AdapterSettings, other: AdapterSettings) -> str:
    """The part of a component that two adapters both want."""
    return "weights" if "all" in (one.part, other.part) else one.part


def _profiles(profiler: ProfilerSettings, output_dir: str) -> list[Problem]:
    """Ranks other than 0 write into the run folder itself."""
    if profiler.steps is None or profiler.ranks == "first" or not address.is_remote(output_dir):
        return []
    text = "only rank 0 writes into an object store: remove it, or set output_dir to a folder that all machines see"
    return [Problem("profiler.ranks", text, profiler.ranks)]


def _guidance(model: FamilySettings, sampling: SamplingSettings) -> list[Problem]:
    """The family says which scales there are, and what has no effect at one."""
    faults = () if model.guidance is None else model.guidance.faults(sampling)
    return [Problem(f"sampling.{name}", text, getattr(sampling, name)) for name, text in faults]


def _own_teacher(model: FamilySettings, objective: ObjectiveSettings, init_from: str | None) -> list[Problem]:
    """A student that is its own teacher begins as a model that can guide."""
    if not objective.learns_from_itself:
        return []
    added = [name for name in model.of_students if getattr(model, name) is not None]
    if added:
        text = (
            "adds to the student what it has not learnt yet, so that it cannot guide as its own teacher: name the "
            "model that it starts from as the teacher, too (objective.teacher.path)"
        )
        return [Problem(f"model.{added[0]}", text, getattr(model, added[0]))]
    if model.denoises_anew and init_from is None:
        text = (
            f"{objective.name} learns from the student as it is before its first update, and here that has random "
            "weights: start from a trained model (init_from, or the places of model), or name a teacher "
            "(objective.teacher.path)"
        )
        return [Problem("objective.name", text, objective.name)]
    return []


CHECKS: dict[tuple[str, ...], Callable[..., list[Problem]]] = {
    ("training",): _batches,
    ("training", "lr_scheduler"): _warmup,
    ("data", "objective"): _masks,
    ("model", "adapters"): _adapters_of_model,
    ("model", "sampling"): _guidance,
    ("model", "objective", "init_from"): _own_teacher,
    ("profiler", "output_dir"): _profiles,
    ("optimizer", "ema", "lr_scheduler"): _own_averages,
    ("validation", "ema", "optimizer"): _raw_validation,
    ("optimizer", "training"): _in_backward,
}
"""The sections that a check needs, and the check."""
