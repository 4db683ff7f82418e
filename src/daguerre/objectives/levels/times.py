"""Time laws: the quantile of a noise level to the number from which a schedule makes its time.

Every law is its quantile function and rises, so that 0 is the clean end and 1 the noisy end whatever the objective; a
timestep bias moves the quantiles and so holds for each law. They are drawn in algebra.py; schedules are in
schedules.py.
"""

import torch
from torch import Tensor

from daguerre.objectives.levels import elementwise
from daguerre.objectives.settings import TimesSettings, TimestepBiasSettings


def law(settings: TimesSettings, quantile_B: Tensor) -> Tensor:
    """The value [B] float64 below which a draw of the law falls with probability `quantile_B` [B] float64 in [0, 1).

    uniform and logit_normal give a share of the schedule in [0, 1]; log_normal gives sigma in (0, inf).
    """
    if settings.name == "uniform":
        return quantile_B
    normal_B = settings.mean + settings.std * elementwise.normal_quantile(quantile_B)
    return elementwise.exp(normal_B) if settings.name == "log_normal" else elementwise.sigmoid(normal_B)


def biased(settings: TimestepBiasSettings, num_steps: int, uniform_B: Tensor) -> Tensor:
    """Quantiles [B] float64 in [0, 1) of uniform numbers [B] float64 in [0, 1): the slice is drawn more often.

    The density is m in [b, e) and 1 outside, over Z = 1 - (e - b) + m (e - b). This is the inverse of its integral, a
    line of three pieces, so that steps are drawn as by weights m and 1.
    """
    if settings.name == "none":
        return uniform_B
    b, e = (step / num_steps for step in settings.slice(num_steps))
    m = settings.multiplier
    total = 1.0 - (e - b) + m * (e - b)
    first, last = b / total, (b + m * (e - b)) / total
    before_B = (uniform_B * total).clamp(max=b)
    inside_B = (b + (uniform_B - first) * (total / m)).clamp(b, e)
    after_B = (e + (uniform_B - last) * total).clamp(e, 1.0)
    quantile_B = torch.where(uniform_B < first, before_B, torch.where(uniform_B < last, inside_B, after_B))
    return quantile_B.clamp(max=1.0 - 2.0**-53)
