"""Runs with `adapter.name=tokens` from end to end, alone and beside a LoRA: checkpoints, going on, other meshes."""

from __future__ import annotations

import shutil

import forked_runs
import pytest
import torch
from adapter_runs import MESHES, Place
from safetensors.torch import load_file

from daguerre import errors

RECIPE = """
run_name: tokens
model: {family: KIND}
objective: {name: eps}
adapters: {tokens: {name: tokens, placeholder_token: <toy>, initializer_token: a, num_vectors: 3}}
data: {source: folder, resolution: 16, caption_dropout: 0, captions: {text: <toy>, templates: object}}
training: {duration: "4 steps", global_batch_size: 4}
optimizer: {learning_rate: 1e-2, epsilon: 1e-5}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: ["a <toy>"]}
validation: {every: "2 steps", num_samples: 2, num_levels: 2}
"""
PIVOTAL = "adapters.lora={name: lora, rank: 2, ranks: {text_encoder: 2}}"


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory):
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp(request.param), request.param, RECIPE, captions=False)
    assert made.train("whole") == errors.DONE
    return made


@pytest.mark.long
def test_a_checkpoint_holds_the_rows_alone_and_the_export_their_averages(place):
    model, averaged = place.tensors("whole"), place.tensors("whole", "ema")
    names = ["text_encoder", "text_encoder_2"][: 1 if place.kind == "sd" else 2]
    assert {name.partition(".")[0] for name in model} == {*names}
    assert all(name.endswith("token_embedding.rows") and len(value) == 3 for name, value in model.items())
    for name, before in place.tensors("whole", step=2).items():
        assert not torch.equal(before, model[name])
    for name in names:
        file = place.folder / "whole" / "adapter" / f"learned_embeds{name.removeprefix('text_encoder')}.safetensors"
        (rows,) = (value for key, value in averaged.items() if key.startswith(f"{name}."))
        assert torch.equal(load_file(file)["<toy>"], rows)
    assert len(place.numbers("whole", "validation/loss")) == 2


def test_a_run_that_goes_on_ends_equal_to_the_bit_and_so_do_its_files(place):
    assert place.train("short", "training.duration=2 steps") == errors.DONE
    assert place.train("short", "training.duration=4 steps") == errors.DONE
    for group in ("model", "ema", "optimizer"):
        one, other = (place.tensors(name, group) for name in ("short", "whole"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    files = [sorted((place.folder / name / "adapter").glob("learned*")) for name in ("short", "whole")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), (PIVOTAL,)], ids=["alone", "pivotal"])
def test_killed_at_random_moments_it_ends_equal_to_the_bit(place, more):
    place.assert_kills_change_nothing(*more)


@pytest.mark.long
@pytest.mark.parametrize(
    ("meshes", "more"),
    [
        (("fsdp2", "data2", "tensor2", "fsdp2-tensor2"), ()),
        (("fsdp2", "data2", "tensor2", "fsdp2-tensor2"), (PIVOTAL,)),
    ],
    ids=["alone", "pivotal"],
)
def test_other_meshes_learn_what_one_process_does(place, meshes, more):
    one = "pivotal" if more else "whole"
    if not (place.folder / one).exists():
        assert place.train(one, *more) == errors.DONE
    for name in meshes:
        shutil.rmtree(place.folder / name, ignore_errors=True)
    codes = forked_runs.together(place.folder, [place.on(name, MESHES[name], *more) for name in meshes])
    logs = [(place.folder / f"{name}.seen.log-0").read_text() for name in meshes]
    assert all(code == 0 for run in codes for code in run), logs
    expected, losses = place.tensors(one, "ema"), place.numbers(one, "learning/loss")
    for name in meshes:
        assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5)
        found = place.tensors(name, "ema")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), (name, key)


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [["training.gradient_checkpointing=true"], ["training.per_device_batch_size=2"]], ids=["again", "parts"]
)
def test_what_only_says_how_to_compute_changes_nothing(place, given, request):
    name = request.node.callspec.id
    assert place.train(name, *given) == errors.DONE
    expected = place.tensors("whole")
    for key, value in place.tensors(name).items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key


def test_a_token_in_no_caption_is_told_and_a_dry_run_counts_its_rows(place, capsys):
    more = ["data.captions.text=a cat", "training.duration=1 steps", "sampling.num_images=0", "validation.every=null"]
    assert place.train("unseen", *more) == errors.DONE
    assert "the new token <toy> is in none of the first" in " ".join(capsys.readouterr().out.split())
    assert place.train("dry", "--dry-run") == errors.DONE
    count = sum(value.numel() for value in place.tensors("whole").values())
    assert f"{count:,}" in capsys.readouterr().out or place.kind == "sdxl"
