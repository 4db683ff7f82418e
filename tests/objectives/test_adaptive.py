"""Adaptive loss weights against their closed form: buckets, skips, empty slots, any cut of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from losses import loss_of

from daguerre.errors import UserError
from daguerre.objectives import eps
from daguerre.objectives.adaptive import AdaptiveWeight
from daguerre.types import LossTerms

GO_ON = torch.tensor(False)
KEYS = np.array([[number, 0, 0] for number in range(24)], dtype=np.int64)
SHAPE = (2, 3, 3)


def terms(log_snr, raw) -> LossTerms:
    raw_B = torch.tensor(raw, dtype=torch.float32)
    return LossTerms(raw_B, torch.zeros_like(raw_B), raw_loss_B=raw_B, log_snr_B=torch.tensor(log_snr))


def absorbed(weight: AdaptiveWeight, *batches, skip=GO_ON) -> AdaptiveWeight:
    for log_snr, raw in batches:
        weight.observe(terms(log_snr, raw), torch.ones(len(raw)))
    weight.absorb(lambda tensor: tensor, skip)
    return weight


def test_a_bucket_that_k_samples_hit_moves_k_times_towards_their_mean():
    weight = absorbed(AdaptiveWeight(5, 0.99), ([0.0, 0.5, -20.0], [3.0, 5.0, 7.0]))
    # Edges at -10, -10/3, 10/3 and 10: the first two samples share the middle bucket, the third is beyond the range.
    kept = 0.99**2
    expected = [0.99 + 0.01 * 7.0, 1.0, kept + (1 - kept) * 4.0, 1.0, 1.0]
    np.testing.assert_allclose(weight.table_K, expected, rtol=1e-15)
    np.testing.assert_allclose(weight.weight(torch.tensor([0.1, 30.0])), [1 / expected[2], 1.0], rtol=1e-7)


def test_one_sample_a_time_is_the_published_rule():
    weight, table = AdaptiveWeight(300, 0.99), np.ones(300)
    generator = np.random.default_rng(0)
    for _ in range(200):
        log_snr, raw = float(generator.uniform(-11, 11)), float(generator.uniform(0.1, 2))
        absorbed(weight, ([log_snr], [raw]))
        bucket = np.searchsorted(np.linspace(-10, 10, 299), float(np.float32(log_snr)))
        table[bucket] = 0.99 * table[bucket] + 0.01 * float(np.float32(raw))
    np.testing.assert_allclose(weight.table_K, table, rtol=1e-12)


def test_weights_are_bounded():
    weight = absorbed(AdaptiveWeight(3, 0.0), ([0.0], [0.0]))
    assert weight.weight(torch.tensor([0.0])).tolist() == pytest.approx([1e7])


def test_nothing_is_learnt_from_a_skipped_update_an_empty_slot_or_a_loss_that_is_not_finite():
    weight = absorbed(AdaptiveWeight(5, 0.9), ([0.0], [3.0]), skip=torch.tensor(True))
    assert weight.table_K.tolist() == [1.0] * 5
    weight.observe(terms([0.0, 0.0, 0.0], [9.0, float("nan"), 2.0]), torch.tensor([0.0, 1.0, 1.0]))
    weight.absorb(lambda tensor: tensor, GO_ON)
    assert weight.table_K[2].item() == pytest.approx(0.9 + 0.1 * 2.0, abs=1e-15)


def test_any_cut_over_micro_batches_and_devices_gives_the_same_table():
    levels, losses = np.linspace(-12, 12, 24).tolist(), np.linspace(0.1, 3, 24).tolist()
    whole = absorbed(AdaptiveWeight(9, 0.99), (levels, losses))
    cut = absorbed(AdaptiveWeight(9, 0.99), (levels[:5], losses[:5]), (levels[5:], losses[5:]))
    ranks = [AdaptiveWeight(9, 0.99) for _ in range(4)]
    for rank, own in enumerate(ranks):
        own.observe(terms(levels[rank::4], losses[rank::4]), torch.ones(6))
    total = sum(own._sums for own in ranks)
    for own in ranks:
        own.absorb(lambda _: total, GO_ON)
    for other in (cut, *ranks):
        np.testing.assert_allclose(other.table_K, whole.table_K, rtol=1e-14)


def test_the_defaults_are_stable_cascades():
    weighting = eps.Settings(weighting={"name": "adaptive"}).weighting
    assert (weighting.adaptive_buckets, weighting.adaptive_decay) == (300, 0.99)


def test_an_objective_weighs_by_its_table_and_validates_without():
    objective = eps.build(eps.Settings(weighting={"name": "adaptive", "adaptive_buckets": 4}))
    plain = eps.build(eps.Settings())
    draws = objective.draws(7, KEYS, SHAPE).tensors
    x0 = torch.randn(len(KEYS), *SHAPE, generator=torch.Generator().manual_seed(0))
    first, raw = (loss_of(each, lambda x, c, cond: 0.3 * x, x0, {}, draws) for each in (objective, plain))
    assert torch.equal(first.loss_B, raw.loss_B)
    objective.learnt.observe(first, torch.ones(len(KEYS)))
    objective.learnt.absorb(lambda tensor: tensor, GO_ON)
    second = loss_of(objective, lambda x, c, cond: 0.3 * x, x0, {}, draws)
    assert torch.equal(second.raw_loss_B, raw.loss_B)
    level = torch.log(draws["a"] ** 2 / draws["s"] ** 2)
    table = objective.learnt.state()["adaptive_loss"]
    bucket = torch.bucketize(level.double(), torch.tensor([-10.0, 0.0, 10.0], dtype=torch.float64))
    torch.testing.assert_close(second.loss_B, (raw.loss_B / table[bucket]).float(), rtol=1e-6, atol=0)
    assert len(set(bucket.tolist())) == 2


def test_a_table_of_another_size_or_objective_is_refused_in_words():
    learnt = AdaptiveWeight(5, 0.99)
    restored = AdaptiveWeight(5, 0.99)
    restored.load_state(absorbed(learnt, ([0.0], [3.0])).state())
    assert torch.equal(restored.table_K, learnt.table_K)
    for tensors in ({}, {"adaptive_loss": torch.ones(6, dtype=torch.float64)}):
        with pytest.raises(UserError, match="weighting"):
            learnt.load_state(tensors)
    with pytest.raises(UserError, match="weighting"):
        eps.build(eps.Settings()).learnt.load_state(learnt.state())
