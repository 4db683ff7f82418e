"""docs/dreambooth.md: its commands are understood, and its recipe is what the shipped one says."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from quick_cases import chosen

from daguerre import errors
from daguerre.cli import main
from daguerre.config import config
from daguerre.data.settings import DataSettings

DOCS = (Path(__file__).parents[1] / "docs" / "dreambooth.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^    (daguerre train .*)$", DOCS, flags=re.MULTILINE)]


QUICK = {command[1]: command for command in reversed(COMMANDS) if "sdxl" not in command[1]}
"""The first command of a recipe; of SDXL, cli/test_dry_run.py has one."""


@pytest.mark.parametrize("command", chosen(COMMANDS, lambda command: command in QUICK.values()), ids=" ".join)
def test_its_commands_are_understood(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my_dog").mkdir()
    for i in range(4):
        Image.fromarray(np.full((20, 20, 3), i, dtype=np.uint8)).save(f"my_dog/{i}.png")
    has_class_set = "dreambooth" in command[1] or any(word.startswith("instance_data_dir=") for word in command)
    size = [] if has_class_set else ["training.global_batch_size=2", "training.per_device_batch_size=2"]
    assert main.run([*command, *size, "--dry-run"]) == errors.DONE
    assert ("200 images of 'a photo of a dog' are generated into" in capsys.readouterr().out) == has_class_set


def test_its_recipe_is_the_shipped_ones_data():
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    shipped = config.load("sd15_dreambooth", ["instance_data_dir=my_dog", "class_data_dir=dogs"]).config
    assert DataSettings(**yaml.safe_load(block)["data"]).sources == shipped.data.sources
