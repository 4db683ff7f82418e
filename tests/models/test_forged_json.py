"""JSON of another shape, in files that are read again: refused in words, or made again, never a traceback."""

from __future__ import annotations

import json
from itertools import product

import pytest
from PIL import Image
from quick_cases import quick_where
from tiny_families import qwen_image
from tiny_models import write_sd

from daguerre import plugins, user_cache
from daguerre.cli import fetch
from daguerre.errors import UserError
from daguerre.kernels import attention
from daguerre.models.weights import file_digests
from daguerre.run import samples

FORMS = ("[]", "1", "null", '"x"', '{"a": 1}', "[" * 100_000, "{", '{"model_type": [], "architectures": 3}')
FORMS += ('{"model": {"type": "X"}}', '{"model": {"type": "BPE", "vocab": {}, "merges": {}}, "added_tokens": [{}]}')
BASES = {"sd": write_sd, "qwen_image": qwen_image.write}


QUICK = [("sd", "[]"), ("sd", "1"), ("sd", FORMS[-2])]


@pytest.mark.parametrize(("name", "form"), quick_where(QUICK.__contains__, product(BASES, FORMS)))
def test_a_base_with_a_forged_file_is_read_or_refused_in_words(name, form, tmp_path):
    """Where it says nothing that is read, it is as good as any."""
    base, family = BASES[name](tmp_path / "base"), plugins.find("families", name)
    settings = family.Settings(pretrained_model_name_or_path=str(base))
    refused = []
    for path in sorted(base.rglob("*.json")):
        content = path.read_bytes()
        path.write_text(form)
        try:
            family.load(settings, 0)
        except UserError:
            refused.append(path.parent.name)
        path.write_bytes(content)
    assert {"tokenizer", "text_encoder", "vae"} <= {*refused} or form == '{"a": 1}' or "model" in form


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_max_length", "x", "model_max_length must be a number"),
        ("pad_token", None, "names no pad_token"),
    ],
)
def test_a_tokenizer_with_a_value_of_another_form(key, value, said, tmp_path):
    base, family = BASES["sd"](tmp_path / "base"), plugins.find("families", "sd")
    path = base / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        family.load(family.Settings(pretrained_model_name_or_path=str(base)), 0)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_users_cache_holds_is_made_again(form, tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "folder", lambda: tmp_path)
    known = {"size": 3}
    assert file_digests.remembered(known, lambda: "first") == "first"
    question = attention.Question(**dict.fromkeys(attention.Question.__dataclass_fields__))
    assert attention.choose(question, lambda name: 1.0 if name == "math" else None) == "math"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        path.write_text(form)
    assert file_digests.remembered(known, lambda: "second") == "second"
    assert file_digests.remembered(known, lambda: "third") == "second"
    for _ in range(2):
        assert attention.choose(question, lambda name: 1.0 if name == "math" else None) == "math"
    assert json.loads(files[0].read_text())
    assert json.loads(files[1].read_text())


@pytest.mark.parametrize("form", FORMS)
def test_the_note_of_a_download_and_the_list_of_samples(form, tmp_path):
    (tmp_path / fetch.NOTE).write_text(form)
    note = fetch._read_note(tmp_path)
    assert note is None or isinstance(note.get("files", {}), dict)
    (tmp_path / samples.LISTING).write_text(form)
    assert samples.first(tmp_path) is None


def test_a_listing_names_no_image_outside_of_its_folder(tmp_path):
    """Its first image becomes the picture of a file that is shared."""
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "private.png")
    for name in ("../private.png", str(tmp_path / "private.png")):
        (tmp_path / "samples" / samples.LISTING).write_text(json.dumps([{"file": name}]))
        assert samples.first(tmp_path / "samples") is None
