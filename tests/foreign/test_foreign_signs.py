"""Signs of whose config a file is: one of a trainer is in no other trainer's files, and what nobody reads is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_configs
import peer_configs
import pytest
from omegaconf import OmegaConf

from daguerre.cli import main
from daguerre.foreign import files, signs

GUI = json.loads((Path(__file__).parents[1] / "support/trainer_keys/kohya_gui.json").read_text(encoding="utf-8"))[
    "keys"
]


def described(target: str, denoiser: str) -> str:
    """A model's description as CompVis' and Stability's code have it beside a checkpoint, restated."""
    return f"""\
model:
  base_learning_rate: 1.0e-04
  target: {target}
  params:
    linear_start: 0.00085
    timesteps: 1000
    scale_factor: 0.18215
    {denoiser}:
      target: openaimodel.UNetModel
      params: {{model_channels: 320, context_dim: 768}}
"""


UNREAD = {
    "v1-inference.yaml": (described("ldm.models.diffusion.ddpm.LatentDiffusion", "unet_config"), "CompVis"),
    "v2-midas.yaml": (described("ldm.models.diffusion.ddpm.LatentDepth2ImageDiffusion", "unet_config"), "CompVis"),
    "kl-f8.yaml": (described("ldm.models.autoencoder.AutoencoderKL", "ddconfig"), "CompVis"),
    "sd_xl_base.yaml": (
        described("sgm.models.diffusion.DiffusionEngine", "network_config"),
        "Stability's generative-models",
    ),
    "cldm_v15.yaml": (described("cldm.cldm.ControlLDM", "control_stage_config"), "the code of ControlNet"),
    "other.yaml": (described("taming.models.vqgan.VQModel", "ddconfig"), "by classes of another program"),
    "default_config.yaml": ("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n", "accelerate's launcher"),
    "model_index.json": ('{"_class_name": "X", "_diffusers_version": "0.30"}', "a folder in diffusers' format"),
    "adapter_config.json": ('{"peft_type": "LORA", "r": 8}', "an adapter in peft's format"),
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("words", [["convert", "config"], ["train"], ["plan"]])
def test_what_no_converter_reads_is_named_and_makes_no_recipe(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, what = UNREAD[name]
    Path(name).write_text(text, encoding="utf-8")
    assert main.run([*words, name]) == 2
    assert what in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {name}


def trees(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Configs by the trainer that they are of."""
    for name, text in peer_configs.texts().items():
        path = tmp_path / ("config" if name == "backends.json" else "") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    texts = {
        "MaxDiffusion": [foreign_configs.MAXDIFFUSION, foreign_configs.maxdiffusion()],
        "MindOne": [foreign_configs.mindone()],
        "open-diffusion": [foreign_configs.OPEN_DIFFUSION],
        "Stable Cascade": [foreign_configs.CASCADE],
    }
    found: dict[str, list[dict[str, Any]]] = {
        name: [OmegaConf.to_container(OmegaConf.create(text), resolve=False) for text in each]  # type: ignore[misc]
        for name, each in texts.items()
    }
    peers = {
        "kohya's sd-scripts": ["kohya.toml", "images.toml"],
        "OneTrainer": ["onetrainer.json"],
        "ai-toolkit": ["ai_toolkit.yaml"],
        "SimpleTuner": ["simpletuner.json", "config.env"],
    }
    found |= {trainer: [files.read(tmp_path / name)[0] for name in names] for trainer, names in peers.items()}
    found["musubi-tuner"] = [
        {"dit": "a.safetensors", "network_module": "networks.lora_krea2", "output_name": "x"},
        {"general": {"resolution": [960, 544]}, "datasets": [{"image_directory": "a"}]},
        {"model": {"dit": "a.safetensors"}, "data": {"dataset_config": "images.toml"}},
    ]
    found["kohya's GUI"] = [dict.fromkeys(names, "") for names in GUI.values()]
    return found


def test_a_sign_of_a_trainer_is_in_no_file_of_another(tmp_path):
    found = trees(tmp_path)
    assert found.keys() == signs.TRAINERS.keys()
    for trainer, each in found.items():
        for tree in each:
            assert signs.trainer(tree) == trainer
            assert signs.signed(tree) == [trainer]


def test_files_of_other_programs_are_nobodys():
    maxtext = {"base_config": "", "mesh_axes": ["data"], "per_device_batch_size": 1, "run_name": ""}
    hydra = {"experiment": {"name": "x"}, "model": {"name": "y"}, "dataset": {"path": "z"}}
    for tree in (maxtext, hydra, {"experiment_id": 4}, {"job": "test", "config": "ci"}):
        assert signs.trainer(tree) is None, tree
