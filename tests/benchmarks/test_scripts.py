"""The scripts of benchmarks/: the table at the end of a GPU round, the round with tiny twins, start-up."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path

import gpu_table
import pytest

ROOT = Path(__file__).parents[2]
RATES = {"product_flops": {"bfloat16": 7.9e14}, "copy_bytes": 4.3e12, "datasheet": None}


def row(name, speed=None, **changed):
    told = {"name": name, "seconds": [0.1], "problem": None, "alone": False, "samples_per_second": 180.04}
    told |= {"model_tflops_per_second": 433.0, "share_of_measured_rate": 0.548, "peak_bytes": 61e9}
    names = ("low", "median", "high", "rounds")
    return told | {"speed_of_first": speed and dict(zip(names, speed, strict=True))} | changed


def unmeasured(name, problem):
    return {"name": name, "seconds": [], "problem": problem, "alone": False}


def document(*rows, ended=None, device="NVIDIA H200"):
    return {"rows": list(rows), "ended": ended, "rates": RATES, "device": device}


def run_table(folder, **parts):
    for name, told in parts.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(told))
    command = [sys.executable, ROOT / "benchmarks" / "gpu_table.py", folder, folder / "gpu.json", "512"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_of_a_gpu_round(tmp_path):
    odd = unmeasured("diffusers-best", "NoParity: no parity over 20 updates")
    said = run_table(
        tmp_path,
        smoke=document(row("base")),
        sd15_512_default=document(row("daguerre"), row("diffusers-default", (0.5, 0.625, 0.8, 6))),
        sd15_512_best=document(row("daguerre"), odd),
        sd21_512=document(row("base", seconds=[]), ended="the budget of 35 s was over"),
        sd15_256=document(
            row("auto"),
            row("all-off", (0.5, 0.5, 0.5, 1)),
            row("two-pass", seconds=[], problem="TypeError: what\nis wrong"),
        ),
        sdxl_1024=document(row("base"), device="1 thread of a CPU"),
        sdxl_1024_checkpointed=document(row("base", samples_per_second=135.03, share_of_measured_rate=None)),
        vae_512=document(ended="the budget of 30 s was over"),
    )
    lines = said.splitlines()

    def line(*parts):
        (found,) = [each for each in lines if all(part in each for part in parts)]
        return found

    assert line("sd21-512", "180.0 img/s", "goal 175").endswith("one turn before any round")
    assert line("sd15-256", "two-pass", "180.0 img/s").endswith("TypeError: what")
    assert "goal" not in line("two-pass")
    assert line("all-off").endswith("0.500x (of one round)")
    assert line("daguerre against diffusers-default: 1.600x (1.250 to 2.000), goal 1.5x")
    assert not any("against diffusers-best" in each for each in lines)
    assert line("diffusers-best", "no parity")
    assert line("sdxl-1024 ", "180.0 img/s").endswith(" 61.0 GB"), "the goal is that of another device"
    assert line("sdxl-1024-checkpointed against sdxl-1024: 0.750x")
    assert "   - of rate" in line("sdxl-1024-checkpointed", "135.0 img/s")
    assert line("nothing was measured: the budget of 30 s was over")
    assert line("without a result: sd15-512-online, sd15-256-compiled, sd15-512, sd15-lora-512")
    assert not any(each.startswith("smoke") for each in lines), "a number of two images says nothing"
    assert lines[-1].startswith("512 s in all")
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert {"smoke", "sd15-512-best", "vae-512"} < set(kept["parts"])


STUB = """#!/usr/bin/env bash
case "$1" in
    -c) exit 0;;
    *gpu_table.py) exec {python} -S "$@";;
esac
for word in "$@"; do case $word in out=*) out=${{word#out=}}; esac; done
case "$out" in *{hangs}.json) echo >{place}/hangs; exec sleep 60; esac
cp {place}/document.json "$out"
"""
"""In place of a Python with a GPU: writes a document for each part at once, and hangs in one of them."""


def start_round(folder, told, hangs="nowhere", chosen=()):
    """The round itself, with a stand-in for what measures."""
    (folder / "document.json").write_text(json.dumps(told))
    stub = folder / "python"
    stub.write_text(STUB.format(python=sys.executable, hangs=hangs, place=folder))
    stub.chmod(0o755)
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *chosen, str(folder / "out")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHON": str(stub)})


def test_a_gpu_round_ends_at_once_where_its_smallest_part_gives_no_number(tmp_path):
    started = start_round(tmp_path, document(unmeasured("base", "ValueError: torch sees no GPU")))
    said, _ = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "ValueError: torch sees no GPU" in said
    assert set(json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]) == {"smoke"}


def test_a_gpu_round_that_is_ended_has_told_what_it_measured(tmp_path):
    started = start_round(tmp_path, document(row("base")), hangs="sdxl-1024")
    while not (tmp_path / "hangs").exists():
        assert started.poll() is None
        time.sleep(0.01)
    before = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(before["parts"]) == {"smoke", "kernels", "sd21-512"}, "also where nothing can be said at the end"
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(timeout=10)
    assert started.returncode == 143
    assert "goal 175" in said
    assert (tmp_path / "out" / "gpu.txt").read_text() in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu.json", "gpu.txt", "gpu.log"}


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        ([], {"kernels", *gpu_table.ROUNDS[1]}),
        (["--round", "2"], set(gpu_table.ROUNDS[2])),
        (["--round", "3"], set(gpu_table.ROUNDS[3])),
        (["--only", "sd15-512*"], {"sd15-512-online", "sd15-512", "sd15-512-default", "sd15-512-best"}),
    ],
)
def test_each_part_is_reached(tmp_path, chosen, parts):
    started = start_round(tmp_path, document(row("base")), chosen=chosen)
    said, _ = started.communicate(timeout=60)
    assert started.returncode == 0, said
    assert set(json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]) == {"smoke", *parts}


def test_budgets_of_a_round_leave_time_to_start_its_parts():
    script = (ROOT / "benchmarks" / "gpu.sh").read_text()
    (most,) = re.findall(r"^MOST_SECONDS=(\d+)", script, re.MULTILINE)
    seconds = {name: int(n) for name, n in re.findall(r"^(?:bench|peers|measure) ([\w-]+) (\d+)", script, re.MULTILINE)}
    assert set(seconds) == {"smoke", "kernels", *gpu_table.PARTS}
    for number, parts in gpu_table.ROUNDS.items():
        first = ("smoke", "kernels") if number == 1 else ("smoke",)
        assert sum(seconds[name] for name in (*first, *parts)) <= int(most) - 40, number


def test_the_table_of_kernels_and_of_a_plan(tmp_path):
    rates = {"forward": 1.5e12, "backward": 1.2e12}
    kernels = [
        {"name": "geglu", "what": "8 x 64", "gap": 2e-3, "bytes_per_second": rates},
        {"name": "adamw_ema", "what": "9", "gap": float("nan"), "bytes_per_second": {"one pass": 3e12}},
    ]
    said = run_table(
        tmp_path,
        kernels={"device": "H100", "copy_bytes": 3e12, "kernels": kernels},
        sd21_512=document(row("auto")),
        plan_sd21_512={"step": {"peak_bytes": 60e9}},
    )
    assert (
        "geglu 8 x 64: forward 1500 GB/s (50%), backward 1200 GB/s (40%) of a copy's; away from exact 2.0e-03" in said
    )
    assert "adamw_ema 9: one pass 3000 GB/s (100%) of a copy's; away from exact nan  WRONG" in said
    assert "sd21-512: 60.0 GB predicted, 61.0 GB taken (+1.7%)" in said
    assert "plan-sd21-512" in json.loads((tmp_path / "gpu.json").read_text())["parts"]


@pytest.mark.long
def test_the_gpu_round_runs_to_its_end_with_tiny_twins(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--dry", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert kept["parts"].keys() == {"smoke", "kernels", "plan-sd21-512", *gpu_table.PARTS}
    for name in gpu_table.PARTS:
        told = kept["parts"][name]
        # A CPU may compile for longer than the budget; whatever else there is was measured.
        measured = {each["name"] for each in told["rows"] if each["seconds"]}
        assert measured >= {each["name"] for each in told["rows"]} - {"compiled", "diffusers-best"}, name
    assert "parity held" in done.stdout


@pytest.mark.long
def test_start_up_is_told_part_by_part(tmp_path):
    out = tmp_path / "times.json"
    command = [sys.executable, ROOT / "benchmarks" / "startup.py", "quickstart", "--times", "1", "--out", out]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text())["processes"]
    whole = found.pop("all of it")
    assert 0 < sum(cpu for _, cpu in found.values()) <= whole[1]
    assert whole[1] < 15, "seconds of processor time from the command to the first update"


def test_the_parts_of_a_start_are_there():
    spec = importlib.util.spec_from_file_location("startup", ROOT / "benchmarks" / "startup.py")
    startup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    for module, path in startup.CALLS.values():
        assert callable(attrgetter(path)(importlib.import_module(module))), path
