"""Z-Image: stock diffusers draws what is exported; files of its authors and LoRAs of others mean the same weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_texts
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders import single_file_utils
from flow_runs import SEED, SIDE_PX, STEPS, drawn, drawn_on
from quick_cases import quick_where
from safetensors.torch import load_file
from tiny_families import z_image as tiny
from tiny_models import prompts

from daguerre import errors
from daguerre.cli import main
from daguerre.families import z_image
from daguerre.families.z_image import NAMES
from daguerre.generation import load
from daguerre.models.parts.z_image import TextToImage
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

TOKENS = 64
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("z_image") / "z_image")


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "z_image", "pretrained_model_name_or_path": str(base), "max_sequence_length": TOKENS}
    return flow_runs.trained(place, model, {"shift": 6.0}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (4, SIDE_PX // 8, SIDE_PX // 8))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": TOKENS}
    image = pipe(["a red circle"], guidance_scale=scale, latents=noise, output_type="np", **size).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.long), 3.0])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, pos + scale (pos - neg), of which 0 is no guidance."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(ZImagePipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
def test_a_lora_means_the_same_in_diffusers(base, tmp_path):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=attention+ff", "optimizer.learning_rate=1"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.0)
    pipe = ZImagePipeline.from_pretrained(base)
    plain = theirs(pipe, 3.0)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.0)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"
    turbo = tiny.distilled(tmp_path / "turbo")
    few = drawn_on(turbo, run, tmp_path / "few", f"model.max_sequence_length={TOKENS}")
    pipe = ZImagePipeline.from_pretrained(turbo)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    assert np.abs(few - theirs(pipe, 0.0)).max() <= 2


@pytest.mark.long
def test_turbo_is_known_by_its_scheduler_and_generates_in_eight_steps(tmp_path, capsys):
    turbo = tiny.distilled(tmp_path / "turbo")
    usual = load.find(str(turbo), [], False).config([]).config.sampling
    assert (usual.num_inference_steps, usual.guidance_scale) == (8, 0)
    with pytest.raises(AssertionError):
        trained(tmp_path, turbo)
    said = capsys.readouterr().err
    assert "train Tongyi-MAI/Z-Image, and generate" in said
    assert "model.is_distilled=false says so" in said
    given = ["model.pretrained_model_name_or_path=Tongyi-MAI/Z-Image-Turbo", f"output_dir={tmp_path}", "run_name=x"]
    assert main.run(["train", "z_image_lora", *given, "--dry-run"]) == errors.REFUSED
    assert "train Tongyi-MAI/Z-Image, and generate" in capsys.readouterr().err


@pytest.mark.long
def test_what_is_said_to_be_no_turbo_is_trained_and_exported_as_none(tmp_path):
    """With the same scheduler."""
    run = trained(
        tmp_path, tiny.distilled(tmp_path / "turbo"), "model.is_distilled=false", "objective.schedule.shift=3"
    )
    export = (run / "pipeline").rename(tmp_path / "exported")
    assert load.find(str(export), [], False).config([]).config.sampling.num_inference_steps == 50
    ZImagePipeline.from_pretrained(export)


@pytest.mark.parametrize(
    ("size", "lengths"),
    quick_where(
        [((8, 16), (11, 11)), ((6, 4), (3, 11, 32, 33))].__contains__,
        product([(8, 16), (6, 4)], [(11, 11), (3, 11, 32, 33), (40, 64)]),
    ),
)
def test_the_transformer_computes_what_the_librarys_own_does(size, lengths):
    """Of texts of these lengths, in a batch with padding, and of images that fill 32 tokens or not."""
    own = tiny_texts.seeded(lambda: TextToImage(**tiny.NUMBERS))
    stock = ZImageTransformer2DModel(**tiny.NUMBERS)
    for name, p in own.named_parameters():
        if "norm" in name or "pad_token" in name:
            p.data = 1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    stock.load_state_dict(own.state_dict())
    g = torch.Generator().manual_seed(1)
    x = torch.randn(len(lengths), 4, *size, generator=g)
    texts = [torch.randn(length, tiny_texts.WIDTH, generator=g) for length in lengths]
    noise = torch.linspace(0.2, 0.8, len(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    y = own(x, noise, padded, mask if len({*lengths}) > 1 else None)
    expected = torch.stack(stock(x=[*x[:, :, None]], t=1 - noise, cap_feats=texts, return_dict=False)[0])[:, :, 0]
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-6)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(own.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_a_batch_of_unequal_captions_is_each_alone(base):
    settings = z_image.Settings(pretrained_model_name_or_path=str(base), max_sequence_length=TOKENS)
    family = z_image.load(settings, 0)
    texts = ["a red circle on a white table", "", "x" * 60, "Two cats, one dog."]
    cond, _ = family.encode_prompts(prompts(texts), (3, 64, 64))
    assert "text_mask" in cond
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    time = torch.tensor([0.2, 0.4, 0.6, 0.8])
    together = family.net(x, time, cond)
    for row, text in enumerate(texts):
        alone, _ = family.encode_prompts(prompts([text]), (3, 64, 64))
        assert "text_mask" not in alone
        y = family.net(x[row : row + 1], time[row : row + 1], alone)
        torch.testing.assert_close(together[row], y[0], rtol=0, atol=1e-6)


def test_the_transformer_has_places_for_as_many_tokens_as_the_family_allows(base):
    settings = z_image.Settings(pretrained_model_name_or_path=str(base), max_sequence_length=992)
    net = z_image.load(settings, 0).components["transformer"]
    x, time = torch.zeros(1, 4, 8, 8), torch.tensor([0.5])
    assert net(x, time, torch.zeros(1, 992, net.config.cap_feat_dim)).isfinite().all()
    with pytest.raises(IndexError):
        net(x, time, torch.zeros(1, 993, net.config.cap_feat_dim))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "z_image.safetensors"
    original_files.write(path, weights, NAMES.links, prefix=prefix)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    found = original_files.read(path, NAMES, shapes)
    converted = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers(load_file(path))
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )
