"""The toy problem of the contract of optimizers, for the other tests of training."""

from collections.abc import Iterator

from daguerre.contracts.optimizers import Net, batch, loss_fn, state
from daguerre.objectives.objective import NothingLearnt
from daguerre.training.loop import LoopConfig
from daguerre.training.settings import LRSchedulerSettings
from daguerre.training.state import TrainState
from daguerre.types import Batch

__all__ = ["Net", "NothingLearnt", "TrainState", "batch", "batches", "loss_fn", "plan", "state"]


def batches(start: int = 0, **given) -> Iterator[list[Batch]]:
    """Updates of one micro-batch each."""
    while True:
        yield [batch(start, **given)]
        start += 1


def plan(**changes) -> LoopConfig:
    facts = {
        "total_steps": 20,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "lr_scheduler": LRSchedulerSettings(name="cosine"),
        "max_grad_norm": 0.5,
        "max_nonfinite_steps": 3,
    }
    every = changes.pop("log_every", 4)
    return LoopConfig(**{**facts, "logs": lambda step: step % every == 0, **changes})
