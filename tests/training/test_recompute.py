"""Gradient checkpointing: the same losses and gradients to the bit, with fewer activations kept."""

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from daguerre.errors import UserError
from daguerre.training.performance import activation_checkpointing
from daguerre.training.precision.dtypes import Precision


class Both(nn.Module):
    """A UNet and a text encoder, as a family has them: neither the outermost module."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                attention_dropout=dropout,
            )
        )  # fmt: skip
        self.unet = UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, cross_attention_dim=16,
            attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), dropout=dropout,
        )  # fmt: skip

    def forward(self, x_BCHW, ids_BT):
        text = self.text_encoder(ids_BT).last_hidden_state
        return self.unet(x_BCHW, torch.tensor([3, 500]), encoder_hidden_states=text, return_dict=False)[0]


class Kept:
    """Numbers that the forward pass keeps for the backward pass."""

    def __init__(self):
        self.numbers = 0

    def __call__(self, tensor):
        self.numbers += tensor.numel()
        return tensor


def outcome(enabled, precision=None, dropout=0.0):
    precision, kept = precision or Precision(), Kept()
    torch.manual_seed(0)
    net = Both(dropout).train()
    if enabled:
        activation_checkpointing.enable(net, [net.unet], precision.attention)
    x, ids = torch.randn(2, 4, 8, 8), torch.randint(0, 60, (2, 77))
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor), precision.forward():
        loss = net(x, ids).float().square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, kept.numbers


@pytest.mark.parametrize(
    ("precision", "dropout"),
    [
        pytest.param(Precision(), 0.0, marks=pytest.mark.long),
        (Precision(), 0.3),
        (Precision(compute=torch.bfloat16), 0.0),
        pytest.param(Precision(kernels=("math",)), 0.0, marks=pytest.mark.long),
    ],
)
def test_losses_and_gradients_are_equal_to_the_bit_and_less_is_kept(precision, dropout):
    plain, gradients, kept = outcome(False, precision, dropout)
    again, others, kept_again = outcome(True, precision, dropout)
    assert torch.equal(plain, again)
    assert gradients.keys() == others.keys()
    assert any(name.startswith("text_encoder.") for name in gradients)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name
    assert kept_again < 0.6 * kept


def test_what_is_computed_again_uses_the_kernel_of_the_first_time():
    with pytest.raises(UserError, match="cudnn cannot compute"):
        outcome(True, Precision(kernels=("cudnn",)))
    seen = []
    precision = Precision(kernels=("math",))

    def attention():
        seen.append(1)
        return precision.attention()

    torch.manual_seed(0)
    net = Both().train()
    activation_checkpointing.enable(net, [], attention)
    with precision.forward():
        loss = net(torch.randn(2, 4, 8, 8), torch.randint(0, 60, (2, 77))).sum()
    loss.backward()
    assert len(seen) >= 4


def test_networks_that_cannot_are_refused(toy):
    with pytest.raises(UserError, match=r"training.gradient_checkpointing: none of the trained networks supports it"):
        activation_checkpointing.enable(toy.Net(), [Both()], Precision().attention)


def test_gradients_through_a_frozen_network_keep_less_too():
    def kept(enabled):
        torch.manual_seed(0)
        net, numbers = Both().train(), Kept()
        net.unet.requires_grad_(False).eval()
        if enabled:
            activation_checkpointing.enable(net.text_encoder, [net.unet], Precision().attention)
        with torch.autograd.graph.saved_tensors_hooks(numbers, lambda tensor: tensor):
            loss = net(torch.randn(2, 4, 8, 8), torch.randint(0, 60, (2, 77))).square().mean()
        loss.backward()
        return numbers.numbers, [p.grad for p in net.text_encoder.parameters()]

    (plain, gradients), (again, others) = kept(False), kept(True)
    assert again < 0.6 * plain
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
