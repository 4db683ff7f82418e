"""The end of benchmarks/gpu.sh: its parts as one JSON, and a short table with the goals of one H200.

python benchmarks/gpu_table.py FOLDER_OF_PARTS OUT.json SECONDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PARTS = ("sd15-512", "sd21-512", "sd15-256", "sdxl-1024", "vae-512", "sd15-512-peers")
GOALS = {"sd21-512": 175, "sd15-512": 165, "sd15-256": 800, "sdxl-1024": 21, "vae-512": 550}
"""Pictures a second on one H200, bf16, averages and clipping on, latents given."""
RATIOS = {"diffusers-default": 1.5, "diffusers-best": 1.15}


def lines(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    """One for each contestant of a part."""
    goal = f"goal {GOALS[name]}" if name in GOALS else ""
    if not document["rows"]:
        yield f"{name:16} {'':18} nothing was measured: {document['ended']}"
    for row in document["rows"]:
        head = f"{name:16} {row['name']:18}"
        if not row["seconds"]:
            yield f"{head} {(row['problem'] or 'not measured').splitlines()[0]}"
            continue
        speed, memory = row["speed_of_first"], row["peak_bytes"]
        cells = [f"{row['samples_per_second']:9.1f} img/s", f"{row['model_tflops_per_second']:6.3g} TFLOP/s"]
        cells += [f"{row['share_of_measured_rate']:6.1%} of rate"] if row["share_of_measured_rate"] else []
        cells += [f"{memory / 1e9:6.1f} GB"] if memory else []
        cells += [f"{speed['median']:.3f}x ({speed['low']:.3f} to {speed['high']:.3f})"] if speed else [goal]
        cells += ["alone"] if row["alone"] else []
        yield f"{head} {'  '.join(cells)}".rstrip()


def ratios(document: Mapping[str, Any]) -> Iterator[str]:
    """How much faster ours is than each peer: the inverse of what the rows say, where both were measured."""
    for row in document["rows"]:
        if row["name"] in RATIOS and row.get("speed_of_first"):
            speed = row["speed_of_first"]
            middle, low, high = (1 / speed[of] for of in ("median", "high", "low"))
            goal = RATIOS[row["name"]]
            yield f"daguerre against {row['name']}: {middle:.3f}x ({low:.3f} to {high:.3f}), goal {goal}x, parity held"


def main(folder: Path, out: Path, seconds: str) -> None:
    """Prints the table last."""
    found = {name: json.loads(path.read_text()) for name in PARTS if (path := folder / f"{name}.json").exists()}
    out.write_text(json.dumps({"seconds": float(seconds), "parts": found}))
    print()
    for name in PARTS:
        print("\n".join(lines(name, found[name])) if name in found else f"{name:16} did not get as far as a result")
    print("\n".join(line for document in found.values() for line in ratios(document)))
    first = next(iter(found.values()), None)
    if first is not None and first["rates"] is not None:
        rates = first["rates"]
        products = ", ".join(f"{rate / 1e12:.4g} in {name}" for name, rate in rates["product_flops"].items())
        print(f"{first['device']}: products {products} TFLOP/s, copies {rates['copy_bytes'] / 1e9:.4g} GB/s")
    print(f"{seconds} s in all; everything: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
