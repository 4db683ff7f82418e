"""The columns of a table that are the image, its caption, its size and its metadata.

Holds the settings that all tables share and the choice by them, or by the columns' names and types where they say
nothing. No torch here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Self

import pyarrow as pa
from pyarrow import types
from pydantic import Field, model_validator

from daguerre import unicode
from daguerre.data import class_labels
from daguerre.data.class_labels import Classes, Labels
from daguerre.data.images import kinds
from daguerre.data.images.kinds import ControlName, ReferenceName
from daguerre.data.settings import SourceSettings
from daguerre.data.table.pairs import PICK_A_PIC
from daguerre.errors import Code, UserError
from daguerre.settings import Unused
from daguerre.types import CONTROLS, REFERENCES

CAPTION = "text"
"""The caption field that `caption_column` is."""
ID = "daguerre_id"
"""A column of whole numbers with this name holds the samples' ids."""
CAPTION_NAMES = ("text", "caption", "txt", "prompt", "captions")
LABEL_NAMES = ("label", "labels", "cls", "class", "class_id", "target")
ADDRESS_NAMES = ("url", "image_url", "img_url", "uri", "image_uri")
PATH_NAMES = (
    "image",
    "img",
    "image_path",
    "img_path",
    "path",
    "file_name",
    "filename",
    "file",
    "filepath",
    "image_file",
)
"""What columns are usually called, in small letters: none is guessed beyond these."""
CONTROL_COLUMN = "conditioning_image"
"""diffusers' name of the column of control images."""
IMAGE = "bytes, {bytes, path}, a path or an address"


class TableSettings(SourceSettings):
    """Settings that parquet, CSV and Hugging Face's tables share."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        *SourceSettings.unused_when,
        Unused(
            ("caption_column", "idx_to_prompt"),
            lambda own: own.captions.text is not None,
            "no effect, as captions.text is the caption of every image",
        ),
        Unused(
            ("caption_column", "idx_to_prompt"),
            lambda own: CAPTION not in own.captions.used,
            "no effect, as captions.fields does not name 'text', the field that this option uses",
        ),
    )

    image_column: str | None = None
    """Column with the images: the bytes of an image file, `{bytes, path}` as Hugging Face writes it, a path (from the
    table's folder) or an address (http, https, s3, gs). Default: the only column that can be one, by type or name."""
    caption_column: str | None = None
    """Column of the caption field `text`. Default: the only column called text, caption, txt, prompt or captions in any
    case, else the only column of class labels. Further fields of `captions.fields` are columns by their own names."""
    mask_column: str | None = Field(None, exclude_if=lambda column: column is None)
    """Column with the masks, of the same kinds as images; empty cells for images without one. For
    `objective.mask`."""
    control_column: str | dict[ControlName, str] | None = Field(None, exclude_if=lambda column: column is None)
    """Column with the control images, of the same kinds as images; or a column for each of several, `{control: A,
    control_2: B}`. Default: `conditioning_image`, as in diffusers, if there is one. For adapters such as
    `controlnet`."""
    rejected_column: str | None = Field(None, exclude_if=lambda column: column is None)
    """Column with the image that people like less than the row's image, of the same kinds as images. For objectives
    that learn from pairs. Default: `jpg_0`, `jpg_1` and `label_0` are a pair as in Pick-a-Pic."""
    preference_column: str | None = Field(None, exclude_if=lambda column: column is None)
    """Column that says which image of a pair people prefer: 1 that of `image_column`, 0 that of `rejected_column`,
    which change places then; rows with 0.5, a tie, are left out and counted. Default: the first is preferred."""
    reference_column: str | dict[ReferenceName, str] | None = Field(None, exclude_if=lambda column: column is None)
    """Column with the reference images, of the same kinds as images, or of lists of them; or a column for each of
    several, `{reference: A, reference_2: B}`. Empty cells for images without one. For families that read some."""
    idx_to_prompt: Labels | None = None
    """Names of the classes, where the caption column holds class labels: a list, a map, a JSON file with either, or
    `imagenet`. Default: the names that a Hugging Face table carries."""
    width_column: str | None = None
    """Column with the widths of images at addresses, in pixels, upright; images that are here are measured instead.
    Buckets of several shapes need it."""
    height_column: str | None = None
    """The same for heights."""

    @model_validator(mode="after")
    def _columns_act(self) -> Self:
        if (self.width_column is None) != (self.height_column is None):
            raise ValueError("width_column and height_column must be set together: give both or neither")
        if self.image_column is not None and self.image_column == self.caption_column:
            raise ValueError(f"image_column and caption_column are both {self.image_column!r}: they are two columns")
        if self.preference_column is not None and None in (self.image_column, self.rejected_column):
            raise ValueError(
                "preference_column says which image of a pair is preferred: set image_column and rejected_column, too"
            )
        for setting, _, given in kinds.places(self, "column"):
            if given in (self.image_column, self.caption_column):
                raise ValueError(f"{setting}: {given!r} holds images or captions: name another column")
        return self


@dataclass(frozen=True)
class Columns:
    """The chosen columns of one data set."""

    image: str
    captions: tuple[tuple[str, str], ...]
    """(caption field, column)."""
    labels: Mapping[str, Classes] = field(default_factory=dict)
    """The classes' names, for each caption column that holds labels."""
    size: tuple[str, str] | None = None
    """Columns of height and width."""
    beside: tuple[tuple[str, str], ...] = ()
    """(name, column) of the further images."""
    pair: tuple[str, str, str] | None = None
    """Columns of a pair of images and of which one is preferred, where that is not always the first."""
    automatic: tuple[str, ...] = ()
    """What was chosen without a setting, in words."""

    @property
    def digest(self) -> str:
        """Stands for what is read: an index that was made for other columns is another one."""
        labels = {column: sorted(known.prompts.items()) for column, known in self.labels.items()}
        read: list[Any] = [self.image, self.captions, labels, self.size, *self.beside, True]  # True: as lists are read
        read += [] if self.pair is None else [self.pair]
        return blake2b(json.dumps(read).encode(), digest_size=8).hexdigest()

    @property
    def images(self) -> tuple[str, ...]:
        """The columns with images, that of the images first."""
        return (self.image, *(column for _, column in self.beside))

    @property
    def further(self) -> tuple[str, ...]:
        """The names of all images that a row may have with its image: a cell may list several reference images."""
        names = [name for name, _ in self.beside]
        return tuple(dict.fromkeys([*names, *(REFERENCES if REFERENCES[0] in names else ())]))

    @property
    def examined(self) -> tuple[str, ...]:
        """The columns by which a row can be used or not."""
        captions = (column for _, column in self.captions)
        return tuple(dict.fromkeys([*self.images, *captions, *(self.size or ()), *(self.pair or ())]))

    def metadata(self, schema: pa.Schema) -> list[str]:
        """All other columns of numbers, truth values and text."""
        taken = {*self.images, ID, *(column for name, column in self.captions if name == CAPTION)}
        return [f.name for f in schema if f.name not in taken and (_is_number(f.type) or is_text(f.type))]

    def read(self, schema: pa.Schema) -> list[str]:
        """Every column that a record is made of, in the table's order."""
        wanted = {*self.examined, *self.metadata(schema)}
        return [name for name in schema.names if name in wanted or name == ID]


def choose(schema: pa.Schema, settings: TableSettings, where: str) -> Columns:
    """The columns of the table `where`. UserError, with the columns that there are, where one is missing or unclear."""
    _check_twins(schema, where)
    automatic: list[str] = []
    features = _features(schema)
    settings = _as_pick_a_pic(schema, settings, automatic)
    image = settings.image_column
    beside = _beside(schema, settings, automatic, where)
    if image is None:
        taken = [column for _, column in beside]
        image = _only(
            [name for name in _image_candidates(schema) if name not in taken],
            "image_column",
            "an image (bytes, {bytes, path}, a path or an address)",
            schema,
            where,
        )
        automatic.append(f"images from {image!r}")
    _check_image_column(schema, image, "image_column", where)
    captions: list[tuple[str, str]] = []
    for name in settings.captions.used:
        column = settings.caption_column if name == CAPTION else name
        if column is None:
            column = _caption(schema, features, settings, image, where)
            automatic.append(f"captions from {column!r}")
        _there(schema, column, "caption_column" if name == CAPTION else "captions.fields", where)
        captions.append((name, column))
    labels = _labels(schema, features, settings, captions, where)
    size, pair = _size(schema, settings, image, where), _pair(schema, settings, where)
    return Columns(image, tuple(captions), labels, size, beside, pair, tuple(automatic))


def _as_pick_a_pic(schema: pa.Schema, settings: TableSettings, automatic: list[str]) -> TableSettings:
    """The settings with the columns of a pair where they name none and the table has those of Pick-a-Pic."""
    names = ("image_column", "rejected_column", "preference_column")
    if any(getattr(settings, name) for name in names) or not {*PICK_A_PIC} <= {*schema.names}:
        return settings
    automatic.append(f"pairs from {PICK_A_PIC[0]!r} and {PICK_A_PIC[1]!r}, the preferred one by {PICK_A_PIC[2]!r}")
    return settings.model_copy(update=dict(zip(names, PICK_A_PIC, strict=True)))


def _pair(schema: pa.Schema, settings: TableSettings, where: str) -> tuple[str, str, str] | None:
    """The columns of a pair, and of which image is preferred. UserError for one that is not there."""
    image, rejected, preference = settings.image_column, settings.rejected_column, settings.preference_column
    if image is None or rejected is None or preference is None:
        return None
    _there(schema, preference, "preference_column", where)
    kinds = [_held(schema.field(column).type) for column in (image, rejected)]
    if kinds[0] != kinds[1]:
        text = f"{where}: column {image!r} holds {kinds[0]} and {rejected!r} {kinds[1]}, so they cannot change places"
        raise _fault("data.preference_column", text, "conflict")
    return image, rejected, preference


def _beside(
    schema: pa.Schema, settings: TableSettings, automatic: list[str], where: str
) -> tuple[tuple[str, str], ...]:
    """(name, column) of the further images."""
    found = kinds.places(settings, "column")
    if (
        not settings.control_column
        and CONTROL_COLUMN in schema.names
        and CONTROL_COLUMN not in (settings.image_column, *(column for _, _, column in found))
    ):
        found.append(("control_column", CONTROLS[0], CONTROL_COLUMN))
        automatic.append(f"control images from {CONTROL_COLUMN!r}")
    for setting, _, column in found:
        _check_image_column(schema, column, setting, where)
    return tuple((name, column) for _, name, column in found)


def check(schema: pa.Schema, columns: Columns, first: pa.Schema, where: str) -> None:
    """UserError where a further table of the set lacks a chosen column, or has another type in it."""
    _check_twins(schema, where)
    for name in columns.examined:
        _there(schema, name, "path", where, "as the first table has")
        kinds = [_held(s.field(name).type) for s in (first, schema)]
        if kinds[0] != kinds[1]:
            text = f"{where}: column {name!r} holds {kinds[1]}, but {kinds[0]} in the first table"
            more = "All tables of one source must have the same columns: put the others into a source of their own"
            raise _fault("data.path", f"{text}. {more}")


def _check_image_column(schema: pa.Schema, column: str, setting: str, where: str) -> None:
    """UserError where a column is missing, or cannot hold images."""
    _there(schema, column, setting, where)
    kind = schema.field(column).type
    several = setting == "reference_column" and (types.is_list(kind) or types.is_large_list(kind))
    kind = kind.value_type if several else kind
    if not (_is_bytes(kind) or _is_struct(kind) or is_text(kind)):
        raise _unfit(schema, column, setting, "bytes, {bytes, path}, a path or an address", where)


def _image_candidates(schema: pa.Schema) -> list[str]:
    held = [f.name for f in schema if _is_bytes(f.type) or _is_struct(f.type)]
    if held:
        return held
    return [f.name for f in schema if is_text(f.type) and f.name.lower() in ADDRESS_NAMES + PATH_NAMES]


def _caption(schema: pa.Schema, features: Mapping[str, Any], settings: TableSettings, image: str, where: str) -> str:
    """The only column that can be the caption: text, or labels of classes."""
    text = [f.name for f in schema if f.name.lower() in CAPTION_NAMES and f.name != image and _holds_captions(f.type)]
    labels = [name for name in schema.names if _is_class_label(features.get(name, {}))]
    if settings.idx_to_prompt is not None:
        named = [f.name for f in schema if f.name.lower() in LABEL_NAMES and _can_label(f.type)]
        return _only(labels or named, "caption_column", "class labels", schema, where)
    return _only(text or labels, "caption_column", "a caption", schema, where)


def _labels(
    schema: pa.Schema,
    features: Mapping[str, Any],
    settings: TableSettings,
    captions: Sequence[tuple[str, str]],
    where: str,
) -> dict[str, Classes]:
    """The classes' names of the caption columns that need them."""
    found: dict[str, Classes] = {}
    for name, column in captions:
        kind, feature = schema.field(column).type, features.get(column, {})
        if settings.idx_to_prompt is not None and name == CAPTION and _can_label(kind):
            found[column] = class_labels.opened(settings.idx_to_prompt)
        elif types.is_integer(kind) and _is_class_label(feature):
            names = {str(i): str(words) for i, words in enumerate(feature["names"])}
            found[column] = Classes({label: words for label, words in names.items() if unicode.is_text(words)})
        elif types.is_integer(kind):
            text = f"column {column!r} of {where} holds whole numbers: name the classes with data.idx_to_prompt (a "
            text += f"list, a map, a JSON file, or imagenet), or choose a column of text. Columns: {_listed(schema)}"
            raise _fault("data.caption_column", text, "missing")
        elif not _holds_captions(kind):
            raise _unfit(schema, column, "caption_column", "text, or class labels with idx_to_prompt", where)
    return found


def _size(schema: pa.Schema, settings: TableSettings, image: str, where: str) -> tuple[str, str] | None:
    if settings.height_column is None or settings.width_column is None:
        return None
    for setting in ("height_column", "width_column"):
        _there(schema, getattr(settings, setting), setting, where)
    if not is_text(schema.field(image).type):
        raise UserError(
            f"data.width_column and data.height_column have no effect: column {image!r} of {where} holds the images "
            "themselves, so their sizes are known. Remove them",
            code="unused",
        )
    return settings.height_column, settings.width_column


def _only(found: list[str], setting: str, what: str, schema: pa.Schema, where: str) -> str:
    if len(found) == 1:
        return found[0]
    trouble = f"several columns can be {what}: {', '.join(found)}" if found else f"no column looks like {what}"
    text = f"{trouble}. Name one of the columns of {where}: {_listed(schema)}"
    raise _fault(f"data.{setting}", text, "conflict" if found else "missing")


def _there(schema: pa.Schema, name: str, setting: str, where: str, more: str = "") -> None:
    """UserError where a column is missing."""
    if name not in schema.names:
        text = f"{where} has no column {name!r}{more and ' ' + more}. Its columns: {_listed(schema)}"
        raise _fault(f"data.{setting}", text, "unknown")


def _unfit(schema: pa.Schema, name: str, setting: str, wanted: str, where: str) -> UserError:
    held = _held(schema.field(name).type)
    text = f"column {name!r} of {where} holds {held}, not {wanted}. Its columns: {_listed(schema)}"
    return _fault(f"data.{setting}", text)


def _fault(setting: str, text: str, code: Code = "invalid") -> UserError:
    return UserError(f"{setting}: {text}", code=code, setting=setting)


def _check_twins(schema: pa.Schema, where: str) -> None:
    """UserError where two columns have one name."""
    twins = ", ".join(sorted({repr(name) for name in schema.names if schema.names.count(name) > 1}))
    if twins:
        text = f"{where} has more than one column called {twins}: it is ambiguous. Rename one of them"
        raise _fault("data.path", text)


def _features(schema: pa.Schema) -> Mapping[str, Any]:
    """{column: feature} as the `datasets` library notes it in a table's metadata; {} where it does not."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = noted["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {k: v for k, v in features.items() if isinstance(v, dict)} if isinstance(features, dict) else {}


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _holds_captions(kind: pa.DataType) -> bool:
    return is_text(kind) or ((types.is_list(kind) or types.is_large_list(kind)) and is_text(kind.value_type))


def _is_struct(kind: pa.DataType) -> bool:
    """Says whether a column holds images as Hugging Face writes them: {bytes, path}."""
    if not types.is_struct(kind):
        return False
    parts = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return "bytes" in parts and _is_bytes(parts["bytes"])


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def _held(kind: pa.DataType) -> str:
    for name, fits in _KINDS:
        if fits(kind):
            return name
    return "numbers" if _is_number(kind) else str(kind)


_KINDS: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("bytes", _is_bytes),
    ("{bytes, path}", _is_struct),
    ("text", is_text),
    ("whole numbers", types.is_integer),
)


def _listed(schema: pa.Schema) -> str:
    """The columns with what they hold, for messages."""
    return ", ".join(f"{f.name} ({_held(f.type)})" for f in schema) or "none"


def _is_class_label(feature: Mapping[str, Any]) -> bool:
    return feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)


def _can_label(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or is_text(kind)
