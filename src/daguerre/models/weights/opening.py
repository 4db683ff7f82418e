"""Opens files of tensors in safetensors, as something to read names, shapes or single tensors of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from daguerre.errors import UserError
from daguerre.regular import check_regular


@contextmanager
def opened(path: Path, mapped: bool = True) -> Iterator[Any]:
    """The open file of tensors, which are mapped from it, or read as each is asked for. UserError for one that is
    damaged, and for what is no file: a pipe would be waited for without end."""
    try:
        check_regular(path)
        with safe_open(path, "pt", device="cpu", backend="mmap" if mapped else "pread") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as safetensors: {error}. Copy the file again", code="damaged")


@dataclass(frozen=True, eq=False)
class Slice:
    """A tensor of a file, which `[...]` reads, also after the file was closed. UserError where it is damaged."""

    path: Path
    own: Any

    def get_shape(self) -> list[int]:
        found: list[int] = self.own.get_shape()
        return found

    def get_dtype(self) -> str:
        return str(self.own.get_dtype())

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.own[index]
        except (SafetensorError, OSError) as error:
            raise damaged(self.path, error) from error
