"""Configs of sd-scripts and musubi-tuner: what stands nearest to a data set counts, and a value of another kind than
its program reads is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daguerre.errors import UserError
from daguerre.foreign import files, signs
from daguerre.foreign.converters import converted
from daguerre.foreign.reader import Reading, Tables

RECORDED = Path(__file__).parents[1] / "support/trainer_keys"
FOLDER = {"image_dir": "a", "num_repeats": 1}
KOHYA: dict[str, Any] = {
    "pretrained_model_name_or_path": "m.safetensors", "network_module": "networks.lora", "network_dim": 8,
    "train_batch_size": 2, "resolution": "512,512", "max_train_steps": 10,
    "datasets": [{"resolution": 768, "batch_size": 4, "enable_bucket": True, "subsets": [FOLDER]}],
}  # fmt: skip
MUSUBI: dict[str, Any] = {
    "model_version": "klein-base-4b", "network_module": "networks.lora_flux_2", "dit": "d.safetensors",
    "general": {"resolution": [960, 544], "batch_size": 1, "enable_bucket": False},
    "datasets": [{"image_directory": "a", "resolution": [1024, 1024], "batch_size": 4, "enable_bucket": True}],
}  # fmt: skip
OF = {"kohya": KOHYA, "musubi": MUSUBI}


def read(tree: dict[str, Any]) -> Reading:
    trainer = signs.trainer(tree)
    assert trainer is not None
    return converted(trainer, files.BESIDE[trainer](tree, Path()), "x")


@pytest.mark.parametrize(("tree", "side"), [(KOHYA, 768), (MUSUBI, 1024)])
def test_what_a_data_set_has_counts(tree, side):
    reading = read(tree)
    assert reading.values["training.per_device_batch_size"] == 4
    assert reading.values["data.resolution"] == side
    assert reading.values["data.buckets.aspects"] == "auto"
    above = [line for line in reading.lines if line.text == "every data set has its own"]
    assert {line.kind for line in above} == {"notice"}
    names = {"train_batch_size", "resolution"} if tree is KOHYA else {f"general.{name}" for name in tree["general"]}
    assert {line.key for line in above} == names


def test_what_only_some_data_sets_read_is_refused():
    reading = read(
        KOHYA | {"datasets": [*KOHYA["datasets"], {"resolution": 768, "subsets": [FOLDER | {"image_dir": "b"}]}]}
    )
    (line,) = [line for line in reading.lines if line.key == "train_batch_size"]
    assert (line.kind, reading.values["training.per_device_batch_size"]) == ("refused", 4)
    assert "batch_size is one for all data sets, and datasets.0.batch_size makes it 4" in line.text


@pytest.mark.parametrize("trainer", OF)
def test_a_switch_is_true_or_false(trainer):
    names = Tables(trainer)["switches"]
    keys = json.loads((RECORDED / f"{trainer}.json").read_text(encoding="utf-8"))["keys"]
    switches = {key.rpartition(".")[2] for key, usual in keys.items() if isinstance(usual, bool)}
    assert {*names} <= switches
    for name in names:
        for value in ("yes", "true", 1, [True]):
            with pytest.raises(UserError, match=f"{name} is .*, and must be true or false"):
                read(OF[trainer] | {name: value})
    with pytest.raises(UserError, match=r'datasets\.0\.enable_bucket is "yes", and must be true or false'):
        read(OF[trainer] | {"datasets": [OF[trainer]["datasets"][0] | {"enable_bucket": "yes"}]})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("clip_skip", "x", '"x" is no finite number'),
        ("max_train_epochs", -3, "max_train_epochs is -3, and must be above 0"),
        ("max_train_epochs", True, "true is no finite number"),
        ("learning_rate", ["x"], "a learning rate must be a number"),
        ("min_bucket_reso", [7], "is no finite number"),
    ],
)
def test_a_number_is_one(name, value, said):
    tree = {key: own for key, own in KOHYA.items() if key != "max_train_steps"} | {"unet_lr": 1e-4, name: value}
    with pytest.raises(UserError, match=said):
        read(tree)


@pytest.mark.parametrize("value", ["x", [7], True, 1e400])
def test_repeats_are_a_number(value):
    with pytest.raises(UserError, match="finite number"):
        read(KOHYA | {"datasets": [KOHYA["datasets"][0] | {"subsets": [FOLDER | {"num_repeats": value}]}]})


@pytest.mark.parametrize(("given", "ours"), [("10%", "1 steps"), ("0.5", "5 steps"), (0.3, "3 steps"), (4, "4 steps")])
def test_a_warm_up_is_a_number_of_updates_or_a_share_in_any_spelling(given, ours):
    reading = read({**KOHYA, "lr_scheduler": "cosine", "lr_warmup_steps": given})
    assert reading.values["lr_scheduler.warmup"] == ours


@pytest.mark.parametrize(("kind", "family"), [("sdxl-lora", "sdxl"), ("sd-lora", "sd"), ("sdxl-finetune", "sdxl")])
def test_lora_scripts_says_which_model_is_trained(kind, family):
    assert read({**KOHYA, "model_train_type": kind}).values["model.family"] == family


def test_a_family_of_lora_scripts_that_is_not_here_is_named():
    with pytest.raises(UserError, match="sd3_lora"):
        read({**KOHYA, "model_train_type": "sd3-lora"})


@pytest.mark.parametrize("trainer", OF)
@pytest.mark.parametrize("in_file", [True, False])
def test_sample_prompts_are_read_without_comments_and_options(trainer, in_file, tmp_path):
    """Windows around sd-scripts have the prompts themselves where it has their file."""
    text, place = "a cat --w 64 --d 1\n\na dog --w 64\n", tmp_path / "prompts.txt"
    place.write_text(f"# my prompts\n{text}")
    reading = read({**OF[trainer], "sample_prompts": str(place) if in_file else text})
    assert reading.values["sampling.prompts"] == ["a cat", "a dog"]
    assert reading.values["sampling.width"] == 64
    (line,) = (line for line in reading.lines if line.key == "sample_prompts")
    assert line.kind == "carried"
    assert "left out --d" in line.text


def test_prompts_that_are_not_on_this_machine_are_their_file():
    assert read({**KOHYA, "sample_prompts": "nowhere.txt"}).values["sampling.prompts_file"] == "nowhere.txt"


@pytest.mark.parametrize("trainer", OF)
@pytest.mark.parametrize(
    ("given", "keep", "backups"),
    [
        ({"save_every_n_epochs": 2}, None, "2 epochs"),
        ({"save_every_n_steps": 5}, None, "5 steps"),
        ({}, None, None),
        ({"save_every_n_epochs": 2, "save_last_n_epochs": 3}, 3, None),
        ({"save_every_n_epochs": 2, "save_last_n_epochs": 1}, 2, None),
        ({"save_every_n_steps": 5, "save_last_n_steps": 14}, 3, None),  # of 20, 15, 10 and 5 the last is deleted at 20
        ({"save_every_n_steps": 5, "save_last_n_epochs": 3}, None, "5 steps"),  # no save by epochs
    ],
)
def test_all_saves_are_kept_unless_their_number_is_given(trainer, given, keep, backups):
    values = read(OF[trainer] | given).values
    assert (values.get("checkpoint.keep"), values.get("checkpoint.backup_every")) == (keep, backups)


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({"sample_every_n_epochs": 2}, set()),
        ({"sample_every_n_epochs": 1}, {"sample_every_n_epochs"}),
        ({"sample_every_n_steps": 2}, {"sample_every_n_steps"}),
        ({"sample_every_n_epochs": 2, "sample_every_n_steps": 9}, set()),  # epochs count there
        ({"sample_every_n_epochs": 1, "sample_prompts": ""}, set()),
    ],
)
def test_sample_images_between_saves_are_lost_aloud(given, lost):
    reading = read(KOHYA | {"save_every_n_epochs": 2, "sample_prompts": "a\nb"} | given)
    assert {line.key for line in reading.lines if line.kind == "refused"} == lost


def test_latents_are_kept_as_there_and_the_file_for_other_programs_is_named():
    reading = read(KOHYA | {"cache_latents": True, "shuffle_caption": True, "save_model_as": "safetensors"})
    assert (reading.values["cache.path"], reading.values["cache.texts"]) == ("auto", False)
    texts = {line.key: line.text for line in reading.lines}
    assert "adapter/kohya.safetensors" in texts["save_model_as"]
    assert "cache.path" not in read(KOHYA | {"cache_latents": False}).values
