"""The condition `faces`: who is where in an image, by networks for faces (SCRFD and ArcFace, as ONNX).

It follows Stable Cascade's IdentityFilter, with InsightFace's formulas: a detector (Guo et al. 2021, arXiv 2105.04714)
gives boxes and five points, a face is turned upright by the points, and a recogniser (Deng et al. 2018, arXiv
1801.07698) gives its vector. A cell of 32 x 32 px in a face's box holds the vector as shades: its 512 numbers in the
upper half, the same inverted in the lower half. families/cascade/controlnets/faces.py reads that.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from daguerre.conditions import filters, network
from daguerre.conditions.condition import ConditionSettings, Draw
from daguerre.conditions.network import NetworkFile
from daguerre.errors import install
from daguerre.threads import made_once

CELL_PX, WIDTH = 32, 512
_DETECTED_PX = 320
"""Sides of the detector's input."""
_ALIGNED_PX = 112
_STRIDES, _ANCHORS = (8, 16, 32), 2
_SCORE, _OVERLAP = 0.5, 0.4
_POINTS = np.array([[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]])
"""x and y of eyes, nose and corners of the mouth of an upright face of 112 x 112 px."""


class Settings(ConditionSettings):
    """Vectors of faces in their boxes, which say who is where."""

    name: Literal["faces"] = "faces"
    """Who is where, by networks for faces."""
    detector: NetworkFile
    """An ONNX file that finds faces (SCRFD with points, such as det_10g.onnx of InsightFace's buffalo_l)."""
    recogniser: NetworkFile
    """An ONNX file that gives a face of 112 x 112 px a vector of 512 numbers (ArcFace, such as w600k_r50.onnx)."""
    max_faces: int = Field(4, ge=1, le=64)
    """Most faces of an image: the largest, and those in the middle."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the faces that are left out (p_drop of Stable Cascade: 0.05 in training)."""
    everywhere: float = Field(0.0, ge=0, le=1)
    """Share of the images with one face whose vector fills all of the image (p_full: 0.3 in training)."""


def check(settings: Settings) -> None:
    """UserError where one of the networks is not there, or is another one."""
    for own, name in _networks(settings):
        _opened(own.path, own.digest, name)


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 4]: the code of a face in the cells of its box, transparent elsewhere. Later faces cover earlier ones."""
    detector, recogniser = (_opened(own.path, own.digest, name) for own, name in _networks(settings))
    boxes_N4, points_N52 = detected(detector, pixels_HWC, settings.max_faces)
    height, width = pixels_HWC.shape[:2]
    made_HWC = np.zeros((height, width, 4), np.uint8)
    for i, (box_4, points_52) in enumerate(zip(boxes_N4, points_N52, strict=True)):
        kept, filled = draw(f"face {i}", 2)
        if kept < settings.dropout:
            continue
        left, top, right, bottom = np.rint(np.maximum(np.trunc(box_4) / CELL_PX, 0)).astype(int)
        right, bottom = max(right, left + 1), max(bottom, top + 1)
        if len(boxes_N4) == 1 and filled < settings.everywhere:
            left, top, right, bottom = 0, 0, width // CELL_PX, height // CELL_PX
        right, bottom = min(right, width // CELL_PX), min(bottom, height // CELL_PX)
        if right > left and bottom > top:
            cell_HWC = code(vector(recogniser, pixels_HWC, points_52))
            drawn_HWC = np.tile(cell_HWC, (bottom - top, right - left, 1))
            made_HWC[top * CELL_PX : bottom * CELL_PX, left * CELL_PX : right * CELL_PX] = drawn_HWC
    return made_HWC


def code(vector_D: np.ndarray) -> np.ndarray:
    """[32, 32, 4]: a vector as shades, by its largest number, and the same inverted."""
    shades_D = np.rint(127.5 + 127 * vector_D / max(np.abs(vector_D).max(), 1e-12)).astype(np.uint8)
    grey_HW = np.concatenate([shades_D, 255 - shades_D]).reshape(CELL_PX, CELL_PX)
    alpha_HW = np.full_like(grey_HW, 255)
    return np.stack([grey_HW, grey_HW, grey_HW, alpha_HW], axis=2)


def detected(detector: Any, pixels_HWC: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes [N, 4] (left, top, right, bottom) and points [N, 5, 2] (x, y) of faces, in pixels of the image."""
    height, width = pixels_HWC.shape[:2]
    if height > width:
        sides = _DETECTED_PX, max(1, int(_DETECTED_PX / (height / width)))
    else:
        sides = max(1, int(_DETECTED_PX * (height / width))), _DETECTED_PX
    scale = sides[0] / height
    canvas = np.zeros((_DETECTED_PX, _DETECTED_PX, 3), np.float32)
    canvas[: sides[0], : sides[1]] = np.rint(filters.resized(pixels_HWC, *sides))
    outputs = _predicted(detector, (canvas - 127.5) / 128)
    found = [_of_stride(outputs[i::3], stride) for i, stride in enumerate(_STRIDES)]
    scores_N, boxes_N4, points_N52 = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(-scores_N, kind="stable")
    order = order[_apart(boxes_N4[order])]
    boxes_N4, points_N52 = boxes_N4[order] / scale, points_N52[order] / scale
    if len(boxes_N4) > most:
        areas_N = (boxes_N4[:, 2] - boxes_N4[:, 0]) * (boxes_N4[:, 3] - boxes_N4[:, 1])
        away_N2 = (boxes_N4[:, :2] + boxes_N4[:, 2:]) / 2 - (width // 2, height // 2)
        chosen = np.argsort(-(areas_N - 2 * (away_N2**2).sum(1)), kind="stable")[:most]
        boxes_N4, points_N52 = boxes_N4[chosen], points_N52[chosen]
    return boxes_N4, points_N52


def _of_stride(outputs: list[np.ndarray], stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, boxes and points of the faces that are found on a grid of this stride."""
    scores, distances, offsets = (each.reshape(-1, width) for each, width in zip(outputs, (1, 4, 10), strict=True))
    side = _DETECTED_PX // stride
    y, x = np.mgrid[:side, :side]
    centres = (np.stack([x, y], axis=-1).reshape(-1, 2) * stride).repeat(_ANCHORS, axis=0).astype(np.float32)
    there = scores[:, 0] >= _SCORE
    centres, distances = centres[there], distances[there] * stride
    boxes = np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)
    points = centres[:, None] + offsets[there].reshape(-1, 5, 2) * stride
    return scores[there, 0], boxes, points


def _apart(boxes_N4: np.ndarray) -> list[int]:
    """The boxes, the likeliest first, that overlap with no likelier one; sides count their last pixel."""
    sides = boxes_N4[:, 2:] - boxes_N4[:, :2] + 1
    areas, left = sides.prod(axis=1), np.arange(len(boxes_N4))
    kept: list[int] = []
    while left.size:
        first, rest = left[0], left[1:]
        kept.append(int(first))
        low = np.maximum(boxes_N4[first, :2], boxes_N4[rest, :2])
        high = np.minimum(boxes_N4[first, 2:], boxes_N4[rest, 2:])
        common = np.maximum(0, high - low + 1).prod(axis=1)
        left = rest[common / (areas[first] + areas[rest] - common) <= _OVERLAP]
    return kept


def vector(recogniser: Any, pixels_HWC: np.ndarray, points_52: np.ndarray) -> np.ndarray:
    """[512] of length 1: of the face whose points these are."""
    (found,) = _predicted(recogniser, (upright(pixels_HWC, points_52) - 127.5) / 127.5)
    flat = found.reshape(-1)
    made: np.ndarray = flat / max(float(np.linalg.norm(flat)), 1e-12)
    return made


def upright(pixels_HWC: np.ndarray, points_52: np.ndarray) -> np.ndarray:
    """[112, 112, 3]: the face turned, scaled and moved so that its points are where those of an upright one are, by
    least squares; black outside of the image."""
    theirs, ours = (points @ (1, 1j) for points in (points_52.astype(np.float64), _POINTS))
    own, wanted = theirs - theirs.mean(), ours - ours.mean()
    turn = (own.conj() @ wanted) / max(float((np.abs(own) ** 2).sum()), 1e-12) or 1e-12
    y, x = np.mgrid[:_ALIGNED_PX, :_ALIGNED_PX]
    places = (x + 1j * y - ours.mean()) / turn + theirs.mean()
    return np.rint(filters.sampled(pixels_HWC, places.imag, places.real))


def _networks(settings: Settings) -> list[tuple[NetworkFile, str]]:
    return [(getattr(settings, own), f"{settings.name}, {own}") for own in ("detector", "recogniser")]


def _predicted(session: Any, pixels_HWC: np.ndarray) -> list[np.ndarray]:
    """All outputs of a network for one image."""
    blob = np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1)[None], dtype=np.float32)
    found: list[np.ndarray] = session.run(None, {session.get_inputs()[0].name: blob})
    return found


@made_once(4)
def _opened(path: str, digest: str | None, name: str) -> Any:
    """The network of a file, on one thread of the CPU. UserError where it cannot be used."""
    file = network.file(path, digest, name, (".onnx",))
    try:
        import onnxruntime
    except ImportError as error:
        raise network.fault(name, f"onnxruntime is not installed: {install('onnxruntime')}", "not_installed") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except (RuntimeError, onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf) as error:
        raise network.fault(name, f"{path} cannot be read as ONNX: {str(error)[:300]}", "damaged") from error
    wanted = 3 * len(_STRIDES) if name.endswith("detector") else 1
    if len(session.get_outputs()) != wanted:
        what = f"{path} has {len(session.get_outputs())} outputs, and a {name.split()[-1]} has {wanted}"
        raise network.fault(name, what, "unsupported")
    return session
