"""Encode images and captions once, for training.

usage: daguerre cache RECIPE [key=value ...]
       daguerre cache verify|list|purge RECIPE [key=value ...]

Encodes the images and captions of a recipe's data and keeps the results, so that training reads them and needs no
autoencoder and no text encoder (docs/cache.md). Only what is not there yet is encoded: run it again after a kill, or
when images or captions were added or changed. `daguerre train RECIPE cache.path=PATH` does the same before it trains.

  daguerre cache sdxl data.source=folder data.path=my_images cache.path=my_cache
  daguerre train sdxl data.source=folder data.path=my_images cache.path=my_cache run_name=cached
  daguerre cache sdxl data.path=s3://bucket/shards/ data.source=webdataset cache.path=s3://bucket/cache
  daguerre cache verify sdxl ... cache.path=my_cache rows=20
  daguerre cache purge sdxl ... cache.path=my_cache

verify   reads and encodes random samples and captions again (rows=8 of each), and compares
list     shows what is in the cache, and how much of it the recipe reads
purge    removes all that the recipe does not read

  cache.path=PATH        the cache: a folder, s3:// or gs://; auto (the default here) is one in data.cache_dir
  cache.dtype=float32    all as the encoders make it; auto keeps log variances and texts in float16
  again=true             read every image again, also where size and time of change are the same
"""

from collections.abc import Sequence

from daguerre import errors
from daguerre.caching import fill, upkeep
from daguerre.config import config as configs
from daguerre.config.config import Loaded
from daguerre.config.overrides import pair, split
from daguerre.errors import UserError
from daguerre.formatting import counted, format_size
from daguerre.run import cached, storage

_VERBS = ("verify", "list", "purge")


def run(arguments: list[str]) -> int:
    """The exit code; see `daguerre --help` for the codes."""
    verb, rest = (arguments[0], arguments[1:]) if arguments[:1] and arguments[0] in _VERBS else ("", arguments)
    given = split(rest)
    own, wanted = _own(given.overrides, {"verify": ("rows",), "": ("again",)}.get(verb, ()))
    loaded = configs.load(given.recipe, wanted)
    if loaded.config.cache.path is None:
        loaded = configs.load(given.recipe, [*wanted, "cache.path=auto"])
    place = storage.of(loaded.config.output_dir, loaded.config.run_name)
    if not verb:
        return cached.fill_alone(loaded, place, own.get("again", "false").lower() == "true")
    return {"verify": _verify, "list": _list, "purge": _purge}[verb](loaded, place, own)


def _own(given: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """This verb's own options, and the settings of the recipe."""
    pairs = [(pair(each), each) for each in given]
    return {key: value for (key, value), _ in pairs if key in names}, [
        each for (key, _), each in pairs if key not in names
    ]


def _verify(loaded: Loaded, place: storage.RunStorage, own: dict[str, str]) -> int:
    count = own.get("rows", "8")
    if not count.isdecimal() or not int(count):
        raise UserError(f"rows={count}: give a number of rows from 1, such as rows=20", setting="rows")
    with cached.opened(loaded, place) as (filling, each, *_):
        known = filling.noted(each)
        found = upkeep.verify(filling, each, known, int(count), loaded.config.seed)
    lacking = len({(one.member, one.number) for one in each} - known.keys())
    if lacking:
        print(f"samples that are not in the cache, or changed since: {lacking:,}; `daguerre cache` encodes them")
    if found.rows:
        print(
            f"encoded {found.rows:,} rows again: {found.equal:,} are equal to the bit, the largest difference is "
            f"{found.largest:.2g} of the root mean square"
        )
    for remedy, faults in found.wrong.items():
        print(*(f"  {fault}" for fault in faults), f"they are {remedy}", sep="\n")
    return errors.FAILED if found.wrong else errors.DONE


def _list(loaded: Loaded, place: storage.RunStorage, own: dict[str, str]) -> int:
    with cached.opened(loaded, place) as (filling, each, *_):
        _show(filling, upkeep.used(filling, each, filling.noted(each)))
    return errors.DONE


def _purge(loaded: Loaded, place: storage.RunStorage, own: dict[str, str]) -> int:
    with cached.opened(loaded, place) as (filling, each, *_):
        known = filling.noted(each)
        if absent := len({(one.member, one.number) for one in each} - known.keys()):
            raise UserError(
                f"{absent:,} samples of this recipe are not in {filling.cache.name}: is it the right recipe? Fill the "
                "cache first (daguerre cache RECIPE), so that nothing it reads is removed",
                code="conflict",
            )
        used = upkeep.used(filling, each, known)
        upkeep.purge(filling.cache, used, loaded.config.cache.shard_mb * 1e6)
        _show(filling, used)
    return errors.DONE


def _show(filling: fill.Filling, used: dict[str, set[bytes]]) -> None:
    found = upkeep.parts(filling.cache, used)
    print(filling.cache.name if found else f"{filling.cache.name}: nothing is cached there")
    for part in found:
        damaged = f"; {counted(part.damaged, 'damaged file')}" if part.damaged else ""
        what = upkeep.about(filling.cache, part.name)
        size = format_size(part.bytes)
        print(f"  {part.name}: {part.rows:,} rows ({size}) of {what}; the recipe reads {part.used:,}{damaged}")
