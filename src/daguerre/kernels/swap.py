"""Puts the kernels of this folder into networks of diffusers, from outside: by the types of their modules.

Parameters, their names and their layout in memory stay what they are, so that checkpoints, exports, shards and
optimizers see nothing of it. Only what is known by its exact type is touched; all else computes as before.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.normalization import RMSNorm
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from diffusers.models.unets.unet_stable_cascade import GlobalResponseNorm, SDCascadeLayerNorm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daguerre.kernels import biases
from daguerre.kernels.geglu import geglu
from daguerre.kernels.group_norm_silu import group_norm_silu
from daguerre.kernels.response_norm import response_norm
from daguerre.kernels.row_norms import layer_norm, rms_norm

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
        """As nn.LayerNorm, of the type of `input` under autocast; several dims, and weights that several devices share,
        as there."""
        if len(self.normalized_shape) != 1 or not _is_ours(input, self.weight):
            return super().forward(input)
        return layer_norm(input, self.weight, self.bias, self.eps)


class ImageNorm(SDCascadeLayerNorm, RowNorm):
    """Stable Cascade's, of the channels of an image."""


class RowScale(nn.RMSNorm):
    """torch's RMSNorm, which autocast widens as LayerNorm: of the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1 or self.eps is None or not _is_ours(x, self.weight):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


class DiffusersRowScale(RMSNorm):
    """RMSNorm of diffusers, whose result stays of the type that it has there: what is added up behind it, block after
    block, is of that type, too."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        if len(self.dim) != 1 or self.bias is not None or not _is_ours(x, weight):
            return super().forward(x)
        dtype = x.dtype if weight is None else weight.dtype
        if dtype not in (torch.float16, torch.bfloat16):  # which x is rounded to before it is scaled
            dtype = torch.promote_types(x.dtype, dtype)
        return rms_norm(x, weight, self.eps, dtype)


class KreaRowScale(Krea2RMSNorm):
    """RMSNorm of Krea 2, whose weight is stored less 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_ours(hidden_states, self.weight):
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight + 1.0, self.eps)


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


class ActivatedResponseNorm(GlobalResponseNorm):
    """The same, of GELU of its input."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.gamma, DTensor):
            return super().forward(F.gelu(x))
        return response_norm(x, self.gamma, self.beta, gelu=True)


class Passing(nn.GELU):
    """In the place of the GELU that the norm behind it computes."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class Shifted(nn.Conv2d):
    """A convolution whose bias is added by what is added behind it, which spares a pass over the image."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Conv2d without the bias; with it where several devices share it, as `_shift` has none then."""
        return self._conv_forward(input, self.weight, self.bias if isinstance(self.bias, DTensor) else None)


def _shift(behind: nn.Conv2d | None) -> Tensor | None:
    """The bias that is to be added for a `Shifted`."""
    return None if behind is None or isinstance(behind.bias, DTensor) else behind.bias


class TimeProduct(nn.Linear):
    """The product that makes the vector of the time, which is added behind a residual block's first convolution."""

    convolution: tuple[nn.Conv2d]  # in a tuple, so that it does not become a module of this one

    def forward(self, input: Tensor) -> Tensor:
        shift = _shift(self.convolution[0])
        if shift is None:
            return super().forward(input)
        return F.linear(input, self.weight, shift if self.bias is None else self.bias + shift)


class Pointwise(nn.Conv2d):
    """A convolution of single pixels: with channels last it is a product of rows, which adds its bias as it writes
    them; behind cuDNN's convolution the bias is a pass over the image. As the short cut of a residual block it adds the
    bias of the block's second convolution, too."""

    convolution: tuple[nn.Conv2d | None] = (None,)

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Conv2d, of which it has the layout: rows of channels."""
        assert self.bias is not None  # as `pointwise` says
        shift = _shift(self.convolution[0])
        bias = self.bias if shift is None else self.bias + shift
        if isinstance(self.weight, DTensor):
            return self._conv_forward(input, self.weight, bias)
        rows = input.permute(0, 2, 3, 1)
        product = biases.linear if bias.requires_grad else F.linear
        return product(rows, self.weight.flatten(1), bias).permute(0, 3, 1, 2)


_ROWS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: RowNorm,
    SDCascadeLayerNorm: ImageNorm,
    nn.RMSNorm: RowScale,
    RMSNorm: DiffusersRowScale,
    Krea2RMSNorm: KreaRowScale,
}


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
    """LayerNorm and RMSNorm under autocast become one operator, which keeps the type of its input; returns how many
    do."""
    return sum(_each(kind, ours, net) for kind, ours in _ROWS.items())


def divisors(net: nn.Module) -> int:
    """Residual and attention blocks no longer divide by 1; returns how many did."""
    found = [(m, name) for m in net.modules() for name in _DIVISORS if getattr(m, name, None) == 1]
    for module, name in found:
        setattr(module, name, One())
    return len(found)


def responses(net: nn.Module, gelu: bool = False) -> int:
    """Stable Cascade's global response norm becomes one operator, with `gelu` together with the GELU before it; returns
    how many did."""
    count = 0
    for module in net.modules():
        layers = list(module.children()) if gelu and _is(nn.Sequential, module) else []
        for before, norm in pairwise(layers):
            if _is(nn.GELU, before) and before.approximate == "none" and _is(GlobalResponseNorm, norm):
                before.__class__, norm.__class__ = Passing, ActivatedResponseNorm
                count += 1
    return count + _each(GlobalResponseNorm, ResponseNorm, net)


def pointwise(net: nn.Module) -> int:
    """Convolutions of single pixels become products of rows; returns how many did."""
    found: list[Any] = [m for m in net.modules() if _is(nn.Conv2d, m)]
    found = [m for m in found if {*m.kernel_size, *m.stride} == {1} and m.groups == 1 and m.bias is not None]
    found = [m for m in found if m.padding in ((0, 0), "valid")]
    for module in found:
        module.__class__ = Pointwise
    return len(found)


def shifts(net: nn.Module) -> int:
    """In residual blocks the bias of the first convolution goes into the vector of the time, and that of the second one
    into the short cut, if `pointwise` has changed it; returns how many did."""
    count = 0
    for block in net.modules():
        if isinstance(block, ResnetBlock2D) and block.time_embedding_norm == "default":
            if _is(nn.Linear, block.time_emb_proj):
                count += _shifted(block.conv1, block.time_emb_proj, TimeProduct)
            if _is(Pointwise, block.conv_shortcut):
                count += _shifted(block.conv2, block.conv_shortcut, Pointwise)
    return count


def _shifted(convolution: nn.Module, before: Any, kind: type[nn.Module]) -> int:
    if not _is(nn.Conv2d, convolution) or convolution.bias is None:
        return 0
    convolution.__class__, before.__class__ = Shifted, kind
    before.convolution = (convolution,)
    return 1


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


def _is_ours(x: Tensor, weight: Tensor | None) -> bool:
    """True under autocast, of weights that several devices do not share: else rows are normed as in diffusers."""
    return torch.is_autocast_enabled(x.device.type) and not isinstance(weight, DTensor)


def _is(kind: type, module: Any) -> bool:
    """Exactly this type: a subclass may compute something else."""
    return type(module) is kind
