"""Recorded passes (training.capture) of a recipe: what can be recorded, and where."""

from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.training.performance.recording import CudaGraphs, Recorder

_SETTING = "training.capture"


def recorder(config: Config, parts: Components) -> Recorder | None:
    """The recorder of a run's passes; None where the recipe wants none. UserError where they cannot be recorded."""
    if not config.training.capture:
        return None
    if parts.device.type != "cuda":
        raise UserError(
            f"{_SETTING}=true records what a GPU is given to do, and this run computes on a CPU: remove it",
            code="unused",
            setting=_SETTING,
        )
    if parts.is_ragged:
        raise UserError(
            f"{_SETTING}=true: batches of this family differ in shape from one update to the next, by their captions "
            "or their reference images, and passes are recorded for a shape: remove it",
            code="conflict",
            setting=_SETTING,
        )
    if parts.objective.follows_updates:
        raise UserError(
            f"{_SETTING}=true: objective.adversarial begins at an update that the host counts, and recorded passes "
            "do not know the number of the update: remove one of them",
            code="conflict",
            setting=_SETTING,
        )
    return Recorder(CudaGraphs(parts.device))
