"""What is computed before the first update leaves no trace, and finds blocks that were compiled wrongly."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import assert_equal, lines, outcome, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from daguerre import errors
from daguerre.adapters.adapter import Attached
from daguerre.assembly.parts import Components
from daguerre.errors import UserError
from daguerre.objectives.objective import Objective
from daguerre.run import preflight
from daguerre.run.summary import describe_first_pass
from daguerre.training.precision import quantized
from daguerre.training.precision.dtypes import Precision
from daguerre.types import Batch, LossTerms

BATCH = Batch(None, {"image": torch.zeros(2, 3, 1, 1)}, ["", ""], torch.ones(2), ["a", "b"], np.zeros((2, 6)))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Net(nn.Module):
    """With a running statistic, which moves in training mode, and dropout, which draws."""

    def __init__(self, mistake=0.0):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.mistake = mistake

    def forward(self, x):
        self.calls += self.training
        y = self.weight * x + self.bias
        return y + self.mistake * self.bias.sum() if torch.compiler.is_compiling() else y


class OneWay(nn.Module):
    """A product with a backward pass of its own, which torch runs without gradient."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x @ torch.eye(5)

    def forward(self, x):
        return self.Product.apply(x)


def parts(net, compute=torch.float32):
    x0 = torch.arange(6.0).view(2, 3)

    class Squares(Objective):
        def loss(self, nets, example):
            x0 = example.clean["image"]
            return LossTerms(nets.student(x0 + 0 * torch.rand(())).square().mean(1), torch.zeros(2))

    encoded = {"image": (x0, {})}
    family = SimpleNamespace(encode_each=lambda batch, targets: encoded, guidance=None, components={"net": net})
    return Components(family, Squares(), Attached(net, {}), torch.device("cpu"), Precision(compute), 0, {})


@pytest.mark.parametrize("measure", [preflight.seconds, preflight.check_compiled_code])
def test_it_leaves_no_trace(measure):
    net, random = Net(), torch.get_rng_state()
    measure(parts(net), BATCH)
    assert net.calls == 0
    assert net.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_of_a_base_of_few_bits_statistics_are_copied_and_no_codes():
    """Codes are buffers as well: a copy would be a second base."""
    copied = set[torch.dtype]()

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.clone.default:
                copied.add(args[0].dtype)
            return func(*args, **kwargs or {})

    net = nn.Sequential(nn.BatchNorm1d(3), quantized.quantized(nn.Linear(3, 3), "int8"))
    with Copies():
        preflight.seconds(parts(net), BATCH)
    assert torch.int64 in copied, "batches that a norm has seen"
    assert torch.int8 not in copied
    assert net[0].num_batches_tracked == 0


def test_arithmetic_is_counted_without_a_trace():
    net = Net()
    assert preflight.training_flops_per_sample(parts(net), BATCH) == 0.0, "no products"
    assert net.calls == 0


def test_passes_without_gradient_are_counted_once():
    """Of a student that answers with and without gradient, of its first weights, and of a critic in the loss."""
    net, critic = nn.Sequential(nn.Linear(3, 5), OneWay()), nn.Linear(5, 7)

    class Distils(Objective):
        def loss(self, nets, example):
            x0 = example.clean["image"]
            with torch.no_grad():
                target = nets.student(x0) + nets["reference"](x0)
            return LossTerms(critic(nets.student(x0) - target).square().mean(1), torch.zeros(2))

    made = replace(parts(net), objective=Distils(), others={"reference": torch.no_grad()(net.forward)})
    each, once_more = 2 * 3 * 5 + 2 * 5 * 5, 2 * 5 * 7
    assert preflight.training_flops_per_sample(made, BATCH) == (3 + 1 + 1) * each + 3 * once_more
    assert all(p.grad is None for p in (*net.parameters(), *critic.parameters()))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_was_compiled_wrongly_is_refused_and_what_was_not_trains(compute):
    for mistake, wrong in [(0.0, False), (1e-5, False), (0.5, True)]:
        net = Net(mistake)
        net.compile(backend="eager")
        if wrong:
            with pytest.raises(UserError, match=r"compiled these networks wrongly: .* 2 of 2 parameters"):
                preflight.check_compiled_code(parts(net, compute), BATCH)
        else:
            preflight.check_compiled_code(parts(net, compute), BATCH)
        assert net.calls == 0


def test_gradients_that_are_not_finite_uncompiled_are_no_sign_of_wrong_code():
    net = Net()
    net.weight.data[0] = torch.nan
    net.compile(backend="eager")
    preflight.check_compiled_code(parts(net), BATCH)


def test_gradients_that_are_not_finite_when_compiled_are():
    net = Net(torch.inf)
    net.compile(backend="eager")
    with pytest.raises(UserError, match="compiled these networks wrongly"):
        preflight.check_compiled_code(parts(net), BATCH)


@pytest.mark.long
def test_a_run_of_compiled_blocks_trains_goes_on_and_learns_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    short = ["training.duration=3 steps", "checkpoint.every=1 step", "logging.every=1 step", "sampling.num_images=0"]
    short += ["data.checked_prompts=1"]
    assert train(tmp_path / "plain", *short) == errors.DONE
    more_of = {"blocks": [], "again": ["training.gradient_checkpointing=true"], "dropped": ["model.unet.dropout=0.1"]}
    assert train(tmp_path / "plain-dropped", *short, *more_of["dropped"]) == errors.DONE
    for name, more in more_of.items():
        given = [*short, "training.compile=blocks", *more]
        assert train(tmp_path / name, *given) == errors.DONE
        expected = outcome(tmp_path / name / "tiny")
        assert train(tmp_path / name, *given, "resume_from_checkpoint=step-00000002") == errors.DONE
        assert_equal(tmp_path / name / "tiny", expected)
        wanted, found = (
            [line["learning/loss"] for line in lines(tmp_path / run / "tiny") if "learning/loss" in line]
            for run in ("plain-dropped" if name == "dropped" else "plain", name)
        )
        assert found == pytest.approx(wanted, rel=1e-5)
    assert any((tmp_path / "daguerre" / "compiled").rglob("*")), "compiled code is kept for the next run"


def test_a_line_before_it_says_what_is_computed():
    pixels, reference = torch.zeros((2, 3, 64, 48)), torch.zeros((2, 3, 32, 96))
    batch = replace(BATCH, images={"image": pixels, "reference": reference, "reference_2": pixels}, names=["a", "b"])
    said = "first pass, which tells how long the run takes: 2 samples of 48x64 px"
    assert describe_first_pass(batch) == f"{said}, with reference images of 96x32 px, 48x64 px each"
    assert describe_first_pass(replace(batch, images={"image": pixels})) == said
    cached = replace(batch, images={"image": pixels}, features={"reference.mean": pixels})
    assert describe_first_pass(cached) == f"{said}, with reference images"
