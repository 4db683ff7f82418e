"""Blocks with the kernels of a GPU in them are one graph each for torch.compile, traced on a CPU without compiling.

A path that only a GPU chooses: `training.kernels=auto` puts Triton's norms and gates into no network of a CPU. Their
custom operators trace without Triton, as shapes alone.
"""

import pytest
import torch
from diffusers import StableCascadeUNet, UNet2DConditionModel
from known_networks import BLOCKS, known
from peft import LoraConfig, inject_adapter_in_model
from tiny_cascade import IMAGE, POOLED, TEXT, TINY_B, TINY_C
from tiny_models import SDXL_UNET, TEXT_WIDTH, TINY_UNET, tiny_vae

from daguerre.adapters.lora_parts.forward import cast_together, lighten
from daguerre.families.cascade.facts import STAGE
from daguerre.kernels import blocks, swap
from daguerre.training.performance import kernels
from daguerre.training.precision.quantized import QuantizedLinear, quantized

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
"""torch.compile imports what torch deprecates, and warns of functions with a cache, which it traces."""
TIME = torch.tensor([3.0, 7.0])


def unet():
    given = torch.randn(2, 4, 8, 8), TIME, torch.randn(2, 7, TEXT_WIDTH)
    return UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH), given, {}


def unet_with_lora():
    net, given, sizes = unet()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "to_v", "ff.net.0.proj", "conv1"]), net)
    lighten([*net.modules()])
    return net, given, sizes


def unet_with_lora_as_on_a_gpu():
    net, given, sizes = unet()
    targets = ["to_q", "to_k", "to_v", "ff.net.0.proj", "conv1"]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets), net)
    lighten([*net.modules()])
    assert cast_together([known(net)]) > 0
    return net, given, sizes


def unet_of_8_bits_with_lora(chosen="int8"):
    net, given, sizes = unet_with_lora()
    for block in net.modules():
        for name, layer in block.named_children():
            if type(layer) is torch.nn.Linear and "lora" not in name and not isinstance(block, torch.nn.ModuleDict):
                setattr(block, name, quantized(layer, chosen))
    assert any(isinstance(module, QuantizedLinear) for module in net.modules())
    return net, given, sizes


def unet_of_products_of_int8_with_lora():
    return unet_of_8_bits_with_lora("int8_products")


def unet_of_products_of_float8_with_lora():
    return unet_of_8_bits_with_lora("float8_products")


def sdxl():
    width = SDXL_UNET["cross_attention_dim"]
    added = {"text_embeds": torch.randn(2, 40), "time_ids": torch.ones(2, 6)}
    return UNet2DConditionModel(**SDXL_UNET), (torch.randn(2, 4, 8, 8), TIME, torch.randn(2, 7, width)), added


def stage_c():
    given = torch.randn(2, 16, 4, 4), torch.tensor([0.2, 0.9])
    texts = {"clip_text": torch.randn(2, 7, TEXT), "clip_img": torch.randn(2, 1, IMAGE)}
    return StableCascadeUNet(**TINY_C), given, texts | {"clip_text_pooled": torch.randn(2, 1, POOLED)}


def stage_b():
    given = torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.9])
    beside = {"clip_text_pooled": torch.randn(2, 1, POOLED), "effnet": torch.randn(2, 16, 2, 2)}
    return StableCascadeUNet(**TINY_B), given, beside


def autoencoder():
    return tiny_vae(), (torch.randn(2, 3, 16, 16),), {}


def breaks(function, *args, **kwargs):
    """How often a graph breaks, why, and how many operators there are."""
    torch.compiler.reset()
    found = torch._dynamo.explain(function)(*args, **kwargs)
    return found.graph_break_count, [reason.reason for reason in found.break_reasons], found.op_count


UNETS = (
    *(unet, unet_with_lora, unet_with_lora_as_on_a_gpu, unet_of_8_bits_with_lora),
    *(unet_of_products_of_float8_with_lora, sdxl),
)
"""Of these `make test` has the one that has most of them in it, a UNet of products of 8 bits with a LoRA."""


@pytest.mark.parametrize(
    "made",
    [
        *(pytest.param(made, marks=pytest.mark.long) for made in UNETS),
        unet_of_products_of_int8_with_lora, stage_c, stage_b, autoencoder,
    ],
)  # fmt: skip
def test_every_kind_of_block_is_one_graph(made):
    torch.manual_seed(0)
    net, given, named = made()
    net.train()
    kernels.layout([net], fused=True, last=True)
    swap.responses(net)
    met = {}  # a block of each kind, with what it is given

    def keep(block, args, kwargs):
        met.setdefault(type(block), (block, args, kwargs))

    compiled = [block for block in net.modules() if blocks._is_of_diffusers(block, {*BLOCKS, *STAGE.blocks})]
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in compiled]
    extra = {"added_cond_kwargs": named} if made is sdxl else named
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(*given, **extra)
        for hook in hooks:
            hook.remove()
        assert met
        for block, args, kwargs in met.values():
            count, reasons, operators = breaks(block, *args, **kwargs)
            assert (count, reasons) == (0, []), type(block).__name__
            assert operators > 2


@pytest.mark.long  # of the quick tests, every kind of block is one graph, which is what is compiled
def test_a_whole_unet_is_one_graph():
    net, given, _ = unet()
    kernels.layout([net], fused=True, last=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert breaks(net, *given)[:2] == (0, [])
