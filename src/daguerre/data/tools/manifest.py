"""dataset.json next to packed shards: their origin, the samples left out, and the finished shards."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import xxhash

from daguerre import __version__, documents
from daguerre.checkpoint.atomic import to_json, write_bytes_atomically
from daguerre.data import skipped
from daguerre.data.index.cache import SUFFIX
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.tools.pack import Packed
from daguerre.errors import UserError
from daguerre.storage import io as storage_io
from daguerre.storage.location import WEB, Location

NAME = "dataset.json"
NOT_OURS = "dataset.json that another program wrote: shards are not compared with it"
DAMAGED = "damaged dataset.json: which shards there should be is not known"
ABSENT = "shard that is listed in dataset.json but does not exist"
WITHOUT_SHARD = "index of a shard that does not exist"
UNFINISHED = "unfinished packing: run the same command (`data pack` or `generate`) to continue it"
_MADE_BY, _DIGEST = "daguerre", "digest"
_KEYS = {"fingerprint", "complete", "shards"}
_SAVE_SECONDS = 2.0


class Listing:
    """The contents of dataset.json; written now and then, and at the end."""

    def __init__(self, to: str, about: dict[str, Any], number: int) -> None:
        self.to = to
        self.about = about
        self.number = number
        self.done: dict[str, Packed] = {}
        self._saved_at = 0.0

    def take_over(self) -> None:
        """Reads the shards that an earlier start finished. UserError if the folder holds anything else."""
        there = _read(self.to)
        if there is None:
            _check_no_others(self.to)
            self.save(complete=False)  # from now on its shards are known as ours
            return
        if there.get("fingerprint") != self.about["fingerprint"]:
            raise UserError(
                f"{self.to} holds shards of other data, or with other filters or sizes ({there.get('samples', 0):,} "
                f"samples according to its {NAME}). Choose another folder, or delete this one",
                code="conflict",
            )
        self.done = {entry["name"]: Packed(**entry) for entry in there["shards"]}

    def add(self, packed: Packed) -> None:
        self.done[packed.name] = packed
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self.save(complete=False)

    def save(self, complete: bool) -> None:
        """Writes the file atomically."""
        path, content = f"{self.to}/{NAME}", to_json(self.document(complete))
        if "://" in path:
            storage_io.write(path, content)
        else:
            write_bytes_atomically(Path(path), content)
        self._saved_at = time.monotonic()

    def document(self, complete: bool) -> dict[str, Any]:
        shards = [self.done[name] for name in sorted(self.done)]
        counts = {"samples": sum(s.samples for s in shards), "bytes": sum(s.bytes for s in shards)}
        return signed(
            {
                "made_by": f"{_MADE_BY} {__version__}",
                "complete": complete,
                **counts,
                **{key: value for key, value in self.about.items() if key != "left_out"},
                "left_out": self.left_out(),
                "shards": [asdict(shard) for shard in shards],
            }
        )

    def left_out(self) -> SkipReport:
        """Left out by the source, the filters and while packing."""
        return skipped.merged(self.about["left_out"], *(packed.left_out for packed in self.done.values()))


def signed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a digest of all else in it."""
    content = {key: value for key, value in document.items() if key != _DIGEST}
    return {**content, _DIGEST: xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())}


def _read(folder: str) -> dict[str, Any] | None:
    """The dataset.json of a folder; None without one. UserError if `data pack` did not write it, or it is
    damaged."""
    location = Location(f"{folder}/{NAME}")
    try:
        document = documents.parse(storage_io.read(location, 0, storage_io.size(location).bytes, twice=True))
    except FileNotFoundError:
        return None
    except ValueError:
        document = None
    if isinstance(document, dict) and not _is_ours(document):
        what = f"{location.name} was not written by `data pack`: choose another folder, or delete it"
        raise UserError(what, code="conflict")
    if not isinstance(document, dict) or not _is_whole(document):
        what = f"{location.name} is damaged: choose another folder, or delete it and all shards, and pack again"
        raise UserError(what, code="damaged")
    return document


def _is_ours(document: Mapping[str, Any]) -> bool:
    return bool(_KEYS & document.keys()) or str(document.get("made_by", "")).startswith(_MADE_BY)


def _is_whole(document: Mapping[str, Any]) -> bool:
    """False where it is not what was written; of one without a digest (versions before 0.2), where its form is not."""
    if _DIGEST in document:
        return bool(signed(document) == document)
    shards = document.get("shards")
    names = {each.name for each in fields(Packed)}
    if not document.keys() >= _KEYS or not isinstance(shards, list):
        return False
    return all(
        isinstance(one, dict) and {"name", "digest", "samples", "bytes"} <= one.keys() <= names
        and isinstance(one["name"], str) and os.path.basename(one["name"]) == one["name"]
        for one in shards
    )  # fmt: skip


def shards_in_folder(locations: Sequence[Location]) -> tuple[dict[str, str], SkipReport]:
    """The digests {url: xxh3_128 hex} in the dataset.json next to shards, and the shards in it that are missing."""
    digests: dict[str, str] = {}
    missing: skipped.Counts = {}
    asked = {location.url for location in locations}
    for folder in dict.fromkeys(
        location.url.rpartition("/")[0] for location in locations if location.scheme not in WEB
    ):
        try:
            document = _read(folder)
        except UserError as error:
            damaged = error.code == "damaged"
            skipped.add(missing, DAMAGED if damaged else NOT_OURS, Location(f"{folder}/{NAME}").name, kept=not damaged)
            document = None
        for name in _without_shard(folder):
            skipped.add(missing, WITHOUT_SHARD, name)
        if document is None:
            continue
        listed = {f"{folder}/{entry['name']}": entry["digest"] for entry in document["shards"]}
        digests |= listed
        if not document["complete"]:
            skipped.add(missing, UNFINISHED, folder)
        for url in sorted(listed.keys() - asked):
            if not storage_io.exists(Location(url)):
                skipped.add(missing, ABSENT, Location(url).name)
    return digests, missing


def _without_shard(folder: str) -> list[str]:
    """Indexes in a folder of this machine that lie next to no shard: somebody took that away."""
    if (local := Location(folder).local) is None:
        return []
    found = sorted(local.glob(f"*.tar{SUFFIX}"))
    return [str(path) for path in found if not path.with_name(path.name.removesuffix(SUFFIX)).exists()]


def _check_no_others(to: str) -> None:
    """UserError if there are tar files without a dataset.json."""
    if "://" in to:
        names = [location.name for location in storage_io.listing(f"{to}/")]
    else:
        names = [entry.name for entry in os.scandir(to)]
    strange = sorted(name for name in names if name.endswith(".tar"))
    if strange:
        raise UserError(
            f"{to} holds tar files already, such as {os.path.basename(strange[0])}, and no {NAME} of `data pack` "
            "that lists them: choose another folder",
            code="conflict",
        )


def given(settings: SourceSettings) -> dict[str, Any]:
    """The settings of a source that were given, and its kind."""
    return {"source": settings.source, **settings.model_dump(mode="json", exclude_unset=True)}
