"""docs/large-scale.md: its commands run on tiny networks, and its table of memory is what graphs keep."""

import re
import shlex
from pathlib import Path

import pytest
from activations import kept_gb
from twins import Twins, shards

from daguerre import errors
from daguerre.cli import main

DOCS = (Path(__file__).parents[1] / "docs" / "large-scale.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (SD[\w., ]*) \| (\d+) px \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", DOCS, re.MULTILINE)
ARCHITECTURES = {"SD 1.x, 2.x": "sd2_base", "SD 2.1": "sd21", "SDXL": "sdxl"}


def commands():
    blocks = re.findall(r"^```sh\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.long  # of the quick tests, memory/test_plan_batches.py plans its recipes
def test_every_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shards(tmp_path / "laion", labelled=False)
    twins = Twins(tmp_path)
    for program, verb, *words in commands():
        assert program == "daguerre"
        if verb == "train":
            given = {word.split("=")[0] for word in words}
            words += [change for change in twins.overrides(words[0]) if change.split("=")[0] not in given]
        assert main.run([verb, *words]) == errors.DONE, shlex.join([verb, *words])
    assert "starting from the weights of runs/sd2_scratch_stage1" in capsys.readouterr().out
    assert (tmp_path / "runs" / "sd2_scratch_stage2" / "pipeline" / "model_index.json").exists()


@pytest.mark.parametrize(
    ("network", "size_px", "plain", "checkpointed", "block"),
    [pytest.param(*row, marks=[] if row is ROWS[0] else [pytest.mark.long]) for row in ROWS],
)
def test_the_table_of_memory(network, size_px, plain, checkpointed, block):
    kept, largest = kept_gb(ARCHITECTURES[network], int(size_px))
    assert kept == pytest.approx(float(plain), abs=0.006)
    assert largest == pytest.approx(float(block), abs=0.006)
    assert kept_gb(ARCHITECTURES[network], int(size_px), checkpointing=True)[0] == pytest.approx(
        float(checkpointed), abs=0.006
    )


def test_the_table_has_every_size_of_the_recipes():
    assert {(network, int(size_px)) for network, size_px, *_ in ROWS} == {
        ("SD 1.x, 2.x", 256),
        ("SD 1.x, 2.x", 512),
        ("SD 2.1", 768),
        ("SDXL", 1024),
    }
