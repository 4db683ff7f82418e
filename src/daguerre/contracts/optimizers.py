"""The contract of every optimizer: updates that are left out, resumes equal to the bit, decay, averages.

The toy problem is a small net on vectors, with a loss that needs nothing else.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daguerre import plugins
from daguerre.contracts import contract
from daguerre.objectives.objective import NothingLearnt
from daguerre.training import step
from daguerre.training.settings import EMASettings, OptimizerSettings
from daguerre.training.state import TrainState, adopt, evaluating
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
    seed: int = 0,
    name: str = "adamw",
    ema: EMASettings | None = None,
    net: nn.Module | None = None,
    **optimizer: Any,
) -> TrainState:
    torch.manual_seed(seed)
    chosen = plugins.find("optimizers", name).Settings
    own = EMASettings(enabled=False) if chosen.averages_weights else EMASettings(decay=0.9)
    return TrainState.start(net or Net(), NothingLearnt(), chosen(**{"learning_rate": 0.01, **optimizer}), ema or own)


def update(training: TrainState, one: Batch, rate: float = 0.01) -> Tensor:
    return step.update(training, [one], loss_fn, learning_rate=rate, max_grad_norm=0.05, autocast=nullcontext)


def snapshot(training: TrainState) -> dict[str, Tensor]:
    return {f"{file}/{key}": t.clone() for file, own in training.tensors().items() for key, t in own.items()}


Make = Callable[..., TrainState]


class OptimizerContract(contract.SettingsContract):
    """An optimizer's promises."""

    kind = "optimizers"
    start = OptimizerSettings

    @pytest.fixture
    def rate(self, given: Any) -> float:
        """A learning rate at which it learns the toy problem."""
        return given.get("learning_rate", 0.01)

    @pytest.fixture
    def make(self, name: str, given: Any) -> Make:
        """Makes the state of a training that uses the plug-in."""
        return lambda seed=0, net=None, **changes: state(seed, name, net=net, **{**given, **changes})

    def test_the_loss_falls(self, make: Make, rate: float) -> None:
        training = make()
        losses = []
        for number in range(100):
            update(training, batch(number % 5), rate)
            losses.append(training.meter.read()["learning/loss"])
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])

    @pytest.mark.parametrize("first", [0, 3])
    @pytest.mark.parametrize("valid", [[0.0] * 4, None])
    def test_an_update_that_is_empty_or_not_finite_moves_no_weight_and_no_moment(
        self, make: Make, rate: float, valid: list[float] | None, first: int
    ) -> None:
        training, counts = make(), ("step", ".number")
        for number in range(first):
            update(training, batch(number), rate)
        before = snapshot(training)
        finite = update(training, batch(9, valid=valid, poison=valid is None), rate)
        after = snapshot(training)
        assert bool(finite) is (valid is not None)
        for key in before:
            if key.startswith(("model/", "optimizer/")) and not key.endswith(counts):
                assert torch.equal(before[key], after[key]), key
        assert all(torch.isfinite(t).all() for t in after.values())
        for number in (10, 11):  # the first gradient of soap makes its directions alone
            update(training, batch(number), rate)
        assert not torch.equal(before["model/inner.weight"], snapshot(training)["model/inner.weight"])
        assert all(torch.isfinite(t).all() for t in snapshot(training).values())

    @pytest.mark.parametrize("stop_at", [6, 0, 1])
    def test_stopped_and_restored_it_goes_on_equal_to_the_bit(self, make: Make, rate: float, stop_at: int) -> None:
        whole, first = make(), make()
        for number in range(12):
            update(whole, batch(number, poison=number == 4), rate)
        for number in range(stop_at):
            update(first, batch(number, poison=number == 4), rate)
        tensors = {f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()}
        second = make(seed=1)
        second.load(tensors, first.document())
        assert {k: t.dtype for k, t in snapshot(second).items()} == {k: t.dtype for k, t in snapshot(first).items()}
        for number in range(stop_at, 12):
            update(second, batch(number, poison=number == 4), rate)
        expected, found = snapshot(whole), snapshot(second)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, found[key]), key

    def test_saved_tensors_share_no_memory_and_have_a_known_type(self, make: Make, rate: float) -> None:
        training = make()
        update(training, batch(0), rate)
        tensors = list(training.optimizer.tensors().values())
        assert all(isinstance(t, torch.Tensor) for t in tensors)
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)

    def test_another_set_of_parameters_is_refused(self, make: Make, rate: float) -> None:
        training = make()
        update(training, batch(0), rate)
        tensors = {key: t for key, t in training.optimizer.tensors().items() if not key.startswith("3.")}
        with pytest.raises(ValueError, match="has 3 parameters, this run trains 4"):
            make().optimizer.load(tensors)

    def test_a_learning_rate_of_zero_as_a_warm_up_begins_with_moves_nothing(self, make: Make, rate: float) -> None:
        training = make()
        before = [p.detach().clone() for p in training.net.parameters()]
        update(training, batch(0), rate=0.0)
        assert all(torch.equal(a, b) for a, b in zip(before, training.net.parameters(), strict=True))
        update(training, batch(1), rate)
        assert not torch.equal(before[0], next(iter(training.net.parameters())))

    def test_only_what_is_chosen_decays(self, make: Make) -> None:
        def decayed(**changes: Any) -> set[str]:
            training = make(weight_decay=0.5, **changes)
            groups = [group for part in training.optimizer.parts for group in part.optimizer.param_groups]
            decaying = {id(p) for group in groups if group["weight_decay"] == 0.5 for p in group["params"]}
            assert all(group["weight_decay"] in (0.0, 0.5) for group in groups)
            return {key for key, p in training.net.named_parameters() if id(p) in decaying}

        assert decayed() == {"inner.weight", "out.weight"}
        assert decayed(weight_decay_exclude=["out.*", "*.bias"]) == {"inner.weight"}
        assert decayed(weight_decay_exclude=[]) == {"inner.weight", "inner.bias", "out.weight", "out.bias"}

    def test_decay_shrinks_weights(self, make: Make, rate: float) -> None:
        decaying, plain = make(weight_decay=10.0), make(weight_decay=0.0)
        for training in (decaying, plain):
            for number in range(10):
                update(training, batch(number), rate)
        shrunk, kept = (snapshot(training)["model/inner.weight"].norm() for training in (decaying, plain))
        assert shrunk < kept

    def test_evaluation_leaves_training_as_it_was_and_init_from_takes_what_it_evaluates(
        self, make: Make, rate: float
    ) -> None:
        training = make()
        for number in range(5):
            update(training, batch(number), rate)
        before = snapshot(training)
        with evaluating(training):
            used = {n: p.detach().clone() for n, p in training.net.named_parameters()}
        after = snapshot(training)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert any(not torch.equal(used[n], p) for n, p in training.net.named_parameters()), (
            "it has its own averaged weights"
        )
        net = Net()
        adopt(net, training.tensors())
        fresh = make(seed=3, net=net)
        for n, p in fresh.net.named_parameters():
            assert torch.equal(used[n], p)
        update(fresh, batch(0), min(rate, 0.01))
        assert (snapshot(fresh)["model/inner.weight"] - used["inner.weight"]).abs().max() < 0.1
