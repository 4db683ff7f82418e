"""Pictures that are put away and taken back: moved with all that belongs to them into a hidden folder next to them,
which training does not read. Nothing is deleted."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint.atomic import make_folder, replacing, sync_folder, write_bytes_atomically, write_durably
from daguerre.data.folder.captions import METADATA
from daguerre.data.images import kinds
from daguerre.data.leftovers import HIDDEN
from daguerre.errors import UserError
from daguerre.serve.dataset.listing import Listing, Picture, is_picture
from daguerre.unicode import printable

MOST_BYTES = 2 << 20


class Wanted(BaseModel):
    """Message of a page."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Annotated[str, Field(max_length=16)]] = Field(min_length=1, max_length=100_000)
    to: Literal["left_out", "trash", "back"]


def move(listing: Listing, given: bytes) -> dict[str, Any]:
    """Moves the pictures that a page names. UserError for something else, and for a name that is taken."""
    wanted = documents.sent(Wanted.model_validate_json, given, "the page named no pictures")
    chosen = [listing.picture(id) for id in dict.fromkeys(wanted.ids)]
    chosen = [each for each in chosen if each.away != ("" if wanted.to == "back" else wanted.to)]
    for each in chosen:
        target = _target(listing, each, wanted.to) / os.path.basename(each.path)
        if target.exists():
            raise UserError(
                f"there is another {printable(target.name)} already where it would go: rename one of them",
                code="conflict",
            )
    for each in chosen:
        _keep_line(listing, each, _target(listing, each, wanted.to))
    with _without_lines(listing, chosen):
        for each in chosen:
            _moved(listing, each, _target(listing, each, wanted.to))
    return {"moved": len(chosen)}


def _home(listing: Listing, picture: Picture) -> Path:
    """The folder in which a picture is read."""
    here = (listing.place.path / picture.path).parent
    return here.parent.parent if picture.away else here


def _target(listing: Listing, picture: Picture, to: str) -> Path:
    home = _home(listing, picture)
    return home if to == "back" else home / HIDDEN / to


def _keep_line(listing: Listing, picture: Picture, target: Path) -> None:
    """Writes the line about a picture where the picture goes."""
    make_folder(target)
    if line := _line(listing, picture):
        _append(target / METADATA, {"file_name": os.path.basename(picture.path), **line})


def _moved(listing: Listing, picture: Picture, target: Path) -> None:
    """The picture goes first where it is put away, and last where it comes back: a kill between leaves no picture in
    the data without its caption."""
    path = listing.place.path / picture.path
    back = target == _home(listing, picture)
    names = [path.name, *_belonging(path)]
    for name in reversed(names) if back else names:
        _rename(path.with_name(name), target / name, is_shared=_is_shared(path, name))
    sync_folder(target)
    sync_folder(path.parent)


def _belonging(path: Path) -> list[str]:
    """Files next to a picture that are named by it: captions, masks, control images."""
    stem, found = path.stem, []
    for name in sorted(os.listdir(path.parent)):
        own, _ = os.path.splitext(name)
        owner = kinds.owner(own)
        if name == path.name or name.startswith(".") or not path.with_name(name).is_file():
            continue
        if (owner is not None and owner[0] == stem) or (own in (stem, path.name) and not is_picture(name)):
            found.append(name)
    return found


def _is_shared(path: Path, name: str) -> bool:
    """True for a file that another picture of this stem has too, such as cat.txt of cat.jpg and cat.png."""
    others = (each for each in os.listdir(path.parent) if each != path.name and is_picture(each))
    return name != path.name and any(os.path.splitext(each)[0] == path.stem for each in others)


def _rename(path: Path, target: Path, is_shared: bool) -> None:
    if target.exists() and target.read_bytes() != path.read_bytes():
        # A caption that was written since: the older one stays where it is.
        return
    if is_shared:
        write_bytes_atomically(target, path.read_bytes())
    else:
        os.replace(path, target)


def put_in_trash(path: Path) -> None:
    """Moves a file into the trash next to it, under a name that is free there."""
    trash = path.parent / HIDDEN / "trash"
    make_folder(trash)
    names = (path.name if not i else f"{path.stem}-{i}{path.suffix}" for i in range(1_000_000))
    os.replace(path, next(trash / name for name in names if not (trash / name).exists()))
    sync_folder(trash)
    sync_folder(path.parent)


def _line(listing: Listing, picture: Picture) -> dict[str, Any]:
    """The line of metadata.jsonl about a picture, without its name; {} without one."""
    if not picture.away:
        return listing.found.words.listed.get(picture.path, {})
    path = (listing.place.path / picture.path).with_name(METADATA)
    own = [line for line in _objects(path) if line.get("file_name") == os.path.basename(picture.path)]
    return {name: value for name, value in own[-1].items() if name != "file_name"} if own else {}


def _objects(path: Path) -> list[dict[str, Any]]:
    try:
        every = [documents.parse(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, ValueError):
        return []
    return [each for each in every if isinstance(each, dict)]


def _append(path: Path, line: dict[str, Any]) -> None:
    text = _as_line(line)
    before = path.read_bytes() if path.exists() else b""
    if text not in before.splitlines(keepends=True):
        write_bytes_atomically(path, before + b"\n" * (not before.endswith(b"\n") and bool(before)) + text)


@contextmanager
def _without_lines(listing: Listing, pictures: Sequence[Picture]) -> Iterator[None]:
    """Takes the lines about pictures out of the metadata.jsonl that they were read from, when the block has moved the
    pictures. What is left is written before it: on a full disk nothing is moved."""
    with ExitStack() as stack:
        for path, lines in _other_lines(listing, pictures).items():
            write_durably(stack.enter_context(replacing(path)), lines)
        yield


def _other_lines(listing: Listing, pictures: Sequence[Picture]) -> dict[Path, list[bytes]]:
    """The lines about other pictures, of each file that has one about these."""
    numbers: dict[Path, set[int]] = {}
    names: dict[Path, set[str]] = {}
    for each in pictures:
        path = listing.place.path / each.path
        if not each.away and each.path in listing.found.words.lines:
            file, number = listing.found.words.lines[each.path]
            numbers.setdefault(listing.place.path / file, set()).add(number)
        elif each.away and _line(listing, each):
            names.setdefault(path.with_name(METADATA), set()).add(path.name)
    found = {
        path: [_as_line(one) for one in _objects(path) if one.get("file_name") not in names[path]] for path in names
    }
    for path, gone in numbers.items():
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True)
        found[path] = [line for number, line in enumerate(lines, 1) if number not in gone]
    return found


def _as_line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
