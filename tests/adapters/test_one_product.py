"""Layers that read one input as one product: numbers of the separate ones, weights that keep their names and places."""

import copy
import weakref
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from known_networks import known
from peft import LoraConfig, inject_adapter_in_model
from quick_cases import chosen
from safetensors.torch import load_file
from tiny_models import TEXT_WIDTH, TINY_UNET, tiny_text_encoder
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from daguerre.adapters.lora_parts import forward
from daguerre.adapters.lora_parts.one_product import Product, joined, traced
from daguerre.kernels import blocks
from daguerre.models.network import Facts, Network

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj"]


class Operators(TorchDispatchMode):
    """Counts what a GPU would be asked to do, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not (operation.is_view or "empty" in operation.__name__):
            self.names.append(operation.__name__.split(".")[0])
        return operation(*args, **kwargs or {})


def network(net):
    """With the facts of its class, or of an attention by itself, whose keys and values alone read one input."""
    attention = Facts(readers=(("", "to_k", "to_v"),))
    return Network(net, "denoiser", attention) if isinstance(net, Attention) else known(net)


def pair(net, **settings):
    """A network with additions whose factors are cast together, and a copy that computes each layer by itself."""
    config = {"r": 4, "lora_alpha": 2, "target_modules": ATTENTION} | settings
    inject_adapter_in_model(LoraConfig(**config), net)
    for name, p in net.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    forward.lighten([*net.modules()])
    ours = copy.deepcopy(net)
    assert forward.cast_together([network(ours)]) > 0
    return ours, net


def unet(**settings):
    torch.manual_seed(0)
    return pair(UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), **settings)


INPUTS = (2, 4, 8, 8), (2, 7, TEXT_WIDTH)


def gradients(net, wide=False, inputs=INPUTS):
    """The result of a UNet and gradients of what is trained, by name."""
    torch.manual_seed(1)
    images, text = (torch.randn(shape) for shape in inputs)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=not wide):
        y = net(images, 500, text).sample
    (y.float() * torch.randn_like(images)).sum().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in net.named_parameters() if p.grad is not None}}


def off(result, exact):
    return ((result.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("product", [Product.apply, traced])
@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_product_is_the_sum_of_its_parts_forward_and_backward(n, bias, strength, product):
    torch.manual_seed(0)
    x, w = torch.randn(10, 6, requires_grad=True), torch.randn(n, 5, 6)
    a, b = torch.randn(n, 2, 6, requires_grad=True), torch.randn(n, 5, 2, requires_grad=True)
    c = torch.randn(n, 5) if bias else None
    parts = [F.linear(x, w[i] + strength * b[i] @ a[i], c[i] if bias else None) for i in range(n)]
    given = (a[0], b[0]) if n == 1 else (a, b)
    factors = [t.detach().requires_grad_() for t in given]
    rows = x.detach().requires_grad_()
    results = product(rows, w.flatten(0, 1), c.flatten() if bias else None, *factors, strength)
    for result, part in zip(results, parts, strict=True):
        torch.testing.assert_close(result, part)
    ways = torch.randn(n, 10, 5)
    torch.autograd.backward(parts, [*ways])
    torch.autograd.backward(results, [*ways])
    for tensor, exact in zip((rows, *factors), (x, a, b), strict=True):
        torch.testing.assert_close(tensor.grad, exact.grad.view_as(tensor))


def test_a_result_that_nobody_uses_has_a_gradient_of_zero():
    a, b = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    first, _ = Product.apply(torch.randn(4, 6), torch.randn(10, 6), None, a, b, 1.0)
    first.sum().backward()
    assert a.grad[0].any()
    assert b.grad[0].any()
    assert not a.grad[1].any()
    assert not b.grad[1].any()


def test_joined_weights_share_memory_and_keep_their_numbers():
    layers = [nn.Linear(3, 4).requires_grad_(False) for _ in range(3)]
    weights, before = [layer.weight for layer in layers], torch.cat([layer.weight for layer in layers])
    whole = joined(weights)
    assert torch.equal(whole, before)
    assert torch.equal(torch.cat([layer.weight for layer in layers]), before)
    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))
    layers[1].weight.mul_(2)
    again = joined(weights)
    assert again.data_ptr() == whole.data_ptr()
    assert torch.equal(again[4:8], 2 * before[4:8])
    layers[2].weight.data = torch.ones(4, 3)
    assert torch.equal(joined(weights)[8:], torch.ones(4, 3))
    nn.ModuleList(layers).double()
    assert torch.equal(joined(weights)[:4], before[:4].double())


SETTINGS: list[dict[str, Any]] = [{}, {"rank_pattern": {"attn1.to_k": 2}}, {"target_modules": ["to_k", "to_v"]}]


@pytest.mark.parametrize("settings", chosen(SETTINGS, lambda given: "rank_pattern" in given))
def test_a_unet_agrees_with_separate_products_within_rounding(settings):
    ours, net = unet(**settings)
    exact, one, each = gradients(net, wide=True), gradients(ours), gradients(net)
    assert one.keys() == each.keys() == exact.keys()
    worst, usual = (max(off(result[name], wanted) for name, wanted in exact.items()) for result in (one, each))
    # The library's own products round by what the machine's bf16 products do, ours by hardly more.
    assert usual < 5e-2
    assert worst < 1.5 * usual


def test_a_text_encoder_agrees_with_separate_products_within_rounding():
    torch.manual_seed(0)
    ours, net = pair(tiny_text_encoder())
    ids, way, results = torch.randint(0, 500, (2, 9)), torch.randn(2, 9, TEXT_WIDTH), []
    for one in (ours, net):
        with torch.autocast("cpu", torch.bfloat16):
            (one(ids).last_hidden_state * way).sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
    assert off(*results) < 2e-2
    layer = ours.encoder.layers[0].self_attn
    assert layer.q_proj.base_layer.weight.untyped_storage().data_ptr() == (
        layer.v_proj.base_layer.weight.untyped_storage().data_ptr()
    )


def test_operators_of_an_attention():
    """Forward: base, A, B. Backward: of what A gives, of the input by base and A, of A, of B."""
    torch.manual_seed(0)
    ours, _ = pair(Attention(16, heads=2, dim_head=8))
    for layer in (ours.to_k, ours.to_v):
        layer.base_layer.bfloat16()
    x = torch.randn(2, 5, 16).bfloat16().requires_grad_()
    ours.set_processor(lambda attention, x, **_: (attention.to_k(x), attention.to_v(x)))
    with torch.autocast("cpu", torch.bfloat16):
        ours(x)  # weights are put together
        with Operators() as seen:
            y = ours(x)
        assert seen.names == ["_foreach_copy_", "_foreach_mul_", "mm", "mm", "baddbmm_"]
    ways = [torch.ones_like(t) for t in y]
    with Operators() as seen:
        torch.autograd.backward(y, ways)
    assert seen.names == ["cat", "baddbmm_", "mm", "addmm_", "mm", "baddbmm_", "_foreach_copy_", "_foreach_mul_"]


def test_layers_that_read_different_inputs_are_computed_apart():
    """As Stable Cascade's attention, whose queries are of the image alone."""
    torch.manual_seed(0)
    ours, net = pair(Attention(16, heads=2, dim_head=8, bias=True))
    x, other = torch.randn(2, 5, 16), torch.randn(2, 8, 16)
    for processor in (None, lambda attention, x, encoder_hidden_states, **_: attention.to_k(x) + attention.to_v(2 * x)):
        with torch.autocast("cpu", torch.bfloat16):
            results = []
            for one in (ours, net):
                one.set_processor(processor or one.get_processor())
                results.append(one(x, encoder_hidden_states=other))
        assert off(*results) < 2e-2


def test_inputs_of_recomputed_blocks_leave_memory():
    ours, _ = unet()
    block = ours.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    inputs = []
    block.to_q.register_forward_pre_hook(lambda layer, given: inputs.append(weakref.ref(given[0])))
    ours.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    kept = gradients(unet()[0])
    again = gradients(ours.train())
    assert all(torch.equal(again[name], wanted) for name, wanted in kept.items())
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(torch.randn(INPUTS[0]), 500, torch.randn(INPUTS[1])).sample
    assert len(inputs) == 3
    assert inputs[-1]() is None
    assert y.requires_grad


@pytest.mark.long
def test_the_base_is_written_and_merged_as_it_was(tmp_path):
    ours, net = unet()
    gradients(ours)
    base = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert ours.state_dict().keys() == base.keys()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in base.items())
    for one in (ours, net):
        for layer in [module for module in one.modules() if hasattr(module, "merge")]:
            layer.merge()
    merged = net.state_dict()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in merged.items())
    ours.save_pretrained(tmp_path)
    written = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in merged.items())
    for layer in [module for module in ours.modules() if hasattr(module, "merge")]:
        layer.unmerge()
    x = torch.randn(INPUTS[0]), 500, torch.randn(INPUTS[1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert off(ours(*x).sample, net(*x).sample) < 2e-2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_blocks_have_the_same_gradients(recomputed, tmp_path):
    """Twice: what a pass leaves behind, and moved factors, must not be compiled in."""
    torch.compiler.reset()
    ours, net = unet()
    if recomputed:
        ours.train().enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert blocks.compile_blocks(ours, {"BasicTransformerBlock"}, torch.device("cpu"), str(tmp_path)) > 1
    for _ in range(2):
        exact, compiled, each = gradients(net, wide=True), gradients(ours), gradients(net)
        worst, usual = (max(off(result[name], wanted) for name, wanted in exact.items()) for result in (compiled, each))
        assert usual < 5e-2
        assert worst < 1.5 * usual
        for one in (ours, net):
            for name, p in one.named_parameters():
                if "lora_B" in name:
                    p.data.mul_(2)
