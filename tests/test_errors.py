"""What every UserError carries, and that it survives the ways in which errors travel."""

from __future__ import annotations

import pickle
from typing import get_args

import pytest
from refusals import refused

from daguerre import errors
from daguerre.config.config import load
from daguerre.errors import ReportedElsewhere, UserError


def test_a_refusal_carries_its_code_and_the_setting_to_change() -> None:
    with refused("conflict", "data.path", "sks"):
        raise UserError("sks is there already", code="conflict", setting="data.path")
    plain = UserError("no")
    assert (plain.code, plain.setting) == ("invalid", None)


def test_a_kind_of_error_has_a_code_of_its_own() -> None:
    assert errors.ProcessLost("gone").code == "failed"
    assert errors.ProcessLost("gone", code="unreachable").code == "unreachable"
    assert {each.code for each in UserError.__subclasses__()} <= set(get_args(errors.Code))


def test_what_an_error_carries_survives_pickling_and_the_way_to_other_ranks() -> None:
    error = pickle.loads(pickle.dumps(UserError("no room", code="resources", setting="data.cache_gb")))  # noqa: S301
    assert (str(error), error.code, error.setting) == ("no room", "resources", "data.cache_gb")
    elsewhere = ReportedElsewhere(error)
    assert (elsewhere.code, elsewhere.setting) == ("resources", "data.cache_gb")


def test_one_problem_of_a_recipe_names_its_setting() -> None:
    with pytest.raises(UserError) as caught:
        load("quickstart", ["training.max_grad_norm=-1"])
    assert caught.value.setting == "training.max_grad_norm"
