"""Writes outside.npz: what OpenCV and scikit-image make of the images of `scenes`. Run once, outside of the tests:

    pip install opencv-python-headless==5.0.0.93 scikit-image==0.26.0 scipy
    python tests/conditions/record_outside.py

lineart_standard and scribble_xdog are written down here from the formulas that ControlNet's preprocessors use, on
OpenCV's blur. `DIGEST` in test_conditions.py is the file's.
"""

import hashlib
from pathlib import Path

import cv2
import numpy as np
import scenes
import skimage.filters

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
    np.savez_compressed(FILE, **found)
    print(FILE, FILE.stat().st_size, hashlib.sha256(FILE.read_bytes()).hexdigest())


main()
