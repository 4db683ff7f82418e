"""`daguerre fetch` against a hub on the loopback: what comes, what is checked, what it says when it cannot."""

import json
import os
import shutil
import subprocess
import sys

import fake_hub
import pytest
from diffusers import StableDiffusionPipeline
from huggingface_hub import constants
from tiny_models import write_sd

from daguerre import errors
from daguerre.cli import fetch, main
from daguerre.cli.parts import fetch_files
from daguerre.errors import UserError
from daguerre.models.weights import resolve

MODEL = "owner/tiny-sd"
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A tiny pipeline with what else the hub's repositories hold."""
    folder = write_sd(tmp_path_factory.mktemp("hub") / "p")
    unet = folder / "unet"
    shutil.copy(folder / WEIGHTS, unet / "diffusion_pytorch_model.fp16.safetensors")
    for name in ("vae/diffusion_pytorch_model", "text_encoder/model"):
        shutil.copy(folder / f"{name}.safetensors", folder / f"{name}.fp16.safetensors")
    for name in ("unet/diffusion_pytorch_model.bin", "unet/diffusion_flax_model.msgpack", "whole.safetensors"):
        (folder / name).write_bytes(b"large" * 100)
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "model.safetensors").write_bytes(b"large" * 100)
    (folder / "README.md").write_text("about")
    return folder


@pytest.fixture
def hub(pipeline, monkeypatch, tmp_path):
    """The hub that this process asks, with an empty cache."""
    with fake_hub.running() as found:
        found.add(MODEL, pipeline)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        for name in ("HF_HUB_CACHE", "HF_XET_CACHE"):
            monkeypatch.setattr(constants, name, str(tmp_path / "cache"), raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def run(*arguments):
    return main.run(["fetch", *map(str, arguments)])


def names(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def test_a_pipeline_comes_with_just_what_is_needed(hub, tmp_path, capsys):
    out = tmp_path / "sd"
    assert run(MODEL, "-o", out) == errors.DONE
    said = capsys.readouterr().out
    assert f"{MODEL} at {fake_hub.COMMIT[:10]}: " in said
    assert "unet " in said
    assert f"use it with model.pretrained_model_name_or_path={out}\n" in said
    found = names(out)
    assert {"model_index.json", WEIGHTS, "tokenizer/tokenizer.json", "scheduler/scheduler_config.json"} <= found
    assert not [n for n in found if "fp16" in n or "safety" in n or n.endswith((".bin", ".msgpack", ".md"))]
    assert "whole.safetensors" not in found
    StableDiffusionPipeline.from_pretrained(out, safety_checker=None, local_files_only=True)
    assert json.loads((out / "fetched.json").read_text())["complete"] is True
    hub.answers.clear()
    assert run("-o", out, "-m", MODEL) == errors.DONE
    assert hub.fetched(WEIGHTS) == [], "what is there is not fetched again"


def test_variant_components_and_revision(hub, tmp_path, capsys):
    out = tmp_path / "half"
    assert run(MODEL, "-o", out, "variant=fp16", f"revision={fake_hub.COMMIT}", "components=unet,vae") == errors.DONE
    assert "model.COMPONENT=" in capsys.readouterr().out
    assert {n for n in names(out) if n.endswith("safetensors")} == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    }
    assert run(MODEL, "-o", out) == errors.REFUSED
    assert "holds the variant fp16" in capsys.readouterr().err
    assert run(MODEL, "-o", out, "variant=fp16") == errors.DONE
    assert "model.variant=fp16" in capsys.readouterr().out
    assert "text_encoder/model.fp16.safetensors" in names(out)


def test_one_file(hub, tmp_path, capsys):
    assert run(f"{MODEL}/whole.safetensors", "-o", tmp_path / "files") == errors.DONE
    assert f"model.pretrained_model_name_or_path={tmp_path / 'files' / 'whole.safetensors'}" in capsys.readouterr().out
    assert names(tmp_path / "files") == {"whole.safetensors", "fetched.json"}
    assert run(f"{MODEL}/hole.safetensors", "-o", tmp_path / "other") == errors.REFUSED
    assert "has no file hole.safetensors; it has: whole.safetensors" in capsys.readouterr().err


def test_a_broken_connection_is_gone_on_from(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut_once[WEIGHTS] = 5 << 16
    out = tmp_path / "sd"
    code = run(MODEL, "-o", out)
    if code != errors.DONE:  # the library may try again by itself
        assert "Downloaded parts are kept" in capsys.readouterr().err
        assert json.loads((out / "fetched.json").read_text())["complete"] is False
        assert run(MODEL, "-o", out) == errors.DONE
    assert (out / WEIGHTS).read_bytes() == hub.files[MODEL][WEIGHTS]
    assert hub.fetched(WEIGHTS)[-1] == f"bytes={5 << 16}-", "what had arrived is not fetched twice"


def test_bytes_that_differ_are_found(hub, tmp_path, capsys):
    hub.damaged.add(WEIGHTS)
    out = tmp_path / "sd"
    assert run(MODEL, "-o", out) == errors.REFUSED
    assert f"{out / WEIGHTS} does not match the hub's copy" in capsys.readouterr().err
    assert run(MODEL) == errors.REFUSED
    assert "does not match the hub's copy" in capsys.readouterr().err
    hub.damaged.clear()
    assert run(MODEL) == errors.DONE
    assert run(MODEL, "-o", out) == errors.DONE
    assert (out / WEIGHTS).read_bytes() == hub.files[MODEL][WEIGHTS]


def test_the_cache_serves_recipes_offline(hub, tmp_path, monkeypatch, capsys):
    assert run(MODEL) == errors.DONE
    assert f"use it with model.pretrained_model_name_or_path={MODEL}\n" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    needed = {"unet": resolve.network("unet", resolve.Options()), "tokenizer": resolve.TOKENIZER}
    found = resolve.locate(MODEL, needed)
    assert tmp_path / "cache" in found.parents
    assert (found / WEIGHTS).is_file()
    with pytest.raises(UserError, match=f"daguerre fetch {MODEL} -o DIR"):
        resolve.locate(MODEL, {"safety_checker": resolve.network("text_encoder", resolve.Options())})


def test_what_the_hub_refuses_is_explained(hub, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        assert run(*arguments, "-o", tmp_path / "x") == errors.REFUSED
        assert not (tmp_path / "x").exists()
        return capsys.readouterr().err

    assert "the hub has no model owner/none, or it is private" in said("owner/none")
    gone = "stabilityai/stable-diffusion-2-1"
    assert f"{gone} was taken down by its publisher; the hub keeps it as sd2-community" in said(gone)
    assert "has no revision v9" in said(MODEL, "revision=v9")
    hub.gated.add(MODEL)
    told = said(MODEL)
    assert f"gated: accept its conditions on {hub.url}/{MODEL}" in told
    assert "HF_TOKEN to a token of yours (none is set)" in told
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "(the current token has no access)" in said(MODEL)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert run(MODEL, "-o", tmp_path / "open") == errors.DONE
    assert hub.token not in (tmp_path / "open" / "fetched.json").read_text()


def test_without_a_connection(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert run(MODEL, "-o", tmp_path / "x") == errors.REFUSED
    told = capsys.readouterr().err
    assert "http://127.0.0.1:9 could not provide owner/tiny-sd" in told
    assert "copy the folder" in told
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(MODEL, "-o", tmp_path / "x") == errors.REFUSED
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


def test_folders_of_others_are_left_alone(hub, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").touch()
    assert run(MODEL, "-o", tmp_path / "mine") == errors.REFUSED
    assert "has other files in it" in capsys.readouterr().err
    assert run(MODEL, "-o", tmp_path / "sd") == errors.DONE
    hub.commit = "f" * 40
    assert run(MODEL, "-o", tmp_path / "sd") == errors.REFUSED
    assert "holds commit c0ffeec0ff of owner/tiny-sd, and it is at ffffffffff now" in capsys.readouterr().err
    hub.files["owner/other"] = hub.files[MODEL]
    assert run("owner/other", "-o", tmp_path / "sd") == errors.REFUSED
    assert "holds owner/tiny-sd: choose a new folder" in capsys.readouterr().err


def test_a_disk_without_room(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert run(MODEL, "-o", tmp_path / "x") == errors.REFUSED
    assert "B, but the disk has 1 kB free" in capsys.readouterr().err
    assert not hub.fetched(WEIGHTS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "give OWNER/NAME"),
        (["sd15"], "sd15: give OWNER/NAME"),
        ([MODEL, "model=a/b"], "Give only one"),
        ([MODEL, "components=unet,control"], "components=control: there are "),
        ([f"{MODEL}/a.safetensors", "variant=fp16"], "no effect on a single file"),
        ([MODEL, "format=x"], "format: fetch takes out, model"),
    ],
)
def test_what_it_cannot_do_is_refused(given, words, capsys):
    assert run(*given) == errors.REFUSED
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_the_environment_names_the_hub(pipeline, tmp_path):
    with fake_hub.running() as hub:
        hub.add(MODEL, pipeline)
        command = [sys.executable, "-m", "daguerre", "fetch", f"{MODEL}/whole.safetensors", "-o", str(tmp_path / "x")]
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x" / "whole.safetensors").is_file()


SHARDED = {
    "unet/config.json": 1,
    "unet/diffusion_pytorch_model.safetensors.index.json": 2,
    "unet/diffusion_pytorch_model-00001-of-00002.safetensors": 3,
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors": 4,
    "unet/diffusion_pytorch_model.fp16-00001-of-00001.safetensors": 5,
    "unet/diffusion_pytorch_model.safetensors.index.fp16.json": 6,
    "unet/diffusion_pytorch_model.bin": 7,
    "text_encoder/config.json": 1,
    "text_encoder/pytorch_model.bin": 2,
}


def test_shards_come_with_their_index_and_pickles_only_where_there_is_nothing_else():
    choice = fetch_files.choose(SHARDED, None, ["unet"])
    assert sum(choice.files.values()) == 1 + 2 + 3 + 4
    assert not choice.is_pickled
    assert sum(fetch_files.choose(SHARDED, "fp16", ["unet"]).files.values()) == 1 + 5 + 6
    whole = fetch_files.choose(SHARDED, None, None)
    assert whole.is_pickled
    assert "text_encoder/pytorch_model.bin" in whole.files
    with pytest.raises(UserError, match="text_encoder has no weights of the variant 'fp16'; it has the variants: none"):
        fetch_files.choose(SHARDED, "fp16", None)
    with pytest.raises(UserError, match="components=vae: it has text_encoder, unet"):
        fetch_files.choose(SHARDED, None, ["vae"])


def test_a_repository_of_one_network():
    files = {"config.json": 1, "diffusion_pytorch_model.safetensors": 2, "diffusion_pytorch_model.bin": 3, "a.ckpt": 4}
    assert fetch_files.choose(files, None, None).files == {"config.json": 1, "diffusion_pytorch_model.safetensors": 2}
    with pytest.raises(UserError, match=r"name one of its files, such as a.ckpt$"):
        fetch_files.choose({"a.ckpt": 4}, None, None)
    with pytest.raises(UserError, match="it is one network"):
        fetch_files.choose(files, None, ["unet"])
