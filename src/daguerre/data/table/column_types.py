"""What a table's columns hold, as far as it matters: bytes, pictures, text, numbers; what `datasets` notes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import types


def hugging_face_features(schema: pa.Schema) -> Mapping[str, Any]:
    """{column: feature} as the `datasets` library notes it in a table's metadata; {} where it does not."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = noted["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {k: v for k, v in features.items() if isinstance(v, dict)} if isinstance(features, dict) else {}


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds bytes."""
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def is_struct(kind: pa.DataType) -> bool:
    """Whether a column holds pictures as Hugging Face writes them: {bytes, path}."""
    if not types.is_struct(kind):
        return False
    parts = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return "bytes" in parts and is_bytes(parts["bytes"])


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers or truth values."""
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a column can be metadata."""
    return is_number(kind) or is_text(kind)


def said(kind: pa.DataType) -> str:
    """What a column holds, in words."""
    for name, fits in _KINDS:
        if fits(kind):
            return name
    return "numbers" if is_number(kind) else str(kind)


_KINDS: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("bytes", is_bytes),
    ("{bytes, path}", is_struct),
    ("text", is_text),
    ("whole numbers", types.is_integer),
)


def listed(schema: pa.Schema) -> str:
    """The columns with what they hold, for messages."""
    return ", ".join(f"{f.name} ({said(f.type)})" for f in schema) or "none"


def is_class_label(feature: Mapping[str, Any]) -> bool:
    """Whether a feature is class labels with names."""
    return feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)


def can_label(kind: pa.DataType) -> bool:
    """Whether a column can hold class labels."""
    return types.is_integer(kind) or is_text(kind)
