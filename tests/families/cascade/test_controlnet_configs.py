"""The ControlNet configs of Stability's repository, with its values: each is converted, and trains a tiny twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scenes
import tiny_networks
import yaml
from PIL import Image
from test_cascade_configs import COMMON
from tiny_cascade import RECORDED
from twins import BESIDE, SHORT, Twins, shards

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe

EIGHT = [0, 4, 8, 12, 51, 55, 59, 63]
SQUARES = {"resize": 224}
CONFIGS: dict[str, dict[str, Any]] = {
    "canny": {"controlnet_blocks": EIGHT, "controlnet_filter": "CannyFilter", "controlnet_filter_params": SQUARES},
    "inpainting": {
        "controlnet_blocks": EIGHT,
        "controlnet_filter": "InpaintFilter",
        "controlnet_filter_params": {"thresold": [0.04, 0.4], "p_outpaint": 0.4},
        "offset_noise": 0.1,
    },
    "sr": {
        "controlnet_bottleneck_mode": "large",
        "controlnet_blocks": EIGHT,
        "controlnet_filter": "SREffnetFilter",
        "controlnet_filter_params": {"scale_factor": 0.5},
        "offset_noise": 0.1,
        "updates": 30000,
    },
    "identity": {
        "controlnet_bottleneck_mode": "simple",
        "controlnet_blocks": list(range(64)),
        "controlnet_filter": "IdentityFilter",
        "controlnet_filter_params": {"max_faces": 4, "p_drop": 0.05, "p_full": 0.3},
        "updates": 200000,
    },
}
"""What each training config says that others do not."""
OF_ALL = {"model_version": "3.6B", "image_size": 768, "batch_size": 256, "save_every": 1000, "backup_every": 2000}
OF_ALL |= {"generator_checkpoint_path": "models/stage_c_bf16.safetensors"}
OF_ALL |= {"previewer_checkpoint_path": "models/previewer.safetensors"}
OF_ALL |= {"dataset_filters": [["width", "lambda w: w >= 768"], ["height", "lambda h: h >= 768"]]}
OF_ALL |= {"captions_getter": ["txt", "identity"]}
WANTED: dict[str, dict[str, Any]] = {
    "canny": {"reads": "grey", "condition": {"name": "canny", "side_px": 224}},
    "inpainting": {"reads": "holes", "condition": {"name": "inpaint", "inverted": 0.4}},
    "sr": {
        "bottleneck": "large",
        "reads": "latent",
        "latent_factor": 2.0,
        "condition": {"name": "tile", "factor": 2.0, "down": "nearest", "up": "nearest"},
    },
    "identity": {"bottleneck": "simple", "reads": "faces"},
}


def converted(folder: Path, said: dict[str, Any]) -> Path:
    theirs, ours = folder / "theirs.yaml", folder / "ours.yml"
    theirs.write_text(yaml.safe_dump(said), encoding="utf-8")
    assert main.run(["convert", "config", str(theirs), f"out={ours}", "--all"]) == errors.DONE
    return ours


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_converted_whole(name, tmp_path, capsys):
    tree = recipe.read(converted(tmp_path, COMMON | OF_ALL | CONFIGS[name]))
    assert "not carried over" not in capsys.readouterr().out
    (adapter,) = tree["adapters"].values()
    assert adapter["name"] == "controlnet"
    assert adapter["blocks"] == CONFIGS[name]["controlnet_blocks"]
    assert {key: adapter[key] for key in WANTED[name]} == WANTED[name]
    assert tree["objective"]["weighting"]["name"] == "p2"
    assert tree["objective"].get("noise", {}).get("offset") == CONFIGS[name].get("offset_noise")
    (source,) = tree["data"]["sources"].values()
    assert source["filters"] == OF_ALL["dataset_filters"]
    assert source["captions"] == {"fields": ["text"]}
    if name == "identity":
        condition = adapter["condition"]
        assert (condition["name"], condition["dropout"], condition["everywhere"]) == ("faces", 0.05, 0.3)
        assert condition["recogniser"]["path"].endswith("buffalo_l/w600k_r50.onnx")


def test_one_that_goes_on_from_a_file_leaves_to_the_file_what_it_tells(tmp_path, capsys):
    said = COMMON | OF_ALL | CONFIGS["sr"] | {"controlnet_checkpoint_path": "models/super_resolution.safetensors"}
    (adapter,) = recipe.read(converted(tmp_path, said))["adapters"].values()
    assert adapter["controlnet_model_name_or_path"] == "models/super_resolution.safetensors"
    assert not {"reads", "bottleneck"} & adapter.keys()
    assert "the file of controlnet_checkpoint_path tells" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"controlnet_filter": "PidiFilter"}, "there is no PiDiNet here"),
        (
            {"controlnet_filter": "MyFilter", "controlnet_filter_params": {"a": 1}},
            "a filter of one's own is a condition",
        ),
        ({"controlnet_filter": "CannyFilter", "controlnet_filter_params": {"low": 1}}, "has no parameter low"),
    ],
)
def test_filters_without_a_counterpart_are_refused(own, message, tmp_path, capsys):
    converted(tmp_path, COMMON | OF_ALL | {"controlnet_blocks": EIGHT} | own)
    assert message in capsys.readouterr().out


QUICK = "canny"


@pytest.mark.long  # of the quick tests, test_controlnet_runs_of_stage_c.py
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.long]) for n in CONFIGS])
def test_a_tiny_twin_trains_two_steps(name, tmp_path):
    twins = Twins(tmp_path)
    shards(tmp_path / "shards", labelled=False)
    base = twins.pipeline("cascade_c")
    given = SHORT | BESIDE["cascade_c"] | {"model.pretrained_model_name_or_path": base, "model.prior": base / "prior"}
    given |= {"data.path": tmp_path / "shards", "data.filters": "null", "output_dir": tmp_path, "run_name": "twin"}
    given |= {"logging.trackers.wandb": "null", "sampling.num_images": 1, "sampling.num_inference_steps": 1}
    given |= {
        "training.gradient_accumulation_steps": 1,
        "checkpoint.backup_every": "null",
        "data.held_out_fraction": 0.2,
    }
    given |= {"adapters.controlnet.blocks": [0, 3]}
    if name == "identity":
        for own in ("detector", "recogniser"):
            found = tiny_networks.of_faces(own)
            given |= {f"adapters.controlnet.condition.{own}.{key}": value for key, value in found.items()}
    if name == "inpainting":
        given["adapters.controlnet.condition.share"] = 0.5
    del given["sampling.height"], given["sampling.width"]
    said = [f"{path}={value}" for path, value in given.items()]
    ours = converted(tmp_path, COMMON | OF_ALL | CONFIGS[name])
    assert main.run(["train", str(ours), *said]) == errors.DONE
    assert (tmp_path / "twin" / "adapter" / "controlnet.safetensors").exists()


FILES = {"canny": "grey", "inpainting": "holes", "sr": "latent"}
"""By config for generating: the recorded file of its ControlNet."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.long]) for n in FILES])
def test_one_for_generating_is_a_recipe_that_generates(name, tmp_path, capsys):
    """With the ControlNet of its file, and the condition that its filter is."""
    said = {key: value for key, value in OF_ALL.items() if key.endswith("_path") or key == "model_version"}
    said |= {"dtype": "bfloat16", "effnet_checkpoint_path": "models/effnet_encoder.safetensors"}
    said |= {key: value for key, value in CONFIGS[name].items() if key.startswith("controlnet_")}
    said |= {"controlnet_blocks": [0, 1, 2, 3], "controlnet_checkpoint_path": "models/controlnet.safetensors"}
    ours, printed = converted(tmp_path, said), capsys.readouterr().out
    assert "not carried over" not in printed
    assert f"daguerre generate {ours} prompt=TEXT control_from=PHOTO\n" in printed
    base = Twins(tmp_path).pipeline("cascade_c")
    given = BESIDE["cascade_c"] | {"model.pretrained_model_name_or_path": base, "model.prior": base / "prior"}
    given |= {"model.decode.name": "previewer", "sampling.num_inference_steps": 2}
    file = RECORDED / f"controlnet_{FILES[name]}.safetensors"
    given |= {"adapters.controlnet.controlnet_model_name_or_path": file}
    given = {path: value for path, value in given.items() if not path.startswith(("data.", "training."))}
    photo = tmp_path / "photo.png"
    Image.fromarray(scenes.scene(96, 96)).save(photo)
    texts = [f"{path}={value}" for path, value in given.items()]
    ask = ["generate", str(ours), "prompt=x", f"out={tmp_path / 'out'}", *texts]
    assert main.run([*ask, f"control_from={photo}"]) == errors.DONE
    document = json.loads((tmp_path / "out" / "000.json").read_text())
    assert WANTED[name]["condition"].items() <= document["adapters"]["controlnet"]["condition"].items()
    assert main.run([*ask[:3], *texts, f"out={tmp_path / 'none'}"]) == errors.REFUSED
    assert "control_from=PHOTO" in capsys.readouterr().err


def test_that_of_identity_names_no_controlnet_and_draws_without(tmp_path, capsys):
    """Stability has published none."""
    said = {key: value for key, value in OF_ALL.items() if key.endswith("_path") or key == "model_version"}
    said |= {key: value for key, value in CONFIGS["identity"].items() if key.startswith("controlnet_")}
    said |= {"effnet_checkpoint_path": "models/effnet_encoder.safetensors", "controlnet_checkpoint_path": None}
    ours, printed = converted(tmp_path, said), capsys.readouterr().out
    assert printed.count("Stage C draws alone") == 7
    assert f"daguerre generate {ours} prompt=TEXT\n" in printed
    assert "adapters" not in recipe.read(ours)
