"""Tensors of a file that are no weights of the networks in it: applied, refused or named, never dropped in silence.

Programs that store weights in fewer bits leave scales, tables and marks with them, and the stored numbers mean
nothing without these. Weights of 8-bit floats with plain scales are multiplied out here, as ComfyUI does; other
forms are refused.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from daguerre import documents
from daguerre.errors import UserError

METADATA = "_quantization_metadata"
"""Key of a header: JSON with the form of each quantised layer."""
_SCALE = re.compile(r"(.+)\.(?:scale_weight|weight_scale)")
_FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_HARMLESS = {"format", "full_precision_matrix_mult"}
"""Keys of a layer's form that do not change the weight that it stands for."""
_QUANTISED = re.compile(
    r"(?:.+[._])?weight(?:\.|_scale|_zero_point|_format|_shape|_packed).*|.+\.(?:scale_(?:weight|input)|input_scale|SCB|comfy_quant)"
)
"""Names that quantisers leave next to a weight: those of ComfyUI, bitsandbytes, compressed-tensors."""
_COUNTERS = {"global_step", "step", "epoch", "iteration", "iter"}
"""Numbers of a training, which mean nothing for a network."""
_WHOLE = "Use a copy with whole weights: float32, float16, bfloat16, or float8 with plain scales"


def without(tensors: Mapping[str, Any], patterns: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The tensors whose names fit none of the patterns (`*` and `?`), and a message for each pattern."""
    if not patterns:
        return dict(tensors), []
    counts = {pattern: sum(fnmatchcase(name, pattern) for name in tensors) for pattern in patterns}
    kept = {name: value for name, value in tensors.items() if not any(fnmatchcase(name, own) for own in patterns)}
    return kept, [f"ignore_tensors: {count:,} tensors fit {pattern!r}" for pattern, count in counts.items()]


def multiplied(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """The tensors with 8-bit floats times their scales, in float32, and without what that takes.

    A scale is one number, or one for each output. What has another form stays as it is, for `check` to refuse.
    """
    found, forms = dict(tensors), _forms(tensors, metadata or {})
    for name in list(tensors):
        if not (match := _SCALE.fullmatch(name)) or (weight := tensors.get(f"{match[1]}.weight")) is None:
            continue
        scale, form = tensors[name], forms.get(match[1], {})
        if weight.dtype in _FLOAT8.values() and _fits(scale, weight) and _is_plain(form):
            # A scale for each row must meet the rows, also of a convolution's kernel.
            rows = scale.float().reshape(-1, *[1] * (weight.ndim - 1)) if scale.numel() > 1 else scale.float().sum()
            found[f"{match[1]}.weight"] = weight.float() * rows
            for beside in (name, *(f"{match[1]}.{of}" for of in ("scale_input", "input_scale", "comfy_quant"))):
                found.pop(beside, None)
    return {name: tensor for name, tensor in found.items() if name.rpartition(".")[2] != "scaled_fp8"}


def _forms(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The form of each layer that says one; anything that cannot be read is a form that is not known."""
    forms: dict[str, Any] = {}
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        forms |= documents.parse(metadata.get(METADATA, "{}")).get("layers", {})
    for name, tensor in tensors.items():
        if name.endswith(".comfy_quant"):
            forms[name.removesuffix(".comfy_quant")] = None
            with suppress(ValueError, TypeError):
                forms[name.removesuffix(".comfy_quant")] = documents.parse(bytes(tensor.flatten().tolist()))
    return forms


def _is_plain(form: Any) -> bool:
    return isinstance(form, dict) and str(form.get("format", "float8_e4m3fn")) in _FLOAT8 and form.keys() <= _HARMLESS


def _fits(scale: Tensor, weight: Tensor) -> bool:
    of_rows = scale.numel() == 1 or scale.shape[:1] == (scale.numel(),) == weight.shape[:1]
    return scale.is_floating_point() and of_rows


def check(
    path: Path, tensors: Mapping[str, Tensor], used: Collection[str], rest: Iterable[str], prefixes: Sequence[str] = ()
) -> None:
    """UserError where weights that are `used` are no numbers of their own, or one of the `rest` changes what they mean.

    It does if it belongs to a used weight (`X.weight_scale` with `X.weight`), or is a mark: a name without a dot, at
    the top or directly under the `prefixes` of networks that are used, or a group of single numbers. Names are those
    of the file, normalised.
    """
    if odd := sorted(name for name in used if name in tensors and not tensors[name].is_floating_point()):
        refuse_integers(path, odd, str(tensors[odd[0]].dtype).removeprefix("torch."))
    rest = list(rest)
    if of_weights := [name for name in rest if _belongs(name, used)]:
        raise UserError(
            f"{path} has {_some(of_weights)} next to weights of its networks, which may change what these mean, in a "
            f"way that is not known here. {_way_out('*.' + of_weights[0].rpartition('.')[2])}",
            code="unsupported",
        )
    if marks := [name for name in rest if _is_mark(name, tensors, prefixes)]:
        raise UserError(
            f"{path} has the mark {_some(marks)}, which may say how its networks are to be used, in a way that is not "
            f"known here. {_way_out(marks[0])}",
            code="unsupported",
        )


def unread(path: Path, names: Collection[str]) -> list[str]:
    """A line about tensors of a network for which its class has no place, in a list; [] where there are none."""
    if not names:
        return []
    return [
        f"{path} has {_some(sorted(names))} in a network that has no place for them here, and they are not read: the "
        "network may be a newer one that computes something else. Where they mean nothing, leave them out by name "
        "(model.ignore_tensors)"
    ]


def refuse_integers(path: Path, names: Sequence[str], dtype: str) -> NoReturn:
    """The UserError for weights of this type, which stand for others."""
    raise UserError(
        f"{path} has weights of {dtype} ({_some(names)}), which are quantised in a form that is not read here. "
        + _WHOLE,
        code="unsupported",
    )


def check_names(path: Path, names: Collection[str]) -> None:
    """UserError for tensors of a quantiser, by the names alone."""
    known = set(names)
    check(path, {}, known, sorted(name for name in known if _QUANTISED.fullmatch(name) and _belongs(name, known)))


def _belongs(name: str, used: Collection[str]) -> bool:
    return any(
        name[: match.start()] in used or (match[0] == "." and f"{name[: match.start()]}.weight" in used)
        for match in re.finditer(r"[._]", name)
    )


def _is_mark(name: str, tensors: Mapping[str, Tensor], prefixes: Sequence[str]) -> bool:
    group, dot, _ = name.partition(".")
    if not dot:
        return name not in _COUNTERS
    inside = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
    if inside is not None:
        return "." not in inside
    return all(tensors[other].numel() <= 1 for other in _of_group(group, tensors))


def _of_group(group: str, tensors: Iterable[str]) -> Iterator[str]:
    return (name for name in tensors if name.startswith(f"{group}."))


def _way_out(pattern: str) -> str:
    return f"{_WHOLE}. Where they mean nothing, leave them out by name: ignore_tensors=['{pattern}']"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3:,} more' if len(names) > 3 else ''}"
