"""The facts of a run for the headers of its files (models/export/about.py), from its config and its state."""

from collections.abc import Mapping
from pathlib import Path

from daguerre.assembly.base_digests import Base
from daguerre.config.config import Config
from daguerre.data.sources import folder
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.family import Family


def of(
    config: Config,
    family: Family,
    base: Base,
    step: int,
    epoch: float | None = None,
    image: Path | None = None,
    tags: Mapping[str, Mapping[str, int]] = UNKNOWN.tags,
) -> About:
    """Facts of a run at a step. Phrases are the captions of all images of a source; class images have none to teach."""
    # Class images keep what the model knew: their caption triggers nothing that was learnt.
    taught = [
        own
        for own in config.data.sources.values()
        if not (isinstance(own, folder.Settings) and own.generate is not None)
    ]
    phrases = [own.captions.text for own in taught if own.captions.text]
    return About(
        title=config.run_name,
        base=base,
        step=step,
        epoch=epoch,
        size_px=(config.data.resolution, config.data.resolution),
        trigger_phrase=", ".join(dict.fromkeys(phrases)),
        prediction=config.objective.name,
        architecture=family.architecture(config.objective.name),
        image=image,
        tags=tags,
    )
