"""Where a folder of other trainers ends, and which files beside an image are its captions: as their readers do it."""

import json

import pytest

from daguerre.cli import main
from daguerre.config import recipe

KOHYA = """
[general]
caption_extension = "{ending}"
[[datasets]]
resolution = 64
[[datasets.subsets]]
image_dir = "{path}"
{more}
"""


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """The settings of the data that a file of theirs becomes."""
    monkeypatch.chdir(tmp_path)

    def convert(name: str, content: str) -> dict:
        (tmp_path / name).write_text(content)
        assert main.run(["convert", "config", name, "out=ours.yaml", "--all"]) == 0
        (tmp_path / "ours.yaml").rename(tmp_path / "read.yaml")
        return dict(recipe.paths(recipe.read(tmp_path / "read.yaml")))

    return convert


def folder(tmp_path) -> str:
    (tmp_path / "pictures" / "rejected").mkdir(parents=True)
    for name in ("a.txt", "a.png", "rejected/b.png", "rejected/b.txt"):
        (tmp_path / "pictures" / name).write_text("a picture")
    return str(tmp_path / "pictures")


@pytest.mark.parametrize(("ending", "ours"), [(".txt", ".txt"), (".caption", ".caption"), ("wd14", ".wd14")])
def test_kohyas_folders_are_flat_and_the_first_line_counts(converted, tmp_path, ending, ours):
    found = converted("k.toml", KOHYA.format(ending=ending, path=folder(tmp_path), more=""))
    assert found["data.recursive"] is False
    assert found["data.captions.lines"] == "first"
    assert found["data.caption_extension"] == ours


def test_kohyas_class_tokens_are_the_caption_of_the_flat_folder_alone(converted, tmp_path):
    path = folder(tmp_path)
    (tmp_path / "pictures" / "a.txt").unlink()
    found = converted("k.toml", KOHYA.format(ending=".txt", path=path, more='class_tokens = "sks dog"'))
    assert found["data.captions.text"] == "sks dog"
    assert "data.captions.lines" not in found
    assert "data.caption_extension" not in found


@pytest.mark.parametrize("inside", [True, False, None])
def test_onetrainers_folders_are_flat_unless_it_says_otherwise(converted, tmp_path, inside):
    concept = {"path": folder(tmp_path), "name": "x", "image": {}, "text": {"prompt_source": "sample"}}
    concept |= {} if inside is None else {"include_subdirectories": inside}
    document = {"__version": 10, "model_type": "STABLE_DIFFUSION_15", "training_method": "LORA", "concepts": [concept]}
    found = converted("ot.json", json.dumps(document))
    assert found.get("data.recursive", True) is (inside is True)
    assert found["data.captions.lines"] == "drawn"
