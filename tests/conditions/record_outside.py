"""Writes outside.npz: what OpenCV and scikit-image make of the images of `scenes`. Run once, outside of the tests:

    pip install opencv-python-headless==5.0.0.93 scikit-image==0.26.0 scipy==1.17.1 transformers==5.23.0
    python tests/conditions/record_outside.py

lineart_standard and scribble_xdog are written down here from the formulas that ControlNet's preprocessors use, on
OpenCV's blur. `DIGEST` in test_conditions.py is the file's.
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import scenes
import skimage.filters
import torch
from transformers.models.vitpose.image_processing_pil_vitpose import VitPoseImageProcessorPil

FILE = Path(__file__).parent / "outside.npz"


def rounded(values):
    return np.rint(values).astype(np.uint8)


def lineart(pixels, sigma, threshold):
    x = pixels.astype(np.float32)
    intensity = np.min(cv2.GaussianBlur(x, (0, 0), sigma) - x, axis=2).clip(0, 255)
    lines = intensity[intensity > threshold]
    return (intensity / max(16, np.median(lines) if lines.size else 0) * 127).clip(0, 255).astype(np.uint8)


def scribble(pixels, threshold):
    x = pixels.astype(np.float32)
    difference = cv2.GaussianBlur(x, (0, 0), 5.0) - cv2.GaussianBlur(x, (0, 0), 0.5)
    dog = (255 - np.min(difference, axis=2)).clip(0, 255).astype(np.uint8)
    return np.where(2 * (255 - dog.astype(int)) > threshold, 255, 0).astype(np.uint8)


LIMBS = [[2, 3], [2, 6], [3, 4], [4, 5], [6, 7], [7, 8], [2, 9], [9, 10], [10, 11], [2, 12], [12, 13], [13, 14], [2, 1]]
LIMBS += [[1, 15], [15, 17], [1, 16], [16, 18]]
COLOURS = [[255, 0, 0], [255, 85, 0], [255, 170, 0], [255, 255, 0], [170, 255, 0], [85, 255, 0], [0, 255, 0]]
COLOURS += [[0, 255, 85], [0, 255, 170], [0, 255, 255], [0, 170, 255], [0, 85, 255], [0, 0, 255], [85, 0, 255]]
COLOURS += [[170, 0, 255], [255, 0, 255], [255, 0, 170], [255, 0, 85]]


def skeleton(places):
    """OpenPose's drawing for ControlNets; places [18, 2] of OpenPose, NaN for those that are not seen."""
    canvas = np.zeros((*scenes.PERSON_SIZE, 3), np.uint8)
    for (a, b), colour in zip(LIMBS, COLOURS, strict=False):
        (x1, y1), (x2, y2) = places[a - 1], places[b - 1]
        if np.isnan([x1, y1, x2, y2]).any():
            continue
        length, angle = np.hypot(x1 - x2, y1 - y2), np.degrees(np.arctan2(y1 - y2, x1 - x2))
        middle = int((x1 + x2) / 2), int((y1 + y2) / 2)
        polygon = cv2.ellipse2Poly(middle, (int(length / 2), 4), int(angle), 0, 360, 1)
        cv2.fillConvexPoly(canvas, polygon, [int(float(c) * 0.6) for c in colour])
    for (x, y), colour in zip(places, COLOURS, strict=True):
        if not np.isnan([x, y]).any():
            cv2.circle(canvas, (int(x), int(y)), 4, colour, thickness=-1)
    return canvas


def pose():
    """transformers' own processor of ViTPose, which needs scipy: crops of boxes, and places of heatmaps' peaks."""
    processor = VitPoseImageProcessorPil()
    boxes = scenes.BOXES.tolist()
    crops = processor(scenes.scene(120, 90), boxes=[boxes], do_normalize=False, do_rescale=False)["pixel_values"]
    outputs = SimpleNamespace(heatmaps=torch.from_numpy(scenes.heatmaps()))
    places = processor.post_process_pose_estimation(outputs, boxes=[boxes])[0]
    return {
        "pose crops": np.stack(crops)[:, :, ::8, ::8],
        "pose places": np.stack([each["keypoints"].numpy() for each in places]),
        "pose scores": np.stack([each["scores"].numpy() for each in places]),
        "pose skeleton": skeleton(scenes.openpose()),
    }


def main():
    found = {}
    for name, pixels in scenes.scenes().items():
        for low, high in scenes.THRESHOLDS:
            found[f"canny {name} {low} {high}"] = cv2.Canny(pixels, low, high)
        for sigma in scenes.SIGMAS:
            found[f"blur {name} {sigma}"] = rounded(cv2.GaussianBlur(pixels.astype(np.float32), (0, 0), sigma))
        grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
        found[f"grey {name}"] = grey
        found[f"sobel {name}"] = rounded(skimage.filters.sobel(grey / 255) * 255)
        found[f"lineart {name}"] = lineart(pixels, 6.0, 8)
        found[f"scribble {name}"] = scribble(pixels, 32)
    found |= pose()
    np.savez_compressed(FILE, **found)
    print(FILE, FILE.stat().st_size, hashlib.sha256(FILE.read_bytes()).hexdigest())


main()
