"""Passes that are recorded and replayed: those that are computed, to the bit, whatever changes between updates."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tape import Tape
from torch import nn

from daguerre.training import step
from daguerre.training.loop import train
from daguerre.training.performance import activation_checkpointing
from daguerre.training.performance.recording import BEFORE, Recorder
from daguerre.training.precision.loss_scaling import DynamicScale
from daguerre.training.settings import EMASettings


class Net(nn.Module):
    """Dropout, a frozen layer, a weight that is used twice, one that is never used."""

    _supports_gradient_checkpointing = True
    block = None

    def __init__(self):
        super().__init__()
        self.inner, self.twice, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen, self.unread, self.dropout = nn.Linear(8, 8).requires_grad_(False), nn.Linear(2, 2), nn.Dropout(0.2)

    def enable_gradient_checkpointing(self, checkpoint):
        self.block = checkpoint

    def first(self, x):
        return self.dropout(torch.tanh(self.inner(x)))

    def second(self, x):
        return self.dropout(self.frozen(torch.tanh(self.twice(torch.tanh(self.twice(x))))))

    def forward(self, x):
        for part in (self.first, self.second):
            x = part(x) if self.block is None else self.block(part, x)
        return self.out(x)


def updates(toy):
    """Two micro-batches each; samples that were not decoded, weights, a loss that is not finite, another shape."""
    for number in range(100):
        size = 2 if number % 7 == 5 else 4
        valid = [1.0] * size if number % 3 else [1.0, 0.0] * (size // 2)
        one, two = toy.batch(2 * number, size=size, valid=valid), toy.batch(2 * number + 1, size=size)
        if number == 9:
            two = toy.batch(1, size=size, poison=True)
        yield [replace(each, weights_B=torch.linspace(0.5, 1.5, size)) for each in (one, two)]


def run(toy, recorder, name, recomputed=False):
    torch.manual_seed(0)
    averages = name == "schedule_free"  # of its own, at a constant rate
    ema = EMASettings(enabled=False) if averages else EMASettings(decay=0.9, post_hoc=[0.1])
    net = Net()
    if recomputed:
        activation_checkpointing.enable(net, [], nullcontext)
    state = toy.state(ema=ema, net=net, name=name)
    state.recorder, lines = recorder, []
    schedule = toy.LRSchedulerSettings(name="constant" if averages else "cosine")
    plan = replace(toy.plan(total_steps=20, log_every=1), lr_scheduler=schedule)
    for update in train(state, updates(toy), toy.loss_fn, plan, nullcontext):
        lines.append({name: value for name, value in update.values.items() if not name.startswith("perf/")})
    return state, lines


def assert_equal(one, other):
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for file, tensors in ours.items():
        assert [name for name, tensor in tensors.items() if not torch.equal(tensor, theirs[file][name])] == []


@pytest.mark.parametrize(
    ("name", "recomputed"), [("adamw", False), ("adamw", True), ("lion", False), ("schedule_free", False)]
)
def test_twenty_updates_are_equal_to_the_bit(toy, name, recomputed):
    """Activations that are computed again are dropped as the first time."""
    computed, expected = run(toy, None, name)
    tape = Tape()
    replayed, lines = run(toy, Recorder(tape), name, recomputed)
    assert lines == expected
    assert lines[-1]["learning/nonfinite_steps"] == 1
    assert_equal(computed, replayed)
    assert tape.recorded == 2, "one for each shape"
    assert tape.replayed == 20 - 2 * BEFORE


def test_weights_that_move_elsewhere_are_recorded_anew(toy):
    ends = []
    for recorder in (None, Recorder(tape := Tape())):
        state = toy.state()
        state.recorder = recorder
        for number in range(8):
            if number == 5:
                weight = state.net.out.weight
                weight.data = weight.data.clone()
            step.update(
                state, [toy.batch(number)], toy.loss_fn, learning_rate=0.01, max_grad_norm=1.0, autocast=nullcontext
            )
        ends.append(state)
    assert tape.recorded == 2
    assert_equal(*ends)


def test_the_scale_of_the_loss_goes_on(toy):
    """fp16's scale halves after an overflow and doubles later: the recording reads it where it lies."""
    ends = []
    for recorder in (None, Recorder(Tape())):
        state = toy.state()
        state.scaler, state.recorder = DynamicScale(torch.device("cpu")), recorder
        state.scaler.scale.fill_(2.0**120)
        for number in range(12):
            step.update(
                state, [toy.batch(number)], toy.loss_fn, learning_rate=0.01, max_grad_norm=1.0, autocast=nullcontext
            )
        ends.append(state)
    assert_equal(*ends)
    assert float(ends[0].scaler.scale) < 2.0**120
