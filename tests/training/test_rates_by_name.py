"""Learning rates of their own, by patterns of parameters' names, for every optimizer."""

from contextlib import nullcontext

import pytest
import torch
from pydantic import ValidationError

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.training import step
from daguerre.training.loop import train

NAMES = [name for name in plugins.names("optimizers") if name not in ("adamw_8bit", "prodigy")]


def update(toy, state, batch, rate=0.01):
    settings = {"learning_rate": rate, "max_grad_norm": 0.05, "autocast": nullcontext}
    return step.update(state, [batch], toy.loss_fn, **settings)


def weights(state):
    return {name: p.detach().clone() for name, p in state.net.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_a_named_parameter_moves_at_its_own_rate_and_the_others_as_before(toy, name):
    """One update with fixed gradients: those of a run at the pattern's rate, and of one at the usual rate."""
    torch.manual_seed(0)
    gradients = [torch.randn(p.shape) for p in toy.Net().parameters()]

    def moved(rate, **changes):
        state = toy.state(0, name, weight_decay=0.1, **changes)
        for _ in range(3):
            for p, gradient in zip(state.parameters, gradients, strict=True):
                p.grad = gradient.clone()
            state.optimizer.step(rate, torch.tensor(False))
        return weights(state)

    usual, lower = moved(0.01), moved(0.002)
    both = moved(0.01, learning_rates={"out.*": 0.002})
    for key, value in both.items():
        expected = lower if key.startswith("out.") else usual
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-8)
        assert not torch.equal(usual[key], lower[key])


@pytest.mark.parametrize("name", NAMES)
def test_groups_still_say_what_decays_and_a_checkpoint_goes_on(toy, name):
    given = {"learning_rates": {"*.bias": 0.05, "inner.weight": 0.001}, "weight_decay": 0.5}
    whole, first, second = (toy.state(seed, name, **given) for seed in (0, 0, 1))
    groups = [group for part in whole.optimizer.parts for group in part.optimizer.param_groups]
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {key: decays[id(p)] for key, p in whole.net.named_parameters()} == {
        "inner.weight": 0.5, "inner.bias": 0.0, "out.weight": 0.5, "out.bias": 0.0,
    }  # fmt: skip
    for number in range(6):
        update(toy, whole, toy.batch(number))
    for number in range(2):
        update(toy, first, toy.batch(number))
    second.load({f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()},
                first.document())  # fmt: skip
    for number in range(2, 6):
        update(toy, second, toy.batch(number))
    for key, value in weights(whole).items():
        assert torch.equal(value, weights(second)[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_named_parameter_has_its_own_decay(toy, name):
    state = toy.state(0, name, weight_decay=0.5, weight_decays={"out.*": 0.1}, learning_rates={"*.weight": 0.001})
    groups = [group for part in state.optimizer.parts for group in part.optimizer.param_groups]
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {key: decays[id(p)] for key, p in state.net.named_parameters()} == {
        "inner.weight": 0.5, "inner.bias": 0.0, "out.weight": 0.1, "out.bias": 0.0,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"optimizer.weight_decays: 'ouch.\*' matches no trained parameter"):
        toy.state(0, name, weight_decays={"ouch.*": 0.1})


def test_groups_without_patterns_are_numbered_as_they_always_were(toy):
    """So that checkpoints of before still load."""
    state = toy.state()
    groups = state.optimizer.parts[0].optimizer.param_groups
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [[(8, 3), (3, 8)], [(8,), (3,)]]
    assert {group["share"] for group in groups} == {1.0}


def test_schedule_and_scale_act_on_all_alike_and_each_is_logged(toy):
    state = toy.state(learning_rates={"inner.*": 0.002, "out.bias": 0.04})
    lines = [u.values for u in train(state, toy.batches(), toy.loss_fn, toy.plan(log_every=1), nullcontext)]
    for number, values in enumerate(lines):
        rate = toy.plan().learning_rate * toy.plan().share_at(number)
        assert values["learning/current_learning_rate"] == rate
        assert values["learning/current_learning_rate/inner.*"] == pytest.approx(0.2 * rate, rel=1e-12)
        assert values["learning/current_learning_rate/out.bias"] == pytest.approx(4 * rate, rel=1e-12)
    assert [group["lr"] for group in state.optimizer.parts[0].optimizer.param_groups].count(rate) == 1


def test_a_pattern_that_matches_nothing_is_refused_with_near_names(toy):
    with pytest.raises(
        UserError, match=r"learning_rates: 'inne\.\*' matches no trained parameter. Similar names: inner"
    ):
        toy.state(learning_rates={"inne.*": 0.1})


def test_a_pattern_of_a_network_that_is_not_trained_is_told_how_to_train_it(toy):
    with pytest.raises(UserError, match=r"no network that is trained \(inner, out\).*adapter.ranks.NETWORK=RANK"):
        toy.state(learning_rates={"text_encoder*": 0.1})


def test_a_parameter_of_two_patterns_is_refused(toy):
    with pytest.raises(UserError, match=r"learning_rates: inner.weight matches 'inner.\*' and '\*.weight'"):
        toy.state(learning_rates={"inner.*": 0.1, "*.weight": 0.2})


def test_factors_multiply_the_rates_of_other_patterns(toy):
    state = toy.state(learning_rate=0.01, learning_rates={"inner.*": 0.002}, learning_rate_factors={"*.bias": 16})
    groups = state.optimizer.parts[0].optimizer.param_groups
    rates = {id(p): (group["lr"], group["pattern"]) for group in groups for p in group["params"]}
    assert {name: rates[id(p)] for name, p in state.trained.items()} == {
        "inner.weight": (0.002, "inner.*"), "inner.bias": (0.032, "inner.* *.bias"),
        "out.weight": (0.01, ""), "out.bias": (0.16, "*.bias"),
    }  # fmt: skip
    with pytest.raises(UserError, match=r"learning_rate_factors: 'lora' matches no trained parameter"):
        toy.state(learning_rate_factors={"lora": 16})


@pytest.mark.parametrize("field", ["learning_rates", "learning_rate_factors"])
def test_prodigy_has_one_estimate_for_all(toy, field):
    with pytest.raises(ValidationError, match="prodigy estimates one learning rate for all"):
        toy.state(0, "prodigy", **{field: {"inner.*": 0.1}})


@pytest.mark.parametrize("rate", [0.0, -1e-4])
def test_a_rate_is_above_zero(toy, rate):
    with pytest.raises(ValidationError, match="greater than 0"):
        toy.state(learning_rates={"inner.*": rate})
