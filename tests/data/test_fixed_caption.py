"""`captions.text`: one caption for every image, whatever the source says of it, and for images without any."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from daguerre.cli import main
from daguerre.config import config
from daguerre.data import captions
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import fixed_captions
from daguerre.data.settings import CaptionSettings, SourceSettings
from daguerre.data.sources import folder, parquet, webdataset
from daguerre.types import Record

TEXT = {"text": "a photo of sks dog"}
PLAIN = Record("a", {"image": b""}, {})


def usual(tmp_path):
    return {"resolution": 16, "held_out_fraction": 0, "cache_dir": str(tmp_path / "cache")}


def test_it_stands_for_what_the_fields_say_and_the_other_rules_hold():
    def drawn(record=PLAIN, dropout=0.0, **rules):
        settings = SourceSettings(source="test", caption_dropout=dropout, captions={**TEXT, **rules})
        return [captions.choose(record, settings, 0, np.array([i, 0, 0])) for i in range(200)]

    assert set(drawn()) == set(drawn(Record("b", {"image": b""}, {"text": "a cat"}))) == {"a photo of sks dog"}
    assert set(drawn(prefix="my ", templates=["{}, sharp"])) == {"my a photo of sks dog, sharp"}
    dropped = drawn(dropout=0.5)
    assert set(dropped) == {"", "a photo of sks dog"}
    assert 70 < dropped.count("") < 130


@pytest.mark.parametrize("name", ["fields", "weights", "join"])
def test_it_leaves_the_choice_of_fields_without_effect(name):
    given = {"fields": ["long"], "weights": [1], "join": ", "}[name]
    with pytest.raises(ValidationError, match=f"{name}: text is the caption of every image"):
        CaptionSettings(**TEXT, **{name: given})
    with pytest.raises(ValidationError, match="pattern"):
        CaptionSettings(text=" ")


def test_a_folder_of_bare_images_needs_no_captions(image_folder, tmp_path):
    for path in list(image_folder.glob("*.txt"))[:9]:
        path.unlink()
    dataset = open_dataset(folder.Settings(path=str(image_folder), captions=TEXT, **usual(tmp_path)), "train")
    assert dataset.size == 12
    assert not dataset.report()
    assert set(fixed_captions(dataset, 12)) == {"a photo of sks dog"}
    with pytest.raises(ValidationError, match=r"captions_from: no effect, as captions\.text is the caption of every"):
        folder.Settings(path="x", captions=TEXT, captions_from="folder_names")


def test_a_table_needs_no_column_of_captions(image_folder, tmp_path):
    rows = [path.read_bytes() for path in sorted(image_folder.glob("*.png"))]
    pq.write_table(pa.table({"image": rows}), tmp_path / "bare.parquet")
    made = parquet.Settings(path=str(tmp_path / "bare.parquet"), captions=TEXT, **usual(tmp_path))
    dataset = open_dataset(made, "train")
    assert fixed_captions(dataset, 12) == ["a photo of sks dog"] * 4
    with pytest.raises(ValidationError, match="caption_column: no effect, as captions"):
        parquet.Settings(path="x", captions=TEXT, caption_column="words")


def test_shards_are_captioned_anew(image_folder, tmp_path):
    assert main.run(["data", "pack", str(image_folder), "-o", str(tmp_path / "packed")]) == 0
    dataset = open_dataset(
        webdataset.Settings(path=str(tmp_path / "packed"), captions=TEXT, **usual(tmp_path)), "train"
    )
    assert fixed_captions(dataset, 20) == ["a photo of sks dog"] * 12


def test_it_is_written_where_it_is_given_alone(tmp_path):
    given = ["data.source=folder", "data.path=DIR", "data.captions.text=a photo of: sks, dog"]
    made = config.load("quickstart", given).config
    (tmp_path / "again.yaml").write_text(config.dump(made))
    again = config.load(str(tmp_path / "again.yaml")).config
    assert again.data.sources["images"].captions == made.data.sources["images"].captions
    assert again.data.sources["images"].captions.text == "a photo of: sks, dog"
    assert (
        "text:" not in config.dump(config.load("quickstart", given[:2]).config).split("captions:")[1].split("\n\n")[0]
    )
