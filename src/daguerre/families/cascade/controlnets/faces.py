"""Pictures of the condition `faces` as numbers: who is where, by the vectors of a network for faces."""

import torch
from torch import Tensor

from daguerre.errors import UserError

CELL_PX, WIDTH = 32, 512
"""Sides of a cell, and numbers of a face, as conditions/faces.py draws them."""
_MIDDLE = 127.5


def vectors(pixels_BCHW: Tensor) -> Tensor:
    """[B, 512, H/32, W/32]: the vector of the face that is drawn in a cell, of length 1; zeros without a face.

    The upper half of a cell of 32 x 32 px holds a face's numbers as shades, the lower half the same inverted. That
    there is nothing else was asked before, of pictures on the host (`check`): a device would be waited for.
    """
    there_Bhw, upper, _ = _cells(pixels_BCHW)
    found = torch.nn.functional.normalize(upper - _MIDDLE, dim=3)
    return (found * there_Bhw[..., None]).permute(0, 3, 1, 2).contiguous()


def check(pixels_BCHW: Tensor) -> None:
    """UserError for pictures with cells that hold something else, such as those of a picture that was resized."""
    there_Bhw, upper, lower = _cells(pixels_BCHW)
    odd_Bhw = there_Bhw & (upper + lower != 2 * _MIDDLE).any(3)
    if odd_Bhw.any() or (_seen(pixels_BCHW) & ~there_Bhw).any():
        raise UserError(
            "a control image has parts that are no faces, or was resized: this ControlNet reads what the condition "
            "faces makes of a photo (control_from=PHOTO), at 32 px for each cell of the latent",
            code="unsupported",
        )


def _cells(pixels_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each cell: whether a face is drawn there [B, h, w], and its numbers and their inverse [B, h, w, 512]."""
    cells = _cut(pixels_BCHW)
    upper, lower = cells[:, 0].flatten(3).float().split(WIDTH, dim=3)
    return (cells[:, 3] == 255).flatten(3).all(3), upper, lower


def _seen(pixels_BCHW: Tensor) -> Tensor:
    """[B, h, w]: whether anything is drawn in a cell."""
    return (_cut(pixels_BCHW)[:, 3] > 0).flatten(3).any(3)


def _cut(pixels_BCHW: Tensor) -> Tensor:
    """[B, 4, h, w, 32, 32]: the whole cells."""
    batch, _, height, width = pixels_BCHW.shape
    rows, columns = height // CELL_PX, width // CELL_PX
    cut = pixels_BCHW[:, :, : rows * CELL_PX, : columns * CELL_PX]
    return cut.reshape(batch, 4, rows, CELL_PX, columns, CELL_PX).permute(0, 1, 2, 4, 3, 5)
