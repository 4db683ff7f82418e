"""Lists of prompts: files of every kind, parts over ranks, going on after a kill, shards, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_drawings
from PIL import Image
from tiny_drawings import documents, drawn, generate

from daguerre.cli import generate as generate_command
from daguerre.cli import main
from daguerre.cli.options import generate_options
from daguerre.data.dataset import open_dataset
from daguerre.data.sources import webdataset
from daguerre.errors import UserError
from daguerre.generation import generate as generation_generate
from daguerre.generation import jobs, prompts
from daguerre.generation.generate import ImageRequest, batches
from daguerre.generation.output_dir import Folder
from daguerre.generation.requests import RequestList
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Prompt

SMALL = ("height=32", "width=32")


@pytest.fixture(scope="module")
def run(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drawings.write_run(tiny_drawings.write_recipe(tmp_path_factory.mktemp("recipe"), tiny_sd))


def torchrun(rank: int, count: int) -> dict[str, str]:
    """What torchrun sets, one process a node."""
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def srun(rank: int, count: int) -> dict[str, str]:
    """What srun sets, all on one node."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    node = {"SLURM_JOB_NODELIST": "n1"}
    return {**job, **node, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(count)}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*torchrun(0, 1), *srun(0, 1)}:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def mixed(path: Path, count: int = 12) -> Path:
    """Images of three sizes and two guidance scales, in no order."""
    sizes = [(32, 32), (32, 48), (48, 32)]
    return table(
        path,
        [
            {
                "prompt": f"thing {i}",
                "height": sizes[i * 7 % 3][0],
                "width": sizes[i * 7 % 3][1],
                "guidance_scale": 1 if i % 4 == 0 else "",
                "mood": f"mood {i}",
            }
            for i in range(count)
        ],
    )


def pixels(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.asarray(Image.open(path)).astype(int) for path in folder.glob("*.png")}


def assert_same_images(first: Path, second: Path) -> None:
    """Noise to the bit, pixels within 1/255."""
    one, two = pixels(first), pixels(second)
    assert one.keys() == two.keys()
    assert max(np.abs(one[name] - two[name]).max() for name in one) <= 1
    keys = ("seed", "prompt", "initial_noise_sha256", "height", "width", "guidance_scale")
    told = [[[document[key] for key in keys] for document in documents(folder)] for folder in (first, second)]
    assert told[0] == told[1]


def test_rows_say_what_they_want_and_keep_the_rest(run, tmp_path):
    lines = [
        {"prompt": "a", "seed": 40, "num_images": 2, "file_name": "birds/a.png", "mood": {"calm": True}},
        {"prompt": "b", "height": 48, "guidance_scale": 4, "negative_prompt": "dark", "file_name": "b"},
        {"prompt": "c", "guidance_scale": 0, "file_name": "c.v2"},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out"
    given = [f"prompts_file={tmp_path / 'list.jsonl'}", f"out={out}", "seed=7", "negative_prompt=grey"]
    assert generate(run, *given, *SMALL) == 0
    found = {document["file"]: document for document in documents(out)}
    assert found.keys() == {"a-0.png", "a-1.png", "b.png", "c.v2.png"}
    assert (out / "birds" / "a-0.png").exists()
    assert [found[name]["seed"] for name in ("a-0.png", "a-1.png", "b.png", "c.v2.png")] == [40, 41, 9, 10]
    assert found["a-0.png"]["mood"] == {"calm": True}
    assert (found["b.png"]["height"], found["b.png"]["width"]) == (48, 32)
    assert (found["b.png"]["guidance_scale"], found["b.png"]["negative_prompt"]) == (4.0, "dark")
    assert (found["c.v2.png"]["guidance_scale"], found["c.v2.png"]["negative_prompt"]) == (0.0, "")
    assert found["a-0.png"]["negative_prompt"] == "grey"


def test_images_between_two_prompts(run, tmp_path, capsys):
    """The first and the last are those of either prompt, from one noise; a list says it in a column."""
    settings = [*SMALL, "training.device=cpu", "seed=5"]
    for name, prompt in (("first", "a red heart"), ("last", "a small green star")):
        assert generate(run, f"prompt={prompt}", f"out={tmp_path / name}", *settings) == 0
    asked = {"prompt": "a red heart", "interpolate_to": "a small green star", "num_images": 3, "seed": 5}
    given = [f"{key}={value}" for key, value in asked.items()]
    assert generate(run, *given, f"out={tmp_path / 'between'}", *SMALL, "training.device=cpu") == 0
    (tmp_path / "list.jsonl").write_text(json.dumps(asked))
    listed = [f"prompts_file={tmp_path / 'list.jsonl'}", f"out={tmp_path / 'listed'}", "training.device=cpu"]
    assert generate(run, *listed, *SMALL) == 0
    first, last, between, by_list = (drawn(tmp_path / name) for name in ("first", "last", "between", "listed"))
    assert np.array_equal(between, by_list)
    assert np.abs(between[[0, 2]] - np.concatenate([first, last])).max() <= 1
    assert not np.array_equal(between[1], between[0])
    found = documents(tmp_path / "between")
    assert [(one["seed"], one["interpolation"]) for one in found] == [(5, 0.0), (5, 0.5), (5, 1.0)]
    assert {one["interpolate_to"] for one in found} == {"a small green star"}
    assert generate(run, "prompt=a", "interpolate_to=b", f"out={tmp_path / 'one'}", *SMALL) == 2
    assert "set num_images to 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_tables(run, tmp_path, suffix):
    path = table(tmp_path / f"list{suffix}", [{"prompt": 'one, "two"\tthree', "seed": 3, "mood": "calm"}])
    assert generate(run, f"prompts_file={path}", f"out={tmp_path / 'out'}", *SMALL) == 0
    (document,) = documents(tmp_path / "out")
    assert (document["prompt"], document["seed"], document["mood"]) == ('one, "two"\tthree', 3, "calm")


@pytest.mark.long
def test_a_list_is_the_same_whatever_draws_it(run, tmp_path, monkeypatch):
    """One process in batches of 3, in batches of 16, two parts by hand, three ranks of a launcher."""
    path = mixed(tmp_path / "list.csv", 7)
    given = [run, f"prompts_file={path}", "seed=5"]
    assert generate(*given, f"out={tmp_path / 'whole'}", "batch_size=3") == 0
    assert generate(*given, f"out={tmp_path / 'large'}", "batch_size=16") == 0
    for part in ("2/2", "1/2"):
        assert generate(*given, f"out={tmp_path / 'parts'}", f"shard={part}") == 0
    for rank in range(3):
        launched(monkeypatch, torchrun(rank, 3))
        assert generate(*given, f"out={tmp_path / 'ranks'}") == 0
    assert len(documents(tmp_path / "whole")) == 7
    for name in ("large", "parts", "ranks"):
        assert_same_images(tmp_path / "whole", tmp_path / name)
        assert (tmp_path / name / "contact-sheet.html").exists()


def test_processes_that_start_at_once_take_one_folder(run, tmp_path, capsys):
    """One has made the folder and is about to say in it what is asked for."""
    home = run / "generated"
    for folder in (tmp_path / "out", home / "a-dog-at-once"):
        folder.mkdir(parents=True)
        (folder / ".request.json.123.tmp").touch()
    assert generate(run, "prompt=a dog at once", f"out={tmp_path / 'out'}", "shard=1/2", *SMALL) == 0
    assert generate(run, "prompt=a dog at once", *SMALL) == 0
    assert (home / "a-dog-at-once" / "000.png").exists()
    asked = {"seed": 0}
    first, second = Folder(tmp_path / "race"), Folder(tmp_path / "race")
    first.begin(asked)
    second.begin(asked)
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        second.begin({"seed": 1})
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'rb+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)"
    for part in (jobs.TaskShard(), jobs.TaskShard(1, 2)):  # either holds what the second of two would
        with first.locked(part):
            found = subprocess.run([sys.executable, "-c", code, str(first.path / "request.json")], capture_output=True)
            assert b"BlockingIOError" in found.stderr


def test_a_part_says_what_others_have_to_draw(run, tmp_path, capsys, monkeypatch):
    launched(monkeypatch, srun(1, 4))
    (tmp_path / "list.txt").write_text("a\nb\nc\nd\ne\nf\n")
    assert generate(run, f"prompts_file={tmp_path / 'list.txt'}", f"out={tmp_path / 'out'}", *SMALL) == 0
    said = capsys.readouterr().out
    assert "part 2 of 4 (SLURM: SLURM_PROCID=1, SLURM_NTASKS=4; shard=1/1 generates all)" in said
    assert "4 of the list's 6 images belong to other parts and do not exist yet" in said
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == ["001.png", "005.png"]


def test_going_on_keeps_what_is_whole_and_draws_the_rest_again(run, tmp_path, capsys):
    path = mixed(tmp_path / "list.csv")
    given = [run, f"prompts_file={path}", f"out={tmp_path / 'out'}"]
    assert generate(*given) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "expected")
    kept = (tmp_path / "out" / "002.png").stat().st_mtime_ns
    (tmp_path / "out" / "003.json").unlink()
    (tmp_path / "out" / "005.png").unlink()
    damaged = tmp_path / "out" / "007.png"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    (tmp_path / "out" / "008.json").write_text("{")
    capsys.readouterr()
    assert generate(*given, "batch_size=5") == 0
    assert "8 of 12 images already exist and are complete: kept" in capsys.readouterr().out
    assert (tmp_path / "out" / "002.png").stat().st_mtime_ns == kept
    assert_same_images(tmp_path / "expected", tmp_path / "out")


def test_a_changed_list_is_another_request(run, tmp_path, capsys):
    (tmp_path / "list.txt").write_text("a\nb\n")
    given = [run, f"prompts_file={tmp_path / 'list.txt'}", f"out={tmp_path / 'out'}", *SMALL]
    assert generate(*given) == 0
    (tmp_path / "list.txt").write_text("a\nb\nc\n")
    assert generate(*given) == 2
    said = capsys.readouterr().err
    assert "images: 2 -> 3" in said
    assert "prompts_sha256" in said
    (tmp_path / "list.txt").write_text("a\nb\n")
    assert generate(*given, "resume_from_checkpoint=step-00000001") == 2
    assert '"step-00000002" -> "step-00000001"' in capsys.readouterr().err


def stop_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """A SIGTERM comes while that batch is drawn."""
    generate_batch, drawn_batches = generation_generate.generate_batch, []

    def draw(*given):
        drawn_batches.append(given)
        if len(drawn_batches) == batches:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate_batch(*given)

    monkeypatch.setattr(generation_generate, "generate_batch", draw)


@pytest.mark.long
def test_a_signal_keeps_what_is_drawn(run, tmp_path, capsys, monkeypatch):
    path, out = mixed(tmp_path / "list.csv"), tmp_path / "out"
    given = [run, f"prompts_file={path}", "batch_size=2"]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert generate(*given, f"out={out}") == 143
    kept = len(documents(out))
    assert kept == 5  # the third batch is one image, the only one of its size and guidance
    assert f"stopped by SIGTERM: {kept} finished images are kept; the same" in capsys.readouterr().out
    assert not (out / "contact-sheet.html").exists()
    assert generate(*given, f"out={out}") == 0
    assert f"{kept} of 12 images already exist and are complete: kept" in capsys.readouterr().out
    assert generate(*given, f"out={tmp_path / 'expected'}", "batch_size=16") == 0
    assert_same_images(tmp_path / "expected", out)


@pytest.mark.long  # of the quick tests, test_a_kill_loses_the_open_shard_alone
def test_a_signal_loses_the_open_shard_alone(run, tmp_path, capsys, monkeypatch):
    path, out = mixed(tmp_path / "list.csv"), tmp_path / "out"
    given = [run, f"prompts_file={path}", "batch_size=1", "format=webdataset", "shard_samples=4", f"out={out}"]
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert generate(*given) == 143
    assert "4 images are in finished shards, 2 of the unfinished shard are lost" in capsys.readouterr().out
    assert main.run(["data", "verify", str(out)]) != 0
    assert "unfinished packing: run the same command" in capsys.readouterr().out
    assert generate(*given) == 0
    assert "4 of 12 images already exist and are complete: kept" in capsys.readouterr().out
    assert main.run(["data", "verify", str(out)]) == 0


@pytest.mark.long
def test_a_kill_in_the_middle_is_gone_on_with(run, tmp_path):
    path, out = mixed(tmp_path / "list.csv", 40), tmp_path / "out"
    given = [str(run), f"prompts_file={path}", "num_inference_steps=4"]
    command = [sys.executable, "-m", "daguerre", "generate", *given, "batch_size=2", f"out={out}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for at_least in (3, 12):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + 60
        while len(list(out.glob("*.png"))) < at_least and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert generate(*given, f"out={out}") == 0
    assert generate(*given, f"out={tmp_path / 'expected'}", "batch_size=16") == 0
    assert_same_images(tmp_path / "expected", out)


@pytest.mark.long
def test_shards_that_our_own_reader_and_verify_take(run, tmp_path, capsys, monkeypatch):
    path = mixed(tmp_path / "list.csv", 10)
    files, out = tmp_path / "files", tmp_path / "shards"
    given = [run, f"prompts_file={path}"]
    assert generate(*given, f"out={files}") == 0
    shards = ["format=webdataset", "shard_samples=4", "shard_image=png", f"out={out}"]
    for part in ("2/2", "1/2"):
        assert generate(*given, *shards, f"shard={part}") == 0
    assert sorted(p.name for p in out.glob("*.tar")) == [f"shard-0000{i}.tar" for i in range(3)]
    assert json.loads((out / "dataset.json").read_text())["complete"] is True
    assert main.run(["data", "verify", str(out)]) == 0

    settings = webdataset.Settings(path=str(out), resolution=32, held_out_fraction=0.0)
    source = webdataset.open_source(settings, "train")
    assert source.index is not None
    expected, told = pixels(files), documents(files)
    for number in range(10):
        record = source.record(number)
        assert source.sample_id(number) == number
        assert record.texts["text"] == f"thing {number}"
        assert record.metadata["mood"] == f"mood {number}"
        assert record.metadata["initial_noise_sha256"] == told[number]["initial_noise_sha256"]
        with Image.open(io.BytesIO(record.image)) as opened:
            assert np.abs(np.asarray(opened).astype(int) - expected[f"{number:03d}"]).max() <= 1
    assert open_dataset(settings, "train").count == 10
    capsys.readouterr()
    assert generate(*given, *shards) == 0
    assert "10 of 10 images already exist and are complete: kept" in capsys.readouterr().out
    assert (out / "contact-sheet.html").read_text().count("<figure>") == 10


def test_samples_of_shards_have_words(run, tmp_path, capsys):
    (tmp_path / "list.jsonl").write_text('{"prompt": "a"}\n{"prompt": " "}\n')
    given = [run, f"prompts_file={tmp_path / 'list.jsonl'}", *SMALL]
    assert generate(*given, f"out={tmp_path / 'files'}") == 0
    assert generate(*given, f"out={tmp_path / 'shards'}", "format=webdataset") == 2
    assert "line 2: the prompt is empty" in capsys.readouterr().err


@pytest.mark.long
def test_a_kill_loses_the_open_shard_alone(run, tmp_path, capsys):
    path = mixed(tmp_path / "list.csv", 10)
    out = tmp_path / "out"
    given = [run, f"prompts_file={path}", "format=webdataset", "shard_samples=4", f"out={out}"]
    assert generate(*given) == 0
    before = {p.name: p.read_bytes() for p in out.glob("*.tar")}
    (out / "shard-00001.tar.index").unlink()  # its shard was being written
    last = out / "shard-00002.tar"
    last.write_bytes(last.read_bytes()[:-512])
    capsys.readouterr()
    assert generate(*given) == 0
    assert "4 of 10 images already exist and are complete: kept" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in out.glob("*.tar")} == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text,seed\na,1\n", "no column 'prompt' among its columns ('text', 'seed')"),
        ("a.jsonl", '{"text": "a"}\n', "no column 'prompt'"),
        ("a.jsonl", "a cat\n", "a.jsonl line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "is not an object"),
        ("a.jsonl", '{"prompt": 7}\n', "prompt is 7: write text"),
        ("a.jsonl", '{"prompt": "a", "seed": NaN}\n', "NaN is not a JSON number"),
        ("a.jsonl", '{"prompt": "a\\u0000b"}\n', "write text"),
        ("a.jsonl", '{"prompt": "a", "negative_prompt": "\\ud800"}\n', "write text"),
        ("a.jsonl", '{"prompt": "a", "file_name": "b\\ud800"}\n', "write a name such as"),
        ("a.json", "[]", "give JSONL"),
        ("a.csv", "prompt,seed\na,1\nb,x\n", "a.csv line 3: seed is 'x': write a number"),
        ("a.csv", "prompt,seed\na,-1\n", "write a whole number from 0"),
        ("a.csv", "prompt,seed\na,1.5\n", "write a whole number from 0"),
        ("a.csv", "prompt,num_images\na,0\n", "write a whole number from 1"),
        ("a.csv", "prompt,guidance_scale\na,0.5\n", "a.csv line 2: guidance_scale is 0.5"),
        ("a.csv", "prompt\na,b\n", "has 2 cells and the header 1"),
        ("a.csv", "prompt,prompt\na,b\n", "twice"),
        ("a.csv", 'prompt\n"a\n', "not a table of the type its extension names"),
        ("a.csv", "prompt\n", "has no prompt"),
        ("a.txt", "\n \n", "has no prompt"),
        ("a.csv", "prompt,file_name\na,../b\n", "file_name is '../b'"),
        ("a.csv", "prompt,file_name\na,/b\n", "file_name is '/b'"),
        ("a.csv", "prompt,file_name\na,b\nc,b.png\n", "'b' is used twice"),
        ("a.csv", "prompt,file_name\na,b\nc,\n", "1 of 2 images have no file_name"),
        ("a.csv", "prompt,file_name\na,request\n", "is reserved"),
        ("a.csv", "prompt,sampler\na,b\n", "sampler is already a key"),
        (
            "a.csv",
            "prompt,negative_prompt,guidance_scale\na,b,1\n",
            "so there is no guidance: raise guidance_scale or remove negative_prompt",
        ),
        ("a.csv", "prompt,height\na,33\n", "33"),
        ("a.csv", "prompt,interpolate_to\na,b\n", "a.csv line 2: interpolate_to is another prompt"),
        ("missing.csv", None, "cannot be read: No such file"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read as UTF-8"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_anything_is_written(run, tmp_path, capsys, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert generate(run, f"prompts_file={path}", f"out={tmp_path / 'out'}", *SMALL) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_columns_that_are_no_text_are_mended_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "note\\ud83d": ["\\ud83d"]}\n')
    (row,) = prompts.of_file(str(tmp_path / "a.jsonl")).rows()
    assert row.metadata == {"note?": ["?"]}
    with pytest.raises(UserError, match="is a pipe, a socket or a device"):
        prompts.of_file("/dev/null")


@pytest.mark.long
def test_a_long_list_is_never_held():
    """Thirty thousand prompts: walked over, not stored, and cut into batches of one size with little read ahead."""
    read = 0

    def rows():
        nonlocal read
        for i in range(30_000):
            read += 1
            yield prompts.Row(f"prompt {i}", height=64 if i % 3 else 32)

    listed = RequestList(prompts.Prompts("many", "", rows), SamplingSettings(num_images=1), (32, 32))
    assert listed.survey().sizes_px == {(32, 32): 10_000, (64, 32): 20_000}
    read = 0
    first = next(batches(iter(listed), 16))
    assert [one.number for one in first] == list(range(0, 48, 3))
    assert read <= 16 * 16


def test_batches_are_of_one_kind_and_led_by_the_first_that_waits():
    wanted = [ImageRequest(i, Prompt(""), i, (8, 8 + i % 3), 1.0 + i % 2) for i in range(50)]
    made = list(batches(iter(wanted), 4))
    assert sorted(one.number for batch in made for one in batch) == list(range(50))
    assert all(len({one.kind for one in batch}) == 1 for batch in made)
    firsts = [batch[0].number for batch in made]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        (torchrun(2, 4), (2, 4)),
        (srun(1, 2), (1, 2)),
        ({**torchrun(1, 2), **srun(0, 1), "TORCHELASTIC_RUN_ID": "x"}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}, (0, 1)),
    ],
)
def test_parts_of_launchers(environ, part):
    found = jobs.task_shard(None, environ)
    assert (found.index, found.count) == part
    assert jobs.task_shard("2/8", environ).index == 1
    numbers = [n for i in range(3) for n in range(10) if n in jobs.TaskShard(i, 3)]
    assert sorted(numbers) == list(range(10))
    assert jobs.TaskShard(1, 3).share(10) == 3


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_parts_that_cannot_be(shard):
    with pytest.raises(UserError, match="counted from 1"):
        jobs.task_shard(shard, {})
    with pytest.raises(UserError, match="are inconsistent"):
        jobs.task_shard(None, torchrun(4, 4))


@pytest.mark.parametrize("environ", [{"RANK": "2", "WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}])
def test_what_a_launcher_says_in_part_needs_a_word(environ):
    """A shell of a job that srun did not start would draw one part of four, and nobody the others."""
    with pytest.raises(UserError, match="or give shard=I/N"):
        jobs.task_shard(None, environ)
    assert jobs.task_shard("1/1", environ).count == 1


def test_images_of_a_list_have_the_seeds_of_their_places(run, tmp_path):
    (tmp_path / "list.txt").write_text("a\nb\n")
    assert (
        generate(run, f"prompts_file={tmp_path / 'list.txt'}", f"out={tmp_path / 'out'}", "num_images=2", *SMALL) == 0
    )
    assert [document["seed"] for document in documents(tmp_path / "out")] == [0, 1, 2, 3]
    assert drawn(tmp_path / "out").shape == (4, 32, 32, 3)


def test_what_the_documentation_says_is_accepted():
    """Keys and columns in docs/generate.md and in the help."""
    said = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
    for name in prompts.KNOWN:
        assert f"`{name}`" in said
        assert name in generate_command.__doc__
    own = "\n".join(line for line in said.splitlines() if not line.startswith("daguerre plan "))
    keys = set(re.findall(r"(?<![\w.-])(\w+)=", own + generate_command.__doc__))
    known = {*generate_options.Options.model_fields, *generate_options.SAMPLING, *generate_options.PLACE}
    assert keys - known <= {"key", "resume_from_checkpoint", "pretrained_model_name_or_path", "lora_config"}
    assert known - set(re.findall(r"\w+", generate_command.__doc__)) <= {"prompts_file"}
