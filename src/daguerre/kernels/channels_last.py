"""Lets the images inside networks of diffusers keep their channels last in memory, as convolutions want them.

The networks take any layout, but lose this one on the way: where a transformer gives its rows back as an image, and
before the short cut of a residual block. What is done here is said from outside, by the types of modules. On a CPU
weights keep their own layout, which costs a convolution less than what it gains; on a GPU they may have it, too.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

_TO_IMAGE = "_get_output_for_continuous_inputs"
"""Method of diffusers' transformers that turns rows into an image."""


class Block(ResnetBlock2D):
    """A residual block that says it is not trained: diffusers asks it before its short cut, to put channels first for
    a warning's sake. Dropout inside it is a module that knows for itself."""

    training = property(lambda self: False, lambda self, mode: None)


class Centred(nn.GroupNorm):
    """A GroupNorm that takes the mean away before: with channels last torch computes the variance on a CPU as a
    difference of sums, which loses the digits of a mean that is large compared with it. The result does not depend on
    it, nor do gradients. Numbers of 16 bits have no such digits, and are computed in float32: with channels last torch
    takes up to ten times as long for them."""

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or input.device.type != "cpu" or input.is_contiguous():
            return super().forward(input)
        if input.element_size() == 2:
            weight, bias = (None if own is None else own.float() for own in (self.weight, self.bias))
            return F.group_norm(input.float(), self.num_groups, weight, bias, self.eps).to(input.dtype)
        with torch.no_grad():
            mean = input.mean((2, 3)).unflatten(1, (self.num_groups, -1)).mean(2)
            mean = mean.repeat_interleave(input.shape[1] // self.num_groups, 1)[:, :, None, None]
        return super().forward(input - mean)


def enable(net: nn.Module) -> int:
    """Images have their channels last from the first convolution on; returns how many places were changed."""
    return sum(_change(module) for module in list(net.modules()))


def weights(net: nn.Module) -> int:
    """Weights of convolutions lie as their images do; returns how many. cuDNN otherwise converts each of them forward
    and backward, and its gradient is copied into the weight's layout. Numbers, and what is saved of them, stay."""
    found = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
    for weight in found:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return len(found)


def _change(module: Any) -> int:
    if type(module) is ResnetBlock2D:
        module.__dict__.pop("training")
        module.__class__ = Block
    elif type(module) is nn.GroupNorm:
        module.__class__ = Centred
    elif isinstance(module, Transformer2DModel) and module.is_input_continuous:
        setattr(module, _TO_IMAGE, MethodType(_image, module))
    elif isinstance(module, Upsample2D) and isinstance(module.conv, nn.Conv2d):
        module.conv.register_forward_pre_hook(_channels_last)
    elif isinstance(getattr(module, "conv_in", None), nn.Conv2d):
        module.conv_in.register_forward_pre_hook(_channels_last)
    else:
        return 0
    return 1


def _channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if inputs[0].ndim != 4:  # an autoencoder of videos, whose images are frames
        return inputs
    return (inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:])


def _image(
    transformer: Any,
    hidden_states: Tensor,
    residual: Tensor,
    batch_size: int,
    height: int,
    width: int,
    inner_dim: int,
) -> Tensor:
    """Rows [B, H W, C] as an image [B, C, H, W] in the same memory, projected, on top of what came in."""
    rows = hidden_states
    if transformer.use_linear_projection:
        rows = transformer.proj_out(rows)
    image = rows.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)
    if not transformer.use_linear_projection:
        image = transformer.proj_out(image)
    return image + residual
