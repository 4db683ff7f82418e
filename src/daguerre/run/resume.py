"""The start point of a run: fresh, from weights of elsewhere (init_from, ema.path), or where it was stopped.

Training itself is run/trainer.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from daguerre.adapters.adapter import Attached
from daguerre.assembly import first_weights as first
from daguerre.assembly.batch_sizes import BatchSizes, shared_out
from daguerre.checkpoint import manifest
from daguerre.checkpoint.atomic import write_bytes_atomically, write_json_atomically
from daguerre.checkpoint.environment import environment
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.store import Found, Store
from daguerre.config import config as configs
from daguerre.config import outside
from daguerre.config.config import Change, Config, Loaded
from daguerre.data.caption_digests import CaptionDigests
from daguerre.data.loading.loader import Loading
from daguerre.data.settings import DataSettings
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.process_group import Processes
from daguerre.errors import UserError
from daguerre.formatting import shown
from daguerre.models.parts.text.names import spellings
from daguerre.models.settings import ASSISTANT
from daguerre.models.weights import files, single_files
from daguerre.objectives.objective import REFERENCE
from daguerre.regular import check_regular
from daguerre.remote import local_copy
from daguerre.run import known_faults, lengths, state_io
from daguerre.run.storage import LocalStorage, RunStorage
from daguerre.tracking.sinks import truncate_after
from daguerre.training.guard import check_finite, misfits
from daguerre.training.settings import largest_divisor
from daguerre.training.state import TrainState

_BATCH = "training.global_batch_size"
_RECORDED = (_BATCH, "lr_scheduler.stages")
"""Settings that a run decides once: a command that leaves them out means those of the run."""
_OF_WEIGHTS = ("model", "adapters", "adapter", "objective.adversarial")
"""Settings by which a run has the networks and the trained weights that it has."""
_NEWEST = ("latest", "never")
"""resume_from_checkpoint: `never` is refused if there is a run, so that a fresh one is all that it finds."""
_CAPTIONS = ("data", "data.sources")
"""Of allow_change: these let captions differ, and each path that has `captions`."""
_NAMED = 5
"""Changed captions that a message names."""
_DOCUMENTS = ("state", "pace", "loading", "base", "config", "code")


@dataclass(frozen=True)
class StartPoint:
    """The content of a run's folder to go on from."""

    checkpoint: Path | None
    """Verified; None for a fresh run."""
    documents: Mapping[str, Any]
    """Documents of the checkpoint by name: `_DOCUMENTS`."""
    global_batch_size: int | None
    """The global batch of the run's first start, which holds for good; None for a fresh run."""
    notices: list[str]
    schedule: Mapping[str, Any] | None = None
    """`duration` and `lr_scheduler` of the run's last start; None for a fresh run."""
    lengths: Mapping[str, str] = field(default_factory=dict)
    """Lengths of the run by their places (`lengths.py`); {} for a fresh run."""
    data: Mapping[str, Any] | None = None
    """The data that the run has gone on with, as JSON, where they are others than the checkpoint's: it was killed
    before it saved."""

    @property
    def step(self) -> int | None:
        """Updates that the checkpoint has done; None for a fresh run."""
        return None if self.checkpoint is None else int(self.documents["state"]["step"])


def find_start(loaded: Loaded, folder: RunFolder, store: ShardedStore, processes: Processes) -> StartPoint:
    """The start point of a run. UserError shows the differences if the folder belongs to another recipe.

    Call it on all ranks while rank 0 holds the folder.
    """
    # By rank 0 alone, which holds the folder: another machine may not see it, or see it as it was a moment ago.
    known = processes.agreement.run_on_rank0(lambda: _recorded(_without_shipped_batch(loaded), folder))
    name = loaded.config.resume_from_checkpoint
    return _start(store.recover() if name in _NEWEST else store.rewind(name), known)


def foresee_start(loaded: Loaded, storage: RunStorage) -> StartPoint:
    """Finds what `find_start` would, with its UserErrors; changes nothing. A run in an object store counts as fresh."""
    if not isinstance(storage, LocalStorage):
        return StartPoint(None, {}, None, [])
    storage.check_not_held()
    known = _recorded(_without_shipped_batch(loaded), storage.folder)
    store, name = Store(storage.folder.checkpoints), loaded.config.resume_from_checkpoint
    if name in _NEWEST:
        return _start(store.newest_verified(), known)
    if name not in store.names():
        raise UserError(
            f"there is no checkpoint {name!r} in {store.root}; there are: {', '.join(store.names()) or 'none'}",
            code="unknown",
            setting="resume_from_checkpoint",
        )
    # As `train` would: a damaged checkpoint is refused in the dry run already.
    store.read_all(store.root / name)
    return _start(Found(store.root / name, []), known)


def _start(found: Found, known: Mapping[str, Any]) -> StartPoint:
    documents = {}
    if found.path is not None:
        with opened(found.path) as reader:
            # Checkpoints of older versions have fewer.
            documents = {name: reader.document(name) for name in _DOCUMENTS if reader.has(name)}
    notices = [*found.notices, *known_faults.notices(documents), *known["allowed"]]
    data = known["data"] if _other_data(documents, known["data"]) else None
    batch, schedule = known["global_batch_size"], known["schedule"]
    return StartPoint(found.path, documents, batch, notices, schedule, known["lengths"], data)


def _other_data(documents: Mapping[str, Any], data: Mapping[str, Any] | None) -> bool:
    """True if the data of a run are others than those that its checkpoint was trained on."""
    if data is None or "config" not in documents:
        return False
    try:
        return DataSettings.model_validate(documents["config"]["data"]).model_dump(mode="json") != data
    except ValidationError:  # of another version: what the run has recorded since cannot be told from a new name
        return False


def foreseen_sizes(loaded: Loaded, storage: RunStorage, mesh: Mesh) -> BatchSizes | None:
    """Batch sizes of a run before it starts or goes on; nothing is written. None for a run in an object store, which is
    not read. UserError for a mesh that it cannot be trained on."""
    if not isinstance(storage, LocalStorage):
        return None
    recorded = None
    if storage.folder.config.exists():
        chosen = _without_shipped_batch(loaded).training.global_batch_size  # another one is refused, or allowed, later
        recorded = chosen or configs.load(str(storage.folder.path)).config.training.global_batch_size
    return shared_out(loaded, mesh, recorded)


def _without_shipped_batch(loaded: Loaded) -> Config:
    """The config without a shipped recipe's global batch, which gives way to the one that a run was begun with."""
    if _BATCH in loaded.chosen:
        return loaded.config
    training = loaded.config.training.model_copy(update={"global_batch_size": None})
    return loaded.config.model_copy(update={"training": training})


def _recorded(config: Config, folder: RunFolder) -> dict[str, Any]:
    """The settings that a run was begun with; `allowed` are lines about differences that are allowed."""
    if not folder.config.exists():
        return {"global_batch_size": None, "allowed": [], "schedule": None, "lengths": {}, "data": None}
    if config.resume_from_checkpoint == "never":
        raise UserError(
            f"{local_copy.display_name(folder.path)} holds a run already, and resume_from_checkpoint=never: give "
            "this run another run_name, or remove resume_from_checkpoint to continue that run",
            code="conflict",
            setting="run_name",
        )
    loaded = configs.load(str(folder.path))
    old = loaded.config.model_copy(update={"plugins": loaded.recorded or {}})
    known = lengths.recorded(old)
    # Compared with the run's own lengths: a data set that grew is no other recipe.
    allowed = check_same_recipe(old, lengths.fixed(config, known, None, 1)[0], folder)
    whole = old.training.global_batch_size
    if any(change.path == _BATCH for change in allowed):
        whole = config.training.global_batch_size
    schedule = {"duration": old.training.duration, "lr_scheduler": old.lr_scheduler.model_dump(mode="json")}
    moved = _moved(config, allowed)
    lines = [
        f"{_difference(change)}; its weights must be those that the run was begun with"
        if change in moved
        else f"allow_change: {_difference(change)}"
        for change in allowed
    ]
    data = old.data.model_dump(mode="json")
    return {"global_batch_size": whole, "allowed": lines, "schedule": schedule, "lengths": known, "data": data}


def check_same_recipe(old: Config, new: Config, folder: RunFolder) -> list[Change]:
    """UserError if the recipe differs from the run's in what is learnt; returns changes that `allow_change` names."""
    changes = [change for change in configs.diff(old, new) if change.resume == "identity"]
    # Left out, these are the recorded ones.
    changes = [change for change in changes if change.new or change.path not in _RECORDED]
    changes += [
        Change(f"plugins.{kind}.{name}.digest", before, now, "identity")
        for (kind, name), before, now in outside.other_code(old.plugins, new)
    ]
    moved = _moved(new, changes)
    # A base in another place needs no permission: its digest decides later.
    named_ones = [change for change in changes if change in moved or _within(change, new.allow_change)]
    never = {
        change.path: why for change in changes if (why := _never(change, old) or _other_networks(change, old, new))
    }
    allowed = [change for change in named_ones if change.path not in never]
    changes = [change for change in changes if change not in allowed]
    if not changes:
        return allowed
    place = local_copy.display_name(folder.path)
    raise UserError(
        f"{place} has a run with other settings:\n"
        + "\n".join(f"  {_difference(change)}" for change in changes)
        + "\nChoose another run_name for a new run, repeat the original command to continue this one, or start a new "
        f"run from its weights with another run_name and init_from={place}. {_way_on(changes, list(never.values()))}",
        code="changed",
        setting=changes[0].path if len(changes) == 1 else None,
    )


def _moved(new: Config, changes: list[Change]) -> list[Change]:
    """Other places of a base that a run leaves as it is: a checkpoint has the digests of its weights, by which another
    base is refused (`base_digests.check_same_base`). Of weights that are trained whole it has none."""
    if any(own.part == "all" and not own.separate for own in new.adapters.values()):
        return []
    names = {*new.model.places, "pretrained_model_name_or_path", "revision", "variant", ASSISTANT}
    paths = {f"model.{name}" for name in names}
    return [
        change
        for change in changes
        if change.path in paths and all(isinstance(each, str | None) for each in (change.old, change.new))
    ]


def _within(change: Change, names: Collection[str]) -> bool:
    return any(change.path == name or change.path.startswith(f"{name}.") for name in names)


def _never(change: Change, old: Config) -> str:
    """The reason for which a run cannot go on with another value at all; "" for most settings."""
    if change.path in ("init_from", "ema.path"):
        return f"{change.path} says what a run starts from, and this one has started"
    if change.path == "ema.post_hoc" and change.new and not {*change.new} <= {*(change.old or [])}:
        return "an average of ema.post_hoc is over the whole run, so none can begin midway (widths may be left out)"
    section, name, setting, *_ = [*change.path.split("."), "", ""]
    if section == "adapters" and (name not in old.adapters or setting in {"name", *old.adapters[name].of_weights}):
        return f"checkpoints have the weights of {section}.{name} as the run was begun with it"
    return ""


def _other_networks(change: Change, old: Config, new: Config) -> str:
    """The reason for which a run cannot go on with another loss; "" for all other changes."""
    before, now = (
        {*own.networks, *([REFERENCE] if own.refers else [])} for own in (old.objective, new.objective)
    )  # fmt: skip
    others = (before ^ now) - (before & {REFERENCE})  # what is no longer compared with is of no account
    if not others or not change.path.startswith("objective."):
        return ""
    return f"its loss has other networks ({', '.join(sorted(others))}), and checkpoints stand on those that it had"


def _way_on(changes: Sequence[Change], never: Sequence[str]) -> str:
    """The settings to allow, where a run can go on with the changed values; else what is in the way."""
    if never:
        return f"It cannot be continued so: {'; '.join(dict.fromkeys(never))}."
    paths = [change.path for change in changes]
    way = f"allow_change='[{', '.join(paths)}]'"
    if any(_within(change, _OF_WEIGHTS) for change in changes):
        return (
            f"Where all weights stay as they are (files in another place, another dropout), {way} continues with the "
            "changed settings from here on; other networks, or other parts of them to train, are another run's"
        )
    return f"To continue with the changed settings from here on: {way}"


def _difference(change: Change) -> str:
    return f"{change.path}: the run has {shown(change.old)}, this command has {shown(change.new)}"


def first_weights(attached: Attached, start: StartPoint, config: Config, refers: bool = False) -> list[str]:
    """Puts the weights of `init_from` into the net of a fresh run, before it is split; also of one that goes on, where
    its loss `refers` to them. Returns notices."""
    # A checkpoint has the trained weights already; only a loss that compares with the first ones needs these again.
    return first.take(attached, config.init_from) if start.checkpoint is None or refers else []


def first_averages(attached: Attached, start: StartPoint, config: Config) -> dict[str, Tensor] | None:
    """Whole weights of `ema.path` for the averages of a fresh run, if the recipe names some; the net is whole."""
    if start.checkpoint is not None or config.ema.path is None:
        return None
    return read_averages(local_copy.located(config.ema.path), attached.net, attached.names)


def restore(state: TrainState, start: StartPoint, config: Config, averages: Mapping[str, Tensor] | None) -> list[str]:
    """Puts the checkpoint into the state, or `averages` into that of a fresh run. Returns notices."""
    if start.checkpoint is not None:
        return [f"continuing from {start.checkpoint.name}", *state_io.restore(state, start.checkpoint, config)]
    if averages is None:
        return []
    state.start_averages(averages)
    return [f"the averages start from the weights of {config.ema.path}"]


def restore_loading(loading: Loading, start: StartPoint, config: Config) -> None:
    """Restores the position in the data and the skipped samples. UserError if the data are not those of the run."""
    if start.checkpoint is None:
        loading.skips.begin()
        return
    allowed = any(path.partition(".")[0] == "data" for path in config.allow_change)
    # What was allowed once holds, though no checkpoint has it yet: the recipe is recorded after the first update.
    may_differ = allowed or start.data == config.data.model_dump(mode="json")
    loading.restore(start.documents["loading"], may_differ)


def restore_captions(
    captions: CaptionDigests, start: StartPoint, config: Config, folder: RunFolder
) -> tuple[list[dict[str, Any]], list[str]]:
    """The digests of the captions that a run trains on, each with the update from which it holds, and notices; on
    rank 0. UserError if they are not those of the run, with the names of samples whose captions have changed."""
    step = start.step or 0
    now = [{"from_step": step, "digest": captions.whole}] if captions.whole else []
    if start.checkpoint is None:
        return now, []
    document = start.documents["loading"]
    if "captions" not in document:
        return now, ["this run was begun by a version that kept no digest of captions: they are taken as they are now"]
    before = document["captions"]
    if [each["digest"] for each in before[-1:]] == [each["digest"] for each in now]:
        return before, []
    if document["samples"] != captions.dataset.fingerprint:  # `restore_loading` refuses that where it is not allowed
        return [*before, *now], [f"captions of the changed data set hold from update {step:,} on"]
    changed = captions.changed(folder.captions, before[-1]["digest"]) if before else None
    text = _changed_captions(captions, changed)
    if not any(path in _CAPTIONS or "captions" in path.split(".") for path in config.allow_change):
        raise UserError(
            f"the captions of the data set have changed since this run was started: {text}. Restore them to continue "
            "this run exactly; or go on with the new ones from here: allow_change='[data.captions]'; or start a new "
            "run from these weights with init_from=RUN run_name=NEW",
            code="changed",
        )
    return [*before, *now], [f"allow_change: other captions from update {step:,} on: {text}"]


def _changed_captions(captions: CaptionDigests, changed: list[int] | None) -> str:
    if changed is None:
        return "which ones is not known, as the run's folder has no digests of each"
    names = captions.names(changed[:_NAMED])
    more = f" and {len(changed) - len(names):,} more" if len(changed) > len(names) else ""
    return f"{', '.join(names)}{more}"


def describe_start(config: Config, start: StartPoint) -> list[str]:
    """Lines about the weights that a run would start from; nothing is read but the names of checkpoints."""
    if start.checkpoint is not None:
        return [f"the run continues from {start.checkpoint.name}"]
    if config.init_from is None:
        return []
    if Path(config.init_from).expanduser().is_file():
        return [f"a new run starts from {config.init_from} (init_from)"]
    names = local_copy.names(config.init_from) or Store(RunFolder(Path(config.init_from)).checkpoints).names()
    newest = f"{names[-1]} of {config.init_from}" if names else f"{config.init_from}, which has no checkpoint yet"
    return [f"a new run starts from the weights of {newest} (init_from)"]


def record(config: Config, folder: RunFolder, start: StartPoint, sizes: BatchSizes, about: Mapping[str, Any]) -> None:
    """Writes the recipe of a new run, and the environment with what else there is to tell `about` the run, and cuts
    metrics that are newer than the checkpoint."""
    if start.checkpoint is None:
        record_recipe(config, folder, sizes)
    # At every start: a run may go on with another version, on another machine.
    write_json_atomically(folder.environment, {**environment(), **about})
    # Lines after the checkpoint are of updates that will be made again.
    truncate_after(folder.metrics, -1 if start.step is None else start.step)


def record_recipe(config: Config, folder: RunFolder, sizes: BatchSizes) -> None:
    """Writes the resolved recipe: of a run that goes on after its first update, so that a change that does not work
    leaves the recipe of before."""
    batch = {"global_batch_size": sizes.whole}
    # A divisor of the global batch: recorded otherwise, the folder's own recipe would be refused.
    if micro := config.training.per_device_batch_size:
        batch["per_device_batch_size"] = largest_divisor(sizes.whole, micro)
    training = config.training.model_copy(update=batch)
    # Recorded, they would go back, and allow and do the same, at every start from this folder.
    schedule = config.lr_scheduler.model_copy(update={"on_new_duration": "refuse", "restart_from": None})
    of_this_start = {"resume_from_checkpoint": "latest", "allow_change": [], "lr_scheduler": schedule}
    resolved = config.model_copy(update={"training": training, **of_this_start})
    write_bytes_atomically(folder.config, configs.dump(resolved).encode())


def read_averages(path: Path, net: nn.Module, saved: Collection[str] | None = None) -> dict[str, Tensor]:
    """Weights of `ema.path` for every trained parameter of `net`, by its name: a run's averages if it has them, else
    weights. `saved` are the names that a checkpoint holds, by default all of the net.

    UserError if there is nothing to read; it lists names that are missing or unknown, and other shapes.
    """
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    known = set(net.state_dict() if saved is None else saved)
    tensors = {_own_name(name, known): tensor for name, tensor in _tensors(path.expanduser(), known)}
    # Frozen weights may be there as well, and buffers of old versions of transformers.
    spare = {name for name in tensors.keys() - trained.keys() if name in known or name.endswith(".position_ids")}
    if problems := misfits(trained, {name: tensor for name, tensor in tensors.items() if name not in spare}):
        raise UserError(
            f"ema.path={path}: these weights do not match the trained networks: {problems}",
            code="conflict",
            setting="ema.path",
        )
    check_finite(f"ema.path={path}: the weights", {name: tensors[name] for name in trained})
    return {name: tensors[name] for name in trained}


def _tensors(path: Path, known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a place, each with its component before its name."""
    local_copy.fetch(path)
    components = sorted({name.partition(".")[0] for name in known})
    if path.is_file():
        yield from _of_file(path, components, known)
    elif (path / "checkpoints").is_dir():
        found = Store(RunFolder(path).checkpoints).newest_verified()
        if found.path is None:
            raise UserError(
                f"ema.path={path}: this run has no checkpoint that can be read", code="missing", setting="ema.path"
            )
        yield from _of_checkpoint(found.path)
    # From a run down to a single file: a run also has a pipeline's folders, and a checkpoint holds safetensors files.
    elif (path / manifest.NAME).is_file():
        yield from _of_checkpoint(path)
    elif any((path / component).is_dir() for component in components):
        for component in components:
            if (path / component).is_dir():
                yield from _prefixed(component, files.read(path / component))
    elif path.is_dir():
        tensors = files.read(path)
        own = path.name if path.name in components else _meant(tensors, components, known)
        yield from _prefixed(own or path.name, tensors)
    else:
        raise UserError(
            f"ema.path={path}: nothing found there; give a run folder, one of its checkpoints, a folder in "
            "diffusers' layout or a .safetensors file",
            code="missing",
            setting="ema.path",
        )


def _of_checkpoint(path: Path) -> Iterator[tuple[str, Tensor]]:
    store = Store(path.parent)
    # Moments are twice as large as these and of no use here.
    wanted = ("model", "ema") if "ema" in store.groups(path) else ("model",)
    groups = store.load(path, wanted).tensors
    yield from groups["model"].items()
    yield from groups.get("ema", {}).items()  # later, so that they count


def _of_file(path: Path, components: list[str], known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the net's names, in those of one component, or of a whole checkpoint in the original layout."""
    try:
        check_regular(path)
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"ema.path={path} cannot be read as safetensors: {error}", code="damaged", setting="ema.path"
        ) from error
    if any(name in known for name in tensors):
        yield from tensors.items()
    elif (component := _meant(tensors, components, known)) is not None:
        yield from _prefixed(component, tensors)
    else:
        for component in components:
            names = [name.removeprefix(f"{component}.") for name in known if name.startswith(f"{component}.")]
            tensors = single_files.reader().network_tensors(path, component, names, pickled=False)
            yield from _prefixed(component, tensors)


def _prefixed(component: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((f"{component}.{name}", tensor) for name, tensor in tensors.items())


def _meant(tensors: Mapping[str, Tensor], components: list[str], known: set[str]) -> str | None:
    """The component that has most of these names; None if none has any."""
    shared = {part: sum(_own_name(f"{part}.{name}", known) in known for name in tensors) for part in components}
    best = max(shared, key=lambda part: shared[part])
    return best if shared[best] else None


def _own_name(name: str, known: set[str]) -> str:
    """The net's name of a parameter that a text encoder's file may call by another."""
    component, _, rest = name.partition(".")
    return next((own for spelt in spellings(rest) if (own := f"{component}.{spelt}") in known), name)
