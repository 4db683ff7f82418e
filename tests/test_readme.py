"""README.md: each command of its `sh` blocks runs, one after the other in one folder; its snippet runs on their result.

The runs are shortened; the two make targets stand outside of these blocks.
"""

import re
import shlex
import signal
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from daguerre import errors, plugins
from daguerre.cli import main
from daguerre.config import cards, recipe

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHORT = [
    "model.unet.block_out_channels=[32, 32]",
    "model.unet.down_block_types=[DownBlock2D, CrossAttnDownBlock2D]",
    "model.unet.up_block_types=[CrossAttnUpBlock2D, UpBlock2D]",
    "model.unet.attention_head_dim=1",
    "training.duration=2 steps",
    "training.global_batch_size=2",
    "lr_scheduler.warmup=1 step",
    "logging.tensorboard=false",
    "validation.num_samples=2",
    "validation.num_levels=2",
    "sampling.num_images=1",
    "sampling.num_inference_steps=2",
]


def blocks(language):
    """The contents of README's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands():
    """The command lines of README, split as a shell does, without comments."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def shortened(words):
    """The arguments of a command, with less to do where it trains."""
    program, verb, *rest = words
    assert program == "daguerre", f"README has a command that this test cannot run: {shlex.join(words)}"
    if verb != "train":
        return [verb, *rest]
    given = {word.split("=")[0] for word in rest}
    of_shapes = [] if "data.source" in given else ["data.checked_prompts=1"]
    return [verb, *rest, *(override for override in SHORT + of_shapes if override.split("=")[0] not in given)]


def served(words):
    """The page of a server that runs in a process of its own."""
    command = [sys.executable, "-m", "daguerre", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().rpartition(" ")[2].strip()
            with urllib.request.urlopen(address, timeout=60) as page:
                return page.read().decode()
        finally:
            server.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The working folder, with what README takes for granted in it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_images").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (80, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "my_images" / f"{number}.jpg")
        (folder / "my_images" / f"{number}.txt").write_text(f"noise number {number}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def done(place):
    """The working folder after every command of README, in order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        for words in commands():
            if words[1] == "serve":  # until Ctrl-C
                assert "quickstart" in served(words[1:])
            else:
                assert main.run(shortened(words)) == errors.DONE, shlex.join(words)
    return place


def test_the_commands_run_and_leave_what_readme_says(done):
    assert {"train", "generate", "report", "serve", "recipes", "doctor", "data"} == {words[1] for words in commands()}
    assert {path.name for path in (done / "runs").iterdir()} == {"quickstart", "mine", "shards", "flow"}
    for run in (done / "runs").iterdir():
        for name in ("config.yaml", "metrics/metrics.jsonl", "report.html", "pipeline/model_index.json", "checkpoints"):
            assert (run / name).exists(), f"{run.name}/{name}"
    assert len(list((done / "runs" / "quickstart" / "generated").glob("*/*.png"))) == 4


def test_the_snippet_runs_on_stock_diffusers(done, monkeypatch):
    (snippet,) = blocks("python")
    monkeypatch.chdir(done)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own
        exec(compile(snippet, "snippet of README.md", "exec"), {})  # noqa: S102
    with Image.open(done / "circle.png") as image:
        assert image.size == (64, 64)


def test_every_run_folder_is_of_one_recipe_and_was_trained_before():
    """One who pastes every line meets no run of another recipe, and none that is not there."""
    recipes = {}
    for line in re.findall(r"^ *(daguerre .*)", README, flags=re.MULTILINE):
        _, verb, *words = shlex.split(line, comments=True)
        if verb == "train":
            named = [word.removeprefix("run_name=") for word in words if word.startswith("run_name=")]
            # `init` writes FOLDER.yaml, whose run has the folder's name.
            assert recipes.setdefault((named or words)[0].removesuffix(".yaml"), words[0]) == words[0], line
        assert {Path(word).name for word in words if word.startswith("runs/")} <= set(recipes), line


NOT_THERE = {
    # word of README: the plug-in (kind and name) that would make it untrue
    "published checkpoints": None,
    "other families": None,
    "tfrecord": ("sources", "tfrecord"),
    "grain": ("sources", "grain"),
}


def test_readme_says_what_is_not_supported():
    (paragraph,) = re.findall(r"^Not supported yet: .*?\n\n", README, flags=re.MULTILINE | re.DOTALL)
    for word, plugin in NOT_THERE.items():
        assert word in paragraph.replace("\n", " "), word
        assert plugin is None or plugin[1] not in plugins.names(plugin[0]), f"{plugin[1]} is there now"


def test_readme_says_how_daguerre_becomes_a_command_and_which_torch_is_taken():
    start = README[: README.index("## Use")]
    assert "    source .venv/bin/activate\n" in start
    assert "`pip install -e '.[datasets]' -c constraints.txt`" in start
    assert "install page of PyTorch's website" in start
    assert "TORCH_INDEX=" in start


def test_the_result_says_on_how_many_threads():
    (told,) = re.findall(r"^Of the quickstart's 200 held-out prompts .*?\n\n", README, flags=re.MULTILINE | re.DOTALL)
    assert "two threads" in told
    assert "98.5 %" in told.partition("one thread")[2]


ROWS = re.findall(r"^\| [^|]* \| `daguerre train (\w+)[^|]* \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", README, re.MULTILINE)
MEASURED = (Path(__file__).parents[1] / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def test_the_table_has_six_models():
    assert len(ROWS) == 6


@pytest.mark.parametrize(("name", "card", "time", "picture"), ROWS)
def test_a_row_has_the_card_of_the_header_and_a_time_that_was_measured(name, card, time, picture):
    path = recipe.shipped()[name]
    known = cards.options(path)
    assert card == (f"{known[0].card_gb} GB" if known else "none")
    number = re.match(r"(\d+) images/s", time)
    if number:
        rates = re.search(r"^## Recorded passes on a GPU$.*?^## ", MEASURED, re.MULTILINE | re.DOTALL)[0]
        assert number[1] in {f"{float(rate):.0f}" for rate in re.findall(r"\*\*([\d.]+)\*\*", rates)}
    else:
        assert time.replace(" min", " minutes") in cards.line(path, "Time")
    assert picture == "none yet" or "](docs/images/" in picture


def test_files_in_the_text_exist():
    root = Path(__file__).parents[1]
    for name in re.findall(r"`((?:docs|src|benchmarks)/[\w./]*)`", README):
        assert (root / name).exists(), name
