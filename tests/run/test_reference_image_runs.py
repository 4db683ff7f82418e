"""A family that reads reference images, from end to end: layouts of samples change what is computed together alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import picture_readers
import pytest
import torch
from adapter_runs import Place, assert_equal

from daguerre.assembly import parts as building
from daguerre.assembly.parts import Components
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import Loading
from daguerre.data.settings import LoaderSettings
from daguerre.training import step

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, held_out_fraction: 0.2}
training: {duration: 4 steps, global_batch_size: 4, per_device_batch_size: 4}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
checkpoint: {every: 2 steps, export: false}
validation: {every: 2 steps, num_samples: 3, num_levels: 2}
sampling: {num_images: 1, num_inference_steps: 1}
logging: {every: 1 steps, tensorboard: false}
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    place = Place(tmp_path, "sd", RECIPE)
    picture_readers.add_references(tmp_path / "images")
    picture_readers.installed(monkeypatch)
    return place


@pytest.fixture
def built(place) -> tuple[Components, Loading]:
    config = place.config(f"output_dir={place.folder}")
    parts = building.build(config)
    dataset = open_dataset(config.data, "train", parts.images)
    assert dataset.count == 11
    none = partial(dict.fromkeys, ())
    return parts, Loading(dataset, LoaderSettings(), 0, 8, 8, parts.draws, lambda _: none(), images=parts.images)


def micro_batches(loading: Loading, **more) -> list:
    with replace(loading, **more).updates(0) as updates:
        return next(updates)


def gradient(parts: Components, batches: list) -> torch.Tensor:
    parts.net.zero_grad()
    step.backward(parts.net, batches, parts.loss, 8, parts.autocast, lambda terms, valid: None)
    return torch.cat([p.grad.flatten() for p in parts.net.parameters() if p.grad is not None])


@pytest.mark.long  # of the quick tests, training/test_step.py cuts updates
def test_an_update_is_the_same_however_it_is_cut(built):
    parts, loading = built
    whole = micro_batches(loading)
    assert 1 < len(whole) < 8
    expected = gradient(parts, whole)
    assert expected.abs().max() > 0
    for cut in (
        micro_batches(loading, micro_batch_size=1),
        [b for rank in range(2) for b in micro_batches(loading, rank=rank, ranks=2, agreed=lambda count: 4)],
    ):
        assert len(cut) == 8
        found = gradient(parts, cut)
        assert (found - expected).norm() < 1e-4 * expected.norm()


def test_the_pictures_are_read_and_never_noised(built):
    parts, loading = built
    batch = next(b for b in micro_batches(loading) if b.references)
    x0, cond = parts.family.encode(batch)
    moments = parts.family.images.encode(batch.references[0])
    assert cond["pictures"].shape[1] == len(batch.references)
    assert torch.equal(cond["pictures"][:, 0, :4], moments["mean"].contiguous().mean((2, 3)))
    other = replace(batch, images={**batch.images, "reference": 255 - batch.images["reference"]})
    same, changed = parts.family.encode(other)
    assert torch.equal(same, x0)
    losses = [parts.loss(parts.net, one).loss_B for one in (batch, other)]
    assert not torch.equal(*losses)
    assert not torch.equal(changed["pictures"], cond["pictures"])


@pytest.mark.long
def test_a_run_trains_validates_and_goes_on_to_the_bit(place):
    assert place.train("whole") == 0
    assert place.train("halves", "training.duration=2 steps") == 0
    assert place.train("halves", "allow_change=[training]") == 0
    for name in ("learning/loss", "validation/loss"):
        assert place.numbers("halves", name) == place.numbers("whole", name)
        assert place.numbers("whole", name)
    assert_equal(place.tensors("halves", "model"), place.tensors("whole", "model"))
