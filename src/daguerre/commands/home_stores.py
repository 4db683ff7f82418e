"""The checkpoints of a run, wherever it lives."""

from __future__ import annotations

from daguerre.checkpoint.ranks import Ranks
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.commands.homes import Home, LocalHome
from daguerre.remote.store import RemoteStore

AnyStore = ShardedStore | RemoteStore
"""They have the same methods."""


def store(home: Home, ranks: Ranks) -> AnyStore:
    """For all ranks. What it finds is in a folder of this machine."""
    if isinstance(home, LocalHome):
        return ShardedStore(home.folder.checkpoints, ranks)
    return RemoteStore(home.folder.checkpoints, ranks, home.run, home.before_commit)
