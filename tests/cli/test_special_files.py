"""A pipe, a socket or a device in the place of a file ends in a message: no verb waits for it."""

import hashlib
import json
import os
import signal
import socket

import pytest
from fake_run import write_run
from tiny_models import write_sd

from daguerre import errors
from daguerre.checkpoint import manifest
from daguerre.cli import main
from daguerre.documents import read_object
from daguerre.errors import UserError
from daguerre.evaluation import reference
from daguerre.families.stable_diffusion.single_file import load
from daguerre.models.weights import files, pickled, resolve
from daguerre.regular import Irregular


@pytest.fixture(autouse=True)
def no_waiting():
    """What waits for a pipe is ended by the clock of the system, as a failure."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A pipe under each suffix, a socket, and a device."""
    folder = tmp_path_factory.mktemp("odd")
    for suffix in ("safetensors", "ckpt", "yaml", "toml", "json", "png", "csv", "txt"):
        os.mkfifo(folder / f"pipe.{suffix}")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket.safetensors"))
    os.symlink("/dev/zero", folder / "zero.safetensors")
    os.symlink(folder / "pipe.safetensors", folder / "link.safetensors")
    return folder


WORDS = [
    "convert model {}/pipe.safetensors out=x",
    "convert model {}/pipe.ckpt out=x pickled_weights=true",
    "convert model {}/socket.safetensors out=x",
    "convert model {}/zero.safetensors out=x",
    "convert model {}/link.safetensors out=x",
    "convert merge {}/pipe.safetensors use={{a.safetensors:1}} out=x",
    'convert merge quickstart use={{"{}/pipe.safetensors":1}} out=x',
    "convert extract {}/pipe.safetensors base=b rank=1 out=x",
    "convert extract a base={}/pipe.safetensors rank=1 out=x",
    "convert lora {}/pipe.safetensors format=kohya out=x",
    "convert resize {}/pipe.safetensors rank=1 out=x",
    "convert tokens {}/pipe.safetensors out=x",
    "convert config {}/pipe.toml",
    "convert config {}/pipe.yaml",
    "evaluate quickstart reference={}/pipe.safetensors",
    "evaluate quickstart protocol={}/pipe.yaml",
    "evaluate quickstart networks.inception={}/pipe.safetensors",
    "evaluate {}/pipe.json b",
    "generate {}/pipe.safetensors prompt=a",
    "generate quickstart base=true prompts_file={}/pipe.csv",
    "generate quickstart base=true prompt=a image={}/pipe.png",
    'generate quickstart base=true prompt=a use={{"{}/pipe.safetensors":1}}',
    "generate quickstart base=true prompt=a controlnets=['{}/pipe.safetensors']",
    "train {}/pipe.yaml",
    "train quickstart init_from={}/pipe.safetensors",
    "train quickstart ema.path={}/pipe.safetensors",
    "train sd15 model.vae={}/pipe.safetensors",
    "train quickstart data.source=csv data.path={}/pipe.csv",
    "plan {}/pipe.yaml",
    "recipes {}/pipe.yaml",
    "report {}/pipe.json",
    "reference {}/pipe.csv out=x",
    "data verify {}/pipe.csv",
]


@pytest.mark.parametrize("words", WORDS)
def test_no_verb_waits(odd, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main.run(words.format(odd).split()) == errors.REFUSED
    said = capsys.readouterr().err
    assert "is a pipe, a socket or a device" in said
    assert str(odd) in said
    assert list(tmp_path.iterdir()) == []


def test_texts_that_name_nothing_are_let_through(capsys):
    assert main.run(["recipes", "no=" + "x" * 5000]) == errors.REFUSED
    assert "a pipe" not in capsys.readouterr().err


def test_what_recipes_and_folders_name_is_not_waited_for(odd, tmp_path):
    """Where the command line does not show it."""
    folder = write_sd(tmp_path / "model")
    for each in ("unet/diffusion_pytorch_model.safetensors", "vae/config.json"):
        (folder / each).unlink()
        os.mkfifo(folder / each)
    with pytest.raises(UserError):
        resolve.locate(str(folder), {"unet": resolve.network("unet", resolve.Options())})
    with pytest.raises(UserError, match="is a pipe"):
        files.read_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match="is a pipe"):
        files.read_json(folder / "vae" / "config.json")
    with pytest.raises(UserError, match="is a pipe"):
        pickled.read(odd / "pipe.ckpt")
    with pytest.raises(UserError, match="is a pipe"):
        reference.read_document(odd / "pipe.safetensors")
    with pytest.raises(Irregular):
        load.folder(odd / "pipe.safetensors", pickled=False)
    with pytest.raises(Irregular):
        read_object(odd / "pipe.json")
    with pytest.raises(UserError, match="there is no file"):
        resolve.file(str(odd / "pipe.safetensors"), resolve.Options())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"extends": str(odd / "pipe.yaml")}))
    assert main.run(["train", str(recipe)]) == errors.REFUSED


RUN_FILES = ("status.json", "environment.json", "data.json", "evaluation.json", "metrics/metrics.jsonl", "config.yaml")


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_report_waits_for_no_file_of_its_run(tmp_path, name):
    """Pipes, and a device that never ends, are left out of the page as damaged files are."""
    run = write_run(tmp_path / "run", steps=20, saves=1)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        make(run / name)
        assert main.run(["report", str(run)]) in (errors.DONE, errors.REFUSED)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_checkpoint_with_a_pipe_is_damaged(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    entry = manifest.Entry(kind="tensors", size_bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes({"model.safetensors": entry}))
    manifest.verify(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(manifest.Damaged, match=f"{name} is missing"):
        manifest.verify(tmp_path)


@pytest.mark.parametrize("words", ["init {}", "generate {} prompt=a", "train quickstart data.path={}", "report {}"])
def test_links_that_lead_to_themselves(tmp_path, capsys, words):
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    assert main.run(words.format(tmp_path / "loop").split()) == errors.REFUSED
    assert "is a link that leads to itself" in capsys.readouterr().err
