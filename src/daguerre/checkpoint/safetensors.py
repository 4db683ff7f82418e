"""Tensors to and from the safetensors format, as a stream of chunks that needs no second copy in memory.

The library's own writer wants all tensors as one byte string or syncs nothing and gives no digest, so the writing
(a JSON header, then raw little-endian data) is here; reading is the library's. Nothing here touches a file.
Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_NAMED = {name: dtype for dtype, name in _DTYPES.items()}


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """The format's name of a dtype. ValueError, naming the tensor, for one that it lacks."""
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {key!r} is {dtype}, which safetensors cannot hold")
    return _DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that the format calls so."""
    return _NAMED[name]


@dataclass(frozen=True)
class Later:
    """A tensor that is made when it is written, so that a large file needs the memory of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def encode(tensors: Mapping[str, Tensor | Later], metadata: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Chunks of bytes that together are a safetensors file; equal tensors give equal bytes.

    Any device, layout in memory and sharing between tensors: each is written as its own contiguous values. `metadata`
    goes into the header. ValueError for a dtype that the format lacks.
    """
    # Widest elements first: every tensor then starts at a multiple of its element size.
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for key in order:
        tensor, begin = tensors[key], end
        end = begin + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[key] = {
            "dtype": dtype_name(tensor.dtype, key),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return chain([len(text).to_bytes(8, "little") + text], (_raw(tensors[key]) for key in order))


def _raw(tensor: Tensor | Later) -> Any:
    if isinstance(tensor, Later):
        made = tensor.make()
        assert (made.dtype, tuple(made.shape)) == (tensor.dtype, tensor.shape), "a tensor is what it was said to be"
        tensor = made
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    From bytes, not from a mapped file: a mapped file that is truncated while in use kills the process with SIGBUS.
    """
    return load_tensors(data)
