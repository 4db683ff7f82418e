"""Rows of captions of language models: each as long as its text, in bfloat16, and a batch of them is what the encoder
makes of the batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_texts
import torch
from tiny_texts import seeded

from daguerre.caching import encode
from daguerre.caching.needed import possible
from daguerre.data.cached.rows import BFLOAT16, Rows, Writer, numbers
from daguerre.data.cached.settings import CacheSettings
from daguerre.data.cached.source import text_key
from daguerre.data.loading import collate
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.training.precision.dtypes import Precision

TEXTS = ["a red circle", "", "two cats and a dog on a table", "a red square"]
READS = Reading(
    kinds=("language_model",), template="<|im_start|>user\n{}<|im_end|>\n", max_tokens=64, padding="longest",
    masked=True, text_mask=True, layers=(-2,), final_norm=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextConditioning:
    parts = {"text_encoder": seeded(tiny_texts.qwen3), "tokenizer": tiny_texts.qwen_tokenizer()}
    folder = tiny_texts.write(tmp_path_factory.mktemp("texts"), parts)
    return tiny_texts.conditioning(folder, {"text_encoder": READS})


def encoded(conditioner: TextConditioning, captions: list[str], **settings: Any) -> list[Any]:
    family = SimpleNamespace(text=conditioner)
    parts: Any = SimpleNamespace(family=family, device=torch.device("cpu"), numerics=Precision())
    return encode.encode_texts(parts, CacheSettings(path="unused", **settings), [*map(encode.Caption, captions)])


def batch(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: collate.tensor_of(array) for name, array in collate.stacked(rows, {}).items()}


def features(conditioner: TextConditioning, captions: list[str]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return dict(conditioner.features(conditioner.tokens(captions)))


@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_of_rows_is_what_the_encoder_makes_of_the_batch(texts: TextConditioning, size: int, tmp_path: Path):
    """Encoded one at a time or together, written and read."""
    rows = [row for first in range(0, 4, size) for row in encoded(texts, TEXTS[first : first + size])]
    writer = Writer(str(tmp_path), 1e6)
    for text, row in zip(TEXTS, rows, strict=True):
        assert row.keys() == {"text"}
        assert row["text"].dtype == BFLOAT16
        writer.add(text_key(text), row)
    writer.flush()
    held = Rows.found(str(tmp_path))
    found, expected = batch([held.read(text_key(text)) for text in TEXTS]), features(texts, TEXTS)
    assert found["text"].dtype == torch.bfloat16
    assert torch.equal(found["text_mask"], expected["text_mask"])
    torch.testing.assert_close(found["text"].float(), expected["text"], rtol=2**-8, atol=1e-5)


def test_float32_of_a_text_is_what_the_encoder_makes_of_it_to_the_bit(texts: TextConditioning):
    (row,) = encoded(texts, TEXTS[:1], dtype="float32")
    found, expected = batch([row]), features(texts, TEXTS[:1])
    assert found.keys() == expected.keys() == {"text"}
    assert torch.equal(found["text"], expected["text"])


def test_texts_of_one_length_have_no_mask(texts: TextConditioning):
    captions = [TEXTS[0], TEXTS[0]]
    assert batch(encoded(texts, captions)).keys() == features(texts, captions).keys() == {"text"}


def test_a_sample_without_features_attends_to_zeros(texts: TextConditioning):
    """One that could not be used: its loss does not count, but must be a number."""
    found = batch([encoded(texts, [TEXTS[0]])[0], encoded(texts, [TEXTS[2]])[0], {}])
    assert found["text_mask"][2].all()
    assert not found["text"][2].any()


def test_the_empty_caption_has_a_row_whatever_the_samples_say():
    assert possible([], {}) == [""]


def test_bfloat16_of_numpys_two_bytes_is_torchs():
    given = torch.tensor([1.0, -2.5, 3e38, 1e-30]).bfloat16()
    kept = encode._array(given)
    assert kept.dtype == BFLOAT16
    np.testing.assert_array_equal(numbers(kept), given.double().numpy())
    assert torch.equal(collate.tensor_of(kept), given)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", np.float16), ("bfloat16", BFLOAT16), ("float32", np.float32)])
def test_a_clips_features_are_kept_in_float16_unless_a_type_is_asked_for(dtype: str, expected: Any, tmp_path: Path):
    parts = {"text_encoder": seeded(tiny_texts.clip), "tokenizer": tiny_texts.clip_tokenizer()}
    conditioner = tiny_texts.conditioning(tiny_texts.write(tmp_path, parts), {"text_encoder": Reading()})
    assert {row["text"].dtype for row in encoded(conditioner, TEXTS, dtype=dtype)} == {np.dtype(expected)}
