"""Report of a benchmark: ratios with their intervals, one line a variant, and the JSON that holds everything."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daguerre.bench.timing import Result
from daguerre.training.performance.peak_rates import Datasheet

RESAMPLED = 4000
_LEVEL = 0.95
_MEASURED = (
    *("name", "alone", "samples", "flops_per_sample"),
    *("warm_up_seconds", "seconds", "cpu_seconds", "waited_seconds"),
)


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
    """Speed as a multiple of another's, with the interval that holds the true median in 95 of 100 cases."""

    median: float
    low: float
    high: float
    rounds: int
    """One alone gives no interval."""

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


def between(first: Result, result: Result, cpu: bool = False) -> Ratio | None:
    """Speed of `result` as a multiple of that of `first`; None where one of them has no round."""
    paired = not (first.alone or result.alone)
    theirs, ours = ([s / each.samples for s in (each.cpu_seconds if cpu else each.seconds)] for each in (first, result))
    return ratio(theirs, ours, paired)


def document(result: Result, first: Result, rates: Rates) -> dict[str, Any]:
    """A result as JSON: the numbers of the table, and all that was measured."""
    found: dict[str, Any] = {name: getattr(result, name) for name in _MEASURED}
    found |= {"problem": result.problem or None, "first_turn_seconds": result.first_seconds}
    step = result.usual_seconds
    if step is None:
        return found
    flops = result.samples * result.flops_per_sample / step
    rate, sheet = rates.products.get(result.compute), rates.datasheet
    in_16_bits = result.compute in (torch.bfloat16, torch.float16)
    found |= {
        "samples_per_second": result.samples / step,
        "ms_per_step": 1e3 * step,
        "model_tflops_per_second": flops / 1e12,
        "share_of_measured_rate": flops / rate if rate else None,
        "share_of_datasheet": flops / 1e12 / sheet.tflops if sheet and in_16_bits else None,
        "peak_bytes": result.peak_bytes,
        "data_wait_ms": 1e3 * statistics.median(result.waited_seconds) if result.waited_seconds else None,
        "compile_seconds": result.compile_seconds,
        "speed_of_first": None,
        "processor_speed_of_first": None,
    }
    if result is not first:
        for name, cpu in (("speed_of_first", False), ("processor_speed_of_first", True)):
            found[name] = vars(compared) if (compared := between(first, result, cpu)) else None
    return found


COLUMNS = (
    ("img/s", "samples_per_second", 1, "{:.1f}"),
    ("ms/step", "ms_per_step", 1, "{:.1f}"),
    ("TFLOP/s", "model_tflops_per_second", 1, "{:.3g}"),
    ("of rate", "share_of_measured_rate", 1, "{:.1%}"),
    ("of sheet", "share_of_datasheet", 1, "{:.1%}"),
    ("memory", "peak_bytes", 1e-9, "{:.2f} GB"),
    ("data wait", "data_wait_ms", 1, "{:.1f} ms"),
    ("compile", "compile_seconds", 1, "{:.1f} s"),
)
"""Heading, key of the document, factor and form of each number."""


def table(results: Sequence[Result], rates: Rates, on_cpu: bool) -> list[str]:
    """One line a variant, under a line of headings."""
    first = results[0]
    width = max(len("variant"), *(len(result.name) for result in results))
    against = f"speed against {first.name} (95 %)" if len(results) > 1 else ""
    lines = [f"{'variant':{width}}" + "".join(f"{name:>11}" for name, *_ in COLUMNS) + f"  {against}".rstrip()]
    for result in results:
        if result.usual_seconds is None:
            lines.append(f"{result.name:{width}}  {(result.problem or 'not measured').splitlines()[0]}")
            continue
        found = document(result, first, rates)
        cells = ["-" if found[key] is None else form.format(found[key] * factor) for _, key, factor, form in COLUMNS]
        notes = "; ".join(_notes(first, result, on_cpu))
        lines.append(f"{result.name:{width}}" + "".join(f"{cell:>11}" for cell in cells) + f"  {notes}")
    return [line.rstrip() for line in lines]


def _notes(first: Result, result: Result, on_cpu: bool) -> Iterator[str]:
    """Remarks behind the numbers of a variant."""
    if result is not first and (compared := between(first, result)):
        yield str(compared)
    if result is not first and on_cpu and (cpu := between(first, result, cpu=True)):
        yield f"processor time {cpu}"
    if result.alone:
        yield "measured alone"
    if not result.seconds:
        yield "one turn before any round"
    if result.problem:
        yield result.problem.splitlines()[0]


def rates_text(rates: Rates) -> str:
    """The denominators in a line."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in rates.products}
    products = ", ".join(f"{rate / 1e12:.4g} TFLOP/s in {names[dtype]}" for dtype, rate in rates.products.items())
    sheet = rates.datasheet
    known = f"; datasheet: {sheet.tflops:g} TFLOP/s in 16 bits, {sheet.gb_per_second:g} GB/s" if sheet else ""
    return f"measured here: matrix products {products}; copies {rates.copy_bytes / 1e9:.4g} GB/s{known}"
