"""Hugging Face data sets: folders that `save_to_disk` wrote, read without the library, or data sets by name, with it.

Holds the settings and finds the Arrow files; the source is `daguerre.data.table.source`.
"""

import os
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.error import HTTPError
from urllib.request import Request, getproxies, urlopen

from pydantic import Field, model_validator

from daguerre import documents
from daguerre.data.source import Split as Part
from daguerre.data.table.arrow import ArrowTables
from daguerre.data.table.columns import TableSettings
from daguerre.data.table.source import TableSource, open_tables
from daguerre.errors import Absent, Code, UserError, install
from daguerre.regular import Irregular
from daguerre.settings import ADDRESS, FREE, Unused
from daguerre.storage import local_files
from daguerre.storage.location import Location

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_SPLIT = re.compile(r"\w+(\.\w+)*")
_PATIENCE_SECONDS = 10.0
_offline: ContextVar[bool] = ContextVar("offline", default=False)


class Settings(TableSettings):
    """A Hugging Face data set: a folder written by `save_to_disk`, or one by its name on the hub."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        *TableSettings.unused_when,
        Unused(("config", "revision"), lambda own: own.path is not None, "no effect on a folder (data.path)"),
    )

    source: Literal["huggingface"] = "huggingface"
    """Name of this source."""
    path: Annotated[str | None, ADDRESS] = Field(None, min_length=1, json_schema_extra=FREE)
    """A folder that `save_to_disk` wrote (a Dataset or a DatasetDict). It may move between two starts."""
    name: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """Instead of `path`: a data set by name, such as `lambdalabs/naruto-blip-captions`, or a folder of files that the
    `datasets` library loads; it is downloaded and prepared by it, in its own cache."""
    config: str | None = Field(None, min_length=1)
    """Configuration of the named data set. Default: its only one, or the one it calls its default."""
    revision: str | None = Field(None, min_length=1)
    """Version of the named data set: a branch, a tag or a commit. Default: the newest."""
    split: str | None = Field(None, pattern=r"^\w+(\.\w+)*$")
    """Split that is trained on. Default: `train`, or the only one. What is held out for validation is drawn
    from it (`held_out_fraction`)."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.name is None):
            drop = "; data.name=null drops a recipe's, and images in a folder are data.source=folder data.path=DIR"
            both = drop if self.path is not None else ""
            raise ValueError(f"give either path (a folder of save_to_disk) or name (a data set on the hub){both}")
        return self


def open_source(settings: Settings, split: Part) -> TableSource:
    """All usable rows, of both splits. UserError if there are none."""
    files = _on_disk(Path(settings.path).expanduser(), settings) if settings.path else _by_name(settings)
    return open_tables(settings, ArrowTables(), [Location(str(file)) for file in files])


def _on_disk(folder: Path, settings: Settings) -> list[Path]:
    """The Arrow files of a folder, in their order."""
    folder = folder.absolute()
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else f"does not exist (seen from {os.getcwd()!r})"
        raise _path_error(
            folder,
            f"{what}. path must be a folder that save_to_disk wrote; for a data set on the hub, use name",
            "missing",
        )
    if not (folder / SPLITS).exists():
        if settings.split is not None:
            what = f"data.split: {str(folder)!r} is a single data set without splits: remove the setting"
            raise UserError(what, code="unused", setting="data.split")
        return _files(folder)
    splits = _document(folder / SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) and _SPLIT.fullmatch(name) for name in splits):
        raise _path_error(folder / SPLITS, "lists no splits: the folder is damaged", "damaged")
    return _files(folder / _chosen(splits, settings, str(folder)))


def _path_error(path: Path, what: str, code: Code) -> UserError:
    return UserError(f"data.path: {str(path)!r} {what}", code=code, setting="data.path")


def _chosen(splits: Sequence[str], settings: Settings, where: str) -> str:
    """The split of the settings, else the only one or `train`. UserError if it does not exist."""
    wanted = settings.split or (splits[0] if len(splits) == 1 else "train")
    if wanted not in splits:
        default = "" if settings.split else " (the default)"
        what = f"data.split: {where} has no split {wanted!r}{default}; it has {', '.join(splits)}"
        raise UserError(what, code="unknown", setting="data.split")
    return wanted


def _files(folder: Path) -> list[Path]:
    if not (folder / STATE).exists():
        instead = "Give the folder that was given to save_to_disk; a data set on the hub is named by data.name"
        names = [entry.name for entry in os.scandir(folder)]
        for suffix, source in ((".tar", "webdataset"), (".csv", "csv"), (".parquet", "parquet")):
            if any(name.endswith(suffix) for name in names):
                instead = f"It holds {suffix} files: read them with data.source={source}"
        raise _path_error(folder, f"is no data set of save_to_disk: it has no {STATE}. {instead}", "unknown")
    state = _document(folder / STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        again = "Save it again: load_from_disk(DIR).flatten_indices().save_to_disk(NEW)"
        what = f"is a selection of rows, saved by an old version of `datasets`. {again}"
        raise _path_error(folder, what, "unsupported")
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names or not all(name == os.path.basename(name) for name in names):
        raise _path_error(folder / STATE, "lists no files: the folder is damaged", "damaged")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        examples = f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
        raise _path_error(folder, f"lacks {len(missing)} of its {len(names)} files: {examples}", "missing")
    return [folder / name for name in names]


def _document(path: Path) -> dict[str, Any]:
    try:
        with local_files.opened(path) as file:
            document = documents.parse(file.read())
    except (ValueError, Irregular):
        document = None
    if not isinstance(document, dict):
        raise _path_error(path, "is damaged: it holds no JSON object. Save the data set again", "damaged")
    return document


def _absent(settings: Settings, where: str, error: Exception) -> str:
    """The message for a data set that could not be loaded, or is not in the cache."""
    revision = f" --revision {settings.revision}" if settings.revision else ""
    command = f"hf download --repo-type dataset {settings.name}{revision} --local-dir DIR"
    elsewhere = f"Without a network: `{command}` on a machine that has one, then data.name=DIR here"
    if _offline.get():
        return f"{where} is not on this machine yet: `daguerre train` fetches it. {elsewhere}"
    if isinstance(error, _Unreachable):
        return f"data.name: {where} is not on this machine, and the hub cannot be reached ({error}). {elsewhere}"
    return (
        f"data.name: {where} cannot be loaded: {type(error).__name__}: {str(error)[:500]}. Check its name, "
        f"data.config, data.split, the network and your login (hf auth login). {elsewhere}"
    )


@contextmanager
def from_cache_alone() -> Iterator[None]:
    """Looks for data sets by name in the cache of `datasets` alone while the block runs; else `Absent`."""
    token = _offline.set(True)
    try:
        yield
    finally:
        _offline.reset(token)


class _Unreachable(Exception):
    """The reason why the hub does not answer."""


@contextmanager
def _as_asked(config: Any, settings: Settings) -> Iterator[None]:
    """Makes the library look in its cache alone if so asked, or if the hub cannot be reached, which it would try for
    half a minute. Its switch is a variable of its module."""
    before = config.HF_HUB_OFFLINE
    local = before or _offline.get() or Path(settings.name or "").exists()
    why = None if local else _unreachable(config.HF_ENDPOINT)
    config.HF_HUB_OFFLINE = before or _offline.get() or why is not None
    try:
        yield
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        if why is None:
            raise
        raise _Unreachable(why) from error
    finally:
        config.HF_HUB_OFFLINE = before


def _unreachable(address: str) -> str | None:
    """The reason why no connection is made within a few seconds; None if one is, or only the library can tell."""
    if "all" in getproxies():
        return None
    try:
        urlopen(Request(address, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except HTTPError:
        return None  # an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else f"{address}: {reason}"
    return None


def _by_name(settings: Settings) -> list[Path]:
    """The Arrow files in the cache of `datasets`, which downloads and prepares them if need be."""
    if find_spec("datasets") is None:
        raise Absent(
            "data.name: data sets by name need the library `datasets`. Folders that save_to_disk wrote (data.path) are "
            f"read without it. It is installed by: {install('datasets')}",
            code="not_installed",
            setting="data.name",
        )
    import datasets  # an extra: slow to load, and needed here only

    where = f"the data set {settings.name!r}"
    try:
        with _as_asked(datasets.config, settings):
            names = datasets.get_dataset_split_names(settings.name, settings.config, revision=settings.revision)
            wanted = _chosen(list(names), settings, where)
            found = datasets.load_dataset(settings.name, settings.config, split=wanted, revision=settings.revision)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, _Unreachable, datasets.exceptions.DatasetsError) as error:
        raise Absent(_absent(settings, where, error), setting="data.name") from error
    files = [Path(entry["filename"]) for entry in found.cache_files]
    if not files:
        what = f"data.name: {where} has no files that can be mapped: save it with save_to_disk, and give data.path"
        raise UserError(what, code="unsupported", setting="data.name")
    return files
