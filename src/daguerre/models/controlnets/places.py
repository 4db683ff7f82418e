"""Places of ControlNets: folders of diffusers, runs, files, the hub."""

import hashlib
from pathlib import Path

from daguerre.errors import UserError
from daguerre.models.weights import resolve
from daguerre.models.weights.resolve import Options

SINGLE_FILE = "controlnet.safetensors"
"""An export's file in the names of those who made the first ControlNets of a family."""
_PICKLED = (".ckpt", ".bin", ".pt", ".pth")


def find(place: str) -> Path:
    """The folder in diffusers' layout, or the file, that a place means. UserError for neither."""
    folder = _exported(Path(place).expanduser())
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        if (folder / SINGLE_FILE).is_file():
            return folder / SINGLE_FILE
        trained = "this run has trained none" if (folder / "config.yaml").is_file() else "it has no config.json of one"
        raise UserError(
            f"{place} holds no ControlNet: {trained}. Give the run of a ControlNet, a folder of diffusers or a "
            ".safetensors file",
            code="missing",
        )
    if place.endswith(_PICKLED):
        raise UserError(
            f"{place} is pickled, and such a file can run code when it is opened: give a .safetensors file",
            code="unsupported",
        )
    if place.endswith(".safetensors"):
        return resolve.file(place, Options())
    return resolve.locate(place, {"": resolve.network("", Options())})


def digest(place: str) -> str:
    """SHA-256 of the weights of a place, hex."""
    found, sha256 = find(place), hashlib.sha256()
    for path in [found] if found.is_file() else sorted(found.glob("diffusion_pytorch_model*.safetensors")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def _exported(path: Path) -> Path:
    """The folder of a ControlNet that a run has exported, if a run's folder is meant. UserError if it has several."""
    marks = [f"adapter/{inner}{name}" for inner in ("", "*/") for name in ("config.json", SINGLE_FILE)]
    found = sorted({file.parent for mark in marks for file in path.glob(mark)})
    if len(found) > 1:
        names = ", ".join(str(each) for each in found)
        raise UserError(f"{path} has several ControlNets: give the folder of one of them, {names}", code="conflict")
    return found[0] if found else path
