"""Layers with an addition compute what peft's own layers do, to the bit, and in fewer operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from daguerre.adapters.lora_parts import forward

CASES: list[dict[str, Any]] = [
    {"lora_alpha": 8}, {"lora_alpha": 4}, {"lora_alpha": 5}, {"lora_alpha": 8, "use_dora": True},
    {"lora_alpha": 4, "lora_dropout": 0.5},
]  # fmt: skip
NAMES = ["strength 1", "strength 1/2", "strength 5/8", "DoRA", "dropout"]


class Operations(TorchDispatchMode):
    """Counts what a device would be asked to do."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **kwargs or {})


def both(**given: Any) -> tuple[nn.Module, nn.Module]:
    """A network of a linear layer and a convolution with additions: ours, and peft's own."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"conv": nn.Conv2d(6, 12, 3, padding=1), "linear": nn.Linear(12, 10)})
    inject_adapter_in_model(LoraConfig(r=8, target_modules=["conv", "linear"], **given), net)
    for name, p in net.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(p)
    own = copy.deepcopy(net)
    forward.lighten(own.values())
    return own, net


def computed(net: nn.Module, dtype: torch.dtype, autocast: bool) -> tuple[list[Tensor], int]:
    """Results and gradients, and operations."""
    torch.manual_seed(1)
    x = torch.randn(2, 6, 8, 8).to(dtype).requires_grad_()
    with Operations() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net["linear"](net["conv"](x).permute(0, 2, 3, 1))
        y.float().square().sum().backward()
    grads = [p.grad for p in net.parameters() if p.requires_grad]
    return [y, x.grad, *grads], seen.count


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_results_and_gradients_are_those_of_peft(case, dtype, autocast):
    own, net = both(**case)
    (mine, fewer), (theirs, more) = computed(own, dtype, autocast), computed(net, dtype, autocast)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert fewer <= more
    if case["lora_alpha"] == 8 and "use_dora" not in case:
        assert more - fewer >= 4, "two layers, forward and backward"


def test_a_merged_addition_and_a_disabled_one_are_as_ever():
    own, net = both(lora_alpha=5)
    x = torch.randn(3, 12)
    for layer in (own["linear"], net["linear"]):
        layer.merge()
    assert torch.equal(own["linear"](x), net["linear"](x))
    for layer in (own["linear"], net["linear"]):
        layer.unmerge()
        layer.enable_adapters(False)
    assert torch.equal(own["linear"](x), net["linear"].get_base_layer()(x))


def test_shapes_without_memory_are_computed():
    """As `daguerre bench` counts a step."""
    own, _ = both(lora_alpha=5)
    assert own["linear"].to("meta")(torch.empty(3, 12, device="meta")).shape == (3, 10)


def test_one_graph_has_them():
    own, _ = both(lora_alpha=4)
    x = torch.randn(3, 12)
    assert torch.equal(torch.compile(own["linear"], backend="eager", fullgraph=True)(x), own["linear"](x))
