"""The checkpoints of a run, wherever it lives."""

from __future__ import annotations

from daguerre.checkpoint.ranks import Ranks
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.remote.checkpoint_store import RemoteStore
from daguerre.run.storage import Home, LocalHome

AnyStore = ShardedStore | RemoteStore
"""They have the same methods."""


def store(home: Home, ranks: Ranks) -> AnyStore:
    """For all ranks. What it finds is in a folder of this machine."""
    if isinstance(home, LocalHome):
        return ShardedStore(home.folder.checkpoints, ranks)
    return RemoteStore(home.folder.checkpoints, ranks, home.run, home.before_commit)
