"""Lengths that follow the size of the data: `100 epochs up to 64k samples` becomes a plain length at the first start.

It is written into config.yaml as that, and holds for good: a run that goes on has the length that it was begun with,
also where its data have changed since.
"""

from collections.abc import Iterator, Mapping

from daguerre.config.config import Config
from daguerre.settings import Duration

_PLACES = (
    "training.duration",
    "lr_scheduler.warmup",
    "lr_scheduler.decay",
    "checkpoint.every",
    "checkpoint.backup_every",
    "validation.every",
    "logging.every",
)


def recorded(config: Config) -> dict[str, str]:
    """The lengths of a run by their places, as texts."""
    return {place: str(own) for place, own in _lengths(config)}


def fixed(config: Config, known: Mapping[str, str], samples_per_epoch: int | None, batch: int) -> Config:
    """The config with lengths that no longer depend on the data: those of the run (`known`), or of today's data for a
    fresh one. `samples_per_epoch` is None for a source without epochs, whose lengths are the limits."""
    for place, own in _lengths(config):
        if own.at_most is not None:
            section, _, field = place.partition(".")
            plain = Duration(known[place]) if place in known else own.plain(samples_per_epoch, batch)
            changed = getattr(config, section).model_copy(update={field: plain})
            config = config.model_copy(update={section: changed})
    return config


def _lengths(config: Config) -> Iterator[tuple[str, Duration]]:
    for place in _PLACES:
        section, _, field = place.partition(".")
        own = getattr(getattr(config, section), field)
        if own is not None:
            yield place, own
