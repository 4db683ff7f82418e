"""Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864) of queries and keys, as one operator.

diffusers turns pairs of features by seven operators, most of which write float32 of what has 16 bits. Here each number
is read once and written once; the arithmetic is float32. The plain form is what computes on a CPU.

Shape letters: B samples, S tokens, H heads, D features of a head, P rows of a table of places.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from daguerre.kernels import available
from daguerre.kernels.operators import operator, wide_type


def rotary(x: Tensor, cos_PD: Tensor, sin_PD: Tensor | None, inner: int, halves: bool = False) -> Tensor:
    """Rows [..., D] of x, each turned by its place: [..., D] of the type of x, computed in float32 at least.

    Args:
        cos_PD: of each feature, and `sin_PD`, which no gradient reaches. Without sines: cosine and sine of each pair,
            as a table of complex numbers has them.
        inner: rows of x behind each other that have one place. Row i has that of row (i // inner) % P of the table.
        halves: a pair is two features that are D / 2 apart, not two neighbours.
    """
    result: Tensor = _Rotary.apply(x, cos_PD, sin_PD, inner, halves)
    return result


def _compute(x: Tensor, cos_PD: Tensor, sin_PD: Tensor | None, inner: int, halves: bool, back: bool) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    x, cos_PD = x.contiguous(), cos_PD.contiguous()
    sin_PD = None if sin_PD is None else sin_PD.contiguous()
    if available.triton(x.device):
        return available.module("rotary").turned(x, cos_PD, sin_PD, inner, halves, back)
    wide, D = wide_type(x), x.shape[-1]
    a, b = _pairs(x.to(wide).view(-1, cos_PD.numel() // D, inner, D), halves)
    cos_a, cos_b = _pairs(cos_PD.view(-1, 1, D), halves)
    if sin_PD is None:
        cos_b, sin_a, sin_b = cos_a, cos_b, cos_b
    else:
        sin_a, sin_b = _pairs(sin_PD.view(-1, 1, D), halves)
    if back:  # the transposed matrix
        sin_a, sin_b = -sin_b, -sin_a
    turned = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    joined = torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)
    return joined.to(x.dtype).view(x.shape)


def _pairs(rows: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    """The first and the second number of each pair."""
    a, b = rows.chunk(2, -1) if halves else rows.unflatten(-1, (-1, 2)).unbind(-1)
    return a, b


def _shapes(x: Tensor, cos_PD: Tensor, sin_PD: Tensor | None, inner: int, halves: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


_turn = operator(
    "rotary(Tensor x, Tensor cos, Tensor? sin, int inner, bool halves, bool back) -> Tensor", _compute, _shapes
)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor | None, inner: int, halves: bool) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.form = inner, halves
        return _turn(x, cos, sin, inner, halves, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _turn(dy, *ctx.saved_tensors, *ctx.form, True), None, None, None, None


class _OfZImage(ZSingleStreamAttnProcessor):
    """Attention of Z-Image, whose own turns its pairs by a function that it has inside."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """As there; [B, S, D] of the same, all of which has a place in `freqs_cis` [B or 1, S, D of a head / 2]."""
        layers = attn.to_q, attn.to_k, attn.to_v
        q_BSHD, k_BSHD, v_BSHD = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in layers)
        normed = (attn.norm_q, q_BSHD), (attn.norm_k, k_BSHD)
        q_BSHD, k_BSHD = (rows if norm is None else norm(rows) for norm, rows in normed)
        if freqs_cis is not None:
            q_BSHD, k_BSHD = _by_numbers(q_BSHD, freqs_cis), _by_numbers(k_BSHD, freqs_cis)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        found = dispatch_attention_fn(
            q_BSHD, k_BSHD, v_BSHD, attn_mask=attention_mask, dropout_p=0.0, is_causal=False,
            backend=self._attention_backend, parallel_config=self._parallel_config,
        )  # fmt: skip
        y_BSD: Tensor = found.flatten(2, 3).to(q_BSHD.dtype)
        for layer in attn.to_out:
            y_BSD = layer(y_BSD)
        return y_BSD


def enable(net: nn.Module) -> int:
    """Queries and keys of the attentions of diffusers' transformers are turned by one operator; returns how many
    attentions there are."""
    processors = [own for module in net.modules() if (own := getattr(module, "processor", None)) is not None]
    found = [(own, ours) for own in processors if (ours := _turning(own.__class__)) is not None]
    for own, ours in found:
        own.__class__ = ours
    return len(found)


def _by_angles(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """`apply_rotary_emb` of diffusers: cosines and sines [S, D]; x [B, H, S, D], or [B, S, H, D] if `sequence_dim` is
    1."""
    known = use_real and freqs_cis[0].shape == (x.shape[sequence_dim], x.shape[-1])
    if not known or isinstance(x, DTensor):
        given: Any = apply_rotary_emb(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
        return given
    cos, sin = freqs_cis
    inner = 1 if sequence_dim == 2 else x.shape[2]
    return rotary(x, cos.to(x.device), sin.to(x.device), inner, halves=use_real_unbind_dim == -2)


def _by_numbers(x_BSHD: Tensor, freqs_cis: Tensor, use_real: bool = False) -> Tensor:
    """`apply_rotary_emb_qwen` of diffusers with `freqs_cis` complex, [S, D / 2] or [B or 1, S, D / 2]."""
    assert not use_real  # as nothing of diffusers asks for
    if isinstance(x_BSHD, DTensor):
        pairs = torch.view_as_complex(x_BSHD.float().unflatten(-1, (-1, 2))) * freqs_cis.unsqueeze(-2)
        return torch.view_as_real(pairs).flatten(3).type_as(x_BSHD)
    return rotary(x_BSHD, torch.view_as_real(freqs_cis).flatten(-2), None, x_BSHD.shape[2])


_OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    apply_rotary_emb: _by_angles,
    apply_rotary_emb_qwen: _by_numbers,
}
"""Functions of diffusers, which attention calls by their names, and what stands in for each."""


@cache
def _turning(kind: type) -> type | None:
    """An attention's processor of this kind, but for the function that turns; None where it calls none."""
    if kind is ZSingleStreamAttnProcessor:
        return _OfZImage
    call: Any = vars(kind).get("__call__")
    if not isinstance(call, FunctionType):
        return None
    called = {name: call.__globals__.get(name) for name in call.__code__.co_names}
    swapped = {its.__name__: ours for its, ours in _OURS.items() if called.get(its.__name__) is its}
    if not swapped:
        return None
    # The same code, in which these names mean ours.
    own = FunctionType(call.__code__, {**call.__globals__, **swapped}, call.__name__, call.__defaults__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(
        kind.__name__, (kind,), {"__call__": own, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    )
