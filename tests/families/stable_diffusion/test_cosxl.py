"""EDM's own marks in files: CosXL predicts v as EDM does, with sigma_data 1, and Playground v2.5 EDM's F."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_single_file_layout import published
from tiny_models import write_sdxl

from daguerre import errors, plugins
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import compatibility, configs, load, save
from daguerre.families.stable_diffusion.single_file.configs import of_file
from daguerre.generation import load as generation_load
from daguerre.objectives.edm import target
from daguerre.objectives.v import target as velocity

MARKS = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.002)}


def test_v_is_the_velocity_of_the_scaled_input():
    """With sigma_data 1 the scaled input is a x0 + s eps with a^2 + s^2 = 1, and y is a eps - s x0."""
    module = plugins.find("objectives", "edm")
    own = module.build(module.Settings(prediction="v", sigma_data=1.0))
    sigma = torch.tensor([0.002, 0.3, 1.0, 7.0, 120.0], dtype=torch.float64)
    a, s = own.path(sigma)
    root = (1 + sigma**2).sqrt()
    for found, expected in zip(own.target(a, s), velocity(1 / root, sigma / root), strict=True):
        assert torch.allclose(found, expected, rtol=1e-14)
    assert torch.equal(own.input_scale(a, s), (sigma**2 + 1).rsqrt())
    for found, expected in zip(own.target(a, s), target(a, s, 1.0), strict=True):
        assert torch.equal(found, -expected)
    x, y = torch.randn(2, 5, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r = root.reshape(-1, 1, 1, 1)
    x0, _ = own.solve(x, y, a, s)
    assert torch.allclose(x0, x / r**2 - y * sigma.reshape(-1, 1, 1, 1) / r)


def test_marks_are_read_and_written():
    numbers, found = published("sdxl")
    got, notices = of_file(found | MARKS, {})
    assert notices == []
    told = {name: got.scheduler[name] for name in ("sigma_max", "sigma_min", "sigma_data", "prediction_type")}
    assert told == {"sigma_max": 120.0, "sigma_min": 0.002, "sigma_data": 1.0, "prediction_type": "v_prediction"}
    assert got.index["scheduler"] == ["diffusers", "EDMDPMSolverMultistepScheduler"]
    assert got.configs == numbers.configs
    assert compatibility.differences(got) == []
    assert compatibility.marks(got) == MARKS
    first = dict([*MARKS.items()][:1])
    assert of_file(found | first, {})[0].scheduler["sigma_min"] == 0.002
    assert configs.edm_marks(["edm_vpred.sigma_min", "edm_mean"]) == ()
    with pytest.raises(UserError, match="remove prediction_type"):
        of_file(found | MARKS, {}, "epsilon")
    with pytest.raises(UserError, match="which are no noise levels"):
        of_file(found | MARKS | {"edm_vpred.sigma_max": torch.tensor(0.001)}, {})


@pytest.fixture(scope="module")
def cosxl(tmp_path_factory):
    """A tiny pipeline with CosXL's scheduler, as a folder and as the file that it makes."""
    place = tmp_path_factory.mktemp("cosxl")
    folder = write_sdxl(place / "folder")
    scheduler = configs.edm_scheduler(MARKS)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (folder / "model_index.json").write_text(json.dumps(index))
    save.write(place / "model.safetensors", folder)
    return folder, place / "model.safetensors"


def test_a_file_keeps_its_marks_and_says_what_it_is(cosxl, tmp_path):
    file = cosxl[1]
    tensors = load_file(file)
    assert {name: tensors[name] for name in MARKS} == MARKS
    assert "v_pred" not in tensors
    made = load.folder(file, pickled=False)
    assert generation_load.find(str(file), [], False).source["objective"] == {
        "name": "edm",
        "prediction": "v",
        "sigma_data": 1.0,
        "schedule": {"name": "edm", "sigma_min": 0.002, "sigma_max": 120.0, "rho": 7.0},
    }
    assert (
        main.run(["convert", "export", str(made), "format=single_file", f"out={tmp_path / 'again.safetensors'}"]) == 0
    )
    again = load_file(tmp_path / "again.safetensors")
    assert {name: again[name] for name in MARKS} == MARKS


def test_a_mark_that_says_half_is_refused(cosxl, tmp_path):
    with_half = {**load_file(cosxl[1]), "edm_mean": torch.zeros(1, 4, 1, 1)}
    with load.opened(cosxl[1]) as file:
        save_file(with_half, tmp_path / "half.safetensors", file.metadata())
    with pytest.raises(UserError, match="has the mark edm_mean"):
        load.folder(tmp_path / "half.safetensors", pickled=False)


OWN = ["objective.name=edm", "objective.prediction=v", "objective.sigma_data=1", "objective.schedule.sigma_max=120"]


@pytest.mark.parametrize("place", ["base", pytest.param("unet", marks=pytest.mark.long)])
def test_what_is_trained_from_it(cosxl, tmp_path, capsys, place):
    """An adapter for another prediction is refused, the whole UNet is told, and the right one is silent."""
    folder, file = cosxl
    base = f"model.pretrained_model_name_or_path={folder if place == 'base' else write_sdxl(tmp_path / 'plain')}"
    given = [base, *([f"model.unet={file}"] if place == "unet" else []), "--dry-run", f"output_dir={tmp_path}"]
    assert main.run(["train", "sdxl_lora", *given]) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert "objective.name=eps: the pretrained network was trained with EDM's scaling" in said
    assert "For that an adapter (adapters.lora) is too small: use the objective of the base model" in said
    assert "objective.name=edm objective.prediction=v objective.sigma_data=1 objective.schedule.sigma_max=120" in said
    assert main.run(["train", "sdxl_lora", *given, *OWN]) == errors.DONE
    assert "pretrained network" not in capsys.readouterr().out
    assert main.run(["train", "sdxl", *given]) == errors.DONE
    assert "was trained with EDM's scaling and noise levels" in " ".join(capsys.readouterr().out.split())
    assert main.run(["train", "sdxl", *given, "objective.name=edm"]) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "was trained with objective.prediction=v objective.sigma_data=1, this recipe trains objective.prediction=F"
        in said
    )
