"""Updates of the recipes' twins whose passes are recorded and replayed learn what others learn, to the bit.

The tape stands for a CUDA graph: a number of the host that a pass reads stays what it was when it was recorded.
"""

from dataclasses import replace

import pytest
import torch
from tape import Tape
from transformers import masking_utils
from twins import Twins, begun_from, tree

from daguerre.assembly import recorded
from daguerre.bench.options import Options
from daguerre.bench.variants import Update
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.training.performance.recording import BEFORE, Recorder

QUICK = ("cascade_c", "sd15_controlnet")
"""Weights by level that are learnt and dropout; an adapter that reads images."""
WHOLE = ("training.per_device_batch_size=2",)
"""Norms over a batch want it whole."""
TRAINED = [name for name in recipe.shipped() if tree(name)["training"]["duration"] != "0 steps"]
ALONE = [name for name in TRAINED if begun_from(name) is None]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """transformers asks whether a mask hides anything, but not while a GPU records."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("twins"))


def variant(twins, name, tmp_path, *more):
    given = [*twins.overrides(name), "training.global_batch_size=2", "training.per_device_batch_size=1", *more]
    config = configs.load(name, [*given, "cache.path=null"]).config
    return Update(config, Options(inputs="pixels"), tmp_path)


def learnt(twins, name, tmp_path, recorder):
    try:
        made = variant(twins, name, tmp_path)
    except UserError:  # norms or a loss over the whole batch
        made = variant(twins, name, tmp_path, *WHOLE)
    made.state.recorder = recorder
    for _ in range(BEFORE + 3):
        made.step()
    tensors = {f"{file}/{key}": rows for file, own in made.state.tensors().items() for key, rows in own.items()}
    return made.parts, tensors


def check(twins, name, tmp_path):
    parts, expected = learnt(twins, name, tmp_path, None)
    if parts.is_ragged or parts.objective.follows_updates:
        pytest.skip("it is refused")
    _, found = learnt(twins, name, tmp_path, Recorder(tape := Tape()))
    assert (tape.recorded, tape.replayed) == (1, 3)
    assert found.keys() == expected.keys()
    assert [key for key, rows in expected.items() if not torch.equal(rows, found[key])] == []


@pytest.mark.parametrize("name", QUICK)
def test_recorded_updates_learn_the_same(name, twins, tmp_path):
    check(twins, name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ALONE if name not in QUICK])
def test_recorded_updates_of_every_recipe_learn_the_same(name, twins, tmp_path):
    check(twins, name, tmp_path)


def test_what_cannot_be_recorded_is_refused(twins, tmp_path):
    with pytest.raises(UserError, match="on a CPU"):
        variant(twins, "cascade_a", tmp_path, *WHOLE, "training.capture=true")
    for name, words in (("flux3_klein_lora", "differ in shape"), ("cascade_a", "the number of the update")):
        made = variant(twins, name, tmp_path, *WHOLE)
        training = made.config.training.model_copy(update={"capture": True})
        on_gpu = replace(made.parts, device=torch.device("cuda"))
        with pytest.raises(UserError, match=words):
            recorded.recorder(made.config.model_copy(update={"training": training}), on_gpu)
