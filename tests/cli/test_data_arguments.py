"""What the `data` verbs understand: paths or a recipe, kinds that are guessed and said, mistakes that are explained."""

import subprocess
import sys
from pathlib import Path

import data_sets
import pytest
from pydantic import Field

from daguerre.cli import main
from daguerre.config import options
from daguerre.data.sources import shapes
from daguerre.errors import UserError
from daguerre.settings import Settings


class Options(Settings):
    """Options of a verb."""

    out: str | None = None
    """A file."""
    count: int = Field(3, ge=1)
    """A number."""


def read(*arguments):
    return options.read(arguments, Options)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_command_that_stands_for_a_file_is_read_as_a_word_too(place, capsys):
    data_sets.shards(place / "set", 1, 4)
    (shard,) = (place / "set").glob("*.tar")
    assert main.run(["data", "stats", f"pipe:cat {shard}", "data.resolution=64"]) == 0, capsys.readouterr().err


def test_the_verbs_are_those_that_have_a_file():
    for name, verb in main.verbs("data").items():
        text = verb.help
        assert text.startswith(f"usage: daguerre data {name} ")
        assert max(map(len, text.splitlines())) <= 120
        assert f"  {name:<6}  {verb.summary}\n" in main.verbs()["data"].help


def test_help_at_each_level(capsys):
    assert main.run(["data"]) == main.run(["data", "--help"]) == main.run(["help", "data"]) == 0
    text = capsys.readouterr().out
    assert text == (main.verbs()["data"].help + "\n") * 3
    for words in (["data", "pack", "--help"], ["help", "data", "pack"], ["data", "pack", "-h"]):
        assert main.run(words) == 0
    assert capsys.readouterr().out.count("usage: daguerre data pack") == 3


def test_a_verb_that_does_not_exist(capsys):
    assert main.run(["data", "pcak", "x"]) == 2
    assert "Did you mean `daguerre data pack`?" in capsys.readouterr().err
    assert main.run(["data", "my_images"]) == 2
    assert "the verb comes first" in capsys.readouterr().err.lower()


def test_words_are_sorted(place):
    words = options.split(["a.tar", "-o", "out", "--count", "4", "data.x=1", "--data.y=2", "./year=2020/b.tar"])
    assert words.bare == ("a.tar", "./year=2020/b.tar")
    assert words.overrides == ("out=out", "count=4", "data.x=1", "data.y=2")
    assert options.split(["https://h/x.tar?sig=a&b=c"]).bare == ("https://h/x.tar?sig=a&b=c",)
    with pytest.raises(UserError, match="needs a value"):
        options.split(["x", "-o"])
    with pytest.raises(UserError, match="no option -v"):
        options.split(["x", "-v"])


def test_a_recipe_gives_its_data_section_and_seed(place):
    request = read("quickstart", "data.jitter_px=0", "seed=7", "count=9", "-o", "x")
    assert isinstance(request.settings.sources["images"], shapes.Settings)
    assert (request.settings.sources["images"].jitter_px, request.settings.resolution, request.seed) == (0, 64, 7)
    assert (request.options.count, request.options.out, request.what) == (9, "x", "quickstart")


def test_a_recipe_whose_other_sections_are_not_finished(place):
    text = "run_name: ???\nmodel: {family: sd, size: 32}\ndata: {source: folder, path: x, resolution: '${model.size}'}"
    (place / "mine.yaml").write_text(text, encoding="utf-8")
    assert read("mine.yaml").settings.resolution == 32
    (place / "mine.yaml").write_text("data: {source: folder, path: '???'}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.path\n *must be given"):
        read("mine.yaml")


def test_another_source_than_the_recipes(place):
    images = data_sets.folder(place / "images", 2)
    request = read("quickstart", "data.source=folder", f"data.path={images}")
    assert (request.settings.kinds, request.settings.resolution) == ("folder", 64)
    assert any("dropped out" in notice for notice in request.notices)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (["shards"], "webdataset"),
        (["shards/part-00.tar", "shards/part-01.tar"], "webdataset"),
        (["shards/part-{00..01}.tar"], "webdataset"),
        (["shards/*.tar"], "webdataset"),
        (["pipe:aws s3 cp s3://b/x.tar -"], "webdataset"),
        (["s3://bucket/x-{000..999}.tar"], "webdataset"),
        (["https://h/x.tar?signature=abc"], "webdataset"),
        (["t.parquet"], "parquet"),
        (["t.csv"], "csv"),
        (["t.tsv.gz"], "csv"),
        (["images"], "folder"),
    ],
)
def test_kinds_are_guessed_and_said(place, given, kind):
    data_sets.folder(place / "images", 2)
    data_sets.shards(place / "shards", 2, 1)
    request = read(*given)
    assert request.settings.kinds == kind
    assert any(f"data.source={kind}" in notice for notice in request.notices)
    said = read(*given, f"data.source={kind}")
    assert said.settings == request.settings
    assert said.notices == ()


def test_what_lies_beside_shards_changes_nothing(place):
    shards = data_sets.shards(place / "img2dataset", 2, 1)
    for name in ("part-00.parquet", "part-00_stats.json", "part-00.tar.index", "dataset.json"):
        (shards / name).touch()
    assert read("img2dataset").settings.kinds == "webdataset"


def test_a_folder_of_several_kinds_is_a_question(place):
    data_sets.shards(place / "mixed", 1, 1)
    (place / "mixed" / "cat.jpg").touch()
    with pytest.raises(UserError, match="tar shards and images: choose which"):
        read("mixed")
    assert read("mixed", "data.source=folder").settings.kinds == "folder"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "no data given"),
        (["nothing"], "there is nothing at 'nothing'"),
        (["notes.md"], "is not a known kind of data"),
        (["shards", "images"], "one kind of data at a time"),
        (["quickstart", "shards"], "quickstart is a recipe"),
        (["shards", "coutn=3"], "did you mean count"),
        (["shards", "count=three"], "a whole number from 1"),
        (["shards", "count=1", "count=2"], "given twice"),
        (["shards", "data.resolutoin=3"], r"Did you mean data\.resolution"),
        (["shards", "data.source=tar"], "webdataset"),
        (["shards", "training.duration=3 steps"], "no such setting"),
        (["shards", "data.filters=a b"], r"data\.filters"),
    ],
)
def test_mistakes_are_explained(place, given, why):
    data_sets.folder(place / "images", 1)
    data_sets.shards(place / "shards", 1, 1)
    (place / "notes.md").touch()
    with pytest.raises(UserError, match=why):
        read(*given)


@pytest.mark.long
def test_no_torch_is_needed_to_pack():
    code = "import sys; from daguerre.cli.data import pack as data_pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
