"""The checkpoints and metrics of a run's folder, for programs."""

from pathlib import Path
from typing import Any

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Store
from daguerre.errors import UserError
from daguerre.remote import local_copy
from daguerre.tracking.sinks import read_metrics


def checkpoints(run: str | Path) -> list[str]:
    """The names of a run's checkpoints, the oldest first."""
    return Store(folder_of(run).checkpoints).names()


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics/metrics.jsonl of a run, as they were logged: `step` and numbers by name. UserError."""
    return read_metrics(folder_of(run).metrics)


def folder_of(run: str | Path) -> RunFolder:
    """The folder of a run, also one in an object store. UserError for a folder that is no run's."""
    folder = RunFolder(local_copy.located(str(run)))
    if not folder.config.is_file():
        raise UserError(f"{run} is no run folder: it has no config.yaml", code="missing")
    return folder
