"""A training run of seconds for tests of commands: the quickstart with a tiny UNet, and what must come out equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from daguerre.cli import main

TINY = [
    "run_name=tiny",
    "model.unet.block_out_channels=[32, 32]",
    "model.unet.down_block_types=[DownBlock2D, CrossAttnDownBlock2D]",
    "model.unet.up_block_types=[CrossAttnUpBlock2D, UpBlock2D]",
    "model.unet.attention_head_dim=1",
    "training.duration=8 steps",
    "training.global_batch_size=2",
    "training.per_device_batch_size=2",
    "lr_scheduler.warmup=2 steps",
    "logging.every=3 steps",
    "logging.tensorboard=false",
    "checkpoint.every=3 steps",
    "validation.every=4 steps",
    "validation.num_samples=3",
    "validation.num_levels=2",
    "sampling.num_images=2",
    "sampling.num_inference_steps=2",
    "data.checked_prompts=2",
]
WALL_CLOCK = ("time", "perf/", "memory/")


def arguments(output_dir: Path, *overrides: str) -> list[str]:
    """Of `daguerre train`."""
    return ["train", "quickstart", f"output_dir={output_dir}", *TINY, *overrides]


def train(output_dir: Path, *overrides: str) -> int:
    """Trains in this process; the exit code."""
    return main.run(arguments(output_dir, *overrides))


def start(output_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """Trains in a process of its own."""
    command = [sys.executable, "-m", "daguerre", *arguments(output_dir, *overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the trainer and to its workers, as a power cut would have it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for(path: Path, seconds: float = 180.0) -> None:
    """Waits until a path exists."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def lines(run: Path) -> list[dict[str, Any]]:
    """Metrics without what the clock decides."""
    read = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(WALL_CLOCK)} for line in read]


def outcome(run: Path) -> dict[str, Any]:
    """All that must be equal to the bit between two runs that trained the same."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    kept = [*newest.glob("*.safetensors"), newest / "state.json", newest / "loading.json"]
    kept += [*run.glob("samples/**/*"), *run.glob("pipeline/*/*"), run / "data.json", run / "evaluation.json"]
    files = {path.relative_to(run).as_posix(): path.read_bytes() for path in kept if path.is_file()}
    found = lines(run)
    return {"files": files, "lines": found, "order": [list(line) for line in found]}


def assert_equal(run: Path, expected: dict[str, Any]) -> None:
    """Fails with the name of the first thing that differs."""
    found = outcome(run)
    assert found["lines"] == expected["lines"]
    assert found["order"] == expected["order"]
    assert found["files"].keys() == expected["files"].keys()
    for name, content in expected["files"].items():
        assert found["files"][name] == content, f"{name} differs"
