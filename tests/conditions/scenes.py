"""Images for the conditions, made from formulas: edges, shades and noise, in sizes that divide by nothing, too."""

import numpy as np

from daguerre.contracts.conditions import scene

THRESHOLDS = ((100, 200), (30, 60), (0, 0), (10, 900))
SIGMAS = (0.5, 9.0)
SIZES = {"square": (64, 64), "odd": (37, 53)}


def scenes() -> dict[str, np.ndarray]:
    """By name."""
    found = {name: scene(*size, number) for number, (name, size) in enumerate(SIZES.items())}
    noise = np.random.default_rng(9).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return found | {"noise": noise, "flat": np.full((24, 24, 3), 90, np.uint8)}


# ---- people

PERSON_SIZE = (160, 120)
BOXES = np.array([[0, 0, 90, 120], [20.5, 10, 30, 80.25], [40, 60, 45, 20]])
"""left, top, width, height"""


def person() -> np.ndarray:
    """[17, 2] places (x, y) of COCO's keypoints."""
    nose, eyes, ears = [[60, 20]], [[64, 16], [56, 16]], [[70, 19], [50, 19]]
    arms = [[78, 40], [42, 41], [90, 62], [30, 60], [84, 88], [26, 84]]
    legs = [[70, 90], [50, 90], [74, 120], [44, 118], [72, 150], [42, 148]]
    return np.array([*nose, *eyes, *ears, *arms, *legs], dtype=np.float64)


HIDDEN = (9, 15)
"""Of them, those that are not seen: the left wrist and the left ankle."""


def openpose() -> np.ndarray:
    """[18, 2] of the same person in OpenPose's order, NaN where not seen."""
    found = person()
    found[list(HIDDEN)] = np.nan
    left, right = found[5], found[6]
    order = [0, None, 6, 8, 10, 5, 7, 9, 12, 14, 16, 11, 13, 15, 2, 1, 4, 3]
    return np.array([(left + right) / 2 if number is None else found[number] for number in order])


def heatmaps() -> np.ndarray:
    """[3, 17, 64, 48] float32: a bump a keypoint, at places of no whole numbers, some at the border, with noise."""
    random = np.random.default_rng(4)
    y, x = np.mgrid[0:64, 0:48]
    found = np.zeros((3, 17, 64, 48))
    for n, k in np.ndindex(3, 17):
        cx, cy, height = random.uniform((0, 0, 0.2), (47, 63, 0.95))
        found[n, k] = height * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 8) + random.uniform(0, 0.01, (64, 48))
    return found.astype(np.float32)
