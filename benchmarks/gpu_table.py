"""The end of benchmarks/gpu.sh: its parts as one JSON, and a short table with the goals of one H200.

python benchmarks/gpu_table.py FOLDER_OF_PARTS OUT.json SECONDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SMOKE = "smoke"
ROUNDS = {
    1: ("sd21-512", "sdxl-1024", "sd15-512-online", "sd15-256-compiled"),
    2: ("sd15-512", "sd15-256", "sdxl-1024-checkpointed", "vae-512", "sd15-512-default", "sd15-lora-512",
        "sd15-controlnet-512", "sdxl-lora-1024", "sd15-512-best"),
    3: ("cascade-c-768", "cascade-c-1b-768", "cascade-c-default", "cascade-b-default"),
}  # fmt: skip
"""Parts by the round in which they are measured."""
PARTS = tuple(name for parts in ROUNDS.values() for name in parts)
KERNELS = "kernels"
PLAN = "plan-"
"""Before the name of a part whose memory was predicted."""
GOALS = {"sd21-512": 175, "sd15-512": 165, "sd15-256": 800, "sdxl-1024": 21, "vae-512": 550}
GOALS |= {"cascade-c-768": 32, "cascade-c-1b-768": 100}
"""Images a second on one H200, bf16, averages and clipping on, latents given."""
RATIOS = {"diffusers-default": 1.5, "diffusers-best": 1.15}
APART = {"sdxl-1024-checkpointed": "sdxl-1024"}
"""What is compared with the first row of another part, as there is no room for both at once."""


def lines(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    """One for each contestant of a part."""
    if not document["rows"]:
        yield f"{name:22} {'':17} nothing was measured: {document['ended']}"
    for row in document["rows"]:
        head, why = f"{name:22} {row['name']:17}", (row["problem"] or "not measured").splitlines()[0]
        if not measured(row):
            yield f"{head} {why}"
            continue
        speed, share, memory = row["speed_of_first"], row["share_of_measured_rate"], row["peak_bytes"]
        cells = [f"{row['samples_per_second']:7.1f} img/s", f"{row['model_tflops_per_second']:6.3g} TFLOP/s"]
        cells += [f"{share:5.1%} of rate" if share else f"{'-':>5} of rate"]
        cells += [f"{memory / 1e9:5.1f} GB" if memory else f"{'-':>5} GB"]
        cells += [times(speed, speed["median"], speed["low"], speed["high"])] if speed else []
        cells += [f"goal {GOALS[name]}"] if row is document["rows"][0] and name in GOALS and aims(document) else []
        cells += ["alone"] if row["alone"] else []
        cells += [] if row["seconds"] else ["one turn before any round"]
        cells += [why] if row["problem"] else []
        yield f"{head} {'  '.join(cells)}".rstrip()


def measured(row: Mapping[str, Any]) -> bool:
    """Whether it has numbers, of rounds or of its first turn."""
    return "samples_per_second" in row


def aims(document: Mapping[str, Any]) -> bool:
    """Whether it was measured where the goals are."""
    return "H200" in document["device"]


def times(speed: Mapping[str, Any], middle: float, low: float, high: float) -> str:
    """A ratio with its interval, where it is of several rounds."""
    return f"{middle:.3f}x ({low:.3f} to {high:.3f})" if speed["rounds"] > 1 else f"{middle:.3f}x (of one round)"


def ratios(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How much faster ours is than each peer (the inverse of what the rows say), and parts against each other."""
    for part, row in ((each, row) for each in found.values() for row in each["rows"]):
        if row["name"] in RATIOS and row.get("speed_of_first"):
            speed = row["speed_of_first"]
            said = times(speed, *(1 / speed[of] for of in ("median", "high", "low")))
            goal = f", goal {RATIOS[row['name']]}x" if aims(part) else ""
            yield f"daguerre against {row['name']}: {said}{goal}, parity held"
    for one, other in APART.items():
        rows = [found[name]["rows"][0] for name in (one, other) if name in found and found[name]["rows"]]
        if len(rows) == 2 and all(map(measured, rows)):
            ratio = rows[0]["samples_per_second"] / rows[1]["samples_per_second"]
            yield f"{one} against {other}: {ratio:.3f}x (one after the other)"


def of_kernels(document: Mapping[str, Any]) -> Iterator[str]:
    """How far each kernel is from float64, and the share of a copy's bytes a second that it moves."""
    for row in document.get("kernels", ()):
        rates = row["bytes_per_second"].items()
        moved = ", ".join(f"{of} {rate / 1e9:.4g} GB/s ({rate / document['copy_bytes']:.0%})" for of, rate in rates)
        right = "" if row["gap"] <= 1e-2 else "  WRONG"
        yield f"{row['name']} {row['what']}: {moved} of a copy's; away from exact {row['gap']:.1e}{right}"


def planned(name: str, plan: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Memory of a part that was predicted beside what its tensors took."""
    predicted, rows = plan["step"]["peak_bytes"], found.get(name, {}).get("rows")
    if rows and rows[0].get("peak_bytes"):
        took = rows[0]["peak_bytes"]
        yield f"{name}: {predicted / 1e9:.1f} GB predicted, {took / 1e9:.1f} GB taken ({took / predicted - 1:+.1%})"


def main(folder: Path, out: Path, seconds: str) -> None:
    """Writes all of it, and prints the table."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path != out}
    out.write_text(json.dumps({"seconds": float(seconds), "parts": every}))
    found = {name: every[name] for name in (SMOKE, *PARTS) if name in every}
    print()
    for name, document in found.items():
        if name != SMOKE or not any(map(measured, document["rows"])):
            print("\n".join(lines(name, document)))
    begun = {name for parts in ROUNDS.values() if found.keys() & set(parts) for name in parts}
    if missing := [name for name in PARTS if name in begun and name not in found]:
        print(f"without a result: {', '.join(missing)}")
    for line in of_kernels(every.get(KERNELS, {})):
        print(line)
    for name in PARTS:
        if plan := every.get(PLAN + name):
            print("\n".join(planned(name, plan, found)))
    for line in ratios(found):
        print(line)
    first = next((document for document in found.values() if document["rates"] is not None), None)
    if first is not None:
        rates = first["rates"]
        products = ", ".join(f"{rate / 1e12:.4g} in {name}" for name, rate in rates["product_flops"].items())
        print(f"{first['device']}: products {products} TFLOP/s, copies {rates['copy_bytes'] / 1e9:.4g} GB/s")
    print(f"{seconds} s in all; everything: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
