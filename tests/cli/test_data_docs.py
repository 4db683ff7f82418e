"""docs/data-tools.md: each command of its `sh` blocks runs, one after the other in one folder."""

import re
import shlex
from pathlib import Path

import data_sets
from PIL import Image

from daguerre.cli import main

DOCS = Path(__file__).parents[2] / "docs" / "data-tools.md"


def commands():
    blocks = re.findall(r"^```sh\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_every_command_runs_and_every_verb_has_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data_sets.folder(tmp_path / "my_images", 30)
    for program, *words in commands():
        assert program == "daguerre"
        assert main.run(words) == 0, shlex.join(words)
    assert {words[2] for words in commands() if words[1] == "data"} == set(main.verbs("data"))
    for name in ("data-stats.html", "shapes.html", "my_shards/shard-00000.tar.index", "wide_shards/dataset.json"):
        assert (tmp_path / name).exists(), name
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 1600


def test_every_option_of_the_help_exists():
    for name, verb in main.verbs("data").items():
        module = __import__(f"daguerre.cli.data.{name}", fromlist=["Options"])
        listed = set(re.findall(r"^  (?:-o \w+ or )?([a-z_]+)=", verb.help, flags=re.MULTILINE))
        assert listed - {"seed"} == set(module.Options.model_fields), name
