"""How a run begins: fresh, from another run's weights, or where it was stopped. Training itself is run/trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.adapters.adapter import Attached
from daguerre.build.parts import BatchSizes, shared_out
from daguerre.checkpoint.atomic import write_bytes_atomically, write_json_atomically
from daguerre.checkpoint.environment import environment
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.store import Store
from daguerre.config import config as configs
from daguerre.config.config import Change, Config, Loaded
from daguerre.config.errors import shown
from daguerre.data.loading.loader import Loading
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.process_group import Processes
from daguerre.errors import UserError
from daguerre.remote import local_copy
from daguerre.run import ema_start, state_io
from daguerre.run.distribute import led
from daguerre.run.storage import Home, LocalHome
from daguerre.tracking.sinks import cut_after
from daguerre.training.settings import largest_divisor
from daguerre.training.state import TrainState, adopt

_RECORDED = ("training.global_batch_size", "lr_scheduler.stages")
"""Settings that a run decides once: a command that leaves them out means those of the run."""


@dataclass(frozen=True)
class Beginning:
    """What a run goes on from: what its folder holds."""

    checkpoint: Path | None
    """The one to go on from, verified; None for a fresh run."""
    documents: Mapping[str, Any]
    """Of it: `state`, `loading` and `base`."""
    global_batch_size: int | None
    """The global batch of the run's first start, which holds for good; None for a fresh run."""
    notices: list[str]
    schedule: Mapping[str, Any] | None = None
    """`duration` and `lr_scheduler` that the run was last started with; None for a fresh run."""

    @property
    def step(self) -> int | None:
        """Updates that the checkpoint has done; None for a fresh run."""
        return None if self.checkpoint is None else int(self.documents["state"]["step"])


def begin(loaded: Loaded, folder: RunFolder, store: ShardedStore, processes: Processes) -> Beginning:
    """Finds the checkpoint to go on from, after refusing a folder that belongs to another recipe.

    Call it on all ranks while rank 0 holds the folder. UserError shows what differs from the recipe that the run was
    begun with.
    """
    config = loaded.config
    known = led(processes, lambda: _recorded(_without_shipped_batch(loaded), folder))
    name = config.resume_from_checkpoint
    found = store.recover() if name == "latest" else store.rewind(name)
    documents = {} if found.path is None else _documents(found.path)
    notices = [*found.notices, *known["allowed"]]
    return Beginning(found.path, documents, known["global_batch_size"], notices, known["schedule"])


def foreseen_sizes(loaded: Loaded, home: Home, mesh: Mesh) -> BatchSizes | None:
    """Batch sizes of a run that has not begun, or of one that will go on with its batch; nothing is written. None for
    a run in an object store, which is not asked. UserError for a mesh that it cannot be trained on."""
    if not isinstance(home, LocalHome):
        return None
    recorded = None
    if home.folder.config.exists():
        chosen = _without_shipped_batch(loaded).training.global_batch_size  # another one is refused, or allowed, later
        recorded = chosen or configs.load(str(home.folder.path)).config.training.global_batch_size
    return shared_out(loaded, mesh, recorded)


def _without_shipped_batch(loaded: Loaded) -> Config:
    """The config without a global batch that only a shipped recipe says: the one that a run was begun with holds."""
    if "training.global_batch_size" in loaded.chosen:
        return loaded.config
    training = loaded.config.training.model_copy(update={"global_batch_size": None})
    return loaded.config.model_copy(update={"training": training})


def _recorded(config: Config, folder: RunFolder) -> dict[str, Any]:
    """What a run was begun with; `allowed` are lines about what differs and may."""
    if not folder.config.exists():
        return {"global_batch_size": None, "allowed": [], "schedule": None}
    if config.resume_from_checkpoint == "never":
        raise UserError(
            f"{local_copy.shown(folder.path)} holds a run already, and resume_from_checkpoint=never: give this run "
            "another run_name, or leave it out to go on with that one"
        )
    old = configs.load(str(folder.path)).config
    allowed = refuse_other_recipe(old, config, folder)
    whole = old.training.global_batch_size
    if any(change.path == "training.global_batch_size" for change in allowed):
        whole = config.training.global_batch_size
    schedule = {"duration": old.training.duration, "lr_scheduler": old.lr_scheduler.model_dump(mode="json")}
    told = [f"allow_change: {_told(change)}" for change in allowed]
    return {"global_batch_size": whole, "allowed": told, "schedule": schedule}


def _documents(checkpoint: Path) -> dict[str, Any]:
    with opened(checkpoint) as reader:
        return {name: reader.document(name) for name in ("state", "loading", "base") if reader.has(name)}


def refuse_other_recipe(old: Config, new: Config, folder: RunFolder) -> list[Change]:
    """A run goes on only with the recipe it was begun with; settings that do not touch what is learnt may change, and
    those that `allow_change` names: these are returned."""
    changes = [change for change in configs.diff(old, new) if change.resume == "identity"]
    # Left out, these are the recorded ones.
    changes = [change for change in changes if change.new or change.path not in _RECORDED]
    allowed = [change for change in changes if any(_is_in(change.path, path) for path in new.allow_change)]
    changes = [change for change in changes if change not in allowed]
    if not changes:
        return allowed
    lines, place = [f"  {_told(change)}" for change in changes], local_copy.shown(folder.path)
    raise UserError(
        f"{place} holds a run of another recipe; it differs in\n" + "\n".join(lines) + "\n"
        "Give the new run another run_name, repeat the command that began this one, or, to start from its weights, "
        f"use another run_name with init_from={place}. To go on all the same, with another setting from here on: "
        f"allow_change='[{', '.join(change.path for change in changes)}]'"
    )


def _told(change: Change) -> str:
    return f"{change.path}: the run has {shown(change.old)}, this command says {shown(change.new)}"


def _is_in(path: str, allowed: str) -> bool:
    return path == allowed or path.startswith(f"{allowed}.")


def first_weights(attached: Attached, beginning: Beginning, config: Config) -> list[str]:
    """Puts another run's weights into the net of a fresh run, before it is split, if the recipe says so; says what was
    done."""
    if beginning.checkpoint is not None or config.init_from is None:
        return []
    return _other_weights(attached, config.init_from)


def restore(state: TrainState, beginning: Beginning, config: Config, given: Mapping[str, Tensor] | None) -> list[str]:
    """Puts the checkpoint into the state, or into a fresh one the averages `given`; says what was done."""
    if beginning.checkpoint is not None:
        state_io.restore(state, beginning.checkpoint)
        return [f"going on from {beginning.checkpoint.name}"]
    if given is None:
        return []
    state.start_averages(given)
    return [f"the averages start from the weights of {config.ema.path}"]


def restore_loading(loading: Loading, beginning: Beginning, config: Config) -> None:
    """The place in the data and what was skipped there. UserError where the data are others than those of the run."""
    if beginning.checkpoint is None:
        loading.skips.begin()
        return
    may_differ = any(path.partition(".")[0] == "data" for path in config.allow_change)
    loading.restore(beginning.documents["loading"], may_differ)


def first_averages(attached: Attached, beginning: Beginning, config: Config) -> dict[str, Tensor] | None:
    """Whole weights from which the averages of a fresh run start, where the recipe names some; the net is whole."""
    if beginning.checkpoint is not None or config.ema.path is None:
        return None
    return dict(ema_start.read(local_copy.located(config.ema.path), attached.net, attached.names))


def _other_weights(attached: Attached, init_from: str) -> list[str]:
    other = RunFolder(local_copy.located(init_from))
    notices, place = local_copy.bring(other.path), f"{local_copy.shown(other.path)}/checkpoints"
    found = Store(other.checkpoints).newest_verified()
    if found.path is None:
        raise UserError(
            f"init_from={init_from}: there is no checkpoint in {place}; train that run first, or "
            "give the folder of another"
        )
    notices += [*found.notices, f"starting from the weights of {place}/{found.path.name}"]
    return [*notices, *adopt(attached.net, Store(other.checkpoints).load(found.path).tensors, attached.names)]


def foreseen(config: Config) -> list[str]:
    """What a fresh run would start from, for people; nothing is read but the names of checkpoints."""
    if config.init_from is None:
        return []
    names = local_copy.names(config.init_from) or Store(RunFolder(Path(config.init_from)).checkpoints).names()
    newest = f"{names[-1]} of {config.init_from}" if names else f"{config.init_from}, which has no checkpoint yet"
    return [f"a new run starts from the weights of {newest} (init_from)"]


def record(
    config: Config, folder: RunFolder, beginning: Beginning, sizes: BatchSizes, parameters: Mapping[str, int]
) -> None:
    """Writes the resolved recipe and the environment, and cuts numbers that are newer than the checkpoint."""
    batch = {"global_batch_size": sizes.whole}
    if micro := config.training.per_device_batch_size:
        batch["per_device_batch_size"] = largest_divisor(sizes.whole, micro)
    training = config.training.model_copy(update=batch)
    # Recorded, they would go back, and allow and do the same, at every start from this folder.
    schedule = config.lr_scheduler.model_copy(update={"on_new_duration": "refuse", "restart_from": None})
    of_this_start = {"resume_from_checkpoint": "latest", "allow_change": [], "lr_scheduler": schedule}
    resolved = config.model_copy(update={"training": training, **of_this_start})
    write_bytes_atomically(folder.config, configs.dump(resolved).encode())
    write_json_atomically(folder.environment, {**environment(), "parameters": parameters})
    cut_after(folder.metrics, -1 if beginning.step is None else beginning.step)
