"""The scripts of benchmarks/: the table at the end of a GPU round, the round with tiny twins, start-up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RATES = {"product_flops": {"bfloat16": 7.9e14}, "copy_bytes": 4.3e12, "datasheet": None}


def row(name, speed=None, **changed):
    told = {"name": name, "seconds": [0.1], "problem": None, "alone": False, "samples_per_second": 180.04}
    told |= {"model_tflops_per_second": 433.0, "share_of_measured_rate": 0.548, "peak_bytes": 61e9}
    return told | {"speed_of_first": speed and dict(zip(("low", "median", "high"), speed, strict=True))} | changed


def document(*rows, ended=None):
    return {"rows": list(rows), "ended": ended, "rates": RATES, "device": "NVIDIA H200"}


def run_table(folder, **parts):
    for name, told in parts.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(told))
    command = [sys.executable, ROOT / "benchmarks" / "gpu_table.py", folder, folder / "gpu.json", "512"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_of_a_gpu_round(tmp_path):
    odd = row("diffusers-best", seconds=[], problem="NoParity: no parity over 20 updates")
    peers = [row("daguerre"), row("diffusers-default", (0.5, 0.625, 0.8)), odd]
    said = run_table(
        tmp_path,
        sd15_512_peers=document(*peers),
        sd21_512=document(row("base")),
        sdxl_1024=document(row("auto", seconds=[], problem="out of memory"), row("checkpointed", alone=True)),
        vae_512=document(ended="the budget of 30 s was over"),
    )
    lines = said.splitlines()
    assert any(line.startswith("sd21-512") and "180.0 img/s" in line and "goal 175" in line for line in lines)
    assert any("daguerre against diffusers-default: 1.600x (1.250 to 2.000), goal 1.5x" in line for line in lines)
    assert not any("against diffusers-best" in line for line in lines)
    assert any("diffusers-best" in line and "no parity" in line for line in lines)
    assert any(line.startswith("sdxl-1024") and line.endswith("out of memory") for line in lines)
    assert any("nothing was measured: the budget of 30 s was over" in line for line in lines)
    assert any(line.startswith("sd15-256") and "did not get as far" in line for line in lines)
    assert lines[-1].startswith("512 s in all")
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert set(kept["parts"]) == {"sd15-512-peers", "sd21-512", "sdxl-1024", "vae-512"}


@pytest.mark.long
def test_the_gpu_round_runs_to_its_end_with_tiny_twins(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--dry", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert len(kept["parts"]) == 6
    for name, told in kept["parts"].items():
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
