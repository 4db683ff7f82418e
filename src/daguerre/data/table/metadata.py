"""The other columns of a table as metadata: what filters can use of them, and what a record holds.

In tables without types (CSV) what looks like a number is one, cell by cell.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from daguerre.data.index.file import TEXT_LIMIT
from daguerre.data.table.columns import is_text

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
EMPTY = r"^(|nan|null|none|na|n/a)$"
TRUTH = r"^(true|false)$"
"""What cells of a table without types say, once white space is taken off."""


@dataclass
class Gathered:
    """Metadata of the rows that are kept, part by part."""

    names: tuple[str, ...]
    typed: bool
    sizes: list[int] = field(default_factory=list)
    """Rows of each part."""
    found: dict[tuple[str, str], dict[int, pa.Array]] = field(default_factory=dict)
    """{("n" or "s", name): {part: column}}."""
    not_kept: set[str] = field(default_factory=set)

    def take(self, batch: pa.RecordBatch) -> None:
        """Adds a part; a name with a long text in it is dropped from all."""
        for name in set(self.names) & set(batch.schema.names) - self.not_kept:
            arrays = filterable(batch.column(name), self.typed)
            for kind, array in arrays.items():
                self.found.setdefault((kind, name), {})[len(self.sizes)] = array
            if not arrays:
                self.not_kept.add(name)
                for kind in "ns":
                    self.found.pop((kind, name), None)
        self.sizes.append(batch.num_rows)

    def columns(self) -> dict[str, pa.Array]:
        """`n:NAME` and `s:NAME`, as index files hold them."""
        whole: dict[str, pa.Array] = {}
        for name in self.names:
            number, text = self._whole("n", name), self._whole("s", name)
            if number is not None:
                whole[f"n:{name}"] = number
            if text is not None and (number is None or text.null_count < len(text)):
                whole[f"s:{name}"] = text
        return whole

    def _whole(self, kind: str, name: str) -> pa.Array | None:
        parts = self.found.pop((kind, name), None)
        if parts is None:
            return None
        of = pa.float64() if kind == "n" else pa.string()
        return pa.concat_arrays([parts.get(i, pa.nulls(size, of)) for i, size in enumerate(self.sizes)])


def filterable(column: pa.Array, typed: bool) -> dict[str, pa.Array]:
    """{"n": numbers, "s": texts} of a metadata column, as far as filters can use it; {} where they cannot."""
    if not is_text(column.type):
        return {"n": _numbers(column)}
    text, found = text_of(column), {}
    if not typed:
        text, number = _told_apart(text)
        found = {"n": number} if number.null_count < len(number) else {}
    longest = pc.max(pc.utf8_length(text)).as_py() or 0
    if longest > TEXT_LIMIT:
        return {}
    return {**found, "s": text} if typed or text.null_count < len(text) or not found else found


def _numbers(column: pa.Array) -> pa.Array:
    """float64; null where it is not finite."""
    if types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    number = column.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_finite(number), number, pa.scalar(None, pa.float64()))


def _told_apart(text: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The texts and the numbers of a column of a table without types."""
    nothing = pa.scalar(None, pa.string())
    trimmed = pc.utf8_trim_whitespace(text)
    text = pc.if_else(pc.match_substring_regex(trimmed, EMPTY, ignore_case=True), nothing, text)
    truth = pc.match_substring_regex(trimmed, TRUTH, ignore_case=True)
    digits = pc.if_else(truth, pc.if_else(pc.starts_with(trimmed, "t", ignore_case=True), "1", "0"), trimmed)
    is_number = pc.or_(truth, pc.match_substring_regex(trimmed, NUMBER))
    number = _numbers(pc.if_else(is_number, digits, nothing).cast(pa.float64()))
    return pc.if_else(is_number, nothing, text), number


def metadata_of(value: Any, typed: bool) -> Any:
    """A cell as a record's metadata holds it: in a table without types, what looks like a number is one."""
    if typed or not isinstance(value, str):
        return value
    text = value.strip()
    if re.search(EMPTY, text, re.IGNORECASE):
        return None
    if re.search(TRUTH, text, re.IGNORECASE):
        return text.lower() == "true"
    if re.search(NUMBER, text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return value


def text_of(column: pa.Array) -> pa.Array:
    """A column of text as plain strings; null where it is no UTF-8."""
    plain = (
        column.cast(pa.binary()) if not types.is_dictionary(column.type) else column.cast(pa.string()).cast(pa.binary())
    )
    try:
        return plain.cast(pa.string(), safe=True)
    except pa.ArrowInvalid:
        return pa.array([_decoded(value) for value in plain.to_pylist()], pa.string())


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return None
