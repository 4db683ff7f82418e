"""A verb that writes one file looks at its place before it works."""

import foreign_configs
import pytest
from PIL import Image

from daguerre.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ["init", "images"],
        ["data", "stats", "images"],
        ["data", "show", "images"],
        ["convert", "config", "base14.yml"],
        ["reference", "images", "networks.inception=random"],
        ["bench", "quickstart"],
        ["evaluate", "a", "b"],
        ["compare", "runs/a"],
    ],
    ids=" ".join,
)
def test_a_folder_that_is_not_there_is_told_before_the_work(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images/a.png")
    (tmp_path / "base14.yml").write_text(foreign_configs.maxdiffusion(), encoding="utf-8")
    for place, said in (("none/x.png", "there is no folder none"), ("images", "is a folder: give the name of a file")):
        assert main.run([*words, f"out={place}"]) == 2
        assert said in capsys.readouterr().err
