"""What trains and generates on cards of 8 to 24 GB, and the memory of the host that it takes: tables of docs/plan.md.

usage: python benchmarks/small_cards.py RECIPE [RECIPE ...] [part=training|sampling]

Computed, not measured, without weights and without a GPU: `daguerre plan` of each recipe with one set of settings after
the other, each computed once for all cards, and for each card the fastest by the predicted time that has room. Sizes of
cards are as they are sold: 8 GB are 8 x 2^30 bytes. Takes minutes a recipe.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from daguerre.assembly.batch_sizes import shared_out
from daguerre.cli.options import generate_options
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.generation import load, planned
from daguerre.memory import estimate, static
from daguerre.memory.estimate import Target
from daguerre.memory.host import Host
from daguerre.memory.peak import Peak, images_at_once

CARDS_GB = (8, 12, 16, 24)
RAM_GB = (16, 32, 64)
SWAPS = ("", *(f"training.swap_blocks={share}%" for share in (25, 50, 75, 100)))
TRAINING = [[swap] if swap else [] for swap in SWAPS]
SAMPLING = [
    ["base=true", *more, *([swap] if swap else [])]
    for more in ([], ["training.text_encoders=offload"])
    for swap in (SWAPS if more else SWAPS[:1])
]
HEAD = ("recipe", "card", "with", "device", "host", "time", *(f"{size} GB of RAM" for size in RAM_GB))


def trained(recipe: str, given: Sequence[str]) -> Iterator[tuple[Target, Peak, Host]]:
    """The step of a recipe on each card: computed once, as the card decides nothing but the rates."""
    loaded = configs.load(recipe, [f"run_name={recipe}", *given])
    mesh = loaded.config.mesh.resolved(1, 1)
    first = estimate.of(loaded.config, mesh, f"{CARDS_GB[0]}GiB", shared_out(loaded, mesh))
    parts = first.parts()
    count = static.count(first.config, parts, mesh)
    peak = estimate.simulated_step(first, parts, count).peak(images_at_once(first.config, first.sizes.micro))
    for size in CARDS_GB:
        target = replace(first, card=size << 30)
        yield target, peak, estimate.host_of(target, parts, count, peak)


def generated(recipe: str, given: Sequence[str]) -> Iterator[tuple[Target, Peak, Host]]:
    """An image of a recipe's pretrained networks on each card."""
    asked = generate_options.read([recipe, *given], planned=True)
    target = estimate.of(asked.config, asked.config.mesh.resolved(1, 1), f"{CARDS_GB[0]}GiB")
    own, parts = load.outlined(asked.model, target.config)
    batch = planned.batch(target, own, parts)
    for size in CARDS_GB:
        at = replace(target, card=size << 30)
        yield at, batch.peak, replace(batch, target=at).host


def cells(recipe: str, part: str) -> Iterator[str]:
    """A line of the table for each card."""
    compute, ladder = (trained, TRAINING) if part == "training" else (generated, SAMPLING)
    best: dict[int, tuple[float, str]] = {}
    for given in ladder:
        if len(best) == len(CARDS_GB):
            break
        try:
            found = [*compute(recipe, given)]
        except UserError as error:
            print(f"{recipe} {' '.join(given)}: {error}", file=sys.stderr)
            continue
        for target, peak, host in found:
            size = target.card >> 30
            if target.left(peak) >= 0 and (size not in best or host.seconds < best[size][0]):
                rooms = ["yes" if host.fits(ram << 30) else "-" for ram in RAM_GB]
                taken = f"{target.taken(peak) / 1e9:.1f} GB | {host.memory / 1e9:.1f} GB | {host.seconds:.3g} s"
                words = " ".join(word for word in given if word != "base=true")
                best[size] = host.seconds, f"{f'`{words}`' if words else ''} | {taken} | {' | '.join(rooms)}"
        print(f"{recipe} {part} {' '.join(given)}", file=sys.stderr, flush=True)
    for size in CARDS_GB:
        text = best[size][1] if size in best else "- | | | | " + " | ".join("-" * len(RAM_GB))
        yield f"| `{recipe}` | {size} GB | {text} |"


def main() -> None:
    words = sys.argv[1:]
    part = next((word.partition("=")[2] for word in words if word.startswith("part=")), "training")
    recipes = [word for word in words if "=" not in word]
    if part not in ("training", "sampling") or not recipes:
        sys.exit(__doc__)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for recipe in recipes:
        for line in cells(recipe, part):
            print(line, flush=True)


if __name__ == "__main__":
    main()
