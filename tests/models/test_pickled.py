"""Pickled weights: read as tensors alone, converted once, and never run."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file
from tiny_models import write_sd

from daguerre.errors import UserError
from daguerre.models.weights import conversion_cache, pickled


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def as_bin(folder: Path) -> Path:
    """The same pipeline as the hub had it years ago."""
    for path in folder.glob("*/*.safetensors"):
        name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
        torch.save(load_file(path), path.with_name(name))
        path.unlink()
    return folder


def test_a_folder_is_converted_once(tmp_path, capsys):
    source = write_sd(tmp_path / "new")
    expected = {path.relative_to(source): load_file(path) for path in source.glob("*/*.safetensors")}
    as_bin(source)
    index = json.loads((source / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (source / "model_index.json").write_text(json.dumps(index))
    (source / "safety_checker").mkdir()
    (source / "safety_checker" / "pytorch_model.bin").write_bytes(b"not looked at")
    made = pickled.folder(source)
    assert made.parent == conversion_cache.root()
    assert "converting the pickled weights" in capsys.readouterr().err
    assert pickled.folder(source) == made
    assert capsys.readouterr().err == ""
    assert not list(made.rglob("*.bin"))
    for path, tensors in expected.items():
        found = load_file(made / path)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    StableDiffusionPipeline.from_pretrained(made, local_files_only=True)
    assert pickled.folder(made) == made, "there is nothing to convert"


def test_changed_weights_are_converted_anew(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    first = pickled.folder(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "diffusion_pytorch_model.bin")
    second = pickled.folder(tmp_path)
    assert first != second
    assert load_file(second / "diffusion_pytorch_model.safetensors")["a"].tolist() == [0, 0]


def test_shards_and_variants_keep_their_places(tmp_path):
    part = tmp_path / "unet"
    part.mkdir()
    for number, name in enumerate(["a", "b"], 1):
        torch.save({name: torch.full((2,), float(number))}, part / f"pytorch_model.fp16-0000{number}-of-00002.bin")
    weight_map = {name: f"pytorch_model.fp16-0000{n}-of-00002.bin" for n, name in enumerate(["a", "b"], 1)}
    (part / "pytorch_model.bin.index.fp16.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    made = pickled.folder(tmp_path)
    index = json.loads((made / "unet" / "model.safetensors.index.fp16.json").read_text())
    assert index["weight_map"] == {n: f"model.fp16-0000{i}-of-00002.safetensors" for i, n in enumerate(["a", "b"], 1)}
    assert load_file(made / "unet" / index["weight_map"]["b"])["b"].tolist() == [2, 2]


def test_a_program_in_a_pickle_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    for zipped in (True, False):
        torch.save({"a": torch.ones(1), "x": Evil(ran)}, tmp_path / "e.bin", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match=r"contains (posix|nt)\.system, which is not a tensor") as caught:
            pickled.tensors(tmp_path / "e.bin")
        assert "no code of this file was run" in str(caught.value)
        assert not ran.exists()


def test_what_trainers_left_beside_the_weights_is_read_as_nothing(tmp_path, monkeypatch):
    module = types.ModuleType("pytorch_lightning.callbacks.model_checkpoint")
    callback = type("ModelCheckpoint", (), {"__module__": module.__name__})
    module.ModelCheckpoint = callback
    for name in ("pytorch_lightning", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    callbacks = {callback: {"best": np.float64(0.5), "self": callback()}}
    torch.save({"state_dict": {"a": torch.ones(2)}, "callbacks": callbacks, "global_step": 7}, tmp_path / "old.ckpt")
    monkeypatch.undo()
    assert pickled.read(tmp_path / "old.ckpt")["global_step"] == 7
    assert pickled.tensors(tmp_path / "old.ckpt")["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(1)], "holds list"),
        ({"step": 3}, "has no weights by name; its top-level keys are: step"),
        (None, "cannot be read as weights|is not read"),
    ],
)
def test_what_holds_no_weights_is_refused(content, words, tmp_path):
    if content is None:
        (tmp_path / "a.bin").write_bytes(b"\x80\x02garbage")
    else:
        torch.save(content, tmp_path / "a.bin")
    with pytest.raises(UserError, match=words):
        pickled.tensors(tmp_path / "a.bin")
