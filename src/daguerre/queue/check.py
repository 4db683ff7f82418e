"""Looks at a training before it is put into a queue, in processes of their own, as that needs torch: refuses what
`daguerre train` refuses, and says what `daguerre plan` says."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daguerre import credentials, errors
from daguerre.errors import UserError
from daguerre.queue.queue import bound


def check(words: Sequence[str], folder: Path, roots: Sequence[str] = ()) -> str:
    """Describes what would be trained, as `daguerre train RECIPE ... --dry-run` says it. UserError with its refusal.

    `folder` is where relative paths start; `roots` are folders below which the recipe must stay, if any are given.
    """
    if any(credentials.CUT in word or credentials.scrub(word) != word for word in words):
        raise UserError(
            "an entry of the queue is a file, and no secret is written into one: give addresses without a password or "
            "signature, and credentials where the store's own tools keep them (docs/stores.md)"
        )
    return _said(["train", *words, "--dry-run"], folder, roots, (errors.DONE,))


def plan(words: Sequence[str], folder: Path, roots: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """The document of `daguerre plan RECIPE ... --json`, of what has no room, too. UserError with its refusal."""
    text = _said(["plan", *words, *options, "--json"], folder, roots, (errors.DONE, errors.REFUSED))
    found: dict[str, Any] = json.loads(text)
    if "error" in found:
        raise UserError(found["error"]["message"], code=found["error"]["code"], setting=found["error"].get("setting"))
    return found


def _said(words: Sequence[str], folder: Path, roots: Sequence[str], good: Sequence[int]) -> str:
    """The output of a command; UserError with what it says where its exit code is not good, or it writes nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "daguerre", *words],
        cwd=folder,
        env={**os.environ, **bound(roots)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in good or not done.stdout.strip():
        text = done.stderr.strip().removeprefix("daguerre: ")
        raise UserError(text or f"`daguerre {words[0]}` ended with exit code {done.returncode}")
    return done.stdout
