"""Gives diffusers' schedulers the noise that ours get, so that samplers with fresh noise can be compared."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
from torch import Tensor

NOISY = ("dpmsolver_multistep", "edm_dpmsolver_multistep", "euler_ancestral_discrete", "lcm")
"""Schedulers that draw noise."""


def inject(monkeypatch: pytest.MonkeyPatch, fresh_noise: Callable[[int], Tensor]) -> None:
    """From now on diffusers' schedulers draw the noise of step 0, 1, ... in place of torch's."""
    for name in NOISY:
        count = iter(range(1000))
        module = import_module(f"diffusers.schedulers.scheduling_{name}")
        monkeypatch.setattr(module, "randn_tensor", lambda *shape, count=count, **how: fresh_noise(next(count)))
