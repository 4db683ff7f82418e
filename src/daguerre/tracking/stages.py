"""What `daguerre plan` is at: one line that is written over on a terminal, a line each elsewhere; on standard error."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from daguerre.tracking.console import CLEAR, moving


@dataclass
class Stages:
    """Says each stage as it begins; use it in a `with`, so that the line is put away whatever happens."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._moving:
            self._write(CLEAR)

    def say(self, stage: str) -> None:
        """This stage begins."""
        self._write(f"{CLEAR}planning: {stage} ..." if self._moving else f"planning: {stage}\n")

    @property
    def _moving(self) -> bool:
        return moving(self.stream)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
