"""`daguerre generate` without a run: the pretrained networks of a recipe as they are, and pipelines in folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from PIL import Image
from tiny_drawings import documents, drawn, generate
from tiny_models import write_sd, write_sdxl

from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.generation import load

SMALL = ("resolution=16", "num_inference_steps=2", "training.device=cpu")


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("pipelines") / "sd1", version=1)


@pytest.fixture(scope="module")
def sd21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("pipelines") / "tiny21", version=2)


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sdxl(tmp_path_factory.mktemp("pipelines") / "tinyxl")


def test_without_a_run_nothing_stands_in_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate("sd15", "prompt=a cat") == 2
    said = capsys.readouterr().err
    for part in ("there is no run in runs/sd15", "daguerre train sd15", "base=true"):
        assert part in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_called_as_a_recipe_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("sd15").mkdir()
    Path("sd15/model_index.json").write_text("{}", encoding="utf-8")
    assert main.run(["generate", "sd15", "prompt=a"]) == 2
    assert "sd15 is the shipped recipe here; the folder of that name is ./sd15" in capsys.readouterr().err
    assert load.find("sd15", [], base=True).notices == (load._namesake("sd15", Path("sd15")),)


def test_a_base_model_is_drawn_with_where_that_is_asked_for(sd1, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = f"pretrained_model_name_or_path={sd1}"
    assert generate("sd15", "base=true", base, "prompt=a cat", *SMALL) == 0
    assert f"the pretrained networks of {sd1} without training" in capsys.readouterr().out
    out = tmp_path / "runs" / "generated" / "sd15" / "a-cat"
    (document,) = documents(out)
    assert document["base"] == str(sd1)
    assert document["model"]["pretrained_model_name_or_path"] == str(sd1)
    assert document["objective"]["name"] == "eps"
    assert "checkpoint" not in document
    assert drawn(out).shape == (1, 16, 16, 3)
    assert generate("sd15", "base=true", base, "prompt=a cat", f"out={out}", "objective.name=v", *SMALL) == 2
    assert 'objective.name: "eps" -> "v"' in capsys.readouterr().err
    assert generate("sd15", "base=true", base, "prompt=a", "weights=raw", *SMALL) == 2
    assert "weights=raw is for the checkpoint of a run" in capsys.readouterr().err
    assert generate("sd15", "base=true", base, "model.unet=null", "prompt=a", *SMALL) == 2
    assert "model.unet starts from random weights" in capsys.readouterr().err


def test_a_recipe_that_trains_nothing_is_for_drawing(xl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["sdxl_lightning", f"pretrained_model_name_or_path={xl}", "model.unet=base", "prompt=a castle"]
    assert generate(*given, "resolution=16", "training.device=cpu") == 0
    (document,) = documents(tmp_path / "runs" / "generated" / "sdxl_lightning")
    assert (document["num_inference_steps"], document["timestep_spacing"]) == (4, "trailing")
    assert document["guidance_scale"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "objective"),
    [("sd21", "v"), *(pytest.param(name, "eps", marks=pytest.mark.long) for name in ("sd1", "xl"))],
)
def test_a_pipeline_folder_says_itself_what_it_predicts(name, objective, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    folder = request.getfixturevalue(name)
    assert generate(folder, "prompt=a cat", "num_inference_steps=2", "training.device=cpu") == 0
    (document,) = documents(tmp_path / "runs" / "generated" / folder.name)
    assert document["objective"]["name"] == objective
    assert document["pipeline"] == str(folder)
    assert (document["height"], document["width"]) == (16, 16)
    assert generate(folder, "prompt=a", "run_name=other") == 2


def test_a_pipeline_draws_as_its_recipe_with_the_base(sd1, tmp_path):
    settings = ["prompt=a cat", "seed=3", "sampler=euler", "guidance_scale=4", *SMALL]
    assert generate(sd1, *settings, f"out={tmp_path / 'a'}") == 0
    base = ["sd15", "base=true", f"pretrained_model_name_or_path={sd1}"]
    assert generate(*base, *settings, f"out={tmp_path / 'b'}") == 0
    assert np.array_equal(drawn(tmp_path / "a"), drawn(tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beta_schedule": "linear"}, "no objective here"),
        ({"prediction_type": "flow_prediction"}, "no objective here"),
        ({"trained_betas": [0.1]}, "no objective here"),
    ],
)
def test_a_scheduler_that_means_nothing_here_is_refused(sd1, tmp_path, changes, said):
    for part in ("unet", "vae", "scheduler"):
        (tmp_path / part).mkdir()
    for path in ("model_index.json", "unet/config.json", "vae/config.json"):
        (tmp_path / path).write_bytes((sd1 / path).read_bytes())
    config = json.loads((sd1 / "scheduler" / "scheduler_config.json").read_text()) | changes
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        load.find(str(tmp_path), [], False)


def test_the_pipeline_of_a_run_points_to_the_run(tmp_path, capsys):
    (tmp_path / "run" / "pipeline").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "pipeline" / "model_index.json").write_text("{}")
    assert generate(tmp_path / "run" / "pipeline", "prompt=a") == 2
    assert "give the run" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "AudioLDMPipeline"}')
    assert main.run(["generate", str(tmp_path / "other"), "prompt=a"]) == 2
    assert "is a AudioLDMPipeline" in capsys.readouterr().err


def test_a_list_for_a_base_model_with_sizes_of_its_own(xl, tmp_path):
    (tmp_path / "list.csv").write_text("prompt,height,width\na,16,24\nb,,\nc,24,16\n")
    given = ["sdxl", "base=true", f"pretrained_model_name_or_path={xl}", f"prompts_file={tmp_path / 'list.csv'}"]
    assert generate(*given, *SMALL, f"out={tmp_path / 'out'}") == 0
    sizes = []
    for path in sorted((tmp_path / "out").glob("*.png")):
        with Image.open(path) as opened:
            sizes.append(opened.size)
    assert sizes == [(24, 16), (16, 16), (16, 24)]


@pytest.mark.parametrize("recipe", ["sd15", pytest.param("sdxl", marks=pytest.mark.long)])
def test_long_prompts_beside_short_ones_change_no_image(recipe, sd1, xl, tmp_path):
    """Prompts of one batch are padded to as many windows as the longest takes."""
    (tmp_path / "list.txt").write_text("a cat\n" + "a very long tale of a cat " * 9 + "\na dog\n")
    place = f"pretrained_model_name_or_path={sd1 if recipe == 'sd15' else xl}"
    given = [recipe, "base=true", place, "model.long_prompts=true", f"prompts_file={tmp_path / 'list.txt'}", *SMALL]
    for size in (1, 3):
        assert generate(*given, f"batch_size={size}", f"out={tmp_path / str(size)}") == 0
    alone, together = drawn(tmp_path / "1"), drawn(tmp_path / "3")
    assert np.abs(alone - together).max() <= 1
    assert np.abs(alone[0] - alone[1]).max() > 1


def test_a_single_file_is_a_pipeline(sd1, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.run(["convert", "export", str(sd1), "format=single_file", f"out={tmp_path / 'one.safetensors'}"]) == 0
    settings = ["prompt=a cat", "num_inference_steps=2", "training.device=cpu"]
    assert generate("one.safetensors", *settings) == 0
    assert generate(sd1, *settings, "out=folder") == 0
    found = tmp_path / "runs" / "generated" / "one" / "a-cat"
    assert np.abs(drawn(found) - drawn(tmp_path / "folder")).max() <= 1
    assert documents(found)[0]["pipeline"] == "one.safetensors"


def test_a_wrong_setting_of_a_pipeline_is_told_under_the_pipelines_name(sd1, capsys):
    assert generate(str(sd1), "prompt=a cat", "guidance_scale=0.5") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"daguerre: {sd1}: 1 problem")
    assert "pipeline.yaml" not in said


def test_a_model_of_the_hub_is_drawn_with_by_its_name(sd1, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model, commit = tmp_path / "hub" / "models--someone--their-model", "0" * 40
    shutil.copytree(sd1, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert generate("someone/their-model", "prompt=a cat", *SMALL) == 0
    assert generate(str(sd1), "prompt=a cat", *SMALL) == 0
    of_hub, of_folder = (drawn(tmp_path / "runs" / "generated" / name / "a-cat") for name in ("their-model", "sd1"))
    np.testing.assert_array_equal(of_hub, of_folder)
    capsys.readouterr()
    assert generate("someone/another", "prompt=a cat", *SMALL) == 2
    assert "daguerre fetch someone/another" in capsys.readouterr().err
    (tmp_path / "runs").mkdir(exist_ok=True)
    assert generate("runs/quickstart", "prompt=a cat", *SMALL) == 2
    said = capsys.readouterr().err
    assert "runs/quickstart: no such run folder" in said
    assert "fetch" not in said
    assert generate("black-forest-labs/FLUX.2-klein-4B", "prompt=a cat", *SMALL) == 2  # known, not here, no network
    assert "daguerre fetch black-forest-labs/FLUX.2-klein-4B" in capsys.readouterr().err
