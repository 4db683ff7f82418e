"""The checkpoint store of a run; a training state as slices of a checkpoint, one device's each, and back."""

from pathlib import Path

import torch
from torch import Tensor

from daguerre.checkpoint.shard_reader import ShardReader, opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import Groups, Shard, ShardedTensor, in_order
from daguerre.config.config import Config
from daguerre.errors import named
from daguerre.ranks import Ranks
from daguerre.remote.checkpoint_store import RemoteStore
from daguerre.run.storage import LocalStorage, RunStorage
from daguerre.training.change import carried
from daguerre.training.sharding import ShardRegion
from daguerre.training.state import TrainState


def store(storage: RunStorage, ranks: Ranks) -> ShardedStore:
    """The checkpoints of a run, for all ranks; those that it finds are in a folder of this machine."""
    if isinstance(storage, LocalStorage):
        return ShardedStore(storage.folder.checkpoints, ranks)
    return RemoteStore(storage.folder.checkpoints, ranks, storage.run, storage.before_commit)


def groups(state: TrainState) -> Groups:
    """This device's slices by file and name: views, to be copied before the next update. A collective call."""
    return {
        file: {name: _sliced(tensor, _part_of(state, file, name, tensor.shape)) for name, tensor in tensors.items()}
        for file, tensors in state.tensors().items()
    }


def restore(state: TrainState, folder: Path, config: Config) -> list[str]:
    """Takes over a verified checkpoint, whatever devices saved it. Returns lines about what is reset, because it was
    saved with other settings. UserError if it does not fit."""
    with named(folder.name), opened(folder) as reader:
        shapes = {file: {name: stored.shape for name, stored in own.items()} for file, own in reader.index.items()}
        objective = config.objective.model_dump(mode="json")
        kept = carried(state, shapes, reader.document("config"), config.optimizer, config.ema, objective)
        found = {
            file: {name: _read(reader, state, file, name, source) for name, source in own.items()}
            for file, own in kept.files.items()
        }
        state.load(found, reader.document("state"), kept.anew, kept.unlike)
    return kept.notices


def _part_of(state: TrainState, file: str, name: str, held_shape: torch.Size) -> ShardRegion | None:
    """The part of a parameter that this tensor is; None for other tensors, and for a parameter that is held whole."""
    parameter = state.parameter_of(file, name)
    # A count of updates belongs to a parameter, too, and is not cut as it is.
    if parameter is None or held_shape != state.held(parameter).shape:
        return None
    return state.sharding.part(parameter)


def _sliced(tensor: Tensor, part: ShardRegion | None) -> ShardedTensor:
    if part is None:
        return ShardedTensor.of(tensor)
    if part.order is not None:
        return in_order(*part.order, part.offsets, tensor, part.whole)
    return ShardedTensor(part.whole, tensor.dtype, [Shard(part.offsets, tensor)])


def _read(reader: ShardReader, state: TrainState, file: str, name: str, source: str) -> Tensor:
    """This device's slice of the tensor `source` of the checkpoint, as the state's `name`."""
    parameter = state.parameter_of(file, name)
    part = None if parameter is None else state.sharding.part(parameter)
    if parameter is None or part is None or part.whole != reader.index[file][source].shape:
        return reader.read(file, source)
    dtype = reader.index[file][source].dtype
    tensor = torch.empty(state.held(parameter).shape, dtype=dtype)
    reader.fill({file: {source: _sliced(tensor, part)}})
    return tensor
