"""Updates during the backward pass: those after it to the bit, and the largest gradient held in place of all."""

from contextlib import nullcontext

import pytest
import torch
from quick_cases import crossed
from torch import nn
from torch.utils.checkpoint import checkpoint

from daguerre import plugins
from daguerre.assembly.batch_sizes import shared_out
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError
from daguerre.training import oom, step
from daguerre.training.guard import NonFiniteError
from daguerre.training.loop import train
from daguerre.training.optimizers import adamw_8bit
from daguerre.training.optimizers.optimizer import Optimizer
from daguerre.training.precision.dtypes import Precision
from daguerre.training.settings import EMASettings

NAMES = [name for name in plugins.names("optimizers") if name != "prodigy"]
UPDATES = 6


class Net(nn.Module):
    """Dropout, a block that is computed again in the backward pass, a weight that is used twice, one that is not."""

    def __init__(self):
        super().__init__()
        self.inner, self.twice, self.out = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.dropout, self.unread = nn.Dropout(0.2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.dropout(torch.tanh(self.inner(x)))
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.dropout(self.twice(x))), x, use_reentrant=False)
        return self.out(x)


def made(toy, name, in_backward, dtype=torch.float32, seed=0, net=Net):
    torch.manual_seed(seed)
    given = {"learning_rate": 0.01, "weight_decay": 0.1, "in_backward": in_backward}
    settings = plugins.find("optimizers", "adamw" if name == "adamw_8bit" else name).Settings(**given)
    ema = EMASettings(enabled=False) if settings.averages_weights else EMASettings(decay=0.9, post_hoc=[0.1])
    state = toy.TrainState.start(net(), toy.NothingLearnt(), settings, ema, Precision(weights=dtype))
    if name == "adamw_8bit":  # it is refused on a CPU, where it works
        pytest.importorskip("bitsandbytes", reason="to be installed: pip install -c constraints.txt bitsandbytes")
        part = adamw_8bit.part(plugins.find("optimizers", name).Settings(**given), state.trained)
        state.optimizer = Optimizer((part,), state.optimizer.rounding, in_backward)
    return state


def update(toy, state, number, norm=0.05, **given):
    batch = toy.batch(number, **given)
    return step.update(state, [batch], toy.loss_fn, learning_rate=0.01, max_grad_norm=norm, autocast=nullcontext)


def tensors(state):
    return {f"{file}/{name}": t.clone() for file, found in state.tensors().items() for name, t in found.items()}


def assert_equal(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


FORMS = {"after_norm": 0.05, "at_once": None}


@pytest.mark.parametrize(("form", "dtype", "name"), crossed([*FORMS], [torch.bfloat16, torch.float32], NAMES))
def test_equal_to_the_bit_to_updates_after_the_backward_pass(toy, form, dtype, name):
    """Weights, moments, averages and the norm that is logged, with clipping where there is some, and after a restart
    from a state in the middle."""
    norm = FORMS[form]
    usual, fused = (made(toy, name, in_backward, dtype) for in_backward in (False, form))
    for number in range(UPDATES):
        if number == 3:
            before, fused = fused, made(toy, name, form, dtype, seed=1)
            fused.load({file: dict(found) for file, found in before.tensors().items()}, before.document())
        # What is poisoned is left out, as is a batch without a sample that can be decoded.
        given = {"poison": number == 2, "valid": [0.0] * 4 if number == 4 else None}
        finite = [bool(update(toy, state, number, norm, **given)) for state in (usual, fused)]
        assert finite == [number != 2] * 2
        assert all(p.grad is None for p in fused.net.parameters())
    assert_equal(usual, fused)
    assert usual.meter.read() == fused.meter.read()
    assert not torch.equal(usual.net.inner.weight, made(toy, name, False, dtype).net.inner.weight)


class Poisoned(nn.Module):
    """Its loss is finite and its gradient, of the first layer alone, is not."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 8), nn.Linear(8, 3)
        self.poisoned = False

    def forward(self, x):
        x = self.inner(x)
        if self.poisoned:  # the root of a square has no gradient at 0
            x = x + (x - x.detach()).square().sqrt()
        return self.out(x)


@pytest.mark.parametrize("in_backward", [False, "after_norm"])
def test_a_gradient_that_is_not_finite_moves_nothing_though_others_are_known_before_it(toy, in_backward):
    state = made(toy, "adamw", in_backward, net=Poisoned)
    update(toy, state, 0)
    before, state.net.poisoned = tensors(state), True
    assert not update(toy, state, 1)
    after = tensors(state)
    assert all(torch.equal(t, after[n]) for n, t in before.items() if n.startswith(("model/", "optimizer/")))


def test_at_once_it_stops_the_run_before_anything_is_saved(toy):
    state = made(toy, "adamw", "at_once", net=Poisoned)
    update(toy, state, 0, None)
    state.document()
    state.net.poisoned = True
    before = tensors(state)
    update(toy, state, 1, None)
    after = tensors(state)
    assert {n for n, t in before.items() if n.startswith("model/") and not torch.equal(t, after[n])} == {
        "model/out.weight", "model/out.bias",
    }  # fmt: skip
    update(toy, state, 2, None)
    with pytest.raises(NonFiniteError, match=r"gradient of update 2 was NaN.*in_backward=after_norm"):
        state.document()
    with pytest.raises(NonFiniteError, match="gradient of update 2"):
        for _ in train(state, toy.batches(), toy.loss_fn, toy.plan(max_grad_norm=None), nullcontext):
            pass


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 100), *(nn.Linear(100, 100) for _ in range(6)), nn.Linear(100, 3))


@pytest.mark.parametrize("form", [False, *FORMS])
def test_the_largest_gradient_is_held_in_place_of_all(toy, form):
    state, most = made(toy, "adamw", form, net=Layers), 0

    def count(p):
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in state.parameters if p.grad is not None))

    for p in state.parameters:
        p.register_post_accumulate_grad_hook(count)
    update(toy, state, 0, FORMS.get(form))
    each = [p.nbytes for p in state.parameters]
    assert most == (max(each) if form else sum(each)), (most, max(each), sum(each))


def test_a_scale_of_the_loss_is_taken_out_and_found_by_overflows(toy):
    """float16 compute: the factor by which gradients are those of the loss."""
    usual, fused = (made(toy, "adamw", form) for form in (False, "after_norm"))
    for state in (usual, fused):
        state.scaler = Precision(compute=torch.float16).scaler(torch.device("cpu"))
        for number in range(3):
            update(toy, state, number)
    assert_equal(usual, fused)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["after_norm", "optimizer.name=prodigy"], "prodigy estimates its learning rate from the gradients of all"),
        (["after_norm", "training.gradient_accumulation_steps=2"], "before the next micro-batch could be added"),
        (["at_once"], "so that none can be clipped: set training.max_grad_norm=null"),
        (["at_once", "training.max_grad_norm=null", "training.mixed_precision=fp16"], "loss was scaled too much"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        configs.load("quickstart", [f"optimizer.in_backward={given[0]}", *given[1:]])


@pytest.mark.parametrize(
    ("given", "mesh", "said"),
    [
        (["training.per_device_batch_size=8"], {}, "cannot be computed as 2 x 8 samples"),
        ([], {"ici_data_parallelism": 4}, "cannot be split over 4 devices"),
        ([], {"ici_fsdp_parallelism": 4}, "cannot be split over 4 devices"),
        ([], {"ici_tensor_parallelism": 2}, "summed over a tensor-parallel group after the backward pass"),
        (["loader.max_pixels=8192"], {}, "cannot be split, but it has 65,536 pixels"),
    ],
)
def test_a_batch_that_is_cut_is_refused(given, mesh, said):
    given += [f"mesh.{name}={degree}" for name, degree in mesh.items()]
    loaded = configs.load("quickstart", ["optimizer.in_backward=after_norm", *given])
    with pytest.raises(UserError, match=said):
        shared_out(loaded, loaded.config.mesh.resolved(max([1, *mesh.values()]), 1))


@pytest.mark.parametrize("form", FORMS)
def test_what_fits_is_tried_as_it_is_trained(toy, form):
    state = made(toy, "adamw", form)
    before = [p.detach().clone() for p in state.parameters]
    assert oom.update_fits(state, toy.batch(0), toy.loss_fn, nullcontext)
    assert all(torch.equal(a, b) for a, b in zip(before, state.parameters, strict=True))
    assert state.step == 1  # counts go on: no ordinary update was tried
