"""Runs that distil a teacher: to the bit after a restart, with a teacher that is counted, recorded and checked."""

from __future__ import annotations

import json
from pathlib import Path

import measured_losses
import numpy as np
import pytest
import torch
from adapter_runs import Place, assert_equal
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tiny_models import prompts, write_sd, write_sdxl

from daguerre import errors
from daguerre.assembly import parts
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.memory import static
from daguerre.models.family import Family
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.networks.teacher import TEACHER
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Latents

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: lcm, solver_steps: 20}
data: {source: folder, resolution: 16, held_out_fraction: 0.2}
training: {duration: 4 steps, global_batch_size: 2}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
ema: {enabled: true, decay: 0.5}
checkpoint: {every: 2 steps}
validation: {every: 2 steps, num_samples: 2, num_levels: 2}
sampling: {sampler: lcm, num_images: 1, num_inference_steps: 2, guidance_scale: 1}
logging: {every: 1 steps, tensorboard: false}
"""
LORA = ["adapter.name=lora", "adapter.rank=2"]
SMALL_LORA = [*LORA, "ema.enabled=false"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("lcm"), "sd", RECIPE)


def full(place: Place) -> list[str]:
    """A UNet that learns its scale from another model by its averages."""
    teacher = f"objective.teacher.path={place.folder / 'base'}"
    return ["objective.target=average", "model.guidance_embedding=32", teacher, "sampling.guidance_scale=5"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_goes_on_to_the_bit_and_draws(place: Place, kind: str) -> None:
    given = SMALL_LORA if kind == "lora" else full(place)
    assert place.train(f"{kind}-whole", *given) == errors.DONE
    for steps in (2, 4):
        assert place.train(f"{kind}-parts", *given, f"training.duration={steps} steps") == errors.DONE
    for key in ("learning/loss", "validation/loss"):
        assert place.numbers(f"{kind}-parts", key) == place.numbers(f"{kind}-whole", key)
    assert_equal(place.tensors(f"{kind}-parts"), place.tensors(f"{kind}-whole"))
    run = place.folder / f"{kind}-parts"
    measured = measured_losses.mean(run, place.folder / f"{kind}-measured", num_levels=2)
    assert measured == pytest.approx(place.numbers(f"{kind}-whole", "validation/loss")[-1], rel=1e-6)
    assert main.run(["generate", str(run), "prompt=a", "num_inference_steps=2", f"out={run}-drawn"]) == errors.DONE
    base = json.loads((run / "checkpoints/step-00000004/base.json").read_text())
    if kind == "lora":
        assert "reference" in base
        return
    assert base["teacher"]["place"] == str(place.folder / "base")
    weights = run / "pipeline/unet/diffusion_pytorch_model.safetensors"
    assert load_file(weights)["time_embedding.cond_proj.weight"].any(), "it learns the scale from zero on"
    scheduler = json.loads((run / "pipeline/scheduler/scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "LCMScheduler"


@pytest.mark.long
def test_another_teacher_is_another_run(place: Place, tmp_path: Path, capsys) -> None:
    teacher = write_sd(tmp_path / "teacher")
    given = ["ema.enabled=false", f"objective.teacher.path={teacher}", *LORA]
    assert place.train("changed", *given, "training.duration=2 steps") == errors.DONE
    file = teacher / "unet/diffusion_pytorch_model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(file).items()}, file)
    assert place.train("changed", *given) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert "was trained on another teacher" in said
    assert "objective.teacher" in said


def test_teachers_that_do_not_fit_are_refused(place: Place, tmp_path: Path, capsys) -> None:
    other = write_sd(tmp_path / "other")
    file = other / "text_encoder/model.safetensors"
    save_file({name: 1.5 * value for name, value in load_file(file).items()}, file, {"format": "pt"})
    lora = tmp_path / "lora"
    (lora / "adapter").mkdir(parents=True)
    (lora / "config.yaml").write_text("run_name: lora")
    cases = {
        write_sdxl(tmp_path / "sdxl"): "is a StableDiffusionXLPipeline, and the student's family, sd,",
        other: "has another text_encoder than the student",
        lora: "has no pipeline of a whole model",
        tmp_path / "nowhere": "there is no folder",
    }
    for where, why in cases.items():
        assert place.train("refused", *SMALL_LORA, f"objective.teacher.path={where}") == errors.REFUSED
        assert why in " ".join(capsys.readouterr().err.split()), where


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["objective.guidance_min=0.5"], "0 and 1 are no guidance"),
        (["model.guidance_embedding=32"], "objective.teacher.path"),
        (["objective.target=average", "ema.enabled=false"], "ema.enabled=true"),
        (["adapter.name=controlnet"], "compares the student with another network"),
        (["adapter.name=tokens", "adapter.placeholder_token=<a>", "adapter.initializer_token=a"], "text_encoder is tr"),
    ],
)
def test_pairs_that_cannot_combine_are_refused(place: Place, given: list[str], why: str, capsys) -> None:
    assert place.train("pairs", *given) == errors.REFUSED
    assert why in " ".join(capsys.readouterr().err.split())


def test_plan_counts_the_teacher_and_knows_its_blocks(place: Place) -> None:
    config = configs.load(str(place.recipe), [*place.given(), *full(place)]).config
    made = parts.outline(config)
    teacher, own = made.family.networks[TEACHER], made.family.networks["unet"]
    assert teacher.facts == own.facts
    counted = static.count(config, made, config.mesh.resolved(1, 1))
    held = sum(each.kinds["frozen"] for each in counted.held if each.component == TEACHER)
    assert held == sum(4 * p.numel() for p in teacher.module.parameters()) > 0
    assert not hasattr(teacher.module.time_embedding.cond_proj, "weight")
    assert own.module.time_embedding.cond_proj.weight.numel()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_diffusers_gives_a_unet_the_same_scale(place: Place, tmp_path: Path) -> None:
    config = configs.load(str(place.recipe), [*place.given(), *full(place), "training.device=cpu"]).config
    made = parts.build(config)
    family: Family = made.family
    unet = family.components["unet"]
    torch.manual_seed(0)
    torch.nn.init.normal_(unet.time_embedding.cond_proj.weight, std=0.3)
    diffusion = made.objective.diffusion
    assert isinstance(diffusion, Diffusion)
    sampling = SamplingSettings(sampler="ddim", num_inference_steps=4, guidance_scale=7.5)
    family.export(tmp_path / "pipeline", diffusion, sampling)
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "pipeline", low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    shape, seeds = family.latent_shape((3, 32, 32)), [3, 4]
    noise = initial_noise(seeds, shape)
    found = {}
    for scale in (7.5, 2.0):
        sides = family.encode_prompts(prompts(["a", "b"]), (3, 32, 32), family.guidance.runs_null(scale))
        own = sampling.model_copy(update={"guidance_scale": scale})
        x0 = draw(diffusion, family.net.eval(), *sides, shape, seeds, own, guidance=family.guidance)
        found[scale] = family.decode(Latents(x0, prompts(["a", "b"]), seeds)).astype(int)
    options = {"num_inference_steps": 4, "guidance_scale": 7.5, "latents": noise, "output_type": "np"}
    theirs = (pipe(["a", "b"], height=32, width=32, **options).images * 255).round().astype(int)
    assert np.abs(found[7.5] - theirs).max() <= 2
    assert np.abs(found[7.5] - found[2.0]).max() > 2
    again = UNet2DConditionModel.from_pretrained(tmp_path / "pipeline" / "unet", low_cpu_mem_usage=False)
    assert again.config.time_cond_proj_dim == 32
