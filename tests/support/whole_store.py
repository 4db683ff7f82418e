"""A store of one process that is given whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import ShardedTensor
from daguerre.ranks import ALONE


class WholeStore(ShardedStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root, ALONE)

    def save(
        self,
        name: str,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Each group of `tensors` becomes GROUP.safetensors, each of `documents` NAME.json."""
        groups = {
            group: {key: ShardedTensor.of(each) for key, each in named.items()} for group, named in tensors.items()
        }
        return self.commit(self.plan(name, groups, documents, files))
