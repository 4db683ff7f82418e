"""`import daguerre`: the promised names, that they are loaded late, and docs/library.md, whose blocks run."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_readme import SHORT

import daguerre
from daguerre import errors
from daguerre.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROMISED = {
    *("Model", "UserError", "__version__", "checkpoints", "draw", "keys", "load", "metrics", "objective", "plan"),
    *("read_checkpoint", "sampler", "train"),
}
"""A name that goes breaks code of others: CONTRIBUTING.md says how it goes."""


def test_these_names_are_promised_and_no_other():
    assert {*daguerre.__all__} == PROMISED
    assert [*dir(daguerre)] == sorted(PROMISED)
    assert [name for name in PROMISED - {"Model", "__version__"} if f"`{name}" not in PAGE] == []
    folders = {path.stem for path in (ROOT / "src" / "daguerre").iterdir()}
    assert PROMISED & folders == {"keys"}, "a function of this name would be replaced by the module"
    with pytest.raises(AttributeError, match=r"promises no 'loop'; it has Model"):
        daguerre.loop  # noqa: B018


def test_the_import_alone_loads_neither_torch_nor_pydantic():
    code = "import sys, daguerre; print(*{'torch', 'numpy', 'pydantic', 'diffusers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
                          capture_output=True, text=True, check=True).stdout == "\n"  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def names(place):
    """What the blocks of the page leave, run one after the other with a smaller model and a shorter training."""
    page = "".join(BLOCKS)
    assert [page.count(call) for call in ('train("quickstart"', 'plan("quickstart"')] == [1, 1]
    short = ", ".join(map(repr, ["quickstart", "data.checked_prompts=0", *SHORT]))
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        for block in BLOCKS:
            small = re.sub(r'(train|plan)\("quickstart"', rf"\1({short}", block)
            exec(compile(small, "docs/library.md", "exec"), found)  # noqa: S102
    return found


def test_the_blocks_of_the_page_run(names, place):
    assert names["run"] == Path("runs/quickstart")
    assert [image.size for image in names["images"]] == [(64, 64)] * 4
    assert names["step"] == 2
    assert names["losses"]
    assert names["memory"]["step"]["peak_bytes"] > 1e6
    assert torch.allclose(names["p"], -names["s"])


def test_images_are_those_of_the_command(names, place, monkeypatch):
    monkeypatch.chdir(place)
    words = [
        "runs/quickstart",
        "prompt=a small green star on a white background",
        "num_images=2",
        "seed=7",
        "out=drawn",
    ]
    assert main.run(["generate", *words]) == errors.DONE
    for number, image in enumerate(names["images"][:2]):
        with Image.open(f"drawn/{number:03}.png") as written:
            # Others were in the batch: within a rounding.
            assert np.abs(np.asarray(written, np.int16) - np.asarray(image, np.int16)).max() <= 1


def test_images_between_two_prompts_are_those_of_the_command(names, place, monkeypatch):
    monkeypatch.chdir(place)
    first, last = names["model"].generate("a circle", "interpolate_to=a star", "num_images=2", "seed=7")
    for image, prompt in ((first, "a circle"), (last, "a star")):
        (alone,) = names["model"].generate(prompt, "seed=7")
        assert np.abs(np.asarray(image, np.int16) - np.asarray(alone, np.int16)).max() <= 1


@pytest.mark.parametrize("given", ["out=x", "prompt=y", "weights=raw", "training.device=cpu", "nonsense=1"])
def test_settings_of_files_and_of_loading_are_refused(given, names, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(daguerre.UserError, match=given.partition("=")[0]):
        names["model"].generate("a circle", given)


def test_what_is_not_there_is_a_user_error(tmp_path):
    for refused in (
        lambda: daguerre.metrics(tmp_path),
        lambda: daguerre.read_checkpoint(tmp_path),
        lambda: daguerre.objective("dpo"),
        lambda: daguerre.objective("v", schedules=1),
        lambda: daguerre.sampler("sampler"),
        lambda: daguerre.draw(daguerre.objective("v"), None, (1, 1, 1), [0], steps=2),
        lambda: daguerre.plan("quickstart", "cards=8GB"),
    ):
        with pytest.raises(daguerre.UserError):
            refused()
