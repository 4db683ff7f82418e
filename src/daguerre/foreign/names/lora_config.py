"""MaxDiffusion's `lora_config`: lists of files, their strengths and names, as the `use` of `generate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daguerre.errors import UserError

_KEYS = ("lora_model_name_or_path", "weight_name", "adapter_name", "scale", "from_pt")
_EXAMPLE = "lora_config='{lora_model_name_or_path: [style.safetensors], scale: [0.7]}'"


def strengths(given: Any) -> dict[str, float]:
    """The strength of each file or folder. UserError for a value that is not MaxDiffusion's, and for Flax weights."""
    if not isinstance(given, Mapping) or (given.keys() - {*_KEYS}):
        raise _refused(f"it has the lists {', '.join(_KEYS)}")
    lists = {key: [own] if isinstance(own, str | int | float) else own for key, own in given.items()}
    if not all(isinstance(own, list) for own in lists.values()):
        raise _refused("each of its values is a list")
    models = lists.get("lora_model_name_or_path", [])
    if any(len(own) not in (0, len(models)) for own in lists.values()):
        raise _refused("its lists are of one length")
    names, scales = lists.get("weight_name") or [None] * len(models), lists.get("scale") or [1.0] * len(models)
    if any(str(each).lower() != "true" for each in lists.get("from_pt", [])):
        raise _refused("from_pt must be true: only .safetensors files are read, no Flax weights")
    if not all(isinstance(scale, int | float) for scale in scales):
        raise _refused("scale is a list of numbers")
    places = [_place(str(model), name) for model, name in zip(models, names, strict=True)]
    return {place: float(scale) for place, scale in zip(places, scales, strict=True)}


def _place(model: str, name: Any) -> str:
    path = Path(model).expanduser()
    if path.is_dir() and name:
        return str(path / str(name))
    if not path.exists() and model.count("/") == 1 and not model.startswith(("/", ".", "~")):
        file = f"{model}/{name}" if name else model
        raise _refused(f"{model} is on the hub: fetch it first, `daguerre fetch {file} -o DIR`, and give the file")
    return model


def _refused(why: str) -> UserError:
    return UserError(f"lora_config: {why}, such as {_EXAMPLE}", setting="lora_config")
