"""The settings with which a recipe has room on a card where it has none: the mildest combination, found by planning.

What computes the same, or nearly, comes first; then how gradients become updates and which averages are kept; last how
weights are stored.
"""

import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from daguerre.config import overrides
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.memory import estimate, static
from daguerre.memory.estimate import CONTEXT_BYTES, Say, Step, Target
from daguerre.memory.peak import Peak
from daguerre.memory.report import format_size
from daguerre.memory.static import MemoryCount
from daguerre.training import oom
from daguerre.training.settings import largest_divisor

_MICRO, _ACCUMULATION = "training.per_device_batch_size", "training.gradient_accumulation_steps"
_TRIES = 4
"""Combinations whose step is computed before the search gives up."""
_COLUMNS = 92
NONE = "no combination of settings that was tried fits: use more devices (fsdp), or smaller images"
"""Message when nothing fits."""


@dataclass(frozen=True)
class Remedy:
    """Something that takes less memory."""

    name: str
    given: tuple[str, ...]
    """Overrides."""
    repeated: tuple[str, ...] = ()
    """Overrides with what the recipe has already, where `given` drops that."""
    harm: int = 0
    """Rank by how much it changes what is learnt; 0: nothing, or hardly."""


@dataclass(frozen=True)
class Fitting:
    """A combination that has room."""

    target: Target
    peak: Peak
    given: tuple[str, ...]
    """Overrides in addition to those that the command gave."""
    command: tuple[str, ...] = ()
    """The whole command."""

    def lines(self) -> list[str]:
        """Text for the terminal: predicted bytes, and the command, to be pasted."""
        taken, left = self.target.taken(self.peak), self.target.left(self.peak)
        return [f"{format_size(taken)} predicted, {format_size(left)} free, with", *_as_shell(self.command)]

    def document(self) -> dict[str, object]:
        return {
            "command": shlex.join(self.command),
            "overrides": list(self.given),
            "micro_batch": self.target.sizes.micro,
            "taken_bytes": self.target.taken(self.peak),
        }


def find(
    step: Step, count: MemoryCount, typed: Container[str], again: Callable[[Sequence[str]], Target], say: Say
) -> Fitting | None:
    """The mildest combination for a step without room; settings that the user `typed` stay. `again` is the target of
    the same command with more overrides. None where nothing that is tried has room."""
    sizes = step.target.sizes
    if step.largest is not None:
        micro = largest_divisor(sizes.whole // sizes.ranks, step.largest.micro)
        if micro == step.largest.micro:
            return Fitting(again([f"{_MICRO}={micro}"]), step.largest, (f"{_MICRO}={micro}",))
        return _tried([micro], (), again, say)
    micros = oom.divisors(sizes.whole // sizes.ranks, sizes.micro)
    for harmful, mild in _likely(step.target, count, typed):
        given = [override for remedy in (*harmful, *mild) for override in remedy.given]
        say(f"trying {' '.join(given)}")
        if found := _tried(micros, given, again, say):
            fewer = [override for remedy in harmful for override in remedy.given]
            say(f"trying {' '.join(fewer)}")
            return (mild and fewer and _tried(micros, fewer, again, say)) or found
    return None


def without_batch_cut(given: Sequence[str]) -> list[str]:
    """The overrides without those that say how a global batch is cut."""
    return [
        override
        for override in given
        if not {path.rpartition(".")[2] for path, _ in lookup.translate(*overrides.pair(override)).values}
        & {_MICRO.rpartition(".")[2], _ACCUMULATION.rpartition(".")[2]}
    ]


def _tried(
    micros: Sequence[int], given: Sequence[str], again: Callable[[Sequence[str]], Target], say: Say
) -> Fitting | None:
    """With the largest of these micro-batches that has room, the smallest of which is tried first."""
    found: Fitting | None = None
    *larger, smallest = sorted(micros, reverse=True)
    try:
        target = again([*given, f"{_MICRO}={smallest}"])
        parts = target.parts()
        steps = estimate.simulated_step(target, parts, static.count(target.config, parts, target.mesh), say)
    except UserError:  # it does not go with the rest of the recipe
        return None
    for micro in (smallest, *larger):
        peak = steps.peak(micro)
        if target.left(peak) >= 0:
            more = (*given, f"{_MICRO}={micro}")
            found = Fitting(again(more), peak, more)
        if found is None or (micro != smallest and found.peak is peak):
            break
    return found


def _likely(target: Target, count: MemoryCount, typed: Container[str]) -> list[tuple[list[Remedy], list[Remedy]]]:
    """Combinations of remedies that change what is learnt, least of all first, each with all that hardly do. Those are
    left out of which weights, gradients and moments alone have no room."""
    assert target.card is not None
    known = [
        replace(r, given=(*r.given, *(own for own in r.repeated if own.partition("=")[0] not in typed)))
        for r in remedies(target.given, target)
        if not any(given.partition("=")[0] in typed for given in r.given)
    ]
    harmful, mild = [r for r in known if r.harm], [r for r in known if not r.harm]
    every = [list(chosen) for size in range(len(harmful) + 1) for chosen in combinations(harmful, size)]
    room = target.card - (CONTEXT_BYTES if target.on_gpu else 0)
    likely = []
    for chosen in sorted(every, key=lambda chosen: sum(remedy.harm for remedy in chosen)):
        whole = any(remedy.name == "moments" for remedy in chosen)  # Adafactor wants whole parameters
        beside = [remedy for remedy in mild if not (whole and remedy.name == "fsdp")]
        if (chosen or beside) and _least(target, count, {remedy.name for remedy in (*chosen, *beside)}) <= room:
            likely.append((chosen, beside))
    return likely[:_TRIES]


def remedies(config: Config, target: Target) -> Iterator[Remedy]:
    """Remedies that the recipe does not use yet."""
    training, optimizer, mesh = config.training, config.optimizer, target.mesh
    split, node = mesh.degree("fsdp") * mesh.degree("tensor") > 1, mesh.devices // mesh.nodes
    if not training.gradient_checkpointing:
        yield Remedy("recompute", ("training.gradient_checkpointing=true",))
    if node > 1 and not split:
        yield Remedy("fsdp", (f"mesh.ici_fsdp_parallelism={node}",))
    if training.frozen_precision == "no":
        yield Remedy("frozen", ("training.frozen_precision=bf16",))
    if config.ema.enabled or config.ema.post_hoc:
        post_hoc = ("ema.post_hoc=[]",) if config.ema.post_hoc else ()
        yield Remedy("averages", ("ema.enabled=false", *post_hoc), harm=1)
    if optimizer.name not in ("adafactor", "adamw_8bit") and not split:
        rate = f"optimizer.learning_rate={optimizer.learning_rate:g}"
        yield Remedy("moments", ("optimizer.name=adafactor",), (rate,), harm=1)
    if training.weights_dtype == "float32":
        yield Remedy("weights", ("training.weights_dtype=bfloat16",), harm=2)


def _least(target: Target, count: MemoryCount, names: Container[str]) -> float:
    """Bytes that these remedies leave of what is held, gradients among it; activations are not."""
    kept = {kind: float(count.bytes_of(kind)) for kind in static.KINDS}
    if "weights" in names:
        kept |= {kind: kept[kind] / 2 for kind in ("weights", "gradients", "reference")}
    if "moments" in names:
        kept["moments"] = 0
    if "averages" in names:
        kept["averages"] = 0
    node = target.mesh.devices // target.mesh.nodes
    return sum(kept.values()) / (node if "fsdp" in names else 1)


def _as_shell(words: Sequence[str]) -> list[str]:
    """A command in lines of a terminal's width."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) > _COLUMNS:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return [f"  {line}" for line in lines]
