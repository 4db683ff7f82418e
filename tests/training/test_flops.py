"""Counting arithmetic: against closed forms and against the counted figures of known networks."""

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn

from daguerre.models.weights import architectures
from daguerre.training.performance import flops


def of_step(module, *shapes):
    """Forward and backward pass; the inputs want gradients, too."""
    with torch.device("meta"):
        inputs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        return flops.count(lambda: module.to("meta")(*inputs).sum().backward())


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_convolution_counts_by_its_groups(groups):
    """2 k^2 C_in C_out / groups an output pixel, and as much again for each of two gradients: torch's own counter takes
    the backward pass for that of a dense convolution."""
    module = nn.Conv2d(64, 64, 3, padding=1, groups=groups)
    assert of_step(module, (2, 64, 10, 12)) == 3 * 2 * (2 * 10 * 12) * 9 * 64 * 64 // groups


def test_a_convolution_with_stride_and_a_transposed_one():
    strided = nn.Conv2d(8, 16, 4, stride=2, padding=1)
    assert of_step(strided, (1, 8, 16, 16)) == 3 * 2 * (8 * 8) * 16 * 8 * 16
    back = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
    assert of_step(back, (1, 16, 8, 8)) == of_step(strided, (1, 8, 16, 16))


def test_an_input_without_gradient_costs_a_pass_less():
    module = nn.Conv2d(4, 8, 3, padding=1).to("meta")
    x = torch.zeros(1, 4, 8, 8, device="meta")
    assert flops.count(lambda: module(x).sum().backward()) == 2 * 2 * 64 * 9 * 4 * 8


def test_products_and_attention():
    """6 m n k a product; attention 4 heads L^2 width forward and twice that backward, not the scores once more."""
    assert of_step(nn.Linear(32, 48, bias=False), (5, 32)) == 6 * 5 * 32 * 48
    q = torch.randn(2, 3, 16, 8, requires_grad=True)

    def attend():
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    assert flops.count(attend) == 3 * 4 * (2 * 3) * 16 * 16 * 8
    assert flops.attention_backward(q.shape, q.shape, q.shape, q.shape) == 2 * 4 * (2 * 3) * 16 * 16 * 8


def test_attention_to_text():
    q, k = torch.randn(1, 2, 16, 8, requires_grad=True), torch.randn(1, 2, 5, 8, requires_grad=True)
    counted = flops.count(lambda: nn.functional.scaled_dot_product_attention(q, k, k).sum().backward())
    assert counted == 3 * 4 * 2 * 16 * 5 * 8


def test_what_is_computed_again_is_no_part_of_a_plain_step():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to("meta")
    x = torch.zeros(4, 8, device="meta", requires_grad=True)
    plain = flops.count(lambda: module(x).sum().backward())
    again = flops.count(
        lambda: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum().backward()
    )  # fmt: skip
    assert plain == 2 * 6 * 4 * 8 * 8
    assert again > plain


@pytest.mark.parametrize(
    ("name", "width", "tflops"),
    [
        pytest.param("sd1", 64, 2.407, marks=pytest.mark.long),  # of the quick tests, the autoencoder is known
        pytest.param("sd21", 96, 6.443, marks=pytest.mark.long),
        pytest.param("sd1", 32, 0.537, marks=pytest.mark.long),
        pytest.param("sd21", 64, 2.409, marks=pytest.mark.long),
        pytest.param("sdxl", 128, 20.23, marks=pytest.mark.long),
    ],
)
def test_known_unets(name, width, tflops):
    folder = architectures.FOLDER / name / "unet"
    with torch.device("meta"):
        net = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder))
        sized = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)} if name == "sdxl" else None
        inputs = (torch.zeros(1, 4, width, width), torch.zeros(1), torch.zeros(1, 77, net.config.cross_attention_dim))
        counted = flops.count(lambda: net(*inputs, added_cond_kwargs=sized).sample.sum().backward())
    assert counted / 1e12 == pytest.approx(tflops, rel=1e-3)


def test_known_autoencoder():
    with torch.device("meta"):
        net = AutoencoderKL.from_config(AutoencoderKL.load_config(architectures.FOLDER / "sd1" / "vae"))
        counted = flops.count(lambda: net.encode(torch.zeros(1, 3, 512, 512)))
    assert counted / 1e12 == pytest.approx(1.117, rel=1e-3)
