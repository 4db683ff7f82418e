"""The memory layout of what belongs to a parameter: fused kernels walk weights, gradients, moments and averages as they
lie in memory, so number i of each must be of the same element."""

from __future__ import annotations

from torch import Tensor

from daguerre.training.state import TrainState


def misplaced(state: TrainState) -> list[str]:
    """What of a state has the shape of its parameter and other strides: gradients, moments, averages. The moments of
    parameters that are contiguous while they are moved (those of 16 bits, all of adamw_8bit) must be so too."""
    names = {p: name for name, p in state.trained.items()}
    found = []
    for part in state.optimizer.parts:
        for p in part.parameters:
            copied = p.element_size() < 4 or "qmap1" in part.constants
            moments = None if copied else p.stride()
            like = [("gradient", p.grad, p.stride()), ("average", state.ema.averages.get(names[p]), p.stride())]
            like += [(f"profile {width}", every[names[p]], p.stride()) for width, every in state.ema.profiles.items()]
            like += [(name, value, moments) for name, value in part.optimizer.state.get(p, {}).items()]
            found += [
                f"{names[p]}: {kind} has strides {value.stride()}, not {strides or 'contiguous ones'}"
                for kind, value, strides in like
                if isinstance(value, Tensor)
                and value.shape == p.shape
                and (value.stride() != strides if strides else not value.is_contiguous())
            ]
    return found
