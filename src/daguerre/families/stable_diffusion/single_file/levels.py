"""The noise levels and the scale of latents that a single file has next to its weights.

CompVis' and Stability's code save the tables of their schedule with the weights. Programs that sample have the usual
ones built in and leave them unread, so that files with other tables are rare, and mean something.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from daguerre.errors import UserError

TABLES = ("alphas_cumprod", "betas", "denoiser.sigmas")
SCALE = "scale_factor"
USUAL = (0.00085, 0.012)
"""First and last beta of Stable Diffusion."""
_LONGEST = 100_000
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.05}
"""Relative error of a table whose numbers were rounded to 16 bits; of the others 1e-4."""
_WAY_OUT = "Use a copy without them, or leave them out by name: ignore_tensors=['alphas_cumprod*', 'betas', '*sigmas']"


def told(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The part of a scheduler's config that the tables among these tensors stand for; {} without one. UserError for
    tables of no scaled-linear betas, and for two that differ."""
    found = {name: _numbers(name, tensors[name]) for name in TABLES if name in tensors}
    first = next(iter(found), "")
    if odd := [name for name in found if found[name] != found[first]]:
        raise UserError(
            f"its {first} and its {odd[0]} are tables of different noise levels. {_WAY_OUT}", code="conflict"
        )
    return found.get(first, {})


def _numbers(name: str, table: Tensor) -> dict[str, Any]:
    given_T = _variances(name, table)
    T, tolerance = len(given_T), _TOLERANCE.get(table.dtype, 1e-4)
    own = (1 - given_T[0], 1 - given_T[-1] / given_T[-2])
    # The usual numbers first, as they are written. Of a table that was rounded no other ones can be told.
    fitted = [float(f"{float(each):.5g}") for each in own] if table.dtype not in _TOLERANCE else USUAL
    for start, end in itertools.product(*zip(USUAL, fitted, strict=True)):
        for zero in (False, True):
            wanted_T = _scaled_linear(start, end, T, zero) if 0 < start < 1 and 0 < end < 1 else None
            if wanted_T is not None and bool(((given_T - wanted_T).abs() <= tolerance * wanted_T + 1e-6).all()):
                numbers = {"beta_start": start, "beta_end": end, "num_train_timesteps": T}
                return {**numbers, **({"rescale_betas_zero_snr": True} if zero else {})}
    raise UserError(
        f"its {name} has {T:,} noise levels that are no scaled-linear betas, so the model was not trained on those of "
        f"Stable Diffusion, and on none that can be read from a table. {_WAY_OUT}",
        code="unsupported",
    )


def _variances(name: str, table: Tensor) -> Tensor:
    """alphas_cumprod [T], from a table of that name."""
    values = table.detach().double().flatten()
    if not table.is_floating_point() or not 2 <= len(values) <= _LONGEST:
        raise UserError(f"its {name} is no table of noise levels: {list(table.shape)} of {table.dtype}. {_WAY_OUT}")
    if name == "betas":
        values = (1 - values).cumprod(0)
    elif name == "denoiser.sigmas":
        values = 1 / (1 + values.sort().values.square())
    if not bool(((values >= 0) & (values <= 1)).all()):  # of NaN both are false
        raise UserError(f"its {name} has numbers that are no noise levels. {_WAY_OUT}", code="damaged")
    return values


def _scaled_linear(start: float, end: float, T: int, zero: bool) -> Tensor:
    """alphas_cumprod [T] of betas whose roots are evenly spaced; `zero`: rescaled to end in pure noise (Lin et al.
    2024, https://arxiv.org/abs/2305.08891, algorithm 1)."""
    betas_T = torch.linspace(start**0.5, end**0.5, T, dtype=torch.float64).square()
    roots_T = (1 - betas_T).cumprod(0).sqrt()
    if zero:
        roots_T = (roots_T - roots_T[-1]) * roots_T[0] / (roots_T[0] - roots_T[-1])
    return roots_T.square()


def scale(tensors: Mapping[str, Tensor]) -> float | None:
    """The number by which latents are multiplied, where a file says it. UserError for any other value."""
    if (given := tensors.get(SCALE)) is None:
        return None
    found = float(given.double().sum()) if given.numel() == 1 else 0.0
    if not 0 < found < float("inf"):
        raise UserError(
            f"its {SCALE} is no scale of latents. Leave it out by name: ignore_tensors=['{SCALE}']", code="damaged"
        )
    return found
