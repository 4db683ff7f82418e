"""Counting the arithmetic of a training step: floating-point operations of products and convolutions, no others.

Model FLOPs, as utilisation is reckoned in: a multiplication and an addition are two; what is computed again in the
backward pass (gradient checkpointing, attention's scores) does not count. torch's counter takes the backward pass of a
grouped convolution for that of a dense one; the formula here does not. Works on the meta device, where nothing is
computed.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

_ATEN = torch.ops.aten


def convolution(x: Sequence[int], weight: Sequence[int], out: Sequence[int], *, transposed: bool = False) -> int:
    """Operations of one pass: each output element (transposed: each input element) meets a kernel's worth of weights.

    `weight` is [C_out, C_in / groups, ...] ([C_in, C_out / groups, ...] of a transposed one), so that groups need no
    mention.
    """
    through = x if transposed else out
    return 2 * through[0] * prod(through[2:]) * prod(weight)


def convolution_backward(
    gradient: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As many operations as the forward pass for each gradient that is wanted, the input's and the kernel's."""
    return convolution(x, weight, gradient, transposed=transposed) * sum(output_mask[:2])


def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Scores and their sums over values: query [..., heads, L, D], key [..., S, D], value [..., S, E]."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward(gradient: Any, *shapes: Any, **_: Any) -> int:
    """Twice the forward pass: two products, each with two gradients; the scores computed again do not count."""
    return 2 * attention(*shapes[:3])


def product(left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """[M, K] by [K, N]."""
    return 2 * prod(left) * right[1]


FORMULAS: dict[Any, Any] = {
    _ATEN._int_mm: product,
    _ATEN.convolution_backward: convolution_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: attention,
    **{
        getattr(_ATEN, name): attention_backward
        for name in (
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        )
    },
}
"""In place of torch's own, by operator."""


class _Counter(TorchDispatchMode):
    """Adds up the operators that run while it is entered. torch's own counter keeps a table for each module, too, and
    takes apart what cannot be: over twice the time, which a short run notices."""

    supports_higher_order_operators = True

    def __init__(self, with_gradient: int = 1) -> None:
        """`with_gradient`: how often an operation counts whose result may get a gradient."""
        super().__init__()
        self.total, self.with_gradient = 0, with_gradient

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return NotImplemented
        formula, made_of_others = known(func)
        if made_of_others:  # seen where there is no autograd, which takes it apart otherwise
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            times = self.with_gradient if torch.is_grad_enabled() else 1
            self.total += times * int(formula(*args, **kwargs, out_val=out))
        return out


@cache
def known(func: Any) -> tuple[Callable[..., int] | None, bool]:
    """The formula of an operator, if it has one, and whether it has none and is made of other operators."""
    packet = func._overloadpacket
    formula = shape_wrapper(FORMULAS[packet]) if packet in FORMULAS else flop_registry.get(packet)
    # Not `func.has_kernel_for_dispatch_key`, which also finds decompositions in Python, that no device runs.
    registered = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    # silu_backward has both: devices run its kernel, while the operators that it could be made of take memory for six
    # tensors where the kernel takes one. torch registers the CPU's kernels in every build, CUDA's in some.
    composite = registered("CompositeImplicitAutograd") and not registered("CPU")
    return formula, formula is None and composite


def count(run: Callable[[], object]) -> int:
    """Floating-point operations of what `run` does, forward and backward. Blocks that are compiled are counted as they
    are uncompiled: torch would take the counter for a reason never to compile them."""
    with torch.compiler.set_stance("force_eager"), _Counter() as counter:
        run()
    return counter.total


@torch.enable_grad()
def count_update(loss: Callable[[Callable[..., Any]], object], net: Callable[..., Any]) -> int:
    """Floating-point operations of `loss(net)` and its backward pass, by forward passes alone: no graph is kept.

    A pass with gradient counts three times, as the backward pass computes two gradients for each product; passes
    without, such as a teacher's, count once.
    """

    def student(*inputs: Any) -> Any:
        before, learns = counter.total, torch.is_grad_enabled()
        # Without a graph, and so by the pass as a whole: functions with a backward pass of their own run without one.
        with torch.no_grad():
            answer = net(*inputs)
        counter.total += 2 * learns * (counter.total - before)
        return answer

    with torch.compiler.set_stance("force_eager"), _Counter(with_gradient=3) as counter:
        loss(student)
    return counter.total
