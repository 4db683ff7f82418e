"""What one update of recipes gives a GPU, counted without one, and the roofline that follows. Computed, not measured.

usage: python benchmarks/computed.py RECIPE [RECIPE ...] [device=h100|h200] [key=value ...]

The project's own loop makes an update of networks without memory on a GPU that is not there (tests/gpu), so torch's
real dispatcher chooses types, kernels and copies; needs a C++ compiler and the version of torch in constraints.txt, and
half a minute for SDXL. Each operator takes the time of its products or its bytes at shares of the datasheet's rates
(training/performance/peak_rates.py), and the host 12 us for its launch: the longer of the two is the update. A line a
recipe, as a table for docs/speed.md. `key=value` overrides settings of all of them.
"""

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PATHS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
    "pythonpath"
]
sys.path += [str(ROOT / path) for path in (*PATHS, "tests/gpu")]

import test_one_update  # noqa: E402
from twins import tree  # noqa: E402

from daguerre.training.performance import peak_rates  # noqa: E402
from daguerre.training.performance.work import Work  # noqa: E402

DEVICES = {"h100": "H100", "h200": "H200"}
ONE_PASS_BYTES = 36
"""Bytes that AdamW's kernel of one launch reads and writes a parameter (docs/speed.md)."""
CASTS = {"_to_copy", "copy_", "to"}
NORMS = ("norm", "silu", "geglu", "rotary")


def kind(name: str, operations: int) -> str:
    """What an operator's bytes are moved for."""
    if operations:
        return "attention" if "attention" in name else "products"
    if name in CASTS or name.startswith("_foreach_copy"):
        return "casts and copies"
    if any(word in name for word in NORMS):
        return "norms and gates"
    return "optimizer" if name.startswith(("_foreach", "_fused")) else "elementwise and sums"


def counted(library: str, recipe: str, overrides: list[str]) -> tuple[Work, dict[str, Any]]:
    """The work of an update, and all that `one_update.py` says of it."""
    places = [f"data.sources.{name}" for name in tree(recipe)["data"].get("sources", ())] or ["data"]
    more = [f"{place}.{setting}" for place in places for setting in ("source=folder", "path=images")]  # nobody reads it
    done = subprocess.run(
        [sys.executable, test_one_update.HERE / "one_update.py", library],
        input=json.dumps([{"recipe": recipe, "overrides": ["run_name=counted", *more, *overrides]}]),
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{recipe}: {done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    launches = {(name, operations, size): count for name, operations, size, count in result["work"]}
    launches["_fused_adamw_one_pass", 0, ONE_PASS_BYTES * result["one_pass"]] = 1
    return Work(launches), result


def row(recipe: str, work: Work, result: dict[str, Any], rates: peak_rates.Rates) -> list[str]:
    """The cells of a recipe's line."""
    size, count = Counter[str](), Counter[str]()
    for (name, operations, each), times in work.launches.items():
        size[kind(name, operations)] += each * times
        count[kind(name, operations)] += times
    seconds, host = work.seconds(rates), work.count * rates.launch_seconds
    return [
        f"`{recipe}`", str(result["samples"]), f"{work.count:,}", f"{count['casts and copies']:,}",
        *(f"{size[name] / 1e9:,.1f}" for name in KINDS),
        f"{work.flops / 1e12:,.1f}", f"{1000 * seconds:,.0f}", "launches" if host >= seconds else "device",
        f"{result['samples'] / seconds:,.1f}",
    ]  # fmt: skip


KINDS = ("products", "attention", "norms and gates", "casts and copies", "elementwise and sums", "optimizer")
HEAD = ["recipe", "images", "launches", "casts", *(f"GB {name}" for name in KINDS), "TFLOP", "ms", "bound by", "img/s"]


def main() -> None:
    words = sys.argv[1:]
    device = next((word.partition("=")[2] for word in words if word.startswith("device=")), "h100")
    recipes = [word for word in words if "=" not in word]
    if device not in DEVICES or not recipes:
        sys.exit(__doc__)
    overrides = [word for word in words if "=" in word and not word.startswith("device=")]
    rates = peak_rates.of_card(DEVICES[device], torch.bfloat16)
    print(f"Computed, not measured: {rates}\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    try:
        library = test_one_update.built()
    except pytest.skip.Exception as error:
        sys.exit(str(error))
    for recipe in recipes:
        print(f"| {' | '.join(row(recipe, *counted(library, recipe, overrides), rates))} |", flush=True)


if __name__ == "__main__":
    main()
