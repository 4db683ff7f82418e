"""What the quickstart's cascade promises: the shipped networks, and (`make test-long`) what its recipes train."""

import json

import numpy as np
import pytest
import torch

from daguerre import errors
from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config, recipe
from daguerre.config.recipe import FOLDER
from daguerre.data.sources import shapes as images
from daguerre.evaluation.metrics import shapes as checker
from daguerre.families.cascade import codec
from daguerre.types import Latents, Prompt

ASSETS = FOLDER.parent / "assets" / "quickstart_cascade"
PSNR = {"quickstart_cascade_a": 26.0, "quickstart_cascade_effnet": 29.5}
"""Of what an autoencoder makes of held-out images, in dB, by its averaged weights."""
DECODED_PSNR = 25.8
"""Of what Stage B and Stage A make of the compressed images."""
JOINT_PSNR = 20.0
"""Of what an EfficientNet and a Stage B that learn together make of held-out images, after 800 updates."""
MARKS = {"background": 0.95, "colour": 0.95, "shape": 0.85, "size": 0.85}
"""Shares of 200 prompts of combinations that training never saw, drawn by Stage C, B and A."""


def test_the_shipped_networks_are_small():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"vqgan", "effnet", "previewer", "decoder"}
    assert sum(path.stat().st_size for path in files) <= 5_000_000


@pytest.fixture(scope="module")
def held_out():
    """100 held-out images [B, 3, H, W] in [0, 1], and what they show."""
    source = images.open_source(images.Settings(), "held_out")
    records = [source.record(index) for index in range(100)]
    asked = [images.Prompt(r.texts["text"], images.Combination(**r.metadata)) for r in records]
    return torch.from_numpy(np.stack([r.image for r in records])).permute(0, 3, 1, 2).float() / 255, asked


def shipped(name, *components):
    """Networks of a recipe, as the package ships them."""
    given = [f"model.{component}=quickstart_cascade" for component in components]
    found = build(config.load(name, ["training.device=cpu", *given]).config).family.components
    return [found[component].eval() for component in components]


def psnr(again_BCHW, images_BCHW):
    """Mean in dB."""
    errors_B = (again_BCHW.clamp(0, 1) - images_BCHW).square().flatten(1).mean(1)
    return float((-10 * errors_B.log10()).mean())


@torch.no_grad()
def test_stage_a_makes_images_again_that_the_checker_reads(held_out):
    images_BCHW, asked = held_out
    (vqgan,) = shipped("quickstart_cascade_a", "vqgan")
    again_BCHW = vqgan.decode(vqgan.encode(images_BCHW, return_dict=False)[0], return_dict=False)[0]
    assert psnr(again_BCHW, images_BCHW) >= PSNR["quickstart_cascade_a"]
    assert min(checker.shares(asked, list(codec.levels(again_BCHW).numpy())).values()) >= 0.99


@torch.no_grad()
def test_the_previewer_makes_images_again_of_latents_at_a_sixteenth_of_the_sides(held_out):
    images_BCHW, _ = held_out
    effnet, previewer = shipped("quickstart_cascade_effnet", "effnet", "previewer")
    z_BCHW = codec.compressed(effnet, images_BCHW)
    assert z_BCHW.shape[1:] == (16, 4, 4)
    small_BCHW = codec.resized(images_BCHW, 32, 32)
    assert psnr(previewer(z_BCHW), small_BCHW) >= PSNR["quickstart_cascade_effnet"]


@pytest.mark.long  # of the quick tests, Stage A makes images again
@torch.no_grad()
def test_stage_b_and_stage_a_decode_the_latents(held_out):
    images_BCHW, asked = held_out
    family = build(config.load("quickstart_cascade", ["training.device=cpu"]).config).family
    effnet = family.components["effnet"].eval()
    latents = Latents(codec.compressed(effnet, images_BCHW), [Prompt(one.text) for one in asked], range(100), (64, 64))
    made = family.decode(latents)
    assert psnr(torch.from_numpy(made).permute(0, 3, 1, 2) / 255, images_BCHW) >= DECODED_PSNR
    shares = checker.shares(asked, list(made))
    assert all(shares[name] >= mark for name, mark in MARKS.items()), shares


def trained(name, folder, seed=0):
    """Shares of right images of a recipe, which it measures when it has trained."""
    run_name = f"{name}-{seed}" if seed else name
    given = [f"output_dir={folder}", f"run_name={run_name}", f"seed={seed}"]
    assert main.run(["train", name, *given]) == errors.DONE
    rows = json.loads((folder / run_name / "evaluation.json").read_text())["shapes"]["rows"]
    return {row["name"]: row["value"] for row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a cascade that the recipe trained, and its shares."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, trained("quickstart_cascade", folder)


@pytest.mark.long
def test_the_cascade_draws_what_prompts_ask_for(whole):
    shares = whole[1]
    assert all(shares[name] >= mark for name, mark in MARKS.items()), shares


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_controlnet_of_the_cascade_follows_outlines(whole, seed):
    """Overlap at least .8 on average over 200 images."""
    shares = trained("quickstart_cascade_controlnet", whole[0], seed)
    assert shares["outline"] >= 0.8


@pytest.mark.long
@pytest.mark.parametrize("name", PSNR)
def test_an_autoencoder_learns_from_random_weights(tmp_path, name):
    assert main.run(["train", name, f"output_dir={tmp_path}"]) == errors.DONE
    lines = (tmp_path / name / "metrics" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line)["validation/psnr"] for line in lines if "validation/psnr" in line]
    assert measured[-1] >= PSNR[name], measured


@pytest.mark.long
def test_an_effnet_learns_with_stage_b_from_random_weights(tmp_path):
    """In three minutes of one thread; the EfficientNet of quickstart_cascade_effnet, by Stage B's objective alone."""
    effnet = recipe.read(recipe.shipped()["quickstart_cascade_effnet"])["model"]["effnet"]
    given = [f"model.effnet={json.dumps(effnet)}", "adapter.name=full", "adapter.train=[decoder, effnet]"]
    given += ["training.duration=800 steps", "sampling.num_images=0", f"output_dir={tmp_path}", "run_name=joint"]
    assert main.run(["train", "quickstart_cascade_b", *given]) == errors.DONE
    assert main.run(["evaluate", str(tmp_path / "joint"), "num_images=200"]) == errors.DONE
    (result,) = (tmp_path / "joint" / "evaluations").rglob("result.json")
    assert json.loads(result.read_text())["tables"]["psnr"]["rows"][0]["value"] >= JOINT_PSNR
