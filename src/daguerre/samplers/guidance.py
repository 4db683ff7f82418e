"""Guidance: a network's predictions become one that follows the prompt more closely, at a scale.

A family has one `Guidance`: what a scale does to its network, which scales there are, and which of them does not guide,
in the notation of the family's own pipeline. Samplers and teachers call the same function; no sampler is here. Guidance
acts on the network's prediction y, as published; since x0 is linear in y at a given x_t, the scale would do the same to
x0, but rescaling looks at the spread of y itself. Letters: B samples, C channels, H and W latent height and width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from daguerre.errors import UserError
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond

Time = float | Tensor
"""One time for all samples, or [B]."""
Predict = Callable[[Tensor, Time, Cond], Tensor]
"""(x [B, C, H, W], t, conditioning of B samples) to the network's prediction y [B, C, H, W]."""


class Guidance(ABC):
    """The guidance of a family."""

    @abstractmethod
    def acts(self, scale: float) -> bool:
        """True if a scale guides: it changes the prediction."""

    def runs_null(self, scale: float) -> bool:
        """True if an unguided side runs with the prompt's at a scale, so that a negative prompt has an effect."""
        return self.acts(scale)

    @abstractmethod
    def fault(self, scale: float) -> str:
        """The reason for which a scale from 0 is refused, with what to do; "" for one that is allowed."""

    @abstractmethod
    def guide(
        self, predict: Predict, cond: Cond, null_cond: Cond | None, scale_B: Tensor, rescale: float = 0.0
    ) -> Callable[[Tensor, Time], Tensor]:
        """The guided prediction (x, t) -> y [B, C, H, W] at a scale per sample, [B] on the device of the conditioning.

        `null_cond` is what the prediction is led away from: the null caption, or a negative prompt. It may be None
        where no scale `runs_null`. `rescale` in [0, 1] brings the spread back by that share (see `rescaled`).
        """

    def stepping(self, predict: Predict, end: Callable[[float], Tensor]) -> Predict:
        """The prediction of a network that also reads where a step ends: `end(t)` is the noise level, in the network's
        words, to which a sampler goes from time t. Others read none."""
        return predict

    def with_scale(self, cond: Cond, scale_B: Tensor) -> Cond:
        """The conditioning of a network that has learnt to guide itself at a scale [B]: with that scale, where it reads
        one."""
        return cond

    def faults(self, sampling: SamplingSettings) -> Iterator[tuple[str, str]]:
        """Settings of sampling that are refused, each with the reason: scales, and what has no effect at this one."""
        scale = sampling.guidance_scale
        if fault := self.fault(scale):
            yield "guidance_scale", fault
        elif not self.runs_null(scale):
            for name in ("guidance_rescale", "negative_prompt"):
                if value := getattr(sampling, name):
                    yield name, self.without_null(f"{name} is {value!r}", scale)

    def without_null(self, what: str, scale: float) -> str:
        """The reason for which a setting that needs an unguided side is refused at a scale that does not run one."""
        name = what.partition(" ")[0]
        return f"{what} and guidance_scale is {scale:g}, so there is no guidance: raise guidance_scale or remove {name}"

    def check(self, sampling: SamplingSettings) -> None:
        """UserError for the first of the `faults`."""
        for name, fault in self.faults(sampling):
            raise UserError(fault, code="conflict", setting=f"sampling.{name}")

    def described(self, scale: float) -> str:
        """A scale in words."""
        return f"guidance {scale:g}" if self.acts(scale) else "no guidance"


@dataclass(frozen=True)
class ClassifierFree(Guidance):
    """Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598): away from a second prediction.

    Families with another formula of the two predictions override `combine`.
    """

    off: float = 1.0
    """The scale that is no guidance: 1 where pipelines compute null + scale (cond - null), 0 where they compute
    cond + scale (cond - null). 0 does not guide in both."""
    sides_apart: bool = False
    """Whether both sides are predicted by a call each: where a network computes texts of different lengths apart, the
    length of a caption would decide how often it is called, and devices that share its weights call it together."""

    def acts(self, scale: float) -> bool:
        return scale > self.off

    def fault(self, scale: float) -> str:
        # diffusers runs no guidance between 0 and 1; the formula would mix both sides, so the scale has no one meaning
        if not 0 < scale < self.off:
            return ""
        return (
            f"guidance_scale is {scale:g}: 0 and {self.off:g} are no guidance, above {self.off:g} is guidance; below "
            f"{self.off:g} the formula would move towards the negative prompt, and diffusers generates without "
            f"guidance: set it to {self.off:g} or more"
        )

    def combine(self, y_cond_BCHW: Tensor, y_null_BCHW: Tensor, scale_B111: Tensor) -> Tensor:
        """The guided prediction [B, C, H, W] of both sides; `scale_B111` is at least `off`."""
        return y_null_BCHW + (scale_B111 + (1 - self.off)) * (y_cond_BCHW - y_null_BCHW)

    def guide(
        self, predict: Predict, cond: Cond, null_cond: Cond | None, scale_B: Tensor, rescale: float = 0.0
    ) -> Callable[[Tensor, Time], Tensor]:
        if null_cond is None:
            return lambda x, t: predict(x, t, cond)
        both = {} if self.sides_apart else {name: torch.cat([null_cond[name], cond[name]]) for name in cond}
        scale_B = scale_B.clamp(min=self.off)  # 0 guides in no notation, and the formula would go backwards

        def guided(x_BCHW: Tensor, t: Time) -> Tensor:
            if self.sides_apart:
                y_null, y_cond = (predict(x_BCHW, t, side).to(x_BCHW.dtype) for side in (null_cond, cond))
            else:
                # One batch of 2B in place of two calls, the null side first as in diffusers: half the kernel launches.
                t_both = torch.cat([t, t]) if isinstance(t, Tensor) and t.ndim else t
                y = predict(torch.cat([x_BCHW, x_BCHW]), t_both, both).to(x_BCHW.dtype)
                y_null, y_cond = y.chunk(2)
            scale = scale_B.to(x_BCHW.dtype).reshape(-1, *[1] * (x_BCHW.ndim - 1))
            return rescaled(self.combine(y_cond, y_null, scale), y_cond, rescale)

        return guided


CLASSIFIER_FREE = ClassifierFree()
"""In the usual notation: null + scale (cond - null), where 1 does not guide."""


@dataclass(frozen=True)
class Embedded(Guidance):
    """A network that is given the scale: a row of its conditioning, such as FLUX.1's distilled guidance.

    Training gives it the same row (`Family.batch_condition`); sampling takes it from here.
    """

    name: str = "guidance"
    """Name of that row [B] in the conditioning."""

    def acts(self, scale: float) -> bool:
        return True  # the network was distilled with a scale in every call, so no number of it means none

    def runs_null(self, scale: float) -> bool:
        return False

    def fault(self, scale: float) -> str:
        return ""

    def guide(
        self, predict: Predict, cond: Cond, null_cond: Cond | None, scale_B: Tensor, rescale: float = 0.0
    ) -> Callable[[Tensor, Time], Tensor]:
        return lambda x, t: predict(x, t, self.with_scale(cond, scale_B))

    def with_scale(self, cond: Cond, scale_B: Tensor) -> Cond:
        return {**cond, self.name: scale_B}

    def without_null(self, what: str, scale: float) -> str:
        name = what.partition(" ")[0]
        return f"{what}, and this model is given guidance_scale itself, without an unguided side: remove {name}"


@dataclass(frozen=True)
class Unguided(Guidance):
    """A network that takes no guidance, such as one that was distilled to few steps with a scale inside."""

    def acts(self, scale: float) -> bool:
        return False

    def fault(self, scale: float) -> str:
        if scale in (0, 1):
            return ""
        return f"guidance_scale is {scale:g}, and this model takes no guidance: set guidance_scale to 0"

    def guide(
        self, predict: Predict, cond: Cond, null_cond: Cond | None, scale_B: Tensor, rescale: float = 0.0
    ) -> Callable[[Tensor, Time], Tensor]:
        return lambda x, t: predict(x, t, cond)

    def without_null(self, what: str, scale: float) -> str:
        return f"{what}, and this model takes no guidance: remove {what.partition(' ')[0]}"


_ALONG_A_LINE = ("euler", "ddim")
"""Samplers that go straight to the next noise level by one prediction."""


@dataclass(frozen=True)
class Jumping(Unguided):
    """A flow map: a network that was distilled to steps of any length, and is given the noise level where one ends."""

    name: str = "jump_to"
    """Name of that row [B] in the conditioning."""

    def faults(self, sampling: SamplingSettings) -> Iterator[tuple[str, str]]:
        yield from super().faults(sampling)
        # Its prediction is the mean velocity of a step: x0 by it is no image but the line to the step's end, which
        # other samplers would add noise to, or follow with slopes of several steps.
        if sampling.sampler not in _ALONG_A_LINE or sampling.eta > 0:
            name = "eta" if sampling.sampler in _ALONG_A_LINE else "sampler"
            yield (
                name,
                f"{name} is {getattr(sampling, name)}, and this model was distilled to go from one noise level "
                f"straight to the next: set sampler={_ALONG_A_LINE[0]} and eta=0",
            )

    def stepping(self, predict: Predict, end: Callable[[float], Tensor]) -> Predict:
        def jumping(x_BCHW: Tensor, t: Time, cond: Cond) -> Tensor:
            assert isinstance(t, float), "samplers call all samples at one time"
            end_B = end(t).float().expand(len(x_BCHW)).to(x_BCHW.device)
            return predict(x_BCHW, t, {**cond, self.name: end_B})

        return jumping


def rescaled(y_BCHW: Tensor, y_cond_BCHW: Tensor, rescale: float) -> Tensor:
    """`y` with each sample's spread brought back to that of the conditional prediction, by the share `rescale`.

    Lin et al. 2023 (arXiv 2305.08891, eq. 15 and 16); the spread is over all dims but the first.
    """
    if rescale == 0:
        return y_BCHW
    dims = list(range(1, y_BCHW.ndim))
    # Each sample by itself: an image must not depend on which others are in its batch.
    ratio = y_cond_BCHW.std(dims, keepdim=True) / y_BCHW.std(dims, keepdim=True)
    return y_BCHW * (rescale * ratio + (1 - rescale))
