"""Checkpoints of a run in an object store: a `ShardedStore` for ranks that share no disk.

Each rank sends its own files from memory; rank 0 sends the rest and then the manifest, conditionally: only then is it
saved. What is loaded comes into a local folder first, every file verified, once a machine.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from daguerre.checkpoint.manifest import CheckpointError, Damaged
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.run_dir import RunFolderError
from daguerre.checkpoint.safetensors import encode
from daguerre.checkpoint.sharded import LocalFiles, Planned, ShardedStore
from daguerre.remote import errors
from daguerre.remote.checkpoint_catalog import CheckpointCatalog
from daguerre.remote.sealed_files import Upload
from daguerre.storage.bucket import Prefix
from daguerre.storage.errors import StoreError


@dataclass
class RemoteStore(ShardedStore):
    """The checkpoints of the run at `run`; what is found is fetched below `root`, on this machine, and what is deleted
    or set aside is in the object store."""

    run: Prefix
    before_commit: Callable[[], None] = lambda: None
    """Called on rank 0 before a manifest is written: sends what has to be there first, and refuses where another run
    has taken this one's place."""
    _catalog: CheckpointCatalog = field(init=False, repr=False)
    _loaded: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._catalog = CheckpointCatalog(self.run / "checkpoints")

    def names(self) -> list[str]:
        """Names of the checkpoints that exist, verified or not, oldest first; no collective call. CheckpointError."""
        try:
            return self._catalog.names()
        except StoreError as error:
            raise CheckpointError(error.explanation) from error

    def commit(self, planned: Planned, local: LocalFiles | None = None) -> Path:
        """Send a planned save; when this returns, it is in the store. The path is where it would be loaded to.

        As `ShardedStore.commit`; also RunFolderHeld, on rank 0, where another run has taken the place.
        """
        if self._loaded:  # long since in memory
            shutil.rmtree(self.root, ignore_errors=True)
            self._loaded = False
        return super().commit(planned, local)

    @property
    def place(self) -> str:
        return self.run.name

    def purge(self, keep: RetentionPolicy) -> list[str]:
        """`ShardedStore.purge`. Verified here: the store has every file as it was when it was sent, by its size and
        entity tag."""
        notices: list[str] = self._together(lambda: self._catalog.purge(keep))
        return notices

    def explained(self, error: OSError) -> str:
        """Says what the store or the disk refused."""
        return errors.explained(error)

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        yield

    def _collect_garbage(self) -> list[str]:
        return self._catalog.collect_garbage()

    def _quarantine(self, name: str, reason: Damaged | str) -> str:
        """The manifest goes to `checkpoints/quarantine/`, the files stay."""
        return self._catalog.quarantine(name, str(reason))

    def _extras(self, name: str) -> list[str]:
        return []

    def _verified(self, name: str) -> Path:
        """A checkpoint, brought to every machine."""
        self.read_all(self.root / name)
        return self.root / name

    def _verify_share(self, name: str, token: str) -> list[dict[str, Any]]:
        self._loaded = True
        found: dict[str, Any] = {}
        try:
            self._catalog.sealed(name).fetch_newest(self.root / name, token, self.ranks.rank)
        except Damaged as damage:
            found = {"damaged": str(damage)}
        except CheckpointError as error:
            found = {"refused": str(error)}
        except OSError as error:
            found = {"refused": errors.unreadable(self.root / name, error)}
        # Where one rank could not read it, nobody knows that it is damaged.
        return sorted(self.ranks.collect(found), key=lambda report: "refused" not in report)

    def _new_attempt(self, name: str) -> str:
        return secrets.token_hex(8)

    def _begin(self, planned: Planned, attempt: str) -> str:
        return attempt

    def _write(self, planned: Planned, attempt: str, local: LocalFiles) -> dict[str, Any]:
        """This rank's files, in the store: sizes, digests and tags, or why not."""
        upload = Upload(self._catalog.sealed(planned.name), attempt)
        try:
            for file, tensors in local.items():
                upload.send(file, "parts", partial(encode, tensors), planned.local_bytes)
        except OSError as error:
            return {"error": errors.explained(error)}
        files = {file: [entry.size_bytes, entry.sha256] for file, entry in upload.entries.items()}
        return {"files": files, "tags": upload.tags}

    def _finish(self, planned: Planned, attempt: str, reports: list[dict[str, Any]]) -> None:
        """On rank 0: the rest of the files and the manifest."""
        upload = Upload(self._catalog.sealed(planned.name), attempt)
        try:
            for rank, report in enumerate(reports):
                if "error" in report:
                    where = f" (rank {rank})" if self.ranks.count > 1 else ""
                    raise CheckpointError(self._refusal(planned, f"{report['error']}{where}"))
                upload.tags |= report["tags"]
            upload.entries |= planned.entries(reports)
            for path, part in planned.beside().items():
                upload.send(path, part.kind, partial(list, [b"".join(part.chunks)]))
            self.before_commit()
            upload.seal()
        except (StoreError, CheckpointError, RunFolderError) as error:
            upload.abort()
            if isinstance(error, StoreError):
                raise CheckpointError(self._refusal(planned, error.explanation)) from error
            raise

    def _refusal(self, planned: Planned, what: str) -> str:
        try:
            earlier = self._catalog.names()
        except StoreError:
            state = "Earlier ones are untouched"
        else:
            state = f"Earlier ones are untouched, the newest is {earlier[-1]}" if earlier else "There is no earlier one"
        return f"cannot save {planned.name}: {what}. {state}"
