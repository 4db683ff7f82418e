"""Texts as ids: those of transformers' own padding and truncation, and the same for any number of threads."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quick_cases import quick_first
from transformers import T5Tokenizer

from daguerre.families import clip
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.reading import Reading

WORDS = [
    "a",
    "photograph",
    "of",
    "two",
    "red",
    "circles,",
    "Ünïcödé",
    "照片",
    "<|endoftext|>",
    "antidisestablishmentarianism",
    "7",
]


def captions(count):
    """Of no to 40 words: a quarter is longer than CLIP reads."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(0, 40))) for _ in range(count)]


def theirs(tokenizer, texts, padding="max_length"):
    return tokenizer(texts, padding=padding, truncation=True, return_tensors="pt").input_ids


def t5():
    words = [(f"\u2581{word}", -2.0) for word in WORDS] + [
        (letter, -9.0) for letter in "\u2581abcdefghijklmnoprstu<|>_7,"
    ]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *dict(words).items()]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=20)


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_ids_are_those_of_transformers(pad):
    texts = ["", *captions(300)]
    expected = theirs(tokenizers.clip(pad), texts)
    found = tokenizers.windows(tokenizers.clip(pad), texts, most=1)
    assert torch.equal(found.ids_BKT, expected[:, None])
    whole = tokenizers.windows(tokenizers.clip(pad), texts, most=None)
    assert whole.ids_BKT.shape[1] > 1
    assert torch.equal(whole.counts_BK.clamp(min=0).sum(1) > 75, whole.counts_BK[:, 1] >= 0)
    cut = tokenizers.truncated(tokenizers.clip(pad), texts)
    assert set(cut) == {i for i, counts in enumerate(whole.counts_BK) if counts[1] >= 0}
    assert set(cut.values()) == {"cut to 77 tokens"}


def test_ids_of_a_t5_are_those_of_transformers():
    texts = ["", *captions(300)]
    found = tokenizers.windows(tokenizers.stateless(t5()), texts, most=1).ids_BKT
    assert torch.equal(found, theirs(t5(), texts)[:, None])
    assert len(tokenizers.truncated(t5(), texts)) > 10


def test_a_trained_encoder_reads_no_more_padding_than_the_longest_text_needs():
    tokenizer = tokenizers.learn(["red", "circles,"], 60)
    own = clip.Captions(tokenizer, {}, SimpleNamespace(log_scale=torch.zeros(())))
    for texts in (["", "a"], captions(40), ["red circles", *captions(1)]):
        expected = theirs(tokenizers.learn(["red", "circles,"], 60), texts, padding="longest")
        assert torch.equal(own.tokens(texts)["ids"], expected)


@pytest.mark.parametrize(("long", "count"), quick_first([(False, 1500), *((long, 5000) for long in (False, True))]))
def test_two_threads_read_as_one_does(long, count):
    """The loader's thread reads captions for training while another reads prompts, and asks which are cut."""
    encoder = SimpleNamespace(device=torch.device("cpu"))
    reader = TextEncoder("text_encoder", encoder, tokenizers.clip("!"), {}, Reading(long=long))
    texts = TextConditioning((reader,))
    parts = np.array_split(np.array(captions(count), dtype=object), count // 20)

    def read(part):
        return texts.tokens(list(part)), texts.truncated(list(part))

    alone = [read(part) for part in parts]
    with ThreadPoolExecutor(2) as threads:
        both = [*threads.map(read, parts)]
    for found, expected in zip(both, alone, strict=True):
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])
        assert found[1] == expected[1]
