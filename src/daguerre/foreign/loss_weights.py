"""Loss weights of other trainers that are other numbers than those of the same name here, and by how much.

A weight of theirs is a function of SNR that stands before the squared error of what is predicted. It is compared at all
timesteps with the weight of ours that has its name; where they differ, the key counts as lost, with the numbers.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from math import sqrt
from typing import Any

from daguerre.foreign.names.values import NOTHING_ASKED
from daguerre.foreign.reader import Reading

Weight = Callable[[float], float]

STEPS = 1000
BETAS = 0.00085, 0.012
"""The first and the last beta of Stable Diffusion's schedule."""
LAW = "objective.weighting"
CUT = 1000.0
"""SNR above this counts as this in the debiased weights of kohya's scripts and OneTrainer."""
LEAST = 1e-30
"""In place of a terminal SNR of zero, at which the weights of eps have no number: what is trained there is refused, and
said elsewhere."""
TOLD_FROM = 1e-4
"""Least share of the weight that a message names: what the cut at SNR 1000 makes of one timestep is below it."""


def kohya(reading: Reading) -> None:
    """`debiased_estimation_loss` and `min_snr_gamma`; its table of SNR is made before the betas are changed."""
    gamma, v = _number(reading.get("min_snr_gamma")), _is_v(reading)
    fixed = reading.get("zero_terminal_snr") is True
    why = ["its SNR is that of the schedule before zero_terminal_snr changes it"] * fixed
    if reading.get("debiased_estimation_loss") is True:
        if gamma:
            reading.refuse("min_snr_gamma", "debiased_estimation_loss is the weight; both together are not supported")
        why += ["the error of v is weighted by 1 / (SNR + 1) there, by sqrt(SNR) / (SNR + 1) here"] * v
        theirs: Weight = (lambda snr: 1 / (min(snr, CUT) + 1)) if v else (lambda snr: 1 / sqrt(min(snr, CUT)))
        carry(reading, "debiased_estimation_loss", {f"{LAW}.name": "debiased"}, theirs, why, (False, fixed))
    elif gamma:
        values = {f"{LAW}.name": "min_snr", f"{LAW}.snr_gamma": gamma}
        carry(reading, "min_snr_gamma", values, of(values, v), why, (False, fixed))


def onetrainer(reading: Reading) -> None:
    """`loss_weight_fn` with its strength."""
    strength, v = _number(reading.get("loss_weight_strength", 5.0)), _is_v(reading)
    fixed = reading.get("rescale_noise_scheduler_to_zero_terminal_snr") is True
    laws: dict[str, tuple[dict[str, Any], Weight, str]] = {
        "CONSTANT": ({f"{LAW}.name": "none"}, lambda snr: 1.0, ""),
        "DEBIASED_ESTIMATION": (
            {f"{LAW}.name": "debiased"},
            lambda snr: 1 / sqrt(min(snr, CUT) + v),
            "the error of v is weighted by 1 / sqrt(SNR + 1) there, by sqrt(SNR) / (SNR + 1) here",
        ),
        "MIN_SNR_GAMMA": (
            {f"{LAW}.name": "min_snr", f"{LAW}.snr_gamma": strength},
            lambda snr: min(snr, strength) / (snr + v),
            "",
        ),
        "P2": (
            {f"{LAW}.name": "p2", f"{LAW}.p2_gamma": strength},
            lambda snr: (1 + snr + v) ** -strength,
            "the error of v is weighted by (SNR + 2)^-gamma there, by SNR (SNR + 1)^-(gamma + 1) here",
        ),
    }
    if (law := laws.get(str(reading.get("loss_weight_fn")))) is not None:
        carry(reading, "loss_weight_fn", law[0], law[1], [law[2]] * bool(law[2]), (fixed, fixed))
        reading.notice("loss_weight_strength", f"in {LAW}, where it has an effect")


def ai_toolkit(reading: Reading, prefix: str) -> None:
    """`train.min_snr_gamma`, which is that of eps whatever is predicted, and `train.snr_gamma`, which has no bound."""
    gamma, plain = (_number(reading.get(f"{prefix}{name}")) for name in ("min_snr_gamma", "snr_gamma"))
    if plain:
        reading.refuse(f"{prefix}snr_gamma", f"a weight of {plain:g} / SNR; min_snr_gamma has one, its least with 1")
    elif gamma:
        values = {f"{LAW}.name": "min_snr", f"{LAW}.snr_gamma": gamma}
        why = "the error of v is weighted by min(SNR, gamma) / SNR there, by min(SNR, gamma) / (SNR + 1) here"
        carry(reading, f"{prefix}min_snr_gamma", values, lambda snr: min(1.0, gamma / snr if snr else 1.0), [why])
    reading.note([f"{prefix}min_snr_gamma", f"{prefix}snr_gamma"], "off")


def carry(
    reading: Reading,
    key: str,
    values: Mapping[str, Any],
    theirs: Weight,
    why: list[str],
    fixed: tuple[bool, bool] = (False, False),
) -> None:
    """Their key is a weight of ours: carried where its numbers are the same, else set and listed as lost.

    Args:
        values: our settings of the weighting.
        theirs: their weight at an SNR.
        why: reasons for a difference, for users.
        fixed: whether their SNR and ours are of the schedule with zero terminal SNR.
    """
    ours = of(values, _is_v(reading))
    there, here = ([weight(snr) for snr in snrs(on)] for weight, on in zip((theirs, ours), fixed, strict=True))
    elsewhere = moved(there, here)
    if elsewhere < TOLD_FROM:
        reading.carry_all(key, values)
        return
    reading.assume_over(values)
    reading.refuse(
        key,
        f"{LAW}.name={values[f'{LAW}.name']} is set, and the run differs: {'; '.join(why)}. {elsewhere:.1%} of the "
        f"weight lies at other timesteps; at the last one it is {there[-1]:.3g} there and {here[-1]:.3g} here, on "
        f"average {sum(there) / STEPS:.3g} and {sum(here) / STEPS:.3g}",
    )


def of(values: Mapping[str, Any], v: bool) -> Weight:
    """Our weight of the squared error of v or eps at an SNR, as objectives/weights.py has it."""
    gamma, power = (float(values.get(f"{LAW}.{name}", 1.0)) for name in ("snr_gamma", "p2_gamma"))
    share: dict[str, Weight] = {  # of the error of x0, over SNR
        "none": lambda snr: (snr + 1) / snr if v else 1.0,
        "min_snr": lambda snr: min(1.0, gamma / snr),
        "debiased": lambda snr: 1 / sqrt(snr),
        "p2": lambda snr: (1 + snr) ** -power,
    }
    found = share[values[f"{LAW}.name"]]
    return (lambda snr: found(snr) * snr / (snr + 1)) if v else found


def snrs(fixed: bool) -> list[float]:
    """SNR at each timestep of Stable Diffusion's schedule; with zero terminal SNR (arXiv 2305.08891) if it is fixed."""
    first, last = map(sqrt, BETAS)
    kept = [1 - (first + (last - first) * t / (STEPS - 1)) ** 2 for t in range(STEPS)]
    roots = [sqrt(share) for share in accumulate(kept, lambda product, share: product * share)]
    if fixed:
        roots = [(root - roots[-1]) * roots[0] / (roots[0] - roots[-1]) for root in roots]
    return [max(root**2 / (1 - root**2), LEAST) for root in roots]


def moved(theirs: list[float], ours: list[float]) -> float:
    """Share of the weight that lies at other timesteps, both weights brought to the same sum; 0 to 1."""
    sums = sum(theirs), sum(ours)
    return sum(abs(a / sums[0] - b / sums[1]) for a, b in zip(theirs, ours, strict=True)) / 2


def _is_v(reading: Reading) -> bool:
    return reading.values.get("objective.name") == "v"


def _number(value: Any) -> float:
    """A number, also as text; 0 for what asks for nothing."""
    if value is None or str(value).lower() in (*NOTHING_ASKED, "false"):
        return 0.0
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return 0.0
