"""The checkpoints of a run, wherever it lives."""

from __future__ import annotations

from daguerre.checkpoint.sharded import ShardedStore
from daguerre.ranks import Ranks
from daguerre.remote.checkpoint_store import RemoteStore
from daguerre.run.storage import Home, LocalHome


def store(home: Home, ranks: Ranks) -> ShardedStore:
    """For all ranks. What it finds is in a folder of this machine."""
    if isinstance(home, LocalHome):
        return ShardedStore(home.folder.checkpoints, ranks)
    return RemoteStore(home.folder.checkpoints, ranks, home.run, home.before_commit)
