"""Stable Cascade's filters, which make what a ControlNet reads: each is a condition of ours, and what is read of it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign.names.values import Meaning

_FACES = "modules/cnet_modules/face_id/models/buffalo_l"
_HOLES = "holes are boxes, ellipses and strokes at random places; theirs are drawn by a network, by thresholds"


def _square(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"side_px": params.get("resize", 224)}


def _smaller(params: Mapping[str, Any], usual: float) -> dict[str, Any]:
    return {"factor": 1 / float(params.get("scale_factor", usual)), "down": "nearest", "up": "nearest"}


def _canny(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"reads": "grey", "condition": {"name": "canny", **_square(params)}}


def _qr(params: Mapping[str, Any]) -> dict[str, Any]:
    names = {"blobify": "blobs", "dilation_kernels": "dilation", "blur_kernels": "blur"}
    own = {ours: params[theirs] for theirs, ours in names.items() if theirs in params}
    return {"reads": "grey", "condition": {"name": "qr", **_square(params), **own}}


def _sr(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"reads": "colour", "condition": {"name": "tile", **_smaller(params, 1 / 4)}}


def _sr_effnet(params: Mapping[str, Any]) -> dict[str, Any]:
    smaller = _smaller(params, 1 / 2)
    return {"reads": "latent", "latent_factor": smaller["factor"], "condition": {"name": "tile", **smaller}}


def _inpaint(params: Mapping[str, Any]) -> dict[str, Any]:
    own = {"name": "inpaint", "inverted": params.get("p_outpaint", 0.4)}
    return {"reads": "holes", "condition": own}


def _identity(params: Mapping[str, Any]) -> dict[str, Any]:
    names = {"max_faces": ("max_faces", 4), "p_drop": ("dropout", 0.05), "p_full": ("everywhere", 0.3)}
    own = {ours: params.get(theirs, usual) for theirs, (ours, usual) in names.items()}
    networks = {"detector": "det_10g.onnx", "recogniser": "w600k_r50.onnx"}
    of = {name: {"path": f"{_FACES}/{file}"} for name, file in networks.items()}
    return {"reads": "faces", "condition": {"name": "faces", **own, **of}}


def _image(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"reads": "colour", "condition": {"name": "tile", "factor": 1}}


_KNOWN: dict[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], tuple[str, ...], str]] = {
    "CannyFilter": (_canny, ("resize",), ""),
    "InpaintFilter": (_inpaint, ("thresold", "p_outpaint"), _HOLES),
    "SREffnetFilter": (_sr_effnet, ("scale_factor",), ""),
    "SRFilter": (_sr, ("scale_factor",), ""),
    "IdentityFilter": (_identity, ("max_faces", "p_drop", "p_full"), "their digests are asked for at the start"),
    "QRFilter": (_qr, ("resize", "blobify", "dilation_kernels", "blur_kernels"), ""),
    "BaseFilter": (_image, (), ""),
}
"""By filter: what it is here, its parameters, and a remark."""


def of_filter(name: str, params: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Settings of the adapter `controlnet` for a filter with these parameters, and a remark. UserError for filters and
    parameters that have no counterpart."""
    if name == "PidiFilter":
        raise UserError(
            "PidiFilter: there is no PiDiNet here; adapter.condition=hed finds soft edges by a network, and stored "
            "images train as well (docs/conditions.md)",
            code="unsupported",
        )
    if name not in _KNOWN:
        raise UserError(
            f"{name} is none of {', '.join(_KNOWN)}: a filter of one's own is a condition here, one file "
            "(docs/extending.md)",
            code="unknown",
        )
    make, known, why = _KNOWN[name]
    if odd := sorted(params.keys() - {*known}):
        raise UserError(f"{name} has no parameter {odd[0]}; it has {', '.join(known) or 'none'}", code="unknown")
    return make(params), why


def controlnet_filter(key: str, text: str) -> Meaning:
    """A filter with its usual parameters."""
    own, why = of_filter(text.strip(), {})
    values = {f"adapter.{name}": value if isinstance(value, str) else json.dumps(value) for name, value in own.items()}
    return Meaning((("adapter.name", "controlnet"), *values.items()), (f"{key}: {why}",) if why else ())
