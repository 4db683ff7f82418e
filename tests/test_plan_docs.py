"""docs/plan.md: its commands run, and its table is what they say; so are the headers of recipes."""

import json
import re
import shlex
from pathlib import Path

import pytest
from twins import Twins, base, tree

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe

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
@pytest.mark.parametrize(("name", "micro", "peak", "taken", "largest"), ROWS)
def test_the_table_is_what_plan_says(name, micro, peak, taken, largest, capsys):
    assert main.run(["plan", name, "card=24GB", f"training.per_device_batch_size={micro}", "--json"]) == errors.DONE
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["peak_bytes"] / 1e9 == pytest.approx(float(peak), abs=0.06)
    assert step["taken_bytes"] / 1e9 == pytest.approx(float(taken), abs=0.06)
    assert step["largest_micro_batch"] == int(largest)


SMALL = re.findall(
    r"^\| `(\w+)` \| (\d+) GB \| `?([^|`]*)`? \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) s \|", DOCS, re.MULTILINE
)


def test_the_tables_of_small_cards_have_rows_that_fit():
    assert len(SMALL) >= 7
    assert all(float(taken) * 1e9 <= int(card) << 30 for _, card, _, taken, _, _ in SMALL)


@pytest.mark.long
@pytest.mark.parametrize(("name", "card", "given", "taken", "of_host", "seconds"), SMALL)
def test_small_cards_have_what_the_tables_say(name, card, given, taken, of_host, seconds, capsys):
    images = [] if name.endswith("_lora") else ["--generate", "base=true"]
    assert main.run(["plan", name, f"card={card}GiB", *given.split(), *images, "--json"]) == errors.DONE
    found = json.loads(capsys.readouterr().out)
    count, host = (found if images else found["step"])["taken_bytes"], found["host"]
    assert count / 1e9 == pytest.approx(float(taken), abs=0.06)
    assert host["memory_bytes"] / 1e9 == pytest.approx(float(of_host), abs=0.06)
    assert host["seconds_per_update"] == pytest.approx(float(seconds), rel=0.02)


NAMES = [name for name in recipe.shipped() if base(name) and tree(name)["training"]["duration"] != "0 steps"]


def total(name: str) -> int:
    """GB that a recipe's header says."""
    text = recipe.shipped()[name].read_text(encoding="utf-8")
    (memory,) = re.findall(r"^# Memory:(.*?)\n# Time:", text, re.MULTILINE | re.DOTALL)
    return int(re.search(r"= (\d+) GB", " ".join(memory.replace("#", "").split()))[1])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_plan_says(name, tmp_path, capsys):
    places = [f"{path}={value}" for path, value in Twins(tmp_path).conditions(tree(name)).items()]
    assert main.run(["plan", name, "training.device=cuda", "--json", *places]) == errors.DONE
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["taken_bytes"] / 1e9 == pytest.approx(total(name), abs=0.6)
