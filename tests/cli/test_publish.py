"""`daguerre publish` against a hub on the loopback: what arrives, what a second try sends, what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import fake_hub
import pytest
import yaml
from fake_run import write_run, write_samples
from huggingface_hub import constants

from daguerre import errors
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's requests
REPOSITORY = "me/stars"
USAGE = '---\nlibrary_name: diffusers\n---\n\nOpen it:\n\n```python\nX.from_pretrained("path/to/this/folder")\n```\n'
EXPORT = {
    "model_index.json": b"{}",
    "README.md": USAGE.encode(),
    "unet/config.json": b'{"a": 1}',
    "unet/diffusion_pytorch_model.safetensors": b"weights of the UNet" * 1000,
    "vae/diffusion_pytorch_model.safetensors": b"weights of the VAE" * 1000,
}


@pytest.fixture
def hub(monkeypatch):
    """The hub that this process asks, and a token that may write."""
    with fake_hub.running() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", found.token)
        yield found


@pytest.fixture
def run(tmp_path):
    """A finished run with a pipeline."""
    folder = write_run(tmp_path / "stars", steps=30, saves=1)
    for name, content in EXPORT.items():
        (folder / "pipeline" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline" / name).write_bytes(content)
    return folder


def publish(*words):
    return main.run(["publish", *map(str, words)])


def test_the_hub_holds_what_was_sent(hub, run, capsys):
    write_samples(run, 15, 0.5)
    assert publish(run, REPOSITORY) == errors.DONE
    files = hub.files[REPOSITORY]
    images = sorted((run / "samples" / "step-00000030").glob("*.png"))
    expected = {name: content for name, content in EXPORT.items() if name != "README.md"}
    expected |= {f"images/{i:03d}.png": path.read_bytes() for i, path in enumerate(images)}
    expected["recipe.yaml"] = (run / "config.yaml").read_bytes()
    assert {name: content for name, content in files.items() if name != "README.md"} == expected
    assert hub.private == {REPOSITORY: True}
    assert len(hub.commits) == 1
    assert f"published: {hub.url}/{REPOSITORY}" in capsys.readouterr().out


def test_the_card_says_how_it_came_to_be(hub, run):
    config = (
        (run / "config.yaml")
        .read_text()
        .replace("      source: shapes", '      source: folder\n      captions: {text: "a sks [dog]"}')
    )
    (run / "config.yaml").write_text(config)
    for step in (15, 30):
        result = run / "evaluations" / f"step-{step:08d}-x" / "result.json"
        result.parent.mkdir(parents=True)
        protocol = {"step": step, "sampler": "ddim", "num_inference_steps": 50, "guidance_scale": 3.0}
        table = {"count": 1000, "rows": [{"name": "fid", "value": 7.5, "share": False}]}
        result.write_text(json.dumps({"protocol": protocol, "tables": {"fid-inception": table}}))
    assert publish(run, REPOSITORY, "license=apache-2.0", "images=2") == errors.DONE
    text = hub.files[REPOSITORY]["README.md"].decode()
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["license"] == "apache-2.0"
    assert (fields["library_name"], fields["pipeline_tag"]) == ("diffusers", "text-to-image")
    assert fields["instance_prompt"] == "a sks [dog]"
    assert [one["output"]["url"] for one in fields["widget"]] == ["images/000.png", "images/001.png"]
    assert "base_model" not in fields, "quickstart's networks are shipped, not the hub's"
    assert f'X.from_pretrained("{REPOSITORY}")' in body
    assert "path/to/this/folder" not in body
    assert body.index("## Images") < body.index("## Training") < body.index("## Data") < body.index("## Evaluation")
    assert "| images | folder |  | a sks \\[dog\\] |" in body
    assert "| shapes (200 images, update 3,000) | measured |" in body
    assert "| shape | 0.915 |" in body
    assert "| fid-inception (1,000 images, update 30, ddim, 50 steps, guidance 3.0) | measured |" in body
    assert "update 15" not in body, "the newest checkpoint's alone"
    assert "Left out or noted: 3 (not an image)." in body


def test_the_licence_is_that_of_the_base(hub, run, capsys):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("path: quickstart", "path: owner/base"))
    assert publish(run, REPOSITORY) == errors.REFUSED
    assert "the hub names no licence of the base owner/base: read its conditions" in capsys.readouterr().err
    assert REPOSITORY not in hub.files
    hub.files["owner/base"] = {}
    hub.licences["owner/base"] = "openrail++"
    (run / "pipeline").rename(run / "adapter")
    assert publish(run, REPOSITORY) == errors.DONE
    fields = yaml.safe_load(hub.files[REPOSITORY]["README.md"].decode().split("---\n")[1])
    assert (fields["license"], fields["base_model"]) == ("openrail++", "owner/base")
    assert fields["base_model_relation"] == "adapter"
    assert "lora" in fields["tags"]


def test_a_second_try_sends_what_is_missing(hub, run, capsys):
    hub.room = 1
    assert publish(run, REPOSITORY) == errors.REFUSED
    assert "Files that were sent are kept there: the same command again sends the rest" in capsys.readouterr().err
    assert len(hub.sent) == 1
    assert hub.files[REPOSITORY] == {}, "nothing is there before all of it"
    hub.room = None
    assert publish(run, REPOSITORY) == errors.DONE
    assert len(hub.sent) == len(set(hub.sent)) == len(hub.blobs), "none was sent twice"
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert hub.files[REPOSITORY][weights] == EXPORT[weights]


def test_published_again_only_what_changed_is_sent(hub, run):
    assert publish(run, REPOSITORY, "private=false") == errors.DONE
    assert hub.private == {REPOSITORY: False}
    before = len(hub.sent)
    (run / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"others")
    assert publish(run, REPOSITORY, "message=better") == errors.DONE
    assert len(hub.sent) == before + 1
    assert hub.files[REPOSITORY]["vae/diffusion_pytorch_model.safetensors"] == b"others"
    assert hub.commits[-1]["summary"] == "better"


def test_a_dry_run_sends_nothing(hub, run, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert publish(run, REPOSITORY, "--dry-run") == errors.DONE
    said = capsys.readouterr().out
    assert "  unet/diffusion_pytorch_model.safetensors\n" in said
    assert "# quickstart" in said
    assert hub.answers == []


def test_what_cannot_be_published_is_refused_in_words(hub, run, capsys, monkeypatch, tmp_path):
    def refused(*words):
        assert publish(*words) == errors.REFUSED
        return capsys.readouterr().err

    assert "a repository of the hub, as in: daguerre publish runs/my-run OWNER/NAME" in refused(run, "my-style")
    assert "give a run folder and a repository of the hub" in refused(run)
    assert "give a run folder and a repository of the hub" in refused(REPOSITORY)
    assert "is not a run folder" in refused(tmp_path, REPOSITORY)
    said = refused(run, REPOSITORY, "token=hf_abcdefgh")
    assert "publish takes private, license, images, message" in said
    assert "hf_abcdefgh" not in said
    with RunFolder(run).hold():
        assert main.run(["publish", str(run), REPOSITORY]) == errors.HELD
        assert "is in use by process" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = refused(run, REPOSITORY)
    assert "refuses to write me/stars: HF_TOKEN must be a token that may write" in said
    assert "hf_wrong" not in said
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "set the environment variable HF_TOKEN" in refused(run, REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    (run / "pipeline").rename(run / "other")
    assert "has no export: train it with checkpoint.export=true" in refused(run, REPOSITORY)
    assert hub.sent == []


@pytest.mark.long
def test_killed_while_it_sends_it_goes_on(hub, run):
    hub.hold = threading.Event()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": hub.token}
    command = [sys.executable, "-m", "daguerre", "publish", str(run), REPOSITORY]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 120
    while not hub.sent:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    hub.hold.set()
    assert hub.files[REPOSITORY] == {}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"published: {hub.url}/{REPOSITORY}" in done.stdout
    assert hub.sent.count(hub.sent[0]) == 1
    for name, content in EXPORT.items():
        assert name == "README.md" or hub.files[REPOSITORY][name] == content
