"""Groups over gloo: they agree, stop together, and end together whoever dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from daguerre.distributed.launch.environment import World
from daguerre.distributed.process_group import Watching, chosen_backend, own_device, start
from daguerre.distributed.settings import DistributedSettings
from daguerre.errors import LOST, STUCK, UserError

GROUP = Path(__file__).parent / "group.py"


class Group:
    """Processes of a run, as a launcher starts them."""

    def __init__(self, folder: Path, size: int, *do: object, address: bool = False, **environ: str) -> None:
        self.folder, self.size = folder, size
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            **environ,
        }
        if address:
            with socket.create_server(("127.0.0.1", 0)) as free:
                common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.processes = []
        for rank in range(size):
            words = [sys.executable, str(GROUP), str(folder), *map(str, do)]
            with (folder / f"log-{rank}").open("w") as log:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(subprocess.Popen(words, stderr=log, env=common | own))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def under_way(self, what: str = "pid") -> None:
        wait_for([self.folder / f"{what}-{rank}" for rank in range(self.size)])

    def codes(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()

    def saved(self) -> list[dict]:
        return [json.loads((self.folder / f"saved-{rank}.json").read_text()) for rank in range(self.size)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(paths: Sequence[Path]) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path for path in paths if not path.exists()]
        time.sleep(0.02)


@pytest.mark.long  # of the quick tests, test_agreement.py has signals, run/test_several_devices.py the processes
@pytest.mark.parametrize("size", [2, 4])
def test_one_is_told_to_stop_and_all_save_at_the_same_step(tmp_path: Path, size: int):
    with Group(tmp_path, size) as group:
        group.under_way()
        group.processes[1].send_signal(signal.SIGTERM)
        assert group.codes(30) == [143] * size
        saved = group.saved()
        print(f"{size} ranks: asking takes {saved[0]['median'] * 1e3:.2f} ms in the median of {saved[0]['step']} steps")
        assert len({(one["step"], one["signal"]) for one in saved}) == 1
        assert [group.log(rank) for rank in range(size)] == [""] * size


@pytest.mark.long
def test_one_is_killed_in_a_collective_call(tmp_path: Path):
    """Rank 0, which holds the store; no noise of gloo's stands before the cause, and no traceback after it."""
    with Group(tmp_path, 2, address=True) as group:
        group.under_way()
        begun = time.monotonic()
        group.processes[0].kill()
        assert group.codes(10) == [-9, LOST]
        assert time.monotonic() - begun < 8
        assert group.log(1).splitlines()[0].startswith("daguerre: [rank 1] rank 0 (")
        assert "Traceback" not in group.log(1)
        assert json.loads((tmp_path / "status-1.json").read_text())["kind"] == "gone"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_all_are_told_to_stop(tmp_path: Path, number: int):
    with Group(tmp_path, 4, address=True) as group:
        group.under_way()
        for process in group.processes:
            process.send_signal(number)
        assert group.codes(30) == [128 + number] * 4
        assert len({one["step"] for one in group.saved()}) == 1


@pytest.mark.long
@pytest.mark.parametrize("victim", range(4))
def test_any_of_four_is_killed(tmp_path: Path, victim: int):
    with Group(tmp_path, 4, address=True) as group:
        group.under_way()
        begun = time.monotonic()
        group.processes[victim].kill()
        codes = group.codes(10)
        print(f"rank {victim} killed: all gone after {time.monotonic() - begun:.2f} s")
        assert codes == [-9 if rank == victim else LOST for rank in range(4)]
        for rank in set(range(4)) - {victim}:
            assert f"rank {victim} (" in group.log(rank).splitlines()[0]
            assert "Traceback" not in group.log(rank)


@pytest.mark.long
def test_one_hangs_and_is_named(tmp_path: Path):
    """The others sit in gloo's sum; the stacks of all are there."""
    with Group(tmp_path, 4, "hang", 2, 30, STUCK="3") as group:
        group.under_way()
        assert group.codes(20) == [STUCK] * 4
        assert "s (stuck_seconds): rank 2 (" in group.log(0).splitlines()[0]
        texts = [(tmp_path / "stacks" / f"rank-0000{rank}.txt").read_text() for rank in range(4)]
        texts = [text.partition("most recent call first")[2] for text in texts]
        assert ["all_reduce" in text for text in texts] == [True, True, False, True]


@pytest.mark.long
def test_one_fails_and_the_others_name_it(tmp_path: Path):
    with Group(tmp_path, 4, "fail", 1, 30) as group:
        group.under_way()
        assert group.codes(15) == [LOST, 2, LOST, LOST]
        assert group.log(1) == "daguerre: rank 1: of its own\n"
        for rank in (0, 2, 3):
            assert "failed: UserError: rank 1: of its own" in group.log(rank).splitlines()[0]


@pytest.mark.long
def test_ranks_that_do_not_come_are_named(tmp_path: Path):
    with Group(tmp_path, 3, "late", 1, 0, PATIENCE="2", address=True) as group:
        group.under_way("started")
        assert [group.processes[rank].wait(60) for rank in (0, 2)] == [LOST, LOST]
        assert "rank 1 of 3 did not connect within 2 s (start)" in group.log(0)
        assert "Traceback" not in group.log(2)


@pytest.mark.long
def test_a_signal_while_waiting_for_others(tmp_path: Path):
    with Group(tmp_path, 2, "late", 1, 0) as group:
        group.under_way("started")
        time.sleep(1)
        group.processes[0].send_signal(signal.SIGUSR1)
        assert group.processes[0].wait(20) == 138
        assert "asked to stop while waiting for rank 1 (start)" in group.log(0)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGUSR1, -10), (signal.SIGTERM, 1)])
def test_torchruns_agent_is_signalled(tmp_path: Path, number: int, code: int):
    """Killed, or ended by a signal that it does not know, it leaves its workers: they save and go."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(GROUP)]
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen([*words, str(tmp_path)], stdout=log, stderr=log)
    try:
        wait_for([tmp_path / f"pid-{rank}" for rank in range(2)])
        agent.send_signal(number)
        assert agent.wait(40) == code
        deadline = time.monotonic() + 10
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
        while any(runs(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        saved = [json.loads((tmp_path / f"saved-{rank}.json").read_text()) for rank in range(2)]
        assert saved[0]["step"] == saved[1]["step"]
    finally:
        agent.kill()
        agent.wait()


def test_one_process_needs_no_group():
    with start(World(), DistributedSettings(), "cpu", Watching(None, print, lambda: 0)) as here:
        assert here.agreement.gather(1) == [1]
        assert here.agreement.signalled(signal.SIGTERM) == signal.SIGTERM
        assert here.agreement.gather({"a": 1}) == [{"a": 1}]
        assert (here.device, here.backend) == (torch.device("cpu"), "")
        here.watch.step(1)


def test_backends_that_cannot_be():
    cpu = torch.device("cpu")
    assert chosen_backend(DistributedSettings(), cpu) == "gloo"
    with pytest.raises(UserError, match="dist_backend=nccl: the device is cpu"):
        chosen_backend(DistributedSettings(dist_backend="nccl"), cpu)


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_device(World(5, 1, 8, 4, 2, 1), "cuda") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"8 processes on this node, but 4 GPUs: .*--nproc-per-node=4"):
        own_device(World(5, 5, 8, 8, 1, 0), "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device(World(5, 5, 8, 8, 1, 0), "cuda") == torch.device("cuda", 0)


def test_an_address_is_needed():
    two = World(0, 0, 2, 2, 1, 0, "torchrun")
    watching = Watching(None, print, lambda: 0)
    with (
        pytest.raises(UserError, match=r"MASTER_ADDR='', MASTER_PORT=: both must be set"),
        start(two, DistributedSettings(), "cpu", watching),
    ):
        pass
