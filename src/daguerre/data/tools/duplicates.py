"""Finds images that show nearly the same: saved again, resized, or taken moments apart."""

import numpy as np
from PIL import Image

SIDE_PX = 16
ALIKE = 0.97
"""Least correlation of the small copies of two such images. Measured on 24 crops of six photographs: saved again as
JPEG of quality 40, lightened, or a third as large 0.98 to 1; without 2 % of two sides 0.93 to 0.99; different crops of
one photograph at most 0.89, of different photographs 0.56."""
_FLAT = 2.0
"""Standard deviation, of 255, of a copy without a picture: what it shows is noise."""


def small_copy(pixels_HWC: np.ndarray) -> np.ndarray:
    """A copy [768] float32, 16 x 16 px, of an image [H, W, 3] uint8, with mean 0 and length 1; all 0 for one that is
    grey all over."""
    image = Image.fromarray(pixels_HWC).resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX, reducing_gap=2.0)
    values = np.asarray(image, dtype=np.float32).ravel()
    values -= values.mean()
    length = float(np.linalg.norm(values))
    return values / length if length > _FLAT * SIDE_PX * np.sqrt(3) else np.zeros_like(values)


def groups(copies_ND: np.ndarray) -> list[list[int]]:
    """The images of which each is nearly the same as another of its group, by number; those of no group are left
    out."""
    first = np.arange(len(copies_ND))
    for row in range(len(copies_ND)):
        near = np.flatnonzero(copies_ND[row + 1 :] @ copies_ND[row] >= ALIKE) + row + 1
        for joined in {int(first[other]) for other in near} - {int(first[row])}:
            first[first == joined] = first[row]
    return [found for one in np.unique(first) if len(found := np.flatnonzero(first == one).tolist()) > 1]
