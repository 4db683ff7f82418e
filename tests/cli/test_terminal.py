"""On a terminal lines end between words; in a pipe they stay whole."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from daguerre.cli.main import verbs
from daguerre.config.recipe import shipped
from daguerre.formatting import fitted

LIST = """\
  prompts_file=FILE      text with one prompt a line, or .csv, .tsv, .jsonl with the columns prompt, negative_prompt,
                         seed, num_images
  num_images=N           images of each prompt (1)"""


def lines_on_terminal(arguments: list[str], columns: int, cwd: Path) -> list[str]:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.Popen(
        [sys.executable, "-m", "daguerre", *arguments], stdout=theirs, stderr=theirs, env=environ, cwd=cwd
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # Linux says so at the end of the last writer
        pass
    os.close(ours)
    done.wait(60)
    return text.decode().splitlines()


@pytest.mark.parametrize("columns", [50, *(pytest.param(n, marks=pytest.mark.long) for n in (80, 100))])
def test_help_and_errors_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    printed = lines_on_terminal(["generate", "--help"], columns, tmp_path)
    printed += lines_on_terminal(["train", "nowhere"], columns, tmp_path)  # lists the recipes, and loads little
    words = [line for line in printed if len(line) >= columns]
    assert all(line.strip().startswith("daguerre ") or " " not in line.strip() for line in words), words
    assert sum(len(line) >= columns * 0.7 for line in printed) > 10


@pytest.mark.long
def test_a_file_is_printed_as_it_is(tmp_path: Path) -> None:
    """A comment that is broken would be no comment any more."""
    printed = lines_on_terminal(["recipes", "quickstart"], 60, tmp_path)
    assert printed == shipped()["quickstart"].read_text(encoding="utf-8").splitlines()


def test_a_pipe_gets_whole_lines(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "daguerre", "generate", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "50"},
        check=True,
    ).stdout
    assert printed.strip() == verbs()["generate"].help.strip()


def test_text_of_a_list_stays_below_itself_and_entries_stay_apart() -> None:
    assert fitted(LIST, 80).splitlines() == [
        "  prompts_file=FILE      text with one prompt a line, or .csv, .tsv, .jsonl with",
        "                         the columns prompt, negative_prompt, seed, num_images",
        "  num_images=N           images of each prompt (1)",
    ]
    assert fitted(LIST, 120) == LIST


def test_a_paragraph_is_filled_and_a_command_stays_whole() -> None:
    paragraph = "A text of many words " * 5 + "reaches\nthe end of a wide page and goes on below."
    assert fitted(paragraph, 60).count("\n") == 2
    command = "  daguerre train quickstart " + "key=value " * 20
    assert fitted(command, 60) == command
