"""Skeletons of people as OpenPose's 18 keypoints are drawn for ControlNets, from the 17 keypoints of COCO."""

import numpy as np
from PIL import Image, ImageDraw

_OF_COCO = (0, None, 6, 8, 10, 5, 7, 9, 12, 14, 16, 11, 13, 15, 2, 1, 4, 3)
"""The keypoint of COCO that each of OpenPose's is. None: the neck, in the middle of the shoulders."""
_SHOULDERS = (5, 6)
_BONES = (
    (1, 2), (1, 5), (2, 3), (3, 4), (5, 6), (6, 7), (1, 8), (8, 9), (9, 10), (1, 11), (11, 12), (12, 13), (1, 0),
    (0, 14), (14, 16), (0, 15), (15, 17),
)  # fmt: skip
"""Pairs of OpenPose's keypoints, in the order in which they are drawn."""
_COLOURS = (
    (255, 0, 0), (255, 85, 0), (255, 170, 0), (255, 255, 0), (170, 255, 0), (85, 255, 0), (0, 255, 0), (0, 255, 85),
    (0, 255, 170), (0, 255, 255), (0, 170, 255), (0, 85, 255), (0, 0, 255), (85, 0, 255), (170, 0, 255), (255, 0, 255),
    (255, 0, 170), (255, 0, 85),
)  # fmt: skip
"""Of the bones and of the keypoints, by their numbers."""
_DARKER = 0.6
_CORNERS = 180


def drawn(size: tuple[int, int], places_NK2: np.ndarray, seen_NK: np.ndarray, width_px: int) -> np.ndarray:
    """[H, W, 3] uint8 of this (height, width): an ellipse for each bone of which both ends are seen, in 60 % of its
    colour, and a disc for each keypoint; places (x, y) [N, 17, 2] are COCO's."""
    canvas = Image.new("RGB", size[::-1])
    pen = ImageDraw.Draw(canvas)
    people = [_openpose(places, seen) for places, seen in zip(places_NK2, seen_NK, strict=True)]
    for places, seen in people:
        for (first, second), colour in zip(_BONES, _COLOURS, strict=False):
            if seen[first] and seen[second]:
                outline = _bone(places[first], places[second], width_px)
                pen.polygon([*map(tuple, outline.tolist())], fill=tuple(int(value * _DARKER) for value in colour))
    for places, seen in people:
        for (x, y), there, colour in zip(places.tolist(), seen, _COLOURS, strict=True):
            if there:
                x, y = int(x), int(y)
                pen.ellipse([x - width_px, y - width_px, x + width_px, y + width_px], fill=colour)
    return np.array(canvas)


def _openpose(places_K2: np.ndarray, seen_K: np.ndarray) -> tuple[np.ndarray, list[bool]]:
    """Places [18, 2] of OpenPose's keypoints, and which are seen."""
    left, right = _SHOULDERS
    neck = (places_K2[left] + places_K2[right]) / 2
    places = np.array([neck if number is None else places_K2[number] for number in _OF_COCO])
    both = bool(seen_K[left] and seen_K[right])
    return places, [both if number is None else bool(seen_K[number]) for number in _OF_COCO]


def _bone(start: np.ndarray, end: np.ndarray, width_px: int) -> np.ndarray:
    """[_CORNERS, 2]: the ellipse between two points."""
    middle, half = (start + end) / 2, (end - start) / 2
    length = max(float(np.hypot(*half)), 1e-6)
    turns = np.linspace(0, 2 * np.pi, _CORNERS, endpoint=False)[:, None]
    aside = np.array([-half[1], half[0]]) / length * width_px
    return middle + np.cos(turns) * half + np.sin(turns) * aside
