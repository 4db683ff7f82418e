"""Runs of Stage C and Stage B from end to end: killed and gone on with, averages, exports opened again, lists."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_runs import Place, assert_equal
from diffusers import StableCascadePriorPipeline, StableCascadeUNet
from PIL import Image
from safetensors.torch import load_file
from tiny_cascade import write_decoder
from tiny_runs import outcome

from daguerre import errors
from daguerre.cli import main
from daguerre.run import results
from daguerre.training import step

RECIPE = """
run_name: cascade
model: {family: KIND}
objective: {name: eps, weighting: {name: adaptive, adaptive_buckets: 12}}
data: {source: folder, resolution: 64, crop: random}
training: {duration: "6 steps", global_batch_size: 4}
optimizer: {learning_rate: 1e-3}
ema: {name: stable_cascade, start_steps: 3, every_steps: 2, decay: 0.9}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, guidance_scale: 3, prompts: [a dog]}
validation: {every: "3 steps", num_samples: 2, num_levels: 2}
"""


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module", params=["cascade_c", pytest.param("cascade_b", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp(request.param), request.param, RECIPE)
    assert made.train("whole") == errors.DONE
    return made


def drawn(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))}


def generate(*given: Any) -> None:
    assert main.run(["generate", *map(str, given)]) == errors.DONE


@pytest.mark.long  # of the quick tests, test_recipes_train.py kills a run of Stage B
@pytest.mark.parametrize(("what", "at"), [("save", 2), ("update", 5)])
def test_killed_it_ends_equal_to_the_bit(place, monkeypatch, what, at):
    """Weights, averages, moments, the table of adaptive weights, metrics, images and the export."""
    owner: Any = {"save": results, "update": step}[what]
    unharmed, calls, name = getattr(owner, what), [], f"killed-{what}"

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(owner, what, deadly)
        with pytest.raises(Killed):
            place.train(name)
    assert place.train(name) == errors.DONE
    expected, found = (outcome(place.folder / run) for run in ("whole", name))
    assert found["lines"] == expected["lines"]
    assert found["files"].keys() == expected["files"].keys()
    assert any(file.startswith(f"pipeline/{place.denoiser}/") for file in found["files"])
    differ = {file for file, content in expected["files"].items() if found["files"][file] != content}
    assert not differ
    tables = [place.tensors(run, "objective", step=6)["adaptive_loss"] for run in ("whole", name)]
    assert torch.equal(*tables)
    assert not torch.equal(tables[0], torch.ones_like(tables[0]))


@pytest.mark.long
def test_killed_at_random_moments_it_ends_equal_to_the_bit(place):
    place.assert_kills_change_nothing()


@pytest.mark.long
def test_averages_are_copies_before_their_start_and_are_what_is_exported(place):
    model, ema = place.tensors("whole", "model", step=2), place.tensors("whole", "ema", step=2)
    assert all(torch.equal(model[name], ema[name]) for name in model), "moved at the second update, before the third"
    last, averaged = place.tensors("whole", "model", step=6), place.tensors("whole", "ema", step=6)
    fourth, second = place.tensors("whole", "model", step=4), model
    for name, value in averaged.items():
        wanted = 0.9 * (0.9 * second[name] + 0.1 * fourth[name]) + 0.1 * last[name]
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    (file,) = (place.folder / "whole" / "pipeline" / place.denoiser).glob("*.safetensors")
    exported = load_file(file)
    assert {f"{place.denoiser}.{name}" for name in exported} == averaged.keys()
    assert all(torch.equal(value, averaged[f"{place.denoiser}.{name}"]) for name, value in exported.items())


@pytest.mark.long  # of the quick tests, test_an_export_is_opened_again
def test_an_export_says_what_its_network_predicts(place, tmp_path, capsys):
    """A pipeline that predicts v generates as its run, also where it lies alone, and training that starts from it is
    told of the difference only if it trains something else."""
    assert place.train("v", "objective.name=v", "training.duration=2 steps", "validation.every=null") == errors.DONE
    run, relearns = place.folder / "v", "it has to relearn"
    assert relearns in "".join(capsys.readouterr())
    copy = shutil.copytree(run / "pipeline", tmp_path / "copy")
    given = ["prompt=a fox", "num_inference_steps=2", "guidance_scale=3", "height=64", "width=64", "sampler=ddim"]
    given += ["shift=2"]
    beside = [each for each in place.base if "effnet" in each or "previewer" in each]
    for source, more in ((run, []), (copy, beside)):
        generate(source, *given, *more, f"out={tmp_path / source.name}-images")
    assert np.array_equal(*(drawn(tmp_path / f"{name}-images")["000.png"] for name in ("v", "copy")))
    for objective in ("v", "eps"):
        capsys.readouterr()
        more = [f"model.pretrained_model_name_or_path={copy}", f"objective.name={objective}"]
        assert place.train(f"from-v-{objective}", "--dry-run", *more) == errors.DONE
        assert (relearns in "".join(capsys.readouterr())) == (objective == "eps")


def test_an_export_is_opened_again(place, tmp_path):
    """As a pipeline's folder and as Stability's single file, by Daguerre and by diffusers: same weights, same image."""
    run, name = place.folder / "whole", place.denoiser
    given = ["prompt=a fox", "seed=3", "num_inference_steps=2", "guidance_scale=3", "height=64", "width=64"]
    given += ["sampler=euler_ancestral", "shift=2"]
    generate(run, *given, f"out={tmp_path / 'run'}")
    beside = [each for each in place.base if "effnet" in each or "previewer" in each]
    copy = shutil.copytree(run / "pipeline", tmp_path / "copy")
    generate(copy, *given, *beside, f"out={tmp_path / 'pipeline'}")
    file = tmp_path / "stage.safetensors"
    assert main.run(["convert", "export", str(run), "format=single_file", f"out={file}"]) == errors.DONE
    one_head = json.loads((run / "pipeline" / name / "config.json").read_text())
    one_head["num_attention_heads"] = [-1 if heads < 0 else 1 for heads in one_head["num_attention_heads"]]
    # A file of Stability's has heads of 64 channels, or one.
    (copy / name / "config.json").write_text(json.dumps(one_head))
    for kind, model in (("one-head", []), ("file", [f"model.{name}={file}"])):
        generate(copy, *given, *beside, *model, f"out={tmp_path / kind}")
    images = {kind: drawn(tmp_path / kind)["000.png"] for kind in ("run", "pipeline", "file", "one-head")}
    assert np.array_equal(images["run"], images["pipeline"])
    assert np.array_equal(images["file"], images["one-head"])
    theirs = StableCascadeUNet.from_pretrained(run / "pipeline" / name).state_dict()
    averaged = place.tensors("whole", "ema", step=6)
    assert_equal({f"{name}.{key}": value for key, value in theirs.items()}, averaged)
    if name == "prior":
        pipe = StableCascadePriorPipeline.from_pretrained(run / "pipeline")
        pipe.set_progress_bar_config(disable=True)
        found = pipe("a fox", num_inference_steps=2, height=128, width=128).image_embeddings
        assert found.shape == (1, 16, 3, 3)


@pytest.mark.long
def test_its_page_has_the_options_by_which_the_folder_alone_draws_as_the_run(place, tmp_path):
    """Without them it draws by the published shift and guidance."""
    short = ["training.duration=1 steps", "validation.every=null", "checkpoint.every=1 steps", "ema.enabled=false"]
    assert place.train("paged", "sampling.guidance_rescale=0.7", *short) == errors.DONE
    run, drawings = place.folder / "paged", {}
    page = (run / "pipeline" / "README.md").read_text()
    example = re.findall("```python\\n(.*?)```", page, re.DOTALL)[0].replace("path/to/this/folder", f"{run}/pipeline")
    told: dict[str, Any] = {"image_embeddings": torch.zeros(1, 16, 3, 3)}
    exec(compile(example, "README.md", "exec"), told)  # noqa: S102
    assert told["image"] is not None
    options = shlex.split(re.findall(r"^    (sampler=.*)$", page, re.MULTILINE)[0])
    assert {"shift=1.0", "guidance_rescale=0.7"} <= {*options}
    copy = shutil.copytree(run / "pipeline", tmp_path / "copy")
    beside = [each for each in place.base if "effnet" in each or "previewer" in each]
    for name, source, more in (("run", run, []), ("told", copy, [*beside, *options]), ("alone", copy, beside)):
        out = tmp_path / f"{name}-images"
        generate(source, "prompt=a fox", "height=64", "width=64", *more, f"out={out}")
        drawings[name] = drawn(out)["000.png"]
    assert np.array_equal(drawings["run"], drawings["told"])
    assert not np.array_equal(drawings["run"], drawings["alone"])


@pytest.mark.long
@pytest.mark.parametrize("decode", ["previewer", "stages"])
def test_lists_shards_and_restarts_draw_the_same(place, decode, tmp_path, capsys):
    """Whatever process draws what, and after a part was lost; Stage B behind Stage C draws by the image's own seed."""
    if (place.kind, decode) == ("cascade_b", "stages"):
        pytest.skip("Stage B has no other decoder than Stage A")
    rows = [{"prompt": f"thing {i}", "height": 64 + 32 * (i % 2), "width": 64, "mood": f"m{i}"} for i in range(6)]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    given = [place.folder / "whole", f"prompts_file={tmp_path / 'list.csv'}", "seed=5"]
    if decode == "stages":
        stages = write_decoder(tmp_path / "b")
        given += ["model.decode.name=stages", "model.decode.num_inference_steps=2"]
        given += [f"model.decoder={stages}", f"model.vqgan={stages}"]
    generate(*given, f"out={tmp_path / 'whole'}", "batch_size=2")
    generate(*given, f"out={tmp_path / 'large'}", "batch_size=8")
    for part in ("2/2", "1/2"):
        generate(*given, f"out={tmp_path / 'parts'}", f"shard={part}")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for lost in ("001.json", "004.png"):
        (tmp_path / "again" / lost).unlink()
    capsys.readouterr()
    generate(*given, f"out={tmp_path / 'again'}", "batch_size=2")
    assert "4 of 6 images already exist and are complete: kept" in capsys.readouterr().out
    expected = drawn(tmp_path / "whole")
    assert len(expected) == 6
    for name in ("large", "parts", "again"):
        found = drawn(tmp_path / name)
        assert found.keys() == expected.keys()
        assert max(np.abs(found[each] - expected[each]).max() for each in expected) <= 1
    documents = [json.loads((tmp_path / name / "003.json").read_text()) for name in ("whole", "parts")]
    assert len({each["initial_noise_sha256"] for each in documents}) == 1
    assert documents[0]["mood"] == "m3"
    if decode == "stages":  # by another decoder they are other images
        other = [str(word) for word in given if "num_inference_steps" not in str(word)]
        assert main.run(["generate", *other, f"out={tmp_path / 'whole'}"]) == errors.REFUSED
        assert "num_inference_steps" in capsys.readouterr().err
