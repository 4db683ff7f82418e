"""docs/coming-from.md: its commands mean something here, and the names in its tables are those that are tested."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import test_seed_keys

from daguerre.cli import main
from daguerre.config import config, overrides, recipe
from daguerre.foreign import signs

PAGE = (Path(__file__).parents[1] / "docs" / "coming-from.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
HEADS = {"MaxDiffusion": "MaxDiffusion", "MindOne SDXL": "MindOne", "open-diffusion (sd-training)": "open-diffusion"}
HEADS |= {"Stable Cascade": "Stable Cascade"}
NO_NAMES = {"LIBTPU_INIT_ARGS", "scripts/download_diffusers.py -o DIR -m MODEL"}
DREAMBOOTH = {f"{kind}_{what}" for kind in ("instance", "class") for what in ("data_dir", "prompt")}
DREAMBOOTH |= {"num_class_images", "prior_loss_weight"}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_means_something(line):
    program, verb, *rest = shlex.split(line)
    assert program == "daguerre"
    assert verb in main.verbs()
    if verb == "train":
        given = overrides.split(rest)
        assert config.load("sd2_base" if given.recipe == "mine.yaml" else given.recipe, given.overrides)


@pytest.mark.parametrize("head", HEADS)
def test_the_names_of_a_table_are_tested(head):
    section = PAGE.partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|") and "---" not in line][1:]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - NO_NAMES - DREAMBOOTH
    rows = test_seed_keys.ROWS[HEADS[head]]
    tested = {given.partition("=")[0] for row in rows for given in (row.given, *row.beside)}
    unknown = {name for name in named if not any(known.startswith(name.rstrip("*")) for known in tested)}
    assert unknown <= {"snr_gamma", "save_every"}  # tested with the trainer that has them first
    assert len(named) > 15


def test_the_files_that_stand_for_recipes_are_listed():
    for name, ours in signs.RECIPES.items():
        assert re.search(rf"`{re.escape(name)}`\s+{ours}\b", PAGE), name
        assert ours in recipe.shipped()
