"""A run goes on with other settings of optimizer, averages and objective: what fits is kept, the rest starts again."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from quick_cases import chosen

from daguerre import plugins
from daguerre.training import step
from daguerre.training.change import carried
from daguerre.training.precision.dtypes import Precision
from daguerre.training.settings import EMASettings

NAMES = [name for name in plugins.names("optimizers") if name != "adamw_8bit"]
"""test_optimizers.py has its own tests of that, where bitsandbytes is."""
OFF, ON = EMASettings(enabled=False), EMASettings(decay=0.9)


class Run:
    def __init__(self, toy, name="adamw", ema=OFF, learnt=None, precision=None, seed=0, **settings):
        torch.manual_seed(seed)
        self.toy, self.ema = toy, ema
        self.optimizer = plugins.find("optimizers", name).Settings(**settings)
        given = (toy.Net(), learnt or toy.NothingLearnt(), self.optimizer, ema, precision or Precision())
        self.state = toy.TrainState.start(*given)
        self.objective = {"name": type(self.state.objective).__name__}

    def update(self, *numbers):
        for number in numbers:
            plan = {"learning_rate": 0.01, "max_grad_norm": 0.5, "autocast": nullcontext}
            step.update(self.state, [self.toy.batch(number)], self.toy.loss_fn, **plan)
        return self

    def document(self):
        return {
            "optimizer": self.optimizer.model_dump(mode="json"),
            "ema": self.ema.model_dump(mode="json"),
            "objective": self.objective,
        }

    def goes_on_from(self, other):
        """As `run/state_io.py` does it."""
        saved = {f: {k: t.clone() for k, t in own.items()} for f, own in other.state.tensors().items()}
        shapes = {file: {name: tuple(t.shape) for name, t in own.items()} for file, own in saved.items()}
        kept = carried(self.state, shapes, other.document(), self.optimizer, self.ema, self.objective)
        found = {f: {name: saved[f][source] for name, source in own.items()} for f, own in kept.files.items()}
        self.state.load(found, other.state.document(), kept.anew, kept.unlike)
        return kept.notices

    def moments(self):
        """State by parameter name and entry; lists of numbers."""
        names = {p: name for name, p in self.state.trained.items()}
        order = [names[p] for p in self.state.optimizer.parameters]
        found = {}
        for key, tensor in self.state.optimizer.tensors().items():
            number, _, entry = key.partition(".")
            found[f"{order[int(number)]} {entry}" if number != "group" else key] = tensor.flatten().tolist()
        return found


@pytest.mark.parametrize(
    ("old", "new"),
    chosen(itertools.permutations(NAMES, 2), lambda old, new: (NAMES.index(new) - NAMES.index(old)) % len(NAMES) == 1),
)
def test_another_optimizer_starts_anew_and_keeps_nothing(toy, old, new):
    before = Run(toy, old).update(0, 1, 2)
    after = Run(toy, new, seed=1)
    averages = ", nor of the averages that it evaluates with" if old == "schedule_free" else ""
    said = after.goes_on_from(before)
    assert said == [f"the state of {new} starts from nothing: nothing of {old}'s is kept{averages}"]
    goes_on_as_a_fresh_one(before, after, Run(toy, new))


def goes_on_as_a_fresh_one(before, after, fresh):
    """`fresh` is given the weights alone."""
    fresh.state.net.load_state_dict(before.state.net.state_dict())
    fresh.state.step, fresh.state.slots = before.state.step, before.state.slots
    for run in (after, fresh):
        run.update(3, 4)
    assert after.state.step == 5
    assert after.moments() == fresh.moments()
    for own, expected in zip(after.state.parameters, fresh.state.parameters, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("name", "new", "why"),
    [
        ("schedule_free", {"beta1": 0.5}, "the state of schedule_free starts from nothing: it is made with beta1"),
        ("prodigy", {"d0": 1e-3}, "the state of prodigy starts from nothing: it is made with d0"),
        ("prodigy", {"beta1": 0.0}, "the optimizer state of 4 of 4 parameters starts from nothing"),
        ("adafactor", {"beta1": 0.5}, "the optimizer state of 4 of 4 parameters starts from nothing"),
    ],
)
def test_what_the_whole_state_is_made_with_starts_it_anew_and_keeps_nothing(toy, name, new, why):
    before, after = Run(toy, name).update(0, 1, 2), Run(toy, name, seed=1, **new)
    assert after.goes_on_from(before) == [why]
    goes_on_as_a_fresh_one(before, after, Run(toy, name, **new))


@pytest.mark.parametrize("name", NAMES)
def test_moments_stay_with_their_parameter_whatever_groups_number_it(toy, name):
    """inner.weight and out.weight have as many numbers, so that an exchange of their moments would fit."""
    rates = {"learning_rate_factors": {"out.*": 0.5}} if name != "prodigy" else {}
    before = Run(toy, name).update(0, 1, 2)
    after = Run(toy, name, seed=1, weight_decay=0.1, weight_decay_exclude=["inner.weight"], **rates)
    orders = [[p.shape for p in run.state.optimizer.parameters] for run in (before, after)]
    assert (orders[0] == orders[1]) is (name == "muon"), "its matrices come first in any case"
    assert after.goes_on_from(before) == []
    kept = {k: v for k, v in after.moments().items() if not k.startswith("group")}
    assert kept == {k: v for k, v in before.moments().items() if not k.startswith("group")}
    after.update(3)
    again = Run(toy, name, seed=2)
    again.goes_on_from(after)
    assert again.update(4).state.step == 5


@pytest.mark.parametrize("name", NAMES)
def test_other_numbers_alone_keep_all_moments(toy, name):
    before = Run(toy, name).update(0, 1)
    after = Run(toy, name, seed=1, learning_rate=0.5, weight_decay=0.3)
    assert after.goes_on_from(before) == []
    assert after.moments() == before.moments()


@pytest.mark.parametrize(
    ("name", "old", "new", "anew"),
    [
        ("adafactor", {}, {"beta1": 0.9}, 4),
        ("adafactor", {"beta1": 0.9}, {}, 4),
        ("muon", {}, {"adamw_for": ["out.*"]}, 1),
        ("muon", {"adamw_for": ["out.*"]}, {}, 1),
        ("prodigy", {"beta1": 0.0}, {}, 4),
        ("prodigy", {}, {"beta1": 0.0}, 4),
    ],
)
def test_a_parameter_whose_state_is_made_of_something_else_starts_anew(toy, name, old, new, anew):
    before, after = Run(toy, name, **old).update(0, 1, 2), Run(toy, name, seed=1, **new)
    assert after.goes_on_from(before) == [f"the optimizer state of {anew} of 4 parameters starts from nothing"]
    fresh = Run(toy, name, **new).update(0)
    assert after.update(3).moments().keys() == fresh.moments().keys()


def test_averages_switched_on_start_from_the_weights(toy):
    before, after = Run(toy).update(0, 1, 2), Run(toy, ema=ON, seed=1)
    assert "the averages start from the weights" in after.goes_on_from(before)[0]
    for name, average in after.state.ema.averages.items():
        assert torch.equal(average, before.state.trained[name])
    assert "ema" in after.update(3).state.tensors()


def test_averages_of_schedule_free_are_not_taken_for_those_of_the_recipe(toy):
    before, after = Run(toy, "schedule_free").update(0, 1, 2), Run(toy, ema=ON, seed=1)
    after.goes_on_from(before)
    for name, average in after.state.ema.averages.items():
        assert torch.equal(average, before.state.trained[name])


def test_averages_that_are_switched_off_are_dropped(toy):
    both = EMASettings(decay=0.9, post_hoc=[0.1, 0.2])
    before, after = Run(toy, ema=both).update(0, 1), Run(toy, ema=EMASettings(enabled=False, post_hoc=[0.2]), seed=1)
    assert after.goes_on_from(before) == ["the averages are dropped", "the averages of width 0.1 are dropped"]
    assert {"ema", "post_hoc_0_1", "post_hoc_0_2"} & after.update(2).state.tensors().keys() == {"post_hoc_0_2"}


class Table:
    """An objective that learns something."""

    def __init__(self, size):
        self.table = torch.zeros(size)

    def observe(self, terms, valid_B):
        """Nothing."""

    def absorb(self, total, skip):
        self.table = self.table + 1

    def state(self):
        return {"table": self.table}

    def load_state(self, tensors):
        self.table = tensors["table"].clone()


@pytest.mark.parametrize(("old", "new"), [(None, 3), (3, None), (3, 5), (3, 3)])
def test_what_another_objective_learns_starts_anew(toy, old, new):
    before = Run(toy, learnt=old and Table(old)).update(0, 1)
    after = Run(toy, learnt=new and Table(new), seed=1)
    after.objective = {"name": "another"}
    said = after.goes_on_from(before)
    if old == new:
        assert said == []
        assert after.state.objective.table.tolist() == [2] * new
    else:
        assert said == [
            "what the objective learns starts from nothing" if new else "what the objective has learnt is dropped"
        ]
        assert after.state.objective.state() == {} or not after.state.objective.table.any()
    after.update(2)


@pytest.mark.parametrize("begins", [True, False])
def test_the_scale_of_the_loss_comes_and_goes_with_float16(toy, begins):
    before = Run(toy, precision=None if begins else Precision(compute=torch.float16)).update(0)
    after = Run(toy, precision=Precision(compute=torch.float16) if begins else None, seed=1)
    assert after.goes_on_from(before) == (["the scale of the loss starts from nothing"] if begins else [])
    assert ("scaler" in after.update(1).state.tensors()) is begins
