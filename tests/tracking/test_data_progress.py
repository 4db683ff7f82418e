"""The line of a `data` verb: in place on a terminal, rare in a log, and no guess before there is something to go by."""

import io

import pytest

from daguerre.formatting import format_size
from daguerre.tracking.progress import Counter


class Terminal(io.StringIO):
    """A stream that is a terminal, or a pipe."""

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self.moving = moving

    def isatty(self) -> bool:
        return self.moving


@pytest.fixture
def counted(monkeypatch):
    """Counts `steps` of (seconds, samples) on a stream; what was written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def run(moving, steps, total=1000):
        stream, now = Terminal(moving), [0.0]
        with Counter("packing", total, stream=stream, clock=lambda: now[0]) as counter:
            for seconds, samples in steps:
                now[0] += seconds
                counter.add(samples)
        return stream.getvalue()

    return run


def test_a_terminal_has_one_line_that_goes_away(counted):
    written = counted(True, [(1.0, 100)] * 5)
    assert written.count("\n") == 1, "the one from which it is cleared"
    assert written.endswith("\x1b[1A\x1b[2K")
    assert "packing: 500 of 1,000 samples  ━━━━━━━━━━━━              100/s  5 s left" in written


def test_a_log_has_a_line_now_and_then(counted):
    assert counted(False, [(1.0, 100)] * 5) == ""
    lines = counted(False, [(1.0, 10)] * 40).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "packing: 150 of 1,000 samples",
        "packing: 300 of 1,000 samples",
    ]


def test_starting_is_no_speed(counted):
    written = counted(True, [(30.0, 1), (0.3, 100), (1.0, 100)])
    assert " h " not in written
    assert "154/s" in written
    assert "left" not in written.split("\r\x1b[2K")[0]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (999_600, "1 MB"), (2.5e9, "2.5 GB"), (3e12, "3 TB")],
)
def test_sizes(size, text):
    assert format_size(size) == text
