"""The contract of every objective: what a training loss is to the loop, the commands and the checkpoint.

A file in this folder is an objective when it defines `Settings` (an `ObjectiveSettings`) and
`build(settings) -> Objective`. Diffusion in all its forms is one class, in algebra.py; training that is not
diffusion (an autoencoder, a contrastive text encoder) subclasses `Objective` itself, and a loss around diffusion
(preferences, distillation) `DiffusionWrapper` of wrapper.py. No formula is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from daguerre.errors import UserError
from daguerre.objectives.masks import ElementMean, UniformMean
from daguerre.types import Cond, LossTerms, Stateful

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from daguerre.objectives.algebra import Diffusion
    from daguerre.objectives.networks.teacher import Guiding

Net = Callable[["Tensor", "Tensor", Cond], "Tensor"]
"""net(x_BCHW, c_noise_B, cond) -> y_BCHW: what is trained, as a family's `net` is called."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Random inputs of the loss of a batch, and what follows from them, a field each; the leading dim is B.

    An objective that draws numbers has a subclass of its own (`Objective.drawn`). In a batch the fields travel by name.
    """

    element_weight: Tensor | None = None
    """Weights [B, 1, h, w] of the elements of clean samples, by their masks; None: all count equally."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Puts the fields together that are among tensors by name."""
        return cls(**{each.name: tensors[each.name] for each in fields(cls) if each.name in tensors})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inverse of `of`."""
        return {name: value for name, value in vars(self).items() if value is not None}


D = TypeVar("D", bound=Draws, covariant=True)


@dataclass(frozen=True)
class Example(Generic[D]):
    """A batch as a loss reads it: what family and adapters make of its samples, and the draws. No gradient flows into
    it."""

    clean: Mapping[str, Tensor]
    """Clean samples [B, C, h, w], float32 or bfloat16, by the name of the image that they are of: `IMAGE`, and the
    images that the objective needs."""
    cond: Mapping[str, Cond]
    """Conditioning of each, by the same names: the captions are one for all, sizes are each image's own."""
    draws: D
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers [B] of the samples' metadata by name, as far as the objective needs any."""
    null: Mapping[str, Cond] = field(default_factory=dict)
    """As `cond`, with the empty caption in place of each: the side that guidance leads away from, where the objective
    needs it. Names and shapes are those of `cond`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Example[D]:
        """The example with `change` of every tensor."""
        cond, null = (
            {name: {key: change(rows) for key, rows in own.items()} for name, own in conditions.items()}
            for conditions in (self.cond, self.null)
        )
        draws = self.draws.of({name: change(rows) for name, rows in self.draws.tensors.items()})
        clean, columns = ({n: change(rows) for n, rows in own.items()} for own in (self.clean, self.columns))
        return Example(clean, cond, draws, columns, null)


@dataclass(frozen=True)
class Nets:
    """The networks of a loss by role."""

    student: Any
    """The network that is trained, called as a `Net` under the caller's autocast and grad mode."""
    others: Mapping[str, Any] = field(default_factory=dict)
    guidance: Guiding | None = None
    """What a guidance scale does to the student; None: this family does not generate."""

    def __getitem__(self, role: str) -> Any:
        """A further network: one of the objective's settings (`ObjectiveSettings.networks`), or `REFERENCE` or
        `AVERAGE`, which are called before the student, run in evaluation mode, and give no gradient."""
        return self.others[role]


class NothingLearnt:
    """State of an objective that learns nothing: its loss has closed form."""

    def observe(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Nothing."""

    def absorb(self, total: Callable[[Tensor], Tensor], skip: Tensor) -> None:
        """Nothing."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing. UserError where a checkpoint holds something."""
        if tensors:
            raise UserError(
                f"the checkpoint has learnt state of an objective ({', '.join(sorted(tensors))}), but this recipe's "
                "objective has none: set objective.name and objective.weighting to those of that run",
                code="changed",
                setting="objective.name",
            )


REFERENCE, AVERAGE = "reference", "average"
"""Roles of the student with other weights: those before its first update, and their moving averages."""


class Needs(NamedTuple):
    """The inputs of an objective besides the student, an image and its caption; asked once, where parts are put
    together."""

    images: tuple[str, ...] = ()
    """Further images, of `TARGETS` in types.py; a sample without one of them is left out."""
    columns: tuple[str, ...] = ()
    """Numbers of the metadata, such as `reward`: `Example.columns`; a sample without one of them is left out."""
    networks: tuple[str, ...] = ()
    """`REFERENCE`, `AVERAGE`, or both: the student with other weights."""
    null: bool = False
    """The conditioning of the empty caption: `Example.null`."""
    null_caption: str = ""
    """A caption that takes the place of the empty one there."""
    scales: tuple[float, ...] = ()
    """Guidance scales, in the notation of the family, that bound those by which a teacher guides, or the reference in
    its place: where it cannot, they are refused."""


class Objective(ABC):
    """A loss over clean samples, and the random numbers it needs. The loop knows nothing more of what is learnt."""

    learnt: Stateful = NothingLearnt()
    """What the objective learns in addition to the weights, such as adaptive loss weights; most learn nothing."""
    elements: ElementMean = UniformMean()
    """How the errors of a sample's elements become its loss, where each has one."""
    needs: Needs = Needs()
    """The inputs of its loss besides the student, an image and its caption."""
    follows_updates: bool = False
    """Whether its loss changes with the number of the update, which the host counts: it cannot be recorded."""
    couples_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its batch; then a global batch is never cut."""
    drawn: ClassVar[type[Draws]] = Draws
    """The class of what `draws` gives."""

    @property
    def diffusion(self) -> Diffusion | None:
        """The diffusion objective of what is trained: samplers, exports, validation and the noise conditioning of the
        network read it, whatever loss is put around it. None for training that is not diffusion."""
        return None

    def with_diffusion(self, diffusion: Diffusion) -> Objective:
        """The same loss around another diffusion objective: with the network's noise conditioning, and the sizes of a
        run's images. Called only where there is one."""
        raise AssertionError(f"{type(self).__name__} has no diffusion objective")

    def check(self, net: nn.Module) -> None:
        """UserError where it cannot train this net, or where a setting would have no effect on it."""
        return

    def draws(self, seed: int, keys: np.ndarray, shape: tuple[int, ...], *, quantile: float | None = None) -> Draws:
        """Random inputs of the loss of a batch, on the CPU and one batch ahead of the device: nothing by default.

        `keys` [B, 3] int64 (sample id, epoch, repeat) and `seed` decide every number, by `daguerre.keys` alone: sample
        i has the same draws in any batch, on any rank. `shape` is that of one clean sample, (C, h, w). `quantile` in
        [0, 1) fixes the noise level of the whole batch (validation) and leaves the noise as the keys have it.
        They come back as `Example.draws`, on the device.
        """
        return Draws()

    @abstractmethod
    def loss(self, nets: Nets, example: Example[Any]) -> LossTerms:
        """Loss of each sample, float32, weighted, mean over its elements; never waits for the device."""
