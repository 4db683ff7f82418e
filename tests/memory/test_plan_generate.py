"""What `daguerre plan --generate` predicts against a batch that is generated, and what it says."""

import json

import family_recipes
import numpy as np
import pytest
import torch
from measured_peak import peak, storages
from tiny_runs import TINY

from daguerre import errors
from daguerre.assembly.parts import build
from daguerre.assembly.parts import load as load_networks
from daguerre.cli import main
from daguerre.cli.options import generate_options
from daguerre.generation import generate, load, planned
from daguerre.generation.generate import ImageRequest
from daguerre.memory import estimate
from daguerre.types import Prompt

MODEL = [word for word in TINY if word.startswith(("model.", "run_name"))]
GIVEN = ["quickstart", *MODEL, "training.device=cpu", "num_inference_steps=4", "batch_size=4"]
CARD = [word for word in GIVEN if word != "training.device=cpu"]
ONE_STEP = [word.replace("steps=4", "steps=1") for word in CARD]
"""For what does not depend on the sampler's steps, which are most of a plan's work."""


def predicted(given, **limits):
    asked = generate_options.read(given, planned=True)
    target = estimate.of(asked.config, asked.config.mesh.resolved(1, 1), limits.get("card"), None, limits.get("ram"))
    own, parts = load.outlined(asked.model, target.config, asked.options.weights == "raw")
    return planned.batch(target, own, parts), own


@pytest.mark.parametrize(
    "more",
    [
        ["training.text_encoders=offload"],
        pytest.param(["model.unet.block_out_channels=[64, 96]", "guidance_scale=1"], marks=pytest.mark.long),
        pytest.param(["sampler=heun", "height=128", "training.weights_dtype=bfloat16"], marks=pytest.mark.long),
        pytest.param(["training.base_precision=int8", "training.swap_blocks=3", "width=96"], marks=pytest.mark.long),
    ],
)
def test_a_batch_takes_what_was_predicted(more):
    """Within 10 % of what torch's allocator gives out, beside weights that are all in the host's memory on a CPU."""
    found, own = predicted([*GIVEN, *more])
    networks = load_networks(own)
    for module in (networks[1].net, *networks[0].components.values()):
        module.requires_grad_(False)
    parts = build(own, networks=networks, float32=networks[1].names)
    parts.net.eval()
    size_px = generate.image_size(own, "sample")
    text = "an image of something " * 25
    requests = [
        ImageRequest(i, Prompt(text), i, size_px, own.sampling.guidance_scale) for i in range(own.sampling.batch_size)
    ]

    def images():
        return [image.pixels_HWC for image in generate.generate(parts, own.sampling, requests)]

    assert np.shape(images()) == (4, *size_px, 3)
    for swap in parts.swaps.values():
        swap.drop()
    modules = [*parts.family.components.values(), parts.net]
    held = storages(t for module in modules for t in [*module.parameters(), *module.buffers()])
    waiting = found.host.training["networks that wait"]
    assert found.peak.held + waiting == pytest.approx(held, rel=0.01)
    assert found.peak.whole + waiting == pytest.approx(held + peak(images), rel=0.1)


def test_settings_decide_what_is_held_where():
    """Of a GPU that is not here, by closed forms: 16 bits, and encoders and blocks that wait."""
    small = ["training.weights_dtype=bfloat16", "training.text_encoders=offload", "training.swap_blocks=3"]
    whole = predicted([*ONE_STEP, "weights=raw"], card="8GB")[0]
    less = predicted([*ONE_STEP, "weights=raw", *small], card="8GB")[0]
    assert less.held["text_encoder"] == 0
    waiting = less.host.training["networks that wait"]
    assert less.held["unet"] == pytest.approx(whole.held["unet"] / 2 - (waiting - whole.held["text_encoder"]), rel=0.01)
    assert less.host.training["tensors"] == 0
    averaged = predicted([*ONE_STEP, small[0]], card="8GB")[0]
    assert averaged.held == whole.held, "averages are float32"
    codes = predicted([*ONE_STEP, "training.base_precision=int8"], card="8GB")[0]
    assert sum(codes.held.values()) < sum(whole.held.values())
    for found in (whole, codes):
        read = found.host.reading["networks in float32"]
        made = sum(whole.held.values()) - whole.held["text_encoder"]
        assert read == pytest.approx(made, rel=0.01), "networks of numbers: four bytes a weight, whatever they become"


def test_captions_of_prompts_are_in_no_cache(tmp_path):
    """An encoder that waits is said to be in no memory where a run trains on a cache; images are generated with it."""
    recipe = tmp_path / "cached.yaml"
    recipe.write_text("extends: quickstart\ndata: {source: folder, path: x}\ncache: {path: x}\n")
    found = predicted([str(recipe), *ONE_STEP[1:], "training.text_encoders=offload"], card="8GB")[0]
    assert found.held["text_encoder"] == 0 < found.host.training["networks that wait"]


def test_a_page_and_json_say_whether_it_fits(capsys):
    assert main.run(["plan", *CARD, "--generate", "card=8GB", "ram=10MB"]) == errors.REFUSED
    said = " ".join(capsys.readouterr().out.split())
    assert "4 images of 64x64 px (height x width) at once, 4 steps of ddim" in said
    assert "host 10.00 MB DOES NOT FIT" in said
    assert main.run(["plan", *ONE_STEP, "--generate", "card=8GB", "--json"]) == errors.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert set(found["made_bytes"]) == {"prompts are read", "the sampler steps", "images are decoded"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["devices=2"], "devices=2 has no effect with --generate"),
        (["image=x.png"], "image: a plan counts images of prompts alone"),
        (["learning_rate=1e-3"], "learning_rate only affects training"),
        (["optimizer.name=lion"], "no effect on images"),
    ],
)
def test_what_has_no_effect_is_said(given, text, capsys):
    code = main.run(["plan", *ONE_STEP, "training.device=cpu", "--generate", *given])
    said = capsys.readouterr()
    assert text in said.out + said.err
    assert (code == errors.DONE) is ("learning_rate" in given[0])


def test_noise_levels_stay_numbers_where_networks_have_none():
    with planned._Mixed(allow_non_fake_inputs=True):
        weight = torch.empty(3, 4)
        levels = torch.linspace(1, 0, 3, dtype=torch.float64)
        assert levels.tolist() == [1, 0.5, 0]
        assert type(levels.float() @ weight) is type(weight) is not torch.Tensor


@pytest.mark.parametrize(
    "name",
    [name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.long) for name in family_recipes.NAMES],
)
def test_images_of_every_family_are_planned(name, tmp_path, capsys):
    assert (
        main.run(["plan", str(family_recipes.write(name, tmp_path)), "--generate", "base=true", "--json"])
        == errors.DONE
    )
    assert json.loads(capsys.readouterr().out)["taken_bytes"] > 0
