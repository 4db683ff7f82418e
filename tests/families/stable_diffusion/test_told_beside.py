"""What lies beside weights and says how they are used: a .yaml, an index, a scheduler's class, a file's name."""

import json

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file
from test_single_file_layout import published
from tiny_models import write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.families.stable_diffusion import controlnet_files as unet_files
from daguerre.families.stable_diffusion.single_file import load, yaml_beside
from daguerre.families.stable_diffusion.single_file.configs import of_file
from daguerre.generation import load as generation_load
from daguerre.models.schedulers.scheduler import other_sampling

V_YAML = """
model:
  target: ldm.models.diffusion.ddpm.LatentDiffusion
  params: {parameterization: "v", linear_start: 0.00085, linear_end: 0.0120, timesteps: 1000}
"""
SGM = """
model:
  target: sgm.models.diffusion.DiffusionEngine
  params:
    denoiser_config:
      params:
        scaling_config: {target: sgm.modules.diffusionmodules.denoiser_scaling.SCALING}
"""


def told(tmp_path, text, suffix=".yaml"):
    (tmp_path / f"model{suffix}").write_text(text)
    return yaml_beside.told(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        (V_YAML, "v_prediction"),
        (V_YAML.replace('parameterization: "v", ', ""), "epsilon"),
        (SGM.replace("SCALING}", "VScaling}"), "v_prediction"),
        (SGM.replace("SCALING}", "EpsScaling}"), "epsilon"),
        ("model: {family: sd}\nrun_name: a", None),
        ("model: [", None),
        ("- a", None),
    ],
)
def test_a_yaml_says_what_the_unet_predicts(tmp_path, text, prediction):
    assert told(tmp_path, text).get("prediction_type") == prediction
    if prediction == "v_prediction":
        _, found = published("sd21")
        got, notices = of_file(found, {}, None, told(tmp_path, text))
        assert got.scheduler["prediction_type"] == "v_prediction"
        assert notices == ["the .yaml next to it says that it predicts v_prediction"]
        assert of_file(found, {"modelspec.prediction_type": "epsilon"}, None, told(tmp_path, text))[1] == []


def test_a_yaml_of_another_prediction_is_refused(tmp_path):
    with pytest.raises(UserError, match="names VScalingWithEDMcNoise"):
        told(tmp_path, SGM.replace("SCALING}", "VScalingWithEDMcNoise}"), ".yml")
    with pytest.raises(UserError, match="names x0"):
        told(tmp_path, V_YAML.replace('"v"', "x0"))


def test_levels_of_a_yaml_are_read_and_one_network_is_told_too(tmp_path):
    _, found = published("sd1")
    got, _ = of_file(found, {}, None, told(tmp_path, V_YAML.replace("0.0120", "0.02")))
    assert (got.scheduler["beta_end"], got.scheduler["prediction_type"]) == (0.02, "v_prediction")
    save_file({"a.b": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load.scheduler(tmp_path / "model.safetensors")["prediction_type"] == "v_prediction"


@pytest.fixture(scope="module")
def encodes_empty(tmp_path_factory):
    """SDXL whose index says that the empty prompt is encoded."""
    return write_sdxl(tmp_path_factory.mktemp("xl") / "folder", zeros_for_empty=False)


def test_the_index_says_whether_the_empty_prompt_is_zeros(encodes_empty, tmp_path, capsys):
    model = generation_load.find(str(encodes_empty), [], False)
    assert model.config([]).config.model.zero_null_text is False
    base = [f"model.pretrained_model_name_or_path={encodes_empty}", "--dry-run", f"output_dir={tmp_path}"]
    said = "force_zeros_for_empty_prompt: false, and model.zero_null_text is true: set model.zero_null_text=false"
    assert main.run(["train", "sdxl", *base]) == errors.DONE
    assert said in " ".join(capsys.readouterr().out.split())
    assert main.run(["train", "sdxl", *base, "model.zero_null_text=false"]) == errors.DONE
    assert "force_zeros" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"_class_name": "EulerDiscreteScheduler"}, []),
        ({"_class_name": "PNDMScheduler"}, []),
        ({}, []),
        ({"_class_name": "LCMScheduler"}, ["sampler=lcm"]),
        ({"_class_name": "EulerAncestralDiscreteScheduler"}, ["sampler=euler_ancestral"]),
        ({"_class_name": "KDPM2DiscreteScheduler"}, ["which no sampler here is"]),
        ({"_class_name": "TCDScheduler"}, ["which no sampler here is"]),
        ({"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}, ["sampler=dpmpp_2m_sde"]),
        ({"_class_name": "UniPCMultistepScheduler", "thresholding": True}, ["(thresholding), and nothing here does"]),
        ({"_class_name": "DDIMScheduler", "clip_sample": True}, ["(clip_sample), and nothing here does"]),
        ({"_class_name": "EDMEulerScheduler", "sigma_schedule": "exponential"}, ["as exponential says"]),
    ],
)
def test_a_scheduler_that_samples_otherwise_is_said(scheduler, said):
    lines = other_sampling(scheduler)
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_a_pipeline_says_its_scheduler(encodes_empty, tmp_path, capsys):
    scheduler = encodes_empty / "scheduler" / "scheduler_config.json"
    kept = scheduler.read_text()
    scheduler.write_text(json.dumps(json.loads(kept) | {"_class_name": "LCMScheduler"}))
    given = ["prompt=a", "num_inference_steps=1", "training.device=cpu", f"out={tmp_path / 'out'}"]
    assert main.run(["generate", str(encodes_empty), *given]) == errors.DONE
    assert "its scheduler is LCMScheduler: sampler=lcm" in capsys.readouterr().out
    scheduler.write_text(kept)


@pytest.mark.parametrize("by", ["name", "yaml", "neither"])
def test_a_shuffle_controlnet_averages(encodes_empty, tmp_path, by):
    unet = UNet2DConditionModel.from_pretrained(encodes_empty / "unet")
    network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
    path = tmp_path / {"name": "control_xl_shuffle_fp16.safetensors"}.get(by, "control.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)
    if by == "yaml":
        path.with_suffix(".yaml").write_text(
            "model: {target: cldm.cldm.ControlLDM, params: {global_average_pooling: True}}"
        )
    read = unet_files.read(str(path), unet_files.Base(unet, 2))
    assert read.config.global_pool_conditions is (by != "neither")


@pytest.mark.parametrize(("size", "side"), [(None, 128), ([16, 24], 48), (96, 192)])
def test_the_usual_size_of_images_by_the_samples_of_the_unet(size, side):
    """`null` and a list are diffusers' own forms."""
    configs = {"unet": {"sample_size": size}, "vae": {"block_out_channels": [4, 4]}}
    assert catalogue.pretrained()["sd"].usual_of(configs) == {"data": {"resolution": side}}


@pytest.mark.parametrize("size", ["64", True, [], 0, 10**400, {"a": 1}, [64, None]])
def test_a_size_that_is_no_number_is_refused(size):
    with pytest.raises(UserError, match="sample_size of its unet is"):
        catalogue.pretrained()["sd"].usual_of({"unet": {"sample_size": size}})
