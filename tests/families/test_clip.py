"""The text encoder in training: tokenizer, matching, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from losses import loss_of
from transformers import CLIPTextModel, CLIPTokenizer

from daguerre.errors import UserError
from daguerre.families import clip
from daguerre.models.family import Family
from daguerre.models.parts.text import tokenizers
from daguerre.objectives import contrastive
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch

WORDS = ["a", "red", "circle", "on", "green", "background", ","]
TEXTS = ["a red circle", "a green circle on red", "zebra, on a background"]
NUMBERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def family() -> Family:
    settings = clip.Settings(words=WORDS, max_tokens=12, text_encoder=NUMBERS, image_channels=[8, 16])
    return clip.load(settings, seed=1)


def batch() -> Batch:
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch(np.zeros((3, 3), np.int64), {"image": pixels}, TEXTS, torch.ones(3), ["a", "b", "c"], np.zeros((3, 6)))


def test_each_word_is_one_token_and_other_text_is_spelled() -> None:
    tokenizer = tokenizers.learn(WORDS, 16)
    assert len(tokenizer) > 514
    assert [tokenizer.tokenize(word) for word in WORDS] == [[word + "</w>"] for word in WORDS]
    ids = tokenizer("A zebra é").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a zebra é"


def test_the_tokenizer_survives_its_files(tmp_path: Path) -> None:
    made = tokenizers.learn(WORDS, 16)
    for name, content in tokenizers.files(made).items():
        (tmp_path / name).write_bytes(content)
    read = CLIPTokenizer.from_pretrained(tmp_path)
    assert len(read) == len(made)
    assert read.model_max_length == 16
    for text in TEXTS:
        assert read(text).input_ids == made(text).input_ids
    assert tokenizers.files(tokenizers.learn(WORDS, 16)) == tokenizers.files(tokenizers.learn(WORDS, 16))


def test_tokens_have_the_same_ids_in_every_process() -> None:
    """The most frequent pair first, of equals the first in the alphabet: a run that goes on must read as before."""
    tokens = list(tokenizers.learn(["da", "cad", "ba", "ca", "ba"], 16).get_vocab().items())
    made = [token for token, number in sorted(tokens, key=lambda item: item[1]) if number >= 512][:-2]
    assert made == ["ba</w>", "ad</w>", "ca</w>", "cad</w>", "da</w>"]


def test_the_loss_is_clips(family: Family) -> None:
    x, cond = family.encode(batch())
    terms = loss_of(contrastive.build(contrastive.Settings()), family.net, x, cond, {})
    similar = family.net(x, x, cond)
    assert similar.shape == (3, 3)
    rows, columns = similar.log_softmax(1).diagonal(), similar.log_softmax(0).diagonal()
    torch.testing.assert_close(terms.loss_B, -0.5 * (rows + columns))


def test_padding_does_not_reach_the_similarities(family: Family) -> None:
    x, cond = family.encode(batch())
    padded = torch.nn.functional.pad(cond["ids"], (0, 1), value=family.text.tokenizer.pad_token_id)
    family.net.eval()
    torch.testing.assert_close(family.net(x, x, {"ids": padded}), family.net(x, x, cond), rtol=1e-4, atol=1e-4)


def test_the_export_is_read_by_stock_transformers(family: Family, tmp_path: Path) -> None:
    _, cond = family.encode(batch())
    family.export(tmp_path / "out", contrastive.build(contrastive.Settings()), SamplingSettings())
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    encoder = CLIPTextModel.from_pretrained(tmp_path / "out" / "text_encoder").eval()
    ids = tokenizer(TEXTS, padding="longest", return_tensors="pt").input_ids
    assert torch.equal(ids, cond["ids"])
    expected = family.net.text_encoder.eval()(ids).pooler_output
    torch.testing.assert_close(encoder(ids).pooler_output, expected)
    ends = (ids == tokenizer.eos_token_id).int().argmax(1)
    torch.testing.assert_close(expected, encoder(ids).last_hidden_state[torch.arange(3), ends])


def test_bad_numbers_are_refused() -> None:
    settings = clip.Settings(words=WORDS, text_encoder={"hidden_size": 15, "num_attention_heads": 2})
    with pytest.raises(UserError, match=r"model\.text_encoder: a network with these settings cannot be built"):
        clip.load(settings, seed=0)
