"""T-LoRA (Soboleva et al. 2025, arXiv 2507.05964): the noisier a sample, the fewer ranks of a LoRA act on it.

Of r ranks the first floor(((T - t) / T)^alpha (r - min_rank)) + min_rank act at the time t, T being pure noise; of the
others the numbers between A and B are zero. Each sample of a batch has its own time, in training and in images.

The times are those that the denoiser is called with. Its layers learn them from a hook, so that no family and no
loss knows of it. Shape letters: B samples, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from daguerre.adapters.lora_parts.inits import ADAPTER
from daguerre.adapters.lora_parts.layers import wrapped
from daguerre.errors import UserError
from daguerre.models.network import TIME, Network

if TYPE_CHECKING:
    from daguerre.adapters.lora import Settings
    from daguerre.objectives.objective import Objective

SETTING = "tlora_min_rank"
ELSEWHERE = (
    "a T-LoRA. Programs that read these files let all ranks act at all noise levels, which was not trained: images can "
    "come out overdone. `daguerre generate RUN` applies it as it was trained"
)
CARD = f"""
It is {ELSEWHERE}.
`daguerre.tlora` in the files' headers has the fewest ranks and the exponent.
"""
_Kept = Mapping[int, Tensor]
"""[B, R], true where a rank acts, by R."""


class NoiseRanks:
    """The ranks that act, of all layers of a denoiser, in the pass that is going on."""

    def __init__(self, min_rank: int, alpha: float) -> None:
        self.min_rank, self.alpha = min_rank, alpha
        self._last: float | None = None
        self._ranks: frozenset[int] = frozenset()
        self._kept: _Kept = {}

    @property
    def numbers(self) -> dict[str, float]:
        """For headers of files."""
        return {"min_rank": self.min_rank, "alpha": self.alpha}

    def watch(self, denoiser: nn.Module) -> None:
        """Masks the additions to its layers, in all of its passes."""
        layers = wrapped(denoiser).values()
        self._ranks = frozenset(layer.r[ADAPTER] for layer in layers)
        for layer in layers:
            layer.noise_ranks = self
        denoiser.register_forward_pre_hook(self._before, with_kwargs=True)
        denoiser.register_forward_hook(self._behind, always_call=True)

    def follow(self, objective: Objective) -> None:
        """Takes the time of pure noise from the objective. UserError for one without."""
        conditioning = None if objective.diffusion is None else objective.diffusion.noise_conditioning
        if conditioning is None or conditioning.last is None:
            why = "this objective has no noise levels"
            if conditioning is not None:
                why = (
                    "the network is given ln(sigma), which ends nowhere: set model.noise_conditioning to timestep, "
                    "cosine_time or flow_time, whichever the base has learnt"
                )
            raise UserError(
                f"{SETTING} needs a noise level between clean and pure noise, and {why}; or remove {SETTING}",
                code="conflict",
                setting=SETTING,
            )
        self._last = conditioning.last

    def acting(self, time_B: Tensor, rank: int) -> Tensor:
        """[B, R] bool: the ranks that act at these times."""
        assert self._last is not None, "no objective was given to `follow`"
        # In this order: 1 - t / T would be just below the whole numbers at which the authors' ranks change.
        share_B = ((self._last - time_B.float()) / self._last).clamp(0, 1)
        count_B = (share_B**self.alpha * (rank - self.min_rank)).floor() + self.min_rank
        return torch.arange(rank, device=time_B.device) < count_B[:, None]

    def masked(self, inner: Tensor, rank_dim: int) -> Tensor:
        """The numbers [rows, ..., R, ...] between A and B, with zeros for ranks that do not act."""
        kept = self._kept[inner.shape[rank_dim]]
        if (rows := len(inner)) != len(kept):
            kept = _of_rows(kept, rows, inner.dim())
        shape = [1] * inner.dim()
        shape[0], shape[rank_dim] = kept.shape
        return inner * kept.view(shape)

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """In a pass: makes contexts in which its blocks have the same ranks again."""
        kept = self._kept

        @contextmanager
        def repeated() -> Iterator[None]:
            before, self._kept = self._kept, kept
            try:
                yield
            finally:
                self._kept = before

        return repeated

    def _before(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        time_B = kwargs[TIME] if TIME in kwargs else args[1]
        self._kept = {rank: self.acting(time_B, rank) for rank in self._ranks}

    def _behind(self, denoiser: nn.Module, inputs: Any, outputs: Any) -> None:
        self._kept = {}  # a layer that is called outside of a pass must not get the ranks of another one


def _of_rows(kept_BR: Tensor, rows: int, dims: int) -> Tensor:
    """The mask of a layer that has more rows than samples: with two dims, those behind the samples' are of clean images
    (reference images have time 0), which all ranks see; with more, each sample has several, one after the other."""
    count = len(kept_BR)
    if dims == 2 and rows > count:
        return torch.cat([kept_BR, torch.ones_like(kept_BR[:1]).expand(rows - count, -1)])
    return kept_BR.repeat_interleave(rows // count, 0)


def begin(settings: Settings, networks: Mapping[str, Network]) -> NoiseRanks | None:
    """The ranks that act by noise level, of the denoiser among networks that have their additions; None where all act.
    UserError where none would ever rest, or a layer has fewer than must act."""
    least = settings.tlora_min_rank
    if least is None:
        return None
    ranks = NoiseRanks(least, settings.tlora_alpha)
    found = {name: network.module for name, network in networks.items() if network.denoises}
    layers = {f"{name}.{place}": layer for name, own in found.items() for place, layer in wrapped(own).items()}
    for place, layer in layers.items():
        base = layer.get_base_layer()
        if layer.r[ADAPTER] < least:
            raise UserError(
                f"{SETTING}={least}, and the addition to {place} has {layer.r[ADAPTER]}: set it to that or less, or "
                "rank_pattern",
                code="conflict",
                setting=SETTING,
            )
        if getattr(base, "groups", 1) > 1:
            raise UserError(
                f"{place} is a convolution of {base.groups} groups, each with ranks of its own, so that the first "
                f"ranks are of the first groups: leave it out of targets, or remove {SETTING}",
                code="unsupported",
                setting=SETTING,
            )
    if all(layer.r[ADAPTER] == least for layer in layers.values()):
        why = f"all ranks are {least}, so that all act always" if layers else "nothing is added to the denoiser"
        raise UserError(f"{SETTING} has no effect: {why}: remove it", code="unused", setting=SETTING)
    for module in found.values():
        ranks.watch(module)
    return ranks
