"""State of a checkpoint that was saved with other settings: what a run goes on with, and what starts again from
nothing.

A decision about names alone, before anything is read. It follows from the settings in the checkpoint, not from what was
allowed for a start, so that a run that is killed after a change and before its next save goes on in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from daguerre import plugins
from daguerre.training.ema import profile_file
from daguerre.training.optimizers.optimizer import NUMBER, Optimizer, build
from daguerre.training.settings import EMASettings, OptimizerSettings
from daguerre.training.state import TrainState

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of saved tensors by file and name."""


@dataclass
class Carried:
    """The parts of a checkpoint that are taken over."""

    files: dict[str, dict[str, str]]
    """By file and name of this run: the name of the saved tensor."""
    anew: set[str] = field(default_factory=set)
    """Files of which nothing is taken over."""
    unlike: set[str] = field(default_factory=set)
    """Numbers of parameters whose optimizer state is reset."""
    notices: list[str] = field(default_factory=list)
    """Messages about what is reset."""

    def leave(self, file: str, why: str = "") -> None:
        """Takes over nothing of a file."""
        self.files.pop(file, None)
        self.anew.add(file)
        self.notices += [why] if why else []


def carried(
    state: TrainState, saved: Shapes, before: Mapping[str, Any], optimizer: OptimizerSettings, ema: EMASettings,
    objective: Mapping[str, Any],
) -> Carried:  # fmt: skip
    """The parts of `saved` that this state takes over. `before` are the checkpoint's settings, as JSON; the others are
    those of now."""
    found = Carried({file: {name: name for name in tensors} for file, tensors in saved.items()})
    if before.get("optimizer", (now := optimizer.model_dump(mode="json"))) != now:
        _optimizer(found, state, before["optimizer"], optimizer)
    if "ema" in before:
        _averages(found, EMASettings.model_validate(before["ema"]), ema)
    if before.get("objective", objective) != objective:
        _objective(found, state, saved)
    if ("scaler" in saved) != bool(state.scaler.state()):
        found.leave("scaler", "the scale of the loss starts from nothing" if state.scaler.state() else "")
    return found


def _optimizer(found: Carried, state: TrainState, before: Mapping[str, Any], now: OptimizerSettings) -> None:
    """Moments go with their parameter, which other groups number otherwise; those that are made of something else than
    are now reset."""
    settings = plugins.find("optimizers", before["name"]).Settings
    averages = ", nor of the averages that it evaluates with" if settings.averages_weights else ""
    old = _rebuilt(settings, before, state) if before["name"] == now.name else None
    if old is None:
        text = f"the state of {now.name} starts from nothing: nothing of {before['name']}'s is kept{averages}"
        found.leave("optimizer", text if found.files.get("optimizer") else "")
        return
    if other := [name for name in now.made_with if before.get(name) != getattr(now, name)]:
        found.leave("optimizer", f"the state of {now.name} starts from nothing: it is made with {', '.join(other)}")
        return
    # By the entries that it would make, not by settings: some of these add a moment, such as Adafactor's beta1.
    made = build(now, state.trained, state.optimizer.rounding).entries()  # of an optimizer for this alone
    names = found.files.get("optimizer", {})
    places = {p: str(number) for number, p in enumerate(old.parameters)}
    kept: dict[str, str] = {}
    for number, p in enumerate(state.optimizer.parameters):
        saved_names = [name for name in names if name.partition(".")[0] == places[p]]
        entries = {name.partition(".")[2].removesuffix(NUMBER) for name in saved_names}
        if entries in made[number]:
            # Other patterns of learning rates are other groups, and so other numbers: moments go by the parameter.
            kept |= {f"{number}.{name.partition('.')[2]}": name for name in saved_names}
        else:
            found.unlike.add(str(number))
    groups = [group for part in old.parts for group in part.optimizer.param_groups]
    for number, group in enumerate(g for part in state.optimizer.parts for g in part.optimizer.param_groups):
        old_number = next(i for i, each in enumerate(groups) if any(p is group["params"][0] for p in each["params"]))
        start = f"group.{old_number}."
        kept |= {f"group.{number}.{n.removeprefix(start)}": n for n in names if n.startswith(start)}
    every = len(state.optimizer.parameters)
    text = f"the optimizer state of {len(found.unlike)} of {every} parameters starts from nothing"
    if len(found.unlike) == every:  # what groups have counted belongs to it
        found.unlike.clear()
        found.leave("optimizer", text if names else "")
        return
    found.files["optimizer"] = kept
    if found.unlike and names:
        found.notices.append(text)


def _rebuilt(kind: type[OptimizerSettings], before: Mapping[str, Any], state: TrainState) -> Optimizer | None:
    """The optimizer of other settings, for the order of its parameters; None for settings that are not known."""
    try:
        settings = kind.model_validate(before)
    except ValidationError:
        return None
    return build(settings, state.trained, state.optimizer.rounding)


def _averages(found: Carried, before: EMASettings, now: EMASettings) -> None:
    if now.enabled and not before.enabled:
        found.leave("ema", "the averages start from the weights of this checkpoint")
    elif before.enabled and not now.enabled:
        found.leave("ema", "the averages are dropped")
    for width in set(before.post_hoc) - set(now.post_hoc):
        found.leave(profile_file(width), f"the averages of width {width:g} are dropped")


def _objective(found: Carried, state: TrainState, saved: Shapes) -> None:
    """Means since the last line of metrics are of the loss of before, and are not mixed with that of now."""
    found.leave("meter")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.objective.state().items()}
    if dict(saved.get("objective", {})) != shapes:
        text = "what the objective learns starts from nothing" if shapes else "what the objective has learnt is dropped"
        found.leave("objective", text)
