"""The contract of captioners: a file of this folder is one when it defines

    class Settings(CaptionerSettings)                                # torch-free; `name` narrowed to the file's name
    def load(settings: Settings, device: str) -> Captioner           # UserError where its network is missing

and is named in `daguerre caption FOLDER with=NAME`. Settings of one that computes with a network start from
`NetworkSettings`: its weights are of a folder of this machine or of the hub (`folder_of`), by digest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Protocol

import huggingface_hub
from PIL import Image
from pydantic import Field

from daguerre.errors import UserError
from daguerre.evaluation.networks.place import check_digest, digest_of
from daguerre.settings import ADDRESS, Choice


class CaptionerSettings(Choice):
    """Base of the `Settings` of captioners."""

    name: str
    """Name of the captioner."""


class NetworkSettings(CaptionerSettings):
    """Base of the `Settings` of captioners that compute with a network."""

    published: ClassVar[str]
    """Where its weights are published."""
    files: ClassVar[tuple[str, ...]] = ("*.json", "*.txt", "*.safetensors")
    """Files of the hub that are fetched."""
    weights: ClassVar[str] = "*.safetensors"
    """Those with the weights, which the digest is of."""

    path: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """Folder of its network, or `OWNER/NAME` of the hub. null: as it is published."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{8,64}$")
    """SHA-256 of its weights, or the first digits: others are refused."""


class Captioner(Protocol):
    """Says what is in images."""

    def captions(self, images: Sequence[Image.Image]) -> list[dict[str, str]]:
        """Of each image, RGB or RGBA and upright, the captions by field; the first field is its usual one."""


def folder_of(settings: NetworkSettings) -> Path:
    """The folder of a captioner's network, fetched from the hub where it is named by `OWNER/NAME`. UserError where it
    cannot be had, or has other weights than `digest` asks for."""
    place = settings.path or settings.published
    folder = Path(place).expanduser()
    if not folder.is_dir() and place.count("/") == 1 and not folder.is_absolute():
        try:
            folder = Path(huggingface_hub.snapshot_download(place, allow_patterns=[*settings.files]))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{place} cannot be fetched from the hub ({type(error).__name__}): give path=FOLDER with its files",
                code="unreachable",
                setting="path",
            ) from error
    weights = sorted(folder.glob(settings.weights)) if folder.is_dir() else []
    if not weights:
        raise UserError(
            f"{settings.name}: {place} has no {settings.weights}: give path=FOLDER or path=OWNER/NAME, such as "
            f"{settings.published}",
            code="missing",
            setting="path",
        )
    if settings.digest is not None:  # gigabytes, of which nobody else asks for the digest
        check_digest(place, digest_of(weights), settings.digest)
    return folder
