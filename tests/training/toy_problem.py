"""A toy problem for the tests of training: a small net on vectors, a loss that needs nothing else."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from daguerre import plugins
from daguerre.objectives.objective import NothingLearnt
from daguerre.training.loop import LoopConfig
from daguerre.training.settings import EMASettings, LRSchedulerSettings
from daguerre.training.state import TrainState
from daguerre.types import Batch, LossTerms


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x_BD)))


def batch(index: int, size: int = 4, *, valid: list[float] | None = None, poison: bool = False) -> Batch:
    """Batch `index`: three pixels a sample, a function of the sample's number."""
    ids = np.arange(index * size, (index + 1) * size)
    pixels = torch.from_numpy(np.stack([np.random.default_rng(i).integers(0, 255, 3) for i in ids])).to(torch.uint8)
    return Batch(
        keys=np.stack([ids, ids * 0, ids * 0], axis=1),
        images={"image": pixels.view(size, 3, 1, 1)},
        texts=[""] * size,
        valid_B=torch.tensor(valid or [1.0] * size),
        names=[f"sample {i}" for i in ids],
        sizes=np.zeros((size, 6), dtype=np.int32),
        draws={"scale": torch.full((size,), float("nan") if poison else 1.0)},
    )


def loss_fn(net: nn.Module, batch: Batch) -> LossTerms:
    dtype = next(net.parameters()).dtype
    x_BD = (batch.pixels_BCHW.flatten(1).to(dtype) / 255) * batch.draws["scale"].to(dtype)[:, None]
    loss_B = (net(x_BD) - x_BD.flip(1)).square().mean(1)
    return LossTerms(loss_B, torch.linspace(0, 0.99, len(loss_B)))


def state(
    seed: int = 0, name: str = "adamw", ema: EMASettings | None = None, net: nn.Module | None = None, **optimizer
) -> TrainState:
    torch.manual_seed(seed)
    chosen = plugins.find("optimizers", name).Settings
    own = EMASettings(enabled=False) if chosen.averages_weights else EMASettings(decay=0.9)
    return TrainState.start(net or Net(), NothingLearnt(), chosen(**{"learning_rate": 0.01, **optimizer}), ema or own)


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
