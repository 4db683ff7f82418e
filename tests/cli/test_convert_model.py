"""`daguerre convert model`: files of one model, and pickled folders, as folders in diffusers' layout."""

import json

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from tiny_models import write_sd

from daguerre import errors
from daguerre.cli import main
from daguerre.families.stable_diffusion.single_file import save
from daguerre.models.weights import opening

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline, and the same as one file."""
    place = tmp_path_factory.mktemp("model")
    folder = write_sd(place / "folder")
    save.write(place / "model.safetensors", folder)
    return folder, place / "model.safetensors"


def convert(*arguments):
    return main.run(["convert", "model", *map(str, arguments)])


def test_a_file_becomes_the_folder_it_came_from(model, tmp_path, capsys):
    folder, file = model
    assert convert(file, f"out={tmp_path / 'made'}", "prediction_type=v_prediction") == errors.DONE
    assert f"{tmp_path / 'made'}: " in capsys.readouterr().out
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "made", local_files_only=True)
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    expected = load_file(folder / UNET)
    assert all(torch.equal(t, expected[n]) for n, t in load_file(tmp_path / "made" / UNET).items())
    assert convert(file, f"out={tmp_path / 'half'}", "dtype=float16") == errors.DONE
    assert load_file(tmp_path / "half" / UNET)["conv_in.weight"].dtype == torch.float16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "made"]


def test_averaged_weights_of_a_file_that_holds_both(model, tmp_path, capsys):
    folder, file = model
    tensors = load_file(file)
    unet = [name for name in tensors if name.startswith("model.diffusion_model.")]
    averages = {"model_ema." + "".join(name.split(".")[1:]): tensors[name] + 1 for name in unet}
    with opening.opened(file) as opened:
        metadata = opened.metadata()
    save_file(tensors | averages, tmp_path / "both.safetensors", metadata)
    assert convert(tmp_path / "both.safetensors", f"out={tmp_path / 'raw'}") == errors.DONE
    assert "it also has averaged weights" in capsys.readouterr().out
    assert convert(tmp_path / "both.safetensors", f"out={tmp_path / 'ema'}", "weights=ema") == errors.DONE
    expected = load_file(folder / UNET)
    for name, added in (("raw", 0), ("ema", 1)):
        assert all(torch.equal(t, expected[n] + added) for n, t in load_file(tmp_path / name / UNET).items())


def test_a_pickled_folder(model, tmp_path, capsys):
    folder, _ = model
    old = tmp_path / "old" / "unet"
    old.mkdir(parents=True)
    torch.save(load_file(folder / UNET), old / "diffusion_pytorch_model.bin")
    (old / "config.json").write_bytes((folder / "unet" / "config.json").read_bytes())
    assert convert(tmp_path / "old", f"out={tmp_path / 'new'}") == errors.REFUSED
    assert "pickled_weights=true reads only its tensors" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert convert(tmp_path / "old", f"out={tmp_path / 'new'}", "pickled_weights=true") == errors.DONE
    expected = load_file(folder / UNET)
    assert all(torch.equal(t, expected[n]) for n, t in load_file(tmp_path / "new" / UNET).items())
    assert convert(tmp_path / "new", f"out={tmp_path / 'no'}", "pickled_weights=true") == errors.REFUSED
    assert "has no pickled weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "Set out=FOLDER"),
        (["out=x", "pickled_weights=true"], "is not pickled; remove it"),
        (["out=x", "weights=mean"], 'weights = "mean"\n      allowed: ema, raw'),
        (["out=x", "weights=ema"], "has no averaged weights"),
        (["out=x", "prediction_type=sample"], "allowed: epsilon, v_prediction"),
        (["out=x", "format=unet"], "format: convert model takes"),
    ],
)
def test_what_it_cannot_do_is_refused(model, tmp_path, given, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert(model[1], *given) == errors.REFUSED
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert convert("nowhere.safetensors", *given) == errors.REFUSED


def test_settings_of_files_are_refused_for_folders(model, tmp_path, capsys):
    assert convert(model[0], f"out={tmp_path / 'x'}", "weights=ema") == errors.REFUSED
    assert "weights: only for a single-file checkpoint" in capsys.readouterr().err
    assert json.loads((model[0] / "model_index.json").read_text())
