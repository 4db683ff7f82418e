"""Keyed randomness: golden words, exact transforms, independence of batch and order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daguerre import keys

WORD = st.integers(0, 2**63 - 1)


def test_words_are_philox_4x64_10_of_random123():
    """Known answer of the authors' own vectors: counter 1, key 0 follows counter 0 in numpy's stream."""
    philox = np.random.Philox(key=np.zeros(2, np.uint64), counter=np.array([2**64 - 1] * 4, dtype=np.uint64))
    assert [hex(int(word)) for word in philox.random_raw(4)] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]


def test_golden_numbers_never_change():
    """A change here changes every run of every user: never edit these."""
    assert [int(w) for w in keys.words(7, "noise", 11, 2, 1, count=2)] == GOLDEN_WORDS
    assert keys.normals(7, "noise", 11, 2, 1, count=3).tolist() == GOLDEN_NORMALS
    assert keys.permutation(7, "shuffle", 3, 8).tolist() == GOLDEN_PERMUTATION


GOLDEN_WORDS = [463693520005692213, 11455520644645221414]
GOLDEN_NORMALS = [-0.5765227675437927, -0.8706527948379517, -2.6522557735443115]
GOLDEN_PERMUTATION = [2, 5, 1, 4, 7, 6, 3, 0]


@given(WORD, WORD, WORD, WORD)
def test_each_part_of_the_key_matters(seed, sample_id, epoch, repeat):
    base = keys.words(seed, "a", sample_id, epoch, repeat, count=4).tolist()
    assert base != keys.words(seed + 1, "a", sample_id, epoch, repeat, count=4).tolist()
    assert base != keys.words(seed, "b", sample_id, epoch, repeat, count=4).tolist()
    assert base != keys.words(seed, "a", sample_id + 1, epoch, repeat, count=4).tolist()
    assert base != keys.words(seed, "a", sample_id, epoch + 1, repeat, count=4).tolist()
    assert base != keys.words(seed, "a", sample_id, epoch, repeat + 1, count=4).tolist()


def test_a_longer_draw_begins_with_the_shorter_one():
    assert keys.words(1, "a", 2, count=9).tolist()[:4] == keys.words(1, "a", 2, count=4).tolist()


def test_log_and_sincos_agree_with_numpy():
    x = keys.uniforms(0, "test", 0, count=20_000)
    np.testing.assert_allclose(keys._log(x + 2.0**-54), np.log(x + 2.0**-54), rtol=1e-14, atol=1e-15)
    sin, cos = keys._sincos_turns(x)
    np.testing.assert_allclose(sin, np.sin(2 * np.pi * x), atol=2e-15)
    np.testing.assert_allclose(cos, np.cos(2 * np.pi * x), atol=2e-15)


def test_normals_are_standard_normal():
    drawn = keys.normals(3, "noise", 5, count=200_000).astype(np.float64)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((np.abs(drawn) < 1.959964).mean() - 0.95) < 0.002
    assert abs((drawn**4).mean() - 3) < 0.1


def test_the_extremes_of_a_uniform_give_finite_normals():
    raw = np.array([0, 2**64 - 1, 0, 2**64 - 1], dtype=np.uint64)
    assert np.isfinite(keys.to_normal(raw)).all()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 2)])
def test_a_sample_has_its_own_noise_whatever_the_batch(shape):
    batch = np.array([[5, 0, 0], [9, 1, 0], [5, 0, 1]])
    drawn = keys.batch_normals(1, "noise", batch, shape)
    assert drawn.shape == (3, *shape)
    assert drawn.dtype == np.float32
    for i, key in enumerate(batch):
        np.testing.assert_array_equal(drawn[i], keys.batch_normals(1, "noise", key[None], shape)[0])
    np.testing.assert_array_equal(drawn[::-1], keys.batch_normals(1, "noise", batch[::-1], shape))


@given(st.integers(0, 300), st.integers(0, 5))
def test_a_permutation_holds_each_index_once(count, epoch):
    assert sorted(keys.permutation(0, "shuffle", epoch, count).tolist()) == list(range(count))
