"""`daguerre evaluate` and `daguerre reference` from end to end, on a tiny run with tiny feature networks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiny_feature_networks
import tiny_runs
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import CLIPModel

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.evaluation import blocks, compare, reference, results
from daguerre.evaluation.formulas import frechet, kernels, pairs
from daguerre.evaluation.networks import clip
from daguerre.evaluation.networks.place import NetworkPlace
from daguerre.evaluation.settings import EvaluationSettings
from daguerre.generation.jobs import WHOLE
from daguerre.report import page


class Setup(NamedTuple):
    """A run of three checkpoints, networks and a reference."""

    run: Path
    options: list[str]


METRICS = "metrics=[shapes,validation_loss,clip_score,cmmd,fd_dinov2]"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluation")
    assert tiny_runs.train(root, "checkpoint.keep=3") == errors.DONE
    networks = [
        f"networks.clip={tiny_feature_networks.clip(root / 'clip')}",
        f"networks.dinov2={tiny_feature_networks.dinov2(root / 'dinov2')}",
    ]
    reference = root / "reference.safetensors"
    assert main.run(["reference", "quickstart", "num_images=40", *networks, f"out={reference}"]) == errors.DONE
    options = [*networks, f"reference={reference}", "num_images=40", "metrics.validation_loss.num_samples=4"]
    return Setup(root / "tiny", options)


def evaluated(setup: Setup, out: Path, *more: str) -> tuple[dict, Path]:
    """The result and its folder."""
    assert main.run(["evaluate", str(setup.run), METRICS, *setup.options, f"out={out}", *more]) == errors.DONE
    (folder,) = (path.parent for path in out.glob("*/result.json"))
    return json.loads((folder / "result.json").read_text()), folder


@pytest.fixture(scope="module")
def whole(setup, tmp_path_factory):
    return evaluated(setup, tmp_path_factory.mktemp("whole"))


def arrays(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.mark.long
def test_numbers_follow_from_the_features_that_are_kept(setup, whole):
    result, folder = whole
    (reference,) = [word.partition("=")[2] for word in setup.options if word.startswith("reference=")]
    stored = load_file(reference)
    for prefix, measure in (
        ("cmmd-", kernels.cmmd),
        ("fd_dinov2-", lambda a, b: frechet.distance(*map(frechet.moments, (a, b)))),
    ):
        (name,) = [table for table in result["tables"] if table.startswith(prefix)]
        label = name.removeprefix(prefix)
        features = np.load(folder / f"features-{label}.npy")
        assert features.shape[0] == 40
        expected = measure(features, stored[f"features {label}"])
        assert result["tables"][name]["rows"][0]["value"] == pytest.approx(expected, rel=1e-9)
        assert len(result["tables"][name]["made_with"]["digest"]) == 64
        assert len(result["tables"][name]["made_with"]["reference"]["sha256"]) == 64


def test_the_protocol_is_recorded(whole):
    protocol = whole[0]["protocol"]
    assert (protocol["images"], protocol["checkpoint"], protocol["weights"]) == (40, "step-00000008", "ema")
    assert {"prompts_sha256", "sampler", "num_inference_steps", "guidance_scale", "seed", "precision"} <= {*protocol}
    assert {"daguerre", "torch", "transformers"} <= {*whole[0]["software"]}


def test_tables_of_the_loop_and_of_evaluate_are_equal(setup, whole):
    in_loop = json.loads((setup.run / "evaluation.json").read_text())["shapes"]
    assert whole[0]["tables"]["shapes"]["rows"] == in_loop["rows"]


def test_validation_losses_by_raw_and_averaged_weights(whole):
    tables = whole[0]["tables"]
    raw, ema = (tables[f"validation_loss-{weights}"]["rows"] for weights in ("raw", "ema"))
    assert [row["name"] for row in raw] == ["mean", *(f"quantile_{i / 10:g}" for i in range(1, 10))]
    assert raw != ema
    assert raw[0]["value"] == pytest.approx(np.mean([row["value"] for row in raw[1:]]))


@pytest.mark.long
def test_parts_and_kills_change_no_bit(setup, whole, tmp_path, capsys):
    _, folder = whole
    out = tmp_path / "parts"
    for part in ("shard=2/2", "shard=1/2"):
        assert main.run(["evaluate", str(setup.run), METRICS, *setup.options, f"out={out}", part]) == errors.DONE
    assert "other parts still have images to make" in capsys.readouterr().out
    (parts,) = (path.parent for path in out.glob("*/result.json"))
    assert arrays(parts) == arrays(folder)
    # As after a kill: a shard of images, arrays and the result are lost, a block of an array is there.
    for path in [*parts.glob("images/*/shard-00001.tar"), *parts.glob("features-*.npy"), parts / "result.json"]:
        path.unlink()
    block = parts / "features-x"
    block.mkdir()
    result, again = evaluated(setup, out)
    assert arrays(again) == arrays(folder)
    assert result["tables"] == whole[0]["tables"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    own = [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    return [*own, *(each for one in own for each in children(one))]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_sigkill_at_random_moments_changes_no_bit(setup, whole, tmp_path, launcher):
    """One process, or two of torchrun: killed when some files are there, until a start gets to the end."""
    out, moments = tmp_path / "out", random.Random(len(launcher))
    command = [sys.executable, *launcher, "-m", "daguerre", "evaluate", str(setup.run), METRICS, *setup.options]
    kills = 0
    while True:
        before = len([*out.rglob("*.*")])
        process = subprocess.Popen(
            [*command, f"out={out}"], env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        more = moments.randint(1, 6)
        while kills < 6 and process.poll() is None and len([*out.rglob("*.*")]) < before + more:
            time.sleep(0.005)
        if kills == 6 or process.poll() is not None:
            said, _ = process.communicate(timeout=500)
            assert process.returncode == 0, said
            break
        for one in [process.pid, *children(process.pid)]:  # torchrun's have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.communicate()
        kills += 1
    print(f"{kills} kills")
    assert kills > 2
    (found,) = (path.parent for path in out.glob("*/result.json"))
    assert arrays(found) == arrays(whole[1])
    assert json.loads((found / "result.json").read_text())["tables"] == whole[0]["tables"]


@pytest.mark.long
def test_follow_measures_every_checkpoint_and_the_page_shows_them(setup, tmp_path, capsys):
    run = tmp_path / "tiny"
    shutil.copytree(setup.run, run)
    command = ["evaluate", str(run), "--follow", "follow=all", "metrics=[shapes]", "patience_seconds=0"]
    assert main.run(command) == errors.DONE
    found = sorted(run.glob("evaluations/*/result.json"))
    assert [json.loads(path.read_text())["protocol"]["step"] for path in found] == [3, 6, 8]
    before = {path: path.read_bytes() for path in found}
    capsys.readouterr()
    assert main.run(command) == errors.DONE  # all is measured: nothing is computed again
    assert {path: path.read_bytes() for path in found} == before
    assert "Measured by daguerre evaluate" in page.render(run)
    assert not list((run / "evaluations" / "waiting").glob("step-*/*"))


@pytest.mark.long
def test_followers_share_the_checkpoints_of_a_run_that_trains_and_removes_them(setup, tmp_path, capsys):
    """Both begin before the run and take every checkpoint, of which training keeps the newest two; a third comes later,
    and takes the newest first."""
    run, given = tmp_path / "tiny", ["metrics=[shapes,cmmd]", *setup.options[:3:2], "num_images=33"]
    command = [sys.executable, "-m", "daguerre", "evaluate", str(run), "--follow", "every_seconds=.1", *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([*command, "follow=all"], env=environment, **pipes) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout.readline() == f"waiting for {run}: no run has begun there yet\n"
        training = tiny_runs.start(tmp_path, "checkpoint.keep=2", "checkpoint.export=false")
        trained, _ = training.communicate(timeout=500)
        assert training.returncode == 0, trained
        said = [process.communicate(timeout=500)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
    finally:
        for process in both:
            process.kill()
    steps = [line.partition(",")[0] for one in said for line in one.splitlines() if ", shapes:" in line]
    assert sorted(steps) == ["step 3", "step 6", "step 8"], "each was measured once"
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == ["step-00000006", "step-00000008"]
    assert not list((run / "evaluations" / "waiting").glob("step-*/*"))
    assert {path.name for path in run.glob("evaluations/step-*") if (path / "result.json").is_file()} == {
        path.name for path in run.glob("evaluations/step-*")
    }
    words = page.render(run)
    assert all(f"<td>{step}</td>" in words for step in (3, 6, 8))
    assert main.run([*command[3:], "follow=newest", "seed=7", "patience_seconds=0"]) == errors.DONE
    later = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines() if ", shapes:" in line]
    assert later == ["step 8", "step 6"]
    found = sorted(run.glob("evaluations/*/result.json"))
    protocols = [json.loads(path.read_text())["protocol"] for path in found]
    seeds = sorted((one["step"], one["seed"]) for one in protocols)
    assert seeds == [(3, 0), (6, 0), (6, 7), (8, 0), (8, 7)]


@pytest.mark.long
def test_a_sweep_over_guidance_scales(setup, tmp_path):
    """Each scale has a result of its own, equal to that of the scale alone."""
    given = ["evaluate", str(setup.run), "metrics=[cmmd,clip_score]", *setup.options[:3:2], "num_images=33"]
    for out, scales in (("sweep", "guidance_scales=[1,3]"), ("one", "guidance_scale=3")):
        assert main.run([*given, scales, f"out={tmp_path / out}"]) == errors.DONE
    sweep, one = (
        {path.parent.name: json.loads(path.read_text())["tables"] for path in (tmp_path / out).glob("*/result.json")}
        for out in ("sweep", "one")
    )
    ((name, alone),) = one.items()
    assert sweep.pop(name) == alone
    (other,) = sweep.values()
    assert other != alone


@pytest.mark.long
def test_runs_are_compared_on_equal_numbers_alone(setup, whole, tmp_path, capsys):
    _, folder = whole
    _, other = evaluated(setup, tmp_path / "raw", "weights=raw")
    compared = ["evaluate", str(folder), str(other), f"out={tmp_path / 'comparison.html'}"]
    assert main.run(compared) == errors.DONE
    shown = capsys.readouterr().out
    written = (tmp_path / "comparison.html").read_text()
    for name in ("cmmd", "fd_dinov2", "clip_score", "mean", "colour"):
        assert f"  {name} " in shown
        assert f"<td>{name}</td>" in written
    # Each table is compared by the settings and the reference that it was measured with.
    other_reference = tmp_path / "other.safetensors"
    made = ["num_images=34", "resize=antialias_bicubic", setup.options[1], f"out={other_reference}"]
    assert main.run(["reference", "quickstart", *made]) == errors.DONE
    more = ["metrics={fd_dinov2: {resize: antialias_bicubic}}", f"reference={other_reference}"]
    for place, raw in ((folder.parent, []), (other.parent, ["weights=raw"])):
        command = ["evaluate", str(setup.run), *setup.options[:2], *more, "num_images=40", f"out={place}", *raw]
        assert main.run(command) == errors.DONE
    content = other_reference.read_bytes()
    other_reference.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="is not the reference any more that this was measured with"):
        compare.run(str(folder), str(other))
    other_reference.write_bytes(content)
    capsys.readouterr()
    assert main.run(compared) == errors.DONE
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fd_dinov2-")]
    assert [line.rpartition("-")[2] for line in tables] == ["pillow_bicubic", "antialias_bicubic"]
    _, fewer = evaluated(setup, tmp_path / "fewer", "num_images=32")
    with pytest.raises(UserError, match="only equal numbers are compared"):
        compare.run(str(folder), str(fewer))


def test_folders_of_images_are_compared_by_their_newest_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, shift in (("a [1]", 9), ("b", 30), ("originals", 0)):
        Path(folder).mkdir()
        for i in range(2):
            ramp = np.arange(24 * 20 * 3).reshape(24, 20, 3) * (i + 3) % 200 + shift
            Image.fromarray(ramp.astype(np.uint8)).save(f"{folder}/{i}.png")
    command = ["metrics=[psnr]", "against=originals"]
    assert main.run(["evaluate", "a [1]", "b"]) != errors.DONE
    assert "no evaluation yet" in capsys.readouterr().err
    assert main.run(["evaluate", "b", *command]) == errors.DONE
    for i in range(2):
        (Path("b") / f"{i}.png").write_bytes((Path("originals") / f"{1 - i}.png").read_bytes())
    for path in Path("runs/evaluations").glob("*/result.json"):  # measured in another second
        path.write_text(json.dumps(json.loads(path.read_text()) | {"time": "2020-01-01T00:00:00+00:00"}))
    assert main.run(["evaluate", "a [1]/", *command]) == errors.DONE
    assert main.run(["evaluate", str(tmp_path / "b"), *command]) == errors.DONE
    newest = json.loads(results_of("b")[-1].read_text())["tables"]["psnr"]["rows"][0]
    capsys.readouterr()
    assert main.run(["evaluate", "a [1]", "b"]) == errors.DONE
    assert f"B {newest['value']:.6g}," in capsys.readouterr().out


def results_of(folder: str) -> list[Path]:
    """The results of a folder of images, the oldest first."""
    found = Path("runs/evaluations").glob(f"{folder}-*/result.json")
    return sorted(found, key=lambda path: json.loads(path.read_text())["time"])


def test_pairs_of_folders(tmp_path, capsys):
    pictures = {}
    for folder, shift in (("a", 0), ("b", 9)):
        (tmp_path / folder).mkdir()
        for i in range(2):
            ramp = np.arange(24 * 20 * 3).reshape(24, 20, 3) * (i + 3) % 200 + shift
            pictures[folder, i] = ramp.astype(np.uint8)
            Image.fromarray(pictures[folder, i]).save(tmp_path / folder / f"{i}.png")
    out = tmp_path / "out"
    command = ["evaluate", str(tmp_path / "a"), "metrics=[psnr,ssim]", f"against={tmp_path / 'b'}", f"out={out}"]
    assert main.run(command) == errors.DONE
    tables = json.loads(next(out.glob("*/result.json")).read_text())["tables"]
    for name, score in (("psnr", pairs.psnr), ("ssim", pairs.ssim)):
        expected = np.mean([score(pictures["a", i], pictures["b", i]) for i in range(2)])
        assert tables[name]["rows"][0]["value"] == pytest.approx(expected)
    Image.fromarray(pictures["a", 0]).save(tmp_path / "b" / "1.png")
    assert main.run([*command[:-1], f"out={tmp_path / 'against'}"]) == errors.DONE
    assert main.run(["evaluate", str(out), str(tmp_path / "against")]) != errors.DONE
    assert "no evaluations of one protocol" in capsys.readouterr().err
    (tmp_path / "b" / "1.png").rename(tmp_path / "b" / "other.png")
    assert main.run([*command[:-1], f"out={tmp_path / 'more'}"]) != errors.DONE
    assert "no partner of the same name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["metrics=[fid]"], "networks.inception.path is missing: a metric needs pt_inception-2015-12-05"),
        (["protocol=coco30k"], "networks.inception.path is missing: a metric needs pt_inception-2015-12-05"),
        (["metrics=[cmmd]", "reference=null", "guidance_scale=2", "guidance_rescale=.5"], "no reference given"),
        (["metrics=[psnr]"], "give against=FOLDER"),
        (["metrics=[fud]"], "fid"),
        (["metrics=[cmmd]", "networks.clip.digest=00000000"], "asks for others"),
        (["metric=[cmmd]"], "did you mean metrics"),
        (["metrics=[cmmd]", "networks.clup=x"], "networks.clup"),
        (["metrics=[shapes]", "crop_px=64"], "crop_px has no effect on a model"),
        (["metrics=[shapes]", "patience_seconds=1"], "has no effect on an evaluation without --follow"),
    ],
)
def test_what_is_missing_is_refused_before_anything_is_generated(setup, tmp_path, capsys, words, said):
    options = [word for word in setup.options if word.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    assert main.run(["evaluate", str(setup.run), *options, *words, f"out={tmp_path / 'out'}"]) != errors.DONE
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/images/*"))


def test_statistics_of_a_folder(setup, tmp_path, capsys):
    """All of it, as the middle squares that are asked for."""
    (tmp_path / "images").mkdir()
    pixels = [np.random.default_rng(i).integers(0, 256, (40, 60, 3), dtype=np.uint8) for i in range(5)]
    for i, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / "images" / f"{i}.png")
    command = ["reference", str(tmp_path / "images"), *setup.options[:1], f"out={tmp_path / 'reference.safetensors'}"]
    assert main.run([*command, "crop_px=40"]) == errors.DONE
    network = clip.load(NetworkPlace(path=setup.options[0].partition("=")[2]), torch.device("cpu"), "shorter_side")
    expected = network.compute([each[:, 10:50] for each in pixels])
    assert np.array_equal(load_file(tmp_path / "reference.safetensors")[f"features {network.label}"], expected)
    assert main.run([*command, "split=train"]) == errors.REFUSED
    assert "of paths all images are read" in capsys.readouterr().err


def test_an_image_whose_features_are_not_finite_is_named(setup, tmp_path, capsys, monkeypatch):
    (tmp_path / "images").mkdir()
    for i in range(5):
        Image.new("RGB", (40, 40), (50 * i, 0, 0)).save(tmp_path / "images" / f"{i}.png")
    compute = clip.Network.compute

    def damaged(self, images):
        found = compute(self, images)
        found[3, 1] = np.nan
        return found

    monkeypatch.setattr(clip.Network, "compute", damaged)
    command = ["reference", str(tmp_path / "images"), *setup.options[:1], f"out={tmp_path / 'reference.safetensors'}"]
    assert main.run(command) == errors.REFUSED
    assert "3.png: the features of clip" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["metrics=[psnr]", "guidance_scales=[1,2]"], "guidance_scales has no effect on a folder of images"),
        (["other", "num_images=8"], "num_images has no effect on a comparison"),
        (["other", "sampler=ddim"], "sampler=ddim has no effect on a comparison"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, words, said):
    assert main.run(["evaluate", str(tmp_path), *words]) != errors.DONE
    assert said in capsys.readouterr().err


def test_settings_may_be_written_short():
    settings = EvaluationSettings(metrics=["fid"], networks={"inception": "random"})  # type: ignore[arg-type]
    assert settings.metrics["fid"].name == "fid"
    assert settings.networks["inception"].path == "random"


def test_clip_vectors_are_those_of_the_model(tmp_path):
    folder = tiny_feature_networks.clip(tmp_path / "clip")
    network = clip.load(NetworkPlace(path=str(folder)), torch.device("cpu"), "shorter_side")
    image = np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3) % 256
    model = CLIPModel.from_pretrained(folder).eval()
    tokens = network.text_tokens(["a red circle"], padding="max_length", max_length=24, return_tensors="pt")
    x = (image / 255 - np.array(network.mean)) / np.array(network.std)
    with torch.no_grad():
        found = model(pixel_values=torch.from_numpy(x).permute(2, 0, 1)[None].float(), **tokens)
    ours = network.compute([image.astype(np.uint8)])[0], network.compute_texts(["a red circle"])[0]
    for vector, expected in zip(ours, (found.image_embeds[0], found.text_embeds[0]), strict=True):
        assert np.allclose(vector / np.linalg.norm(vector), expected.numpy(), atol=1e-5)


FORGED = ["[]", "1", "null", '"a"', "{", '{"tables": []}', '{"protocol": {}, "tables": {"fid": 1}}', "[" * 100_000,
          '{"protocol": {}, "tables": {"fid": {"count": 2, "rows": [1], "made_with": {}, "places": {}}}}',
          '{"protocol": {}, "tables": {"fid": {"count": 2, "rows": [], "places": {}, "made_with":'
          ' {"settings": {"name": "fid"}, "reference": {"sha256": "0"}}}}}',
          '{"protocol": {}, "tables": {"fid": {"count": 2, "rows": [], "places": {"reference": "a"}, "made_with":'
          ' {"settings": {"name": "fid"}, "reference": 5}}}}',
          *(f'{{"protocol": {{}}, "tables": {{"fid": {{"count": {count}, "rows": [{{"name": "fid", "value": {value}}}],'
            ' "places": {}, "made_with": {"settings": {"name": "fid"}}}}}'
            for count, value in (('"2"', 1), (2.5, 1), (2, '"1"'), (2, "NaN"), (2, "1e999"))),
          '{"protocol": {"images": []}, "tables": {}}', '{"protocol": {"step": {}}, "tables": {}}']  # fmt: skip


@pytest.mark.parametrize("text", FORGED)
def test_a_result_of_another_form_is_damaged(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result\.json is damaged .*remove it, and evaluate again"):
        results.read(tmp_path)
    with pytest.raises(UserError, match="is damaged"):
        compare.run(str(tmp_path), str(tmp_path))


HEADERS = ["[1]", "null", "[" * 100_000, '{"data": {}, "networks": {}}', '{"data": {"images": "5"}, "networks": {}}',
           '{"data": {"images": 5}, "networks": [1]}']  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_a_reference_of_another_form_is_damaged(tmp_path, header):
    save_file({"a": np.zeros(3)}, path := tmp_path / "odd.safetensors", {"daguerre_reference": header})
    with pytest.raises(UserError, match=r"odd\.safetensors cannot be read as statistics"):
        reference.of_file(str(path), "clip")


def test_statistics_that_are_not_whole_are_damaged(tmp_path):
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    reference.write(path := tmp_path / "odd.safetensors", {"images": 6}, {"clip": {}, "dino": {}}, {"clip": rows})
    assert np.isfinite(reference.of_file(str(path), "clip").moments().mean).all()
    for label in ("clip", "dino"):
        with pytest.raises(UserError, match=r"odd\.safetensors cannot be read as statistics"):
            reference.of_file(str(path), label).features()
    rows[0] = np.nan
    reference.write(path, {"images": 5}, {"clip": {}}, {"clip": rows})
    with pytest.raises(UserError, match="mean clip is not finite"):
        reference.of_file(str(path), "clip").moments()


def _all_of(path):
    found = reference.of_file(str(path), "clip")
    return found.features(), found.moments().mean, found.moments().covariance


def test_every_bit_of_a_reference_counts(tmp_path):
    """Its header and its tensors; a file of an earlier version has no digests."""
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    reference.write(path := tmp_path / "r.safetensors", {"images": 5}, {"clip": {}}, {"clip": rows})
    whole = path.read_bytes()
    assert (_all_of(path)[0] == rows).all()
    for place in range(8, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"r\.safetensors (cannot be read|has statistics by)"):
            _all_of(path)
    before = {"data": {"images": 5}, "networks": {"clip": {}}}
    tensors = {"features clip": rows, "mean clip": rows.mean(0), "covariance clip": np.cov(rows.T)}
    save_file(tensors, path, {"daguerre_reference": json.dumps(before)})
    assert (reference.of_file(str(path), "clip").features() == rows).all()


def test_every_bit_of_an_array_counts(tmp_path, capsys):
    """A cut, a flipped bit, and a file of an earlier version, which has no digest."""
    path, array = tmp_path / "a.npy", np.arange(12, dtype=np.float32).reshape(3, 4)
    blocks.save(path, array)
    whole = path.read_bytes()
    assert (blocks.read(path) == array).all()
    assert (np.load(path) == array).all()
    for i in range(0, 8 * len(whole), 37):
        flipped = bytearray(whole)
        flipped[i // 8] ^= 1 << i % 8
        path.write_bytes(bytes(flipped))
        try:
            assert (blocks.read(path) == array).all()  # only where the mark of the digest itself was hit
        except ValueError:
            continue
        assert len(whole) - 24 <= i // 8 < len(whole) - 16
    for end in range(len(whole) - 25):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"."):
            blocks.read(path)
    assert blocks.sound(path) is None
    assert "is damaged" in capsys.readouterr().out
    assert not path.exists()
    np.save(path, array)
    assert (blocks.read(path) == array).all()


def test_damaged_arrays_are_made_again(tmp_path, capsys):
    part = blocks.Blocks(tmp_path, 70, WHOLE)
    made = []

    def make(ids: range) -> np.ndarray:
        made.append(ids)
        return np.arange(ids.start, ids.stop, dtype=np.float32)[:, None]

    first = part.array("a", make)
    assert len(made) == 3
    path = tmp_path / "a.npy"
    path.write_bytes(path.read_bytes()[:-60])
    assert (part.array("a", make) == first).all()
    assert len(made) == 6
    assert "a.npy is damaged" in capsys.readouterr().out
