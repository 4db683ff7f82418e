"""Real processes that save into a bucket together, for test_remote_kills.py: they share no disk and die at any moment.

    python far_saving.py ADDRESS FOLDER TRIALS SEED; prints what it found as one line of JSON

Forked by a mother that has imported everything and asked no store for anything (connections do not outlive a fork).
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from layouts import equal
from saving_ranks import exit_codes, kill_some, save_and_save, start

from daguerre.checkpoint.store import Store
from daguerre.ranks import ALONE, Ranks
from daguerre.remote.checkpoint_store import RemoteStore
from daguerre.storage import clients
from daguerre.storage.bucket import prefix


def kills(address: str, folder: Path, trials: int, seed: int) -> dict[str, object]:
    """SIGKILL at random moments of a run that saves and saves, and goes on elsewhere after each kill."""
    chance, seen, acknowledged = random.Random(seed), Counter[str](), folder / "acknowledged"
    for trial in range(trials):
        count, ready = chance.choice([1, 2, 3]), os.pipe()

        def run(ranks: Ranks, trial: int = trial, ready: tuple[int, int] = ready) -> None:
            store = RemoteStore(folder / f"node-{trial}-{ranks.rank}", ranks, prefix(address))
            path = store.recover().path
            number = int(path.name[-8:]) if path else 0
            if path is not None:
                loaded = Store(path.parent).load(path)
                assert equal(loaded.tensors, loaded.documents["state"]["value"]), "a mixture"
            os.write(ready[1], b"r")
            save_and_save(store, ranks, number, acknowledged)

        seen[kill_some(chance, start(count, folder, run), ready, 4.0)] += 1
        assert exit_codes(start(1, folder, lambda ranks, trial=trial: check(address, folder, trial)), 60) == [0]
    return {"trials": trials, "saved": len(acknowledged.read_text().split()), **seen}


def check(address: str, folder: Path, trial: int) -> None:
    """Every checkpoint that has a manifest is whole and of one save; the last one said to be saved is there."""
    run = prefix(address)
    store = RemoteStore(folder / f"reader-{trial}", ALONE, run)
    names = store.names()
    for name in names:
        store._catalog.sealed(name).fetch_newest(store.root / name, "")
        loaded = Store(store.root).load(store.root / name)
        assert loaded.documents["state"]["value"] == int(name[-8:])
        assert equal(loaded.tensors, int(name[-8:])), f"{name} is a mixture"
    said = (folder / "acknowledged").read_text().split() if (folder / "acknowledged").exists() else []
    assert not said or int(said[-1][-8:]) <= int(names[-1][-8:]), (said[-1], names)
    assert not said or len(names) >= min(2, len(said)), names


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A connection that a kill left half open is given up soon.
    clients.PATIENCE = clients.Patience(first_pause_seconds=0.01, longest_pause_seconds=0.1)
    print(json.dumps(kills(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
