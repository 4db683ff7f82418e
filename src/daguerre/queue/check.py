"""Checks a training as `daguerre train` does before it is put into a queue: in a process of its own, as that needs
torch."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from daguerre import errors
from daguerre.errors import UserError


def check(words: Sequence[str], folder: Path) -> str:
    """Describes what would be trained, as `daguerre train RECIPE ... --dry-run` says it. UserError with its refusal."""
    command = [sys.executable, "-m", "daguerre", "train", *words, "--dry-run"]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != errors.DONE:
        text = done.stderr.strip().removeprefix("daguerre: ")
        raise UserError(text or f"the check ended with exit code {done.returncode}")
    return done.stdout
