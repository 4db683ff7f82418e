"""Runs with `adapter.name=lora` from end to end: what a checkpoint holds, going on, other meshes, what they leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import bases
import forked_runs
import numpy as np
import pytest
import torch
from adapter_runs import IMAGES, MESHES, Place, assert_equal
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from daguerre import errors
from daguerre.assembly import base_digests
from daguerre.checkpoint.store import Store
from daguerre.cli import main
from daguerre.models.export.about import About
from daguerre.models.lora_files import header
from daguerre.models.lora_files.addition import DIFFUSERS_FILE as FILE

RECIPE = """
run_name: lora
model: {family: KIND}
objective: {name: eps}
adapters: {style: {name: lora, rank: 4, alpha: 2.5, dropout: 0.0, ranks: {text_encoder: 2}}}
data: {source: folder, resolution: 16}
training: {duration: "4 steps", global_batch_size: 12}
# Gradients that are nearly zero must not become whole steps: one rounding of the base (an ulp) then moves no tensor by
# more than 6e-5 of its norm (5e-4 with an epsilon of 1e-6).
optimizer: {learning_rate: 1e-4, epsilon: 1e-5}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: [a dog]}
validation: {every: "2 steps", num_samples: 3, num_levels: 2}
"""


def asked_for(sample: Path) -> list[str]:
    """What `generate` is asked for to draw a run's sample again: Stage B makes an image again."""
    image = sample.with_suffix(".image.png")
    return ["prompt=a dog", *([f"image={image}"] if image.exists() else [])]


@pytest.fixture(
    scope="module",
    params=[kind if kind == "sd" else pytest.param(kind, marks=pytest.mark.long) for kind in bases.WRITERS],
)
def place(request, tmp_path_factory):
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp(request.param), request.param, RECIPE)
    files = {path: path.read_bytes() for path in (made.folder / "base").rglob("*") if path.is_file()}
    assert made.train("whole") == errors.DONE
    assert all(path.read_bytes() == content for path, content in files.items())
    return made


def test_a_checkpoint_holds_the_adapter_alone(place):
    model = place.tensors("whole")
    assert all(".lora_A." in name or ".lora_B." in name for name in model)
    assert {t.dtype for t in model.values()} == {torch.float32}
    numbers = sum(t.numel() for t in model.values())
    files = [file for part in place.networks for file in (place.folder / "base" / part).glob("*.safetensors")]
    base = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert numbers < (0.06 if place.is_cascade else 0.03) * base, "the cascades' twins are the smallest"
    ranks = {name.split(".")[0]: t.shape[0] for name, t in model.items() if ".lora_A." in name}
    assert ranks == {place.denoiser: 4, "text_encoder": 2}
    sizes = {f.stem: f.stat().st_size for f in (place.folder / "whole/checkpoints/step-00000004").glob("*.safetensors")}
    header = 256 * len(model)
    assert 4 * numbers <= sizes["model"] <= 4 * numbers + header
    assert sizes["ema"] <= 4 * numbers + header
    assert sizes["optimizer"] <= 8 * numbers + 4 * header
    moments = [name for name in place.tensors("whole", "optimizer") if name.endswith(".exp_avg")]
    assert len(moments) == len(model)
    assert any(name.startswith("text_encoder.") for name in model)


def test_it_learns_draws_validates_and_exports(place):
    first, last = place.tensors("whole", step=2), place.tensors("whole")
    assert not any(torch.equal(first[name], last[name]) for name in last)
    assert len(place.numbers("whole", "validation/loss")) == 2
    drawn = sorted((place.folder / "whole/samples").glob("*/000.png"))  # without those that Stage B compressed
    assert len(drawn) == 2
    assert drawn[0].read_bytes() != drawn[1].read_bytes()
    with safe_open(place.folder / "whole/adapter/kohya.safetensors", "pt") as file:
        told = file.metadata()
    assert sum(json.loads(told["ss_tag_frequency"])["images"].values()) == IMAGES - 1, "one is held out"
    assert told["modelspec.thumbnail"] == header.modelspec({}, About(image=drawn[1]))["modelspec.thumbnail"]
    averaged, names = place.tensors("whole", "ema"), set()
    for key, tensor in place.exported("whole").items():
        name = key.replace(".text_model.", ".").replace(".weight", ".default.weight")
        name = name if name in averaged else key.replace(".weight", ".default.weight")
        assert torch.equal(tensor, averaged[name])
        names.add(name)
    assert names == averaged.keys()


def assert_equal_to_whole(place, name):
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors(name, group), place.tensors("whole", group))
    assert_equal(place.exported(name), place.exported("whole"))
    assert place.numbers(name, "learning/loss") == place.numbers("whole", "learning/loss")


@pytest.mark.long  # of the quick tests, the next one goes on after a kill
def test_a_shorter_run_that_goes_on_ends_equal_to_the_bit(place):
    assert place.train("short", "training.duration=2 steps") == errors.DONE
    assert place.train("short", "training.duration=4 steps") == errors.DONE
    assert_equal_to_whole(place, "short")


def test_a_killed_run_ends_equal_to_the_bit(place):
    shutil.copytree(place.folder / "whole", place.folder / "killed")  # as a kill behind the first save leaves it
    shutil.rmtree(place.folder / "killed/checkpoints/step-00000004")
    (place.folder / "killed/status.json").unlink()
    assert place.train("killed") == errors.DONE
    assert_equal_to_whole(place, "killed")


@pytest.mark.long
@pytest.mark.parametrize("own", ["init: pissa", "kind: dora, lora_fa: true, dropout: 0.2"])
def test_killed_at_random_moments_it_ends_equal_to_the_bit(place, own):
    """By SIGKILL, six times a run; PiSSA's start is in the checkpoint and not computed again."""
    place.assert_kills_change_nothing(f"adapters.style={{name: lora, rank: 4, {own}, ranks: {{text_encoder: 2}}}}")


def test_generate_draws_what_the_run_drew(place, capsys):
    run = place.folder / "whole"
    sample = run / "samples/step-00000004/000.png"
    given = [*asked_for(sample), "seed=0", f"out={place.folder / 'drawn'}", "num_images=1"]
    assert main.run(["generate", str(run), *given]) == errors.DONE, capsys.readouterr()
    (drawn,) = (place.folder / "drawn").glob("*.png")
    assert np.array_equal(np.asarray(Image.open(drawn)), np.asarray(Image.open(sample)))


@pytest.mark.long
def test_convert_export_writes_the_adapter_and_the_merged_networks(place):
    run, folder = place.folder / "whole", place.folder
    assert main.run(["convert", "export", str(run), "format=adapters", f"out={folder / 'raw'}", "weights=raw"]) == 0
    raw, model = load_file(folder / "raw" / FILE), place.tensors("whole")
    key = next(key for key in raw if key.startswith(f"{place.denoiser}."))
    assert torch.equal(raw[key], model[key.replace(".weight", ".default.weight")])
    assert main.run(["convert", "export", str(run), "format=diffusers", f"out={folder / 'merged'}"]) == 0
    for part in place.networks:
        (of_base,), (merged,) = ([*(folder / p / part).glob("*.safetensors")] for p in ("base", "merged"))
        before, after = load_file(of_base), load_file(merged)
        before = {n.removeprefix("text_model."): t for n, t in before.items()}
        after = {n.removeprefix("text_model."): t for n, t in after.items()}
        assert before.keys() == after.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        ends = {
            place.denoiser: ("to_q", "to_k", "to_v", "to_out.0"),
            "text_encoder": ("q_proj", "k_proj", "v_proj", "out_proj"),
        }
        assert changed
        assert all(name.removesuffix(".weight").endswith(ends[part]) for name in changed)


def test_another_base_is_refused_with_both_names(place, capsys):
    other = place.folder / "other"
    shutil.copytree(place.folder / "base", other)
    shutil.copytree(place.folder / "whole", place.folder / "moved")
    (file,) = (other / place.denoiser).glob("*.safetensors")
    named = f"model.pretrained_model_name_or_path={other}"
    capsys.readouterr()
    assert place.train("moved", named) == errors.DONE, "the same weights elsewhere are the base"
    assert "its weights must be those that the run was begun with" in capsys.readouterr().out
    torch_file = load_file(file)
    next(iter(torch_file.values())).view(-1)[0] += 1e-3
    save_file(torch_file, file, {"format": "pt"})
    capsys.readouterr()
    assert place.train("moved", named) == errors.REFUSED
    said = capsys.readouterr().err
    assert f"was trained on another {place.denoiser}" in said
    assert str(place.folder / "base") in said
    assert str(other) in said
    (of_base,) = (place.folder / "base" / place.denoiser).glob("*.safetensors")
    before = of_base.read_bytes()
    shutil.copyfile(file, of_base)
    assert main.run(["generate", str(place.folder / "whole"), "prompt=x"]) == errors.REFUSED
    of_base.write_bytes(before)
    assert f"was trained on another {place.denoiser}" in capsys.readouterr().err


def test_a_checkpoint_that_names_no_base_is_refused():
    with pytest.raises(errors.UserError, match="does not record which base model it belongs to"):
        base_digests.check_same_base(None, {}, "step-00000001")


@pytest.mark.long  # of the quick tests, pivotal tuning in test_token_runs.py has a LoRA on fsdp2
@pytest.mark.parametrize("meshes", [("fsdp2",), ("fsdp2", "data2", "tensor2", "fsdp2-tensor2")])
def test_other_meshes_learn_what_one_process_does(place, meshes):
    chosen = {name: MESHES[name] for name in meshes}
    for name in (*chosen, "later"):
        shutil.rmtree(place.folder / name, ignore_errors=True)
    plan = [place.on(name, mesh) for name, mesh in chosen.items()]
    copies = [[str(place.folder / "fsdp2"), str(place.folder / "later")]]
    drops = [str(place.folder / "later/checkpoints/step-00000004")]
    plan.append(place.on("later", MESHES["tensor2"]) | {"copies": copies, "drops": drops})
    codes = forked_runs.together(place.folder, plan)
    logs = [(place.folder / f"{name}.seen.log-0").read_text() for name in (*chosen, "later")]
    assert all(code == 0 for run in codes for code in run), logs
    expected, losses = place.tensors("whole", "ema"), place.numbers("whole", "learning/loss")
    for name in [*chosen, "later"]:
        assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5)
        found = place.tensors(name, "ema")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), (name, key)
        exported, of_one = place.exported(name), place.exported("whole")
        assert exported.keys() == of_one.keys()
        assert all((exported[key] - of_one[key]).abs().max() < 2e-6 for key in of_one), name


@pytest.mark.long  # of the quick tests, test_precision_runs.py computes again, and test_train.py cuts a batch
@pytest.mark.parametrize(
    "given",
    [["training.gradient_checkpointing=true"], ["training.per_device_batch_size=4"]],
    ids=["gradient checkpointing", "micro-batches"],
)
def test_what_only_says_how_to_compute_changes_nothing(place, given, request):
    name = request.node.callspec.id.replace(" ", "-")
    assert place.train(name, *given) == errors.DONE
    assert place.numbers(name, "learning/loss") == pytest.approx(place.numbers("whole", "learning/loss"), rel=1e-6)
    expected = place.tensors("whole")
    for key, value in place.tensors(name).items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key


@pytest.mark.long
def test_a_base_of_16_bits_with_additions_of_float32_goes_on_equal_to_the_bit(place):
    narrow = "training.weights_dtype=bfloat16"
    assert place.train("narrow", narrow) == errors.DONE
    assert place.train("narrow-short", narrow, "training.duration=2 steps") == errors.DONE
    assert place.train("narrow-short", narrow, "training.duration=4 steps") == errors.DONE
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("narrow", group), place.tensors("narrow-short", group))
    assert {t.dtype for t in place.tensors("narrow").values()} == {torch.float32}
    assert place.numbers("narrow", "learning/loss") == pytest.approx(place.numbers("whole", "learning/loss"), rel=0.05)
    assert place.numbers("narrow", "learning/loss") != place.numbers("whole", "learning/loss")


def test_the_header_tells_of_the_run(place):
    """The base by its last name and digest, and not the folder of this machine."""
    with safe_open(place.folder / "whole" / "adapter" / "kohya.safetensors", "pt") as file:
        header = file.metadata()
    told = {"ss_output_name": "whole", "ss_steps": "4", "ss_sd_model_name": "base"}
    told |= {"modelspec.title": "whole", "modelspec.prediction_type": "epsilon"}
    px = 64 if place.is_cascade else 16
    told |= {"ss_resolution": f"({px}, {px})", "modelspec.resolution": f"{px}x{px}"}
    assert {name: header[name] for name in told} == told
    store = Store(place.folder / "whole" / "checkpoints")
    base = store.load(store.root / "step-00000004", []).documents["base"]
    found = json.loads(header["daguerre.base"])
    assert {name: own["digest"] for name, own in found.items()} == {name: own["digest"] for name, own in base.items()}
    assert {own["place"] for own in found.values()} == {"base", *(["effnet.safetensors"] if place.is_cascade else [])}
    assert str(place.folder) not in json.dumps(header)


def test_the_page_shows_the_first_images_at_several_strengths(place, tmp_path):
    """At 0 they are the base's, at 1 the newest sample's."""
    run = place.folder / "whole"
    listed = {path.parent.name: json.loads(path.read_text()) for path in run.glob("samples/strengths/*/samples.json")}
    assert {name: own[0]["strength"] for name, own in listed.items()} == {"0": 0.0, "0.5": 0.5, "1": 1.0}
    images = {name: np.asarray(Image.open(run / "samples" / "strengths" / name / "000.png")) for name in listed}
    newest = run / "samples" / "step-00000004" / "000.png"
    assert np.array_equal(images["1"], np.asarray(Image.open(newest)))
    given = ["base=true", *asked_for(newest), f"out={tmp_path / 'base'}", f"seed={listed['0'][0]['seed']}"]
    assert main.run(["generate", str(run), *given]) == errors.DONE
    (base,) = (tmp_path / "base").glob("*.png")
    assert np.array_equal(images["0"], np.asarray(Image.open(base)))
    page = (run / "report.html").read_text()
    assert page.index("strength 0<") < page.index("strength 0.5<") < page.index("strength 1<")


@pytest.mark.long  # of the quick tests, adapters/test_tokens.py has a LoRA beside another
def test_a_lora_beside_an_encoder_that_is_trained_whole(place):
    more = ["adapters.style.ranks.text_encoder=null", "adapters.encoder={name: full, train: [text_encoder]}"]
    assert place.train("both", *more, "training.duration=2 steps") == errors.DONE
    assert place.train("both", *more) == errors.DONE
    names = place.tensors("both").keys()
    whole = {name for name in names if name.startswith("text_encoder.")}
    assert {name for name in names - whole if ".lora_" not in name} == set()
    assert len(whole) > 10
    assert not any(".lora_" in name for name in whole)
    run = place.folder / "both"
    assert load_file(run / "adapter" / FILE).keys()
    parts = {part: [place.folder / "base" / part, run / "pipeline" / part] for part in place.networks}
    same = {}
    for part, folders in parts.items():
        of_base, found = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
        found = (
            found if found.keys() == of_base.keys() else {n.removeprefix("text_model."): t for n, t in found.items()}
        )
        assert found.keys() == of_base.keys()
        same[part] = all(torch.equal(found[name], of_base[name]) for name in found)
    assert same == {place.denoiser: True, "text_encoder": False}


@pytest.mark.long  # of the quick tests, adapters/test_lora_from_file.py
def test_from_a_file_come_the_additions_with_its_strength(place, capsys):
    """Also of a run that has another alpha."""
    file = place.folder / "whole/adapter/kohya.safetensors"
    given = [
        f"init_from={file}",
        "adapters.style.alpha=5",
        "training.duration=1 steps",
        "optimizer.learning_rate=1e-30",
    ]
    assert place.train("from-file", *given) == errors.DONE
    said = capsys.readouterr().out
    assert f"layers start from the LoRA in {file}" in said
    averaged, own = place.tensors("whole", "ema"), place.tensors("from-file", step=1)
    for name, value in averaged.items():
        factor = 2.5 / 5 if ".lora_B." in name else 1
        torch.testing.assert_close(own[name], factor * value, rtol=1e-6, atol=1e-9)
    other = [f"init_from={file}", "adapters.style.rank=8", "run_name=other"]
    assert place.train("other", *other) == errors.REFUSED
    assert "daguerre convert resize" in capsys.readouterr().err


@pytest.mark.long
def test_from_another_run_come_the_additions_alone(place, capsys):
    assert place.train("from", f"init_from={place.folder / 'whole'}", "training.duration=1 steps",
                       "optimizer.learning_rate=1e-30") == errors.DONE  # fmt: skip
    assert_equal(place.tensors("from", step=1), place.tensors("whole", "ema"))
    full = ["adapter=full", "run_name=all", "training.duration=1 steps", f"init_from={place.folder / 'whole'}"]
    assert place.train("all", *full) == errors.REFUSED
    assert "init_from" in capsys.readouterr().err
