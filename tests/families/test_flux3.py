"""FLUX.3 klein: stock diffusers draws what is exported; captions, LoRAs and files of its authors mean the same; the
loss is that of its formulas; a flow map is sampled alone."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import flow_runs
import losses
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.loaders import single_file_utils
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from PIL import Image
from quick_cases import quick_where
from safetensors.torch import load_file, save_file
from tiny_families import flux3 as tiny
from tiny_models import prompts

from daguerre.cli import main
from daguerre.families.flux3 import NAMES
from daguerre.models.weights import original_files
from daguerre.objectives import flow
from daguerre.samplers.draw import initial_noise
from daguerre.types import Batch

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LORA = ["adapter.name=lora", "adapter.rank=2", "optimizer.learning_rate=1"]
TEXTS = [
    *("a red circle", "", " ", "A fox, in the snow.", "caf\u00e9 \u732b \U0001f98a", "a\nb\n", " spaces  around "),
    *("word " * 40, "x" * 100, "y" * 700),
]
SIZE = (3, SIDE_PX, SIDE_PX)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("flux3") / "flux3")


def model(base: Path, **given: Any) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(base), **tiny.reading(), **given}


def load(base: Path, **given: Any) -> Any:
    module = tiny_families.plugins.find("families", "flux3")
    return module.load(module.Settings.model_validate(model(base, **given)), 1)


def trained(place: Path, base: Path, *given: str) -> Path:
    return flow_runs.trained(place, {"family": "flux3", **model(base)}, {"shift": 6.93}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    noise = initial_noise([SEED], (16, SIDE_PX // 16, SIDE_PX // 16))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS}
    return tiny.drawn(pipe, "a red circle", noise, scale, **size)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.long), 3.5])
def test_the_modular_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, neg + scale (pos - neg), of which 1 is no guidance."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(tiny.opened(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1
    index = json.loads((run / "pipeline" / "modular_model_index.json").read_text())
    assert (index["_class_name"], index["_blocks_class_name"]) == ("Flux3ModularPipeline", "Flux3AutoBlocks")
    assert index["tokenizer"][:2] == ["transformers", "Qwen3VLProcessor"]
    assert (run / "pipeline" / "tokenizer" / "preprocessor_config.json").is_file()


def test_captions_are_read_as_the_pipeline_reads_them(base):
    """Ten captions in windows of 80 to 640 tokens, the last of them cut: the same tokens and features, with the
    padding that the transformer attends to."""
    text, pipe, lengths = load(base).text, tiny.opened(base), set()
    read = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    for caption in TEXTS:
        with torch.no_grad():
            expected = read(
                pipe.text_encoder, pipe.tokenizer, caption, max_sequence_length=640, hidden_states_layers=tiny.LAYERS
            )
            tokens = text.tokens([caption])
            found = text.features(tokens)
        turn = pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True
        )
        ids = pipe.tokenizer.tokenizer(turn, truncation=True, max_length=640).input_ids
        assert tokens["text_encoder_ids"].flatten()[: len(ids)].tolist() == ids
        assert tokens["text_encoder_counts"].item() == len(ids)
        assert {*found} == {"text"}
        torch.testing.assert_close(found["text"], expected, rtol=1e-4, atol=1e-5)
        lengths.add(expected.shape[1])
    assert lengths == {80, 160, 240, 640}
    assert {*text.truncated(TEXTS)} == {9}


@torch.no_grad()
def test_padding_changes_no_sample(base):
    """A batch of unequal captions equals each alone; the padding of a caption's own window is a part of the model."""
    family = load(base)
    x, s = torch.randn(4, 16, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0.1, 0.4, 0.7, 1.0])
    captions = ["a", "a large red circle " * 6, "", "a green star " * 12]
    cond, _ = family.encode_prompts(prompts(captions), SIZE)
    assert cond["text_mask"].sum(1).tolist() == [80, 160, 80, 160]
    together = family.net(x, s, cond)
    for row, caption in enumerate(captions):
        alone, _ = family.encode_prompts(prompts([caption]), SIZE)
        torch.testing.assert_close(family.net(x[row, None], s[row, None], alone)[0], together[row], rtol=0, atol=1e-6)
    cut = family.net(x[:1], s[:1], {"text": cond["text"][:1, :30]})
    assert (cut - together[:1]).abs().max() > 1e-3


@torch.no_grad()
def test_the_loss_is_that_of_its_formulas(base):
    """Written apart with diffusers' parts: the autoencoder's mean behind its norm, 2 x 2 pixels a token, the time of a
    quantile, and the squared error of eps - x0. One caption a call, as in the pipeline."""
    family, pipe = load(base), tiny.opened(base)
    keys = np.array([[1, 0, 0], [2, 0, 0], [3, 1, 0]], dtype=np.int64)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, *SIZE), dtype=np.uint8))
    captions = ["a large red circle " * 6, "", "a star"]
    sizes = np.array([[SIDE_PX, SIDE_PX, 0, 0, SIDE_PX, SIDE_PX]] * 3, dtype=np.int32)
    batch = Batch(keys, {"image": pixels}, captions, torch.ones(3), captions, sizes, {})
    objective = flow.build(flow.Settings.model_validate({"schedule": {"name": "linear_flow", "shift": 6.93}}))
    objective = objective.with_noise_conditioning("auto", 1.0)
    draws = objective.draws(5, keys, (16, SIDE_PX // 16, SIDE_PX // 16))
    ours = losses.loss_of(objective, family.net, *family.encode(batch), draws).loss_B

    vae = pipe.vae
    z = vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    z = z.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    x0 = (z - vae.bn.running_mean.view(1, -1, 1, 1)) / (vae.bn.running_var.view(1, -1, 1, 1) + 1e-4).sqrt()
    t = torch.sigmoid(torch.distributions.Normal(0.0, 1.0).icdf(draws.quantile.double()))
    s = (6.93 * t / (1 + 5.93 * t)).float()
    plain = Flux3Transformer2DModel.from_pretrained(base / "transformer").eval()
    rows, columns = torch.meshgrid(torch.arange(SIDE_PX // 16) / 2, torch.arange(SIDE_PX // 16) / 2, indexing="ij")
    img_ids = torch.stack([torch.zeros(rows.numel()), rows.flatten(), columns.flatten(), torch.zeros(rows.numel())], 1)
    for row, caption in enumerate(captions):
        text = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            pipe.text_encoder, pipe.tokenizer, caption, hidden_states_layers=tiny.LAYERS
        )
        txt_ids = torch.zeros(text.shape[1], 4)
        txt_ids[:, 3] = torch.arange(text.shape[1])
        noisy = (1 - s[row]) * x0[row] + s[row] * draws.noise[row]
        predicted = plain(noisy.flatten(1).mT[None], text, s[row, None], img_ids, txt_ids, return_dict=False)[0]
        expected = (predicted[0] - (draws.noise[row] - x0[row]).flatten(1).mT).square().mean()
        torch.testing.assert_close(ours[row], expected, rtol=1e-5, atol=0)


def test_noise_levels_are_those_of_its_scheduler(base):
    """Which its blocks make: the folder has none."""
    family = load(base)
    section = family.pretrained.settings.schedulers.objective_of(family.pretrained.scheduler())
    assert section == {"name": "flow", "schedule": {"name": "linear_flow", "shift": 6.93}}
    schedule = flow.build(flow.Settings.model_validate(section)).schedule
    scheduler = tiny.opened(base).scheduler
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 10, 10))
    uniform = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    np.testing.assert_allclose(schedule.path(schedule.time(uniform))[1].flip(0), scheduler.sigmas[:-1], rtol=1e-6)


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
def test_a_lora_means_the_same_in_diffusers(base, tmp_path, capsys):
    run = trained(tmp_path, base, *LORA, "adapter.targets=attention+ff")
    image = drawn(run, tmp_path / "out", 3.5)
    pipe = tiny.opened(base)
    plain = theirs(pipe, 3.5)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.5)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"
    kohya = run / "adapter" / "kohya.safetensors"
    assert "lora_unet_content_mode_blocks_image_0_q_proj.lora_up.weight" in load_file(kohya)
    assert not any("image_cond" in name for name in load_file(kohya)), "without reference images nothing reaches them"
    again = generated(base, tmp_path / "used", f"use={{{kohya}: 1}}", "guidance_scale=3.5")
    assert np.abs(image - again).max() <= 2


@torch.no_grad()
def test_a_lora_of_other_programs_means_what_it_means_in_diffusers(base, tmp_path):
    """ai-toolkit's and ComfyUI's: the authors' names behind `diffusion_model.`, without alpha."""
    draw, tensors = torch.Generator().manual_seed(0), {}
    shapes = {"content_mode_blocks.image.0.q_proj": (64, 64), "txt_mode_blocks.0.mlp_in": (384, 64)}
    for name, (rows, columns) in (shapes | {"single_blocks.1.attn_out": (64, 64)}).items():
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(2, columns, generator=draw)
        tensors[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(rows, 2, generator=draw)
    save_file(tensors, tmp_path / "lora.safetensors")
    pipe = tiny.opened(base)
    plain = theirs(pipe, 1.0)
    pipe.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    used = generated(base, tmp_path / "used", f"use={{{tmp_path / 'lora.safetensors'}: 1}}", "guidance_scale=1")
    assert np.abs(used - theirs(pipe, 1.0)).max() <= 2
    assert np.abs(used - plain).max() > 20


def generated(base: Path, out: Path, *given: str) -> np.ndarray:
    """The image of `daguerre generate` of the pipeline itself."""
    more = [f"height={SIDE_PX}", f"width={SIDE_PX}", f"num_inference_steps={STEPS}", f"seed={SEED}", f"out={out}"]
    text = [f"model.{name}={value}" for name, value in tiny.reading().items()]
    assert main.run(["generate", str(base), "prompt=a red circle", *more, *text, *given]) == 0
    return np.asarray(Image.open(out / "000.png")).astype(int)


@pytest.mark.parametrize(
    ("prefix", "flow_map"),
    quick_where(
        [("", False), ("model.diffusion_model.", True)].__contains__,
        product(["", "model.diffusion_model."], [False, True]),
    ),
)
def test_a_file_of_the_transformer_alone(prefix, flow_map, base, tmp_path):
    """A flow map's is known by its second embedding of times, whatever the base is; what helped to train it is left
    out."""
    other = tiny.write(tmp_path / "other", seed=7, flow_map=flow_map)
    weights, path = load_file(other / WEIGHTS), tmp_path / "klein.safetensors"
    original_files.write(path, weights, NAMES.links, prefix=prefix)
    save_file({**load_file(path), f"{prefix}repa_projectors.0.weight": torch.ones(2, 2)}, path)
    family = load(base, transformer=str(path))
    found = family.components["transformer"].state_dict()
    plain = {name.removeprefix(prefix): value for name, value in load_file(path).items()}
    converted = single_file_utils.convert_flux3_transformer_checkpoint_to_diffusers(plain)
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )
    assert bool(family.distilled) == flow_map


def test_a_flow_map_is_told_where_a_step_ends_and_not_trained(tmp_path, capsys):
    base = tiny.write(tmp_path / "map", flow_map=True)
    image = generated(base, tmp_path / "a")
    assert np.abs(image - theirs(tiny.opened(base), 1.0)).max() <= 2
    capsys.readouterr()
    with pytest.raises(AssertionError):
        generated(base, tmp_path / "b", "guidance_scale=3.5")
    assert "takes no guidance" in capsys.readouterr().err
    assert np.array_equal(generated(base, tmp_path / "c", "sampler=euler"), image)
    for other in ("sampler=heun", "sampler=lcm", "eta=0.5"):
        with pytest.raises(AssertionError):
            generated(base, tmp_path / "b", other)
        assert "distilled to go from one noise level straight to the next" in capsys.readouterr().err
    with pytest.raises(AssertionError):
        trained(tmp_path, base)
    assert "train black-forest-labs/flux-3-image-klein-base" in capsys.readouterr().err


def test_a_published_name_says_that_its_weights_are_a_flow_map(tmp_path, capsys):
    """Without a network, by the numbers that come with the package."""
    given = ["model.pretrained_model_name_or_path=black-forest-labs/flux-3-image-klein", f"output_dir={tmp_path}"]
    assert main.run(["train", "flux3_klein_lora", *given, "run_name=x", "--dry-run"]) == 2
    assert "train black-forest-labs/flux-3-image-klein-base" in capsys.readouterr().err
