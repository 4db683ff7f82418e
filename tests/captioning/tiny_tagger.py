"""A tagger as an ONNX file of some hundred bytes: the mean colour of a picture, times a matrix, through a sigmoid.

The file is written field by field (onnx.proto of ONNX 1.16), as the package that writes such files is not among ours.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

TAGS = [
    ("general", "9"), ("sensitive", "9"), ("1girl", "0"), ("long_hair", "0"), ("o_o", "0"), ("hatsune_miku", "4"),
]  # fmt: skip
WEIGHTS = np.array([[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, -1, 0], [0.1, 0.2, 0, 0, 0, 1]]) / 40
"""1girl by blue, long_hair by green, hatsune_miku by red; the ratings by red."""


def _number(value: int) -> bytes:
    found = b""
    while True:
        value, low = value >> 7, value & 127
        found += bytes([low | (128 if value else 0)])
        if not value:
            return found


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(data)) + data


def _value(name: str, dims: list[int | str]) -> bytes:
    shape = b"".join(_field(1, _field(1, d) if isinstance(d, int) else _field(2, d)) for d in dims)
    return _field(1, name) + _field(2, _field(1, _field(1, 1) + _field(2, shape)))


def _node(kind: str, inputs: list[str], output: str, attributes: bytes = b"") -> bytes:
    return b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, kind) + attributes


def write(folder: Path, weights_3T: np.ndarray, side: int = 8, dims: list[int | str] | None = None) -> Path:
    """The folder with model.onnx and selected_tags.csv; the matrix is for blue, green and red."""
    folder.mkdir(exist_ok=True)
    tensor = b"".join(_field(1, d) for d in weights_3T.shape) + _field(2, 1) + _field(8, "w")
    tensor += _field(9, weights_3T.astype("<f4").tobytes())
    axes = _field(5, _field(1, "axes") + _field(8, 1) + _field(8, 2) + _field(20, 7))
    keep = _field(5, _field(1, "keepdims") + _field(3, 0) + _field(20, 2))
    nodes = [
        _node("ReduceMean", ["x"], "mean", axes + keep),
        _node("MatMul", ["mean", "w"], "logits"),
        _node("Sigmoid", ["logits"], "y"),
    ]
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, "tagger") + _field(5, tensor)
    graph += _field(11, _value("x", dims or ["n", side, side, 3])) + _field(12, _value("y", ["n", weights_3T.shape[1]]))
    (folder / "model.onnx").write_bytes(_field(1, 8) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 13)))
    lines = [f"{i},{name},{category},1" for i, (name, category) in enumerate(TAGS)]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *lines]) + "\n")
    return folder


def of_colours(folder: Path) -> Path:
    """A tagger that reads `WEIGHTS`."""
    return write(folder, WEIGHTS)
