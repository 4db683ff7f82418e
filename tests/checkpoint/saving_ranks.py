"""Real processes that save together over gloo, forked by a mother that has imported everything once.

    python saving_ranks.py MODE FOLDER [ARGUMENTS]; prints what it found as one line of JSON

`reshard`: four save beside "training", then three, two and one each recover, compare and save on. `kills TRIALS SEED`:
one rank or all get SIGKILL at random moments. `syscalls RANK NAME`: a rank dies on entering each system call in turn.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from layouts import equal, held, read_alike

from daguerre.checkpoint import manifest
from daguerre.checkpoint.async_save import Saver
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.store import Store
from daguerre.ranks import Ranks, RanksGone, over

GONE = 3
MESH = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}


def start(count: int, folder: Path, action: Callable[[Ranks], None]) -> list[int]:
    """Fork so many ranks; their process ids."""
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{rendezvous}",
                    rank=rank,
                    world_size=count,
                    timeout=timedelta(seconds=20),
                )
                assert dist.group.WORLD is not None
                action(over(dist.group.WORLD))
                code = 0
            except RanksGone:
                code = GONE
            finally:
                if code == 1:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def exit_codes(pids: list[int], seconds: float = 60) -> list[int]:
    """Exit codes, negative for signals; 99 for who had to be killed because it did not end."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(found) < len(pids):
        for pid in set(pids) - set(found):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(found):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                found[pid] = 99
        time.sleep(0.002)
    return [found[pid] for pid in pids]


def reshard(folder: Path) -> dict[str, Any]:
    """Four ranks, then others that go on from them."""
    root = folder / "checkpoints"

    def first(ranks: Ranks) -> None:
        saving = Saver(ShardedStore(root, ranks))
        for number in (1, 2, 3):
            mine = held(number, ranks.rank, *MESH[4])
            saving.save(f"step-{number:08d}", mine, {"state": {"step": number}})
            for named in mine.values():
                for each in named.values():
                    for piece in each.pieces:
                        piece.tensor.zero_()
        saving.finish()

    assert exit_codes(start(4, folder, first)) == [0] * 4
    for count, newest in ((3, 3), (2, 4), (1, 5), (4, 6)):

        def then(ranks: Ranks, newest: int = newest) -> None:
            store = ShardedStore(root, ranks)
            path = store.recover().path
            assert path is not None
            assert path.name == f"step-{newest:08d}"
            with opened(path) as reader:
                read_alike(reader, newest, ranks.rank, *MESH[ranks.count])
            store.commit(store.plan(f"step-{newest + 1:08d}", held(newest + 1, ranks.rank, *MESH[ranks.count]), {}))
            store.purge(RetentionPolicy(2))

        assert exit_codes(start(count, folder, then)) == [0] * count, count
    store = Store(root)
    return {"names": store.names(), "equal": [equal(store.load(root / n).tensors, int(n[-8:])) for n in store.names()]}


def sound(root: Path) -> list[int]:
    """Every folder with a checkpoint's name has to be whole and of one save; their numbers."""
    store = Store(root)
    for name in store.names():
        manifest.verify(root / name)
        loaded = store.load(root / name)
        assert equal(loaded.tensors, loaded.documents["state"]["value"]), f"{name} is a mixture"
    return [int(name[-8:]) for name in store.names()]


def save_and_save(store: ShardedStore, ranks: Ranks, number: int, acknowledged: Path) -> NoReturn:
    """Until the process is killed: checkpoints after that of `number`; rank 0 writes down what was said to be saved."""
    saving = Saver(store, RetentionPolicy(2))
    while True:
        number += 1
        mine = held(number, ranks.rank, *MESH[ranks.count])
        for outcome in saving.save(f"step-{number:08d}", mine, {"state": {"value": number}}):
            assert outcome.path, outcome.notices
            if ranks.rank == 0:
                with acknowledged.open("a") as lines:
                    lines.write(f"{outcome.name}\n")


def kill_some(chance: random.Random, pids: list[int], ready: tuple[int, int], seconds: float) -> str:
    """SIGKILL to one rank or to all, within so many seconds after all were ready; says to whom."""
    for _ in pids:
        os.read(ready[0], 1)
    time.sleep(chance.random() * seconds)
    victims = pids if chance.random() < 0.4 else [chance.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    codes = exit_codes(pids)
    assert set(codes) <= {-signal.SIGKILL, GONE}, codes
    os.close(ready[0])
    os.close(ready[1])
    return "all" if victims is pids else f"rank {'0' if victims == pids[:1] else 'other'}"


def kills(folder: Path, trials: int, seed: int) -> dict[str, Any]:
    """SIGKILL at random moments of a run that saves and saves, and goes on after each kill."""
    root, chance, seen = folder / "checkpoints", random.Random(seed), Counter[str]()
    for trial in range(trials):
        count = chance.choice([2, 3, 4])
        ready, acknowledged = os.pipe(), folder / f"acknowledged-{trial}"

        def run(ranks: Ranks, ready: tuple[int, int] = ready, acknowledged: Path = acknowledged) -> None:
            store = ShardedStore(root, ranks)
            path = store.recover().path
            number = int(path.name[-8:]) if path else 0
            os.write(ready[1], b"r")
            save_and_save(store, ranks, number, acknowledged)

        killed = kill_some(chance, start(count, folder, run), ready, 0.4)
        there = sound(root) if root.exists() else []
        if acknowledged.exists() and acknowledged.read_text():
            seen["acknowledged"] += 1
            said = acknowledged.read_text().split()
            assert int(said[-1][-8:]) <= max(there), "what was said to be saved is there"
        seen[killed] += 1
        seen["left"] += bool(list(root.glob(".tmp-*")))
    return {"trials": trials, "sound": sound(root), **seen}


def syscalls(folder: Path, victim: int, name: str) -> dict[str, Any]:
    """A rank of two dies on entering a system call for the first, second ... time, until it lives through it all."""
    original = folder / "original"

    def save(store: ShardedStore, number: int, value: int) -> None:
        mine = held(value, store.ranks.rank, 2, 1)
        store.commit(store.plan(f"step-{number:08d}", mine, {"state": {"value": value}}))

    def prepare(ranks: Ranks) -> None:
        save(ShardedStore(original, ranks), 1, 1)
        save(ShardedStore(original, ranks), 2, 2)

    assert exit_codes(start(2, folder, prepare)) == [0, 0]
    outcomes: Counter[str] = Counter()
    root = folder / "checkpoints"
    for count in range(1, 1000):
        shutil.copytree(original, root)
        ready, go = os.pipe(), os.pipe()

        def run(ranks: Ranks, ready: tuple[int, int] = ready, go: tuple[int, int] = go) -> None:
            ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, any
            os.write(ready[1], b"r")
            os.read(go[0], 1)
            store = ShardedStore(root, ranks)
            save(store, 3, 3)
            save(store, 3, 9)
            store.purge(RetentionPolicy(2))

        pids = start(2, folder, run)
        os.read(ready[0], 1)
        os.read(ready[0], 1)
        strace = subprocess.Popen(
            ["strace", "-p", str(pids[victim]), "-e", f"inject={name}:signal=SIGKILL:when={count}", "-o", "/dev/null"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert strace.stderr is not None
        line = strace.stderr.readline()
        assert "attached" in line, line
        os.write(go[1], b"gg")
        codes = exit_codes(pids, 40)
        strace.wait()
        for end in (*ready, *go):
            os.close(end)
        there = sound(root)
        assert {2} <= set(there), there
        found = Store(root).recover()
        assert found.path is not None
        assert len(sound(root)) >= 2
        assert not list(root.glob(".*"))
        state = Store(root).load(found.path).documents["state"]["value"]
        outcomes[f"{found.path.name}={state}"] += 1
        shutil.rmtree(root)
        if codes[victim] == 0:
            return {"points": count - 1, **outcomes}
        assert codes[victim] == -signal.SIGKILL, codes
        assert codes[1 - victim] in (0, GONE), codes
    raise AssertionError("it never lives")


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, where, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if mode == "reshard":
        print(json.dumps(reshard(where)))
    elif mode == "kills":
        print(json.dumps(kills(where, int(rest[0]), int(rest[1]))))
    else:
        print(json.dumps(syscalls(where, int(rest[0]), rest[1])))
