"""Full training: every weight of some components is trained. Adds nothing to the networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import field_validator
from torch import nn

from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings

if TYPE_CHECKING:
    from daguerre.models.export.about import About
    from daguerre.models.family import Family
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


class Settings(AdapterSettings):
    """Trains all weights of components."""

    of_weights = frozenset({"train"})

    name: Literal["full"] = "full"
    """Name of the adapter."""
    train: list[str] | None = None
    """The components that are trained, such as [unet, text_encoder]. null: the family's own, of a pipeline the UNet."""

    @field_validator("train")
    @classmethod
    def _some(cls, train: list[str] | None) -> list[str] | None:
        if train is not None and (not train or len({*train}) < len(train)):
            raise ValueError(
                "nothing would be trained: name at least one component" if not train else "a component is named twice"
            )
        return train

    @property
    def reads_weights(self) -> bool:
        """It trains what there is."""
        return False

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The components that are trained."""
        return tuple(trainable[:1] if self.train is None else self.train)


@dataclass(frozen=True, eq=False)
class Full(Trainable):
    """Components that are trained whole."""

    model: Family
    net: nn.Module
    names: frozenset[str]
    whole = True

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings, about: About) -> list[str]:
        return self.model.export(folder, objective, sampling)


def attach(settings: Settings, model: Family, seed: int) -> Full:
    """Trains what the net holds of these components, but for what no output depends on; a checkpoint has that, too."""
    reached = settings.reaches(model.trainable)
    names = frozenset(n for n in model.net.state_dict() if not reached or n.partition(".")[0] in reached)
    return Full(model, model.net, names)
