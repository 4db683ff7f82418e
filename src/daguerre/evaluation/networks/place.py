"""Places of feature networks: files and folders of this machine, or of the hub's local cache, and their digests.

Nothing is downloaded: without weights the refusal says which file is needed and how to get it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import huggingface_hub
from pydantic import Field

from daguerre import digests
from daguerre.errors import UserError
from daguerre.models.weights.file_digests import sha256
from daguerre.settings import ADDRESS, Settings

NetworkName = Literal["inception", "clip", "dinov2", "lpips"]
_DIGITS = 8


class NetworkPlace(Settings):
    """A feature network."""

    path: Annotated[str, ADDRESS] = Field(min_length=1)
    """File or folder of its weights, or `OWNER/NAME` (`OWNER/NAME/FILE`) of the hub, if it is in the local cache; for
    inception also `random`: weights without training, for tests of a set-up."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{8,64}$")
    """SHA-256 of the weights, or its first digits: others are refused. Results record it in any case."""

    def checked(self, found: str) -> str:
        """The digest of the weights that are there. UserError if others are asked for."""
        check_digest(self.path, found, self.digest)
        return found


def check_digest(place: str, found: str, wanted: str | None) -> None:
    """UserError where a place has the weights `found`, and others are asked for, by a digest or its first digits."""
    if wanted is not None and not found.startswith(wanted):
        raise UserError(f"{place} has the weights {found}, and digest={wanted} asks for others", code="changed")


def short(digest: str) -> str:
    """The digits of a digest that stand in the name of a metric."""
    return digest[:_DIGITS]


def file_of(place: NetworkPlace, name: str, published: str, size_bytes: int) -> tuple[Path, str]:
    """The weights file of a place, and its digest. UserError without a file."""
    path = Path(place.path).expanduser()
    if not path.is_file() and place.path.count("/") == 2 and not path.is_absolute():
        repository, _, inner = place.path.rpartition("/")
        cached = huggingface_hub.try_to_load_from_cache(repository, inner)
        path = Path(cached) if isinstance(cached, str) else path
    if not path.is_file():
        raise missing(place, name, f"the file {published} ({size_bytes / 1e6:.0f} MB)")
    return path, place.checked(sha256(path))


def folder_of(place: NetworkPlace, name: str, published: str) -> Path:
    """The folder of a place: a local one, or a snapshot in the hub's cache. UserError where neither exists."""
    path = Path(place.path).expanduser()
    if path.is_dir():
        return path
    if place.path.count("/") == 1 and not path.is_absolute():
        try:
            return Path(huggingface_hub.snapshot_download(place.path, local_files_only=True))
        except (OSError, ValueError):
            pass  # told below
    raise missing(place, name, f"the folder of {published}")


def missing(place: NetworkPlace, name: str, what: str) -> UserError:
    """The refusal of a network without weights."""
    return UserError(
        f"networks.{name}.path={place.path}: there is no such file here, and nothing is downloaded by itself. Needed "
        f"is {what}: download it (a repository of the hub: `daguerre fetch`), and give its place (docs/evaluate.md)",
        code="missing",
        setting=f"networks.{name}.path",
    )


def digest_of_files(folder: Path) -> str:
    """SHA-256 of the safetensors files of a folder, one after the other by name, hex. UserError without any."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no safetensors file: no other weights are read", code="missing")
    return digest_of(paths)


def digest_of(paths: Sequence[Path]) -> str:
    """SHA-256 of files, one after the other, hex; that of a single one is remembered."""
    return sha256(paths[0]) if len(paths) == 1 else digests.sha256(paths)
