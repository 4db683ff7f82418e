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


def fixed(
    config: Config, known: Mapping[str, str], samples_per_epoch: int | None, batch: int
) -> tuple[Config, list[str]]:
    """The config with lengths that no longer depend on the data: those of the run (`known`), or of today's data for a
    fresh one; and a line for those of a fresh one, and for each that is another one than today's data would give.
    `samples_per_epoch` is None for a source without epochs, whose lengths are the limits."""
    notices, sized = [], []
    for place, own in _lengths(config):
        if own.at_most is not None:
            section, _, field = place.partition(".")
            today = own.plain(samples_per_epoch, batch)
            # The run's own: data that have changed since must not move the end of a schedule that is under way.
            plain = Duration(known.get(place, today))
            if (plain.number, plain.unit) != (today.number, today.unit):
                notices.append(
                    f"{place} stays {str(plain)!r}, which this run was begun with: {str(own)!r} would be "
                    f"{str(today)!r} today, and only a length without `up to` changes it"
                )
            if place not in known:
                sized.append(f"{place}={str(own)!r} is {plain}")
            changed = getattr(config, section).model_copy(update={field: plain})
            config = config.model_copy(update={section: changed})
    told = [f"with this number of samples {'; '.join(sized)}", *_long_warmup(config, batch)] if sized else []
    return config, [*told, *notices]


def _long_warmup(config: Config, batch: int) -> list[str]:
    """A line where few images make a run so short that its warm-up is the half of it or more."""
    duration, warmup = config.training.duration, config.lr_scheduler.warmup
    if "epochs" in (duration.unit, warmup.unit):
        return []
    total, rise = duration.steps(batch, None), warmup.steps(batch, None)
    if not rise * 2 >= total >= rise:
        return []
    return [
        f"the warm-up is {rise:,} of the run's {total:,} updates, so that little is learnt at the full rate: with so "
        f"few images train longer (training.duration='{8 * total * batch} samples'), or warm up for less "
        f"(lr_scheduler.warmup='{-(-total // 10)} steps')"
    ]


def _lengths(config: Config) -> Iterator[tuple[str, Duration]]:
    for place in _PLACES:
        section, _, field = place.partition(".")
        own = getattr(getattr(config, section), field)
        if own is not None:
            yield place, own
