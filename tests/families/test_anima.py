"""Anima: stock diffusers draws what is exported; captions, files of its authors, LoRAs and the loss mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flow_runs
import losses
import modular_pipelines
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders import single_file_utils
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_families import anima as tiny
from tiny_models import prompts

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.models.parts.anima_networks import CONDITIONER_NAMES, TRANSFORMER_NAMES
from daguerre.models.weights import original_files
from daguerre.objectives import flow
from daguerre.samplers.draw import initial_noise
from daguerre.types import Batch

WEIGHTS = "diffusion_pytorch_model.safetensors"
CAPTIONS = [
    *("a red circle", "", " ", "A fox, in the snow.", "caf\u00e9 \u732b \U0001f98a", "a\nb\n", " spaces  around "),
    *("word " * 40, "x" * 60, "1girl, red_hair, <|im_end|>"),
]
SIZE = (3, SIDE_PX, SIDE_PX)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("anima") / "anima")


def model(base: Path, **given: Any) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(base), "max_sequence_length": tiny.WINDOW, **given}


def load(base: Path, **given: Any) -> Any:
    module = tiny_families.plugins.find("families", "anima")
    return module.load(module.Settings.model_validate(model(base, **given)), 1)


def trained(place: Path, base: Path, *given: str) -> Path:
    return flow_runs.trained(place, {"family": "anima", **model(base)}, {"shift": 3.0}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    noise = initial_noise([SEED], (16, SIDE_PX // 8, SIDE_PX // 8))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": tiny.WINDOW}
    return modular_pipelines.drawn(pipe, ["a red circle"], noise, scale, **size)[0]


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.long), 4.0])
def test_the_modular_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, neg + scale (pos - neg), of which 1 is no guidance; also moved to another place."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    (run / "pipeline").rename(tmp_path / "moved")
    assert np.abs(image - theirs(modular_pipelines.opened(tmp_path / "moved"), scale)).max() <= 2
    assert image.std() > 1
    numbers = json.loads((tmp_path / "moved" / "transformer" / "config.json").read_text())
    numbers.pop("_name_or_path")
    assert numbers == json.loads((base / "transformer" / "config.json").read_text())


def test_captions_are_read_as_the_pipeline_reads_them(base):
    """Ten captions, of which some are cut: the same tokens of both tokenizers, and the same conditioning."""
    text, pipe = load(base).text, modular_pipelines.opened(base)
    for caption in CAPTIONS:
        with torch.no_grad():
            read = AnimaTextEncoderStep.encode_prompt(
                pipe, caption, prepare_unconditional_embeds=False, max_sequence_length=tiny.WINDOW, device="cpu"
            )
            names = {"source_hidden_states": "qwen_prompt_embeds", "source_attention_mask": "qwen_attention_mask"}
            names |= {"target_input_ids": "t5_input_ids", "target_attention_mask": "t5_attention_mask"}
            expected = pipe.text_conditioner(**{ours: read[name] for ours, name in names.items()})
            tokens = text.tokens([caption])
            found = text.features(tokens)["text"]
        ids = pipe.tokenizer([caption], truncation=True, max_length=tiny.WINDOW).input_ids[0]
        assert tokens["text_encoder_ids"].flatten()[: len(ids)].tolist() == ids
        assert tokens["text_encoder_counts"].item() == len(ids)
        assert tokens["t5_ids"][:, : tokens["t5_lengths"]].tolist() == read["t5_input_ids"].tolist()
        assert found.shape == expected.shape == (1, tiny.WINDOW, 32)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {*text.truncated(CAPTIONS)} == {7, 8}


@torch.no_grad()
def test_padding_changes_no_sample(base):
    """A batch of unequal captions equals each alone; the zeros behind a caption are a part of the model."""
    family = load(base)
    x, s = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.1, 0.4, 0.7, 1.0])
    captions = ["a", "a large red circle", "", "a green star on grey paper"]
    cond, _ = family.encode_prompts(prompts(captions), SIZE)
    together = family.net(x, s, cond)
    for row, caption in enumerate(captions):
        alone, _ = family.encode_prompts(prompts([caption]), SIZE)
        assert {name: rows.shape for name, rows in alone.items()} == {"text": (1, tiny.WINDOW, 32)}
        torch.testing.assert_close(family.net(x[row, None], s[row, None], alone)[0], together[row], rtol=0, atol=1e-6)
    cut = family.net(x, s, {"text": cond["text"][:, :30]})
    assert (cut - together).abs().max() > 1e-3


@torch.no_grad()
def test_the_loss_is_that_of_its_formulas(base):
    """Written apart with diffusers' parts: the posterior's mean in the autoencoder's numbers, the time of a quantile,
    the mask of padding resized, and the squared error of eps - x0."""
    family, pipe = load(base), modular_pipelines.opened(base)
    keys = np.array([[1, 0, 0], [2, 0, 0], [3, 1, 0]], dtype=np.int64)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, *SIZE), dtype=np.uint8))
    captions = ["a large red circle", "", "a star"]
    sizes = np.array([[SIDE_PX, SIDE_PX, 0, 0, SIDE_PX, SIDE_PX]] * 3, dtype=np.int32)
    batch = Batch(keys, {"image": pixels}, captions, torch.ones(3), captions, sizes, {})
    objective = flow.build(flow.Settings.model_validate({"schedule": {"name": "linear_flow", "shift": 3.0}}))
    objective = objective.with_noise_conditioning("auto", 1.0)
    draws = objective.draws(5, keys, (16, SIDE_PX // 8, SIDE_PX // 8))
    ours = losses.loss_of(objective, family.net, *family.encode(batch), draws).loss_B

    numbers = pipe.vae.config
    mean, std = (torch.tensor(numbers[name]).view(1, 16, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    z = pipe.vae.encode((pixels.float() / 127.5 - 1)[:, :, None]).latent_dist.mode()
    x0, eps = (z - mean) / std, draws.noise[:, :, None]
    t = torch.sigmoid(torch.distributions.Normal(0.0, 1.0).icdf(draws.quantile.double()))
    s = (3 * t / (1 + 2 * t)).float()
    read = AnimaTextEncoderStep.encode_prompt(pipe, captions, prepare_unconditional_embeds=False, device="cpu")
    text = pipe.text_conditioner(
        read["qwen_prompt_embeds"], read["t5_input_ids"], read["t5_attention_mask"], read["qwen_attention_mask"]
    )
    at = s.view(-1, 1, 1, 1, 1)
    predicted = pipe.transformer(
        (1 - at) * x0 + at * eps, s, text, padding_mask=torch.zeros(1, 1, SIDE_PX, SIDE_PX), return_dict=False
    )[0]
    expected = (predicted - (eps - x0)).square().mean((1, 2, 3, 4))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


def test_noise_levels_are_those_of_its_scheduler(base):
    family = load(base)
    section = family.pretrained.settings.schedulers.objective_of(family.pretrained.scheduler())
    assert section == {"name": "flow", "schedule": {"name": "linear_flow", "shift": 3.0}}
    schedule = flow.build(flow.Settings.model_validate(section)).schedule
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(base / "scheduler")
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 10, 10))
    uniform = np.linspace(0.1, 1, 10)
    levels = 3 * uniform / (1 + 2 * uniform)
    np.testing.assert_allclose(scheduler.sigmas[:-1].numpy(), levels[::-1], rtol=1e-6)
    _, s = schedule.path(schedule.time(torch.from_numpy(uniform)))
    np.testing.assert_allclose(s.numpy(), levels, rtol=1e-6)


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
@pytest.mark.parametrize("components", ["transformer", "both"])
def test_a_lora_means_the_same_in_diffusers(components, base, tmp_path, capsys):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=attention+ff", "optimizer.learning_rate=1"]
    more += ["adapter.ranks={text_conditioner: 2}"] if components == "both" else []
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.0)
    pipe = modular_pipelines.opened(base)
    plain = theirs(pipe, 3.0)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.0)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"
    kohya = load_file(run / "adapter" / "kohya.safetensors")
    assert any(name.startswith("lora_unet_llm_adapter_blocks_") for name in kohya) == (components == "both")
    assert "lora_unet_blocks_1_cross_attn_output_proj.lora_up.weight" in kohya
    again = generated(base, tmp_path / "used", f"use={{{run / 'adapter' / 'kohya.safetensors'}: 1}}")
    assert np.abs(image - again).max() <= 2
    assert "kohya's it would find no layer of" in capsys.readouterr().out


def test_a_lora_of_both_networks_is_converted_and_merged_by_its_base(base, tmp_path):
    lora, other, merged = (tmp_path / name for name in ("lora.safetensors", "kohya.safetensors", "merged"))
    layers = {"transformer": "transformer_blocks.1.attn2.to_k", "text_conditioner": "blocks.0.self_attn.o_proj"}
    weights = {part: load_file(base / part / WEIGHTS) for part in layers}
    tensors, expected = {}, {}
    for part, layer in layers.items():
        weight = weights[part][f"{layer}.weight"]
        down, up = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        tensors |= {f"{part}.{layer}.lora_A.weight": down, f"{part}.{layer}.lora_B.weight": up}
        expected[part] = weight + 0.5 * up @ down
    save_file(tensors, lora)
    assert main.run(["convert", "lora", str(lora), "format=kohya", f"base={base}", f"out={other}"]) == errors.DONE
    found = {name.partition(".")[0] for name in load_file(other)}
    assert found == {"lora_unet_blocks_1_cross_attn_k_proj", "lora_unet_llm_adapter_blocks_0_self_attn_o_proj"}
    assert main.run(["convert", "merge", str(base), f"use={{{other}: 0.5}}", f"out={merged}"]) == errors.DONE
    for part, layer in layers.items():
        torch.testing.assert_close(load_file(merged / part / WEIGHTS)[f"{layer}.weight"], expected[part])


def generated(base: Path, out: Path, *given: str) -> np.ndarray:
    """The image of `daguerre generate` of the pipeline itself."""
    more = [f"height={SIDE_PX}", f"width={SIDE_PX}", "guidance_scale=3", f"num_inference_steps={STEPS}"]
    more += [f"model.max_sequence_length={tiny.WINDOW}", f"seed={SEED}", f"out={out}", *given]
    assert main.run(["generate", str(base), "prompt=a red circle", *more]) == errors.DONE
    return np.asarray(Image.open(out / "000.png")).astype(int)


def single_file(path: Path, base: Path, prefix: str = "net.") -> Path:
    """A file as its authors publish it: both networks, and a table of positions that is no weight."""
    links = {"transformer": TRANSFORMER_NAMES.links, "text_conditioner": CONDITIONER_NAMES.links}
    for name, own in links.items():
        original_files.write(path.with_suffix(f".{name}"), load_file(base / name / WEIGHTS), own, prefix=prefix)
    both = {key: value for name in links for key, value in load_file(path.with_suffix(f".{name}")).items()}
    save_file({**both, f"{prefix}pos_embedder.seq": torch.arange(8.0)}, path)
    return path


@pytest.mark.parametrize(
    "prefix", ["net.", *(pytest.param(p, marks=pytest.mark.long) for p in ("model.diffusion_model.", ""))]
)
def test_a_file_of_its_authors_holds_both_networks(prefix, base, tmp_path):
    other = tiny.write(tmp_path / "other", seed=7)
    path = single_file(tmp_path / "anima.safetensors", other, prefix)
    family = load(base, transformer=str(path))
    for name in ("transformer", "text_conditioner"):
        weights, found = load_file(other / name / WEIGHTS), family.components[name].state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) for key, value in weights.items())
    stays = load(base, transformer=str(path), text_conditioner=str(base))
    own = load_file(base / "text_conditioner" / WEIGHTS)
    assert torch.equal(stays.components["text_conditioner"].state_dict()["norm.weight"], own["norm.weight"])
    converted = single_file_utils.convert_cosmos_transformer_checkpoint_to_diffusers(load_file(path))
    if prefix != "model.diffusion_model.":  # diffusers knows files with the authors' prefix alone
        weights = load_file(other / "transformer" / WEIGHTS)
        assert all(torch.equal(converted[key], value) for key, value in weights.items())


def test_a_file_without_the_text_conditioner_says_how_it_is_used(base, tmp_path):
    path = tmp_path / "transformer.safetensors"
    original_files.write(path, load_file(base / "transformer" / WEIGHTS), TRANSFORMER_NAMES.links, prefix="net.")
    with pytest.raises(UserError, match=r"set model\.text_conditioner to the place of the base"):
        load(base, transformer=str(path))
    assert load(base, transformer=str(path), text_conditioner=str(base)).components
