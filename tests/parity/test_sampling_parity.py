"""`daguerre generate` draws what stock diffusers draws of the run's pipeline/ from the same initial noise: <= 2/255.

Everything goes through the command line: a run is trained, saves and exports, images are generated of its checkpoint;
the folder is then opened by DiffusionPipeline as a stranger would. tests/families/stable_diffusion/test_sd_export.py
has every objective, schedule and sampler without the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import folder as image_folder
from diffusers import DiffusionPipeline, EDMEulerScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file
from tiny_models import TEXT_WIDTH, write_sd, write_sdxl
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from daguerre.cli import main
from daguerre.samplers.draw import initial_noise

# diffusers' schedulers hand a tensor to np.array, which numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

PROMPTS = ["a large red circle", "blue"]
SEED = 3
SIDE_PX = 16
"""Of the images that are trained on."""
HEIGHT_PX, WIDTH_PX = 24, 16
"""Of those that are drawn: SDXL is told the two in this order."""
SAMPLERS = ("ddim", "euler", "dpmpp_2m", "unipc")
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], dict[str, Any]]] = {
    "SD 1.x": (write_sd, {"family": "sd"}, {"name": "eps"}),
    "SD 2.x, zero terminal SNR": (
        lambda folder: write_sd(folder, version=2),
        {"family": "sd"},
        {"name": "v", "schedule": {"zero_terminal_snr": True}},
    ),
    "SDXL, text encoders trained": (
        write_sdxl,
        {"family": "sdxl", "train_text_encoder": True, "train_text_encoder_2": True},
        {"name": "eps"},
    ),
}


def trained(place: Path, model: dict[str, Any], objective: dict[str, Any], *given: str) -> Path:
    """The run folder of two updates that were saved and exported."""
    recipe = {
        "run_name": "drawn",
        "output_dir": str(place),
        "model": model,
        "objective": objective,
        "data": {"source": "folder", "path": str(image_folder(place / "image_folder", 4)), "resolution": SIDE_PX},
        "training": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu", "mixed_precision": "no"},
        "optimizer": {"learning_rate": 1e-3},
        "validation": {"every": None},
        "sampling": {"num_images": 0},
        "logging": {"tensorboard": False},
    }
    (place / "drawn.yaml").write_text(json.dumps(recipe))
    assert main.run(["train", str(place / "drawn.yaml"), *given]) == 0
    return place / "drawn"


def ours(run: Path | str, out: Path, prompts: Sequence[str], *given: str) -> np.ndarray:
    """Images [N, H, W, 3] of `daguerre generate`, from seed SEED + i."""
    listed = out.with_suffix(".txt")
    listed.write_text("\n".join(prompts))
    size = [f"height={HEIGHT_PX}", f"width={WIDTH_PX}"]
    assert main.run(["generate", str(run), f"prompts_file={listed}", f"seed={SEED}", f"out={out}", *size, *given]) == 0
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(out.glob("*.png"))])


def theirs(folder: Path, prompts: Sequence[str], **call: Any) -> np.ndarray:
    """Images of the pipeline in a folder, from the same noise."""
    return called(
        DiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False), prompts, **call
    )


def called(pipe: Any, prompts: Sequence[str], **call: Any) -> np.ndarray:
    """Images of an open pipeline, from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED + i for i in range(len(prompts))], (4, HEIGHT_PX // 2, WIDTH_PX // 2))
    drawn = pipe(list(prompts), latents=noise, height=HEIGHT_PX, width=WIDTH_PX, output_type="np", **call).images
    return (drawn * 255).round().astype(int)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (not name.startswith("SDXL"))) for name in MODELS],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write, model, objective = MODELS[request.param]
    place = tmp_path_factory.mktemp("drawn")
    return trained(place, model | {"pretrained_model_name_or_path": str(write(place / "model"))}, objective)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "sampler"),
    [pytest.param(i, name, marks=[] if i == 0 else [pytest.mark.long]) for i, name in enumerate(SAMPLERS)],
)
def test_images_are_those_of_the_exported_pipeline(run, tmp_path, number, sampler):
    """With guidance, with a negative prompt and with none (SDXL's none is zeros, in both)."""
    more = [str(run), f"sampler={sampler}", f"training.duration={3 + number} steps", "num_inference_steps=9"]
    assert main.run(["train", *more]) == 0  # goes on and exports for this sampler
    call: dict[str, Any] = {"num_inference_steps": 9, "guidance_scale": 4.0}
    given = [f"sampler={sampler}", "num_inference_steps=9", "guidance_scale=4"]
    drawn = {}
    for name, negative in (("none", None), ("dark", "dark")):
        drawn[name] = ours(run, tmp_path / name, PROMPTS, *given, *([f"negative_prompt={negative}"] * bool(negative)))
        expected = theirs(run / "pipeline", PROMPTS, negative_prompt=negative and [negative] * 2, **call)
        difference = int(np.abs(drawn[name] - expected).max())
        print(sampler, name, difference)
        assert difference <= 2
    before = theirs(run.parent / "model", PROMPTS, **call)
    for other in (drawn["dark"], drawn["none"][::-1], before):
        assert np.abs(drawn["none"] - other).mean() > 2, "the images must depend on what is compared"


def test_what_was_trained_is_exported(run):
    """And nothing else changes. transformers 5 leaves a prefix out that our exports have, for transformers 4."""
    model = json.loads((run.parent / "drawn.yaml").read_text())["model"]
    for part in ("text_encoder", "text_encoder_2", "vae"):
        found = [list((place / part).glob("*.safetensors")) for place in (run.parent / "model", run / "pipeline")]
        if not any(found):
            continue
        old, new = (
            {name.removeprefix("text_model."): value for name, value in load_file(*files).items()} for files in found
        )
        assert old.keys() == new.keys()
        assert all(torch.equal(new[name], old[name]) for name in old) == (f"train_{part}" not in model)


@pytest.mark.long
def test_prompts_of_up_to_a_window_are_read_as_ever_with_long_prompts(tmp_path):
    """75 tokens are one window; a long prompt beside it in the batch changes nothing but rounding."""
    # each word of n bytes is n tokens here: 75 tokens exactly, and 76
    fits, longer = " ".join(["circle"] * 12 + ["red"]), " ".join(["circle"] * 12 + ["blue"])
    folder = write_sdxl(tmp_path / "model", max_tokens=77)
    model = {"family": "sdxl", "pretrained_model_name_or_path": str(folder), "long_prompts": True}
    run = trained(tmp_path, model, {"name": "eps"})
    given = ["num_inference_steps=5", "guidance_scale=4"]
    call = {"num_inference_steps": 5, "guidance_scale": 4.0}
    expected = theirs(run / "pipeline", [fits, "", "blue"], **call)
    alone = ours(run, tmp_path / "alone", [fits, "blue"], *given)
    beside = ours(run, tmp_path / "beside", [fits, longer], *given)
    found = [int(np.abs(alone[0] - expected[0]).max()), int(np.abs(beside[0] - alone[0]).max())]
    print("77 tokens", found)
    assert found[0] <= 2
    assert found[1] <= 1
    cut = theirs(run / "pipeline", ["x", longer], **call)
    assert np.abs(beside[1] - cut[1]).max() > 2, "the 76th token is read"


@pytest.mark.long
def test_lightning_in_four_steps_is_what_its_model_card_says(tmp_path):
    """Euler with trailing timesteps and no guidance: the recipe on a tiny base with the UNet in a file of its own."""
    base = write_sdxl(tmp_path / "base")
    distilled = write_sdxl(tmp_path / "distilled", seed=1) / "unet" / "diffusion_pytorch_model.safetensors"
    places = [f"model.pretrained_model_name_or_path={base}", f"model.unet={distilled}"]
    drawn = ours("sdxl_lightning", tmp_path / "drawn", PROMPTS, *places)
    unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(base / "unet"))
    unet.load_state_dict(load_file(distilled))
    pipe = DiffusionPipeline.from_pretrained(base, unet=unet, local_files_only=True, low_cpu_mem_usage=False)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    expected = called(pipe, PROMPTS, num_inference_steps=4, guidance_scale=0)
    print("lightning", np.abs(drawn - expected).max())
    assert np.abs(drawn - expected).max() <= 2
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    assert np.abs(drawn - called(pipe, PROMPTS, num_inference_steps=4, guidance_scale=0)).max() > 20


@pytest.mark.long  # of the quick tests, models/test_texts.py
@pytest.mark.parametrize(("family", "layer"), [("sd", -2), ("sdxl", -3)])
def test_an_export_whose_text_is_read_early_needs_no_word_to_the_pipeline(tmp_path, family, layer):
    """The layers behind the one that is read are not exported (SDXL: of the first encoder)."""
    folder = {"sd": write_sd, "sdxl": write_sdxl}[family](tmp_path / "model")
    model = {"family": family, "pretrained_model_name_or_path": str(folder), "text_encoder_layer": layer}
    run = trained(tmp_path, model, {"name": "eps"})
    call: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 4.0, "negative_prompt": ["dark"] * 2}
    given = ["num_inference_steps=5", "guidance_scale=4", "negative_prompt=dark"]
    expected = theirs(run / "pipeline", PROMPTS, **call)
    difference = int(np.abs(ours(run, tmp_path / "early", PROMPTS, *given) - expected).max())
    print(family, "read early", difference)
    assert difference <= 2


@pytest.mark.long  # of the quick tests, models/test_texts.py
@pytest.mark.parametrize(
    ("recipe", "write", "layers"),
    [
        ("sd15", write_sd, ["model.text_encoder_layer=-2"]),
        pytest.param(
            *("sdxl", write_sdxl, ["model.text_encoder_layer=-3", "model.text_encoder_layer_2=-3"]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_earlier_hidden_state_is_diffusers_clip_skip(tmp_path, recipe, write, layers):
    """By the pretrained networks as they are; diffusers applies CLIP's last norm in SD and none in SDXL.

    It reads SD's negative prompts at the last layer all the same, so that they are given as features here.
    """
    base = write(tmp_path / "base")
    place = f"model.pretrained_model_name_or_path={base}"
    given = ["base=true", place, "sampler=euler", "num_inference_steps=5", "guidance_scale=4", "batch_size=2"]
    pipe = DiffusionPipeline.from_pretrained(base, local_files_only=True, low_cpu_mem_usage=False)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    call: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 4.0}
    plain = called(pipe, PROMPTS, **call)
    if recipe == "sd15":
        vars(pipe.text_encoder)["text_model"] = pipe.text_encoder  # where diffusers 0.42 looks for the norm
        call["negative_prompt_embeds"] = pipe.encode_prompt([""] * 2, "cpu", 1, False, clip_skip=1)[0]
    expected = called(pipe, PROMPTS, clip_skip=1, **call)
    difference = np.abs(ours(recipe, tmp_path / "drawn", PROMPTS, *given, *layers) - expected).max()
    print(recipe, "clip_skip", difference)
    assert difference <= 2
    assert np.abs(plain - expected).mean() > 2


def test_a_pipeline_drawn_with_as_it_is(tmp_path):
    """`daguerre generate FOLDER`: the objective is what its scheduler says, here v."""
    folder = write_sd(tmp_path / "model", version=2)
    given = ["num_inference_steps=5", "guidance_scale=4", "sampler=euler"]
    drawn = ours(folder, tmp_path / "drawn", PROMPTS, *given)
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    difference = int(np.abs(drawn - called(pipe, PROMPTS, num_inference_steps=5, guidance_scale=4.0)).max())
    print("a folder", difference)
    assert difference <= 2


@pytest.mark.long  # of the quick tests, test_cosxl.py and test_sd_export.py
def test_a_pipeline_of_cosxl_drawn_with_as_it_is(tmp_path):
    """EDM with v in and out: the scheduler says it."""
    folder = write_sdxl(tmp_path / "model")
    told = EDMEulerScheduler(sigma_min=0.002, sigma_max=120.0, sigma_data=1.0, prediction_type="v_prediction")
    told.save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "EDMEulerScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    drawn = ours(folder, tmp_path / "drawn", PROMPTS, "num_inference_steps=6", "guidance_scale=4", "sampler=euler")
    expected = theirs(folder, PROMPTS, num_inference_steps=6, guidance_scale=4.0)
    difference = int(np.abs(drawn - expected).max())
    print("CosXL", difference)
    assert difference <= 2


@pytest.mark.long
def test_edm_on_playgrounds_latents_opens_in_sdxls_pipeline(tmp_path):
    statistics = {
        "scaling_factor": 0.5,
        "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
        "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    }
    folder = write_sdxl(tmp_path / "model")
    model = {"family": "sdxl", "pretrained_model_name_or_path": str(folder), **statistics}
    run = trained(tmp_path, model, {"name": "edm"}, "sampler=dpmpp_2m", "num_inference_steps=8")
    expected = theirs(run / "pipeline", PROMPTS, num_inference_steps=8, guidance_scale=4.0)
    drawn = ours(run, tmp_path / "playground", PROMPTS, "num_inference_steps=8", "guidance_scale=4")
    difference = int(np.abs(drawn - expected).max())
    print("playground", difference)
    assert difference <= 2


@pytest.mark.long
def test_a_trained_t5_opens_in_sds_pipeline(tmp_path):
    words = [(f"▁{word}", -1.0) for word in ("a", "large", "red", "circle", "blue")]
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *words], extra_ids=0)
    tokenizer.model_max_length = 12
    tokenizer.save_pretrained(tmp_path / "t5" / "tokenizer")
    config = T5Config(vocab_size=32, d_model=TEXT_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(tmp_path / "t5" / "text_encoder")
    places = {"pretrained_model_name_or_path": write_sd(tmp_path / "model")}
    places |= {"text_encoder": tmp_path / "t5", "tokenizer": tmp_path / "t5"}
    model = {name: str(place) for name, place in places.items()} | {"family": "sd", "train_text_encoder": True}
    run = trained(tmp_path, model, {"name": "eps"})
    expected = theirs(run / "pipeline", PROMPTS, num_inference_steps=5, guidance_scale=4.0)
    drawn = ours(run, tmp_path / "words", PROMPTS, "num_inference_steps=5", "guidance_scale=4")
    difference = int(np.abs(drawn - expected).max())
    print("T5", difference)
    assert difference <= 2
