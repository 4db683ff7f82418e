"""Kernels put into networks from outside: the same numbers, the same names, and only what is known is touched."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_stable_cascade import SDCascadeLayerNorm
from peft import LoraConfig, inject_adapter_in_model
from quick_cases import crossed
from tiny_models import SDXL_UNET, TEXT_WIDTH, TINY_UNET, tiny_vae
from torch import nn

from daguerre.kernels import biases, channels_last, products, swap
from daguerre.training.performance import kernels

UNETS = {
    "SD": TINY_UNET | {"cross_attention_dim": TEXT_WIDTH},
    "SDXL": SDXL_UNET,
    "of vectors for times": TINY_UNET | {"cross_attention_dim": TEXT_WIDTH, "resnet_time_scale_shift": "scale_shift"},
}


def unet(name):
    torch.manual_seed(0)
    return UNet2DConditionModel(**UNETS[name]).train()


def computed(net):
    """Prediction and gradients."""
    torch.manual_seed(1)
    width = net.config.cross_attention_dim
    added = (
        {"text_embeds": torch.randn(2, 40), "time_ids": torch.randn(2, 6)} if net.config.addition_embed_type else None
    )
    x = torch.randn(2, 4, 8, 8)
    y = net(x, torch.tensor([3.0, 7.0]), torch.randn(2, 5, width), added_cond_kwargs=added).sample
    y.square().mean().backward()
    return {"": y.detach()} | {name: p.grad for name, p in net.named_parameters()}


def assert_alike(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    norm = sum(float(t.double().square().sum()) for t in theirs.values())
    away = sum(float((ours[n] - t).double().square().sum()) for n, t in theirs.items())
    assert (away / norm) ** 0.5 <= tolerance
    assert any(not torch.equal(ours[n], t) for n, t in theirs.items()), "something else has computed it"


def everything(net):
    swap.norms(net)
    swap.gates(net)
    swap.rows(net)
    swap.divisors(net)
    channels_last.enable(net)
    products.enable(net)


def as_on_a_gpu(net):
    kernels.layout([net], fused=True, last=True)


CHANGES = {"norms": swap.norms, "gates": swap.gates, "channels last": channels_last.enable, "all": everything}
CHANGES |= {"on a GPU": as_on_a_gpu}


@pytest.mark.parametrize(("change", "name"), crossed([*CHANGES], [*UNETS]))
def test_numbers_and_names_stay(name, change):
    net = unet(name)
    swapped = copy.deepcopy(net)
    CHANGES[change](swapped)
    assert [(n, p.shape, p.stride()) for n, p in swapped.named_parameters()] == [
        (n, p.shape, p.stride()) for n, p in net.named_parameters()
    ]
    assert swapped.state_dict().keys() == net.state_dict().keys()
    found, expected = computed(swapped), computed(net)
    assert_alike(found, expected)


def test_counts_say_what_was_changed():
    net = unet("SD")
    blocks = sum(isinstance(m, ResnetBlock2D) for m in net.modules())
    transformers = sum(type(m).__name__ == "Transformer2DModel" for m in net.modules())
    gates = sum(type(m) is GEGLU for m in net.modules())
    assert min(blocks, transformers, gates) > 0
    assert swap.norms(net) == 2 * blocks + transformers + 1
    assert swap.gates(net) == gates
    assert swap.norms(net) == swap.gates(net) == 0, "once"


def test_biases_are_added_by_what_is_added_anyway():
    net = unet("SD")
    blocks = [m for m in net.modules() if isinstance(m, ResnetBlock2D)]
    cuts = [m for m in net.modules() if type(m) is nn.Conv2d and m.kernel_size == (1, 1)]
    short = [block for block in blocks if block.conv_shortcut is not None]
    assert 0 < len(short) < min(len(blocks), len(cuts))
    names = net.state_dict().keys()
    assert swap.pointwise(net) == len(cuts)
    assert swap.shifts(net) == len(blocks) + len(short)
    assert swap.pointwise(net) == swap.shifts(net) == 0, "once"
    assert net.state_dict().keys() == names
    block = short[0]
    x, time = torch.randn(2, block.in_channels, 4, 4), torch.randn(2, block.time_emb_proj.in_features)
    before = block(x, time)
    for convolution in (block.conv1, block.conv2):
        with torch.no_grad():
            convolution.bias += torch.randn_like(convolution.bias)  # a norm takes what all channels have in common
        assert not torch.allclose(block(x, time), before, atol=1e-3), "it is added nowhere"


def test_layers_with_an_adapter_keep_their_biases():
    """An addition to a layer, as of DoRA, may ask what the layer itself has added."""
    net = unet("SD")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv1", "conv2", "time_emb_proj", "conv_shortcut"]), net)
    assert swap.shifts(net) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_biases_are_sums_of_rows(dtype, monkeypatch):
    monkeypatch.setattr(biases, "_FEWEST", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding="same"), nn.Flatten(2), nn.Linear(16, 5))
    net[3].weight.requires_grad_(False)
    swapped = copy.deepcopy(net)
    assert biases.enable(swapped) == 2, "a padding by its name stays torch's"
    x = torch.randn(4, 3, 8, 8)
    for each in (net, swapped):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            each(x).float().square().sum().backward()
    assert swapped[3].weight.grad is None
    for (name, p), q in zip(net.named_parameters(), swapped.parameters(), strict=True):
        if p.requires_grad:
            assert torch.allclose(q.grad, p.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3), name
    frozen = copy.deepcopy(net).requires_grad_(False)
    assert biases.enable(frozen) == 0


def test_a_block_that_scales_between_norm_and_activation_stays():
    net = unet("of vectors for times")
    swap.norms(net)
    blocks = [m for m in net.modules() if isinstance(m, ResnetBlock2D)]
    assert all(type(block.norm2) is nn.GroupNorm and isinstance(block.nonlinearity, nn.SiLU) for block in blocks)


def test_an_autoencoder_encodes_and_decodes_as_before():
    torch.manual_seed(0)
    vae = tiny_vae().eval()
    swapped = copy.deepcopy(vae)
    everything(swapped)
    assert isinstance(swapped, AutoencoderKL)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        for before, after in (
            (vae.encode(x).latent_dist.parameters, swapped.encode(x).latent_dist.parameters),
            (vae.decode(x[:, :1].expand(1, 4, 16, 16)).sample, swapped.decode(x[:, :1].expand(1, 4, 16, 16)).sample),
        ):
            assert torch.allclose(before, after, rtol=1e-4, atol=1e-5)


def test_what_is_saved_loads_into_a_network_without_kernels(tmp_path):
    net = unet("SD")
    expected = computed(net)
    everything(net)
    net.save_pretrained(tmp_path)
    again = UNet2DConditionModel.from_pretrained(tmp_path).train()
    assert type(again.conv_norm_out) is nn.GroupNorm
    assert torch.equal(computed(again)[""], expected[""])


def test_gradient_checkpointing_computes_the_same_again():
    net = unet("SD")
    everything(net)
    expected = computed(net)
    net.zero_grad()
    net.enable_gradient_checkpointing()
    assert all(torch.equal(value, expected[name]) for name, value in computed(net).items())


@pytest.mark.parametrize("name", UNETS)
def test_convolutions_see_channels_last(name):
    net = unet(name)
    channels_last.enable(net)
    net.train()
    others = []

    def look(module, inputs, output):
        if not inputs[0].is_contiguous(memory_format=torch.channels_last):
            others.append(module)

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(look)
    computed(net)
    assert not others


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_norms_keep_their_digits_with_channels_last(mean):
    """torch's own loses all but one here."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 32)
    channels_last.enable(nn.Sequential(norm))
    x = (torch.randn(2, 32, 16, 16) + mean).to(memory_format=torch.channels_last).requires_grad_()
    wide = x.detach().double().contiguous().requires_grad_()
    dy = torch.randn(2, 32, 16, 16)
    y, expected = norm(x), torch.nn.functional.group_norm(wide, 8)
    assert torch.allclose(y.double(), expected, atol=1e-6 + 1e-6 * mean)
    (dx,), (theirs,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    assert torch.allclose(dx.double(), theirs, atol=1e-6 + 1e-6 * mean)


def test_norms_of_16_bits_with_channels_last_are_rounded_once():
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 32)
    channels_last.enable(nn.Sequential(norm))
    x = (torch.randn(2, 32, 16, 16) + 3).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    wide, dy = x.detach().double().contiguous().requires_grad_(), torch.randn(2, 32, 16, 16).bfloat16()
    y, expected = norm(x), torch.nn.functional.group_norm(wide, 8)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    once = {"rtol": 2**-8, "atol": 1e-5}
    assert torch.allclose(y.double(), expected, **once)
    (dx,), (theirs,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    assert torch.allclose(dx.double(), theirs, **once)


def test_without_it_they_do_not():
    net, firsts = unet("SD"), []
    net.conv_out.register_forward_hook(lambda module, inputs, output: firsts.append(inputs[0].is_contiguous()))
    computed(net)
    assert firsts == [True]


def test_blocks_drop_out_in_training_alone():
    net = UNet2DConditionModel(**UNETS["SD"], dropout=0.5)
    channels_last.enable(net)
    torch.manual_seed(3)
    assert not torch.equal(computed(net.train())[""], computed(net.eval())[""])
    assert torch.equal(computed(net.eval())[""], computed(net.eval())[""])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(480, 200), (3, 160, 200)])
def test_large_products_are_those_of_linear(monkeypatch, shape, bias):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    layer = nn.Linear(200, 160, bias=bias)
    expected = [layer(x), *torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))]
    called = []
    convolve = torch.nn.functional.conv2d
    monkeypatch.setattr(products.F, "conv2d", lambda *given: (called.append(1), convolve(*given))[1], raising=True)
    assert products.enable(nn.Sequential(layer)) == 1
    y = layer(x)
    found = [y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]
    assert len(called) == 1
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(found, expected, strict=True))
    layer(x[:2])
    layer(torch.randn(481, 200))  # does not divide into images
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert len(called) == 1, "small products and those of other types stay"


def in_bf16(net):
    """Prediction and gradients under autocast, and how often a LayerNorm gave float32."""
    wide = []
    hooks = [
        m.register_forward_hook(lambda module, given, y: wide.append(y.dtype == torch.float32))
        for m in net.modules()
        if isinstance(m, nn.LayerNorm)
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = computed(net)
    for hook in hooks:
        hook.remove()
    return {name: t.float() for name, t in found.items()}, wide


def away(found, expected):
    norm = sum(float(t.double().square().sum()) for t in expected.values())
    return (sum(float((found[n] - t).double().square().sum()) for n, t in expected.items()) / norm) ** 0.5


@pytest.mark.parametrize("name", ["SDXL", pytest.param("SD", marks=pytest.mark.long)])
def test_layer_norms_of_autocast_keep_16_bits_and_lose_nothing_by_it(name, monkeypatch):
    """Beside float32, prediction and gradients in bf16 are as near as they are with float32 norms, which a GPU's
    autocast has and a CPU's has not."""
    net = unet(name)
    ours = copy.deepcopy(net)
    assert swap.rows(ours) == sum(type(m) is nn.LayerNorm for m in net.modules()) > 0
    expected = computed(net)
    assert all(torch.equal(a, b) for a, b in zip(computed(ours).values(), expected.values(), strict=True))
    net.zero_grad(), ours.zero_grad()
    wide_norm = nn.LayerNorm.forward

    def as_on_a_gpu(self, x):
        with torch.autocast("cpu", enabled=False):
            return wide_norm(self, x.float())

    monkeypatch.setattr(nn.LayerNorm, "forward", as_on_a_gpu)
    widened, wide = in_bf16(net)
    assert all(wide)
    kept, wide = in_bf16(ours)
    assert not any(wide)
    assert away(kept, expected) < 1.1 * away(widened, expected) < 0.05
    for n, gradient in expected.items():
        if "norm" in n and "transformer_blocks" in n:
            assert away({n: kept[n]}, {n: gradient}) < 1.5 * away({n: widened[n]}, {n: gradient}) + 0.02, n


def test_the_norm_of_images_is_taken_too():
    norm = SDCascadeLayerNorm(8, elementwise_affine=False, eps=1e-6)
    image = torch.randn(2, 8, 3, 5, dtype=torch.bfloat16)
    expected = norm(image.float())
    assert swap.rows(nn.Sequential(norm)) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norm(image)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, rtol=2**-8, atol=0)
    assert norm(image.float()).dtype == torch.float32


def test_nothing_is_divided_by_one():
    net, scaled = (UNet2DConditionModel(**UNETS["SD"], mid_block_scale_factor=s).train() for s in (1, 2))
    divisions = sum(isinstance(m, ResnetBlock2D) + (type(m).__name__ == "Attention") for m in net.modules())
    expected = computed(net)
    assert swap.divisors(net) == divisions
    assert swap.divisors(net) == 0
    net.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(computed(net).values(), expected.values(), strict=True))
    assert swap.divisors(scaled) < divisions, "a block that divides by 2 goes on to"
    assert any(getattr(m, "output_scale_factor", None) == 2 for m in scaled.modules())
