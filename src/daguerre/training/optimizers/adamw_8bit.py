"""AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv 2110.02861), by bitsandbytes."""

import math
from typing import Any, Literal

from torch import nn

from daguerre.errors import UserError
from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart, not_installed
from daguerre.training.settings import AdamSettings

_WHOLE_BELOW, _BLOCK = 4096, 256
"""bitsandbytes: tensors of fewer numbers are not quantised; numbers that share a scale."""


class Settings(AdamSettings):
    """AdamW with moments of 8 bits, a quarter of the memory; tensors of under 4096 numbers keep 32 bits."""

    name: Literal["adamw_8bit"] = "adamw_8bit"
    """Name of the optimizer."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part. UserError on a CPU, and without bitsandbytes."""
    if any(p.device.type in ("cpu", "mps") for p in trained.values()):
        raise UserError(
            "optimizer.name=adamw_8bit saves GPU memory, and is there on CUDA and ROCm alone: use optimizer.name=adamw",
            code="unsupported",
            setting="optimizer.name",
        )
    return [part(settings, trained)]


def part(settings: Settings, trained: Parameters) -> OptimizerPart:
    """bitsandbytes' optimizer on any device; weights and moments are copied around each update."""
    try:
        import bitsandbytes
    except ImportError:
        raise not_installed("adamw_8bit", "bitsandbytes") from None

    class Contiguous(bitsandbytes.optim.AdamW8bit):
        """Moments in the order of a contiguous tensor, whatever the layout of the parameter, which keeps its own: 256
        numbers that follow one another in memory share a scale, so that a checkpoint would fit no other layout."""

        def init_state(self, group: Any, p: nn.Parameter, *place: int) -> None:
            super().init_state(group, p, *place)
            state = self.state[p]
            state |= {name: state[name].contiguous() for name in ("state1", "state2")}

        def update_step(self, group: Any, p: nn.Parameter, *place: int) -> None:
            stored = p.data
            super().update_step(group, p, *place)
            if p.data_ptr() != stored.data_ptr():  # it has put a contiguous copy in the parameter's place
                p.data = stored.copy_(p.data)

    groups, betas = decay_groups(settings, trained), (settings.beta1, settings.beta2)
    optimizer = Contiguous(groups, betas=betas, eps=settings.epsilon)
    return OptimizerPart(optimizer, "restored", constants=("qmap1", "qmap2"))


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of one parameter's state: two moments of a byte a number, and their scales, 4 bytes for 256 numbers; small
    tensors keep moments of float32."""
    count = math.prod(shape)
    return 8 * count if count < _WHOLE_BELOW else 2 * count + 8 * -(-count // _BLOCK)


def update_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes taken during an update: copies of weights and moments. `daguerre plan` cannot compute it without memory."""
    return 4 * math.prod(shape) + state_bytes(settings, name, shape)
