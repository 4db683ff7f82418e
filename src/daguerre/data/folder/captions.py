"""Captions and metadata of images in a folder: from metadata.jsonl, from files next to them, or from names.

Which files there are is `data/folder/scan.py`.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import xxhash

from daguerre import documents
from daguerre.data import alternatives, skipped
from daguerre.data.class_labels import Classes, plain
from daguerre.data.table.columns import CAPTION_NAMES, PATH_NAMES
from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.unicode import NO_TEXT, is_text, mended, printable

METADATA = "metadata.jsonl"
UNCAPTIONED = "image without a caption"
"""The reason why an image is left out."""
TEXT_BYTES = 1 << 20
"""Longest caption file, as in tar shards."""
TEXT_FILES = (".txt", ".caption", ".tags")
"""Endings of files with a caption, in any case; of two the first counts."""
_FILE_NAMES = ("file_name", *(name for name in PATH_NAMES if name != "file_name"))
"""Keys of the image in a line of metadata.jsonl."""
NOWHERE = "image named in metadata.jsonl that is not in the folder"
CAPTION = "text"
"""The usual caption field."""
_COPY = re.compile(r"(^|[\s_-]+)(\(\d+\)|\d+)$")


@dataclass(frozen=True)
class Rules:
    """Rules by which a folder is read."""

    formats: tuple[str, ...]
    captions_from: Literal["files", "file_names", "folder_names"] = "files"
    fields: tuple[str, ...] = (CAPTION,)
    """Caption fields that are in use: a sample needs text in one of them; () where it needs none."""
    classes: Classes | None = None
    """What folder names mean."""
    recursive: bool = True
    """Reads the folders inside it too."""
    text_files: tuple[str, ...] = TEXT_FILES
    """Endings of files with a caption."""
    folders: tuple[tuple[str, str], ...] = ()
    """(name, folder) of images next to the images that have folders of their own, absolute."""


class NoCaption(Exception):
    """The reason why an image has no usable caption, and the file at fault if it is another one."""

    def __init__(self, reason: str, file: str = "", damage: bool = False) -> None:
        super().__init__(reason)
        self.file = file
        self.damage = damage
        """Whether something is broken."""


@dataclass(frozen=True)
class Words:
    """Captions and metadata of the images of one folder."""

    folder: Path
    rules: Rules
    others: set[str]
    """Files that are no images."""
    listed: Mapping[str, dict[str, Any]]
    """{path: line} of metadata.jsonl, without the key of the image."""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """{path: (metadata.jsonl, number of its line)}."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """{folder name: text}."""

    @classmethod
    def of(cls, folder: Path, rules: Rules, images: Sequence[str], others: set[str], counts: skipped.Counts) -> Words:
        """Reads metadata.jsonl. UserError where folder names do not fit the classes' names."""
        listed: dict[str, dict[str, Any]] = {}
        lines: dict[str, tuple[str, int]] = {}
        for path in sorted(path for path in others if os.path.basename(path) == METADATA):
            _read_metadata(folder, path, rules, set(images), counts, listed, lines)
        names = {parent(path) for path in images} - {""} if rules.classes else set()
        classes = _of_folders(sorted(names), rules.classes) if rules.classes else {}
        return cls(folder, rules, others, listed, lines, classes)

    def stamp(self, path: str, beside: Mapping[str, str]) -> int:
        """Stands for the image's file, the images `beside` it and all that is said of it, by sizes and times of
        change."""
        digest = xxhash.xxh3_64(_stamp(self.folder / path))
        for name, image in beside.items():
            digest.update(f"{name} {image}".encode("utf-8", "surrogateescape") + _stamp(self.folder / image))
        if path in self.listed:
            digest.update(json.dumps(self.listed[path], sort_keys=True).encode())
        for text in [*self.texts_of(path), *self._near(path, (".json",))]:
            digest.update(os.fsencode(os.path.basename(text)) + _stamp(self.folder / text))
        digest.update(self.classes.get(parent(path), "").encode("utf-8", "surrogateescape"))
        return digest.intdigest()

    def said(self, path: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Caption fields and metadata of an image. `NoCaption` where no field in use has text."""
        line = self.listed.get(path)
        about = dict(line) if line is not None else self._beside(next(iter(self._near(path, (".json",))), ""))
        texts: dict[str, str] = {}
        for key, value in about.items():
            texts |= alternatives.of_value(mended(key), value)
        if self.rules.captions_from == "files":
            beside = next(iter(self.texts_of(path)), None)
            texts = self._from_files(texts, beside, line is not None)
        else:
            texts[CAPTION] = self._from_name(path)
        wanted = [texts[name] for name in self.rules.fields if name in texts]
        texts = {name: text for name, text in texts.items() if is_text(text)}
        if wanted and not any(map(is_text, wanted)):
            raise NoCaption(NO_TEXT, damage=True)
        if self.rules.fields and not wanted:
            raise NoCaption(UNCAPTIONED)
        metadata = {name: value for name, value in about.items() if name != CAPTION}
        return texts, mended(metadata)

    def place(self, path: str) -> tuple[str, int, str]:
        """The file that has the caption of an image (the text of its first field in use), the number of the line there,
        0 outside of metadata.jsonl, and the key, "" in a file that is a text. Of one without a caption: the file that
        would have it, NAME.txt or NAME.json."""
        wanted = next(iter(self.rules.fields), CAPTION)
        stem, line = os.path.splitext(path)[0], self.listed.get(path)
        beside = next(iter(self.texts_of(path)), None) if wanted == CAPTION else None
        if beside and not (line and alternatives.of_value(CAPTION, line.get(CAPTION))):
            return beside, 0, ""
        json_file = next(iter(self._near(path, (".json",))), "")
        about = self._beside(json_file) if line is None else line
        file, number = (json_file or f"{stem}.json", 0) if line is None else self.lines[path]
        for name in (wanted, *CAPTION_NAMES) if wanted == CAPTION else (wanted,):
            if alternatives.of_value(name, about.get(name)):
                return file, number, name
        return (f"{stem}{self.rules.text_files[0]}", 0, "") if wanted == CAPTION else (file, number, wanted)

    def _from_files(self, texts: dict[str, str], beside: str | None, is_listed: bool) -> dict[str, str]:
        if is_listed and CAPTION in texts:
            return texts
        if beside and CAPTION in self.rules.fields:
            return texts | _text(self.folder, beside)
        other = next((name for name in CAPTION_NAMES if name in texts), CAPTION)
        return texts | alternatives.renamed(texts, other, CAPTION)

    def _from_name(self, path: str) -> str:
        if self.rules.captions_from == "file_names":
            words = spoken(os.path.splitext(os.path.basename(path))[0])
            if not words:
                raise NoCaption("file name that gives no caption")
            return words
        name = parent(path)
        if not name:
            raise NoCaption("image outside of the folders whose names are the captions")
        return self.classes.get(name) or printable(name).replace("_", " ").strip()

    def texts_of(self, image: str) -> list[str]:
        """The caption files of an image, the one that counts first."""
        return self._near(image, self.rules.text_files)

    def unread_of(self, image: str) -> list[str]:
        """The caption files of an image whose text is not used: all but the first, or all where a line of
        metadata.jsonl has the caption."""
        from_line = CAPTION in self.listed.get(image, {})
        return self.texts_of(image)[0 if from_line else 1 :]

    def _near(self, image: str, suffixes: Sequence[str]) -> list[str]:
        """The files next to an image with its name, and one of these endings instead of its own or behind it."""
        stems = (os.path.splitext(image)[0], image)
        each = (self._by_stem.get((stem, suffix), []) for stem in stems for suffix in suffixes)
        return [path for paths in each for path in paths]

    @cached_property
    def _by_stem(self) -> Mapping[tuple[str, str], list[str]]:
        """{(path without its ending, the ending in small letters): paths} of all files that are no images."""
        found: dict[tuple[str, str], list[str]] = {}
        for path in sorted(self.others, reverse=True):  # small letters first
            stem, suffix = os.path.splitext(path)
            found.setdefault((stem, suffix.lower()), []).append(path)
        return found

    def fields_of(self, image: str) -> list[str]:
        """The names of the texts that a line of metadata.jsonl or a JSON file has for an image."""
        try:
            about = self.listed.get(image) or self._beside(next(iter(self._near(image, (".json",))), ""))
        except NoCaption:
            return []
        return _texts_in(about)

    def _beside(self, path: str) -> dict[str, Any]:
        """The object of a JSON file; {} without a file."""
        if not path:
            return {}
        try:
            found = documents.parse((self.folder / path).read_bytes().decode("utf-8-sig"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoCaption("JSON file of an image that is not a JSON object", path, damage=True)
        return found


def parent(path: str) -> str:
    """Name of the folder that a file is in; "" for the outermost."""
    return os.path.basename(os.path.dirname(path))


def spoken(stem: str) -> str:
    """The words of a file name: underscores are spaces, and a number at its end only tells copies apart."""
    text = printable(stem).replace("_", " ").strip()
    return re.sub(r"\s+", " ", _COPY.sub("", text)).strip()


def _stamp(path: Path) -> bytes:
    found = os.stat(path)
    return f" {found.st_size} {local_files.version_of(found)}".encode()


def _text(folder: Path, path: str) -> dict[str, str]:
    """The caption of a file, or several. `NoCaption` for a file without one."""
    if (folder / path).stat().st_size > TEXT_BYTES:
        raise NoCaption(f"caption file of more than {TEXT_BYTES:,} bytes", path, damage=True)
    try:
        text = (folder / path).read_bytes().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise NoCaption("caption file that is not UTF-8", path, damage=True) from None
    if not text:
        raise NoCaption("caption file without text", path)
    if not (found := alternatives.of_value(CAPTION, text)):
        raise NoCaption(alternatives.trouble(text), path)
    return found


def _of_folders(names: Sequence[str], classes: Classes) -> dict[str, str]:
    """{folder name: text}: by the names, or in the sorted order of the folders where there are as many as classes."""
    known = {name for name in names if plain(name) in classes.prompts}
    if len(known) == len(names):
        return {name: classes.prompts[plain(name)] for name in names}
    in_order = [classes.prompts.get(str(i)) for i in range(len(names))]
    if not known and len(names) == len(classes.prompts) and None not in in_order:
        return {name: text for name, text in zip(names, in_order, strict=True) if text}
    unknown = [printable(name) for name in names if name not in known]
    shown = ", ".join(unknown[:5]) + ", ..." * (len(unknown) > 5)
    raise UserError(
        f"data.idx_to_prompt: {len(unknown):,} of the {len(names):,} folders with images are not among the "
        f"{len(classes.prompts):,} classes ({shown}). Name the folders like the classes in idx_to_prompt; or have as "
        "many folders as classes 0, 1, 2 and so on, in sorted order",
        code="unknown",
        setting="data.idx_to_prompt",
    )


def _read_metadata(
    folder: Path,
    file: str,
    rules: Rules,
    images: set[str],
    counts: skipped.Counts,
    listed: dict[str, dict[str, Any]],
    lines: dict[str, tuple[str, int]],
) -> None:
    """Adds {path: line} of the lines of a metadata.jsonl that name an image, and where they are; paths start at the
    file's folder."""
    wanted = rules.fields if rules.captions_from == "files" else ()
    composed = {_composed(path): path for path in images if not path.isascii()}
    for number, raw in enumerate((folder / file).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{printable(file)} line {number}"
        line = _line(raw, wanted)
        if isinstance(line, str):
            skipped.add(counts, "line of metadata.jsonl that cannot be used", f"{where}: {line}")
            continue
        name = line.pop(next(key for key in _FILE_NAMES if _is_text(line.get(key))))
        spellings = (name, name.replace("\\", "/"))  # as Windows writes it
        inside = [os.path.normpath(os.path.join(os.path.dirname(file), spelling)) for spelling in spellings]
        path = next((path for path in inside if path in images), None) or composed.get(_composed(inside[-1]))
        if path is None:
            skipped.add(counts, NOWHERE, f"{where}: {name}")
        elif path in listed:
            skipped.add(counts, "duplicate: image named twice in metadata.jsonl", f"{where}: {path}", damage=False)
        else:
            listed[path], lines[path] = line, (file, number)


def _composed(path: str) -> str:
    """A path in the form in which an accented letter is one character: macOS writes two for it in names of files."""
    return unicodedata.normalize("NFC", path)


def _line(raw: bytes, fields: Sequence[str]) -> dict[str, Any] | str:
    """The object of one line, or what is wrong with it."""
    try:
        line = documents.parse(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return "no UTF-8"
    except ValueError:
        return "no JSON"
    if not isinstance(line, dict):
        return 'no object such as {"file_name": "cat.jpg", "text": "a cat"}'
    if not any(_is_text(line.get(name)) for name in _FILE_NAMES):
        return "no file_name"
    known = (*fields, *CAPTION_NAMES) if CAPTION in fields else fields
    if known and not any(alternatives.of_value(name, line.get(name)) for name in known):
        found = [name for name in _texts_in(line) if name not in _FILE_NAMES]
        return f"no {' or '.join(fields)}" + (f" (it has {', '.join(found[:3])})" if found else "")
    return line


def _texts_in(about: Mapping[str, Any]) -> list[str]:
    return [name for name, value in about.items() if alternatives.of_value(name, value)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
