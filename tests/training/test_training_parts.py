"""Meters, validation, state, precision: against closed forms and diffusers."""

import copy

import pytest
import torch

from daguerre.training import state
from daguerre.training.device import choose_device
from daguerre.training.meters import Meter
from daguerre.training.settings import EMASettings
from daguerre.training.validation import one_behind, validation_losses
from daguerre.types import LossTerms


def test_averages_are_applied_and_taken_back_without_a_copy(toy):
    state_ = toy.state()
    weights = [p.detach().clone() for p in state_.net.parameters()]
    for average in state_.ema.averages.values():
        average.zero_()
    with state.evaluating(state_):
        assert all((p == 0).all() for p in state_.net.parameters())
        assert not state_.net.training
    assert all(torch.equal(p, w) for p, w in zip(state_.net.parameters(), weights, strict=True))
    assert state_.net.training


def test_training_mode_and_weights_are_back_after_an_error(toy):
    state_ = toy.state()
    weights = [p.detach().clone() for p in state_.net.parameters()]
    with pytest.raises(OSError, match="full"), state.evaluating(state_):
        raise OSError("the disk is full")
    assert state_.net.training
    assert all(torch.equal(p, w) for p, w in zip(state_.net.parameters(), weights, strict=True))


def test_no_ema_is_the_weights_themselves(toy):
    state_ = toy.state(ema=EMASettings(enabled=False))
    before = copy.deepcopy(dict(state_.ema.parameters))
    state_.ema.update(5)
    with state.evaluating(state_):
        assert all(torch.equal(before[n], p) for n, p in state_.ema.parameters.items())
    assert "ema" not in state_.tensors()


def test_meter_means_over_samples_and_by_quartile():
    meter = Meter(torch.device("cpu"))
    quantile_B = torch.tensor([0.0, 0.24, 0.25, 0.99])
    terms = LossTerms(torch.tensor([1.0, 3.0, 5.0, 100.0]), quantile_B, {"kl": torch.tensor([1.0, 1, 4, 9])})
    meter.add_terms(terms, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    meter.add_terms(LossTerms(torch.tensor([7.0]), torch.tensor([0.3])), torch.tensor([1.0]))
    meter.add_common("gradient_norm", torch.tensor(float("nan")))
    meter.add_common("gradient_norm", torch.tensor(2.0))
    assert meter.read() == {
        "learning/loss": 4.0,
        "learning/kl": 2.0,
        "learning/loss_quartile_0": 2.0,
        "learning/loss_quartile_1": 6.0,
        "learning/gradient_norm": 2.0,
    }
    assert meter.read() == {}


def test_validation_means_over_valid_samples_at_each_level(toy):
    def losses_at(batch, quantiles):
        for quantile in quantiles:
            yield LossTerms(torch.arange(4.0) + 10 * quantile, torch.full((4,), quantile))

    batches = [toy.batch(0), toy.batch(1, valid=[1, 0, 0, 0])]
    values = validation_losses(batches, losses_at, 2)
    assert values == pytest.approx(
        {"validation/loss_level_0": 6 / 5 + 2.5, "validation/loss_level_1": 6 / 5 + 7.5, "validation/loss": 6.2}
    )
    assert validation_losses([], losses_at, 2) == {}


def test_what_is_read_is_one_behind_what_is_made():
    said = []
    made = (said.append(f"made {i}") or i for i in range(3))
    for item in one_behind(made):
        said.append(f"read {item}")
    assert said == ["made 0", "made 1", "read 0", "made 2", "read 1", "read 2"]


def test_weights_that_do_not_fit_are_refused_by_name(toy):
    net = toy.Net()
    tensors = dict(net.state_dict())
    tensors["inner.weight"] = torch.zeros(1, 2)
    tensors["other"] = tensors.pop("out.bias")
    with pytest.raises(ValueError, match=r"inner.weight is \[1, 2\].*missing out.bias.*unknown other"):
        state.load_weights(net, tensors)


def test_init_from_takes_the_averages_as_weights_and_nothing_else(toy):
    other, net = toy.state(1), toy.Net()
    for average in other.ema.averages.values():
        average.fill_(0.5)
    state.adopt(net, other.tensors())
    fresh = toy.state(2, net=net)
    assert all((p == 0.5).all() for p in fresh.net.parameters())
    assert all((a == 0.5).all() for a in fresh.ema.averages.values())
    assert fresh.step == 0
    assert not fresh.optimizer.tensors()


def test_init_from_between_runs_that_train_more_or_less(toy):
    """A component that only the new run trains keeps its weights; one that only the old run trained is not dropped."""
    other, fresh = toy.state(1), toy.state(2)
    tensors = other.tensors()
    kept = {name: value.clone() for name, value in fresh.net.state_dict().items() if name.startswith("out.")}
    fewer = {file: {n: v for n, v in each.items() if not n.startswith("out.")} for file, each in tensors.items()}
    assert state.adopt(fresh.net, fewer) == ["out starts from the base model: the run of init_from did not train it"]
    assert all(torch.equal(fresh.net.state_dict()[name], value) for name, value in kept.items())
    assert torch.equal(fresh.net.state_dict()["inner.weight"], tensors["ema"]["inner.weight"])
    more = {"model": tensors["model"] | {"text_encoder.weight": torch.zeros(1)}}
    with pytest.raises(ValueError, match=r"also trained text_encoder.*adapter\.train='\[inner, out, text_encoder\]'"):
        state.adopt(fresh.net, more)


def test_a_gpu_that_is_not_there_is_refused():
    assert choose_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU"):
            choose_device("cuda")


def test_quartile_names_are_stable():
    meter = Meter(torch.device("cpu"))
    meter.add_terms(LossTerms(torch.ones(8), torch.linspace(0, 1, 8)), torch.ones(8))
    assert [n for n in meter.read() if "quartile" in n] == [f"learning/loss_quartile_{i}" for i in range(4)]
