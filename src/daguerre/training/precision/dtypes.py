"""Types in which the trained networks compute and are stored, and their attention kernels."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from daguerre import deferred, devices
from daguerre.errors import UserError
from daguerre.training.precision import cpu_attention
from daguerre.training.precision.loss_scaling import DynamicScale, Scaler
from daguerre.training.precision.stochastic_rounding import Rounding
from daguerre.training.settings import TrainingSettings

Autocast = Callable[[], AbstractContextManager[object]]
"""The context of a forward pass of the trained networks."""

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# torch raises a plain RuntimeError: the beginning of its text is all that tells it.
_NO_KERNEL = ("No viable backend for scaled_dot_product_attention", "No available kernel")


@dataclass(frozen=True)
class Precision:
    """Types of computation and of stored weights."""

    compute: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    stochastic: bool = True
    """Weights of 16 bits are rounded by chance."""
    kernels: tuple[str, ...] = ()
    """Attention kernels that may be used, the best first; () for torch's own choice."""
    device_type: str = "cpu"

    def __str__(self) -> str:
        stored = "" if self.weights == torch.float32 else f" with weights of {_NAMES[self.weights]}"
        kernels = f", attention: {', else '.join(self.kernels)}" if self.kernels else ""
        return f"{_NAMES[self.compute]}{stored}{kernels}"

    def notices(self) -> list[str]:
        """A warning about float16 weights."""
        if self.weights != torch.float16:
            return []
        return [
            "float16 weights cannot represent numbers above 65504 and few below .00006: bfloat16 needs the same "
            "memory and has the range of float32 (training.weights_dtype=bfloat16)"
        ]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the trained networks' forward pass. UserError if no chosen kernel can compute their attention."""
        narrow = self.compute != torch.float32
        with torch.autocast(self.device_type, dtype=self.compute) if narrow else nullcontext(), self.attention():
            try:
                yield
            except RuntimeError as error:
                if not str(error).startswith(_NO_KERNEL):
                    raise
                raise UserError(
                    f"training.attention: {' or '.join(self.kernels)} cannot compute the attention of this model "
                    f"(its shape, its mask, or {_NAMES[self.compute]}); auto lets torch choose",
                    code="unsupported",
                    setting="training.attention",
                ) from None

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Context in which attention uses the chosen kernels alone."""
        chosen = [_KERNELS[name] for name in self.kernels]
        # Else torch tries them in an order of its own.
        with sdpa_kernel(chosen, set_priority=True) if chosen else nullcontext():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Context of frozen networks inside `forward`: attention uses whatever kernel can compute theirs."""
        # The autoencoder of Stable Diffusion has one head of 512 numbers, which flash attention does not take.
        with sdpa_kernel(list(_KERNELS.values())) if self.kernels else nullcontext():
            yield

    @torch.no_grad()
    def store(self, net: nn.Module, float32: Collection[str] = ()) -> None:
        """Gives the parameters of `net` the type in which they are stored; those named in `float32` keep theirs."""
        for name, p in net.named_parameters():
            if name not in float32:
                deferred.store(p, self.weights)

    def rounding(self, seed: int) -> Rounding | None:
        """The rounding of an optimizer's weights; None for float32."""
        return None if self.weights == torch.float32 else Rounding(self.stochastic, seed)

    def scaler(self, device: torch.device) -> Scaler:
        """The scale of the loss."""
        return DynamicScale(device) if self.compute == torch.float16 else Scaler()


def choose(settings: TrainingSettings, device: torch.device) -> Precision:
    """The precision of these settings on a device. UserError if the device cannot compute so."""
    weights = getattr(torch, settings.weights_dtype)
    compute = _compute(settings, weights, device)
    if device.type == "cpu" and compute != torch.float32:
        cpu_attention.enable()
    kernels = () if settings.attention in ("auto", "measured") else _kernels(settings.attention, compute, device)
    return Precision(compute, weights, settings.stochastic_rounding, kernels, device.type)


def _compute(settings: TrainingSettings, weights: torch.dtype, device: torch.device) -> torch.dtype:
    if settings.mixed_precision != "auto":
        chosen = _TYPES[settings.mixed_precision]
    # Most CPUs compute bf16 in software, several times as slowly as float32; what an Apple GPU has depends on macOS.
    elif weights != torch.float32 or device.type != "cuda":
        chosen = weights
    else:
        chosen = torch.bfloat16
    if chosen == torch.bfloat16 and not has_bf16(device):
        raise UserError(
            "this GPU has no bf16; use training.mixed_precision=fp16 or no",
            code="unsupported",
            setting="training.mixed_precision",
        )
    return chosen


def has_bf16(device: torch.device) -> bool:
    """True if a device computes in bf16 itself; every CPU does, if slowly."""
    # torch also says yes to older GPUs, where every operation in bf16 is emulated by float32.
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _kernels(name: str, compute: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """The kernels that a name means. UserError if the device or the precision has none."""
    able = available_kernels(compute, device)
    if name == "fused":
        return able[:-1]  # `math` is last
    if name in able:
        return (name,)
    raise UserError(
        f"training.attention={name}: there is no such kernel for {_NAMES[compute]} on {devices.name(device)}; "
        f"there are {', '.join(sorted(able))} (fused takes the best, auto lets torch choose)",
        code="unsupported",
        setting="training.attention",
    )


def available_kernels(compute: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Kernels that a device has for a type, the fastest first."""
    if device.type != "cuda":
        return ("flash", "math") if device.type == "cpu" else ("math",)
    generation = torch.cuda.get_device_capability(device)[0]
    # Flash and cuDNN compute 16 bits alone, from compute capability 8.0 on; cuDNN is the fastest on Hopper (9).
    if compute == torch.float32 or generation < 8:
        return ("efficient", "math")
    return ("cudnn", "flash", "efficient", "math") if generation == 9 else ("flash", "efficient", "cudnn", "math")
