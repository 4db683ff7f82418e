"""Pictures of the condition `faces` as numbers: who is where, by the vectors of a network for faces."""

import torch
from torch import Tensor

from daguerre.errors import UserError

CELL_PX, WIDTH = 32, 512
"""Sides of a cell, and numbers of a face, as conditions/faces.py draws them."""
_MIDDLE = 127.5


def vectors(pixels_BCHW: Tensor) -> Tensor:
    """[B, 512, H/32, W/32]: the vector of the face that is drawn in a cell, of length 1; zeros where there is none.

    The upper half of a cell of 32 x 32 px holds a face's numbers as shades, the lower half the same inverted. UserError
    for cells that hold something else, such as those of a picture that was resized.
    """
    batch, _, height, width = pixels_BCHW.shape
    rows, columns = height // CELL_PX, width // CELL_PX
    cut = pixels_BCHW[:, :, : rows * CELL_PX, : columns * CELL_PX]
    cells = cut.reshape(batch, 4, rows, CELL_PX, columns, CELL_PX).permute(0, 1, 2, 4, 3, 5)
    there_Bhw = (cells[:, 3] == 255).flatten(3).all(3)
    upper, lower = cells[:, 0].flatten(3).float().split(WIDTH, dim=3)
    odd_Bhw = there_Bhw & (upper + lower != 2 * _MIDDLE).any(3)
    if odd_Bhw.any() or ((cells[:, 3] > 0).flatten(3).any(3) & ~there_Bhw).any():
        raise UserError(
            "a control image has parts that are no faces, or was resized: this ControlNet reads what the condition "
            "faces makes of a photo (control_from=PHOTO), at 32 px for each cell of the latent",
            code="unsupported",
        )
    found = torch.nn.functional.normalize(upper - _MIDDLE, dim=3)
    return (found * there_Bhw[..., None]).permute(0, 3, 1, 2).contiguous()
