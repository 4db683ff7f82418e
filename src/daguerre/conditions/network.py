"""Networks of conditions: transformers' models from local folders, and files of weights. Weights are of known digest,
and loaded once a process.

Neither torch nor transformers is imported before a network is needed. Nothing is downloaded, and no code that a file
may hold is run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from daguerre import digests, documents
from daguerre.conditions.condition import ConditionSettings
from daguerre.errors import Code, UserError
from daguerre.regular import check_regular
from daguerre.settings import ADDRESS, FREE, Settings
from daguerre.threads import made_once

_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


_OF_FEW_BITS = re.compile(
    r"(.+[._])?(weight[._](scale|absmax|quant|nested|zero|packed|format|shape|bnb).*"
    r"|scale_weight|scale_input|input_scale|SCB|comfy_quant|qweight|qzeros|scaled_fp8)"
)
"""Names of what a quantiser leaves with weights."""


class NetworkFolder(Settings):
    """A folder of a network of transformers."""

    path: Annotated[str, ADDRESS] = Field(min_length=1, json_schema_extra=FREE)
    """Folder of the network, as transformers' `save_pretrained` writes it: config.json, preprocessor_config.json and
    safetensors. It may move between two starts."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of its safetensors file, which the hub shows next to the file (of several, of one after the other). It
    must be given; a message says what it is."""


class NetworkFile(Settings):
    """A file of a network's weights."""

    path: Annotated[str, ADDRESS] = Field(min_length=1, json_schema_extra=FREE)
    """File of the weights: .safetensors; .pth, of which tensors alone are read; of some .onnx. It may move between two
    starts."""
    digest: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file, which the hub shows next to it. It must be given; a message says what it is."""


class NetworkSettings(NetworkFolder, ConditionSettings):
    """Base of the `Settings` of conditions that compute with a network."""


@dataclass(frozen=True)
class Network:
    """A network in evaluation mode, and what its preprocessor_config.json says."""

    model: Any
    processor: Mapping[str, Any]

    def predict(self, pixels_BHWC: np.ndarray, *outputs: str, **more: np.ndarray) -> list[np.ndarray]:
        """The outputs of these names, float32, for images [B, H, W, 3] float32 as `normalised` makes them."""
        import torch

        values_BCHW = torch.from_numpy(np.ascontiguousarray(pixels_BHWC.transpose(0, 3, 1, 2)))
        with torch.inference_mode():
            found = self.model(values_BCHW, **{name: torch.from_numpy(value) for name, value in more.items()})
        return [found[name].float().numpy() for name in outputs]

    def normalised(self, pixels_HWC: np.ndarray) -> np.ndarray:
        """[H, W, 3] float32 of [H, W, 3] uint8."""
        if not self.processor.get("do_normalize", True):
            return pixels_HWC.astype(np.float32) / 255
        mean, std = (np.array(self.processor.get(name, usual), np.float32) for name, usual in _IMAGENET.items())
        return (pixels_HWC.astype(np.float32) / 255 - mean) / std


def resized(values_HW: np.ndarray, height: int, width: int) -> np.ndarray:
    """[height, width] float32 by torch's bicubic filter, as transformers resizes what networks predict."""
    from torch import from_numpy
    from torch.nn.functional import interpolate

    values_BCHW = from_numpy(values_HW)[None, None]
    return interpolate(values_BCHW, (height, width), mode="bicubic", align_corners=False)[0, 0].numpy()


def opened(place: NetworkFolder, name: str, model_class: str, types: Sequence[str]) -> Network:
    """The network of the condition `name`, of a class of transformers. UserError as from `check`, or where it is
    damaged."""
    return _opened(place.path, place.digest, name, model_class, tuple(types))


@made_once(4)
def _opened(path: str, digest: str | None, name: str, model_class: str, types: tuple[str, ...]) -> Network:
    folder = _checked(path, digest, name, types)
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    _check_whole(folder, name)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = None  # a stranger's may name code that the library would fetch and run
        model, info = getattr(transformers, model_class).from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (*documents.MISREAD, StrictDataclassError) as error:
        raise fault(name, f"{folder} cannot be read as a {model_class}: {str(error)[:300]}", "damaged") from error
    if missing := sorted([*info["missing_keys"], *info["mismatched_keys"]]):
        what = f"{folder} lacks {len(missing)} of the network's weights, such as {missing[0]}"
        raise fault(name, what, "damaged")
    return Network(model.float().eval(), _document(folder / "preprocessor_config.json", name))


def _check_whole(folder: Path, name: str) -> None:
    """UserError for weights of few bits, whose numbers mean something with their scales alone."""
    from safetensors import safe_open

    if "quantization_config" in _document(folder / "config.json", name):
        raise fault(name, f"{folder} has quantised weights: take a copy of whole ones", "unsupported")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as held:
            for key in held.keys():  # noqa: SIM118
                form = held.get_slice(key).get_dtype()
                if _OF_FEW_BITS.fullmatch(key) or (key.endswith(".weight") and form[0] in "IU"):
                    what = f"{path} has {key} of {form}, a part of quantised weights: take a copy of whole ones"
                    raise fault(name, what, "unsupported")


def check(place: NetworkFolder, name: str, types: Sequence[str]) -> None:
    """UserError where the folder of a network is missing, holds one of another kind, or has other weights."""
    _checked(place.path, place.digest, name, tuple(types))


def _checked(path: str, digest: str | None, name: str, types: tuple[str, ...]) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise fault(name, f"{path!r} is not a folder (current folder: {Path.cwd()})", "missing")
    kind = _document(folder / "config.json", name).get("model_type")
    if kind not in types:
        raise fault(name, f"{path} holds a {kind}, and this condition takes {' or '.join(types)}", "unsupported")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise fault(name, f"{path} has no safetensors file: no other weights are read", "missing")
    _check_digest(files, path, digest, name)
    return folder


def _check_digest(files: Sequence[Path], path: str, digest: str | None, name: str) -> None:
    found = digests.sha256(files)
    if digest is None:
        raise fault(name, f"{path} has the weights {found}: set digest={found}, so that no others take their place")
    if digest != found:
        raise fault(name, f"{path} has the weights {found}, and digest={digest} asks for others", "changed")


def tensors(place: NetworkFile, name: str, wanted: Sequence[str]) -> dict[str, Any]:
    """The tensors of these names, float32, which are all that the file of the condition `name` holds. UserError as from
    `check_file`, or for a file that is damaged or of another network."""
    return _tensors(place.path, place.digest, name, tuple(wanted))


@made_once(4)
def _tensors(path: str, digest: str | None, name: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    opened_file = file(path, digest, name)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    unreadable: Any = torch.serialization.pickle.UnpicklingError  # also of what is no data: no code of a file is run
    try:
        check_regular(opened_file)
        safe = opened_file.suffix == ".safetensors"
        found = load_file(opened_file) if safe else torch.load(opened_file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, unreadable) as error:
        raise fault(name, f"{path} cannot be read as weights: {str(error)[:300]}", "damaged") from error
    if odd := sorted(found.keys() ^ set(wanted)) if isinstance(found, dict) else ["a dictionary of tensors"]:
        raise fault(name, f"{path} holds another network: missing or unknown: {', '.join(odd[:3])}", "unsupported")
    if odd := [
        key for key, value in found.items() if not isinstance(value, torch.Tensor) or not value.is_floating_point()
    ]:
        raise fault(
            name, f"{path}: {odd[0]} holds no floating-point weights: use a copy with whole ones", "unsupported"
        )
    return {key: value.float() for key, value in found.items()}


def check_file(place: NetworkFile, name: str) -> None:
    """UserError where the file of a network is missing, or is another one."""
    file(place.path, place.digest, name)


def file(path: str, digest: str | None, name: str, suffixes: Sequence[str] = (".safetensors", ".pth")) -> Path:
    """The file of a network of the condition `name`. UserError where it is missing, or is another one."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise fault(name, f"{path!r} is not a file (current folder: {Path.cwd()})", "missing")
    if found.suffix not in suffixes:
        raise fault(name, f"{path} is no {' or '.join(suffixes)} file", "unsupported")
    _check_digest([found], path, digest, name)
    return found


def _document(path: Path, name: str) -> dict[str, Any]:
    try:
        found = documents.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fault(name, f"{path} cannot be read: {error}", "damaged") from error
    if not isinstance(found, dict):
        raise fault(name, f"{path} holds no JSON object", "damaged")
    return found


def fault(name: str, what: str, code: Code = "invalid") -> UserError:
    """The error of a condition."""
    return UserError(f"condition {name}: {what}", code=code)
