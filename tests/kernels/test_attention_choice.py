"""Attention by the fastest kernel: asked once, remembered, the first answer for all; the numbers stay."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from daguerre import user_cache
from daguerre.kernels import attention
from daguerre.kernels.attention import Question
from daguerre.training.performance import flops

QUESTION = Question("a device", "torch.float32", (1, 2, 3, 4), 3, False, True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    attention.fastest.cache_clear()


def test_the_fastest_that_can_is_taken_and_remembered():
    times = {"cudnn": None, "flash": 2.0, "efficient": 1.0, "math": 3.0}
    assert attention.choose(QUESTION, times.get) == "efficient"
    assert attention.choose(QUESTION, {"math": 0.1}.get) == "efficient", "a run that goes on takes the same"
    assert attention.choose(replace(QUESTION, keys=9), {"math": 0.1}.get) == "math"
    (place,) = [
        p for p in (user_cache.folder() / "attention").iterdir() if "efficient" in json.loads(p.read_text())["kernel"]
    ]
    assert json.loads(place.read_text())["seconds"] == {"flash": 2.0, "efficient": 1.0, "math": 3.0}


def test_of_two_processes_the_first_decides():
    def slow(name):
        if name == "math":  # meanwhile another process has answered
            attention.choose(QUESTION, {"flash": 1.0}.get)
        return {"cudnn": 1.0, "math": 2.0}.get(name)

    assert attention.choose(QUESTION, slow) == "flash"
    assert len(list((user_cache.folder() / "attention").iterdir())) == 1


def test_where_no_kernel_can_it_is_plain_products():
    assert attention.choose(QUESTION, {}.get) == "math"


@pytest.mark.parametrize("crossed", [False, True])
def test_the_numbers_stay(crossed):
    torch.manual_seed(0)
    layer = Attention(query_dim=16, heads=2, dim_head=8, cross_attention_dim=12 if crossed else None)
    measured = nn.Sequential(copy.deepcopy(layer))
    assert attention.enable(measured) == 1
    x, text = torch.randn(2, 6, 16), torch.randn(2, 5, 12) if crossed else None
    assert torch.allclose(measured[0](x, text), layer(x, text), atol=1e-6)
    (answer,) = (user_cache.folder() / "attention").iterdir()
    asked = json.loads(answer.read_text())
    assert asked["question"]["queries"] == [2, 2, 6, 8]
    assert asked["question"]["keys"] == (5 if crossed else 6)
    assert set(asked["seconds"]) == {"flash", "math"}, "those that a CPU has"


def test_the_chosen_kernel_comes_first(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "choose", lambda question, measure: "math")
    monkeypatch.setattr(attention, "sdpa_kernel", lambda order, set_priority: (seen.append(order), torch.no_grad())[1])
    layer = Attention(query_dim=16, heads=2, dim_head=8)
    attention.enable(nn.Sequential(layer))
    layer(torch.randn(1, 3, 16))
    assert seen[0][0] == SDPBackend.MATH
    assert len(seen[0]) == len(attention.KERNELS)


def test_nothing_is_measured_where_operators_are_counted_or_tensors_have_no_memory(monkeypatch):
    monkeypatch.setattr(attention, "choose", lambda question, measure: pytest.fail("measured"))
    layer = Attention(query_dim=16, heads=2, dim_head=8)
    plain = flops.count(lambda: layer(torch.randn(1, 3, 16)))
    attention.enable(nn.Sequential(layer))
    assert flops.count(lambda: layer(torch.randn(1, 3, 16))) == plain > 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.randn(1, 3, 16)).shape == (1, 3, 16)
    assert layer.to("meta")(torch.randn(1, 3, 16, device="meta")).shape == (1, 3, 16)
