"""Puts the kernels of this folder into networks of diffusers, from outside: by the types of their modules.

Parameters, their names and their layout in memory stay what they are, so that checkpoints, exports, shards and
optimizers see nothing of it. Only what is known by its exact type is touched; all else computes as before.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_stable_cascade import GlobalResponseNorm, SDCascadeLayerNorm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daguerre.kernels.geglu import geglu
from daguerre.kernels.group_norm_silu import group_norm_silu
from daguerre.kernels.response_norm import response_norm

_DIVISORS = ("output_scale_factor", "rescale_output_factor")
"""Of diffusers' residual and attention blocks."""


class Norm(nn.GroupNorm):
    """A GroupNorm of images with channels last."""

    silu = False

    def forward(self, x: Tensor) -> Tensor:
        """As nn.GroupNorm; other shapes, and weights that several devices share, by torch's own operators."""
        if x.ndim == 4 and not isinstance(self.weight, DTensor):
            return group_norm_silu(x, self.weight, self.bias, self.num_groups, self.eps, self.silu)
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return F.silu(y) if self.silu else y


class NormSiLU(Norm):
    """The same, and SiLU of it."""

    silu = True


class Activated(nn.Module):
    """In the place of a block's SiLU: its images come activated, its vectors do not."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] as it is; SiLU of everything else."""
        return x if x.ndim == 4 else F.silu(x)


class Gated(GEGLU):
    """GEGLU of which one kernel computes all that is behind the matrix product."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return geglu(self.proj(hidden_states))


class RowNorm(nn.LayerNorm):
    """A LayerNorm that autocast does not widen: it is computed in float32 from rows of 16 bits and gives such rows,
    which is what each product behind it makes of the float32 rows that autocast gives it."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.LayerNorm, of the type of `input` under autocast; weights that several devices share, as there."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind) or isinstance(self.weight, DTensor):
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            # The operator of a GPU wants one type.
            weight, bias = (None if p is None else p.to(input.dtype) for p in (self.weight, self.bias))
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class ImageNorm(SDCascadeLayerNorm, RowNorm):
    """Stable Cascade's, of the channels of an image."""


class One:
    """The number by which networks divide what they do not scale: a division by it gives its own input, where torch
    would copy it. By torch's protocol, which torch.compile traces, too."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0]


class ResponseNorm(GlobalResponseNorm):
    """GlobalResponseNorm in one operator."""

    def forward(self, x: Tensor) -> Tensor:
        """As there; by torch's own operators where several devices share the weights."""
        return super().forward(x) if isinstance(self.gamma, DTensor) else response_norm(x, self.gamma, self.beta)


def norms(net: nn.Module) -> int:
    """GroupNorm with the SiLU behind it becomes one kernel, and so does GroupNorm before a transformer; returns how
    many did."""
    count = 0
    for module in net.modules():
        if isinstance(module, ResnetBlock2D):
            count += _block(module)
        elif isinstance(module, Transformer2DModel):
            count += _put(Norm, getattr(module, "norm", None))
        elif _is(nn.SiLU, getattr(module, "conv_act", None)):
            count += _before(module)
    return count


def gates(net: nn.Module) -> int:
    """GEGLU behind its matrix product becomes one kernel; returns how many did."""
    return _each(GEGLU, Gated, net)


def rows(net: nn.Module) -> int:
    """LayerNorm under autocast keeps the type of its input; returns how many do."""
    return _each(nn.LayerNorm, RowNorm, net) + _each(SDCascadeLayerNorm, ImageNorm, net)


def divisors(net: nn.Module) -> int:
    """Residual and attention blocks no longer divide by 1; returns how many did."""
    found = [(m, name) for m in net.modules() for name in _DIVISORS if getattr(m, name, None) == 1]
    for module, name in found:
        setattr(module, name, One())
    return len(found)


def responses(net: nn.Module) -> int:
    """Stable Cascade's global response norm becomes one operator; returns how many did."""
    return _each(GlobalResponseNorm, ResponseNorm, net)


def _each(kind: type[nn.Module], ours: type[nn.Module], net: nn.Module) -> int:
    found = [module for module in net.modules() if _is(kind, module)]
    for module in found:
        module.__class__ = ours
    return len(found)


def _block(block: Any) -> int:
    """Both norms of a residual block, where nothing stands between norm and SiLU."""
    both = (block.norm1, block.norm2)
    plain = block.time_embedding_norm == "default" and _is(nn.SiLU, block.nonlinearity)
    if not plain or not all(_is(nn.GroupNorm, norm) for norm in both):
        return 0
    block.nonlinearity = Activated()
    return sum(_put(NormSiLU, norm) for norm in both)


def _before(net: Any) -> int:
    """The norm before the last convolution of a network."""
    if not _put(NormSiLU, getattr(net, "conv_norm_out", None)):
        return 0
    net.conv_act = Activated()
    return 1


def _put(kind: type[Norm], norm: Any) -> int:
    if not _is(nn.GroupNorm, norm) or not norm.affine:
        return 0
    norm.__class__ = kind
    return 1


def _is(kind: type, module: Any) -> bool:
    """Exactly this type: a subclass may compute something else."""
    return type(module) is kind
