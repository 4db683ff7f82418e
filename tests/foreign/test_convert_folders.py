"""Where a folder of other trainers ends, and which files beside an image are its captions: as their readers do it."""

import json
from pathlib import Path

import pytest
import recipe_values

from daguerre.cli import main

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
        return recipe_values.values(tmp_path / "read.yaml")

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


def lost(capsys, name: str, content: str) -> tuple[dict, dict]:
    """The settings of the data, and what is lost: {key: why}."""
    Path(name).write_text(content)
    assert main.run(["convert", "config", name, f"out={name}.yaml", "--all"]) == 0, capsys.readouterr()
    listed = capsys.readouterr().out.partition("not carried over")[2].partition("\ncarried over")[0].splitlines()[1:]
    return recipe_values.values(Path(f"{name}.yaml")), dict(line.split(None, 1) for line in listed)


@pytest.mark.parametrize("older", [False, True])
def test_kohyas_captions_are_caption_files_unless_it_says_otherwise(converted, tmp_path, older):
    """A .txt file is none of them: the images have the caption of their class."""
    text = KOHYA.format(ending="", path=folder(tmp_path), more='class_tokens = "sks dog"')
    text = text.replace('[general]\ncaption_extension = ""\n', "")
    found = converted("k.toml", ('caption_extention = "txt"\n' if older else "") + text)
    assert found.get("data.captions.text") == (None if older else "sks dog")
    assert found.get("data.caption_extension") == (".txt" if older else None)


@pytest.mark.parametrize("trainer", ["kohya", "ai-toolkit"])
@pytest.mark.parametrize("usual", ["a pet", ""])
def test_images_that_have_no_caption_beside_others_that_have_one_are_named(tmp_path, capsys, trainer, usual):
    path = folder(tmp_path)
    for name in ("b.png", "c.png"):
        (tmp_path / "pictures" / name).write_text("a picture")
    own = f'class_tokens = "{usual}"' if usual else ""
    text = BASE + KOHYA.format(ending=".txt", path=path, more=own)
    data = {"folder_path": path} | ({"default_caption": usual} if usual else {})
    job = {"type": "sd_trainer", "datasets": [data], "model": {"name_or_path": "a/b"}, "train": {"steps": 2}}
    job = {"job": "extension", "config": {"name": "x", "process": [job]}}
    given = ("k.toml", text) if trainer == "kohya" else ("a.json", json.dumps(job))
    values, why = lost(capsys, str(tmp_path / given[0]), given[1])
    (line,) = why.values()
    assert "2 of its images have no caption file" in line
    assert (f"'{usual}'" if usual else "an empty caption") in line
    assert values["data.path"] == path


BASE = 'pretrained_model_name_or_path = "a/b"\nresolution = "64,64"\nmax_train_steps = 4\noutput_name = "x"\n'
GUI = {"LoRA_type": "Standard", "pretrained_model_name_or_path": "a/b", "max_resolution": "64,64", "epoch": 1}


@pytest.mark.parametrize("here", ["nothing", "class images", "a file"])
@pytest.mark.parametrize("gui", [False, True])
def test_folders_of_kohya_that_are_not_here_are_lost(tmp_path, monkeypatch, capsys, gui, here):
    monkeypatch.chdir(tmp_path)
    if here == "class images":
        (tmp_path / "reg" / "1_dog").mkdir(parents=True)
    if here == "a file":
        (tmp_path / "train").write_text("")
    text = f'{BASE}train_data_dir = "train"\nreg_data_dir = "reg"\ncaption_extension = ".tags"\n'
    both = {"train_data_dir": "train", "reg_data_dir": "reg", "caption_extension": ".tags"}
    values, why = lost(capsys, *(("k.json", json.dumps(GUI | both)) if gui else ("k.toml", text)))
    assert set(why) == {"train_data_dir", "reg_data_dir"}
    assert "not on this machine" in why["train_data_dir"]
    assert "convert the config where they are" in why["train_data_dir"]
    assert values["data.path"] == "train"
    assert values["data.caption_extension"] == ".tags"
    assert values["data.captions.lines"] == "first"
    assert "data.recursive" not in values  # its images stand in folders


def test_class_images_of_kohya_that_are_not_here_are_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train" / "3_a dog").mkdir(parents=True)
    values, why = lost(capsys, "k.toml", f'{BASE}train_data_dir = "train"\nreg_data_dir = "reg"\n')
    assert set(why) == {"reg_data_dir"}
    assert values["data.repeats"] == 3


@pytest.mark.parametrize("more", ["", "\nmasked_loss = true"])
def test_kohyas_controlnet_is_trained_on_the_folder_itself(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    text = f'{BASE}train_data_dir = "train"\nconditioning_data_dir = "edges"{more}\n'
    values, why = lost(capsys, "k.toml", text)
    assert values["data.path"] == "train"
    assert values["data.mask_dir" if more else "data.control_dir"] == "edges"
    assert values.get("data.recursive", True) is bool(more)
    assert set(why) == ({"train_data_dir"} if more else set())


SUBSETS = """
[[datasets.subsets]]
image_dir = "a"
class_tokens = "a dog"
num_repeats = 3
[[datasets.subsets]]
image_dir = "b"
"""


def test_images_of_a_mix_that_cannot_be_counted_are_named(tmp_path, monkeypatch, capsys):
    """A folder that is here does not outweigh one that is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for number in range(5):
        (tmp_path / "b" / f"{number}.png").write_text("")
    values, why = lost(capsys, "k.toml", f"{BASE}[[datasets]]{SUBSETS}")
    assert values["data.weights.a"] == 3 * values["data.weights.b"]
    assert "captions.text" in why["datasets.0.subsets.0.image_dir"]
    assert "data.weights" in why["datasets.0.subsets.0.image_dir"]
    assert "datasets.0.subsets.1.image_dir" not in why


def test_a_folder_of_which_nothing_is_read_is_carried_from_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f'{BASE}[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 3\n'
    values, why = lost(capsys, "k.toml", text)
    assert not why
    assert (values["data.path"], values["data.repeats"], values["data.recursive"]) == ("a", 3, False)
    gui = {name: value for name, value in GUI.items() if name != "LoRA_type"}
    values, why = lost(capsys, "g.json", json.dumps(gui | {"image_folder": "a", "create_caption": False}))
    assert "train_data_dir" not in why
    assert (values["data.path"], values["data.recursive"]) == ("a", False)


FILES = {
    "k.toml": ("dataset_config", f'{BASE}dataset_config = "sets.toml"\n'),
    "g.json": ("dataset_config", json.dumps(GUI | {"dataset_config": "sets.toml"})),
    "ot.json": (
        "concept_file_name",
        json.dumps({"base_model_name": "a/b", "training_method": "LORA", "concept_file_name": "sets.json"}),
    ),
    "st.json": (
        "data_backend_config",
        json.dumps({"--model_family": "sdxl", "--data_backend_config": "backends.json"}),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_data_sets_that_is_not_here_is_lost(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    key, text = FILES[name]
    _, why = lost(capsys, name, text)
    assert "not on this machine" in why[key]


LISTS = {
    "SimpleTuner": [{"id": "cats", "type": "local", "instance_data_dir": "cats", "caption_strategy": "filename"}],
    "OneTrainer": [{"path": "cats", "image": {}, "text": {"prompt_source": "sample"}}],
}


@pytest.mark.parametrize("trainer", LISTS)
def test_a_list_of_data_sets_alone_is_named(tmp_path, monkeypatch, capsys, trainer):
    monkeypatch.chdir(tmp_path)
    Path("sets.json").write_text(json.dumps(LISTS[trainer]))
    assert main.run(["convert", "config", "sets.json"]) == 2
    message = capsys.readouterr().err
    assert f"data sets of {trainer}" in message
    assert "convert config" in message
