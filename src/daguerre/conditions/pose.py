"""The condition `pose`: skeletons of people as OpenPose draws them, by ViTPose.

People are found by RT-DETR, or the whole image is taken as one. Boxes, crops and the places of keypoints follow
transformers' VitPoseImageProcessor (Huang et al. 2020, arXiv 1911.07524; DARK, Zhang et al. 2020, arXiv 1910.06278).
"""

from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from daguerre.conditions import network, skeleton
from daguerre.conditions.condition import Draw
from daguerre.conditions.network import Network, NetworkFolder, NetworkSettings

_POSE, _DETECTORS = ("vitpose",), ("rt_detr", "rt_detr_v2")
_PADDING = 1.25
_SIGMA, _RADIUS = 0.8, 5
_MOST_PEOPLE = 16


class DetectorSettings(NetworkFolder):
    """A network that finds people (RT-DETR)."""

    threshold: float = Field(0.5, ge=0, le=1)
    """Probability above which something is a person."""


class Settings(NetworkSettings):
    """Skeletons of 18 keypoints in OpenPose's colours on black."""

    name: Literal["pose"] = "pose"
    """Skeletons of people on black, by a network."""
    threshold: float = Field(0.3, ge=0, le=1)
    """Height of a keypoint's heatmap above which it is drawn."""
    width_px: int = Field(4, ge=1, le=64)
    """Half the width of a bone, and radius of a keypoint, in pixels of the image that is trained on."""
    detector: DetectorSettings | None = None
    """Finds the people, 16 at most. Default: the whole image is one person."""


def check(settings: Settings) -> None:
    """UserError where one of the networks is not there, or is another one."""
    network.check(settings, settings.name, _POSE)
    if settings.detector is not None:
        network.check(settings.detector, f"{settings.name}, detector", _DETECTORS)


def apply(settings: Settings, pixels_HWC: np.ndarray, draw: Draw) -> np.ndarray:
    """[H, W, 3]: the skeletons."""
    found = network.opened(settings, settings.name, "VitPoseForPoseEstimation", _POSE)
    boxes_N4 = _people(settings, pixels_HWC)
    places_NK2, heights_NK = keypoints(found, pixels_HWC, boxes_N4)
    return skeleton.drawn(pixels_HWC.shape[:2], places_NK2, heights_NK > settings.threshold, settings.width_px)


def _people(settings: Settings, pixels_HWC: np.ndarray) -> np.ndarray:
    """[N, 4] boxes: left, top, width and height in pixels, the likeliest first."""
    height, width = pixels_HWC.shape[:2]
    if settings.detector is None:
        return np.array([[0, 0, width, height]], dtype=np.float64)
    name = f"{settings.name}, detector"
    found = network.opened(settings.detector, name, "AutoModelForObjectDetection", _DETECTORS)
    size = found.processor.get("size") or {}
    small = Image.fromarray(pixels_HWC).resize(
        (size.get("width", 640), size.get("height", 640)), Image.Resampling.BILINEAR
    )
    logits_BQC, boxes_BQ4 = found.predict(found.normalised(np.asarray(small))[None], "logits", "pred_boxes")
    person = [number for number, label in found.model.config.id2label.items() if label.lower() == "person"]
    likely_Q = 1 / (1 + np.exp(-logits_BQC[0][:, person or [0]].max(axis=1).astype(np.float64)))
    order = np.argsort(-likely_Q, kind="stable")[:_MOST_PEOPLE]
    chosen_N4 = boxes_BQ4[0][order[likely_Q[order] > settings.detector.threshold]].astype(np.float64)
    chosen_N4[:, :2] -= chosen_N4[:, 2:] / 2  # centres to corners
    return chosen_N4 * (width, height, width, height)


def keypoints(found: Network, pixels_HWC: np.ndarray, boxes_N4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places [N, K, 2] (x, y) in pixels and heights [N, K] of the K keypoints of COCO, for people in boxes."""
    count = found.model.config.num_labels
    if not len(boxes_N4):
        return np.zeros((0, count, 2)), np.zeros((0, count))
    size = found.processor.get("size") or {}
    width, height = int(size.get("width", 192)), int(size.get("height", 256))
    corners_N2, sides_N2 = _framed(boxes_N4, width / height)
    steps_N2 = sides_N2 / (width - 1, height - 1)
    image = Image.fromarray(pixels_HWC)
    crops = [_crop(image, corner, step, (width, height)) for corner, step in zip(corners_N2, steps_N2, strict=True)]
    pixels_NHWC = np.stack([found.normalised(crop) for crop in crops])
    experts = getattr(found.model.config.backbone_config, "num_experts", 1) > 1  # 0: that of COCO
    more = {"dataset_index": np.zeros(len(crops), np.int64)} if experts else {}
    (heat_NKhw,) = found.predict(pixels_NHWC, "heatmaps", **more)
    places_NK2, heights_NK = peaks(heat_NKhw)
    scale_N2 = sides_N2 / (heat_NKhw.shape[3] - 1, heat_NKhw.shape[2] - 1)
    return corners_N2[:, None] + places_NK2 * scale_N2[:, None], heights_NK


def _framed(boxes_N4: np.ndarray, aspect: float) -> tuple[np.ndarray, np.ndarray]:
    """Corners and sides [N, 2] of the boxes, made larger on both sides to an aspect ratio and by a quarter."""
    sides_N2 = np.stack(
        [np.maximum(boxes_N4[:, 2], boxes_N4[:, 3] * aspect), np.maximum(boxes_N4[:, 3], boxes_N4[:, 2] / aspect)],
        axis=1,
    )
    sides_N2 = sides_N2 * _PADDING
    return boxes_N4[:, :2] + boxes_N4[:, 2:] / 2 - sides_N2 / 2, sides_N2


def _crop(image: Image.Image, corner: np.ndarray, step: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """[h, w, 3] uint8: pixel i of the crop is at corner + i step, interpolated linearly; black outside of the image."""
    (x, y), (across, down) = corner.tolist(), step.tolist()
    across, down = max(across, 1e-6), max(down, 1e-6)
    numbers = (across, 0, x + 0.5 - across / 2, 0, down, y + 0.5 - down / 2)
    return np.asarray(image.transform(size, Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR))


def peaks(heat_NKhw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places [N, K, 2] (x, y) of the highest points of heatmaps, and their heights [N, K]: by one step of Newton's
    method on the logarithm of the heatmap, smoothed by a Gaussian."""
    (count, kinds), width = heat_NKhw.shape[:2], heat_NKhw.shape[3]
    flat_NKP = heat_NKhw.reshape(count, kinds, -1)
    at_NK = flat_NKP.argmax(axis=2)
    heights_NK = flat_NKP.max(axis=2)
    x_NK, y_NK = at_NK % width, at_NK // width
    log_NKhw = np.pad(np.log(_smoothed(heat_NKhw).clip(0.001, 50)), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    n, k = np.ogrid[:count, :kinds]

    def near(right: int, down: int) -> np.ndarray:
        return log_NKhw[n, k, y_NK + 1 + down, x_NK + 1 + right]

    middle = near(0, 0)
    dx, dy = (near(1, 0) - near(-1, 0)) / 2, (near(0, 1) - near(0, -1)) / 2
    tiny = np.finfo(np.float32).eps
    dxx, dyy = near(1, 0) - 2 * middle + near(-1, 0) + tiny, near(0, 1) - 2 * middle + near(0, -1) + tiny
    dxy = (near(1, 1) - near(1, 0) - near(0, 1) + 2 * middle - near(-1, 0) - near(0, -1) + near(-1, -1)) / 2
    determinant = dxx * dyy - dxy * dxy
    determinant = np.where(np.abs(determinant) < 1e-12, np.inf, determinant)
    step_NK2 = np.stack([dyy * dx - dxy * dy, dxx * dy - dxy * dx], axis=2) / determinant[:, :, None]
    return np.stack([x_NK, y_NK], axis=2) - step_NK2, heights_NK


def _smoothed(heat_NKhw: np.ndarray) -> np.ndarray:
    """Float64, convolved with a Gaussian of 11 x 11 points, mirrored at the border (cba|abcd|dcb)."""
    weights = np.exp(-(np.arange(-_RADIUS, _RADIUS + 1) ** 2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    for axis in (2, 3):
        reach = [(0, 0)] * 4
        reach[axis] = (_RADIUS, _RADIUS)
        around = np.pad(heat_NKhw.astype(np.float64), reach, mode="symmetric")
        size = heat_NKhw.shape[axis]
        heat_NKhw = sum(w * around.take(range(i, i + size), axis=axis) for i, w in enumerate(weights))
    return heat_NKhw
