"""Settings of checkpoints. No torch here."""

from pydantic import Field, field_validator

from daguerre.settings import FREE, Duration, Settings, interval


class CheckpointSettings(Settings):
    """Intervals at which a run is saved, and how many states are kept."""

    _intervals = field_validator("every", "backup_every")(interval)
    every: Duration | None = Field(Duration("1000 steps"), json_schema_extra=FREE)
    """Interval between saves (state, sample images, export); null for the end only."""
    keep: int = Field(2, ge=2, json_schema_extra=FREE)
    """Newest verified states that are kept; older ones are deleted after a newer one is safe on disk."""
    export: bool = Field(True, json_schema_extra=FREE)
    """Write the newest weights at each save: `pipeline/` in diffusers' format, of adapters `adapter/`."""
    backup_every: Duration | None = Field(None, json_schema_extra=FREE)
    """The first save in each stretch of this length after the first stretch is kept for good; null for none."""
    background: bool = Field(True, json_schema_extra=FREE)
    """Write while training goes on, from a copy in the host's memory; off: training waits, and no copy is needed."""
    max_failed_saves: int = Field(3, ge=1, json_schema_extra=FREE)
    """Saves in a row that a disk may refuse (full, read-only) before the run stops; each is said, and the next save
    tries again."""
