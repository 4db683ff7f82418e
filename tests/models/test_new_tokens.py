"""New tokens of every kind of text encoder: read as transformers reads a vocabulary that has them, in files, merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_texts
import torch
from safetensors.torch import load_file, save_file
from tiny_texts import seeded
from transformers import Gemma2Model

from daguerre.errors import UserError
from daguerre.models.parts.text import new_tokens, token_files
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading

CHAT = Reading(kinds=("language_model",), max_tokens=40, template="<|im_start|>user\n{}<|im_end|>\n", padding="longest",
               masked=True, text_mask=True, layers=(-2,), final_norm=False)  # fmt: skip
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Reading]] = {
    "clip": (tiny_texts.clip, tiny_texts.clip_tokenizer, Reading()),
    "t5": (tiny_texts.t5, tiny_texts.t5_tokenizer, Reading(kinds=("t5",), max_tokens=40)),
    "qwen3": (tiny_texts.qwen3, tiny_texts.qwen_tokenizer, CHAT),
    "qwen2.5-vl": (tiny_texts.qwen25_vl, tiny_texts.qwen_tokenizer, CHAT),
    "gemma": (lambda: tiny_texts.language_model(Gemma2Model), tiny_texts.gemma_tokenizer, CHAT),
}


@pytest.fixture(params=KINDS)
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> TextConditioning:
    network, tokenizer, reading = KINDS[request.param]
    folder = tiny_texts.write(tmp_path / "base", {"text_encoder": seeded(network), "tokenizer": tokenizer()})
    return tiny_texts.conditioning(folder, {"text_encoder": reading})


def rows(texts: TextConditioning, count: int, seed: int = 3) -> torch.Tensor:
    width = new_tokens.table(texts.encoders[0]).shape[1]
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def features(texts: TextConditioning, caption: str) -> torch.Tensor:
    with torch.no_grad():
        return texts.features(texts.tokens([caption]))["text"][0]


def test_a_token_is_read_by_its_rows_and_other_captions_as_before(texts: TextConditioning):
    (encoder,) = texts.encoders
    before = features(texts, "a cat")
    count = len(encoder.tokens(["a cat"]).ids_BKT[0, 0])
    assert new_tokens.names(encoder) == []
    new_tokens.check_names(encoder, ["<toy>"])
    extended = new_tokens.attach(encoder, {"<toy>": rows(texts, 2)}, {})
    assert new_tokens.names(encoder) == ["<toy>"]
    assert torch.equal(features(texts, "a cat"), before)
    ids = encoder.tokens(["a <toy> cat"]).ids_BKT[0, 0]
    assert torch.equal(ids[torch.isin(ids, extended.ids)], extended.ids)
    assert encoder.reading.padding == "fixed" or len(ids) >= count + 2
    told = features(texts, "a <toy> cat")
    with torch.no_grad():
        extended.rows[1] *= 2
    assert not torch.allclose(features(texts, "a <toy> cat"), told)


def test_a_merged_encoder_is_read_alike_where_it_is_opened_anew(texts: TextConditioning, tmp_path: Path):
    (encoder,) = texts.encoders
    extended = new_tokens.attach(encoder, {"<toy>": rows(texts, 2)}, {})
    told = features(texts, "a <toy> cat")
    new_tokens.merge(encoder, extended, {"<toy>": 2})
    new_tokens.replace(encoder, extended, extended.plain())  # as an export does
    encoder.encoder.save_pretrained(tmp_path / "merged" / "text_encoder")
    (tmp_path / "merged" / "tokenizer").mkdir()
    for name, content in encoder.files.items():
        (tmp_path / "merged" / "tokenizer" / name).write_bytes(content)
    again = tiny_texts.conditioning(tmp_path / "merged", {"text_encoder": encoder.reading})
    torch.testing.assert_close(features(again, "a <toy> <toy>_1 cat"), told, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_rows_alone(texts: TextConditioning):
    (encoder,) = texts.encoders
    encoder.encoder.requires_grad_(False)
    extended = new_tokens.attach(encoder, {"<toy>": rows(texts, 1)}, {})
    tokens = texts.tokens(["a <toy> cat", "a cat"])
    texts.features(tokens, {"text_encoder"})["text"].square().sum().backward()
    assert extended.rows.grad is not None
    assert extended.rows.grad.any()
    assert not any(p.grad is not None for p in encoder.encoder.parameters() if p is not extended.rows)


def test_a_token_of_more_vectors_than_a_text_has_tokens_is_refused(texts: TextConditioning):
    (encoder,) = texts.encoders
    with pytest.raises(UserError, match="has 100 vectors, but text_encoder reads texts of"):
        new_tokens.attach(encoder, {"<toy>": rows(texts, 100)}, {})


@pytest.fixture
def flux(tmp_path: Path) -> TextConditioning:
    parts = {"text_encoder": seeded(tiny_texts.clip), "text_encoder_2": seeded(lambda: tiny_texts.t5(64))}
    words = {"tokenizer": tiny_texts.clip_tokenizer(), "tokenizer_2": tiny_texts.t5_tokenizer()}
    readings = {"text_encoder": Reading(text=None, pooled="plain"), "text_encoder_2": KINDS["t5"][2]}
    return tiny_texts.conditioning(tiny_texts.write(tmp_path / "flux", parts | words), readings)


def test_files_of_a_clip_and_a_t5_have_comfyuis_names(flux: TextConditioning, tmp_path: Path):
    embeddings = {"<toy>": {"text_encoder": torch.randn(2, 32), "text_encoder_2": torch.randn(2, 64)}}
    token_files.write(tmp_path, embeddings, {}, {}, token_files.keys(flux.encoders))
    assert load_file(tmp_path / "toy.safetensors").keys() == {"clip_l", "t5xxl"}
    for place in (tmp_path / "toy.safetensors", tmp_path):
        (found,) = token_files.read(place, flux.encoders)[0].values()
        assert all(torch.equal(found[name], own) for name, own in embeddings["<toy>"].items())


def test_onetrainers_file_of_flux_is_read(flux: TextConditioning, tmp_path: Path):
    own = {"clip_l": torch.randn(1, 32), "t5": torch.randn(1, 64)}
    save_file(own, tmp_path / "toy.safetensors")
    found = token_files.read(tmp_path / "toy.safetensors", flux.encoders)[0]["toy"]
    assert torch.equal(found["text_encoder"], own["clip_l"])
    assert torch.equal(found["text_encoder_2"], own["t5"])


def test_a_file_of_sdxl_is_refused_for_a_clip_and_a_t5(flux: TextConditioning, tmp_path: Path):
    save_file({"clip_l": torch.randn(1, 32), "clip_g": torch.randn(1, 64)}, tmp_path / "toy.safetensors")
    with pytest.raises(UserError, match="which SDXL's two text encoders read; this model has"):
        token_files.read(tmp_path / "toy.safetensors", flux.encoders)
