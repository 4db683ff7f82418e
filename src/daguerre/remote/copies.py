"""The runs below an address, for who looks at them: copies of their small files, brought up to date while one looks.

Texts (config, status, metrics, messages, listings of images) come as they change, each image when it is asked for, and
checkpoints and exports never: of those it is known what there is. Of a stranger's run only files with names and sizes
that a run has are brought. Nothing is written in the store.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event, Lock

from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.checkpoint.run_dir import ELSEWHERE, EXPORTS, Holder
from daguerre.errors import UserError
from daguerre.remote import errors, lock, mirror
from daguerre.remote.lock import MISSED_SECONDS
from daguerre.remote.run import working_folder
from daguerre.remote.sealed_files import Contents, SealedFiles
from daguerre.storage import io as storage_io
from daguerre.storage.bucket import Listed, Prefix
from daguerre.storage.errors import Mismatch, Missing, StoreError

EVERY_SECONDS = 2.5
"""Between two looks at the runs that train. They send their files every ten seconds."""
ALL_SECONDS = 10.0
"""Between two looks at what runs there are."""
_WHOLE_SECONDS = 60.0
"""Between two looks into all folders of a run that does not train: somebody may evaluate it."""
_UNSEEN_SECONDS = 30.0
"""So long after a page has asked last, nothing is looked at any more."""
_DEPTH = 3
_TEXTS = (".json", ".jsonl", ".yaml", ".txt")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp")
_FOLDERS = ("metrics", "samples", "evaluations", "answers")
_MOST_BYTES = 1 << 30
_MOST_FILES = 50_000
_LEAST_FREE_BYTES = 1 << 30
_OVERLAP_BYTES = 4096
_AT_ONCE = 4


@dataclass
class Far:
    """A run in the store, and what is known of it."""

    run: Prefix
    folder: Path
    files: dict[str, Listed] = field(default_factory=dict)
    """Its files that may be brought, by name."""
    tags: dict[str, str] = field(default_factory=dict)
    """Those that were brought, as they were then."""
    folders: list[str] = field(default_factory=list)
    """Those in it."""
    saves: list[str] = field(default_factory=list)
    """Names of its checkpoints, oldest first."""
    holder: Holder | None = None
    problem: str = ""
    top: list[Listed] = field(default_factory=list)
    """All that lies right below."""
    top_tags: dict[str, str] = field(default_factory=dict)
    """The same but the lock, when its files were brought last."""
    manifests: dict[str, tuple[float, Contents | None]] = field(default_factory=dict)
    lock_tag: str = ""
    lock_data: bytes = b""
    lock_seen: float = -1e9
    looked: float = -1e9
    whole: float = -1e9


@dataclass
class Copies:
    """Copies of the runs below an address. Threads may call it."""

    at: Prefix
    problem: str = field(default="", init=False)
    """The reason why the store cannot be read now; empty if it can."""
    runs: dict[Path, Far] = field(default_factory=dict, init=False)
    """By the folders of their copies."""
    _asked: float = field(default=-1e9, init=False)
    _next_all: float = field(default=-1e9, init=False)
    _looking: Lock = field(default_factory=Lock, init=False, repr=False)

    @property
    def folder(self) -> Path:
        """The folder of the copies, on this machine."""
        return working_folder(self.at, "copies").resolve()

    def check(self) -> None:
        """UserError where the store cannot be read."""
        try:
            make_folder(self.folder)
            self.at.level()
        except StoreError as error:
            raise UserError(error.explanation, code="unreachable") from error
        except OSError as error:
            raise UserError(f"{self.at.name}: {errors.unreadable(self.folder, error)}", code="resources") from error

    def asked(self) -> None:
        """Somebody looks: the copies are kept up to date for a while."""
        self._asked = time.monotonic()

    def keep(self, over: Event) -> None:
        """Keeps them up to date until `over`, while somebody looks."""
        self.asked()
        while not over.is_set():
            if time.monotonic() - self._asked < _UNSEEN_SECONDS:
                self.look()
            over.wait(EVERY_SECONDS)

    def look(self) -> None:
        """Brings what has changed; `problem` and those of the runs say what cannot be had."""
        with self._looking:
            try:
                if everything := time.monotonic() >= self._next_all:
                    self._find()
                found = [one for one in self.runs.values() if everything or one.holder is not None]
                with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copies") as threads:
                    bring = partial(_bring_up, listed=everything)
                    list(threads.map(bring, sorted(found, key=_newest, reverse=True)))
                self.problem = ""
            except StoreError as error:
                self.problem = error.explanation
            except OSError as error:
                self.problem = errors.unreadable(self.folder, error)

    def far(self, folder: Path) -> Far | None:
        """The run that a folder is the copy of."""
        return self.runs.get(folder)

    def bring(self, path: Path) -> None:
        """Brings an image that is asked for, or all of a folder. UserError where it cannot be had."""
        one = next((self.runs[above] for above in (path, *path.parents) if above in self.runs), None)
        if one is None:
            return
        name = path.relative_to(one.folder).as_posix()
        files = one.files  # another thread may put others in their place
        found = [*files.values()] if name == "." else [files[name]] if name in files else []
        wanted = [file for file in found if file.name.endswith(_IMAGES) and one.tags.get(file.name) != file.tag]
        try:
            _bring(one, wanted)
        except StoreError as error:
            raise UserError(error.explanation, code="unreachable") from error
        except OSError as error:
            raise UserError(f"{one.run.name}: {errors.unreadable(one.folder, error)}", code="resources") from error

    def _find(self) -> None:
        """Finds the runs; copies of those that are gone go. StoreError, OSError."""
        there = {one.folder: one for one in self._below(self.at, self.folder, _DEPTH)}
        for gone in (set(self.runs) or self._left()) - set(there):
            shutil.rmtree(gone, ignore_errors=True)
        for folder, one in there.items():
            known = self.runs.get(folder)
            if known is not None:
                known.top, known.folders = one.top, one.folders
        self.runs = {folder: self.runs.get(folder, one) for folder, one in there.items()}
        self._next_all = time.monotonic() + ALL_SECONDS

    def _left(self) -> set[Path]:
        """Copies that an earlier server left here."""
        names = ["/".join([*"*" * depth, "config.yaml"]) for depth in range(_DEPTH + 1)]
        return {config.parent for name in names for config in self.folder.glob(name)}

    def _below(self, place: Prefix, folder: Path, depth: int) -> Iterator[Far]:
        objects, folders = place.level()
        if any(one.name == "config.yaml" for one in objects):
            yield Far(place, folder, top=objects, folders=folders)
        elif depth:
            for name in folders:
                if _is_name(name):
                    yield from self._below(place / name, folder / name, depth - 1)

    def sealed(self, one: Far, within_seconds: float = 0.0) -> Iterator[tuple[str, Contents]]:
        """The exports and checkpoints of a run that are whole, the newest first, as their manifests have them, or had
        them not so many seconds ago. StoreError."""
        names = [name for name in EXPORTS if name in one.folders]
        for name in [*names, *(f"checkpoints/{name}" for name in reversed(one.saves))]:
            read, there = one.manifests.get(name, (-1e9, None))
            if time.monotonic() - read > within_seconds:
                there = None
                with suppress(UserError):  # damaged
                    there = SealedFiles(one.run / name).read()
                one.manifests[name] = time.monotonic(), there
            if there is not None:
                yield name, there


def _bring_up(one: Far, listed: bool) -> None:
    """Brings what has changed of a run; `listed`: it was listed just now. A fault is its `problem`, no other one's."""
    now = time.monotonic()
    try:
        if not listed:
            one.top, one.folders = one.run.level()
        _note_holder(one, now)
        tags = {file.name: file.tag for file in one.top if file.name != lock.NAME}
        if tags != one.top_tags or one.holder is not None or now - one.whole > _WHOLE_SECONDS:
            _bring_texts(one)
            one.top_tags, one.whole = tags, now
        one.looked, one.problem = now, ""
    except StoreError as error:
        one.problem = error.explanation
    except OSError as error:
        one.problem = errors.unreadable(one.folder, error)


def _note_holder(one: Far, now: float) -> None:
    """Notes who works at the run: the writer of a lock that changed while one looked, or shortly before."""
    found = next((file for file in one.top if file.name == lock.NAME), None)
    if found is None:
        one.lock_tag, one.holder = "", None
    else:
        if found.tag != one.lock_tag:
            # By this machine's clock, unless it was seen to change.
            age = max(0.0, (datetime.now(UTC) - found.changed).total_seconds())
            one.lock_seen = now if one.lock_tag and now - one.looked < MISSED_SECONDS else now - age
            with suppress(Missing):  # let go at this moment
                one.lock_data, one.lock_tag = one.run.read(lock.NAME)[0], found.tag
        one.holder = lock.living(one.lock_data) if now - one.lock_seen < MISSED_SECONDS else None
    path = one.folder / ELSEWHERE
    if one.holder is None:
        path.unlink(missing_ok=True)
    else:
        make_folder(one.folder)
        write_json_atomically(path, asdict(one.holder))


def _bring_texts(one: Far) -> None:
    within = [file for name in _FOLDERS if name in one.folders for file in one.run.listing(f"{name}/")]
    if "checkpoints" in one.folders:
        one.saves = (one.run / "checkpoints").level()[1]
    files = [file for file in (*one.top, *within) if _may_come(file)][:_MOST_FILES]
    one.files = {file.name: file for file in files}
    changed = [file for file in files if one.tags.get(file.name) != file.tag]
    for file in changed:
        if file.name.endswith(_IMAGES) and one.tags.pop(file.name, None) is not None:
            (one.folder / file.name).unlink(missing_ok=True)  # of a save that was made once more
    make_folder(one.folder)
    _bring(one, [file for file in changed if file.name.endswith(_TEXTS)])
    mirror.forget_others(one.folder, files)


def _bring(one: Far, files: list[Listed]) -> None:
    if files and shutil.disk_usage(one.folder).free - sum(file.bytes for file in files) < _LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, "too little space is left for copies of the run's files")
    whole = [file for file in files if not _appended(one, file)]
    mirror.pull(one.run, one.folder, whole)
    for file in files:
        os.utime(one.folder / file.name, (file.changed.timestamp(),) * 2)
    one.tags |= {file.name: file.tag for file in files}


def _appended(one: Far, file: Listed) -> bool:
    """Appends to a file that has only grown, so that its readers go on; False for any other, which comes whole."""
    path = one.folder / file.name
    if not file.name.endswith((".jsonl", "log.txt")) or not path.is_file() or file.name not in one.tags:
        return False
    have = path.stat().st_size
    start = max(0, have - _OVERLAP_BYTES)
    if have < _OVERLAP_BYTES or have >= file.bytes:
        return False
    try:
        data = storage_io.read(one.run.location(file.name), start, file.bytes - start, twice=True)
    except Mismatch:  # cut meanwhile
        return False
    with path.open("r+b") as opened:
        opened.seek(start)
        if opened.read(_OVERLAP_BYTES) != data[:_OVERLAP_BYTES]:
            return False
        opened.write(data[_OVERLAP_BYTES:])
    return True


def _may_come(file: Listed) -> bool:
    """True for a file as runs have them."""
    path = PurePosixPath(file.name)
    ours = path.suffix in _TEXTS or (path.suffix in _IMAGES and path.parts[0] == "samples")
    return ours and file.bytes <= _MOST_BYTES and mirror.is_file(file.name) and all(map(_is_name, path.parts))


def _is_name(text: str) -> bool:
    """True for a name that this machine can give to a file, and does not hide."""
    return not text.startswith(".") and "\0" not in text and 0 < len(text.encode("utf-8", "replace")) <= 200


def _newest(one: Far) -> datetime:
    return max((file.changed for file in one.top), default=datetime.min.replace(tzinfo=UTC))
