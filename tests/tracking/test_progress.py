"""Plain lines to the letter, the moving line on a fake terminal, and an estimate that hiccups do not move."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass

import pytest

from daguerre.formatting import format_duration
from daguerre.tracking.console import Pace, Progress

XTERM = {"TERM": "xterm-256color"}


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 99


class AsciiTerminal(io.TextIOWrapper):
    """Encodes as the command line has its streams do."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii", errors="backslashreplace")

    def isatty(self) -> bool:
        return True

    def getvalue(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def train(line: Progress, clock: Clock, steps: range, seconds: float = 1.0, log_every: int = 2) -> None:
    for step in steps:
        clock.now += seconds
        line.update(step, step * 32, 0.5 if step % log_every == 0 else None)


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The width of the fake terminal; set element 0."""
    width = [120]
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((width[0], 24)))
    return width


def states(text: str) -> list[str]:
    """What a terminal showed after each redrawing: lines since the last one, cleared where the line was put away."""
    return [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", state).strip("\r\n") for state in text.split("\x1b[2K")]


def screen(text: str) -> str:
    """What it shows in the end."""
    return states(text)[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (4800, "1 h 20 min"),
        (183600, "2 d 3 h"),
    ],
)
def test_duration_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_plain_output_to_the_letter() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress(40, out, plain_seconds=10, environ=XTERM, clock=clock) as line:
        line.message("40 updates of 32 samples")
        train(line, clock, range(1, 21))
        line.then = lambda seconds: f"6 images ({'unknown' if seconds is None else format_duration(6 * seconds)})"
        with line.busy("generating images", 3) as count:
            for _ in range(3):
                clock.now += 100 / 3
                count()
        line.message("saved at step 20")
        train(line, clock, range(21, 41))
    assert out.getvalue() == (
        "40 updates of 32 samples\n"
        "step 2/40  64 samples  loss 0.5000  32 samples/s  38 s left\n"
        "step 12/40  384 samples  loss 0.5000  32 samples/s  28 s left\n"
        "generating images: 1 of 3 images\n"
        "generating images: 2 of 3 images\n"
        "generating images: 3 of 3 images\n"
        "saved at step 20\n"
        "step 30/40  960 samples  loss 0.5000  32 samples/s  44 s left, then 6 images (3 min 20 s)\n"
        "step 40/40  1,280 samples  loss 0.5000  32 samples/s\n"
    )


@pytest.mark.parametrize("environ", [{}, {"TERM": ""}, {"TERM": "dumb"}])
def test_a_dumb_terminal_gets_plain_lines(environ: dict[str, str]) -> None:
    clock, out = Clock(), FakeTerminal()
    with Progress(4, out, environ=environ, clock=clock) as line:
        train(line, clock, range(1, 5))
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert out.getvalue().endswith("step 4/4  128 samples  loss 0.5000  32 samples/s\n")


def test_the_moving_line_and_a_message_above_it(columns: list[int]) -> None:
    clock, out = Clock(), FakeTerminal()
    line = Progress(40, out, environ=XTERM | {"NO_COLOR": "1"}, clock=clock)
    line.message("40 updates")
    train(line, clock, range(1, 21))
    shown = "step 20/40  ━━━━━━━━━━━━              640 samples  loss 0.5000  32 samples/s  20 s left"
    assert screen(out.getvalue()) == shown
    line.message("saved at step 20")
    assert screen(out.getvalue()) == f"saved at step 20\n{shown}"
    with line.busy("generating images"):
        assert screen(out.getvalue()) == "generating images"
    line.close()
    assert screen(out.getvalue()) == ""
    assert out.getvalue().startswith("40 updates\n")
    assert states(out.getvalue())[0].startswith("40 updates\nstep 1/40")
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l"), "the cursor is there"


def test_shades_only_where_wanted(columns: list[int]) -> None:
    for environ, shaded in [(XTERM, True), (XTERM | {"NO_COLOR": ""}, True), (XTERM | {"NO_COLOR": "1"}, False)]:
        out = FakeTerminal()
        train(Progress(9, out, environ=environ, clock=(clock := Clock())), clock, range(1, 4))
        assert ("\x1b[1m" in out.getvalue()) is shaded


@pytest.mark.parametrize("width", [0, 4, 12, 24, 30, 40, 60, 80, 100, 200])
def test_the_line_fits_any_width(columns: list[int], width: int) -> None:
    columns[0] = width
    clock, out = Clock(), FakeTerminal()
    line = Progress(1_000_000, out, environ=XTERM | {"NO_COLOR": "1"}, clock=clock)
    train(line, clock, range(123_400, 123_421))
    with line.busy("generating images " * 20):
        pass
    for shown in states(out.getvalue()):
        assert len(shown) < (width or 80)
    if width >= 40:
        assert "step 123,420/1,000,000" in out.getvalue()
        assert "left" in out.getvalue()


def test_at_most_ten_redraws_a_second(columns: list[int]) -> None:
    clock, out = Clock(), FakeTerminal()
    train(Progress(10_000, out, environ=XTERM, clock=clock), clock, range(1, 1001), seconds=0.001)
    assert out.getvalue().count("\x1b[2K") <= 11


def test_an_ascii_terminal_and_control_characters(columns: list[int]) -> None:
    clock, out = Clock(), AsciiTerminal()
    line = Progress(10, out, environ=XTERM | {"NO_COLOR": "1"}, clock=clock)
    train(line, clock, range(1, 6))
    assert "----" in out.getvalue()
    assert out.getvalue().isascii()
    line.message("prompt: \x1b[31mröd")
    assert "prompt: \\ufffd[31mr\\xf6d\n" in out.getvalue()


def test_the_line_is_put_away_when_training_fails(columns: list[int]) -> None:
    clock, out = Clock(), FakeTerminal()
    with pytest.raises(RuntimeError), Progress(10, out, environ=XTERM, clock=clock) as line:  # noqa: PT012
        train(line, clock, range(1, 6))
        raise RuntimeError
    assert screen(out.getvalue()) == ""


def test_a_non_finite_loss_does_not_stick(columns: list[int]) -> None:
    clock, out = Clock(), FakeTerminal()
    line = Progress(10, out, environ=XTERM, clock=clock)
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 1.0], 1):
        clock.now += 1
        line.update(step, step, loss)
    assert "loss 1.0000" in screen(out.getvalue())


def test_the_first_step_and_hiccups_do_not_move_the_estimate() -> None:
    pace = Pace()
    now = 300.0  # five minutes of compilation
    pace.update(1, 32, now)
    assert pace.seconds_left(1000) is None
    for step in range(2, 101):
        now += 60.0 if step in (40, 70) else 1.0
        pace.update(step, step * 32, now)
    assert pace.seconds_left(1000) == pytest.approx(900)
    assert pace.samples_per_second() == pytest.approx(32)


def test_pauses_count_in_the_time_left_but_not_in_the_speed() -> None:
    pace, now = Pace(), 0.0
    for step in range(1, 102):
        now += 1.0
        pace.update(step, step * 32, now)
        if step % 10 == 0:
            pace.pause(now)
            now += 5.0
            pace.resume(now)
    assert pace.samples_per_second() == pytest.approx(32)
    assert pace.seconds_left(201) == pytest.approx(100 * 1.5)


def test_a_resumed_run_is_timed_from_where_it_resumed() -> None:
    pace = Pace()
    for now in range(20):
        pace.update(5000 + now, (5000 + now) * 8, float(now))
    assert pace.samples_per_second() == pytest.approx(8)
    assert pace.seconds_left(5119) == pytest.approx(100)


def test_messages_go_to_the_log_with_their_time_and_lines_of_progress_do_not(tmp_path):
    stream = io.StringIO()
    terminal = Progress(10, stream, plain_seconds=0)
    terminal.message("before")
    terminal.log_to(tmp_path / "log.txt")
    terminal.update(1, 4, 0.5)
    terminal.message("a caption\x1b[2J of \ud83d half a letter")
    terminal.message("two\nlines")
    text = (tmp_path / "log.txt").read_text()
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "NOW", text) == (
        "NOW  a caption\N{REPLACEMENT CHARACTER}[2J of \N{REPLACEMENT CHARACTER} half a letter\nNOW  two\nlines\n"
    )
    assert "step 1/10" in stream.getvalue()
    terminal.log_to(tmp_path / "missing" / "log.txt")
    terminal.message("a disk that refuses costs nothing")
