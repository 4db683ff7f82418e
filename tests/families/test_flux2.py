"""FLUX.2 klein: stock diffusers draws what is exported, files of others mean the same weights, distilled weights are
sampled alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.loaders import single_file_utils
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from safetensors.torch import load_file, save_file
from tiny_families import flux2 as tiny

from daguerre.adapters import lora
from daguerre.adapters.adapter import attach
from daguerre.cli import main
from daguerre.models.export.about import UNKNOWN
from daguerre.models.lora_files.addition import merged
from daguerre.models.lora_files.read import read
from daguerre.models.parts.flux_names import FLUX2
from daguerre.models.weights import original_files
from daguerre.objectives import eps
from daguerre.samplers.draw import initial_noise
from daguerre.samplers.settings import SamplingSettings, empirical_shift

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LORA = ["adapter.name=lora", "adapter.rank=2", "optimizer.learning_rate=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("flux2") / "flux2")


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "flux2", "pretrained_model_name_or_path": str(base), **tiny.reading()}
    shifts = {"resolution_shift": {"name": "linear_mu"}}
    return flow_runs.trained(place, model, shifts, "sampling.shift=empirical", *given)


def theirs(pipe: Any, scale: float, **more: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (16, SIDE_PX // 16, SIDE_PX // 16))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS}
    text = {"max_sequence_length": tiny.TOKENS, "text_encoder_out_layers": tiny.LAYERS}
    image = pipe(
        prompt="a red circle", guidance_scale=scale, latents=noise, output_type="np", **size, **text, **more
    ).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.long), 4.0])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(Flux2KleinPipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


def test_the_shift_of_sampling_is_the_pipelines():
    for px, steps in ((1024, 50), (1024, 4), (512, 28), (2048, 50)):
        assert np.log(empirical_shift(px**2, steps)) == pytest.approx(compute_empirical_mu((px // 16) ** 2, steps))


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
@pytest.mark.parametrize(
    "name", ["pytorch_lora_weights.safetensors", pytest.param("kohya.safetensors", marks=pytest.mark.long)]
)
def test_a_lora_means_the_same_in_diffusers_in_both_layouts(name, base, tmp_path):
    run = trained(tmp_path, base, *LORA, "adapter.targets=attention+ff")
    image = drawn(run, tmp_path / "out", 4.0)
    pipe = Flux2KleinPipeline.from_pretrained(base)
    plain = theirs(pipe, 4.0)
    pipe.load_lora_weights(run / "adapter", weight_name=name)
    other = theirs(pipe, 4.0)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"
    few = tiny.write(tmp_path / "few", seed=1, is_distilled=True)
    reading = [f"model.{name}={value}" for name, value in tiny.reading().items()]
    pipe = Flux2KleinPipeline.from_pretrained(few)
    pipe.load_lora_weights(run / "adapter", weight_name=name)
    assert np.abs(flow_runs.drawn_on(few, run, tmp_path / "of_few", *reading) - theirs(pipe, 1.0)).max() <= 2


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "klein.safetensors"
    original_files.write(path, weights, FLUX2.links, prefix=prefix)
    module = tiny_families.plugins.find("families", "flux2")
    settings = {"pretrained_model_name_or_path": str(base), "transformer": str(path), **tiny.reading()}
    found = module.load(module.Settings.model_validate(settings), 1).components["transformer"].state_dict()
    plain = {name.removeprefix(prefix): value for name, value in load_file(path).items()}
    converted = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers(plain)
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )


def test_distilled_weights_are_sampled_without_guidance_and_not_trained(tmp_path, capsys):
    base = tiny.write(tmp_path / "klein", is_distilled=True)
    text = [f"model.{name}={value}" for name, value in tiny.reading().items()]
    args = [
        "generate",
        str(base),
        "prompt=a red circle",
        f"seed={SEED}",
        f"height={SIDE_PX}",
        f"width={SIDE_PX}",
        *text,
    ]
    assert main.run([*args, "guidance_scale=3.5", f"out={tmp_path / 'a'}"]) != 0
    assert "takes no guidance" in capsys.readouterr().err
    assert main.run([*args, f"num_inference_steps={STEPS}", f"out={tmp_path / 'b'}"]) == 0
    image = np.asarray(flow_runs.Image.open(tmp_path / "b" / "000.png")).astype(int)
    assert np.abs(image - theirs(Flux2KleinPipeline.from_pretrained(base), 1.0)).max() <= 2
    capsys.readouterr()
    with pytest.raises(AssertionError):
        trained(tmp_path, base)
    assert "train black-forest-labs/FLUX.2-klein-base-4B" in capsys.readouterr().err


@torch.no_grad()
def test_layers_that_diffusers_leaves_out_of_kohyas_layout_are_said(base, tmp_path):
    """Modulations and the last norm's; in the other layout diffusers finds all."""
    family = tiny_families.load("flux2", tmp_path)
    family = family.training(["transformer"])
    (trainable,) = attach({"lora": lora.Settings(rank=2, targets="all")}, family, 0).trainables.values()
    for name, parameter in trainable.net.named_parameters():
        if "lora_B" in name:
            parameter.fill_(0.1)
    (line,) = trainable.export(tmp_path / "adapter", eps.build(eps.Settings()), SamplingSettings(), UNKNOWN)
    assert "would find no double_stream_modulation_img.linear and 3 more layers of Flux2Transformer2DModel" in line
    found = {}
    for name in ("pytorch_lora_weights.safetensors", "kohya.safetensors"):
        pipe = Flux2KleinPipeline.from_pretrained(base)
        pipe.load_lora_weights(tmp_path / "adapter", weight_name=name)
        found[name] = {n for n, p in pipe.transformer.named_parameters() if "lora_B" in n and p.abs().max() > 0}
    every, less = found.values()
    assert len(every - less) == 4
    assert all("modulation" in name or "norm_out" in name for name in every - less)


def test_a_published_name_says_that_its_weights_were_distilled(tmp_path, capsys):
    """Without a network, and before anything is downloaded where only a plan is asked for."""
    given = ["model.pretrained_model_name_or_path=black-forest-labs/FLUX.2-klein-9B", f"output_dir={tmp_path}"]
    assert main.run(["train", "flux2_klein_9b_lora", *given, "run_name=x", "--dry-run"]) == 2
    assert "train black-forest-labs/FLUX.2-klein-base-9B" in capsys.readouterr().err


def test_a_file_that_does_not_say_whether_it_was_distilled_asks(base, tmp_path, capsys):
    path = tmp_path / "klein.safetensors"
    original_files.write(path, load_file(base / WEIGHTS), FLUX2.links)
    trained(tmp_path, base, f"model.transformer={path}", "training.duration=1 step")
    assert "does not say whether it was distilled" in capsys.readouterr().out


@torch.no_grad()
def test_a_lora_of_other_programs_is_read_and_means_what_it_means_in_diffusers(base, tmp_path):
    """ai-toolkit's and ComfyUI's: the authors' names behind `diffusion_model.`, attention fused, no alpha."""
    draw, tensors = torch.Generator().manual_seed(0), {}
    shapes = {"double_blocks.0.img_attn.qkv": (192, 64), "double_blocks.0.txt_attn.proj": (64, 64)}
    shapes |= {"double_blocks.0.img_mlp.0": (384, 64), "single_blocks.0.linear1": (576, 64)}
    for name, (rows, columns) in (shapes | {"single_blocks.0.linear2": (64, 256)}).items():
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(2, columns, generator=draw)
        tensors[f"diffusion_model.{name}.lora_B.weight"] = 0.1 * torch.randn(rows, 2, generator=draw)
    save_file(tensors, tmp_path / "lora.safetensors")
    pipe = Flux2KleinPipeline.from_pretrained(base)
    pipe.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    pipe.fuse_lora()
    theirs = {name.replace(".base_layer", ""): value for name, value in pipe.transformer.named_parameters()}
    plain = Flux2Transformer2DModel.from_pretrained(base / "transformer")
    held, changed = dict(plain.named_parameters()), set()
    for each in read(tmp_path / "lora.safetensors", {"transformer": plain})["transformer"]:
        weight = held[each.name]
        weight.copy_(merged(weight, [(each, 1.0)], "transformer"))
        changed.add(each.name)
        torch.testing.assert_close(weight, theirs[each.name], rtol=1e-5, atol=1e-6)
    assert len(changed) == 7, "three of them were one"
