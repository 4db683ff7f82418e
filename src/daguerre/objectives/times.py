"""Time laws: the quantile of a noise level to the number from which a schedule makes its time.

Every law rises with the quantile, so that 0 is the clean end and 1 the noisy end whatever the objective. The quantiles
themselves are drawn in algebra.py; the schedules are in schedules.py.
"""

from __future__ import annotations

from torch import Tensor

from daguerre.objectives import elementwise
from daguerre.objectives.settings import TimesSettings


def law(settings: TimesSettings, quantile_B: Tensor) -> Tensor:
    """The value [B] float64 below which a draw of the law falls with probability `quantile_B` [B] float64 in [0, 1).

    uniform and logit_normal give a share of the schedule in [0, 1]; log_normal gives sigma in (0, inf).
    """
    if settings.name == "uniform":
        return quantile_B
    normal_B = settings.mean + settings.std * elementwise.normal_quantile(quantile_B)
    return elementwise.exp(normal_B) if settings.name == "log_normal" else elementwise.sigmoid(normal_B)
