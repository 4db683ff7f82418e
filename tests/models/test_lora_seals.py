"""Files of adapters: written beside their name, with the digest of their tensors, by which they are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_lora_files import networks, opened
from test_lora_headers import addition
from tiny_models import tiny_sd_folder
from torch import nn

from daguerre.checkpoint import atomic
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.models.lora_files import contents, forms
from daguerre.models.lora_files.read import read
from daguerre.models.parts.text import token_files
from daguerre.models.weights import seals


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    return networks(opened(tiny_sd_folder(tmp_path_factory.mktemp("sd"))))


def place(folder: Path, form: str) -> Path:
    return folder / ("peft" if form == "peft" else f"{form}.safetensors")


def tensors_of(written: Path) -> Path:
    return written / "unet" / "adapter_model.safetensors" if written.is_dir() else written


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_a_flipped_bit_is_found(form, plain, tmp_path):
    """Anywhere in the tensors."""
    written = place(tmp_path, form)
    forms.write(form, written, plain, {"unet": [addition()]})  # type: ignore[arg-type]
    file = tensors_of(written)
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for bit in np.random.default_rng(0).integers(8 * start, 8 * len(data), 24).tolist():
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(UserError, match="is damaged: its tensors are not those"):
            read(written, plain)
    file.write_bytes(data)
    assert read(written, plain)


def test_another_program_may_change_it(plain, tmp_path):
    """sd-scripts copies a header and counts its own digest anew."""
    forms.write("kohya", tmp_path / "x.safetensors", plain, {"unet": [addition()]})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        header = file.metadata()
    half = {name: value.half() for name, value in load_file(tmp_path / "x.safetensors").items()}
    save_file(half, tmp_path / "y.safetensors", header)
    with pytest.raises(UserError, match="is damaged"):
        read(tmp_path / "y.safetensors", plain)
    save_file(half, tmp_path / "y.safetensors", header | {"sshs_model_hash": seals.payload(tmp_path / "y.safetensors")})
    assert read(tmp_path / "y.safetensors", plain)
    assert contents.notices(tmp_path / "y.safetensors") == []


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({}, 0),
        ({"sshs_model_hash": "ab" * 32, "sshs_legacy_hash": "abcdef01"}, 1),
        ({"sshs_legacy_hash": "abcdef01"}, 0),
        ({"modelspec.hash_sha256": f"0x{'ab' * 32}"}, 0),
    ],
)
def test_a_digest_of_another_program_is_told_and_never_refused(header, told, plain, tmp_path):
    """Old short digests are of the file with another header; OneTrainer's is of tensors in its own order."""
    forms.write("kohya", tmp_path / "x.safetensors", plain, {"unet": [addition()]})
    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "theirs.safetensors", header or None)
    assert read(tmp_path / "theirs.safetensors", plain)
    assert len(contents.notices(tmp_path / "theirs.safetensors")) == told


def test_new_tokens_are_checked(tmp_path):
    rows = {"<toy>": {"text_encoder": torch.ones(2, 8)}}
    token_files.write(tmp_path, rows, {}, {})
    for file in tmp_path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match="is damaged"):
            token_files.read(file, [])


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_a_full_disk_leaves_nothing(form, plain, tmp_path, monkeypatch):
    """So that the same command works once there is room."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written = place(tmp_path, form)
    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            forms.write(form, written, plain, {"unet": [addition()]})  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
    forms.write(form, written, plain, {"unet": [addition()]})  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == [written.name]


def test_what_was_written_wrongly_is_not_there(plain, tmp_path, monkeypatch):
    def other(*given: Any) -> None:
        raise RuntimeError("does not hold it")

    monkeypatch.setattr(forms, "compare", other)
    with pytest.raises(RuntimeError, match="does not hold it"):
        forms.write("kohya", tmp_path / "x.safetensors", plain, {"unet": [addition()]})
    assert not [*tmp_path.iterdir()]


def test_the_command_says_it(plain, tmp_path, capsys):
    base = tiny_sd_folder(tmp_path / "sd")
    forms.write("kohya", tmp_path / "x.safetensors", plain, {"unet": [addition()]})
    tensors = load_file(tmp_path / "x.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors", {"sshs_model_hash": "ab" * 32})
    command = ["convert", "lora", str(tmp_path / "theirs.safetensors"), "format=kohya", f"base={base}"]
    assert main.run([*command, f"out={tmp_path / 'y.safetensors'}"]) == 0
    assert "not those that its header has the SHA-256 of (sshs_model_hash)" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("lora", "format=kohya"), ("model",), ("tokens",), ("resize", "rank=2")])
def test_a_pipe_is_no_file(words, tmp_path, capsys):
    """It was waited for without end."""
    os.mkfifo(tmp_path / "x.safetensors")
    verb, *rest = words
    command = [
        "convert",
        verb,
        str(tmp_path / "x.safetensors"),
        *rest,
        f"out={tmp_path / 'out'}{'.safetensors' if rest else ''}",
    ]
    assert main.run(command) == 2
    assert "x.safetensors" in capsys.readouterr().err
