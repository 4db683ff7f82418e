"""A folder of image files with captions next to them, in a metadata.jsonl, or in their names: settings and source."""

import json
import os
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import xxhash
from pydantic import Field, model_validator

from daguerre.data import class_labels
from daguerre.data.class_labels import Labels
from daguerre.data.folder import index as folder_index
from daguerre.data.folder.captions import CAPTION, TEXT_FILES, Rules
from daguerre.data.images import kinds
from daguerre.data.images.kinds import ControlName, ReferenceName
from daguerre.data.index import cache
from daguerre.data.index.cache import ShardIndex
from daguerre.data.index.index import Index
from daguerre.data.settings import GenerateSettings, SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split, cache_of
from daguerre.data.table.source import in_blocks
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE, Unused
from daguerre.types import IMAGE, Record
from daguerre.unicode import printable

_NOT_FOLDER_NAMES = "no effect without captions_from=folder_names"
_ONE_CAPTION = "no effect, as captions.text is the caption of every image"


class Settings(SourceSettings):
    """Captioned images in a folder: `cat.jpg` with `cat.txt`, a metadata.jsonl with `file_name` and `text` ..."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        *SourceSettings.unused_when,
        Unused(("idx_to_prompt",), lambda own: own.captions_from != "folder_names", _NOT_FOLDER_NAMES),
        Unused(
            ("caption_extension",),
            lambda own: own.captions_from != "files" or own.captions.text is not None,
            "no effect where captions are not read from files",
        ),
        Unused(("captions_from", "idx_to_prompt"), lambda own: own.captions.text is not None, _ONE_CAPTION),
        Unused(
            ("captions_from",),
            lambda own: CAPTION not in own.captions.used and own.captions_from != "files",
            "no effect, as captions.fields does not include 'text', the field that holds captions from names",
        ),
    )

    source: Literal["folder"] = "folder"
    """Name of this source."""
    path: Annotated[str, ADDRESS] = Field(min_length=1, json_schema_extra=FREE)
    """The folder; folders inside it are read too (see `recursive`). It may move between two starts: samples are known
    by their path inside it."""
    captions_from: Literal["files", "file_names", "folder_names"] = "files"
    """Source of captions: `files` (metadata.jsonl, or .txt or .json next to each image), `file_names` (underscores are
    spaces, a number at the end is dropped) or `folder_names` (of the folder that each image is in: class names)."""
    recursive: bool = Field(True, exclude_if=lambda recursive: recursive)
    """Whether folders inside the folder are read too. kohya's folders are flat, and OneTrainer's
    unless it says otherwise."""
    caption_extension: Annotated[str, Field(pattern=r"^\.[^/\s]+$")] | None = Field(
        None, exclude_if=lambda extension: extension is None
    )
    """Ending of the caption files next to images, such as .caption or .wd14. Default: .txt, else .caption, else .tags;
    in any case, also behind the image's own ending (`cat.jpg.txt`)."""
    mask_dir: Annotated[str | None, ADDRESS] = Field(
        None, min_length=1, json_schema_extra=FREE, exclude_if=lambda folder: folder is None
    )
    """Folder with a mask for each image, at the same path but for the extension. Default: masks are next to the
    images, `cat.mask.png` or `cat-masklabel.png` next to `cat.jpg`. For `objective.mask`."""
    control_dir: Annotated[str | dict[ControlName, str] | None, ADDRESS] = Field(
        None, json_schema_extra=FREE, exclude_if=lambda folder: folder is None
    )
    """Folder with a control image for each image, at the same path but for the extension (kohya's
    `conditioning_data_dir`); or a folder for each of several, `{control: DIR, control_2: DIR}`. Default: they are
    next to the images, `cat.control.png` next to `cat.jpg`. For adapters such as `controlnet`."""
    rejected_dir: Annotated[str | None, ADDRESS] = Field(
        None, min_length=1, json_schema_extra=FREE, exclude_if=lambda folder: folder is None
    )
    """Folder with the image that people like less for each image, at the same path but for the extension. Default: they
    are next to the images, `cat.rejected.jpg` next to `cat.jpg`. For objectives that learn from pairs."""
    reference_dir: Annotated[str | dict[ReferenceName, str] | None, ADDRESS] = Field(
        None, json_schema_extra=FREE, exclude_if=lambda folder: folder is None
    )
    """Folder with a reference image for each image, at the same path but for the extension; or a folder for each of
    several, `{reference: DIR, reference_2: DIR}`. Default: they are next to the images, `cat.reference.png` next to
    `cat.jpg`. For families that read some."""
    generate: GenerateSettings | None = Field(None, json_schema_extra=FREE, exclude_if=lambda made: made is None)
    """Generates what the folder lacks before training. Default: the folder is taken as it is."""
    idx_to_prompt: Labels | None = None
    """Meaning of folder names, with captions_from=folder_names: a map from names, a JSON file with one, or, for as many
    folders as there are classes, a list in their sorted order (or `imagenet`)."""

    @model_validator(mode="after")
    def _drawn_of_something(self) -> Self:
        if self.generate is not None and self.generate.prompt is None and self.captions.text is None:
            raise ValueError(
                "generate needs a prompt: set generate.prompt, or captions.text, which is also the training caption"
            )
        return self


@dataclass(frozen=True)
class FolderSource:
    """The samples of a folder, in the order of their paths."""

    folder: Path
    index_path: Path
    found: SkipReport
    folders: tuple[tuple[str, str], ...] = ()
    """(name, folder) of masks and other further images that have folders of their own, absolute."""
    metric: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def _rows(self) -> ShardIndex:
        return cache.load(self.index_path)

    @cached_property
    def index(self) -> Index:
        return in_blocks(cache.combined([self.index_path]))

    def stamps(self) -> np.ndarray:
        """Of sizes and times of change of the files of each sample."""
        return self._rows.numpy("stamp")

    def caption_digests(self) -> np.ndarray:
        """Of all caption fields, as the index has them."""
        texts = self._rows.column("texts")
        return np.array([xxhash.xxh3_64_intdigest(text.as_buffer()) for text in texts], dtype=np.uint64)

    def sample_id(self, number: int) -> int:
        """63-bit hash of the path inside the folder; it does not depend on other files or the folder's own path."""
        return self._rows.column("id")[number].as_py()

    def name(self, number: int) -> str:
        """The path inside the folder, printable whatever bytes it holds."""
        return printable(self._path(number))

    def _path(self, number: int) -> str:
        return self._inside(os.fsdecode(self._rows.column("path")[number].as_py()))

    def _inside(self, path: str) -> str:
        """A path of the index. UserError if it leads out of the folder, and of the `folders`."""
        within = next((path.removeprefix(f"{p}{os.sep}") for _, p in self.folders if path.startswith(p + os.sep)), path)
        if os.path.isabs(within) or ".." in Path(within).parts:
            what = f"{self.index_path} names {printable(path)!r}, which is not in {self.folder}: delete it"
            raise UserError(what, code="damaged")
        return path

    def record(self, number: int) -> Record:
        """The files' bytes, captions and metadata. OSError if one cannot be read."""
        path = self._path(number)
        texts, metadata, beside = (
            json.loads(self._rows.column(name)[number].as_py()) for name in ("texts", "metadata", "images")
        )
        images = {IMAGE: (self.folder / path).read_bytes()}
        for name, other in beside.items():
            images[name] = (self.folder / self._inside(other)).read_bytes()
        return Record(printable(path), images, texts, metadata)

    def report(self) -> SkipReport:
        """Skipped files and notes of the scan."""
        return self.found


def open_source(settings: Settings, split: Split) -> FolderSource:
    """Scans the folder. UserError if it is missing or holds nothing to train on."""
    folder = Path(settings.path).expanduser()
    if settings.generate is not None and not folder.exists():
        raise UserError(
            f"data.path: {str(folder)!r} does not exist yet: `daguerre train` generates {settings.generate.count:,} "
            "images into it before it trains",
            code="missing",
            setting="data.path",
        )
    named = None if settings.idx_to_prompt is None else class_labels.opened(settings.idx_to_prompt)
    folders = _folders(settings)
    index_path, found = folder_index.indexed(folder, rules(settings, named, folders), cache_of(settings).folder)
    return FolderSource(folder, index_path, found, folders)


def rules(
    settings: Settings, classes: class_labels.Classes | None = None, folders: tuple[tuple[str, str], ...] = ()
) -> Rules:
    """The rules by which a folder is read; `classes` and `folders` are what the settings name outside of it."""
    given = settings.caption_extension
    return Rules(
        settings.formats, settings.captions_from, fields=settings.captions.used, classes=classes,
        recursive=settings.recursive, text_files=TEXT_FILES if given is None else (given.lower(),), folders=folders,
    )  # fmt: skip


def _folders(settings: Settings) -> tuple[tuple[str, str], ...]:
    """(name, absolute folder) of further images. UserError for one that is not there."""
    found = []
    for setting, name, given in kinds.places(settings, "dir"):
        if not given:
            continue
        place = os.path.abspath(Path(given).expanduser())
        if not os.path.isdir(place):
            what = f"data.{setting}: {given!r} is not a folder (current folder: {os.getcwd()!r})"
            raise UserError(what, code="missing", setting=f"data.{setting}")
        found.append((name, place))
    return tuple(found)
