"""docs/plan.md: its commands run, and its table is what they say."""

import json
import re
import shlex
from pathlib import Path

import pytest

from daguerre import errors
from daguerre.cli import main

DOCS = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
ROWS = re.findall(r"^\| `(\w+)`, \d+ px \| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \| (\d+) \|$", DOCS, re.MULTILINE)


def test_the_page_has_commands_and_rows():
    assert len(COMMANDS) >= 5
    assert len(ROWS) == 2


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_and_fits_a_terminal(command, capsys):
    program, *words = shlex.split(command)
    assert program == "daguerre"
    assert main.run(words) == errors.DONE
    lines = capsys.readouterr().out.splitlines()
    if "--all" not in words:
        assert max(map(len, lines)) <= 100


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "micro", "peak", "taken", "largest"), ROWS)
def test_the_table_is_what_plan_says(recipe, micro, peak, taken, largest, capsys):
    assert main.run(["plan", recipe, "card=24GB", f"training.per_device_batch_size={micro}", "--json"]) == errors.DONE
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["peak_bytes"] / 1e9 == pytest.approx(float(peak), abs=0.06)
    assert step["taken_bytes"] / 1e9 == pytest.approx(float(taken), abs=0.06)
    assert step["largest_micro_batch"] == int(largest)
