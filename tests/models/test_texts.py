"""How captions are read: hidden layers, windows of long prompts, the null caption, trained encoders."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick_cases import quick_where
from safetensors.torch import load_file
from tiny_models import prompts, write_sd, write_sdxl
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.families import sd, sdxl
from daguerre.models.family import Family
from daguerre.models.parts.text.tokenizers import Tokens
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch

SHAPE = (3, 16, 16)
SHORT, EMPTY, LONG = "a red circle", "", "x" * 50


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sdxl(tmp_path_factory.mktemp("large"))


def load_sd(folder: Path, **settings: Any) -> Family:
    return sd.load(sd.Settings(pretrained_model_name_or_path=str(folder), **settings), seed=1)


def load_xl(folder: Path, **settings: Any) -> Family:
    return sdxl.load(sdxl.Settings(pretrained_model_name_or_path=str(folder), **settings), seed=1)


def batch(family: Any, captions: list[str]) -> Batch:
    keys = np.array([[i, 0, 0] for i in range(len(captions))])
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (len(captions), *SHAPE), dtype=np.uint8))
    sizes = np.array([[40, 30, 2, 1, 16, 16]] * len(captions), dtype=np.int32)
    draws = family.random_inputs(3, keys, SHAPE)
    return Batch(keys, {"image": pixels}, captions, torch.ones(len(captions)), captions, sizes, draws)


def their_ids(folder: Path, name: str, texts: list[str]) -> torch.Tensor:
    tokenizer = CLIPTokenizer.from_pretrained(folder / name)
    length = tokenizer.model_max_length
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


@pytest.mark.parametrize(("layer", "norm"), [(None, None), (-2, None), (-2, False), (-1, False)])
def test_the_hidden_state_that_is_read(small: Path, layer: int | None, norm: bool | None):
    """diffusers' clip_skip=1 is layer -2 with the last norm."""
    family = load_sd(small, text_encoder_layer=layer, text_encoder_final_norm=norm)
    encoder = CLIPTextModel.from_pretrained(small / "text_encoder")
    with torch.no_grad():
        out = encoder(their_ids(small, "tokenizer", [SHORT]), output_hidden_states=True)
        expected = out.hidden_states[layer or -1]
        expected = expected if norm is False else encoder.final_layer_norm(expected)
    assert torch.equal(family.encode_prompts(prompts([SHORT]), SHAPE)[0]["text"], expected)


def test_a_layer_that_is_not_there_is_refused(small: Path):
    with pytest.raises(UserError, match="text_encoder_layer is -7, but the encoder has 2 layers"):
        load_sd(small, text_encoder_layer=-7)


def test_sdxl_reads_both_encoders_before_the_last_layer(large: Path):
    family = load_xl(large)
    cond = family.encode(batch(family, [SHORT, LONG]))[1]
    one = CLIPTextModel.from_pretrained(large / "text_encoder")
    two = CLIPTextModelWithProjection.from_pretrained(large / "text_encoder_2")
    with torch.no_grad():
        first = one(their_ids(large, "tokenizer", [SHORT, LONG]), output_hidden_states=True)
        second = two(their_ids(large, "tokenizer_2", [SHORT, LONG]), output_hidden_states=True)
    assert torch.equal(cond["text"], torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1))
    assert torch.equal(cond["pooled"], second.text_embeds)
    assert cond["sizes"].tolist() == [[40, 30, 2, 1, 16, 16]] * 2
    drawn = family.encode_prompts(prompts([SHORT, LONG]), (3, 32, 16))[0]
    assert torch.equal(drawn["text"], cond["text"])
    assert drawn["sizes"].tolist() == [[32, 16, 0, 0, 32, 16]] * 2


def test_the_empty_caption_is_zeros_in_sdxl(large: Path):
    cond = load_xl(large).encode_prompts(prompts([SHORT, EMPTY]), SHAPE)[0]
    assert not cond["text"][1].any()
    assert not cond["pooled"][1].any()
    assert cond["text"][0].any()
    told = load_xl(large, zero_null_text=False).encode_prompts(prompts([SHORT, EMPTY]), SHAPE)[0]
    assert told["text"][1].any()
    assert torch.equal(told["text"][0], cond["text"][0])


@pytest.mark.parametrize("load", [load_sd, load_xl])
def test_windows_change_nothing_for_prompts_of_one(load: Any, small: Path, large: Path):
    folder = small if load is load_sd else large
    texts = [SHORT, EMPTY, "x" * 22]
    plain, windows = load(folder), load(folder, long_prompts=True)
    before, after = plain.encode_prompts(prompts(texts), SHAPE)[0], windows.encode_prompts(prompts(texts), SHAPE)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert plain.truncated([LONG]) == {0: "cut to 24 tokens"}
    assert windows.truncated([LONG]) == {}


@pytest.mark.parametrize(
    ("load", "long"),
    quick_where([(load_sd, False), (load_xl, True)].__contains__, product([load_sd, load_xl], [False, True])),
)
def test_what_is_told_ahead_is_what_encoding_makes(load: Any, long: bool, small: Path, large: Path):
    """Tokens and sizes that the loader has made beside other draws, whole and cut into rows."""
    family = load(small if load is load_sd else large, long_prompts=long)
    for trained in (family.trainable[:1], ["text_encoder"]):
        family = family.training(trained)
        plain = batch(family, [SHORT, LONG, EMPTY, "x" * 22])
        told = family.told(plain)
        assert all(rows.device.type == "cpu" and len(rows) == 4 for rows in told.values())
        ahead = replace(plain, draws={**plain.draws, **told}, texts=["never read"] * 4, sizes=plain.sizes * 0)
        for given, expected in ((ahead, plain), (ahead.rows(1, 3), plain.rows(1, 3))):
            (x0, cond), (own_x0, own) = family.encode(given), family.encode(expected)
            assert torch.equal(x0, own_x0)
            assert cond.keys() == own.keys()
            assert all(torch.equal(cond[name], own[name]) for name in own)


def test_each_window_has_its_own_start_and_end(small: Path):
    """A prompt of 50 tokens is read as the texts of its 22, 22 and 6."""
    family = load_sd(small, long_prompts=True)
    whole = family.encode_prompts(prompts(["x" * 44 + "y" * 6]), SHAPE)[0]
    # A window inside a word is no word of its own: its last byte does not end one.
    reader = family.text.encoders[0]
    tokens = reader.tokens(["x" * 44 + "y" * 6])
    ids = tokens.ids_BKT
    assert ids.shape == (1, 3, 24)
    assert (ids[0, :, 0] == reader.tokenizer.bos_token_id).all()
    assert (ids[0, :2, -1] == reader.tokenizer.eos_token_id).all()
    assert ids[0, 2, 7] == reader.tokenizer.eos_token_id
    with torch.no_grad():
        each = [reader.features(Tokens(ids[:, k : k + 1], tokens.counts_BK[:, k : k + 1])).hidden_BTD for k in range(3)]
    assert torch.allclose(whole["text"], torch.cat(each, 1), atol=1e-6)


@pytest.mark.parametrize("load", [load_sd, load_xl])
def test_a_short_prompt_beside_a_long_one_is_predicted_as_alone(load: Any, small: Path, large: Path):
    family = load(small if load is load_sd else large, long_prompts=True)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    together, alone = (
        family.encode_prompts(prompts([SHORT, LONG]), SHAPE)[0],
        family.encode_prompts(prompts([SHORT]), SHAPE)[0],
    )
    assert together["text_mask"].sum(1).tolist() == [24, 72]
    assert "text_mask" not in alone
    with torch.no_grad():
        ours = family.net(x, torch.tensor([5.0, 5.0]), together)[:1]
        theirs = family.net(x[:1], torch.tensor([5.0]), alone)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    with torch.no_grad():  # the second window is heard
        cut = family.net(x[1:], torch.tensor([5.0]), family.encode_prompts(prompts([LONG[:22]]), SHAPE)[0])
        assert not torch.allclose(family.net(x, torch.tensor([5.0, 5.0]), together)[1:], cut, atol=1e-4)


@pytest.mark.parametrize("policy", ["first", "last", "weighted"])
def test_pooled_features_of_several_windows(large: Path, policy: str):
    family = load_xl(large, long_prompts=True, long_prompts_pooled=policy)
    texts = [SHORT, LONG, EMPTY]
    cond = family.encode_prompts(prompts(texts), SHAPE)[0]
    reader = family.text.encoders[1]
    tokens = reader.tokens(texts)
    with torch.no_grad():
        pooled = reader.features(tokens).pooled_BKP
    weighted = (pooled[1] * torch.tensor([22.0, 22.0, 6.0])[:, None]).sum(0) / 50
    expected = {"first": pooled[1, 0], "last": pooled[1, 2], "weighted": weighted}[policy]
    assert torch.allclose(cond["pooled"][1], expected, atol=1e-6)
    assert torch.allclose(cond["pooled"][0], pooled[0, 0], atol=1e-6)
    assert not cond["pooled"][2].any()


@pytest.mark.parametrize(
    "trained",
    [
        *(pytest.param((name,), marks=pytest.mark.long) for name in ("text_encoder", "text_encoder_2")),
        ("text_encoder", "text_encoder_2"),
    ],
)
def test_trained_encoders_run_inside_the_net(large: Path, trained: tuple[str, ...]):
    """The prediction is that of the frozen ones; gradients reach the trained ones alone."""
    family = load_xl(large).training(["unet", *trained])
    frozen = load_xl(large)
    given = batch(family, [SHORT, EMPTY, LONG])
    x0, cond = family.encode(given)
    assert "text" not in cond
    t = torch.tensor([1.0, 500.0, 900.0])
    y = family.net(x0, t, cond)
    with torch.no_grad():
        assert torch.allclose(y, frozen.net(x0, t, frozen.encode(given)[1]), atol=1e-5)
        drawn = family.encode_prompts(prompts([SHORT]), SHAPE)[0]
    assert "text" in drawn
    y.square().mean().backward()
    assert {name.partition(".")[0] for name in family.net.state_dict()} == {"unet", *trained}
    for reader in family.text.encoders:
        moved = [p.grad is not None and bool(p.grad.any()) for p in reader.encoder.parameters()]
        assert any(moved) == (reader.name in trained)


def test_frozen_encoders_inside_the_net_take_whatever_kernel_suits(large: Path):
    """They compute in float32, for which a GPU has no flash attention, whatever the trained networks were given."""
    family = load_xl(large).training(["unet", "text_encoder"])
    given = batch(family, [SHORT])
    _, cond = family.encode(given)
    able: dict[str, bool] = {}
    for reader in family.text.encoders:
        reader.encoder.register_forward_pre_hook(
            lambda *_, name=reader.name: able.update({name: torch.backends.cuda.mem_efficient_sdp_enabled()})
        )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
        family.text.features(cond, family.trained)
    assert able == {"text_encoder": False, "text_encoder_2": True}


def test_a_trained_encoder_is_exported_as_every_transformers_reads_it(small: Path, tmp_path: Path):
    family = load_sd(small).training(["unet", "text_encoder"])
    with torch.no_grad():
        for parameter in family.text.encoders[0].encoder.parameters():
            parameter.add_(0.01)
    objective = plugins.find("objectives", "eps")
    family.export(tmp_path / "pipeline", objective.build(objective.Settings()), SamplingSettings())
    names = load_file(tmp_path / "pipeline" / "text_encoder" / "model.safetensors")
    assert all(name.startswith("text_model.") for name in names)
    again = load_sd(tmp_path / "pipeline")
    for name, value in again.text.encoders[0].encoder.state_dict().items():
        assert torch.equal(value, family.net.state_dict()[f"text_encoder.{name}"])


def test_features_of_frozen_and_trained_encoders_need_no_memory(large: Path):
    """Their arithmetic is counted on the meta device, which has no autocast."""
    tokens = load_xl(large).text.tokens([SHORT, EMPTY])
    with torch.device("meta"):
        texts = load_xl(large).training(["unet", "text_encoder"]).text
    found = texts.features({name: value.to("meta") for name, value in tokens.items()}, {"text_encoder"})
    assert found["text"].is_meta
    assert found["text"].requires_grad
    assert found["text"].shape == (2, tokens["text_encoder_ids"].shape[-1], texts.width)


def test_layers_that_nothing_reads_are_not_trained(large: Path, small: Path):
    """SDXL's first encoder is read before its last layer; the second's pooled features come out of its last."""
    family = load_xl(large).training(["unet", "text_encoder", "text_encoder_2"])
    still = {name for name, p in family.net.named_parameters() if not p.requires_grad}
    assert still
    assert all(name.startswith(("text_encoder.encoder.layers.2.", "text_encoder.final_layer_norm")) for name in still)
    plain = load_sd(small).training(["unet", "text_encoder"])
    assert all(p.requires_grad for p in plain.net.parameters())
    x0, cond = family.encode(batch(family, [SHORT, LONG]))
    family.net(x0, torch.tensor([1.0, 500.0]), cond).square().mean().backward()
    assert {name for name, p in family.net.named_parameters() if p.grad is None} == still


@pytest.mark.parametrize("load", [load_sd, load_xl])
def test_an_export_needs_no_clip_skip(load: Any, small: Path, large: Path, tmp_path: Path):
    """Layers behind the one that is read are left out, so that a stock pipeline reads the right one by itself."""
    layer = -2 if load is load_sd else -3
    family = load(small if load is load_sd else large, text_encoder_layer=layer)
    objective = plugins.find("objectives", "eps")
    said = family.export(tmp_path / "pipeline", objective.build(objective.Settings()), SamplingSettings())
    assert not [line for line in said if "layer" in line]
    again = load(tmp_path / "pipeline")
    ours, theirs = (made.encode_prompts(prompts([SHORT]), SHAPE)[0]["text"] for made in (family, again))
    assert torch.equal(ours, theirs)
    assert family.text.encoders[0].layers == again.text.encoders[0].layers + 1
