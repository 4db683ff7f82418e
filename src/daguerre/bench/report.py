"""What a benchmark says: ratios with their intervals, one row a contestant, and the JSON that holds everything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daguerre.bench.timing import Row
from daguerre.training.performance.peak_rates import Datasheet

RESAMPLED = 4000
_LEVEL = 0.95


@dataclass(frozen=True)
class Rates:
    """The denominators, measured in the same call."""

    products: Mapping[torch.dtype, float]
    """FLOP/s of a large matrix product, by its type."""
    copy_bytes: float
    """Bytes a second, read and written."""
    datasheet: Datasheet | None


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another, with the interval that holds the true median in 95 of 100 cases."""

    median: float
    low: float
    high: float
    rounds: int
    """Of one alone there is no interval."""

    def __str__(self) -> str:
        interval = f"{self.low:.3f} to {self.high:.3f}" if self.rounds > 1 else "of one round"
        return f"{self.median:.3f}x ({interval})"


def ratio(other: Sequence[float], own: Sequence[float], paired: bool = True) -> Ratio | None:
    """Times of another over one's own, the median over rounds; above 1: faster than it. None without a common round.

    The interval is a bootstrap over rounds: of pairs, where both took turns in one round; else of each by itself.
    """
    n = min(len(other), len(own))
    if n == 0:
        return None
    chance = np.random.default_rng(0)
    theirs, ours = np.array(other), np.array(own)
    if paired:
        pairs = theirs[:n] / ours[:n]
        drawn = np.median(pairs[chance.integers(0, n, (RESAMPLED, n))], axis=1)
        middle = float(np.median(pairs))
    else:
        medians = [np.median(t[chance.integers(0, len(t), (RESAMPLED, len(t)))], axis=1) for t in (theirs, ours)]
        drawn, middle = medians[0] / medians[1], float(np.median(theirs) / np.median(ours))
    low, high = np.quantile(drawn, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Ratio(middle, float(low), float(high), n)


def between(first: Row, row: Row, cpu: bool = False) -> Ratio | None:
    """How much faster `row` is than `first`; None where one of them has no round."""
    paired = not (first.alone or row.alone)
    theirs, ours = ([s / each.samples for s in (each.cpu_seconds if cpu else each.seconds)] for each in (first, row))
    return ratio(theirs, ours, paired)


def document(row: Row, first: Row, rates: Rates) -> dict[str, Any]:
    """A row as JSON: the numbers of the table, and all that was measured."""
    found: dict[str, Any] = {"name": row.name, "problem": row.problem or None, "alone": row.alone}
    found |= {"samples": row.samples, "flops_per_sample": row.flops_per_sample, "warm_up_seconds": row.warm_up_seconds}
    found |= {"seconds": row.seconds, "cpu_seconds": row.cpu_seconds, "waited_seconds": row.waited_seconds}
    found |= {"first_turn_seconds": row.first_seconds}
    step = row.usual_seconds
    if step is None:
        return found
    flops = row.samples * row.flops_per_sample / step
    rate, sheet = rates.products.get(row.compute), rates.datasheet
    in_16_bits = row.compute in (torch.bfloat16, torch.float16)
    found |= {
        "samples_per_second": row.samples / step,
        "ms_per_step": 1e3 * step,
        "model_tflops_per_second": flops / 1e12,
        "share_of_measured_rate": flops / rate if rate else None,
        "share_of_datasheet": flops / 1e12 / sheet.tflops if sheet and in_16_bits else None,
        "peak_bytes": row.peak_bytes,
        "data_wait_ms": 1e3 * statistics.median(row.waited_seconds) if row.waited_seconds else None,
        "compile_seconds": row.compile_seconds,
        "speed_of_first": None,
        "processor_speed_of_first": None,
    }
    if row is not first:
        for name, cpu in (("speed_of_first", False), ("processor_speed_of_first", True)):
            found[name] = vars(compared) if (compared := between(first, row, cpu)) else None
    return found


COLUMNS = ("img/s", "ms/step", "TFLOP/s", "of rate", "of sheet", "memory", "data wait", "compile")


def table(rows: Sequence[Row], rates: Rates, on_cpu: bool) -> list[str]:
    """One line a contestant, under a line of headings."""
    first = rows[0]
    width = max(len("variant"), *(len(row.name) for row in rows))
    against = f"speed against {first.name} (95 %)" if len(rows) > 1 else ""
    lines = [f"{'variant':{width}}" + "".join(f"{name:>11}" for name in COLUMNS) + f"  {against}".rstrip()]
    for row in rows:
        told = document(row, first, rates)
        if row.usual_seconds is None:
            lines.append(f"{row.name:{width}}  {(row.problem or 'not measured').splitlines()[0]}")
            continue
        compared = between(first, row) if row is not first else None
        cpu = between(first, row, cpu=True) if row is not first and on_cpu else None
        said = [str(compared)] if compared else []
        said += [f"processor time {cpu}"] if cpu else []
        said += ["measured alone"] if row.alone else []
        said += [] if row.seconds else ["one turn before any round"]
        said += [row.problem.splitlines()[0]] if row.problem else []
        lines.append(f"{row.name:{width}}" + "".join(f"{cell:>11}" for cell in _cells(told)) + "  " + "; ".join(said))
    return [line.rstrip() for line in lines]


def _cells(told: Mapping[str, Any]) -> list[str]:
    def text(name: str, form: str, factor: float = 1.0) -> str:
        return "-" if told[name] is None else format(told[name] * factor, form)

    return [
        text("samples_per_second", ".1f"),
        text("ms_per_step", ".1f"),
        text("model_tflops_per_second", ".3g"),
        text("share_of_measured_rate", ".1%"),
        text("share_of_datasheet", ".1%"),
        "-" if told["peak_bytes"] is None else f"{told['peak_bytes'] / 1e9:.2f} GB",
        "-" if told["data_wait_ms"] is None else f"{told['data_wait_ms']:.1f} ms",
        text("compile_seconds", ".1f") + " s",
    ]


def rates_text(rates: Rates) -> str:
    """The denominators in a line."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in rates.products}
    products = ", ".join(f"{rate / 1e12:.4g} TFLOP/s in {names[dtype]}" for dtype, rate in rates.products.items())
    sheet = rates.datasheet
    known = f"; datasheet: {sheet.tflops:g} TFLOP/s in 16 bits, {sheet.gb_per_second:g} GB/s" if sheet else ""
    return f"measured here: matrix products {products}; copies {rates.copy_bytes / 1e9:.4g} GB/s{known}"
