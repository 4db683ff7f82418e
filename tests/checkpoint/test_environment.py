"""environment.json names what a result depends on, and nothing that is private."""

import json

import torch

from daguerre.checkpoint import environment as module
from daguerre.checkpoint.environment import environment


def test_it_says_with_what(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hf_secret_value")
    found = environment()
    assert {"daguerre", "numpy", "diffusers", "safetensors"} <= set(found["packages"])
    assert found["cpu"]["cores"] >= 1
    assert found["memory_bytes"] > 1e8
    assert "hf_secret_value" not in json.dumps(found)


def test_torch_is_named_with_its_build(monkeypatch):
    """The metadata of a wheel may say 2.13.0 where torch calls itself 2.13.0+cu130."""
    monkeypatch.setattr(module, "_version", lambda name: "2.13.0")
    for build in ("2.13.0+cpu", "2.13.0+cu130"):
        monkeypatch.setattr(torch, "__version__", build)
        assert environment()["packages"]["torch"] == build


def test_the_commit_is_that_of_the_file_not_of_a_folder_around_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
    assert environment()["code"] is None


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    for arguments in (["init", "-q"], ["add", "."]):
        (tmp_path / "environment.py").write_text("x = 1\n")
        module._git(tmp_path, *arguments)
    module._git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "environment.py"))
    code = environment()["code"]
    assert len(code["commit"]) == 40
    assert code["modified"] is False
    (tmp_path / "environment.py").write_text("x = 2\n")
    assert environment()["code"]["modified"] is True
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "other.py"))
    assert environment()["code"] is None


def test_a_checkout_that_is_not_installed(monkeypatch):
    def nobody(name):
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "requires", nobody)
    assert set(environment()["packages"]) == {"daguerre", "torch", "diffusers"}
