"""Training in float8 (training.float8): the loss beside that of bf16, what is written, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from adapter_runs import Place, assert_equal, updated
from quick_cases import long

from daguerre import errors
from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.training.precision.float8 import Float8Linear

RECIPE = """
run_name: full
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16}
training: {duration: "4 steps", global_batch_size: 4, mixed_precision: bf16}
optimizer: {learning_rate: 1e-3}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: [a dog]}
validation: {every: null}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("float8"), "sd", RECIPE, captions=True)


def losses(place: Place, updates: int, *more: str) -> tuple[list[float], torch.nn.Module]:
    """Of so many updates on one batch; and the net."""
    given = place.config("ema.enabled=false", *more)
    parts = build(given, torch.device("cpu"), trains=True)
    return updated(given, parts, updates)[1], parts.net


@pytest.mark.parametrize(("scaling", "updates"), [("rowwise", 4), *long([("rowwise", 12), ("tensorwise", 12)])])
def test_losses_are_those_of_bf16_within_the_bound(place, scaling, updates):
    plain, net = losses(place, updates)
    own, of_float8 = losses(place, updates, f"training.float8={scaling}")
    count = sum(isinstance(module, Float8Linear) for module in of_float8.modules())
    assert count == 48
    assert not any(isinstance(module, Float8Linear) for module in net.modules())
    assert own != plain
    assert own == pytest.approx(plain, rel=3e-2)
    assert plain[-1] < 0.9 * plain[0]
    assert {name: (p.shape, p.dtype) for name, p in of_float8.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in net.named_parameters()
    }


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_and_generates_without_it(place, capsys):
    given = "training.float8=tensorwise"
    assert place.train("whole", given) == errors.DONE
    assert "48 linear layers multiplied in float8 (tensorwise)" in capsys.readouterr().out
    assert place.train("stopped", given, "training.duration=2 steps") == errors.DONE
    assert place.train("stopped", given) == errors.DONE
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("whole", group), place.tensors("stopped", group))
    assert main.run(["generate", str(place.folder / "whole"), "prompt=a dog"]) == errors.DONE
    assert place.train("whole", "training.float8=no") == errors.REFUSED  # what is learnt is another


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["adapter.name=lora"], "for the linear layers of a denoiser that are trained, .*float8_products"),
        (
            ["devices=2", "mesh.ici_tensor_parallelism=2"],
            "training.float8=rowwise: scales are .* the mesh's tensor axis",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(place, more, why, capsys):
    assert main.run(["plan", str(place.recipe), *place.given("training.float8=rowwise", *more)]) == errors.REFUSED
    assert re.search(why, " ".join(capsys.readouterr().err.split()))
