"""Facts of a run that the headers of exported files tell other programs, and `generate use=` tells us."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from daguerre.models.network import Architecture


@dataclass(frozen=True)
class About:
    """Facts of a run; headers leave out those that are not known."""

    title: str = ""
    """The run's name."""
    base: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By component that was not trained: `place`, where it came from, and `digest`, of its weights."""
    step: int | None = None
    """Updates done."""
    epoch: float | None = None
    """Epochs done; None where the data have none."""
    size_px: tuple[int, int] | None = None
    """Height and width of the images."""
    trigger_phrase: str = ""
    """The words that prompts need: captions that the settings give all images."""
    prediction: str = ""
    """What the network predicts: the objective's name."""
    architecture: Architecture | None = None
    """The model, as its family or a file says; None: what the class and the numbers of its denoiser say."""
    tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By source of the data: the tags of its captions, each with the number of captions that have it. Empty where they
    were not counted."""
    tlora: Mapping[str, float] = field(default_factory=dict)
    """`min_rank` and `alpha` of a T-LoRA; empty for all others."""
    image: Path | None = None
    """A sample image of these weights."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Entries of the header of the file that they were read from, of how they were trained."""


UNKNOWN = About()
"""The facts of files that no run has made."""
