"""Conditioning of captions against `encode_prompt` of diffusers' own pipelines, on tiny text encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_texts
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from tiny_texts import seeded

from daguerre.models.reading import Reading
from daguerre.models.text_conditioning import TextConditioning

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


def parts(**networks: Any) -> dict[str, Any]:
    """Text encoders by component, with their tokenizers."""
    words = {
        name.replace("text_encoder", "tokenizer"): (
            tiny_texts.t5_tokenizer() if "T5" in type(network).__name__ else tiny_texts.clip_tokenizer()
        )
        for name, network in networks.items()
    }
    return networks | words


def features(texts: TextConditioning, prompts: list[str]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return dict(texts.features(texts.tokens(prompts)))


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
