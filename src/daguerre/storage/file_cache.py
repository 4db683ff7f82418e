"""The local cache of whole remote files: bounded, shared by all processes of a machine, least recently used goes first.

A folder holds `shards/XX/NAME.DIGEST.VERSION` (whole files, put there by a rename), `parts/` (downloads, each locked by
its process) and `locks/`. A process that is killed leaves a part without a lock, which the next one removes.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import TypeVar

from daguerre import system, user_cache
from daguerre.errors import UserError
from daguerre.storage import io as storage_io
from daguerre.storage.download import digest_of, fetch_into
from daguerre.storage.io import Stat
from daguerre.storage.location import Location

_T = TypeVar("_T")

_LOCKS = 4096
_OPENINGS = 5
_SOUND_SECONDS = 600

default_folder = user_cache.folder


@dataclass(frozen=True)
class _Kept:
    """A whole copy, as its name says."""

    path: Path
    digest: str
    version: str

    def touched(self) -> bool:
        """Marks it as used now; False if it is gone, or damaged by a power cut: names may outlive data that never
        reached the disk, so the first use after the machine started compares the digest."""
        try:
            before_start = self.path.stat().st_ctime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
            if before_start and not _is_whole(self.path):
                self.path.unlink(missing_ok=True)
                return False
            os.utime(self.path)
        except FileNotFoundError:
            return False
        return True


@dataclass(frozen=True)
class ShardCache:
    """A folder for whole remote files."""

    folder: Path
    """Created when needed; several processes may use it at once."""
    limit_bytes: int
    """Bound on all files together, downloads included."""

    def path(self, location: Location, digest: str | None = None) -> Path:
        """The path of a whole copy, fetched if need be; it counts as used now. A local file's own path. StoreError, or
        UserError for a folder that cannot be used.

        `digest` (xxh3_128, hex) is the expected one: if the store holds other bytes, those come all the same, for
        callers that check samples one by one. Without it, the copy is the store's newest. Another process may remove
        the copy at any time, which `read` and `using` handle.
        """
        if location.local is not None:
            return location.local
        try:
            if kept := self._usable(location, digest):
                return kept
            with self._locked(f"{int(_name(location)[:8], 16) % _LOCKS:03x}"):
                return self._usable(location, digest) or self._fetched(location, digest)
        except PermissionError as error:
            raise self._unusable(error) from None

    def read(
        self,
        location: Location,
        start: int,
        length: int,
        digest: str | None = None,
        check: Callable[[bytes], bool] | None = None,
    ) -> bytes:
        """`io.read` from the whole copy; a copy that is damaged, while the file is not, is fetched again."""
        if location.local is not None:
            return storage_io.read(location, start, length, check)
        for _ in range(_OPENINGS):
            copy = self.path(location, digest)
            with suppress(FileNotFoundError):
                try:
                    return storage_io.read(Location(str(copy)), start, length, check)
                except storage_io.Mismatch as error:
                    if _sound(copy, int(time.monotonic() // _SOUND_SECONDS)):
                        error.location = location
                        raise
                    copy.unlink(missing_ok=True)
                    _sound.cache_clear()
        raise self._removed(location)

    def using(self, location: Location, use: Callable[[Path], _T], digest: str | None = None) -> _T:
        """Returns what `use` makes of the whole copy, which may open it several times: once more where another process
        removes the copy meanwhile. StoreError where that happens again and again."""
        for _ in range(_OPENINGS):
            copy = self.path(location, digest)
            try:
                return use(copy)
            except FileNotFoundError:
                if location.local is not None or copy.exists():
                    raise
        raise self._removed(location)

    def _removed(self, location: Location) -> storage_io.Transient:
        what = f"was removed from {str(self.folder)!r} several times before it could be read: raise data.cache_gb"
        return storage_io.Transient(location, what, "data.cache_gb")

    def holds(self, location: Location) -> bool:
        """True if there is a whole copy, or the file is local. Sends no request."""
        return location.local is not None or bool(self._kept(location))

    def _kept(self, location: Location) -> list[_Kept]:
        name = _name(location)
        with suppress(FileNotFoundError, NotADirectoryError):
            names = [entry for entry in os.listdir(self._shelf(name)) if entry.startswith(name)]
            return [_Kept(self._shelf(name) / entry, *entry.split(".")[1:3]) for entry in names]
        return []

    def _shelf(self, name: str) -> Path:
        return self.folder / "shards" / name[:2]

    def _usable(self, location: Location, digest: str | None) -> Path | None:
        """The copy with that digest (else that is up to date), marked as used now."""
        kept = self._kept(location)
        right = [one for one in kept if one.digest == digest]
        if kept and not right:
            minute = int(time.monotonic() // 60)
            version = _recent_version(location, digest, minute) if digest else _version(storage_io.size(location))
            right = [one for one in kept if one.version == version]
        return right[0].path if right and right[0].touched() else None

    def _fetched(self, location: Location, digest: str | None) -> Path:
        stat = storage_io.size(location)
        with self._part(location, stat) as part:
            found = fetch_into(location, part, stat, digest, keep_other=True)
            name = _name(location)
            with self._locked("room"):
                for old in self._kept(location):
                    old.path.unlink(missing_ok=True)
                self._make_room(0)
                whole = self._shelf(name) / f"{name}.{found}.{_version(stat)}"
                whole.parent.mkdir(parents=True, exist_ok=True)
                os.rename(part.name, whole)
                os.utime(whole)
        return whole

    @contextmanager
    def _part(self, location: Location, stat: Stat) -> Iterator[FileIO]:
        """A file of the full size for a download, locked, removed at the end unless it was renamed."""
        if stat.bytes > self.limit_bytes:
            raise UserError(
                f"data.cache_gb: {location.name} has {stat.bytes / 1e9:.3g} GB, more than the "
                f"{self.limit_bytes / 1e9:.3g} GB that may be kept on the local disk: raise data.cache_gb",
                code="resources",
                setting="data.cache_gb",
            )
        with self._locked("room"):
            self._make_room(stat.bytes)
            path = self._made("parts") / f"{_name(location)}.{secrets.token_hex(4)}"
            part = FileIO(path, "x+")
            system.lock(part.fileno())
            part.truncate(stat.bytes)
        try:
            with part:
                yield part
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"data.cache_dir: the disk of {str(self.folder)!r} is full: choose another folder, or lower "
                f"data.cache_gb (now {self.limit_bytes / 1e9:.3g})",
                code="resources",
                setting="data.cache_dir",
            ) from None
        finally:
            path.unlink(missing_ok=True)

    def _make_room(self, needed_bytes: int) -> None:
        """Removes parts whose processes are gone, then whole copies, the least recently used first."""
        taken = needed_bytes + sum(_living_bytes(part) for part in self._made("parts").iterdir())
        whole = []
        for path in self._made("shards").glob("??/*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                whole.append((found.st_mtime_ns, found.st_size, path))
        taken += sum(size for _, size, _ in whole)
        for _, size, path in sorted(whole):
            if taken <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            taken -= size

    def _made(self, name: str) -> Path:
        try:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None
        return self.folder / name

    def _unusable(self, error: OSError) -> UserError:
        what = f"{str(self.folder)!r} cannot be used ({error.strerror}): choose a folder that you may write to"
        return UserError(f"data.cache_dir: {what}", setting="data.cache_dir")

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """A lock among all threads and processes; waits for it."""
        with FileIO(self._made("locks") / name, "a") as lock:
            try:
                system.lock(lock.fileno())
            except OSError as error:  # a file system without locks
                raise self._unusable(error) from None
            yield


def _living_bytes(part: Path) -> int:
    """Size of a part in the making; removes one whose process is gone."""
    with suppress(FileNotFoundError), FileIO(part) as file:
        if not system.try_lock(file.fileno()):
            return os.fstat(file.fileno()).st_size
        part.unlink(missing_ok=True)
    return 0


def _name(location: Location) -> str:
    return blake2b(location.identity.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _version(stat: Stat) -> str:
    return blake2b(f"{stat.bytes} {stat.version}".encode(), digest_size=8).hexdigest()


def _is_whole(copy: Path) -> bool:
    """True if a copy has the digest in its name."""
    with FileIO(copy) as file:
        return digest_of(file) == copy.name.split(".")[1]


@lru_cache(maxsize=256)
def _sound(copy: Path, moment: int) -> bool:
    """`_is_whole`, cached for a `moment`: many samples of a shard may be damaged."""
    return _is_whole(copy)


@lru_cache(maxsize=256)
def _recent_version(location: Location, digest: str, minute: int) -> str:
    """The version at the store, requested once a minute if other bytes are expected than came."""
    return _version(storage_io.size(location))
