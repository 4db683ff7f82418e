"""Recorded passes of two processes, each with all weights: sums over them follow the passes, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from forked_ranks import forked
from tape import Tape
from torch import nn

from daguerre.contracts.optimizers import batch, loss_fn
from daguerre.distributed import collectives, parallelize
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.rank0 import Agreement
from daguerre.distributed.sharding import MeshSharding
from daguerre.distributed.sharding_rules import ParameterSplit
from daguerre.objectives.objective import NothingLearnt
from daguerre.training import step
from daguerre.training.optimizers import adamw
from daguerre.training.performance.recording import BEFORE, Recorder
from daguerre.training.settings import EMASettings
from daguerre.training.state import TrainState

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
UPDATES = 20


class Net(nn.Module):
    """Of several buckets of gradients; dropout, and a weight that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.unread = nn.Linear(3, 64), nn.Linear(64, 3), nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.out(self.dropout(torch.tanh(self.inner(x))))


def trained(rank: int, recorder: Recorder | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state after updates of two micro-batches each, of which one device's are of another shape at times, and some
    samples could not be decoded; and their losses."""
    torch.manual_seed(0)
    net, mesh = Net(), Mesh(ONE, {**ONE, "data": 2})
    placed = [ParameterSplit(name, tuple(p.shape), (), None, None, False) for name, p in net.named_parameters()]
    split = parallelize.apply(net, mesh, placed, parallelize.device_mesh(mesh, "cpu"), (), ())
    sharding = MeshSharding(net, mesh, placed, split, rank, Agreement(torch.distributed.group.WORLD))
    settings, losses = adamw.Settings(learning_rate=0.01), []
    state = TrainState.start(net, NothingLearnt(), settings, EMASettings(decay=0.9), sharding=sharding)
    state.recorder = recorder
    if recorder is not None:
        sharding._reducer._works = Noted()
    for number in range(UPDATES):
        size = 2 if (number + rank) % 5 == 4 else 4
        valid = [1.0] * size if number % 3 else [1.0, 0.0] * (size // 2)
        some = [batch(4 * number + 2 * rank, size=size, valid=valid), batch(4 * number + 2 * rank + 1, size=size)]
        some = [replace(each, weights_B=torch.linspace(0.5, 1.5, size)) for each in some]
        step.update(state, some, loss_fn, learning_rate=0.01, max_grad_norm=0.5, autocast=nullcontext)
        losses.append(state.meter.read()["learning/loss"])
    return {f"{file}/{key}": t for file, own in state.tensors().items() for key, t in own.items()}, losses


class Noted(dict):
    """Sums that are on their way, and the most of them at a time."""

    most = 0

    def __setitem__(self, index, work):
        super().__setitem__(index, work)
        Noted.most = max(Noted.most, len(self))


def compared(rank: int) -> dict[str, object]:
    collectives._BUCKET_BYTES = 500
    expected, losses = trained(rank, None)
    found, again = trained(rank, Recorder(tape := Tape()))
    equal = expected.keys() == found.keys() and all(torch.equal(rows, found[key]) for key, rows in expected.items())
    assert equal, "on this rank"
    return {"losses": [losses, again], "recorded": tape.recorded, "replayed": tape.replayed, "at once": Noted.most}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_twenty_updates_of_two_processes_are_equal_to_the_bit(tmp_path):
    found = forked(2, tmp_path, compared)
    losses, again = found["losses"]
    assert losses == again
    assert losses[-1] < losses[0]
    assert (found["recorded"], found["replayed"]) == (2, UPDATES - 2 * BEFORE)
    assert found["at once"] == 2, "of four buckets: there is memory for no more"
