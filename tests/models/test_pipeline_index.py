"""The index of a pipeline: both kinds are found, and a modular one names the place from which diffusers reads."""

import json
from pathlib import Path

from daguerre.models.weights import index

KINDS = {"vae": ["diffusers", "AutoencoderKL"], "tokenizer": ["transformers", "Qwen2Tokenizer"]}


def test_both_names_are_an_index(tmp_path: Path):
    assert index.find(tmp_path) is None
    for name in reversed(index.NAMES):
        (tmp_path / name).write_text("{}")
        assert index.find(tmp_path) == tmp_path / name


def test_a_published_index_names_its_repository(tmp_path: Path):
    place = tmp_path / index.MODULAR
    place.write_text(json.dumps({"_class_name": "AnimaModularPipeline", **index.modular(KINDS)}))
    found = json.loads(index.at(place, "me/anima"))
    assert found["_class_name"] == "AnimaModularPipeline"
    for name, kind in KINDS.items():
        where = {"pretrained_model_name_or_path": "me/anima", "subfolder": name, "type_hint": kind}
        assert found[name] == [*kind, where]
