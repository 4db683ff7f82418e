"""docs/families.md: each command that it gives for a recipe is a run that could start, by its dry run."""

import re
import shlex
from pathlib import Path

import data_sets
import pytest
from tiny_models import write_sd

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe
from daguerre.models.weights import architectures

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families_docs")
    write_sd(folder / "base")
    data_sets.folder(folder / "my_images", 30)
    return folder


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[] if number % 4 == 0 else [pytest.mark.long]) for number, each in enumerate(COMMANDS)],
)
def test_the_run_could_start(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command)
    assert program == "daguerre"
    assert main.run([*words, "--dry-run"]) == errors.DONE, capsys.readouterr().err


def test_there_are_commands_for_most_recipes():
    named = {shlex.split(command)[2] for command in COMMANDS}
    assert {"sd15", "sd21", "sd2_base", "sdxl", "sdxl_edm"} <= named


def test_pages_generate_with_runs_and_with_models_whose_names_are_known():
    """Of other names of the hub `generate` cannot tell that they are no runs."""
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *recipe.shipped().values()):
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"daguerre generate ([\w.-]+/[\w./-]+)", text))
        of_hub = {each for each in named if not each.startswith("runs/") and not each.endswith(".yml")}
        assert {each for each in of_hub if not architectures.find(each)} == set(), page
