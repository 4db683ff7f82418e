"""Conditioning of captions against `encode_prompt` of diffusers' own pipelines, on tiny text encoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_texts
import torch
from diffusers import (
    Flux2KleinPipeline,
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    ZImagePipeline,
)
from tiny_texts import seeded
from transformers import Gemma2Model, MistralForCausalLM, Qwen3Model

from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading

TEXTS = ["a red circle on a white table", "", "x" * 60, "Two cats, one dog."]
T5_TOKENS = 40
FLUX = {
    "text_encoder": Reading(kinds=("clip",), text=None, pooled="plain"),
    "text_encoder_2": Reading(kinds=("t5",), max_tokens=T5_TOKENS),
}
_CLIP = Reading(kinds=("clip",), layers=(-2,), final_norm=False, pooled="projected")
SD3 = {
    "text_encoder": _CLIP,
    "text_encoder_2": _CLIP,
    "text_encoder_3": Reading(kinds=("t5",), max_tokens=T5_TOKENS, part=1),
}


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LLM_TOKENS = 64
KLEIN = Reading(
    kinds=("language_model",), template=f"{USER}<think>\n\n</think>\n\n", max_tokens=LLM_TOKENS, masked=True,
    layers=(1, 2, 3), final_norm=False,
)  # fmt: skip
Z_IMAGE = Reading(
    kinds=("language_model",), template=USER, max_tokens=LLM_TOKENS, padding="longest", masked=True, text_mask=True,
    layers=(-2,), final_norm=False,
)  # fmt: skip
QWEN_IMAGE = Reading(
    kinds=("language_model",), max_tokens=1024, padding="longest", masked=True, text_mask=True, dropped=34,
    template="<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    f"spatial relationships of the objects and background:<|im_end|>\n{USER}",
)  # fmt: skip


def parts(**networks: Any) -> dict[str, Any]:
    """Text encoders by component, with their tokenizers."""
    words = {"CLIP": tiny_texts.clip_tokenizer, "T5En": tiny_texts.t5_tokenizer, "Qwen": tiny_texts.qwen_tokenizer}
    return networks | {
        name.replace("text_encoder", "tokenizer"): words[type(network).__name__[:4]]()
        for name, network in networks.items()
    }


def features(texts: TextConditioning, prompts: list[str]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return dict(texts.features(texts.tokens(prompts)))


def test_sd_reads_the_last_hidden_state_with_the_last_norm(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.clip))
    pipe = StableDiffusionPipeline(unet=None, vae=None, scheduler=None, safety_checker=None, feature_extractor=None,
                                   requires_safety_checker=False, **made)  # fmt: skip
    with torch.no_grad():
        text, _ = pipe.encode_prompt(TEXTS, "cpu", 1, False)
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": Reading()})
    assert torch.equal(features(texts, TEXTS)["text"], text)


def test_sdxl_reads_both_encoders_before_the_last_layer(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.clip), text_encoder_2=seeded(lambda: tiny_texts.clip(True, 2, 64), 1))
    pipe = StableDiffusionXLPipeline(unet=None, vae=None, scheduler=None, add_watermarker=False, **made)
    with torch.no_grad():
        text, _, pooled, _ = pipe.encode_prompt(TEXTS, TEXTS, "cpu", 1, False)
    read = Reading(layers=(-2,), final_norm=False)
    readings = {"text_encoder": read, "text_encoder_2": replace(read, pooled="projected")}
    ours = features(tiny_texts.conditioning(tiny_texts.write(tmp_path, made), readings), TEXTS)
    assert torch.equal(ours["text"], text)
    assert torch.equal(ours["pooled"], pooled)


def test_flux_reads_clips_pooled_features_and_512_tokens_of_a_t5_without_a_mask(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.clip), text_encoder_2=seeded(tiny_texts.t5))
    pipe = FluxPipeline(transformer=None, vae=None, scheduler=None, **made)
    with torch.no_grad():
        text, pooled, _ = pipe.encode_prompt(TEXTS, TEXTS, device="cpu", max_sequence_length=T5_TOKENS)
    ours = features(tiny_texts.conditioning(tiny_texts.write(tmp_path, made), FLUX), TEXTS)
    assert ours.keys() == {"text", "pooled"}
    assert torch.equal(ours["text"], text)
    assert torch.equal(ours["pooled"], pooled)


def test_sd3_reads_two_clips_side_by_side_and_a_t5_behind_them(tmp_path: Path):
    made = parts(
        text_encoder=seeded(lambda: tiny_texts.clip(True)),
        text_encoder_2=seeded(lambda: tiny_texts.clip(True, 2, 64), 1),
        text_encoder_3=seeded(lambda: tiny_texts.t5(128)),
    )
    pipe = StableDiffusion3Pipeline(transformer=None, vae=None, scheduler=None, **made)
    with torch.no_grad():
        text, _, pooled, _ = pipe.encode_prompt(
            TEXTS, TEXTS, TEXTS, "cpu", do_classifier_free_guidance=False, max_sequence_length=T5_TOKENS
        )
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), SD3)
    ours = features(texts, TEXTS)
    assert texts.width == 128
    assert ours["text"].shape == (4, 24 + T5_TOKENS, 128)
    assert torch.equal(ours["text"], text)
    assert torch.equal(ours["pooled"], pooled)


def test_klein_joins_three_hidden_states_of_a_chat_and_attends_to_padding(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.qwen3))
    pipe = Flux2KleinPipeline(transformer=None, vae=None, scheduler=None, **made)
    with torch.no_grad():
        text, _ = pipe.encode_prompt(TEXTS, "cpu", max_sequence_length=LLM_TOKENS, text_encoder_out_layers=KLEIN.layers)
    ours = features(tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": KLEIN}), TEXTS)
    assert ours.keys() == {"text"}
    assert torch.equal(ours["text"], text)


def test_z_image_leaves_padding_out(tmp_path: Path):
    made = parts(text_encoder=seeded(lambda: tiny_texts.qwen3(Qwen3Model)))
    pipe = ZImagePipeline(transformer=None, vae=None, scheduler=None, **made)
    with torch.no_grad():
        each, _ = pipe.encode_prompt([*TEXTS], "cpu", False, max_sequence_length=LLM_TOKENS)
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": Z_IMAGE})
    ours = features(texts, TEXTS)
    assert ours["text_mask"].sum(1).tolist() == [len(one) for one in each]
    for row, mask, one in zip(ours["text"], ours["text_mask"], each, strict=True):
        torch.testing.assert_close(row[mask], one, rtol=1e-5, atol=1e-5)
        assert not row[~mask].any()
    assert "text_mask" not in features(texts, TEXTS[:1])


def test_qwen_image_drops_the_tokens_of_its_system_message(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.qwen25_vl))
    pipe = QwenImagePipeline(transformer=None, vae=None, scheduler=None, **made)
    with torch.no_grad():
        text, mask = pipe.encode_prompt(TEXTS, "cpu")
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": QWEN_IMAGE})
    ours = features(texts, TEXTS)
    assert torch.equal(ours["text_mask"], mask.bool())
    torch.testing.assert_close(ours["text"], text, rtol=1e-5, atol=1e-5)
    assert len(made["tokenizer"]([QWEN_IMAGE.template.partition("{}")[0]]).input_ids[0]) == QWEN_IMAGE.dropped
    long = "y" * 1100
    assert texts.truncated(["a", long]) == {1: "cut to 1024 tokens"}
    with torch.no_grad():
        cut, _ = pipe.encode_prompt([long], "cpu")
    torch.testing.assert_close(features(texts, [long])["text"], cut, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Gemma2Model, MistralForCausalLM])
def test_other_language_models_are_read_as_transformers_reads_them(kind: Any, tmp_path: Path):
    """A start before the text, plain text around it, one hidden state; Gemma's tokenizer pads on the left."""
    made = {"text_encoder": seeded(lambda: tiny_texts.language_model(kind)), "tokenizer": tiny_texts.gemma_tokenizer()}
    reading = replace(Z_IMAGE, template="draw: {}")
    ours = features(tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": reading}), TEXTS)
    for row, text in enumerate(TEXTS):
        cut = {"truncation": True, "max_length": LLM_TOKENS}
        ids = made["tokenizer"]([f"draw: {text}"], return_tensors="pt", **cut).input_ids
        with torch.no_grad():
            theirs = made["text_encoder"](ids, output_hidden_states=True).hidden_states[-2][0]
        assert ids[0, 0] == made["tokenizer"].bos_token_id
        torch.testing.assert_close(ours["text"][row][ours["text_mask"][row]], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", [Z_IMAGE, QWEN_IMAGE, KLEIN], ids=["z_image", "qwen_image", "klein"])
def test_a_text_in_a_batch_is_read_as_alone(reading: Reading, tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.qwen25_vl if reading is QWEN_IMAGE else tiny_texts.qwen3))
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": reading})
    together = features(texts, TEXTS)
    for row, text in enumerate(TEXTS):
        alone = features(texts, [text])["text"][0]
        mask = together["text_mask"][row] if "text_mask" in together else slice(None)
        torch.testing.assert_close(together["text"][row][mask], alone, rtol=1e-5, atol=1e-5)


def test_padding_on_the_left_gives_a_causal_model_the_same_features(tmp_path: Path):
    """So that a `Reading` need not know a side: transformers' own padding on the left, and its positions."""
    made = parts(text_encoder=seeded(lambda: tiny_texts.qwen3(Qwen3Model)))
    ours = features(tiny_texts.conditioning(tiny_texts.write(tmp_path, made), {"text_encoder": Z_IMAGE}), TEXTS)
    written = [USER.replace("{}", text) for text in TEXTS]
    left = made["tokenizer"](
        written, padding="longest", truncation=True, max_length=LLM_TOKENS, padding_side="left", return_tensors="pt"
    )
    with torch.no_grad():
        theirs = made["text_encoder"](**left, output_hidden_states=True).hidden_states[-2]
    for row in range(len(TEXTS)):
        own, other = ours["text"][row][ours["text_mask"][row]], theirs[row][left.attention_mask[row].bool()]
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_a_last_hidden_state_before_the_norm(tmp_path: Path):
    """Qwen-Image-2.1's, which transformers 5 gives behind the norm alone unless its config says otherwise."""
    made = parts(text_encoder=seeded(lambda: tiny_texts.qwen3(Qwen3Model)))
    folder = tiny_texts.write(tmp_path, made)
    readings = [replace(Z_IMAGE, layers=(-1,), final_norm=norm) for norm in (True, False)]
    behind, before = (features(tiny_texts.conditioning(folder, {"text_encoder": one}), ["a"]) for one in readings)
    norm = made["text_encoder"].norm
    with torch.no_grad():
        assert torch.equal(norm(before["text"]), behind["text"])
    assert not torch.allclose(before["text"], behind["text"])


def test_layers_behind_the_last_one_that_is_read_are_not_run(tmp_path: Path):
    texts = tiny_texts.conditioning(
        tiny_texts.write(tmp_path, parts(text_encoder=seeded(tiny_texts.qwen3))), {"text_encoder": KLEIN}
    )
    layers, run = texts.encoders[0].encoder.model.layers, []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: run.append(number))
    features(texts, TEXTS)
    assert run == [0, 1, 2]
    assert texts.encoders[0].encoder.model.layers is layers


def test_a_text_is_cut_where_every_encoder_cuts_it(tmp_path: Path):
    made = parts(text_encoder=seeded(tiny_texts.clip), text_encoder_2=seeded(tiny_texts.t5))
    texts = tiny_texts.conditioning(tiny_texts.write(tmp_path, made), FLUX)
    assert texts.truncated(["x" * 30, "short", "x" * 60]) == {2: f"cut to {T5_TOKENS} tokens"}


@pytest.mark.parametrize("text_mask", [False, True])
def test_a_mask_tells_encoder_and_denoiser_what_pads(tmp_path: Path, text_mask: bool):
    """PixArt's and Chroma's reading of a T5: the rows of a text's own tokens are those that it has without padding."""
    made = parts(text_encoder=seeded(tiny_texts.t5))
    folder = tiny_texts.write(tmp_path, made)
    reading = Reading(kinds=("t5",), max_tokens=T5_TOKENS, masked=True, text_mask=text_mask)
    texts = tiny_texts.conditioning(folder, {"text_encoder": reading})
    ours = features(texts, TEXTS)
    assert ("text_mask" in ours) == text_mask
    for row, text in enumerate(TEXTS):
        ids = made["tokenizer"]([text], return_tensors="pt", truncation=True, max_length=T5_TOKENS).input_ids
        with torch.no_grad():
            alone = made["text_encoder"](ids).last_hidden_state[0]
        torch.testing.assert_close(ours["text"][row, : len(alone)], alone, rtol=1e-5, atol=1e-5)
        if text_mask:
            assert ours["text_mask"][row].tolist() == [True] * len(alone) + [False] * (T5_TOKENS - len(alone))
