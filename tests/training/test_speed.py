"""What the settings of speed mean on a device, and what is refused."""

import pytest
import torch
from diffusers import StableCascadeUNet, UNet2DConditionModel
from known_networks import BLOCKS
from pydantic import ValidationError
from tiny_cascade import TINY_C
from tiny_models import TEXT_WIDTH, TINY_UNET, tiny_vae
from torch import nn

from daguerre.errors import UserError
from daguerre.kernels import attention, available, channels_last, products, swap
from daguerre.training.performance import kernels
from daguerre.training.precision import dtypes
from daguerre.training.settings import TrainingSettings

CPU = torch.device("cpu")


def settings(**given):
    return TrainingSettings.model_validate({"duration": "1 steps", "global_batch_size": 1} | given)


def kinds(**given):
    """Types of modules in a UNet and in a frozen network beside it."""
    nets = [UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH) for _ in range(2)]
    kernels.apply(settings(**given), nets[0], nets, BLOCKS, CPU)
    found = [{type(module) for module in net.modules()} for net in nets]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("faster", [False, True])
def test_a_cpu_by_default_has_channels_last_and_the_faster_products(monkeypatch, faster):
    monkeypatch.setattr(products, "faster", lambda: faster)
    found = kinds()
    assert channels_last.Block in found
    assert (products.Product in found) == faster
    assert not {swap.Norm, swap.NormSiLU, swap.Gated, attention.Measured} & found


@pytest.mark.parametrize(
    ("instructions", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX2", "AuthenticAMD", False), ("AVX512", "GenuineIntel", False)],
)
def test_products_are_convolutions_where_mkl_leaves_half_of_the_instructions(
    monkeypatch, instructions, vendor, expected
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(products.system, "cpu_facts", lambda: f"vendor_id\t: {vendor}\n")
    assert products.faster.__wrapped__() == expected


def test_plain_means_torchs_own_modules():
    found = kinds(kernels="plain", channels_last=False)
    assert not any(kind.__module__.startswith("daguerre") for kind in found)


def test_attention_is_measured_where_it_is_asked_for():
    assert attention.Measured in kinds(attention="measured")


def test_a_gpu_has_kernels_and_channels_last_by_default(monkeypatch):
    monkeypatch.setattr(available, "triton", lambda device: device.type == "cuda")
    gpu = torch.device("cuda")
    assert kernels.uses_triton(settings(), gpu)
    assert kernels.channels_are_last(settings(), True, gpu)
    assert not kernels.uses_triton(settings(kernels="plain"), gpu)
    assert not kernels.channels_are_last(settings(), False, gpu), "its own norms put channels first again"
    assert kernels.channels_are_last(settings(channels_last=True), False, gpu)


def strides(monkeypatch, **given):
    """Of the weights of 3x3 convolutions, on a GPU that nothing asks for numbers; the network, and one beside it."""
    monkeypatch.setattr(available, "triton", lambda device: device.type == "cuda")
    net, like = (UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH) for _ in range(2))
    like.load_state_dict(net.state_dict())
    kernels.apply(settings(attention="fused", **given), net, [], BLOCKS, torch.device("cuda"))
    return {p.stride()[1] for p in net.parameters() if p.ndim == 4 and p.shape[2] > 1}, net, like


def test_weights_of_convolutions_lie_as_the_images_of_a_gpu(monkeypatch):
    found, net, like = strides(monkeypatch)
    assert found == {1}
    ours, theirs = net.state_dict(), like.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    given = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 7.0]), torch.randn(2, 5, TEXT_WIDTH)
    assert torch.allclose(net(*given).sample, like(*given).sample, atol=1e-5)


def test_weights_stay_where_images_have_their_channels_first(monkeypatch):
    assert strides(monkeypatch, kernels="plain")[0] == {9}
    assert strides(monkeypatch, channels_last=False)[0] == {9}


@pytest.mark.parametrize(
    ("there", "why"), [(False, "not installed"), (True, "a CPU can run Triton kernels only for tests")]
)
def test_kernels_that_cannot_be_are_refused(monkeypatch, there, why):
    monkeypatch.setattr(available, "installed", lambda: there)
    with pytest.raises(UserError, match=f"training.kernels=triton: .*{why}"):
        kinds(kernels="triton")


def test_layout_asks_no_device():
    with torch.device("meta"):
        net = UNet2DConditionModel(**TINY_UNET, cross_attention_dim=TEXT_WIDTH)
    kernels.layout([net], fused=True, last=True)
    assert {swap.NormSiLU, swap.Gated, channels_last.Block} <= {type(module) for module in net.modules()}


def test_the_layout_of_a_gpu_has_the_norms_of_stable_cascade():
    with torch.device("meta"):
        net = StableCascadeUNet(**TINY_C)
    kernels.layout([net], fused=True, last=True)
    assert {swap.ActivatedResponseNorm, swap.ImageNorm} <= {type(module) for module in net.modules()}


def test_compiled_blocks_do_not_measure():
    with pytest.raises(ValidationError, match="attention=measured does not work with compile=blocks"):
        settings(compile="blocks", attention="measured")
    with pytest.raises(UserError, match=r"training.compile=blocks: no block"):
        kernels.apply(settings(compile="blocks"), nn.Linear(2, 2), [], BLOCKS, CPU)


def test_frozen_networks_encode_in_bf16_where_there_is_one_that_encodes():
    trained = nn.Linear(2, 2)
    vae = tiny_vae().requires_grad_(False)
    kernels.apply(settings(frozen_precision="bf16"), trained, [vae], BLOCKS, CPU)
    assert vae.encode(torch.rand(1, 3, 32, 32)).latent_dist.mean.dtype == torch.float32
    assert "forward" in vars(vae.encoder)
    with pytest.raises(UserError, match="frozen_precision=bf16: there is no frozen encoder"):
        kernels.apply(settings(frozen_precision="bf16"), trained, [tiny_vae()], BLOCKS, CPU)


def test_a_gpu_without_bf16_refuses_it(monkeypatch):
    monkeypatch.setattr(dtypes, "has_bf16", lambda device: False)
    with pytest.raises(UserError, match="this GPU has no bf16"):
        kernels.apply(
            settings(frozen_precision="bf16"), nn.Linear(2, 2), [tiny_vae().requires_grad_(False)], BLOCKS, CPU
        )
