"""Settings that were renamed: read for one version with a notice, refused then with the new key. No real one was
renamed yet, so rows are made up."""

from __future__ import annotations

import pytest
import yaml

from daguerre.config import config as configs
from daguerre.config import options, renamed
from daguerre.config.errors import ConfigError
from daguerre.config.renamed import Renamed

ROWS = (
    Renamed("training.images_a_step", "training.global_batch_size", (0, 3)),
    Renamed("adapters.*.size", "adapters.*.rank", (0, 3)),
    Renamed("training.turbo", "", (0, 3), "every run is as fast"),
)


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    monkeypatch.setattr(renamed, "RENAMED", ROWS)
    monkeypatch.setattr(renamed, "__version__", "0.3.1")


def recipe(folder, **more):
    tree = {"extends": "quickstart", "run_name": "x", **more}
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "mine.yaml")


def in_file(folder):
    adapters = {"style": {"name": "lora", "size": 3}, "full": None}
    model = {"unet": "base", "pretrained_model_name_or_path": "somewhere"}
    return recipe(folder, training={"images_a_step": 24}, adapters=adapters, model=model)


def test_the_version_of_the_row_reads_the_old_key_of_a_file_with_a_notice(tmp_path):
    found = configs.load(in_file(tmp_path))
    assert found.config.training.global_batch_size == 24
    assert found.config.adapters["style"].rank == 3
    said = [line for line in found.notices if "refused by the next one" in line]
    assert [line.partition(":")[0] for line in said] == [
        "training.images_a_step is called training.global_batch_size now",
        "adapters.style.size is called adapters.style.rank now",
    ]


@pytest.mark.parametrize("key", ["images_a_step", "training.images_a_step"])
def test_so_does_the_command_line_in_each_form(key):
    found = configs.load("quickstart", [f"{key}=24"])
    assert found.config.training.global_batch_size == 24
    assert sum("now: it is read in this version" in line for line in found.notices) == 1


@pytest.mark.parametrize("key", ["size", "adapter.size", "adapters.lora.size"])
def test_settings_of_plug_ins_have_their_short_forms(key):
    (found,) = renamed.given([f"{key}=3"], [], [])
    assert found == f"{key.replace('size', 'rank')}=3"


def test_where_both_stand_the_new_key_counts(tmp_path):
    both = recipe(tmp_path, training={"images_a_step": 24, "global_batch_size": 8})
    assert configs.load(both).config.training.global_batch_size == 8


@pytest.mark.parametrize("version", ["0.4.0", "0.4.0.dev0", "1.0.0"])
def test_later_versions_refuse_it_and_name_the_new_key(version, tmp_path, monkeypatch):
    monkeypatch.setattr(renamed, "__version__", version)
    for name, given in ((in_file(tmp_path), []), ("quickstart", ["images_a_step=24"])):
        with pytest.raises(ConfigError, match=r"since version 0\.3: write (training\.)?global_batch_size"):
            configs.load(name, given)
        with pytest.raises(ConfigError, match=r"since version 0\.3: write (training\.)?global_batch_size"):
            configs.check_soon(name, given)


def test_one_that_was_removed_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"gone since version 0\.3: every run is as fast"):
        configs.load("quickstart", ["training.turbo=true"])


def test_the_place_of_a_run_is_read_from_old_keys(tmp_path, monkeypatch):
    """Before anything else of the recipe is."""
    monkeypatch.setattr(renamed, "RENAMED", (Renamed("name", "run_name", (0, 3)), Renamed("dir", "output_dir", (0, 3))))
    path = tmp_path / "old.yaml"
    path.write_text("name: a\ndir: b\n")
    assert configs.peek(str(path)) == ("b", "a")
    assert configs.peek(str(path), ["dir=c"]) == ("c", "a")
    monkeypatch.setattr(renamed, "__version__", "0.4.0")
    with pytest.raises(ConfigError, match=r"since version 0\.3: write run_name"):
        configs.peek(str(path))


def test_the_verbs_of_data_read_old_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(renamed, "RENAMED", (Renamed("data.dropout", "data.caption_dropout", (0, 3)),))
    path = recipe(tmp_path, data={"dropout": 0.25})
    found, notices = options.from_recipe(path, [])
    assert found.data.sources["images"].caption_dropout == 0.25
    assert any("data.dropout is called data.caption_dropout now" in line for line in notices)
    assert options.from_recipe(path, ["data.dropout=0.5"])[0].data.sources["images"].caption_dropout == 0.5
    monkeypatch.setattr(renamed, "__version__", "0.4.0")
    with pytest.raises(ConfigError, match=r"since version 0\.3: write data\.caption_dropout"):
        options.from_recipe(path, [])
