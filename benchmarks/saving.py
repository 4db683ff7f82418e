"""How long training stalls for a save, and how long the save is written beside it; the disk's plain speed for scale.

    python benchmarks/saving.py [--out FOLDER] [--megabytes 512] [--saves 4] [--ranks 1] [--device cpu]

Each rank holds its share of one float32 state of so many megabytes in tensors of 4 MB, as FSDP cuts them, and trains:
a matrix product over and over. Printed: reserving the copy's memory at the start; for the last save the stall
(agreeing and copying, all that training waits for), the write (files, syncs, digests, commit, purge), stall / write,
and how many products a second ran with and without a save beside them. `--background off` writes at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from daguerre.checkpoint.async_save import Outcome, Saver
from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import Groups, Shard, ShardedTensor
from daguerre.ranks import ALONE, over

TENSOR_MB = 4


def state(megabytes: int, rank: int, ranks: int, device: str) -> Groups:
    """What a rank holds: rows of each tensor."""
    rows, columns = TENSOR_MB * 256, 1024
    each = -(-rows // ranks)
    begin, end = rank * each, min(rows, (rank + 1) * each)
    tensors = {
        f"layer{i:05d}.weight": ShardedTensor(
            (rows, columns), torch.float32, [Shard((begin, 0), torch.randn(end - begin, columns, device=device))]
        )
        for i in range(megabytes // TENSOR_MB)
    }
    return {"model": tensors}


def train(saver: Saver | None, device: str, seconds: float) -> float:
    """Products a second, until the save in flight is done or the time is over."""
    size = 512 if device == "cpu" else 8192
    a, count, begun = torch.randn(size, size, device=device), 0, time.perf_counter()
    while time.perf_counter() - begun < seconds and not (saver and saver.finished()):
        a = torch.nn.functional.normalize(a @ a)
        if device != "cpu":
            torch.cuda.synchronize()
        count += 1
    return count / (time.perf_counter() - begun)


def plain_write(folder: Path, megabytes: int) -> float:
    """Seconds to write and sync as many random bytes into one file, digest included."""
    chunk = os.urandom(TENSOR_MB << 20)
    begun = time.perf_counter()
    write_durably(folder / "plain", (chunk for _ in range(megabytes // TENSOR_MB)))
    seconds = time.perf_counter() - begun
    (folder / "plain").unlink()
    return seconds


def work(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    """One rank."""
    ranks = ALONE
    if arguments.ranks > 1:
        where = f"file://{folder / 'rendezvous'}"
        dist.init_process_group(
            "gloo", init_method=where, rank=rank, world_size=arguments.ranks, timeout=timedelta(minutes=10)
        )
        assert dist.group.WORLD is not None
        ranks = over(dist.group.WORLD)
    torch.set_num_threads(1)
    groups = state(arguments.megabytes, rank, arguments.ranks, arguments.device)
    alone = train(None, arguments.device, 2.0)
    saver = Saver(ShardedStore(folder / "checkpoints", ranks), background=arguments.background == "on")
    begun = time.perf_counter()
    saver.reserve(groups)
    reserved = time.perf_counter() - begun
    outcomes: list[Outcome] = []
    for number in range(1, arguments.saves + 1):
        outcomes += saver.save(f"step-{number:08d}", groups, {"state": {"step": number}})
        beside = train(saver, arguments.device, 60.0) if arguments.background == "on" else 0.0
        outcomes += saver.settle()
    saver.finish()
    last = outcomes[-1]
    if rank == 0:
        found = {
            "ranks": arguments.ranks,
            "megabytes": arguments.megabytes,
            "background": arguments.background,
            "reserved_seconds": round(reserved, 3),
            "stalled_seconds": round(last.stalled_seconds, 4),
            "first_stalled_seconds": round(outcomes[0].stalled_seconds, 4),
            "wrote_seconds": round(last.wrote_seconds, 3),
            "stalled_of_write": round(last.stalled_seconds / last.wrote_seconds, 4),
            "products_a_second_alone": round(alone, 1),
            "products_a_second_beside": round(beside, 1),
            "plain_write_seconds": round(plain_write(folder, arguments.megabytes), 3),
        }
        print(json.dumps(found, indent=1))
    if arguments.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a folder on the disk to measure; the system's temporary one if left")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--background", choices=["on", "off"], default="on")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=arguments.out))
    try:
        if arguments.ranks == 1:
            work(0, arguments, folder)
        else:
            mp.spawn(work, args=(arguments, folder), nprocs=arguments.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
