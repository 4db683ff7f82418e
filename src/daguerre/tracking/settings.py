"""Settings of a run's numbers: how often, and which trackers get them. No torch here."""

from typing import Annotated, Self

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from daguerre.settings import FREE, Duration, Plugin, Settings, interval

DEFAULT = {"tensorboard": {"name": "tensorboard"}}
"""The trackers of a recipe that names none."""


class TrackerSettings(Settings):
    """Base of every tracker's `Settings`."""

    name: str
    """Name of the tracker: a file in tracking/trackers."""

    @property
    def active(self) -> bool:
        """False for a tracker that is switched off by its own settings."""
        return True


class LoggingSettings(Settings):
    """Intervals and places of logged numbers."""

    _intervals = field_validator("every")(interval)
    every: Duration | None = Field(Duration("10 steps"), json_schema_extra=FREE)
    """Interval between lines of metrics, and one at the end; null for that alone. Updates in between do not wait for
    the device, but for one in 50, which asks whether they were finite (training.max_nonfinite_steps)."""
    trackers: dict[str, Annotated[SerializeAsAny[TrackerSettings], Plugin("trackers", "name", TrackerSettings)]] = (
        Field(
            DEFAULT,  # type: ignore[arg-type]  # a mapping, so that nothing is imported here
            json_schema_extra=FREE,
        )
    )
    """Programs that get the numbers of metrics.jsonl, and the sample images with their prompts: a list of names, such
    as [tensorboard, wandb], or each with its settings, such as {wandb: {project: mine}}."""

    @model_validator(mode="after")
    def _called_by_their_names(self) -> Self:
        if odd := [key for key, own in self.trackers.items() if key != own.name]:
            raise ValueError(f"trackers: {odd[0]}: a tracker has no name but its own, {self.trackers[odd[0]].name}")
        return self
