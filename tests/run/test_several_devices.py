"""`daguerre train` on several processes learns what one process learns, and goes on on any other number of them."""

from __future__ import annotations

from itertools import pairwise

import bases
import forked_runs
import numpy as np
import pytest
import torch
from PIL import Image
from several_devices import MESHES, Runs, zeros


@pytest.mark.parametrize("every_mesh", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_and_four_processes_learn_what_one_does_and_others_go_on(every_mesh, tmp_path):
    half = 2 if every_mesh else 1
    runs, every = Runs(tmp_path, "sd", steps=2 * half), f"checkpoint.every={half} steps"
    saved = "data2-fsdp2" if every_mesh else "fsdp2"
    meshes = MESHES | {"fsdp2": (2, 1, 2, 1)}
    chosen = {name: meshes[name] for name in ["one", *(["two", "fsdp2-tensor2"] if every_mesh else []), saved]}
    later = {"on1": (1, 1, 1, 1), "on2": (2, 1, 1, 2), "on3": (3, 1, 3, 1)} if every_mesh else {}
    export = "checkpoint.export=true"
    plan = [runs.on(name, mesh, every, *([export] if name == "one" else [])) for name, mesh in chosen.items()]
    for name, mesh in later.items():
        copies = [[str(tmp_path / saved), str(tmp_path / name)]]
        drops = [str(tmp_path / name / "checkpoints" / f"step-{2 * half:08d}")]
        plan.append(runs.on(name, mesh, every, export) | {"copies": copies, "drops": drops})
    codes = forked_runs.together(tmp_path, plan)
    assert zeros(codes), [runs.log(name) for name in [*chosen, *later]]
    for name, (size, *_) in chosen.items():
        runs.assert_equal(name, "one")
        assert runs.samples(name, size) == runs.samples("one", 1)
    for name, (size, *_) in later.items():
        assert f"continuing from step-{half:08d}" in runs.log(name)
        runs.assert_equal(name, "one")
        assert runs.samples(name, size) == runs.samples("one", 1)[half:]
        runs.assert_same_export(name, "one")


@pytest.mark.long
def test_rank_0_says_what_cannot_be(tmp_path):
    runs = Runs(tmp_path, "sd", steps=4)
    odd, wrong = runs.on("odd", (2, 2, 1, 1), "training.global_batch_size=3"), runs.on("wrong", (2, 2, 2, 1))
    assert forked_runs.together(tmp_path, [odd, wrong]) == [[2, 2], [2, 2]]
    assert "cannot be split evenly over 2 devices" in runs.log("odd")
    assert "ici_data_parallelism 2 x ici_fsdp_parallelism 2 = 4, but there are 2 devices" in runs.log("wrong")
    for name in ("odd", "wrong"):
        assert (tmp_path / f"{name}.seen.log-1").read_text() == "", "rank 0 has said it"


@pytest.mark.long
@pytest.mark.parametrize("kind", bases.WRITERS)
def test_every_mesh_learns_what_one_process_does(kind, tmp_path):
    runs = Runs(tmp_path, kind, steps=50, batch=4)
    again = {f"{name} again": mesh for name, mesh in MESHES.items()}
    codes = forked_runs.together(
        tmp_path, [runs.on(name, mesh) for name, mesh in {**MESHES, **again}.items()], seconds=1500
    )
    assert zeros(codes)
    for name, (size, *_) in MESHES.items():
        runs.assert_equal(name, "one")
        assert runs.samples(name, size) == runs.samples("one", 1)
        assert runs.numbers(name) == runs.numbers(f"{name} again"), "the same mesh twice is equal to the bit"
        for group in ("model", "ema", "optimizer"):
            one, other = runs.tensors(name, group), runs.tensors(f"{name} again", group)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), (name, group)


@pytest.mark.long
@pytest.mark.parametrize("kind", bases.WRITERS)
def test_exports_images_and_validation_are_those_of_one_process(kind, tmp_path):
    more = ["checkpoint.export=true", "sampling.num_images=3", "validation.every=2 steps", "validation.num_samples=3"]
    runs = Runs(tmp_path, kind, steps=4)
    assert zeros(forked_runs.together(tmp_path, [runs.on(name, mesh, *more) for name, mesh in MESHES.items()]))
    for name in MESHES:
        runs.assert_same_export(name, "one")
        drawn = sorted((tmp_path / name / "samples").rglob("[0-9][0-9][0-9].png"))  # not what they were told
        assert len(drawn) == 3
        for path in drawn:
            other = tmp_path / "one" / path.relative_to(tmp_path / name)
            levels = [np.asarray(Image.open(each)).astype(int) for each in (path, other)]
            assert np.abs(levels[0] - levels[1]).max() <= 1
        assert runs.numbers(name, "validation/loss") == pytest.approx(runs.numbers("one", "validation/loss"), rel=1e-5)


@pytest.mark.long
def test_any_mesh_goes_on_from_any_other(tmp_path):
    runs, every = Runs(tmp_path, "sd", steps=12, batch=4), "checkpoint.every=2 steps"
    assert zeros(forked_runs.together(tmp_path, [runs.on("one", MESHES["one"], every)]))
    order = ["data4", "fsdp2-tensor2", "one", "fsdp4", "data2-tensor2", "data2-fsdp2"]
    lengths = [f"training.duration={2 * (number + 1)} steps" for number in range(len(order))]
    chain = [runs.on("chain", MESHES[name], every, length) for name, length in zip(order, lengths, strict=True)]
    assert zeros(forked_runs.together(tmp_path, chain))
    runs.assert_equal("chain", "one")
    assert all(later == earlier + 1 for earlier, later in pairwise(runs.numbers("chain", "step")))
