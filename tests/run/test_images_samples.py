"""The images of a run's saves: prompts of the recipe, of a file, or captions; each with its size and seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_drawings
import tiny_runs

from daguerre.assembly import parts
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.run import samples


@pytest.fixture
def recipe(tiny_sd: Path, tmp_path: Path) -> Path:
    return tiny_drawings.write_recipe(tmp_path, tiny_sd)


def wanted(recipe: Path, *given: str):
    config = configs.load(str(recipe), ["sampling.num_images=5", "sampling.seed=10", *given]).config
    return samples.requests(config, lambda count: [f"caption {i}" for i in range(count)])


def test_prompts_come_in_turn(recipe, tmp_path):
    found = wanted(recipe, "sampling.prompts=[a, b]", "sampling.height=32")
    assert [(one.prompt.text, one.seed) for one in found] == [("a", 10), ("b", 11), ("a", 12), ("b", 13), ("a", 14)]
    assert {one.size_px for one in found} == {(32, 64)}
    assert [one.prompt.text for one in wanted(recipe)] == [f"caption {i}" for i in range(5)]
    (tmp_path / "c.csv").write_text("prompt,seed,width\na,3,\nb,,32\n")
    found = wanted(recipe, f"eval_caption_file={tmp_path / 'c.csv'}", "num_eval_images=3")
    assert [(one.prompt.text, one.seed, one.size_px) for one in found] == [
        ("a", 3, (64, 64)),
        ("b", 11, (64, 32)),
        ("a", 4, (64, 64)),
    ]


def test_what_cannot_be_drawn_is_refused_at_the_start(recipe, tmp_path):
    (tmp_path / "c.csv").write_text("prompt,num_images\na,3\n")
    with pytest.raises(UserError, match="repeat the row"):
        wanted(recipe, f"sampling.prompts_file={tmp_path / 'c.csv'}")
    with pytest.raises(UserError, match="cannot be read"):
        wanted(recipe, "sampling.prompts_file=none.txt")
    with pytest.raises(UserError, match="prompts_file has the prompts"):
        wanted(recipe, "sampling.prompts_file=none.txt", "sampling.prompts=[a]")
    config = configs.load(str(recipe), ["sampling.height=33"]).config
    with pytest.raises(UserError, match="33"):
        samples.check(config, parts.build(config))
    assert main.run(["train", str(recipe), "sampling.height=33", "--dry-run"]) == 2


@pytest.mark.long  # of the quick tests, prompts of a file come in turn
def test_a_run_draws_from_a_file_at_each_save(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red star\na blue circle\n")
    given = [f"sampling.prompts_file={tmp_path / 'prompts.txt'}", "sampling.num_images=3", "sampling.width=32"]
    assert tiny_runs.train(tmp_path, "training.duration=3 steps", *given) == 0
    (listing,) = tmp_path.glob("tiny/samples/*/samples.json")
    found = json.loads(listing.read_text())
    assert [entry["prompt"] for entry in found] == ["a red star", "a blue circle", "a red star"]
    assert {(entry["height"], entry["width"]) for entry in found} == {(64, 32)}
    assert [entry["file"] for entry in found] == ["000.png", "001.png", "002.png"]
