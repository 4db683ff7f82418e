"""The cache of a run: filled by all its processes before training, and in place of its sources from then on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from daguerre.assembly import left_out, swapped
from daguerre.assembly.parts import Components, build, load
from daguerre.caching import cache, fill, mend
from daguerre.caching.cache import Wanted
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Config, Loaded
from daguerre.data.cached.rows import Lost, Rows
from daguerre.data.cached.source import text_key
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading.collate import stacked, tensor_of
from daguerre.distributed.launch import environment
from daguerre.distributed.process_group import Processes
from daguerre.models import encoders
from daguerre.models.family import Family, cached
from daguerre.run import reconstruction
from daguerre.run.distribute import process_group
from daguerre.run.storage import RunStorage
from daguerre.types import OF_TEXTS, Cond

Wrap = Callable[[Dataset], Dataset]
NO_CACHE: Mapping[str, Any] = MappingProxyType({})


class Cached(NamedTuple):
    """The way in which a run reads its data, with a cache or without."""

    wrap: Wrap = lambda data: data
    """Puts cached features in place of what a data set reads."""
    notices: tuple[str, ...] = ()
    about: Mapping[str, Any] = NO_CACHE
    """Facts for environment.json: `cache`, its place and the folder of each half that is read; {} without a cache."""
    encoded: int = 0
    """Rows that this process made for it."""


def filled(config: Config, parts: Components, dataset: Dataset, held_out: Dataset, processes: Processes) -> Cached:
    """Fills the cache that a recipe names, if it does. All ranks call this."""
    opened = cache.opened(config, parts)
    if opened is None:
        return Cached()
    unused = [name for name in encoders.absent(parts.family) if name not in opened.components]
    # What was left out on the chance of a cache, and is not in it after all, is needed in every update.
    encoders.restored(parts.family, unused)
    if not opened.halves:
        return Cached(notices=opened.notices)
    filling = _filling(opened, config, parts, dataset, processes)
    found = _fill(filling, cache.wanted(config, dataset, held_out), processes)
    if parts.objective.needs.null and (texts := opened.rows("texts")) is not None:
        parts.null.rows = _null_caption(texts, parts.family, parts.objective.needs.null_caption)
    mender = mend.Mender(filling, processes.watch.doing)
    halves = " and ".join(opened.halves)
    about = {"cache": {"place": opened.name, **{name: half.folder for name, half in opened.halves.items()}}}
    notices = (*opened.notices, f"cache of {halves}: {opened.name}")
    return Cached(lambda data: found.of(data, parts.images, mender, parts.columns), notices, about, found.encoded)


def _null_caption(texts: Rows, family: Family, text: str) -> Cond:
    """The conditioning [1, ...] of the empty caption, of which every cache has a row: the encoders stay out of memory,
    unless that row is damaged, or another text takes its place."""
    try:
        row = {OF_TEXTS + name: array for name, array in texts.read(text_key(text)).items()}
    except Lost:
        with encoders.present(family):
            return family.encode_null(text)
    tensors = {name: tensor_of(array).to(family.device) for name, array in stacked([row], row).items()}
    return cached(tensors, OF_TEXTS)


def _filling(
    opened: cache.Cache, config: Config, parts: Components, dataset: Dataset, processes: Processes
) -> fill.Filling:
    def say(text: str) -> None:
        # Flushed: under a launcher this is a pipe, which would show nothing for minutes.
        print(text, flush=True)

    world = processes.world
    return fill.Filling(opened, config, parts, dataset.members, say, world.rank, world.size)


def _fill(filling: fill.Filling, each: Sequence[Wanted], processes: Processes) -> fill.Filled:
    with processes.watch.doing("caching"):
        # The meeting at the end: a rank that is done must not train on rows that another one has not written yet.
        return fill.filled(filling, each, lambda: processes.agreement.gather(None))


class Opened(NamedTuple):
    """The cache of a run."""

    filling: fill.Filling
    each: list[Wanted]
    """The samples that the run reads."""
    processes: Processes
    dataset: Dataset


@contextmanager
def opened(loaded: Loaded, storage: RunStorage, anew: bool = False) -> Iterator[Opened]:
    """The cache of a recipe without a run, with all processes that were launched. UserError without a cache."""
    open_number = loaded.config.training.swap_blocks == swapped.AUTO
    config = swapped.fixed(loaded.config, 0) if open_number else loaded.config  # no denoiser computes here
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(launched=environment.read().launcher != "none"))
        processes = stack.enter_context(process_group(config, storage, stop))
        # A ControlNet copies weights of the denoiser, and new tokens are put into text encoders.
        whole = all(own.name in ("full", "lora") for own in config.adapters.values())
        leave_out = config.model.networks() if whole else left_out.components(config)
        parts = build(config, processes.device, networks=load(config, leave_out, defers=True))
        dataset, held_out = open_datasets(config.data, ["train", "held_out"], parts.images, parts.columns)
        found = cache.opened(config, parts, anew)
        if found is None or not found.halves:
            raise cache.nothing(found.notices if found else ["it is not set: give a folder, or cache.path=auto"])
        for line in (*loaded.notices, *found.notices):
            if processes.leads:
                print(line, flush=True)
        filling = _filling(found, config, parts, dataset, processes)
        filling.again, filling.examines = anew, True
        yield Opened(filling, cache.wanted(config, dataset, held_out), processes, dataset)


def fill_alone(loaded: Loaded, storage: RunStorage, again: bool = False) -> int:
    """Fills the cache of a recipe and ends; the exit code. For all processes."""
    with opened(loaded, storage, again) as (filling, each, processes, dataset):
        found = _fill(filling, each, processes)
        made = sum(processes.agreement.gather(found.encoded))
        if processes.leads:
            poor = reconstruction.notices(filling.config, filling.parts, dataset, found.encoded)
            print(*poor, sep="\n", end="\n" if poor else "", flush=True)
            what = f"{made:,} rows were encoded" if made else "nothing was missing"
            print(f"{filling.cache.name}: complete; {what}. Train with cache.path={filling.cache.name}", flush=True)
    return 0
