"""Processes of a group over gloo, forked from this one, which has imported everything."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def forked(ranks: int, folder: Path, work: Callable[[int], Any]) -> Any:
    """What `work`, given its rank, returns on rank 0, as JSON has it; AssertionError where it fails on any."""
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks
                )
                found = work(rank)
                dist.barrier()
                dist.destroy_process_group()
                if rank == 0:
                    (folder / "found.json").write_text(json.dumps(found))
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * ranks, codes
    return json.loads((folder / "found.json").read_text())
