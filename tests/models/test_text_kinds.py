"""The contract of every kind of text encoder: rules of a reading, gradients, networks without memory, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_texts
import torch
from tiny_texts import seeded
from transformers import Gemma2Model, MistralForCausalLM

from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.text.network import other_vocabulary
from daguerre.models.parts.text.tokenizers import AbsentTokenizer
from daguerre.models.reading import Reading

CHAT = Reading(kinds=("language_model",), max_tokens=40, template="<|im_start|>user\n{}<|im_end|>\n", padding="longest",
               masked=True, text_mask=True, layers=(1, -2), final_norm=False)  # fmt: skip
TEXTS = ["a red circle", "", "two cats, and a dog"]


@dataclass(frozen=True)
class Kind:
    network: Callable[[], Any]
    tokenizer: Callable[[], Any]
    reading: Reading


KINDS = {
    "clip": Kind(tiny_texts.clip, tiny_texts.clip_tokenizer, Reading(layers=(-2,), final_norm=False)),
    "pooled clip": Kind(tiny_texts.clip, tiny_texts.clip_tokenizer, Reading(pooled="plain")),
    "projected clip": Kind(lambda: tiny_texts.clip(True), tiny_texts.clip_tokenizer, Reading(pooled="projected")),
    "t5": Kind(tiny_texts.t5, tiny_texts.t5_tokenizer, Reading(kinds=("t5",), max_tokens=40)),
    "qwen3": Kind(tiny_texts.qwen3, tiny_texts.qwen_tokenizer, CHAT),
    "qwen3's last": Kind(tiny_texts.qwen3, tiny_texts.qwen_tokenizer, replace(CHAT, layers=(-1,), final_norm=True)),
    "qwen2.5-vl": Kind(tiny_texts.qwen25_vl, tiny_texts.qwen_tokenizer, replace(CHAT, dropped=4)),
    "gemma": Kind(lambda: tiny_texts.language_model(Gemma2Model), tiny_texts.gemma_tokenizer, CHAT),
    "mistral": Kind(lambda: tiny_texts.language_model(MistralForCausalLM), tiny_texts.gemma_tokenizer, CHAT),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reading]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("kind")
    parts = {"text_encoder": seeded(kind.network), "tokenizer": kind.tokenizer()}
    return tiny_texts.write(folder, parts), kind.reading


def conditioning(made: tuple[Path, Reading], **values: Any) -> TextConditioning:
    folder, reading = made
    return tiny_texts.conditioning(folder, {"text_encoder": reading}, **values)


def test_gradients_reach_all_that_is_read_and_nothing_else(made: tuple[Path, Reading]):
    texts = conditioning(made)
    (encoder,) = texts.encoders
    encoder.encoder.requires_grad_(True)
    cond = texts.features(texts.tokens(TEXTS), {"text_encoder"})
    sum(rows.square().sum() for rows in cond.values() if rows.dtype != torch.bool).backward()
    for name, parameter in encoder.encoder.named_parameters():
        assert (parameter.grad is None) == (name in encoder.facts.unread), name


def test_networks_without_memory_give_the_same_shapes(made: tuple[Path, Reading]):
    texts = conditioning(made)
    tokens = texts.tokens(TEXTS)
    with torch.no_grad():
        expected = texts.features(tokens)
    with torch.device("meta"):
        absent = conditioning(made)
    found = absent.features({name: rows.to("meta") for name, rows in tokens.items()})
    assert {name: rows.shape for name, rows in found.items()} == {name: rows.shape for name, rows in expected.items()}
    assert expected["text"].shape[-1] == texts.width == absent.width


def test_without_a_tokenizer_every_text_has_the_most_tokens(made: tuple[Path, Reading]):
    """What `daguerre plan` counts."""
    texts = conditioning(made)
    (encoder,) = texts.encoders
    absent = replace(encoder, tokenizer=AbsentTokenizer(encoder.max_tokens))
    assert absent.tokens(TEXTS).ids_BKT.shape == (3, 1, encoder.max_tokens + encoder.reading.dropped)


def test_every_way_of_reading_has_rules_of_its_own(made: tuple[Path, Reading]):
    """A cache is found by them: what is read in another way has another key."""
    (encoder,) = conditioning(made).encoders
    reading = encoder.reading
    others = {
        "template": "other {}", "dropped": 7, "kept": 2, "max_tokens": 30, "layers": (-3,),
        "masked": not reading.masked,
        "padding": "fixed" if reading.padding == "longest" else "longest", "text_mask": not reading.text_mask,
        "final_norm": not reading.final_norm, "text": "more", "part": 3, "long": not reading.long,
        "pooled": None if reading.pooled else "plain", "step": reading.step + 8, "padding_place": 5,
    }  # fmt: skip
    assert {each.name for each in fields(Reading)} - others.keys() == {"kinds"}
    for name, value in others.items():
        assert replace(encoder, reading=replace(reading, **{name: value})).rules() != encoder.rules(), name


def test_a_text_that_stands_for_the_empty_one(made: tuple[Path, Reading]):
    """Qwen-Image's null caption is a space."""
    plain, spaced = conditioning(made), conditioning(made, null="a")
    assert spaced.rules() != plain.rules()
    with torch.no_grad():
        empty = spaced.features(spaced.tokens([""]))
        letter = plain.features(plain.tokens(["a"]))
    assert all(torch.equal(empty[name], letter[name]) for name in letter)


def test_two_threads_read_as_one_does(made: tuple[Path, Reading]):
    """The loader's thread reads captions for training while another reads prompts."""
    texts = conditioning(made)
    parts = [[f"{'cat ' * (number % 12)}{other}" for number in range(15)] for other in range(25)]

    def read(part: list[str]) -> Any:
        return texts.tokens(part), texts.truncated(part)

    alone = [read(part) for part in parts]
    with ThreadPoolExecutor(2) as threads:
        both = [*threads.map(read, parts)]
    for found, expected in zip(both, alone, strict=True):
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])
        assert found[1] == expected[1]


# Numbers of tokens and rows of published models: Qwen3, Qwen2.5-VL, Mistral Small 3, Gemma 2, T5, UMT5.
PAIRS = [(151669, 151936), (151665, 152064), (131072, 131072), (256000, 256000), (32100, 32128), (256300, 256384)]


@pytest.mark.parametrize(("tokens", "rows"), PAIRS)
def test_a_tokenizer_of_another_vocabulary_is_refused(tokens, rows):
    assert other_vocabulary(range(tokens), rows) is None
    for other in (49408, 32100, rows + 1):  # CLIP's, T5's, and one that is larger
        if not 0 <= rows - other < 100:
            assert "do not belong together" in other_vocabulary(range(other), rows)
