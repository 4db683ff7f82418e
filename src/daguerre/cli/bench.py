"""Measure the training speed of a recipe and of variants of it.

usage: daguerre bench RECIPE [key=value ...]

Times the training step of a recipe: the run's own update with its optimizer, averages and clipping, on random data.
Networks whose weights are not on this machine get random ones. Variants take turns in one process; the others are
compared with the first, by the median of their paired ratios. Everything is written as JSON, also after Ctrl-C, or
where memory or time ran out.

  daguerre bench quickstart
  daguerre bench sd15 'variants={base: [], ckpt: [training.gradient_checkpointing=true]}'
  daguerre bench quickstart inputs=loader loader.num_workers=2       with the recipe's data: waiting for it is real
  daguerre bench sdxl part=encode training.per_device_batch_size=8   the frozen networks alone

Options
  variants         names, and overrides of the recipe by which each differs: {base: [], name: [key=value, ...]}
  part             step: whole updates (default); encode: what they add where latents are not cached
  inputs           latents: random latents and text features (default); pixels: images that are encoded in each
                   update; loader: the recipe's data
  rounds           rounds at most (12)
  turn_seconds     length of a turn in a round (2)
  soak_seconds     training before the first round (60 on a GPU, 2 on a CPU)
  budget_seconds   most time that all of it takes (300)
  out              JSON file (bench-RECIPE.json)

Columns: images a second; milliseconds an update; model FLOP/s (forward and backward passes of what is trained,
nothing computed twice), as a share of a large matrix product measured in the same call, and of the datasheet;
memory; waiting for data; what the first updates took beyond usual ones. More: docs/speed.md.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from daguerre import errors
from daguerre.bench import options as bench_options
from daguerre.bench import report, timing, variants
from daguerre.bench.options import Request
from daguerre.bench.report import Rates
from daguerre.bench.timing import Ended, Result, Rounds
from daguerre.bench.variants import Variant
from daguerre.checkpoint.atomic import write_json_atomically
from daguerre.checkpoint.environment import environment
from daguerre.cli.parts import out_file
from daguerre.errors import UserError
from daguerre.run import summary
from daguerre.training import device as devices
from daguerre.training.performance import peak_rates as measured


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 if a variant failed for another reason than memory; that of the signal if one ended it."""
    request = bench_options.read(arguments)
    out = _out(request)
    for notice in request.notices:
        print(notice)
    with tempfile.TemporaryDirectory() as folder:
        kind, makers = variants.KINDS[request.options.part], {}
        for variant in request.variants:
            makers[variant.name] = partial(kind, variant.config, request.options, Path(folder))
        devices_named = {variant.config.training.device for variant in request.variants}
        if len(devices_named) > 1:
            raise UserError(
                "training.device: all variants of one call are measured on one device",
                code="conflict",
                setting="training.device",
            )
        return measure(request, makers, devices.choose_device(devices_named.pop()), out)


def _out(request: Request) -> Path:
    """The file to write, checked before hours of measuring, not after."""
    return out_file.place(request.options.out or f"bench-{Path(request.recipe).stem}.json")


def measure(
    request: Request,
    makers: Mapping[str, Callable[[], Variant]],
    device: torch.device,
    out: Path,
    more: dict[str, Any] | None = None,
) -> int:
    """Measures what the makers build, writes and prints it; `more` goes into the document."""
    options, begun = request.options, time.time()
    soak = (60.0 if device.type == "cuda" else 2.0) if options.soak_seconds is None else options.soak_seconds
    ended: Ended | None = None
    rates: Rates | None = None

    def write(complete: bool = False) -> None:
        found = _document(request, device, begun, rounds.results, rates, complete, ended)
        write_json_atomically(out, found | (more or {}))

    rounds = Rounds(
        makers, device, options.rounds, options.turn_seconds, soak, options.budget_seconds, print_now, write
    )  # fmt: skip
    try:
        with timing.limited(options.budget_seconds):
            rates = denominators(device)
            print_now(f"{summary.describe_device(device)}; {report.rates_text(rates)}")
            rounds.run()
    except Ended as error:
        ended = error
        print_now(f"{error.reason}: these are the results so far")
    write(complete=ended is None)
    if rates is not None and rounds.results:
        print("\n".join(["", *report.table(list(rounds.results.values()), rates, device.type == "cpu")]))
    print(f"all of it: {out}")
    failed = any(result.problem and not result.out_of_memory for result in rounds.results.values())
    return ended.exit_code if ended and ended.exit_code else errors.FAILED if failed else errors.DONE


def denominators(device: torch.device) -> Rates:
    """Rates of the device, in the types that trainings compute with. A GPU computes float32 in two ways at once,
    convolutions in TF32 and products as `matmul_precision` says: there is no one rate to divide by."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    wanted = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    products = {dtype: measured.product_flops(device, dtype) for dtype in wanted}
    return Rates(products, measured.copy_bytes(device), measured.datasheet(name))


def print_now(text: str) -> None:
    """A line that is seen at once, also by who reads a pipe."""
    print(text, flush=True)


def _document(
    request: Request,
    device: torch.device,
    begun: float,
    results: dict[str, Result],
    rates: Rates | None,
    complete: bool,
    ended: Ended | None,
) -> dict[str, Any]:
    first = next(iter(results.values()), None)
    found: dict[str, Any] = {
        "recipe": request.recipe,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begun)) + " UTC",
        "seconds": time.time() - begun,
        "complete": complete,
        "ended": ended.reason if ended else None,
        "device": summary.describe_device(device),
        "options": request.options.model_dump(mode="json"),
        "variants": {variant.name: list(variant.overrides) for variant in request.variants},
        "configs": {variant.name: variant.config.model_dump(mode="json") for variant in request.variants},
        "environment": environment(),
        "rates": None,
        "rows": [],
    }
    if rates is not None:
        products = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.products.items()}
        sheet = vars(rates.datasheet) if rates.datasheet else None
        found["rates"] = {"product_flops": products, "copy_bytes": rates.copy_bytes, "datasheet": sheet}
        found["rows"] = [report.document(result, first, rates) for result in results.values()] if first else []
    return found
