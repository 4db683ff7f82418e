"""A small diffusion transformer: on any autoencoder and text encoder it computes what FLUX.2 klein's pipeline computes,
also with reference images; and numbers that do not fit together are refused in words."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_pictures
import tiny_families
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
from PIL import Image
from tiny_families import dit as tiny

from daguerre.cli import main
from daguerre.data.sources import shape_edits
from daguerre.families import dit, flux2
from daguerre.generation.images import made
from daguerre.generation.prompts import Prompts, Row
from daguerre.generation.requests import RequestList
from daguerre.samplers.draw import initial_noise
from daguerre.samplers.settings import SamplingSettings

SEED, STEPS, SHIFT = 3, 4, 2.0


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("dit") / "dit")


def of_flux2(vae: Any) -> AutoencoderKLFlux2:
    """FLUX.2's autoencoder that makes the same latents in patches: the scaling factor is the deviation of its norm."""
    names = ("block_out_channels", "down_block_types", "up_block_types", "layers_per_block", "norm_num_groups")
    numbers = {name: vae.config[name] for name in names}
    made: Any = AutoencoderKLFlux2(**numbers, latent_channels=tiny.LATENT, sample_size=32)
    made.load_state_dict({**made.state_dict(), **vae.state_dict()})
    made.bn.running_mean.zero_()
    made.bn.running_var.fill_(vae.config.scaling_factor**-2 - made.config.batch_norm_eps)
    return made


@torch.no_grad()
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.long), 2])
def test_images_are_those_of_kleins_pipeline_given_its_text(count, base, tmp_path):
    pictures = reference_pictures.pictures(tmp_path, [(70, 98), (64, 80)])[:count]
    given = [f"reference=[{','.join(map(str, pictures))}]"] if count else []
    size = {"height": 64, "width": 48}
    args = ["generate", str(base), "prompt=make it red", f"seed={SEED}", f"out={tmp_path / 'out'}", "guidance_scale=3"]
    args += [f"num_inference_steps={STEPS}", *[f"{side}={px}" for side, px in size.items()], *given]
    assert main.run(args) == 0
    found = np.asarray(Image.open(tmp_path / "out" / "000.png")).astype(int)

    family = dit.load(dit.Settings(pretrained_model_name_or_path=str(base)), 0)
    parts: Any = family.components
    assert family.text is not None
    text, null = (family.text.features(family.text.tokens([words]))["text"] for words in ("make it red", ""))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipe: Any = Flux2KleinPipeline(scheduler, of_flux2(parts["vae"]), None, None, parts["transformer"])
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], family.latent_shape((3, size["height"], size["width"])))
    embeds = {"prompt_embeds": text, "negative_prompt_embeds": null}
    images = [Image.open(path).convert("RGB") for path in pictures] or None
    wanted = pipe(
        images, latents=pipe._patchify_latents(noise), num_inference_steps=STEPS, guidance_scale=3.0, **size, **embeds
    ).images[0]
    assert np.abs(found - np.asarray(wanted).astype(int)).max() <= 2


def test_other_patches_are_other_models(tmp_path):
    """A patch of 1 reads each latent pixel as a token; the index of an export says so."""
    base = tiny.write(tmp_path / "one", patch_size=1, in_channels=tiny.LATENT)
    with pytest.raises(Exception, match="patch_size is 1, and the other networks give 2"):
        dit.load(dit.Settings(pretrained_model_name_or_path=str(base)), 0)
    index = json.loads((base / "model_index.json").read_text()) | {"patch_size": 1}
    (base / "model_index.json").write_text(json.dumps(index))
    args = [
        "generate",
        str(base),
        "prompt=a",
        "height=16",
        "width=20",
        "num_inference_steps=1",
        f"out={tmp_path / 'o'}",
    ]
    assert main.run(args) == 0
    assert np.asarray(Image.open(tmp_path / "o" / "000.png")).shape == (16, 20, 3)


def test_numbers_that_do_not_fit_together_are_refused(base, tmp_path, capsys):
    for numbers, said in (
        ({"attention_head_dim": 16, "axes_dims_rope": [4, 4, 4, 8]}, "shares out 20: give four even numbers"),
        ({"joint_attention_dim": 7, "axes_dims_rope": [2] * 4, "attention_head_dim": 8}, "joint_attention_dim is 7"),
        ({"layers": 3}, "has no layers (did you mean num_layers?)"),
    ):
        small = {"num_layers": 0, "num_single_layers": 1, "num_attention_heads": 1, **numbers}
        recipe = {
            "run_name": "x",
            "model": {"family": "dit", "pretrained_model_name_or_path": str(base), "transformer": small},
            "objective": {"name": "flow"},
            "data": {"source": "shapes"},
            "training": {"duration": "1 steps", "global_batch_size": 1},
        }
        (tmp_path / "r.yaml").write_text(json.dumps(recipe))
        assert main.run(["train", str(tmp_path / "r.yaml"), "--dry-run", f"output_dir={tmp_path}"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"source": "shape_edits"}, "draws a reference image with each sample, and nothing in the recipe reads it"),
        ({"source": "shapes", "preferred_size": "large"}, "draws a rejected image with each sample"),
    ],
)
def test_images_that_nothing_reads_are_refused_before_the_first_update(source, said, base, tmp_path, capsys):
    recipe = {
        "run_name": "x",
        "model": {"family": "dit", "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "flow"},
        "data": source,
        "training": {"duration": "1 steps", "global_batch_size": 1},
        "lr_scheduler": {"warmup": "0 steps"},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    assert main.run(["train", str(tmp_path / "r.yaml"), "--dry-run", f"output_dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err


def test_sides_are_whole_tokens(base, tmp_path, capsys):
    family = tiny_families.load("dit", tmp_path)
    assert family.latent_shape((3, 64, 48)) == (tiny.LATENT, 32, 24)
    assert main.run(["generate", str(base), "prompt=a", "height=62", "width=64", f"out={tmp_path / 'o'}"]) == 2
    assert "multiples of 4" in capsys.readouterr().err


def test_an_image_beside_a_picture_has_the_size_of_training_unless_one_is_given(tmp_path):
    """FLUX.2 klein's has that of the picture."""
    (path,) = reference_pictures.pictures(tmp_path, [(70, 98)])
    row = Row("make it red", images={"reference": path})
    for rule, given, wanted in (
        (dit.Settings.reference_rule, {}, (64, 48)),
        (dit.Settings.reference_rule, {"height": 32}, (32, 48)),
        (flux2.Settings.reference_rule, {}, (64, 96)),
    ):
        sampling = SamplingSettings(num_images=1, **given)
        (request,) = RequestList(Prompts("one", "", lambda: [row]), sampling, (64, 48), references=rule)
        assert request.size_px == wanted


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["dit", "qwen_image_edit"]
)  # the second enlarges pictures, and shows them to its text encoder
def test_edits_are_measured_with_their_reference_images_by_a_run_and_by_evaluate(family, tmp_path):
    settings = tiny_families.settings(family, tmp_path)
    recipe = {
        "run_name": "edits",
        "model": {"family": family, **settings, "references": 1},
        "objective": {"name": "flow"},
        "data": {"source": "shape_edits", "checked_pairs": 3},
        "training": {"duration": "1 steps", "global_batch_size": 2},
        "lr_scheduler": {"warmup": "0 steps"},
        "validation": {"every": None},
        "sampling": {"num_images": 1, "num_inference_steps": 1, "guidance_scale": 1},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    assert main.run(["train", str(tmp_path / "r.yaml"), f"output_dir={tmp_path}"]) == 0
    run = tmp_path / "edits"
    in_loop = json.loads((run / "evaluation.json").read_text())["shape_edits"]
    assert [row["name"] for row in in_loop["rows"]][:3] == ["edited", "kept", "all"]
    (listing,) = (run / "samples").glob("step-*/samples.json")
    assert "reference" in json.loads(listing.read_text())[0]["control_files"]
    assert main.run(["evaluate", str(run), "metrics=[shape_edits]"]) == 0
    (shard,) = run.rglob("images/*/*.tar")
    with tarfile.open(shard) as opened:
        documents = [json.load(opened.extractfile(name)) for name in opened.getnames() if name.endswith(".json")]  # type: ignore[arg-type]
    pairs = shape_edits.open_source(shape_edits.Settings(), "held_out")
    wanted = [made("reference", np.asarray(pairs.record(number).images["reference"])).sha256 for number in range(3)]
    assert [one["reference_sha256"] for one in documents] == wanted
    (written,) = (run / "evaluations").glob("*/result.json")
    assert json.loads(written.read_text())["tables"]["shape_edits"]["rows"] == in_loop["rows"]
