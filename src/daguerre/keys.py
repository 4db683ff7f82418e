"""Keyed randomness: every random number is a function of (seed, purpose, sample id, epoch, repeat).

Raw words come from Philox-4x64 (Salmon et al. 2011), whose stream numpy guarantees; everything after
the words (uniforms, normals, permutations) is written here from IEEE-exact operations, so that no library
version changes a number. Nothing here knows of ranks, workers, devices or the clock.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

_WORD = (1 << 64) - 1


@lru_cache(maxsize=256)
def _purpose_word(purpose: str) -> int:
    return int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")


def words(seed: int, purpose: str, sample_id: int, epoch: int = 0, repeat: int = 0, *, count: int) -> np.ndarray:
    """The first `count` raw words [count] uint64 of one key; integers are taken modulo 2**64."""
    philox = np.random.Philox(
        key=np.array([seed & _WORD, _purpose_word(purpose)], dtype=np.uint64),
        counter=np.array([0, sample_id & _WORD, epoch & _WORD, repeat & _WORD], dtype=np.uint64),
    )
    return philox.random_raw(count)


def uniforms(seed: int, purpose: str, sample_id: int, epoch: int = 0, repeat: int = 0, *, count: int) -> np.ndarray:
    """`count` numbers [count] float64 in [0, 1), 53 bits each."""
    return to_uniform(words(seed, purpose, sample_id, epoch, repeat, count=count))


def normals(seed: int, purpose: str, sample_id: int, epoch: int = 0, repeat: int = 0, *, count: int) -> np.ndarray:
    """`count` standard normal numbers [count] float32 of one key."""
    return to_normal(words(seed, purpose, sample_id, epoch, repeat, count=count + count % 2))[:count]


def batch_uniforms(seed: int, purpose: str, keys: np.ndarray) -> np.ndarray:
    """One uniform a sample, [B] float64 in [0, 1), for keys [B, 3] of (sample id, epoch, repeat)."""
    return np.array([uniforms(seed, purpose, *map(int, key), count=1)[0] for key in keys])


def batch_normals(seed: int, purpose: str, keys: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers, [B] and behind it `shape`, float32, for keys [B, 3]; sample i depends on its own key."""
    count = int(np.prod(shape))
    raw = [words(seed, purpose, *map(int, key), count=count + count % 2) for key in keys]
    drawn = to_normal(np.stack(raw))[:, :count] if len(raw) else np.empty((0, count), np.float32)
    return np.ascontiguousarray(drawn).reshape(len(keys), *shape)


def permutation(seed: int, purpose: str, epoch: int, count: int) -> np.ndarray:
    """A permutation [count] int64 of range(count): the order that sorting by one word each gives."""
    return np.argsort(words(seed, purpose, 0, epoch, count=count), kind="stable").astype(np.int64)


def hashed_uniforms(purpose: str, sample_ids: np.ndarray) -> np.ndarray:
    """One number [N] float64 in [0, 1) for each id [N] int64, of the purpose and the id alone: the finaliser of
    SplitMix64 (Steele et al. 2014). For choices among millions of samples, where a Philox key each would take minutes.
    """
    mixed = sample_ids.astype(np.uint64) ^ np.uint64(_purpose_word(purpose))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return to_uniform(mixed ^ (mixed >> np.uint64(31)))


def to_uniform(raw: np.ndarray) -> np.ndarray:
    """Words uint64 to float64 in [0, 1): the upper 53 bits."""
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def to_normal(raw: np.ndarray) -> np.ndarray:
    """Words [..., 2n] uint64 to standard normals [..., 2n] float32 by Box and Muller (1958).

    The first half of the last dim gives radii, the second half angles. The transform runs in float64 with
    `_log` and `_sincos_turns` below, and is rounded once at the end.
    """
    half = raw.shape[-1] // 2
    radius = np.sqrt(-2.0 * _log(to_uniform(raw[..., :half]) + 2.0**-54))
    sin, cos = _sincos_turns(to_uniform(raw[..., half:]))
    return np.concatenate([radius * cos, radius * sin], axis=-1).astype(np.float32)


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive float64, from additions, products and one division: error under 1e-15."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    exponent = exponent - low
    s = (mantissa - 1.0) / (mantissa + 1.0)
    s2 = s * s
    series = np.full_like(s, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        series = series * s2 + 1.0 / odd
    return exponent * 0.6931471805599453 + 2.0 * s * series


_SIN = [(-1.0) ** k / float(np.prod(np.arange(1, 2 * k + 2, dtype=np.float64))) for k in range(9)]
_COS = [(-1.0) ** k / float(np.prod(np.arange(1, 2 * k + 1, dtype=np.float64))) for k in range(10)]


def _sincos_turns(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sine and cosine of `turns` in [0, 1) whole turns: quarter-turn reduction, then Taylor on [-pi/4, pi/4]."""
    quarter = np.floor(turns * 4.0 + 0.5)
    r = (turns - quarter * 0.25) * 6.283185307179586
    r2 = r * r
    sin, cos = np.full_like(r, _SIN[-1]), np.full_like(r, _COS[-1])
    for term in _SIN[-2::-1]:
        sin = sin * r2 + term
    for term in _COS[-2::-1]:
        cos = cos * r2 + term
    sin = sin * r
    q = quarter.astype(np.int64) & 3
    odd = (q & 1).astype(bool)
    sin, cos = np.where(odd, cos, sin), np.where(odd, sin, cos)
    return np.where(q >= 2, -sin, sin), np.where((q == 1) | (q == 2), -cos, cos)
