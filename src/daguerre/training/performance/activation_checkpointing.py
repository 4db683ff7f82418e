"""Gradient checkpointing: activations are computed again in the backward pass rather than kept.

Needs no knowledge of a family: networks of diffusers and transformers say themselves between which blocks they can.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from daguerre.errors import UserError

_MARKS = ("_supports_gradient_checkpointing", "supports_gradient_checkpointing")
"""By which a network of diffusers, and one of transformers, says that it can."""


Contexts = Callable[[], AbstractContextManager[object]]


def enable(
    net: nn.Module,
    others: Iterable[nn.Module],
    again: Contexts,
    of_pass: Callable[[], Contexts] = lambda: nullcontext,
) -> None:
    """Makes every network in `net` that can compute its activations again do so, within the context `again`, and one
    by what `of_pass` gives in the forward pass.

    So do `others`, through which gradients may flow: a frozen UNet behind a text encoder that is trained. Activations
    are equal to the bit, as torch restores autocast and the random state. UserError if no network of `net` can.
    """
    networks = list(_able(net))
    if not networks:
        raise UserError(
            "training.gradient_checkpointing: none of the trained networks supports it; remove it",
            code="unsupported",
            setting="training.gradient_checkpointing",
        )

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        # The backward pass runs outside the forward pass's contexts: another kernel would compute attention again.
        return nullcontext(), _Repeated([again, of_pass()])

    networks += [network for other in others for network in _able(other)]
    # The reentrant form gives no gradient where no input needs one, as behind frozen first layers.
    facts: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
    every: dict[int, Any] = {id(network): network for network in networks}
    for network in every.values():
        if hasattr(network, "enable_gradient_checkpointing"):
            network.enable_gradient_checkpointing(partial(checkpoint, **facts))
        elif hasattr(network, "activation_checkpointing_enable"):  # transformers' name for it since version 5
            network.activation_checkpointing_enable(activation_checkpointing_kwargs=facts)
        else:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=facts)


class _Repeated(AbstractContextManager[object]):
    """A context that can be entered again: two backward passes over one graph (optimizer.in_backward=after_norm)
    compute the activations of a block twice, and torch asks for the context once."""

    def __init__(self, makers: Sequence[Contexts]) -> None:
        self._makers, self._entered = makers, list[ExitStack]()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _able(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost networks that offer it."""
    if any(getattr(module, mark, False) for mark in _MARKS):
        yield module
    else:
        for child in module.children():
            yield from _able(child)
