"""Texts as ids: those of transformers' own padding and truncation, and the same for any number of threads."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_texts
import torch
from quick_cases import quick_first
from transformers import AutoTokenizer, T5Tokenizer

from daguerre import documents
from daguerre.families import clip
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.clip import CLIP
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.language_model import LanguageModel
from daguerre.models.parts.text.t5 import T5
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


def test_a_learnt_word_of_any_letters_is_one_token():
    words = ["red", "Ünïcödé", "照片", "круг"]
    ids = tokenizers.read(tokenizers.learn(words, 20), words)
    assert [len(each) for each in ids] == [1] * 4


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


KINDS = {
    "clip": (CLIP(), lambda: tokenizers.learn(WORDS, 20)),
    "t5": (T5(), t5),
    "qwen": (LanguageModel(), tiny_texts.qwen_tokenizer),
    "gemma": (LanguageModel(), tiny_texts.gemma_tokenizer),
}


def put(place, value):
    """Changes a value of tokenizer.json: `place` is its key, and those above it."""

    def change(whole):
        for key in place[:-1]:
            whole = whole[key]
        whole[place[-1]] = value

    return change


def without_prefix(whole):
    """Each rule about the space before a text as its opposite."""
    for key, value in whole.items() if isinstance(whole, dict) else enumerate(whole):
        if key in ("add_prefix_space", "prepend_scheme"):
            whole[key] = "never" if key == "prepend_scheme" else not value
        elif isinstance(value, dict | list):
            without_prefix(value)


CHANGES = {
    "as it is": lambda whole: None,
    "other prefix": without_prefix,
    "other end of a text": put(("post_processor",), None),
    "no merges": put(("model", "merges"), []),
    "merges left out": lambda whole: whole["model"].pop("merges", None),
    "cut merges": lambda whole: whole["model"].update(merges=whole["model"].get("merges", [])[::2]),
    "no normalizer": put(("normalizer",), None),
    "other normalizer": put(("normalizer",), {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
    "no pre_tokenizer": put(("pre_tokenizer",), None),
    "other pre_tokenizer": put(("pre_tokenizer",), {"type": "Whitespace"}),
    "unknown pre_tokenizer": put(("pre_tokenizer",), {"type": "X"}),
    "unknown model": put(("model", "type"), "X"),
    "words alone": put(("model",), {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}),
    "no words": put(("model", "vocab"), 3),
    "merges that are none": put(("model", "merges"), [1, 2]),
    "added tokens that are none": put(("added_tokens",), 7),
    "post_processor that is none": put(("post_processor",), {"type": "X"}),
    "truncation that is none": put(("truncation",), 4),
}
SAME = {"as it is", "other end of a text"}
READ = {  # what does not matter to the kind
    "clip": {*SAME, "other normalizer"},
    "t5": {*SAME, "no merges", "merges left out", "cut merges", "merges that are none", "no normalizer"},
    "qwen": {*SAME, "no normalizer"},
    "gemma": {*SAME, "no merges", "cut merges", "other prefix", "no pre_tokenizer"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_authors_files_or_the_tokenizer_is_refused(kind, tmp_path):
    """transformers reads many of these, by rules of the class, and silently."""
    network, make = KINDS[kind]
    make().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = path.read_text(encoding="utf-8")
    texts, read = ["", "an image of  two Cats, 7 dogs", *captions(20)], set()
    for name, change in CHANGES.items():
        whole = json.loads(content)
        change(whole)
        path.write_text(json.dumps(whole), encoding="utf-8")
        try:
            found = tokenizers.opened(network.tokenizer, tmp_path)
            if tokenizers.other_ids(found, path.read_bytes()):
                continue
        except documents.MISREAD:
            continue
        read.add(name)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizers.read(found, texts) == theirs(texts, add_special_tokens=False).input_ids, name
        assert tokenizers.ends(found) == tokenizers.ends(theirs), name
    assert read == READ[kind]


@pytest.mark.parametrize("kind", ["clip", "qwen"])
def test_a_vocabulary_without_the_file_of_its_pairs(kind, tmp_path):
    network, make = KINDS[kind]
    own = make()
    model = json.loads(own.backend_tokenizer.to_str())["model"]
    own.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    with pytest.raises(documents.MISREAD):
        tokenizers.opened(network.tokenizer, tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert "lacks pairs" in tokenizers.other_ids(tokenizers.opened(network.tokenizer, tmp_path), None)
    pairs = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{pairs}\n")
    whole = tokenizers.opened(network.tokenizer, tmp_path)
    assert tokenizers.other_ids(whole, None) is None
    assert tokenizers.read(whole, captions(20)) == tokenizers.read(own, captions(20))
