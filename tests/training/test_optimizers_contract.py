"""What every optimizer must keep: a file beside the others is tested here without an edit."""

import pytest
import torch
from memory_layouts import misplaced
from quick_cases import crossed

from daguerre import plugins
from daguerre.contracts.optimizers import OptimizerContract, snapshot, update
from daguerre.training.optimizers import adamw_8bit
from daguerre.training.optimizers.optimizer import Optimizer
from daguerre.training.precision.dtypes import Precision
from daguerre.training.settings import EMASettings

NAMES = [name for name in plugins.names("optimizers") if name != "adamw_8bit"]
"""It works on a GPU only; test_optimizers.py has its own test."""
SETTINGS = {name: plugins.find("optimizers", name).Settings(learning_rate=0.01, weight_decay=0.1) for name in NAMES}
RATES = {"prodigy": 1.0, "lion": 0.003, "came": 0.003}  # came's first steps are about ten times the rate


@pytest.mark.parametrize("name", NAMES)
class TestOptimizer(OptimizerContract):
    """All but that one."""

    @pytest.fixture
    def given(self, name):
        return {"learning_rate": RATES.get(name, 0.01)}


def make(toy, name, seed=0, **changes):
    return toy.state(seed, name, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_update_that_is_left_out_leaves_the_next_as_if_it_were_the_first(toy, name):
    """But for the counts of those that cannot take them back."""
    skipped, plain = make(toy, name), make(toy, name)
    update(skipped, toy.batch(9, poison=True))
    before = [p.detach().clone() for p in plain.net.parameters()]
    for state in (skipped, plain):
        update(state, toy.batch(0))
    for a, b, old in zip(skipped.net.parameters(), plain.net.parameters(), before, strict=True):
        assert torch.equal((a - old).sign(), (b - old).sign())


class Convolutions(torch.nn.Module):
    """Weights with their channels last, as on a GPU and in autoencoders; large enough for moments of 8 bits."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = torch.nn.Conv2d(3, 160, 3, padding=1), torch.nn.Conv2d(160, 3, 3, padding=1)
        self.point = torch.nn.Conv2d(160, 160, 1)
        self.matrix = torch.nn.Linear(3, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x_BD):
        x_BCHW = self.matrix(x_BD)[:, :, None, None] * torch.linspace(-1, 1, 9, dtype=x_BD.dtype).view(3, 3)
        return self.out(torch.tanh(self.point(torch.tanh(self.inner(x_BCHW))))).mean((2, 3))


@pytest.mark.parametrize(("name", "narrow"), crossed([*NAMES, "adamw_8bit"], [False, True]))
def test_whatever_the_layout_of_weights_it_goes_on_equal_to_the_bit(toy, name, narrow):
    """Checkpoints hold all tensors contiguous: moments are laid out anew as their weights are."""
    own = EMASettings(enabled=False) if name == "schedule_free" else EMASettings(decay=0.9, post_hoc=[0.1])

    def made(seed):
        torch.manual_seed(seed)
        precision = Precision(weights=torch.bfloat16) if narrow else Precision()
        settings = plugins.find("optimizers", name).Settings(learning_rate=RATES.get(name, 0.01))
        stand_in = plugins.find("optimizers", "adamw").Settings() if name == "adamw_8bit" else settings
        state = toy.TrainState.start(Convolutions(), toy.NothingLearnt(), stand_in, own, precision)
        if name == "adamw_8bit":  # it is refused on a CPU, where it works
            pytest.importorskip("bitsandbytes", reason="to be installed: pip install -c constraints.txt bitsandbytes")
            state.optimizer = Optimizer((adamw_8bit.part(settings, state.trained),), state.optimizer.rounding)
        return state

    whole, first, second = made(0), made(0), made(1)
    for number in range(7):
        update(whole, toy.batch(number))
    for number in range(3):
        update(first, toy.batch(number))
    saved = {f: {k: t.clone().contiguous() for k, t in entries.items()} for f, entries in first.tensors().items()}
    second.load(saved, first.document())
    assert not misplaced(second)
    for number in range(3, 7):
        update(second, toy.batch(number))
    assert not misplaced(whole)
    assert not misplaced(second)
    assert whole.net.inner.weight.is_contiguous(memory_format=torch.channels_last)
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    assert not [key for key, tensor in expected.items() if not torch.equal(tensor, found[key])]


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_no_gradient_reaches_stays_and_its_run_goes_on(toy, name):
    """As layers of a text encoder behind the one that is read."""

    def unread(seed):
        state = make(toy, name, seed)
        state.net.extra = torch.nn.Linear(2, 2)
        return type(state).start(state.net, toy.NothingLearnt(), SETTINGS[name], EMASettings(enabled=False))

    whole, first, second = unread(0), unread(0), unread(1)
    before = whole.net.extra.weight.detach().clone()
    for number in range(6):
        update(whole, toy.batch(number))
    for number in range(3):
        update(first, toy.batch(number))
    second.load({f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()},
                first.document())  # fmt: skip
    for number in range(3, 6):
        update(second, toy.batch(number))
    assert torch.equal(whole.net.extra.weight, before)
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())
