"""Stable Diffusion's family: what it loads, encodes and decodes, beside diffusers' and transformers' own calls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from safetensors.torch import load_file
from tiny_models import MAX_TOKENS, TEXT_WIDTH, TINY_UNET, latents, prompts
from transformers import CLIPTextModel, CLIPTokenizer

from daguerre import keys as keyed
from daguerre.families import sd
from daguerre.models.family import Family
from daguerre.models.weights import resolve
from daguerre.types import Batch

CAPTIONS = ["a red circle", "", "blue"]


def load(folder: Path, seed: int = 1, **settings: object) -> Family:
    return sd.load(sd.Settings(pretrained_model_name_or_path=str(folder), **settings), seed)


@pytest.fixture(scope="module")
def family(tiny_sd: Path) -> Family:
    return load(tiny_sd)


def batch(family: Family, ids: list[int], captions: list[str], seed: int = 5) -> Batch:
    keys = np.array([[i, 0, 0] for i in ids])
    random = np.random.default_rng(0).integers(0, 256, (64, 3, 16, 16), dtype=np.uint8)
    pixels = torch.from_numpy(random[[i % 64 for i in ids]])
    draws = family.random_inputs(seed, keys, (3, 16, 16))
    names, sizes = [str(i) for i in ids], np.zeros((len(ids), 6))
    return Batch(keys, {"image": pixels}, captions, torch.ones(len(ids)), names, sizes, draws)


def same(x: torch.Tensor, y: torch.Tensor, tolerance: float = 2e-6) -> bool:
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


def test_latents_are_those_of_diffusers(family, tiny_sd):
    """z = scale (mean + std noise), by the autoencoder's own class, on pixels in [-1, 1]."""
    given = batch(family, [3, 4, 5], CAPTIONS)
    x0, _ = family.encode(given)
    vae = AutoencoderKL.from_pretrained(tiny_sd / "vae", low_cpu_mem_usage=False)
    with torch.no_grad():
        posterior = vae.encode(given.pixels_BCHW.float() / 127.5 - 1).latent_dist
    noise = torch.from_numpy(keyed.batch_normals(5, "vae", given.keys, (4, 8, 8)))
    assert x0.shape == (3, *family.latent_shape((3, 16, 16)))
    assert x0.dtype == torch.float32
    assert same(x0, vae.config.scaling_factor * (posterior.mean + posterior.std * noise))


def test_without_the_posterior_latents_are_the_mean(tiny_sd):
    family = load(tiny_sd, sample_posterior=False)
    given = batch(family, [3], ["x"])
    assert given.draws == {}
    with torch.no_grad():
        mean = family.images.net.encode(given.pixels_BCHW.float() / 127.5 - 1).latent_dist.mean
    assert same(family.encode(given)[0], family.images.net.config.scaling_factor * mean)


def test_text_is_the_last_hidden_state_of_all_tokens(family, tiny_sd):
    encoder = CLIPTextModel.from_pretrained(tiny_sd / "text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(tiny_sd / "tokenizer")
    ids = tokenizer(CAPTIONS, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected = encoder(ids.input_ids)[0]
    _, cond = family.encode(batch(family, [0, 1, 2], CAPTIONS))
    assert cond["text"].shape == (3, MAX_TOKENS, TEXT_WIDTH)
    assert same(cond["text"], expected)
    assert torch.equal(cond["text"], family.encode_prompts(prompts(CAPTIONS), (3, 16, 16))[0]["text"])


def test_a_sample_depends_on_its_own_row_alone(family):
    together, text = family.encode(batch(family, [7, 8, 9], CAPTIONS))
    alone, text_alone = family.encode(batch(family, [8], CAPTIONS[1:2]))
    assert same(alone[0], together[1])
    assert same(text_alone["text"][0], text["text"][1])


def test_posterior_noise_follows_the_key(family):
    draw = family.random_inputs(5, np.array([[7, 0, 0], [8, 0, 0], [7, 1, 0]]), (3, 16, 16))["posterior"]
    again = family.random_inputs(5, np.array([[7, 0, 0]]), (3, 16, 16))["posterior"]
    assert torch.equal(draw[0], again[0])
    assert not torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert not torch.equal(draw[0], family.random_inputs(6, np.array([[7, 0, 0]]), (3, 16, 16))["posterior"][0])


def test_encode_stays_in_float32_under_autocast_and_without_gradient(family):
    given = batch(family, [1], ["x"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x0, cond = family.encode(given)
    plain, plain_cond = family.encode(given)
    assert torch.equal(x0, plain)
    assert torch.equal(cond["text"], plain_cond["text"])
    assert not x0.requires_grad
    assert not any(p.requires_grad for part in ("vae", "text_encoder") for p in family.components[part].parameters())
    assert not family.images.net.training


def test_images_are_those_of_diffusers(family):
    x0 = torch.from_numpy(keyed.batch_normals(0, "test", np.array([[0, 0, 0], [1, 0, 0]]), (4, 8, 8)))
    with torch.no_grad():
        decoded = family.images.net.decode(x0 / family.images.net.config.scaling_factor).sample
    expected = (VaeImageProcessor().postprocess(decoded, output_type="np") * 255).round().astype(np.uint8)
    generated = family.decode(latents(x0))
    assert generated.shape == (2, 16, 16, 3)
    assert generated.dtype == np.uint8
    assert np.abs(generated.astype(int) - expected).max() <= 1
    assert expected.std() > 20


def test_net_is_the_unet(family, tiny_sd):
    unet = UNet2DConditionModel.from_pretrained(tiny_sd / "unet", low_cpu_mem_usage=False)
    x, c_noise, text = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 900.5]), torch.randn(2, MAX_TOKENS, TEXT_WIDTH)
    with torch.no_grad():
        assert same(family.net.eval()(x, c_noise, {"text": text}), unet(x, c_noise, text).sample)


def test_residuals_of_a_side_network_enter_as_in_diffusers(family):
    """A ControlNet's: one of each down block's outputs, and last that of the middle block."""
    control = ControlNetModel.from_unet(family.components["unet"], conditioning_embedding_out_channels=(8, 16))
    with torch.no_grad():
        for zeroed in (*control.controlnet_down_blocks, control.controlnet_mid_block):
            zeroed.weight.normal_(generator=torch.Generator().manual_seed(1))
        x, c_noise, text = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 900.5]), torch.randn(2, MAX_TOKENS, TEXT_WIDTH)
        image = torch.rand(2, 3, 16, 16)
        down, middle = control.eval()(x, c_noise, text, image, return_dict=False)
        theirs = family.components["unet"](
            x, c_noise, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
        ).sample
        net, cond = family.net.eval(), {"text": text}
        assert same(net.denoise(x, c_noise, net.features(cond), (*down, middle)), theirs)
        assert not same(net(x, c_noise, cond), theirs, 1e-3)
        assert torch.equal(net.denoise(x, c_noise, cond), net(x, c_noise, cond))


def test_weights_keep_diffusers_names(family, tiny_sd):
    """An export only drops the prefix `unet.`: names, shapes and values are those of the pretrained file."""
    file = load_file(tiny_sd / "unet" / "diffusion_pytorch_model.safetensors")
    ours = family.net.state_dict()
    assert ours.keys() == {f"unet.{name}" for name in file}
    assert all(torch.equal(ours[f"unet.{name}"], value) for name, value in file.items())


def test_random_weights_follow_the_seed_alone(tiny_sd):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first = load(tiny_sd, seed=1, unet=TINY_UNET).net.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12)
    again = load(tiny_sd, seed=1, unet=TINY_UNET).net.state_dict()
    other = load(tiny_sd, seed=2, unet=TINY_UNET).net.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["unet.conv_in.weight"], other["unet.conv_in.weight"])


def test_what_the_other_networks_decide_is_taken_from_them(tiny_sd):
    config = load(tiny_sd, unet={key: TINY_UNET[key] for key in TINY_UNET if key != "sample_size"}).net.unet.config
    assert (config.in_channels, config.out_channels, config.cross_attention_dim) == (4, 4, TEXT_WIDTH)
    assert config.sample_size == 16  # 32 px, halved


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"cross_attention_dim": 768}, "cross_attention_dim is 768, but must be 48"),
        ({"in_channels": 9}, "in_channels is 9, but must be 4"),
        ({"out_channels": 8}, "out_channels is 8, but must be 4"),
        ({"block_out_chanels": [32]}, "did you mean block_out_channels"),
        ({"block_out_channels": [32, 64, 96]}, "cannot be built"),
        ({"norm_num_groups": 32}, "remove the time embedding"),
        ({"num_class_embeds": 10}, "gives the UNet text only"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tiny_sd, numbers, said):
    with pytest.raises(ValueError, match=said):
        load(tiny_sd, unet=TINY_UNET | numbers)


@pytest.mark.parametrize(
    ("channels", "kind"), [(9, "for inpainting"), (8, "InstructPix2Pix"), (5, "depth"), (7, "upscaling")]
)
def test_checkpoints_of_other_kinds_are_refused_by_their_kind(tiny_sd, tmp_path, channels, kind):
    config = TINY_UNET | {"in_channels": channels, "cross_attention_dim": TEXT_WIDTH}
    UNet2DConditionModel(**config).save_pretrained(tmp_path / "unet")
    with pytest.raises(ValueError, match=f"has {channels} input channels.*{kind}"):
        load(tiny_sd, unet=str(tmp_path / "unet"))


def test_long_captions_are_cut_and_told(tiny_sd):
    family = load(tiny_sd)
    long, cut = "x" * 60, "x" * 22
    assert family.truncated([cut, "short", long, "x" * 23]) == {2: "cut to 24 tokens", 3: "cut to 24 tokens"}
    assert family.truncated(["", cut]) == {}
    assert torch.equal(
        family.encode_prompts(prompts([long]), (3, 16, 16))[0]["text"][:, :22],
        family.encode_prompts(prompts([cut]), (3, 16, 16))[0]["text"][:, :22],
    )


def test_pixels_must_fit_the_autoencoder(family):
    with pytest.raises(ValueError, match=r"15x16 px .* multiple of 2"):
        family.latent_shape((3, 15, 16))


def test_files_are_a_whole_tokenizer(family, tmp_path):
    for path, content in family.files().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer(CAPTIONS).input_ids == family.text.encoders[0].tokenizer(CAPTIONS).input_ids
    assert tokenizer.model_max_length == MAX_TOKENS


def test_a_missing_place_says_what_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"no folder 'nowhere'.*diffusers' layout"):
        load(Path("nowhere"))
    with pytest.raises(ValueError, match=r"owner/model.*daguerre fetch owner/model"):
        load(Path("owner/model"))


def test_a_hub_id_is_read_from_the_local_cache(tiny_sd, monkeypatch, tmp_path):
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--owner--model", "0" * 40
    shutil.copytree(tiny_sd, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert load(Path("owner/model")).latent_shape((3, 16, 16)) == (4, 8, 8)


def test_the_shipped_base_fits_the_quickstart():
    family = load(Path("quickstart"), unet=TINY_UNET)
    latents, cond = family.encode(batch(family, [0, 1], ["a large red circle on a blue background", ""]))
    assert torch.isfinite(latents).all()
    assert not torch.equal(cond["text"][0], cond["text"][1])


def test_an_incomplete_folder_names_what_it_lacks(tiny_sd, tmp_path):
    folder = shutil.copytree(tiny_sd, tmp_path / "copy")
    shutil.rmtree(folder / "unet")
    load(folder, unet=TINY_UNET)
    with pytest.raises(ValueError, match=r"lacks unet/config\.json, unet/diffusion_pytorch_model\.safetensors"):
        load(folder)


def test_a_tokenizer_of_another_model_is_refused(tiny_sd, tmp_path):
    """transformers reads vocab.json without merges.txt, or with the wrong names, in silence."""
    folder = shutil.copytree(tiny_sd, tmp_path / "copy")
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"tokens, but the text encoder has {config['vocab_size']}"):
        load(folder)


def test_weights_that_do_not_fill_the_network_are_refused(tiny_sd, tmp_path):
    folder = shutil.copytree(tiny_sd, tmp_path / "copy")
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="does not have all weights"):
        load(folder)
