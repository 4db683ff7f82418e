"""Captions are part of a run's identity: a run does not go on with other text unless it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
from PIL import Image

from daguerre import errors
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import options
from daguerre.data.caption_digests import CaptionDigests
from daguerre.data.dataset import open_dataset
from daguerre.errors import UserError
from daguerre.run import resume


def pictures(folder: Path, count: int = 8) -> Path:
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (64, 64), (number * 20, 90, 200)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder


def digests(folder: Path) -> CaptionDigests:
    found, _ = options.from_paths([str(folder)], ["data.resolution=64", "data.held_out_fraction=0"])
    return CaptionDigests(open_dataset(found.data, "train"))


def start(captions, recorded, step=5):
    document = {"samples": captions.dataset.fingerprint, **({} if recorded is None else {"captions": recorded})}
    return SimpleNamespace(checkpoint=Path("x"), step=step, documents={"loading": document})


def allowing(*paths):
    return SimpleNamespace(allow_change=list(paths))


def test_an_edited_caption_is_refused_by_name_and_allowed_from_an_update_on(tmp_path):
    folder, run = pictures(tmp_path / "images"), RunFolder(tmp_path)
    before = digests(folder)
    fresh = SimpleNamespace(checkpoint=None, step=None, documents={})
    recorded, notices = resume.restore_captions(before, fresh, allowing(), run)
    assert (recorded, notices) == ([{"from_step": 0, "digest": before.whole}], [])
    before.save(run.captions)
    assert resume.restore_captions(digests(folder), start(before, recorded), allowing(), run) == (recorded, [])

    (folder / "3.txt").write_text("another picture")
    (folder / "5.txt").write_text("picture  5")
    after = digests(folder)
    assert after.dataset.fingerprint == before.dataset.fingerprint
    with pytest.raises(UserError, match=r"captions .* have changed .*: 3\.png, 5\.png\. .*data\.captions") as refused:
        resume.restore_captions(after, start(after, recorded), allowing("optimizer"), run)
    assert refused.value.code == "changed"
    found, (notice,) = resume.restore_captions(after, start(after, recorded), allowing("data.captions"), run)
    assert found == [*recorded, {"from_step": 5, "digest": after.whole}]
    assert "from update 5 on: 3.png, 5.png" in notice
    for _ in range(2):  # a start that was killed before it saved
        after.save(run.captions)
        with pytest.raises(UserError, match=r"have changed .*: 3\.png, 5\.png\."):
            resume.restore_captions(after, start(after, recorded), allowing(), run)

    (folder / "3.txt").write_text("picture 3")
    (folder / "5.txt").write_text("picture 5")
    assert digests(folder).whole == before.whole


def test_many_changed_captions_are_counted_and_unknown_ones_told(tmp_path):
    folder, run = pictures(tmp_path / "images", 9), RunFolder(tmp_path)
    before = digests(folder)
    recorded = [{"from_step": 0, "digest": before.whole}]
    for number in range(9):
        (folder / f"{number}.txt").write_text("the same for all")
    after = digests(folder)
    with pytest.raises(UserError, match="which ones is not known"):
        resume.restore_captions(after, start(after, recorded), allowing(), run)
    before.save(run.captions)
    with pytest.raises(UserError, match=r"0\.png, .*, 4\.png and 4 more"):
        resume.restore_captions(after, start(after, recorded), allowing(), run)


def test_a_run_of_an_older_version_goes_on_and_says_so_once(tmp_path):
    captions = digests(pictures(tmp_path / "images"))
    found, (notice,) = resume.restore_captions(captions, start(captions, None), allowing(), RunFolder(tmp_path))
    assert found == [{"from_step": 5, "digest": captions.whole}]
    assert "no digest of captions" in notice
    assert resume.restore_captions(captions, start(captions, found, 7), allowing(), RunFolder(tmp_path)) == (found, [])


@pytest.mark.long
def test_a_run_is_not_continued_with_other_captions(tmp_path, capsys):
    folder = pictures(tmp_path / "images")
    given = ["data.source=folder", f"data.path={folder}", "data.resolution=64", "data.held_out_fraction=0",
             "validation.every=null", "checkpoint.export=false", "sampling.num_images=0",
             "lr_scheduler.name=constant"]  # fmt: skip
    words = [word for word in tiny_runs.arguments(tmp_path / "runs", *given) if "validation.num" not in word]
    words = [word for word in words if "checked_prompts" not in word]
    assert tiny_runs.main.run([*words, "training.duration=4 steps"]) == errors.DONE, capsys.readouterr().err
    (folder / "3.txt").write_text("another picture")
    longer = [*words, "training.duration=6 steps"]
    assert tiny_runs.main.run(longer) == errors.REFUSED
    assert "3.png" in capsys.readouterr().err
    assert tiny_runs.main.run([*longer, "allow_change=[data.captions]"]) == errors.DONE, capsys.readouterr().err
    newest = sorted((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))[-1]
    captions = json.loads((newest / "loading.json").read_text())["captions"]
    assert [each["from_step"] for each in captions] == [0, 4]
    assert tiny_runs.main.run([*words, "training.duration=7 steps"]) == errors.DONE, capsys.readouterr().err
