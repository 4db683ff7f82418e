"""Runs in an object store for who only reads them: a copy in the user's cache, brought up to date when it is asked for.

The small files come at once, a checkpoint or the export when it is needed. The copy of a run is not the folder that it
works in: a run of this machine is never touched by its readers.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from daguerre import documents
from daguerre.checkpoint.atomic import locked, make_folder, write_json_atomically
from daguerre.checkpoint.manifest import Damaged
from daguerre.checkpoint.run_dir import ELSEWHERE, EXPORTS, RunFolder
from daguerre.errors import UserError
from daguerre.remote import errors, export, lock, mirror
from daguerre.remote.checkpoint_catalog import CheckpointCatalog
from daguerre.remote.run import WORKS_FOR, working_folder
from daguerre.storage.address import is_remote
from daguerre.storage.bucket import Prefix, prefix
from daguerre.storage.errors import StoreError

_ORIGIN = ".origin.json"


def located(text: str) -> Path:
    """The folder of this machine that holds a run: the text's own, or a copy of the run at `s3://` or `gs://`.

    `ADDRESS/pipeline` and `ADDRESS/adapter` are exports of a run. UserError where there is no run, or where it cannot
    be read.
    """
    if not is_remote(text):
        return Path(text).expanduser()
    whole = text.rstrip("/")
    above, _, last = whole.rpartition("/")
    if last in EXPORTS:
        folder = copy(prefix(above))
        fetch_export(folder, last)
        return folder / last
    return copy(prefix(whole))


def copy(run: Prefix) -> Path:
    """Brings the small files of a run to this machine. UserError where there is no run, or where it cannot be read."""
    folder = working_folder(run, "run-copies")
    with _reading(run, folder, folder):
        files = mirror.listed_files(run)
        if not any(one.name in ("config.yaml", "metrics/metrics.jsonl") for one in files):
            raise UserError(f"{run.name} is not a run folder: it has no config.yaml", code="missing")
        mirror.pull(run, folder, files)
        mirror.forget_others(folder, files)
        write_json_atomically(folder / _ORIGIN, {"url": run.url})
        (folder / ELSEWHERE).unlink(missing_ok=True)
        with suppress(StoreError):  # who may read only cannot ask what time it is there
            if holder := lock.holder(run):
                write_json_atomically(folder / ELSEWHERE, asdict(holder))
    return folder


def origin(folder: Path) -> Prefix | None:
    """The run that a copy is of; None for any other folder."""
    try:
        return Prefix(_address(folder / _ORIGIN))
    except (FileNotFoundError, NotADirectoryError):
        return None


def display_name(folder: Path) -> str:
    """Names a run folder for people: a copy, and the one that a remote run works in, by the address of the run."""
    for name in (_ORIGIN, WORKS_FOR):
        if (folder / name).is_file():
            return Prefix(_address(folder / name)).name
    return str(folder)


def _address(path: Path) -> str:
    try:
        return str(documents.read_object(path)["url"])
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}): delete its folder, which is a copy", code="damaged") from error


def names(text: str) -> list[str]:
    """Names of the checkpoints of a run in a store, oldest first; nothing for a path. UserError."""
    if not is_remote(text):
        return []
    run = prefix(text)
    with _explained(run, Path()):
        return CheckpointCatalog(run / "checkpoints").names()


def fetch(folder: Path, name: str = "latest") -> list[str]:
    """Brings a checkpoint into a copy: the newest that verifies, one by its name, or `all`. Returns notices.

    Nothing is done to a folder that is no copy, or where there is no such checkpoint. UserError for a store that cannot
    be read.
    """
    run = origin(folder)
    if run is None:
        return []
    root, notices = RunFolder(folder).checkpoints, list[str]()
    with _reading(run, folder, root):
        catalog = CheckpointCatalog(run / "checkpoints")
        names = catalog.names()
        for gone in set(_folders(root)) - set(names):
            shutil.rmtree(root / gone, ignore_errors=True)
        wanted = [each for each in reversed(names) if name in ("latest", "all", each)]
        for each in wanted:
            try:
                catalog.sealed(each).fetch_newest(root / each, "")
            except Damaged as damage:
                shutil.rmtree(root / each, ignore_errors=True)
                notices.append(f"{damage}; {each} is skipped")
            else:
                if name == "latest":
                    _only(root, each)
                    break
    return notices


def fetch_export(folder: Path, name: str) -> None:
    """Brings the newest export of this name (EXPORTS) into a copy. UserError without an export."""
    run = origin(folder)
    if run is None:
        return
    with _reading(run, folder, folder):
        if not export.fetch(run, folder / name):
            raise UserError(
                f"{run.name} has no {name} folder: the first save of a run writes its export if checkpoint.export=true",
                code="missing",
                setting="checkpoint.export",
            )


def send(folder: Path, name: str) -> None:
    """Writes a file of a copy where it is from. StoreError, OSError."""
    run = origin(folder)
    if run is not None:
        run.write(name, (folder / name).read_bytes())


def _folders(root: Path) -> list[str]:
    return [one.name for one in root.iterdir() if not one.name.startswith(".")] if root.is_dir() else []


def _only(root: Path, name: str) -> None:
    """Older ones go, and newer ones that are damaged where they are from: `latest` is what is left."""
    for other in set(_folders(root)) - {name}:
        shutil.rmtree(root / other, ignore_errors=True)


@contextmanager
def _reading(run: Prefix, folder: Path, to: Path) -> Iterator[None]:
    """Readers of one machine fetch a run's files one after the other."""
    with _explained(run, to):
        make_folder(folder)
        with locked(folder / ".reading"):
            yield


@contextmanager
def _explained(run: Prefix, to: Path) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise UserError(error.explanation, code="unreachable") from error
    except OSError as error:
        raise UserError(f"{run.name}: {errors.unreadable(to, error)}", code="resources") from error
