"""What every optimizer must keep: a file beside the others is tested here without an edit."""

from contextlib import nullcontext

import pytest
import torch
from memory_layouts import misplaced
from quick_cases import crossed

from daguerre import plugins
from daguerre.training import step
from daguerre.training.optimizers import adamw_8bit
from daguerre.training.optimizers.optimizer import Optimizer
from daguerre.training.precision.dtypes import Precision
from daguerre.training.settings import EMASettings
from daguerre.training.state import adopt, evaluating

NAMES = [name for name in plugins.names("optimizers") if name != "adamw_8bit"]
"""It works on a GPU only; test_optimizers.py has its own test."""
SETTINGS = {name: plugins.find("optimizers", name).Settings(learning_rate=0.01, weight_decay=0.1) for name in NAMES}
RATES = {"prodigy": 1.0, "lion": 0.003, "came": 0.003}  # came's first steps are about ten times the rate


def make(toy, name, seed=0, **changes):
    return toy.state(seed, name, **changes)


def update(toy, state, batch, rate=0.01):
    settings = {"learning_rate": rate, "max_grad_norm": 0.05, "autocast": nullcontext}
    return step.update(state, [batch], toy.loss_fn, **settings)


def snapshot(state):
    return {f"{file}/{key}": t.clone() for file, tensors in state.tensors().items() for key, t in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls(toy, name):
    state = make(toy, name)
    losses = []
    for number in range(100):
        update(toy, state, toy.batch(number % 5), RATES.get(name, 0.01))
        losses.append(state.meter.read()["learning/loss"])
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("valid", [[0.0] * 4, None])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_is_empty_or_not_finite_moves_no_weight_and_no_moment(toy, name, valid, first):
    state, counts = make(toy, name), ("step", ".number")
    for number in range(first):
        update(toy, state, toy.batch(number))
    before = snapshot(state)
    finite = update(toy, state, toy.batch(9, valid=valid, poison=valid is None))
    after = snapshot(state)
    assert bool(finite) is (valid is not None)
    for key in before:
        if key.startswith(("model/", "optimizer/")) and not key.endswith(counts):
            assert torch.equal(before[key], after[key]), key
    assert all(torch.isfinite(t).all() for t in after.values())
    for number in (10, 11):  # the first gradient of soap makes its directions alone
        update(toy, state, toy.batch(number))
    assert not torch.equal(before["model/inner.weight"], state.net.inner.weight)
    assert all(torch.isfinite(t).all() for t in snapshot(state).values())


@pytest.mark.parametrize("name", NAMES)
def test_a_first_update_that_is_left_out_leaves_the_next_as_if_it_were_the_first(toy, name):
    """But for the counts of those that cannot take them back."""
    skipped, plain = make(toy, name), make(toy, name)
    update(toy, skipped, toy.batch(9, poison=True))
    before = [p.detach().clone() for p in plain.net.parameters()]
    for state in (skipped, plain):
        update(toy, state, toy.batch(0))
    for a, b, old in zip(skipped.net.parameters(), plain.net.parameters(), before, strict=True):
        assert torch.equal((a - old).sign(), (b - old).sign())


@pytest.mark.parametrize(("name", "stop_at"), crossed(NAMES, [6, 0, 1]))
def test_stopped_and_restored_it_goes_on_equal_to_the_bit(toy, name, stop_at):
    whole, first = make(toy, name), make(toy, name)
    for number in range(12):
        update(toy, whole, toy.batch(number, poison=number == 4))
    for number in range(stop_at):
        update(toy, first, toy.batch(number, poison=number == 4))
    tensors = {f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()}
    second = make(toy, name, seed=1)
    second.load(tensors, first.document())
    assert {k: t.dtype for k, t in snapshot(second).items()} == {k: t.dtype for k, t in snapshot(first).items()}
    for number in range(stop_at, 12):
        update(toy, second, toy.batch(number, poison=number == 4))
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key


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
        update(toy, whole, toy.batch(number))
    for number in range(3):
        update(toy, first, toy.batch(number))
    saved = {f: {k: t.clone().contiguous() for k, t in entries.items()} for f, entries in first.tensors().items()}
    second.load(saved, first.document())
    assert not misplaced(second)
    for number in range(3, 7):
        update(toy, second, toy.batch(number))
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
        update(toy, whole, toy.batch(number))
    for number in range(3):
        update(toy, first, toy.batch(number))
    second.load({f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()},
                first.document())  # fmt: skip
    for number in range(3, 6):
        update(toy, second, toy.batch(number))
    assert torch.equal(whole.net.extra.weight, before)
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_saved_tensors_share_no_memory_and_have_a_known_type(toy, name):
    state = make(toy, name)
    update(toy, state, toy.batch(0))
    tensors = list(state.optimizer.tensors().values())
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("name", NAMES)
def test_another_set_of_parameters_is_refused(toy, name):
    state = make(toy, name)
    update(toy, state, toy.batch(0))
    tensors = {key: t for key, t in state.optimizer.tensors().items() if not key.startswith("3.")}
    with pytest.raises(ValueError, match="has 3 parameters, this run trains 4"):
        make(toy, name).optimizer.load(tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_of_zero_as_a_warm_up_begins_with_moves_nothing(toy, name):
    state = make(toy, name)
    before = [p.detach().clone() for p in state.net.parameters()]
    update(toy, state, toy.batch(0), rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, state.net.parameters(), strict=True))
    update(toy, state, toy.batch(1))
    assert not torch.equal(before[0], state.net.inner.weight)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_chosen_decays(toy, name):
    def decayed(**changes):
        state = make(toy, name, weight_decay=0.5, **changes)
        groups = [group for part in state.optimizer.parts for group in part.optimizer.param_groups]
        decaying = {id(p) for group in groups if group["weight_decay"] == 0.5 for p in group["params"]}
        assert all(group["weight_decay"] in (0.0, 0.5) for group in groups)
        return {key for key, p in state.net.named_parameters() if id(p) in decaying}

    assert decayed() == {"inner.weight", "out.weight"}
    assert decayed(weight_decay_exclude=["out.*", "*.bias"]) == {"inner.weight"}
    assert decayed(weight_decay_exclude=[]) == {"inner.weight", "inner.bias", "out.weight", "out.bias"}


@pytest.mark.parametrize("name", NAMES)
def test_decay_shrinks_weights(toy, name):
    decaying, plain = make(toy, name, weight_decay=10.0), make(toy, name, weight_decay=0.0)
    for state in (decaying, plain):
        for number in range(10):
            update(toy, state, toy.batch(number), RATES.get(name, 0.01))
    assert decaying.net.inner.weight.norm() < plain.net.inner.weight.norm()


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_training_as_it_was_and_init_from_takes_what_it_evaluates(toy, name):
    state = make(toy, name)
    for number in range(5):
        update(toy, state, toy.batch(number))
    before = snapshot(state)
    with evaluating(state):
        used = {n: p.detach().clone() for n, p in state.net.named_parameters()}
    after = snapshot(state)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(used[n], p) for n, p in state.net.named_parameters()), "it has its own averaged weights"
    net = toy.Net()
    adopt(net, state.tensors())
    fresh = make(toy, name, seed=3, net=net)
    for n, p in fresh.net.named_parameters():
        assert torch.equal(used[n], p)
    update(toy, fresh, toy.batch(0), min(RATES.get(name, 0.01), 0.01))
    assert (snapshot(fresh)["model/inner.weight"] - used["inner.weight"]).abs().max() < 0.1
