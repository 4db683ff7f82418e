"""The contract of every family with a transformer, found by its file: with the kernels of a GPU it computes what it
computes without them, and in bf16 it is no farther from float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_recipes
import pytest
import tiny_families
import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from quick_cases import quick_where
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from daguerre.contracts.families import asked
from daguerre.kernels import blocks
from daguerre.models.family import Family
from daguerre.models.network import block_classes
from daguerre.training.performance import kernels

SIZE = (3, 64, 64)
NAMES = quick_where(lambda name: name in ("flux2", "krea2", "z_image"), family_recipes.WITH_TRANSFORMER)
"""Quick are one with each kind of RMSNorm, and of rotary positions."""
LEFT = {"anima", "qwen_image_21"}
"""Families whose attention is left to turn positions as it does: the one imports the function whenever it is called,
the other is ours."""


class Operators(TorchDispatchMode):
    """The names of ours that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "daguerre":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def computed(family: Family, bf16: bool) -> dict[str, Tensor]:
    """Prediction and gradients of a denoiser, in float32 or under autocast."""
    cond, _ = family.encode_prompts(asked(family, ["a red dog", "a"]), SIZE)
    x = torch.randn(2, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(2))
    family.net.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        y = family.net(x, torch.tensor([0.3, 0.7]), {**cond, "guidance": torch.tensor([1.0, 3.5])})
    y.float().square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in family.net.named_parameters() if p.grad is not None}
    return {"": y.detach().float(), **gradients}


def away(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    norm = sum(float(t.double().square().sum()) for t in expected.values())
    return float(sum(float((found[n] - t).double().square().sum()) for n, t in expected.items()) / norm) ** 0.5


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own RMSNorm under autocast
@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_a_gpu_compute_the_same(name: str, tmp_path: Path) -> None:
    family = tiny_families.load(name, tmp_path)
    family = family.training(family.trainable[:1])
    theirs = {bf16: computed(family, bf16) for bf16 in (False, True)}
    kernels.layout([family.net], fused=True, last=False)
    with Operators() as called:
        ours = {bf16: computed(family, bf16) for bf16 in (False, True)}
    assert away(ours[False], theirs[False]) < 1e-5
    assert 0 < away(ours[True], theirs[False]) < 1.1 * away(theirs[True], theirs[False])
    left = {type(module) for module in family.net.modules()} & {nn.LayerNorm, nn.RMSNorm, RMSNorm, Krea2RMSNorm}
    assert left == set(), "each norm is ours"
    assert ("rotary" in called.names) == (name not in LEFT)
    kernels.layout([family.net], fused=True, last=False)
    again = computed(family, True)
    assert all(torch.equal(t, ours[True][n]) for n, t in again.items()), "once is as often as it is asked for"


@pytest.mark.long  # of the quick tests, kernels/test_graphs.py
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", family_recipes.WITH_TRANSFORMER)
def test_blocks_with_kernels_of_a_gpu_are_one_graph_each(name: str, tmp_path: Path) -> None:
    family = tiny_families.load(name, tmp_path)
    family = family.training(family.trainable[:1])
    kernels.layout([family.net], fused=True, last=False)
    met: dict[type, Any] = {}  # a block of each kind, with what it is given

    def keep(block: nn.Module, args: Any, kwargs: Any) -> None:
        met.setdefault(type(block), (block, args, kwargs))

    wanted = block_classes(family.networks.values())
    found = [block for block in family.net.modules() if blocks._is_of_diffusers(block, wanted)]
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in found]
    computed(family, True)
    for hook in hooks:
        hook.remove()
    assert met
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for block, args, kwargs in met.values():
            torch.compiler.reset()
            told = torch._dynamo.explain(block)(*args, **kwargs)
            assert (told.graph_break_count, [each.reason for each in told.break_reasons]) == (0, []), type(block)
            assert told.op_count > 2
