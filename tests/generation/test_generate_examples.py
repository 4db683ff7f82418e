"""Flags of open-diffusion's generate_examples.py, and its lists of captions, in `daguerre generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from daguerre.cli.options import generate_options
from daguerre.config import overrides
from daguerre.errors import UserError
from daguerre.generation import prompts

FLAGS = (
    "--pipeline sd --prompt-file list.csv --out-dir drawn --batch-size 4 --guidance-scale 7.5 --scratch-dir /dev/shm"
)


def test_its_flags_are_options_here():
    notices: list[str] = []
    given = generate_options._of_examples(overrides.split([*FLAGS.split(), "--tar", "true"]), notices)
    assert given.recipe == "sd"
    assert dict(map(overrides.pair, given.overrides)) == {
        "prompts_file": "list.csv",
        "out": "drawn",
        "batch_size": "4",
        "guidance_scale": "7.5",
        "format": "webdataset",
    }
    assert notices == ["scratch_dir has no effect: each image is written directly to the output folder"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.csv", "uid,caption,mood\nfirst,a cat,calm\n"),
        ("list.jsonl", '{"uid": "first", "caption": "a cat", "mood": "calm"}\n'),
    ],
)
def test_its_lists_of_captions_are_prompts(tmp_path, name, text):
    path = Path(tmp_path / name)
    path.write_text(text, encoding="utf-8")
    (row,) = prompts.rows(path)
    assert (row.prompt, row.file_name, row.metadata) == ("a cat", "first", {"mood": "calm"})


def test_beside_a_column_of_prompts_a_caption_is_only_kept(tmp_path):
    path = Path(tmp_path / "list.csv")
    path.write_text("prompt,caption,uid\na dog,a cat,7\n", encoding="utf-8")
    (row,) = prompts.rows(path)
    assert (row.prompt, row.file_name, row.metadata) == ("a dog", None, {"caption": "a cat", "uid": "7"})
    path.write_text("uid,text\n7,a cat\n", encoding="utf-8")
    with pytest.raises(UserError, match="there is no column 'prompt'"):
        list(prompts.rows(path))
