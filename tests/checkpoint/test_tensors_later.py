"""Tensors that are made when they are written, and what else goes into the header."""

import json

import torch
from safetensors.torch import load

from daguerre.checkpoint.safetensors import Later, encode


def test_a_tensor_made_later_is_written_as_one_that_is_there():
    made = []

    def make():
        made.append(1)
        return torch.arange(6, dtype=torch.float16).reshape(2, 3)

    plain = {"a": torch.ones(3), "b": make(), "none": torch.empty(0)}
    later = {**plain, "b": Later(torch.float16, (2, 3), make)}
    chunks = encode(later)
    assert len(made) == 1, "nothing is made before it is written"
    data = b"".join(map(bytes, chunks))
    assert data == b"".join(map(bytes, encode(plain)))
    assert load(data)["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert load(data)["none"].shape == (0,)


def test_metadata_stands_in_the_header():
    data = b"".join(map(bytes, encode({"a": torch.ones(1)}, {"title": "Ä"})))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt", "title": "Ä"}
