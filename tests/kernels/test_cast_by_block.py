"""Weights that are trained and cast block by block: the same bits as by autocast, which casts each by itself."""

import copy
from itertools import product

import pytest
import torch
from diffusers import StableCascadeUNet, UNet2DConditionModel
from quick_cases import chosen
from tiny_cascade import IMAGE, POOLED, TEXT, TINY_C
from tiny_models import TEXT_WIDTH, TINY_UNET
from torch import nn

from daguerre.kernels import narrow

CPU = torch.device("cpu")


def unet():
    given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 7.0]), torch.randn(2, 7, TEXT_WIDTH)
    return UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), given, {}


def stage_c():
    texts = {"clip_text": torch.randn(2, 7, TEXT), "clip_img": torch.randn(2, 1, IMAGE)}
    given = torch.randn(2, 16, 4, 4), torch.tensor([0.2, 0.9])
    return StableCascadeUNet(**TINY_C), given, texts | {"clip_text_pooled": torch.randn(2, 1, POOLED)}


def computed(net, given, named):
    """Prediction and gradients of two micro-batches."""
    torch.manual_seed(1)  # of dropout
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(*given, **named).sample
        y.float().square().mean().backward()
    return {"": y.detach()} | {name: p.grad for name, p in net.named_parameters()}


CASES = chosen(
    product([unet, stage_c], [False, True], [narrow.LARGEST, 3000]),
    lambda made, checkpointed, largest: made is not unet or (checkpointed and largest == 3000),
)


@pytest.mark.parametrize(("made", "checkpointed", "largest"), CASES)
def test_gradients_are_the_same_to_the_bit(made, checkpointed, largest, monkeypatch):
    monkeypatch.setattr(narrow, "LARGEST", largest)
    torch.manual_seed(0)
    net, given, named = made()
    net.train()
    if checkpointed:
        net.enable_gradient_checkpointing()
    next(net.parameters()).requires_grad_(False)
    at_once = copy.deepcopy(net)
    casts = []
    copying = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (casts.append(len(of)), copying(to, of)))
    narrow.cast_by_block(at_once, CPU)
    found, expected = computed(at_once, given, named), computed(net, given, named)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] is None if gradient is None else torch.equal(found[name], gradient), name
    cast = sum(casts)
    assert len(casts) < cast, "some are cast together"
    assert all(isinstance(p, nn.Parameter) for m in at_once.modules() for p in m._parameters.values() if p is not None)


def test_without_autocast_nothing_is_cast(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: pytest.fail("a cast"))
    net, given, named = unet()
    expected = net(*given, **named).sample
    narrow.cast_by_block(net, CPU)
    assert torch.equal(net(*given, **named).sample, expected)
