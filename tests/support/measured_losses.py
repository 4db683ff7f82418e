"""The validation loss of a run's newest checkpoint, as `daguerre evaluate` measures it."""

from __future__ import annotations

import json
from pathlib import Path

from daguerre import errors
from daguerre.cli import main


def mean(run: Path, out: Path, num_samples: int = 2, num_levels: int = 8) -> float:
    """By the averages where there are some, at the levels and over the samples of the run's own validation."""
    levels = [(level + 0.5) / num_levels for level in range(num_levels)]
    given = [f"metrics.validation_loss.quantiles={levels}", f"metrics.validation_loss.num_samples={num_samples}"]
    assert main.run(["evaluate", str(run), "metrics=[validation_loss]", *given, f"out={out}"]) == errors.DONE
    (path,) = out.glob("*/result.json")
    tables = json.loads(path.read_text())["tables"]
    rows = (tables.get("validation_loss-ema") or tables["validation_loss-raw"])["rows"]
    return next(float(row["value"]) for row in rows if row["name"] == "mean")
