"""Captions and metadata of images in a folder: from metadata.jsonl, from files beside them, or from names.

Which files there are is `data/folder/scan.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from daguerre.data import skipped
from daguerre.data.class_labels import Classes, plain
from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.unicode import NO_TEXT, is_text, mended, printable

METADATA = "metadata.jsonl"
TEXT_BYTES = 1 << 20
"""Longest caption file, as in tar shards."""
TEXT_FILES = (".txt", ".caption")
"""Endings of files with a caption; of two the first counts."""
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
    folders: tuple[tuple[str, str], ...] = ()
    """(name, folder) of images beside the images that have folders of their own, absolute."""


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
    """{path: line} of metadata.jsonl."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """{folder name: text}."""

    @classmethod
    def of(cls, folder: Path, rules: Rules, images: Sequence[str], others: set[str], counts: skipped.Counts) -> Words:
        """Reads metadata.jsonl. UserError where folder names do not fit the classes' names."""
        listed = _metadata(folder, rules, set(images), counts) if METADATA in others else {}
        names = {parent(path) for path in images} - {""} if rules.classes else set()
        return cls(folder, rules, others, listed, _of_folders(sorted(names), rules.classes) if rules.classes else {})

    def stamp(self, path: str, beside: Mapping[str, str]) -> int:
        """Stands for the image's file, the images `beside` it and all that is said of it, by sizes and times of
        change."""
        digest = xxhash.xxh3_64(_stamp(self.folder / path))
        for name, image in beside.items():
            digest.update(f"{name} {image}".encode("utf-8", "surrogateescape") + _stamp(self.folder / image))
        if path in self.listed:
            digest.update(json.dumps(self.listed[path], sort_keys=True).encode())
        for suffix in (*TEXT_FILES, ".json"):
            if (text := os.path.splitext(path)[0] + suffix) in self.others:
                digest.update(suffix.encode() + _stamp(self.folder / text))
        digest.update(self.classes.get(parent(path), "").encode("utf-8", "surrogateescape"))
        return digest.intdigest()

    def said(self, path: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Caption fields and metadata of an image. `NoCaption` where no field in use has text."""
        line = self.listed.get(path)
        stem = os.path.splitext(path)[0]
        about = dict(line) if line is not None else self._beside(stem + ".json")
        about.pop("file_name", None)
        texts = {mended(name): value.strip() for name, value in about.items() if _is_text(value)}
        if self.rules.captions_from == "files":
            beside = next((stem + suffix for suffix in TEXT_FILES if stem + suffix in self.others), None)
            texts = self._from_files(texts, beside, line is not None)
        else:
            texts[CAPTION] = self._from_name(path)
        wanted = [texts[name] for name in self.rules.fields if name in texts]
        texts = {name: text for name, text in texts.items() if is_text(text)}
        if wanted and not any(map(is_text, wanted)):
            raise NoCaption(NO_TEXT, damage=True)
        if self.rules.fields and not wanted:
            raise NoCaption("image without a caption")
        metadata = {name: value for name, value in about.items() if name != CAPTION}
        return texts, mended(metadata)

    def _from_files(self, texts: dict[str, str], beside: str | None, is_listed: bool) -> dict[str, str]:
        if is_listed and CAPTION in texts:
            return texts
        if beside and CAPTION in self.rules.fields:
            return texts | {CAPTION: _text(self.folder, beside)}
        if CAPTION not in texts and "caption" in texts:
            return texts | {CAPTION: texts["caption"]}
        return texts

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

    def _beside(self, path: str) -> dict[str, Any]:
        """The object of a JSON file; {} where there is none."""
        if path not in self.others:
            return {}
        try:
            found = json.loads((self.folder / path).read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise NoCaption("JSON file beside an image that is not a JSON object", path, damage=True)
        return found


def parent(path: str) -> str:
    """Name of the folder that a file is in; "" for the outermost."""
    return os.path.basename(os.path.dirname(path))


def spoken(stem: str) -> str:
    """The words of a file name: underscores are spaces, and a number at its end only tells copies apart."""
    text = printable(stem).replace("_", " ").strip()
    return re.sub(r"\s+", " ", _COPY.sub("", text)).strip()


def _stamp(path: Path) -> bytes:
    return f" {path.stat().st_size} {local_files.version(path)}".encode()


def _text(folder: Path, path: str) -> str:
    if (folder / path).stat().st_size > TEXT_BYTES:
        raise NoCaption(f"caption file of more than {TEXT_BYTES:,} bytes", path, damage=True)
    try:
        text = (folder / path).read_bytes().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise NoCaption("caption file that is not UTF-8", path, damage=True) from None
    if not text:
        raise NoCaption("caption file without text", path)
    return text


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


def _metadata(folder: Path, rules: Rules, images: set[str], counts: skipped.Counts) -> dict[str, dict[str, Any]]:
    """{path: line} of the lines of metadata.jsonl that name an image of the folder."""
    listed: dict[str, dict[str, Any]] = {}
    wanted = rules.fields if rules.captions_from == "files" else ()
    for number, raw in enumerate((folder / METADATA).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{METADATA} line {number}"
        line = _line(raw, wanted)
        if isinstance(line, str):
            skipped.add(counts, "line of metadata.jsonl that cannot be used", f"{where}: {line}")
            continue
        path = os.path.normpath(line["file_name"])
        if path not in images:
            skipped.add(
                counts, "image named in metadata.jsonl that is not in the folder", f"{where}: {line['file_name']}"
            )
        elif path in listed:
            skipped.add(counts, "duplicate: image named twice in metadata.jsonl", f"{where}: {path}", damage=False)
        else:
            listed[path] = line
    return listed


def _line(raw: bytes, fields: Sequence[str]) -> dict[str, Any] | str:
    """The object of one line, or what is wrong with it."""
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return "no UTF-8"
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(line, dict):
        return 'no object such as {"file_name": "cat.jpg", "text": "a cat"}'
    if not _is_text(line.get("file_name")):
        return "no file_name"
    if fields and not any(_is_text(line.get(name)) for name in fields):
        return f"no {' or '.join(fields)}"
    return line


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
