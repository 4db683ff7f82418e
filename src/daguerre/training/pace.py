"""Progress of a run in updates, samples and epochs, by which every length of a recipe is measured.

A run may go on with another global batch or, where that is allowed, another data set. Samples and epochs that are done
stay done: lengths in them are counted from the run's start in what was trained on, not in updates of today's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from daguerre.settings import Duration

# Exact numbers: with floats an interval of a third of an epoch would come an update early or late, by the way there.
Position = int | Fraction


@dataclass(frozen=True)
class Stretch:
    """A part of a run in which all updates have the same number of samples."""

    step: int
    """Updates before it."""
    samples: Position
    """Samples before it, those that could not be decoded included."""
    epochs: Fraction
    """Epochs before it, each of the size of its time."""
    batch: Position
    """Samples of an update: the global batch, or a mean where nothing more is known."""
    epoch: int | None
    """Samples of an epoch; None where there are no epochs, so that none go by."""

    def position(self, step: int, unit: str) -> Position:
        """Progress after `step` updates, at or after its beginning."""
        if unit == "steps":
            return step
        samples = (step - self.step) * self.batch
        if unit == "samples":
            return self.samples + samples
        return self.epochs + Fraction(samples) / self.epoch if self.epoch else self.epochs

    def steps(self, position: Position, unit: str) -> int:
        """The first update after which so much is done, were this part without an end."""
        if unit == "steps":
            return int(position)
        if unit == "samples":
            return self.step + _up(Fraction(position - self.samples) / self.batch)
        assert self.epoch, "lengths in epochs are refused where there are none"
        return self.step + _up((position - self.epochs) * self.epoch / self.batch)


@dataclass(frozen=True)
class Pace:
    """A run's parts, each with its batch and epoch; the last one goes on."""

    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, batch: Position, epoch: int | None) -> Pace:
        """A run that is begun."""
        return cls((Stretch(0, 0, Fraction(0), batch, epoch),))

    def then(self, step: int, batch: int, epoch: int | None) -> Pace:
        """The pace of a run that goes on after `step` updates with this batch and epoch."""
        # Parts that begin later belong to updates after the checkpoint, which never happened.
        before = [stretch for stretch in self.stretches if stretch.step < step]
        if not before:
            return Pace.of(batch, epoch)
        last = before[-1]
        if (last.batch, last.epoch) == (batch, epoch):
            return Pace(tuple(before))
        samples, epochs = last.position(step, "samples"), Fraction(last.position(step, "epochs"))
        return Pace((*before, Stretch(step, samples, epochs, batch, epoch)))

    def position(self, step: int, unit: str) -> Position:
        """Progress after so many updates, past or to come, in steps, samples or epochs."""
        return next(each for each in reversed(self.stretches) if each.step <= step).position(step, unit)

    def steps(self, duration: Duration) -> int:
        """Updates after which this length, from the run's start, is done. UserError for epochs where there are none."""
        if duration.unit == "epochs" and self.stretches[-1].epoch is None:
            duration.steps(1, None)
        return self._first(duration.number, duration.unit)

    def steps_before(self, end: int, length: Position, unit: str) -> int:
        """The least number of updates up to update `end` in which this length is done; at most all."""
        start = self.position(end, unit) - length
        if start <= 0:
            return end
        first = self._first(start, unit)
        return end - first + (self.position(first, unit) > start)

    def _first(self, goal: Position, unit: str) -> int:
        """The first update after which so much is done."""
        before = (each for each in reversed(self.stretches) if each.position(each.step, unit) < goal)
        within = next(before, None)
        return 0 if within is None else within.steps(goal, unit)

    def number(self, every: Duration) -> Callable[[int], int]:
        """Counts how often an interval has gone by after so many updates."""
        return lambda step: int(self.position(step, every.unit) // every.number)

    def due(self, every: Duration) -> Callable[[int], bool]:
        """True after the updates by which an interval is done, the first of which is its own length."""
        number = self.number(every)
        return lambda step: number(step) > number(step - 1)

    def document(self) -> list[list[Any]]:
        """The parts as JSON, for a checkpoint; fractions as text."""
        return [[s.step, str(s.samples), str(s.epochs), str(s.batch), s.epoch] for s in self.stretches]

    @classmethod
    def read(cls, document: Sequence[Sequence[Any]]) -> Pace:
        """The pace of a checkpoint."""
        return cls(
            tuple(
                Stretch(step, Fraction(samples), Fraction(epochs), Fraction(batch), epoch)
                for step, samples, epochs, batch, epoch in document
            )
        )


def _up(number: Fraction) -> int:
    return -(-number.numerator // number.denominator)
