"""Each optimizer against the library it is from, or the paper's formula; patterns, and what is refused."""

import re
import sys
from contextlib import nullcontext

import prodigyopt
import pytest
import schedulefree
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import RAdam
from transformers.optimization import Adafactor

from daguerre import plugins
from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError, install
from daguerre.run.schedule import peak_learning_rate
from daguerre.training import step
from daguerre.training.optimizers import adamw_8bit
from daguerre.training.optimizers.groups import decay_groups
from daguerre.training.optimizers.optimizer import Optimizer, OptimizerPart, build
from daguerre.training.settings import EMASettings
from daguerre.training.state import evaluating


def update(toy, state, batch, rate=0.01):
    return step.update(state, [batch], toy.loss_fn, learning_rate=rate, max_grad_norm=0.05, autocast=nullcontext)


def alone(toy, optimizers, net, updates=10):
    """The same updates by a bare loop with other optimizers."""
    for number in range(updates):
        toy.loss_fn(net, toy.batch(number)).loss_B.mean().backward()
        clip_grad_norm_(net.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def groups(net, decay):
    matrices, others = ([p for p in net.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def ours(toy, name, rate=0.01, **changes):
    state = toy.state(0, name, weight_decay=0.1, **changes)
    for number in range(10):
        update(toy, state, toy.batch(number), rate)
    return state


def assert_equal(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_adafactor_is_transformers(toy):
    net = toy.state().net
    fixed = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    alone(toy, [Adafactor(groups(net, 0.1), lr=0.01, beta1=0.8, decay_rate=-0.7, **fixed)], net)
    assert_equal(ours(toy, "adafactor", beta1=0.8, decay_rate=0.7).net, net)


def test_prodigy_is_prodigyopt(toy):
    net = toy.state().net
    optimizer = prodigyopt.Prodigy(groups(net, 0.1), lr=1.0, d_coef=2.0, safeguard_warmup=True)
    alone(toy, [optimizer], net)
    state = ours(toy, "prodigy", rate=1.0, d_coef=2.0, safeguard_warmup=True)
    assert_equal(state.net, net)
    assert state.optimizer.parts[0].optimizer.param_groups[0]["d"] == optimizer.param_groups[0]["d"] > 1e-6


def test_schedule_free_is_schedulefree_at_its_averages_too(toy):
    net = toy.state().net
    optimizer = schedulefree.AdamWScheduleFree(groups(net, 0.1), lr=0.01, betas=(0.95, 0.99))
    optimizer.train()
    alone(toy, [optimizer], net)
    state = ours(toy, "schedule_free", beta1=0.95, beta2=0.99)
    assert_equal(state.net, net)
    optimizer.eval()
    with evaluating(state):
        assert_equal(state.net, net)
    for name, average in state.tensors()["ema"].items():
        torch.testing.assert_close(average, net.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(toy):
    net = toy.state().net
    matrices, others = groups(net, 0.1)
    muon = torch.optim.Muon([matrices], lr=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    alone(toy, [muon, torch.optim.AdamW([others], lr=0.01)], net)
    assert_equal(ours(toy, "muon", momentum=0.9).net, net)


def test_muon_leaves_named_matrices_to_adamw(toy):
    state = toy.state(0, "muon", adamw_for=["out.*"])
    muon, adamw = (part.parameters for part in state.optimizer.parts)
    assert [p is state.net.inner.weight for p in muon] == [True]
    assert {id(p) for p in adamw} == {id(p) for n, p in state.net.named_parameters() if n != "inner.weight"}
    with pytest.raises(UserError, match="none of the trained parameters is a matrix"):
        toy.state(0, "muon", adamw_for=["*"])
    with pytest.raises(UserError, match=r"optimizer.adamw_for: '\*embed\*' matches no trained parameter"):
        toy.state(0, "muon", adamw_for=["*embed*"])


RECORDED = {
    "came": [11.69229, 2.231471, 8.249046, -19.183284],  # came_pytorch 0.1.3, of its authors
    "stable_adamw": [5.888251, 2.240296, 12.117699, -15.804503],  # pytorch_optimizer 4.1.0
    "soap": [6.242474, 2.206888, 11.432409, -15.583851],  # soap.py of its authors, nikhilvyas/SOAP a1e5535
}
"""Sums of weights x cos(0, 1, 2 ...) after 25 updates by `recorded`, of the code that is named."""


@pytest.mark.parametrize("name", RECORDED)
def test_weights_are_those_of_the_authors_code(name):
    """Matrices, a bias, kernels; a gradient ten times as large on the way; two sides without directions of their own.
    A side of 12 has some that its first gradient, of rank 8, does not tell: each LAPACK finds others there."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 8), (8,), (6, 4, 3, 3), (5, 40)]
    trained = {f"{i}": nn.Parameter(torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)}
    own = {"max_precondition_dim": 10} if name == "soap" else {}
    settings = plugins.find("optimizers", name).Settings(weight_decay=0.1, weight_decay_exclude=[], **own)
    optimizer = build(settings, trained)
    for number in range(25):
        for p in trained.values():
            p.grad = torch.randn(p.shape, generator=generator) * (1 + 10 * (number == 7))
        optimizer.step(0.01, torch.tensor(False))
    found = [
        float((p.detach().double().flatten() * torch.arange(p.numel()).double().cos()).sum()) for p in trained.values()
    ]
    assert found == pytest.approx(RECORDED[name], abs=2e-5)


def test_lion_is_algorithm_2_of_its_paper(toy):
    net = toy.state().net
    momenta = [torch.zeros_like(p) for p in net.parameters()]
    for number in range(10):
        toy.loss_fn(net, toy.batch(number)).loss_B.mean().backward()
        clip_grad_norm_(net.parameters(), 0.05)
        with torch.no_grad():
            for p, m in zip(net.parameters(), momenta, strict=True):
                direction = torch.sign(0.9 * m + 0.1 * p.grad)
                p -= 0.01 * (direction + (0.1 if p.ndim > 1 else 0.0) * p)
                m.copy_(0.99 * m + 0.01 * p.grad)
                p.grad = None
    assert_equal(ours(toy, "lion").net, net)


def test_one_that_counts_in_a_tensor_counts_from_its_first_update():
    """As torch's own do: the update in which its state is made is none."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = plugins.find("optimizers", "adamw").Settings(learning_rate=0.01, weight_decay=0.1)
    wrapped = RAdam(decay_groups(settings, dict(ours.named_parameters())), decoupled_weight_decay=True)
    optimizer = Optimizer((OptimizerPart(wrapped, "restored"),))
    bare = RAdam(groups(theirs, 0.1), lr=0.01, decoupled_weight_decay=True)
    for _ in range(10):  # its second moment counts from the sixth update on
        x_BD = torch.randn(4, 3)
        for net in (ours, theirs):
            net.zero_grad()
            net(x_BD).square().mean().backward()
        optimizer.step(0.01, torch.tensor(False))
        bare.step()
    assert_equal(ours, theirs)


class Wide(nn.Module):
    """Large enough for moments of 8 bits."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(3, 2000), nn.Linear(2000, 3)

    def forward(self, x_BD):
        return self.out(torch.tanh(self.inner(x_BD)))


def test_adamw_8bit_keeps_the_contract_with_the_kernels_for_cpus(toy):
    pytest.importorskip("bitsandbytes", reason="to be installed: pip install -c constraints.txt bitsandbytes")

    def make():
        torch.manual_seed(0)
        state = toy.state(ema=EMASettings(enabled=False))
        state.net = net = Wide()
        trained = dict(net.named_parameters())
        state.trained = trained
        settings = plugins.find("optimizers", "adamw_8bit").Settings()
        state.optimizer = Optimizer((adamw_8bit.part(settings, trained),))
        return state

    def snapshot(state):
        return {k: t.clone() for f in ("model", "optimizer") for k, t in state.tensors().get(f, {}).items()}

    whole, first = make(), make()
    for number in range(12):
        update(toy, whole, toy.batch(number, poison=number in (0, 4)), 1e-3)
    for number in range(6):
        before = snapshot(first)
        update(toy, first, toy.batch(number, poison=number in (0, 4)), 1e-3)
        after = snapshot(first)
        if number == 4:
            assert all(torch.equal(before[k], after[k]) for k in before if not k.endswith(".number"))
    assert {t.dtype for t in first.optimizer.tensors().values()} >= {torch.uint8}
    assert not any("qmap" in key for key in first.optimizer.tensors())
    second = make()
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load({k: t.clone() for k, t in first.optimizer.tensors().items()})
    for number in range(6, 12):
        update(toy, second, toy.batch(number), 1e-3)
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_adamw_8bit_is_refused_on_a_cpu_with_the_reason(toy):
    with pytest.raises(UserError, match=r"GPU memory.*use optimizer.name=adamw"):
        toy.state(0, "adamw_8bit")


@pytest.mark.parametrize(("name", "library"), [("prodigy", "prodigyopt"), ("schedule_free", "schedulefree")])
def test_a_library_that_is_missing_is_named_with_what_installs_it(toy, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=re.escape(install(library))):
        toy.state(0, name)


def test_a_missing_bitsandbytes_is_named_with_what_installs_it(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    settings = plugins.find("optimizers", "adamw_8bit").Settings()
    with pytest.raises(UserError, match=re.escape(install("bitsandbytes"))):
        adamw_8bit.part(settings, dict(toy.Net().named_parameters()))


@pytest.mark.parametrize(
    ("pattern", "near"), [("*bais", "inner.bias"), ("iner.*", "inner.weight"), ("*norm*", "inner.weight")]
)
def test_a_pattern_that_matches_nothing_lists_near_names(toy, pattern, near):
    with pytest.raises(UserError, match=r"weight_decay_exclude.*matches no trained parameter") as caught:
        toy.state(weight_decay_exclude=["*.bias", pattern])
    assert near in str(caught.value)


def test_patterns_are_of_what_is_trained(toy):
    net = toy.Net()
    net.out.requires_grad_(False)
    settings = plugins.find("optimizers", "adamw").Settings(weight_decay_exclude=["out.*"])
    with pytest.raises(UserError, match="matches no trained parameter"):
        build(settings, {name: p for name, p in net.named_parameters() if p.requires_grad})


def test_patterns_without_decay_have_no_effect():
    settings = plugins.find("optimizers", "adamw").Settings
    with pytest.raises(ValidationError, match="no effect while weight_decay is 0"):
        settings(weight_decay=0.0, weight_decay_exclude=["*"])


def test_looking_ahead_without_momentum_has_no_effect():
    settings = plugins.find("optimizers", "muon").Settings
    with pytest.raises(ValidationError, match="nesterov: no effect while momentum is 0"):
        settings(momentum=0.0, nesterov=False)
    assert "nesterov" not in settings(momentum=0.0).model_dump()


def test_what_averages_by_itself_is_not_averaged_again_and_needs_no_schedule():
    with pytest.raises(ConfigError) as caught:
        configs.load("quickstart", ["optimizer.name=schedule_free"])
    assert {problem.path for problem in caught.value.problems} == {"ema.enabled", "lr_scheduler.name"}
    fits = ["optimizer.name=schedule_free", "ema.enabled=false", "lr_scheduler.name=constant"]
    assert configs.load("quickstart", fits).config.optimizer.learning_rate == 2.5e-4


def test_another_optimizer_starts_from_its_own_learning_rate():
    loaded = configs.load("quickstart", ["optimizer.name=prodigy"])
    assert loaded.config.optimizer.learning_rate == 1.0
    assert any("optimizer.learning_rate" in notice for notice in loaded.notices)
    kept = configs.load("quickstart", ["optimizer.name=prodigy", "optimizer.learning_rate=0.5"])
    assert kept.config.optimizer.learning_rate == 0.5
    assert configs.load("quickstart").config.optimizer.name == "adamw"


def test_scale_lr_multiplies_with_the_global_batch():
    fixed = ["training.global_batch_size=16", "learning_rate=1e-4"]
    for given, rate in ((["--scale_lr", "True"], 1.6e-3), (["scale_lr=False"], 1e-4), ([], 1e-4)):
        config = configs.load("quickstart", [*fixed, "=".join(given).removeprefix("--")] if given else fixed).config
        assert peak_learning_rate(config, batch_sizes(config)) == pytest.approx(rate)
