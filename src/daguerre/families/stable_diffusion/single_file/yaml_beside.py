"""The .yaml next to a single file, in which CompVis' and Stability's code have a model's numbers, and A1111 reads them.

Read of it is what the tensors do not tell: what the UNet predicts, its noise levels, and how a ControlNet's residuals
are averaged. Any other .yaml of that name, such as a recipe, says nothing here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from daguerre.errors import UserError

_LARGEST_BYTES = 1 << 20
_PREDICTIONS = {"eps": "epsilon", "v": "v_prediction"}
_SCALINGS = {"EpsScaling": "epsilon", "VScaling": "v_prediction"}
_LEVELS = {
    "linear_start": "beta_start",
    "linear_end": "beta_end",
    "timesteps": "num_train_timesteps",
    "num_timesteps": "num_train_timesteps",
}
_SHUFFLE = re.compile(r".*_shuffle(_fp16)?")


def find(path: Path) -> Path | None:
    """The .yaml of the same name."""
    return next((own for suffix in (".yaml", ".yml") if (own := path.with_suffix(suffix)).is_file()), None)


def told(path: Path) -> dict[str, Any]:
    """The part of a scheduler's config that the .yaml next to a file tells; {} without one. UserError for a
    prediction that is not known."""
    model = _model(path)
    params = model.get("params", {})
    if str(model.get("target")).startswith("sgm."):
        scaling = next(_sections(params, "scaling_config"), None)
        named = str(scaling["target"]).rpartition(".")[2] if scaling else None
        prediction = _SCALINGS.get(str(named)) if named else None
    elif str(model.get("target")).startswith("ldm."):
        named = str(params.get("parameterization", "eps"))
        prediction = _PREDICTIONS.get(named)
    else:
        return {}
    if named is not None and prediction is None:
        raise UserError(
            f"{find(path)}, which says what {path.name} is, names {named}; known are "
            f"{', '.join([*_PREDICTIONS, *_SCALINGS])}. Move it away if it is of another model",
            code="unsupported",
        )
    levels = _levels(path, params)
    return levels | ({"prediction_type": prediction} if prediction else {})


def scale(path: Path) -> float | None:
    """The number by which latents are multiplied, by the .yaml next to a file; None where it tells none."""
    model = _model(path)
    found = model.get("params", {}).get("scale_factor")
    is_one = isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < float("inf")
    return float(found) if is_one and str(model.get("target")).startswith(("sgm.", "ldm.")) else None


def _levels(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of its betas. UserError for noise levels of another kind."""
    tables = [params, *(own.get("params") or {} for own in _sections(params, "discretization_config"))]
    kinds = [str(own.get("target")).rpartition(".")[2] for own in _sections(params, "discretization_config")]
    kinds += [str(table["beta_schedule"]) for table in tables if "beta_schedule" in table]
    if odd := [kind for kind in kinds if kind not in ("linear", "LegacyDDPMDiscretization", "None")]:
        raise UserError(
            f"{find(path)}, which says what {path.name} is, names the noise levels {odd[0]}; known are the betas of "
            "LegacyDDPMDiscretization, called linear. Move it away if it is of another model",
            code="unsupported",
        )
    named = ((ours, table.get(theirs)) for table in tables for theirs, ours in _LEVELS.items())
    return {ours: value for ours, value in named if isinstance(value, int | float) and not isinstance(value, bool)}


def pools(path: Path) -> bool:
    """True of a ControlNet whose residuals are averaged over the image ("shuffle"), by the .yaml next to it, or by its
    name, as ComfyUI tells."""
    params = _model(path).get("params", {})
    return params.get("global_average_pooling") is True or bool(_SHUFFLE.fullmatch(path.stem))


def _model(path: Path) -> Mapping[str, Any]:
    own = find(path)
    if own is None or own.stat().st_size > _LARGEST_BYTES:
        return {}
    try:
        document = yaml.safe_load(own.read_bytes())
    except (yaml.YAMLError, OSError, ValueError, RecursionError):
        return {}
    model = document.get("model") if isinstance(document, dict) else None
    whole = isinstance(model, dict) and isinstance(model.get("params", {}), dict)
    return model if whole and isinstance(model, dict) else {}


def _sections(tree: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The mappings of this name, at any depth, that have a target: such as the class that scales what the network
    makes."""
    if isinstance(tree, dict):
        own = tree.get(name)
        if isinstance(own, dict) and "target" in own:
            yield own
        for inner in tree.values():
            yield from _sections(inner, name)
