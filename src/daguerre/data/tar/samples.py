"""Samples from the members of a tar, and their texts.

A sample is an image and everything that shares its name up to the first dot (webdataset's key), wherever in the
archive it stands. Where one key holds several images (`a.1.jpg`, `a.2.jpg`), each has the members of its own name.
`a.mask.png` next to `a.jpg` is not a sample, but a further image of it.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from daguerre import documents
from daguerre.data import alternatives, skipped
from daguerre.data.images import kinds
from daguerre.data.leftovers import LEFTOVER, is_leftover
from daguerre.data.tar.reader import Member
from daguerre.unicode import NO_TEXT, is_text, may_hold_halves, mended

EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "jpeg": ("jpg", "jpeg", "jfif", "jpe"),
    "png": ("png",),
    "webp": ("webp",),
    "gif": ("gif",),
    "bmp": ("bmp",),
    "tiff": ("tif", "tiff"),
}
"""How the members of each image format are called."""
_OTHER_IMAGES = frozenset({"jxl", "avif", "heic", "heif", "jp2", "ico", "psd", "svg", "ppm", "pgm"})
_PLAIN = frozenset({"txt", "text", "caption", "captions", "cls", "prompt", "tags"})
"""Members that are text; others are, if they look like it."""
CAPTIONS = ("caption", "text", "captions", "txt", "prompt")
"""Fields with the usual caption where there is no member txt or text: keys of the JSON, then members; the first that
holds one counts."""
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
NAME_LETTERS = 4096
"""Longest name of a member that is read: no file system has longer paths."""
PARTS_LIMIT = 256
"""Most members of a sample other than its image."""
TEXT_BYTES = 1 << 20
JSON_BYTES = 1 << 24
ID = "daguerre_id"
"""Key in a sample's JSON that holds its id, as `data pack` writes it."""


class Sample(NamedTuple):
    """An image and what belongs to it."""

    key: str
    """The name of the image without its last suffix."""
    image: Member
    parts: tuple[tuple[str, Member], ...]
    """The other members, by field (their extension in small letters), sorted."""
    images: tuple[tuple[str, Member], ...] = ()
    """The further images, by name (of `kinds.KINDS`), sorted."""


class Unusable(Exception):
    """The reason why a sample is left out."""


def joined(members: Iterable[Member], formats: Iterable[str], counts: skipped.Counts) -> list[Sample]:
    """The samples of an archive in the order of their images. What belongs to none is counted, by reason."""
    suffixes = frozenset(suffix for name in formats for suffix in EXTENSIONS[name])
    samples = [
        sample
        for key, group in _groups(_runs(members, counts), suffixes, counts)
        for sample in _samples(key, group, suffixes, counts)
    ]
    return sorted(samples, key=lambda sample: sample.image.start)


def _runs(members: Iterable[Member], counts: skipped.Counts) -> dict[str, list[dict[str, Member]]]:
    """By key, the runs of members that stand together; as in webdataset, whose rules these are."""
    runs: dict[str, list[dict[str, Member]]] = {}
    last = None
    for member in members:
        if len(member.name) > NAME_LETTERS:
            skipped.add(
                counts, f"member with a name of more than {NAME_LETTERS:,} letters", printable(member.name[:80])
            )
            continue
        found = _KEY.match(member.name)
        if is_leftover(member.name, in_archive=True):
            skipped.add(counts, LEFTOVER, printable(member.name), damage=False)
            continue
        if _META.match(member.name):
            skipped.add(counts, "webdataset's own member (__NAME__)", printable(member.name), kept=True)
            continue
        if found is None:
            skipped.add(counts, "member without an extension", printable(member.name), kept=True)
            continue
        key, extension = found[1], printable(found[2].lower())
        if key != last:
            runs.setdefault(key, []).append({})
            last = key
        run = runs[key][-1]
        if extension in run:
            skipped.add(counts, "duplicate: member with the same name as an earlier one", printable(member.name))
        else:
            run[extension] = member
    return runs


def _groups(
    runs: Mapping[str, list[dict[str, Member]]], suffixes: frozenset[str], counts: skipped.Counts
) -> Iterator[tuple[str, dict[str, Member]]]:
    """The members of one key together. A run that is complete and repeats names is a sample of its own."""
    for key, parts in runs.items():
        together, names = [parts[0]], set(parts[0])
        for run in parts[1:]:
            twins = names & run.keys()
            if twins and len(run) > 1 and any(_suffix(extension) in suffixes for extension in run):
                yield key, _joined(together)
                together, names = [run], set(run)
                continue
            for extension in twins:
                name = printable(run[extension].name)
                skipped.add(counts, "duplicate: member with the same name as an earlier one", name)
            together.append(run)
            names.update(run)
        yield key, _joined(together)


def _joined(runs: Sequence[Mapping[str, Member]]) -> dict[str, Member]:
    """The members of several runs; of two with one name the first."""
    joined: dict[str, Member] = {}
    for run in reversed(runs):
        joined.update(run)
    return joined


def _samples(
    key: str, group: Mapping[str, Member], suffixes: frozenset[str], counts: skipped.Counts
) -> Iterator[Sample]:
    """The images of one key, each with its own members; of those of a single image all are."""
    images: dict[str, Member] = {}
    others: dict[str, Member] = {}
    for extension, member in group.items():
        if _suffix(extension) not in suffixes:
            others[extension] = member
        elif images.setdefault(extension.rpartition(".")[0], member) is not member:
            skipped.add(counts, "duplicate: second image of one name", printable(member.name))
    beside: dict[str, dict[str, Member]] = {}
    for stem in list(images):
        of, _, name = stem.rpartition(".")
        if name in kinds.BESIDE and of in images:
            member = images.pop(stem)
            kind = kinds.BESIDE[name]
            if beside.setdefault(of, {}).setdefault(kind, member) is not member:
                skipped.add(counts, f"duplicate: second {kinds.KINDS[kind].word} of one image", printable(member.name))
    parts: dict[str, dict[str, Member]] = {stem: {} for stem in images}
    spare = []
    for extension, member in others.items():
        owner = _owner(extension, images)
        if owner is None:
            spare.append((extension, member))
        else:
            parts[owner][extension[len(owner) + 1 :] if owner else extension] = member
    for extension, member in spare:
        if len(images) != 1 or parts[next(iter(images))].setdefault(extension, member) is not member:
            _count_spare(extension, member, counts)
    for stem, image in images.items():
        name = f"{key}.{stem}" if stem else key
        own = tuple(sorted(beside.get(stem, {}).items()))
        yield Sample(printable(name), image, tuple(sorted(parts[stem].items())), own)


def _count_spare(extension: str, member: Member, counts: skipped.Counts) -> None:
    suffix = _suffix(extension)
    if suffix in _OTHER_IMAGES or any(suffix in known for known in EXTENSIONS.values()):
        skipped.add(counts, "image in a format that is not read (data.formats)", printable(member.name))
    else:
        skipped.add(counts, "member without an image of its name", printable(member.name), kept=True)


def _suffix(extension: str) -> str:
    return extension.rpartition(".")[2]


def _owner(extension: str, stems: Container[str]) -> str | None:
    """The longest of `stems` that an extension begins with, up to a dot; the empty one fits all. Each is looked up: a
    name may begin the names of all images of a shard."""
    dot = extension.rfind(".")
    while dot >= 0:
        if extension[:dot] in stems:
            return extension[:dot]
        dot = extension.rfind(".", 0, dot)
    return "" if "" in stems else None


def printable(name: str) -> str:
    """A name with any byte that is no UTF-8 written as an escape."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Words:
    """Texts and metadata from the other members of a sample."""

    texts: Mapping[str, str]
    """Every text member by its field, every text of the JSON by its key, and `text`: the usual caption, where there is
    one (the member txt or text, else the JSON's `caption` or `text`)."""
    metadata: Mapping[str, Any]
    """The object of the JSON."""
    used: tuple[str, ...]
    """The fields that could be read: members that are no text (arrays) are not used."""


def words(parts: Mapping[str, bytes]) -> Words:
    """Reads the other members of a sample. `Unusable` where one that must be text, or JSON, is not.

    JSON may hold strings that are no text: none of these is among the texts, and metadata has them mended.
    """
    if len(parts) > PARTS_LIMIT:
        raise Unusable(f"image with more than {PARTS_LIMIT} members of its name")
    metadata: Mapping[str, Any] = {}
    members: dict[str, str] = {}
    used = []
    for name, data in parts.items():
        if name == "json":
            metadata = _document(data)
            used.append(name)
        elif (text := _text(name, data)) is not None:
            members[name] = text
            used.append(name)
    said: dict[str, str] = {}
    for key, value in metadata.items():
        said |= alternatives.of_value(key, value)
    texts: dict[str, str] = {}
    for name, text in members.items():
        found = alternatives.of_value(name, text)
        texts |= {name: text} if not text.strip() or found == {name: text.strip()} else found  # spaces are kept
    if member := next((name for name in ("txt", "text") if members.get(name, "").strip()), None):
        further = {name: text for name, text in metadata.items() if isinstance(text, str)}  # as `data pack` writes them
        usual = alternatives.of({**further, **alternatives.of_value("text", members[member])}, "text")
        if member not in texts:
            raise Unusable(alternatives.trouble(members[member]))
    else:
        each = (alternatives.of(fields, name) for fields in (said, texts) for name in CAPTIONS)
        usual = next(filter(None, each), [])
    if not all(map(is_text, usual)):
        raise Unusable(NO_TEXT)
    if may_hold_halves(parts.get("json", b"")):
        said = {mended(key): value for key, value in said.items() if is_text(value)}
        metadata = mended(metadata)
    own = alternatives.of_value("text", usual)  # in place of all that the JSON calls so
    texts = {name: text for name, text in {**said, **texts}.items() if not re.fullmatch(r"text(\.\d+)?", name)} | own
    return Words(texts, metadata, tuple(used))


def _document(data: bytes) -> Mapping[str, Any]:
    if len(data) > JSON_BYTES:
        raise Unusable(f"JSON of more than {JSON_BYTES:,} bytes")
    try:
        document = documents.parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Unusable("JSON that is not UTF-8") from None
    except ValueError:
        raise Unusable("JSON that does not parse") from None
    if not isinstance(document, dict):
        raise Unusable("JSON that is not an object")
    return document


def _text(name: str, data: bytes) -> str | None:
    """A member as text; None for one that is not text and need not be."""
    trouble, text = "", None
    if len(data) > TEXT_BYTES:
        trouble = f"caption of more than {TEXT_BYTES:,} bytes"
    else:
        try:
            text = data.decode("utf-8-sig")
            trouble = "caption with zero bytes in it" if "\0" in text else ""
        except UnicodeDecodeError:
            trouble = "caption that is not UTF-8"
    if trouble and _suffix(name) in _PLAIN:
        raise Unusable(trouble)
    return None if trouble else text
