"""Captions that the page changes, written where training reads them: in a file next to the picture, or in a line of
metadata.jsonl. Every change is noted before it is made, so that it can be undone, also after a kill."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from daguerre import documents
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically
from daguerre.data.folder.captions import METADATA, TEXT_BYTES, TEXT_FILES, NoCaption
from daguerre.data.leftovers import HIDDEN
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.report.run import MOST_BYTES as MOST_WHOLE
from daguerre.serve.bounds import check_file, within
from daguerre.serve.dataset.listing import Listing, Picture
from daguerre.serve.dataset.moves import put_in_trash
from daguerre.unicode import NO_TEXT, is_text, printable

MOST_BYTES = 2 << 20
_JOURNAL = "undo.json"
_MOST_UNDONE = 20
_SHOWN = 3


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class One(_Message):
    """Another caption of one picture."""

    kind: Literal["caption"]
    id: str
    was: str
    """The caption as the page showed it: one that has changed since is not overwritten."""
    text: str = Field(max_length=20_000)


class Replace(_Message):
    """A text in place of another in many captions."""

    kind: Literal["replace"]
    find: str = Field(min_length=1, max_length=1000)
    by: str = Field("", max_length=1000)
    any_case: bool = False

    def applied(self, text: str) -> str:
        flags = re.IGNORECASE if self.any_case else 0
        return re.sub(re.escape(self.find), lambda _: self.by, text, flags=flags).strip()


class Tag(_Message):
    """A part between commas that is added, removed or moved in many captions."""

    kind: Literal["add", "remove", "move"]
    tag: str = Field(min_length=1, max_length=200, pattern=r"^[^,\r\n]*[^,\s][^,\r\n]*$")
    to: Literal["first", "up", "down", "last"] = "last"

    def applied(self, text: str) -> str:
        return "\n".join(self._of_line(line) for line in text.split("\n")) if text else self._of_line(text)

    def _of_line(self, line: str) -> str:
        tags, tag = [each.strip() for each in line.split(",") if each.strip()], self.tag.strip()
        place = next((i for i, each in enumerate(tags) if each.casefold() == tag.casefold()), None)
        if (place is None) != (self.kind == "add"):
            return line
        if place is not None:
            tag = tags.pop(place)
        if self.kind != "remove":
            last = len(tags)
            at = {"first": 0, "last": last, "up": max(0, (place or 0) - 1), "down": min(last, (place or 0) + 1)}
            tags.insert(at[self.to] if place is not None or self.to == "first" else last, tag)
        return ", ".join(tags)


class Many(_Message):
    """A change of many captions."""

    kind: Literal["many"]
    ids: list[Annotated[str, Field(max_length=16)]] | None = Field(None, max_length=100_000)
    """Of the pictures; None for all that are trained on, or would be with a caption."""
    change: Annotated[Replace | Tag, Field(discriminator="kind")]
    try_only: bool = False
    """True where the page only asks what would change."""


class Undo(_Message):
    """Takes the last change back."""

    kind: Literal["undo"]


class Wanted(BaseModel):
    """Message of a page."""

    wanted: Annotated[One | Many | Undo, Field(discriminator="kind")]


class Noted(_Message):
    """A caption that was changed."""

    id: str
    file: str
    """Inside the folder."""
    key: str
    before: str
    after: str
    made: bool
    """True if its file was made for it."""


class Entry(_Message):
    """A change that can be undone."""

    title: str
    changes: list[Noted]


_ENTRIES = TypeAdapter(list[Entry])


@dataclass(frozen=True)
class Text:
    """A caption where it is written."""

    file: Path
    line: int
    """In metadata.jsonl, from 1; 0 elsewhere."""
    key: str
    """Of a JSON object; "" where the file is the text."""
    text: str
    """Empty where it is not written yet."""


@dataclass(frozen=True)
class Change:
    """Another text for a picture."""

    picture: Picture
    at: Text
    after: str


def _wanted(given: bytes) -> One | Many | Undo:
    return Wanted.model_validate({"wanted": documents.parse(given)}).wanted


def edit(listing: Listing, given: bytes) -> dict[str, Any]:
    """Does what a page asks; what it says of it. UserError for something else. Nobody else changes the folder."""
    wanted = documents.sent(_wanted, given, "the page sent no change of captions")
    if isinstance(wanted, Undo):
        return _undo(listing)
    return _one(listing, wanted) if isinstance(wanted, One) else _many(listing, wanted)


def found(listing: Listing, picture: Picture) -> Text:
    """The caption of a picture where it is written. UserError where a page cannot write it."""
    words = listing.found.words
    if picture.away:
        raise UserError(f"{printable(picture.path)} is {picture.reason}: restore it first")
    if words.rules.captions_from != "files":
        raise UserError("these captions are names of files or folders: rename them, or let the run read caption files")
    if not words.rules.fields:
        raise UserError("the run gives all pictures one caption (data.captions.text): change it in its recipe")
    try:
        name, line, key = words.place(picture.path)
    except NoCaption as error:
        raise UserError(f"{printable(error.file)}: {error}", code="damaged") from error
    return _text(listing, name, line, key)


def _text(listing: Listing, name: str, line: int, key: str) -> Text:
    path = (listing.place.path / name).resolve()
    if not within(path, (listing.place.path.resolve(),)):
        raise UserError(f"{printable(name)} is a link out of this folder: change the text where it leads to")
    return Text(path, line, key, _read(path, printable(name), line, key))


def _read(path: Path, name: str, line: int, key: str) -> str:
    try:
        check_file(path, (), 8 * MOST_WHOLE if line else TEXT_BYTES)
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        if not key:
            return data.decode().strip()
        value = documents.parse(_lines(data)[line - 1] if line else data).get(key, "")
    except FileNotFoundError:
        return ""
    except (UnicodeDecodeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{name} cannot be read ({error}): mend it by hand", code="damaged") from error
    if not isinstance(value, str):
        raise UserError(f"{name} has several captions of this picture: change them there")
    if not is_text(value):
        raise UserError(f"{name}: {NO_TEXT}: mend it by hand", code="damaged")
    return value.strip()


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _one(listing: Listing, wanted: One) -> dict[str, Any]:
    picture = listing.picture(wanted.id)
    at, text = found(listing, picture), wanted.text.replace("\r\n", "\n").strip()
    if at.text != wanted.was.replace("\r\n", "\n").strip():
        raise UserError(f"the caption has changed since this page was loaded; it is now: {at.text}", code="conflict")
    _check(text)
    if text != at.text:
        _write(listing, f"the caption of {printable(picture.path)}", [Change(picture, at, text)])
    return {"changed": int(text != at.text), "text": text}


def _check(text: str) -> None:
    if not text:
        raise UserError("training leaves out pictures without a caption: write one, or leave the picture out")
    if not is_text(text) or "\0" in text:
        raise UserError("the caption holds characters that are no text")


def _many(listing: Listing, wanted: Many) -> dict[str, Any]:
    chosen = listing.pictures if wanted.ids is None else [listing.picture(id) for id in dict.fromkeys(wanted.ids)]
    changes, kept, refused = list[Change](), 0, dict[str, int]()
    for picture in chosen:
        if picture.away:
            continue
        try:
            at = found(listing, picture)
        except UserError as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
            continue
        if (after := wanted.change.applied(at.text)) == at.text:
            kept += 1
        else:
            changes.append(Change(picture, at, after))
    if empty := [printable(each.picture.path) for each in changes if not each.after]:
        raise UserError(
            f"{counted(len(empty), 'caption')} would have no text left ({', '.join(empty[:_SHOWN])}"
            f"{', ...' * (len(empty) > _SHOWN)}), and training leaves out pictures without one: nothing is changed"
        )
    for each in changes:
        _check(each.after)
    if changes and not wanted.try_only:
        _write(listing, counted(len(changes), "caption"), changes)
    examples = [[printable(each.picture.path), each.at.text, each.after] for each in changes[:_SHOWN]]
    return {"changed": len(changes), "kept": kept, "refused": refused, "examples": examples}


def _write(listing: Listing, title: str, changes: Sequence[Change]) -> None:
    """Notes what is about to change, then changes it."""
    home = listing.place.path.resolve()
    noted = [
        Noted(
            id=each.picture.id,
            file=str(each.at.file.relative_to(home)),
            key=each.at.key,
            before=each.at.text,
            after=each.after,
            made=not each.at.file.exists(),
        )
        for each in changes
    ]
    _save(listing, [*_journal(listing), Entry(title=title, changes=noted)][-_MOST_UNDONE:])
    _apply(changes)


def _apply(changes: Sequence[Change]) -> None:
    lines: dict[Path, list[Change]] = {}
    for each in changes:
        if each.at.line:
            lines.setdefault(each.at.file, []).append(each)
        elif each.at.key:
            document = documents.read_object(each.at.file) if each.at.file.exists() else {}
            write_bytes_atomically(each.at.file, _json({**document, each.at.key: each.after}, 1) + b"\n")
        else:
            write_bytes_atomically(each.at.file, f"{each.after}\n".encode())
    for path, own in lines.items():
        data = path.read_bytes()
        every = _lines(data.removeprefix(b"\xef\xbb\xbf"))
        for each in own:
            old = every[each.at.line - 1]
            ending = old[len(old.rstrip(b"\r\n")) :]
            every[each.at.line - 1] = _json({**documents.parse(old), each.at.key: each.after}) + ending
        write_bytes_atomically(path, b"".join(every))


def _json(document: dict[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=indent).encode(errors="backslashreplace")


def last(listing: Listing) -> str:
    """The change that would be undone, in words; "" for nothing."""
    every = _journal(listing)
    return every[-1].title if every else ""


def _undo(listing: Listing) -> dict[str, Any]:
    """Gives the captions of the last change the texts that they had; those that were changed since stay."""
    every = _journal(listing)
    if not every:
        raise UserError("there is nothing to undo", code="missing")
    changes, made, stayed = list[Change](), list[Path](), list[str]()
    for noted in every[-1].changes:
        picture, at = listing.by_id.get(noted.id), _noted_text(listing, noted)
        if picture is None or at is None or at.text not in (noted.before, noted.after):
            stayed.append(printable(noted.file))
        elif at.text == noted.after and noted.made:
            made.append(at.file)
        elif at.text == noted.after:  # else a kill came before it
            changes.append(Change(picture, at, noted.before))
    _apply(changes)
    for path in made:
        put_in_trash(path)
    _save(listing, every[:-1])
    return {"changed": len(changes) + len(made), "stayed": stayed[:_SHOWN], "title": every[-1].title}


def _noted_text(listing: Listing, noted: Noted) -> Text | None:
    """A caption that was changed, as it is written now; None where it is not to be found."""
    picture, (_, ending) = listing.by_id.get(noted.id), os.path.splitext(noted.file)
    rules = listing.found.words.rules
    if picture is None or picture.away or ending.lower() not in (*TEXT_FILES, *rules.text_files, ".json", ".jsonl"):
        return None
    file, line = listing.found.words.lines.get(picture.path, ("", 0))
    is_line = os.path.basename(noted.file) == METADATA
    if is_line and file != noted.file:
        return None
    try:
        return _text(listing, noted.file, line if is_line else 0, noted.key)
    except UserError:
        return None


def _journal(listing: Listing) -> list[Entry]:
    path = listing.place.path / HIDDEN / _JOURNAL
    try:
        check_file(path, (listing.place.path.resolve(),), MOST_WHOLE)
        return _ENTRIES.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return []


def _save(listing: Listing, every: list[Entry]) -> None:
    folder = listing.place.path / HIDDEN
    make_folder(folder)
    write_bytes_atomically(folder / _JOURNAL, _ENTRIES.dump_json(every))
