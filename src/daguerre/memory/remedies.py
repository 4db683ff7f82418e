"""The settings with which a recipe has room on a card and in a host where it has none, found by planning.

What computes the same, or nearly, comes first; then how gradients become updates and which averages are kept; last how
weights are stored. Of what changes equally little, the fastest comes first. `remedies` lists what is tried.
"""

import math
import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from daguerre.config import overrides
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.memory import estimate, static
from daguerre.memory.estimate import CONTEXT_BYTES, Say, Step, Target
from daguerre.memory.host import Host
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


Kept = Mapping[str, float]
"""Bytes of a device by kind (`static.KINDS`)."""


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
    spares: Callable[[Kept], Kept] = dict
    """The least that is left of what is held, by kind."""
    slower: float = 1.0
    """Times that an update takes, about: an order in which to try, no forecast."""


@dataclass(frozen=True)
class Fitting:
    """A combination that has room."""

    target: Target
    peak: Peak
    given: tuple[str, ...]
    """Overrides in addition to those that the command gave."""
    command: tuple[str, ...] = ()
    """The whole command."""
    host: Host | None = None
    """What it takes of the machine; None where that is as without these settings."""

    def lines(self) -> list[str]:
        """Text for the terminal: predicted bytes, and the command, to be pasted."""
        said = f"{format_size(self.target.taken(self.peak))} predicted"
        if self.target.card is not None:
            said += f", {format_size(self.target.left(self.peak))} free"
        if self.host is not None:
            said += f"; {format_size(self.host.memory)} of the host, {self.host.seconds:.3g} s an update"
        return [f"{said}, with", *_as_shell(self.command)]

    def document(self) -> dict[str, object]:
        return {
            "command": shlex.join(self.command),
            "overrides": list(self.given),
            "micro_batch": self.target.sizes.micro,
            "taken_bytes": self.target.taken(self.peak),
            **({} if self.host is None else {"host": self.host.document()}),
        }


def find(
    step: Step, count: MemoryCount, typed: Container[str], again: Callable[[Sequence[str]], Target], say: Say
) -> Fitting | None:
    """The mildest combination for a step without room; settings that the user `typed` stay. `again` is the target of
    the same command with more overrides. None where nothing that is tried has room."""
    sizes = step.target.sizes
    if step.largest is not None and not step.fits_device and step.fits_host:
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
        counted = static.count(target.config, parts, target.mesh)
        steps = estimate.simulated_step(target, parts, counted, say)
    except UserError:  # it does not go with the rest of the recipe
        return None
    for micro in (smallest, *larger):
        peak = steps.peak(micro)
        more = (*given, f"{_MICRO}={micro}")
        if target.card is None or target.left(peak) >= 0:
            cut = again(more)
            host = estimate.host_of(cut, parts, counted, peak)
            found = Fitting(cut, peak, more, host=host) if host.fits(target.ram) else found
        if found is None or (micro != smallest and found.peak is peak):
            break
    return found


def _likely(target: Target, count: MemoryCount, typed: Container[str]) -> list[tuple[list[Remedy], list[Remedy]]]:
    """Combinations of remedies that change what is learnt, least of all first, each with all that hardly do. Those are
    left out of which weights, gradients and moments alone have no room."""
    known = [
        replace(r, given=(*r.given, *(own for own in r.repeated if own.partition("=")[0] not in typed)))
        for r in remedies(target.given, target)
        if not any(given.partition("=")[0] in typed for given in r.given)
    ]
    harmful, mild = [r for r in known if r.harm], [r for r in known if not r.harm]
    every = [list(chosen) for size in range(len(harmful) + 1) for chosen in combinations(harmful, size)]
    room = math.inf if target.card is None else target.card - (CONTEXT_BYTES if target.on_gpu else 0)
    likely = []
    for chosen in sorted(filter(_go_together, every), key=_cost):
        whole = any(remedy.name == "moments" for remedy in chosen)  # Adafactor wants whole parameters
        beside = [remedy for remedy in mild if not (whole and remedy.name == "fsdp")]
        if (chosen or beside) and _least(count, [*chosen, *beside]) <= room:
            likely.append((chosen, beside))
    return likely[:_TRIES]


def _cost(chosen: Sequence[Remedy]) -> tuple[int, float]:
    """The order of a combination: by how much it changes, then by how slow it is."""
    return sum(remedy.harm for remedy in chosen), math.prod(remedy.slower for remedy in chosen)


def _go_together(chosen: Sequence[Remedy]) -> bool:
    """True if no two give one setting."""
    settings = [given.partition("=")[0] for remedy in chosen for given in remedy.given]
    return len({*settings}) == len(settings)


def remedies(config: Config, target: Target) -> Iterator[Remedy]:
    """Remedies that the recipe does not use yet."""
    training, optimizer, mesh = config.training, config.optimizer, target.mesh
    node = mesh.devices // mesh.nodes
    if not training.gradient_checkpointing:
        yield Remedy("recompute", ("training.gradient_checkpointing=true",), slower=1.3)
    if node > 1 and not mesh.splits:
        everything = dict.fromkeys(static.KINDS, 1 / node)
        yield Remedy("fsdp", (f"mesh.ici_fsdp_parallelism={node}",), spares=_left(**everything))
    if training.frozen_precision == "no":
        yield Remedy("frozen", ("training.frozen_precision=bf16",))
    if config.ema.enabled or config.ema.post_hoc:
        post_hoc = ("ema.post_hoc=[]",) if config.ema.post_hoc else ()
        yield Remedy("averages", ("ema.enabled=false", *post_hoc), harm=1, spares=_left(averages=0))
    if optimizer.name not in ("adafactor", "adamw_8bit") and not mesh.splits:
        rate = f"optimizer.learning_rate={optimizer.learning_rate:g}"
        yield Remedy("moments", ("optimizer.name=adafactor",), (rate,), harm=1, spares=_left(moments=0))
    extends = all(own.part != "all" for own in config.adapters.values())
    if not extends and target.could_move_in_backward:
        once = ("optimizer.in_backward=after_norm",)
        yield Remedy("gradients", once, harm=1, spares=_left(gradients=0), slower=1.7)
    if extends and training.base_precision == "no":
        for form, share, harm in (("int8", 0.25, 1), ("nf4", 0.14, 2)):
            spares = _left(weights=share, frozen=share)
            yield Remedy(form, (f"training.base_precision={form}",), harm=harm, spares=spares, slower=1.2)
    if extends and target.on_gpu and not training.swap_blocks:
        spares = _left(weights=0.4, quantized=0.4)
        yield Remedy("swap", ("training.swap_blocks=50%",), harm=1, spares=spares, slower=1.3)
    if training.weights_dtype == "float32":
        half = _left(weights=0.5, gradients=0.5, reference=0.5)
        yield Remedy("weights", ("training.weights_dtype=bfloat16",), harm=2, spares=half)
    if target.ram is not None:
        yield from _of_host(config)


def _of_host(config: Config) -> Iterator[Remedy]:
    """Remedies that take, or leave, memory of the host or disk: only where the host's memory is known."""
    if config.cache.path is None and config.model.text_encoders():
        yield Remedy("cache", ("cache.path=auto",), harm=1, spares=_left(frozen=0), slower=0.9)
    if config.checkpoint.background:
        yield Remedy("save", ("checkpoint.background=false",), harm=1, slower=1.01)


def _left(**shares: float) -> Callable[[Kept], Kept]:
    """Leaves shares of some kinds of bytes, and all of the others."""
    return lambda kept: {kind: size * shares.get(kind, 1) for kind, size in kept.items()}


def _least(count: MemoryCount, chosen: Sequence[Remedy]) -> float:
    """Bytes that these remedies leave of what is held, gradients among it; activations are not."""
    kept: Kept = {kind: float(count.bytes_of(kind)) for kind in static.KINDS}
    for remedy in chosen:
        kept = remedy.spares(kept)
    return sum(kept.values())


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
