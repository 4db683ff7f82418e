"""Places and files of LoRAs: the file that a folder means, its tensors and header, and the digest that it carries."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from daguerre import documents
from daguerre.errors import UserError
from daguerre.models.lora_files import numbered, peft
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE, METADATA
from daguerre.models.settings import SAFETENSORS
from daguerre.models.weights import index, seals
from daguerre.models.weights.files import read_json
from daguerre.models.weights.opening import opened


class Contents(NamedTuple):
    """Tensors and header of a file, or of a folder of peft's."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    numbers: dict[str, Any]
    """peft's configs, by component and key joined by a dot; empty where there are none."""


def find(path: Path) -> Path:
    """The file of a LoRA: itself, or the one in a run's folder or in what it exports; a folder of peft's, and a config
    of Stability's code that names the file, as they are. UserError without a file."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: there is no such file", code="missing")
        return path
    for place in (path, path / "adapter", path / "pipeline"):  # runs of older versions have it in pipeline/
        inner = sorted(each for each in place.iterdir() if each.is_dir()) if place.is_dir() and place != path else []
        own = _in(place)  # beside it folders hold the same for peft
        found = [own] if own else [file for folder in inner if (file := _in(folder))]
        if len(found) > 1:
            folders = ", ".join(str(each if each.is_dir() else each.parent) for each in found)
            raise UserError(f"{path} holds several LoRAs: give one of {folders}", code="conflict")
        if found:
            return found[0]
    raise UserError(f"{path} holds no LoRA: {_instead(path)}", code="missing")


def _in(folder: Path) -> Path | None:
    """The file of a LoRA in a folder; kohya's first, whose strength every program reads the same way."""
    named = next((folder / name for name in (KOHYA_FILE, DIFFUSERS_FILE) if (folder / name).is_file()), None)
    return named or (folder if peft_folders(folder) else None)


def _instead(path: Path) -> str:
    """The use of a folder without a LoRA, as a part of a message."""
    for place in (path, path / "adapter", path / "pipeline"):
        if index.find(place) is not None:
            return "it is a whole model, and `daguerre convert extract` makes a LoRA of its difference from a base"
        if (config := place / "config.json").is_file() and b"ControlNetModel" in config.read_bytes():
            return f"it is a ControlNet, which `daguerre generate` takes as controlnets='{{{path}: 1}}'"
    return "give a .safetensors file, or the folder of a LoRA's run"


def peft_folders(folder: Path) -> list[Path]:
    """The folders of components in peft's layout: below a folder, or itself."""
    inner = sorted(path.parent for path in folder.glob(f"*/{peft.WEIGHTS}"))
    return inner or ([folder] if (folder / peft.WEIGHTS).is_file() else [])


def files_of(place: Path) -> list[Path]:
    """The files of tensors of what `find` gives."""
    if (config := numbered.config(place)) is not None:
        return [config.file]
    return [folder / peft.WEIGHTS for folder in peft_folders(place)] if place.is_dir() else [place]


def contents_of(place: Path) -> Contents:
    """All of a file, mapped from it, or of a folder of peft's. UserError for one that is damaged, or pickled."""
    if place.is_dir():
        tensors, numbers = dict[str, Tensor](), dict[str, Any]()
        for folder in peft_folders(place):
            own = _file(folder / peft.WEIGHTS).tensors
            tensors |= {f"{folder.name}.{name.removeprefix(peft.STEM)}": value for name, value in own.items()}
            numbers |= {f"{folder.name}.{key}": v for key, v in read_json(folder / peft.CONFIG).items()}
        return Contents(tensors, {}, numbers)
    return _file(*files_of(place))


def _file(path: Path) -> Contents:
    if path.suffix not in SAFETENSORS:
        raise UserError(f"{path}: only .safetensors files are read: others can run code when they are opened")
    seals.check(path)
    with opened(path) as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    try:
        numbers = documents.parse(metadata.get(METADATA, "{}"))
    except ValueError as error:
        raise UserError(f"{path}: {METADATA} in its header cannot be read: {error}", code="damaged") from error
    if not isinstance(numbers, dict):
        raise UserError(f"{path}: {METADATA} in its header is not a JSON object", code="damaged")
    return Contents(tensors, metadata, numbers)


def notices(place: Path) -> list[str]:
    """A line for each file of another program whose header has the digest of other tensors. It is used: programs that
    merge or rename tensors often copy the header as it is. Of their digests sd-scripts' alone is that of the file's
    bytes: OneTrainer's `modelspec.hash_sha256` is of tensors in another order."""
    found = []
    for path in files_of(place):
        with opened(path) as file:
            metadata = file.metadata() or {}
        told = metadata.get(seals.KOHYA_DIGEST)
        if told and seals.VERSION not in metadata and seals.payload(path) != told.lower():
            found.append(
                f"{path}: its tensors are not those that its header has the SHA-256 of ({seals.KOHYA_DIGEST}): a "
                "program has changed it and kept the header, or it is damaged"
            )
    return found
