"""Factors that are cast together: numbers of the separate products within rounding, fewer launches, nothing stale."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from daguerre.adapters.lora_parts import forward
from daguerre.kernels import narrow
from daguerre.models.network import Network


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to do."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not (operation.is_view or "empty" in operation.__name__)
        return operation(*args, **kwargs or {})


class Net(nn.Module):
    """Products with a bias and without, of rows and of vectors, and a convolution; a block that may be recomputed."""

    recomputed = False

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 12, 3, padding=1)
        self.to_q, self.to_k = nn.Linear(12, 10, bias=False), nn.Linear(12, 10)
        self.vector, self.idle = nn.Linear(10, 7), nn.Linear(10, 7)

    def block(self, rows):
        return (self.to_q(rows) * torch.tanh(self.to_k(rows))).float()

    def forward(self, x):
        rows = self.conv(x).permute(0, 2, 3, 1)
        y = checkpoint(self.block, rows, use_reentrant=False) if self.recomputed else self.block(rows)
        return self.vector(y.mean((1, 2)))


def network(**given):
    """Ours, whose factors are cast together, and one whose factors are not."""
    torch.manual_seed(0)
    net = Net()
    usual = {"lora_alpha": 2, "target_modules": ["conv", "to_q", "to_k", "vector", "idle"]}
    inject_adapter_in_model(LoraConfig(r=4, **usual | given), net)
    for name, p in net.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(p)
    forward.lighten([*net.modules()])
    own = copy.deepcopy(net)
    assert forward.cast_together([Network(own, "denoiser")]) == len(given.get("target_modules", range(5)))
    return own, net


def computed(net, passes=1, dtype=torch.bfloat16, wide=False):
    """Results and gradients, by name."""
    torch.manual_seed(1)
    net.zero_grad()
    x = torch.randn(2, 6, 8, 8, requires_grad=True)
    for _ in range(passes):
        with torch.autocast("cpu", dtype, enabled=not wide):
            y = net(x)
        torch.manual_seed(2)
        (y.float() * torch.randn_like(y.float())).sum().backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    return {"y": y.detach(), "x": x.grad, **grads}


def off(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [4, 2, 5])
def test_numbers_are_those_of_the_separate_products_within_rounding(alpha, dtype):
    own, net = network(lora_alpha=alpha)
    exact, mine, theirs = computed(net, wide=True), computed(own, dtype=dtype), computed(net, dtype=dtype)
    assert mine.keys() == theirs.keys() == exact.keys()
    assert len(mine) == 2 + 2 * 4, "nothing is computed with the fifth layer, which has no gradient"
    print([(n, off(mine[n], w), off(theirs[n], w)) for n, w in exact.items()])
    assert all(mine[name].dtype == theirs[name].dtype for name in exact)
    worst, usual = (max(off(found[name], wanted) for name, wanted in exact.items()) for found in (mine, theirs))
    assert worst < 2 * usual
    assert worst < (2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_blocks_that_cast_their_weights_leave_factors_alone():
    """Frozen weights of 16 bits need no cast: casting block by block then launches nothing."""
    own, _ = network()
    x = torch.randn(2, 6, 8, 8)

    def launches(net):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), Launches() as seen:
            net(x).sum().backward()
        return seen.count

    for name, p in own.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    without = launches(own)
    narrow.cast_by_block(own, torch.device("cpu"))
    assert launches(own) == without


def test_without_autocast_nothing_changes():
    own, net = network()
    mine, theirs = computed(own, wide=True), computed(net, wide=True)
    assert all(torch.equal(mine[name], wanted) for name, wanted in theirs.items())


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["to_k"]}])
def test_what_is_more_than_two_factors_computes_as_before(config):
    own, net = network(**config)
    mine, theirs = computed(own), computed(net)
    assert all(torch.equal(mine[name], wanted) for name, wanted in theirs.items())


def test_factors_of_16_bits_compute_as_before():
    own, net = network()
    x = torch.randn(2, 6, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own.bfloat16()(x), net.bfloat16()(x))


def test_dropout_draws():
    own, net = network(lora_dropout=0.5)
    dropped, theirs = computed(own.train()), computed(net.train())
    assert off(dropped["y"], theirs["y"]) < 2e-2
    assert off(dropped["y"], computed(own.eval())["y"]) > 0.1


def test_casts_are_a_launch_a_pass_and_no_memory_stays():
    own, net = network()
    with Launches() as mine:
        computed(own)
    with Launches() as theirs:
        computed(net)
    assert theirs.count - mine.count >= 4 * (4 + 2), "casts and strengths, forward and backward, of four layers"
    assert own.to_q.unit is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own(torch.randn(2, 6, 8, 8))
    assert own.to_q.unit is None


@pytest.mark.parametrize("passes", [1, 2])
def test_a_block_that_is_computed_again_has_the_same_numbers(passes):
    own, _ = network()
    kept = computed(own, passes)
    own.recomputed = True
    again = computed(own, passes)
    assert all(torch.equal(again[name], wanted) for name, wanted in kept.items())


def test_two_passes_before_their_backward_passes():
    own, net = network()
    own.recomputed = True
    found = []
    for one in (own, net):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            first, second = one(torch.randn(2, 6, 8, 8)), one(torch.randn(2, 6, 8, 8))
        second.float().sum().backward()
        first.float().square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
    assert off(*found) < 2e-2


def test_factors_that_moved_are_cast_anew():
    own, net = network()
    for one in (own, net):
        one.recomputed = True
        with torch.autocast("cpu", torch.bfloat16):
            one(torch.randn(2, 6, 8, 8))  # without a backward pass
        for name, p in one.named_parameters():
            if "lora_B" in name:
                p.data.mul_(3)
    x = torch.randn(5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert off(own.to_q(x), net.to_q(x)) < 2e-2
    mine, theirs = computed(own), computed(net)
    assert all(off(mine[name], wanted) < 2e-2 for name, wanted in theirs.items())


def test_a_copy_computes_with_its_own_factors():
    own, _ = network()
    x = torch.randn(2, 6, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = own(x)
        twin = copy.deepcopy(own)
        for p in twin.parameters():
            p.data.zero_()
        assert torch.equal(own(x), before)
        assert torch.equal(twin(x), torch.zeros_like(before))
    assert twin.state_dict().keys() == own.state_dict().keys()


def test_frozen_factors_have_no_gradient():
    own, net = network()
    for one in (own, net):
        for name, p in one.named_parameters():
            p.requires_grad_("lora_B" in name)
    mine, theirs = computed(own), computed(net)
    assert mine.keys() == theirs.keys()
    assert len(mine) == 2 + 4
    assert all(off(mine[name], wanted) < 2e-2 for name, wanted in theirs.items())


def test_a_merged_addition_and_a_disabled_one_are_as_ever():
    own, net = network()
    x = torch.randn(2, 6, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for act in ("merge", "unmerge"):
            for one in (own, net):
                getattr(one.to_q, act)()
            assert off(own(x), net(x)) < 2e-2
        for one in (own, net):
            for layer in one.children():
                layer.enable_adapters(False)
        assert torch.equal(own(x), net(x))
