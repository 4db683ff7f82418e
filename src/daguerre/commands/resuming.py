"""How a run begins: fresh, from another run's weights, or where it was stopped. Training itself is training_run.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daguerre import config as configs
from daguerre.checkpoint.atomic import write_bytes_atomically, write_json_atomically
from daguerre.checkpoint.environment import environment
from daguerre.checkpoint.run_folder import RunFolder
from daguerre.checkpoint.store import Checkpoint, Store
from daguerre.commands import ema_start
from daguerre.config import Config
from daguerre.errors import UserError
from daguerre.problems import shown
from daguerre.training.sinks import cut_after
from daguerre.training.state import TrainState, start_from


@dataclass(frozen=True)
class Beginning:
    """What a run goes on from: what its folder holds."""

    checkpoint: Checkpoint | None
    """The one to go on from; None for a fresh run."""
    global_batch_size: int | None
    """The global batch of the run's first start, which holds for good; None for a fresh run."""
    notices: list[str]

    @property
    def step(self) -> int | None:
        """Updates that the checkpoint has done; None for a fresh run."""
        return None if self.checkpoint is None else int(self.checkpoint.documents["state"]["step"])


def begin(config: Config, folder: RunFolder) -> Beginning:
    """Finds the checkpoint to go on from, after refusing a folder that belongs to another recipe.

    Call it while holding the folder. UserError shows what differs from the recipe that the run was begun with.
    """
    recorded = None
    if folder.config.exists():
        if config.resume_from_checkpoint == "never":
            raise UserError(
                f"{folder.path} holds a run already, and resume_from_checkpoint=never: give this run another run_name, "
                "or leave it out to go on with that one"
            )
        old = configs.load(str(folder.path)).config
        refuse_other_recipe(old, config, folder)
        recorded = old.training.global_batch_size
    store, name = Store(folder.checkpoints), config.resume_from_checkpoint
    found = store.recover() if name == "latest" else store.rewind(name)
    checkpoint = None if found.path is None else store.load(found.path)
    return Beginning(checkpoint, recorded, found.notices)


def refuse_other_recipe(old: Config, new: Config, folder: RunFolder) -> None:
    """A run goes on only with the recipe it was begun with; settings that do not touch what is learnt may change."""
    changes = [change for change in configs.diff(old, new) if change.resume == "identity"]
    if new.training.global_batch_size is None:  # left out it is the recorded one
        changes = [change for change in changes if change.path != "training.global_batch_size"]
    if not changes:
        return
    lines = [
        f"  {change.path}: the run has {shown(change.old)}, this command says {shown(change.new)}" for change in changes
    ]
    raise UserError(
        f"{folder.path} holds a run of another recipe; it differs in\n" + "\n".join(lines) + "\n"
        "Give the new run another run_name, repeat the command that began this one, or, to start from its weights, "
        f"use another run_name with init_from={folder.path}"
    )


def restore(state: TrainState, beginning: Beginning, config: Config) -> list[str]:
    """Puts the checkpoint into the state, or another run's weights if the recipe says so; says what was done."""
    if beginning.checkpoint is not None:
        state.load(beginning.checkpoint.tensors, beginning.checkpoint.documents["state"])
        return [f"going on from {beginning.checkpoint.name}"]
    said = [] if config.init_from is None else _other_weights(state, config.init_from)
    if config.ema.path is not None:
        state.ema.start_from(ema_start.read(Path(config.ema.path), state.net))
        said.append(f"the averages start from the weights of {config.ema.path}")
    return said


def _other_weights(state: TrainState, init_from: str) -> list[str]:
    other = RunFolder(Path(init_from))
    found = Store(other.checkpoints).newest_verified()
    if found.path is None:
        raise UserError(
            f"init_from={init_from}: there is no checkpoint in {other.checkpoints}; train that run first, or "
            "give the folder of another"
        )
    notices = start_from(state, Store(other.checkpoints).load(found.path).tensors)
    return [*found.notices, f"starting from the weights of {found.path}", *notices]


def foreseen(config: Config) -> list[str]:
    """What a fresh run would start from, for people; nothing is read but the names of checkpoints."""
    if config.init_from is None:
        return []
    names = Store(RunFolder(Path(config.init_from)).checkpoints).names()
    newest = f"{names[-1]} of {config.init_from}" if names else f"{config.init_from}, which has no checkpoint yet"
    return [f"a new run starts from the weights of {newest} (init_from)"]


def record(
    config: Config, folder: RunFolder, beginning: Beginning, global_batch_size: int, parameters: Mapping[str, int]
) -> None:
    """Writes the resolved recipe and the environment, and cuts numbers that are newer than the checkpoint."""
    training = config.training.model_copy(update={"global_batch_size": global_batch_size})
    # A recorded `resume_from_checkpoint` would go back again at every start.
    resolved = config.model_copy(update={"training": training, "resume_from_checkpoint": "latest"})
    write_bytes_atomically(folder.config, configs.dump(resolved).encode())
    write_json_atomically(folder.environment, {**environment(), "parameters": parameters})
    cut_after(folder.metrics, -1 if beginning.step is None else beginning.step)
