"""The settings with which a recipe has room on a card and in a host where it has none, found by planning.

What computes the same, or nearly, comes first; then how gradients become updates, which averages are kept and a base of
8 bits; last how weights are stored. Of what changes equally little, what is predicted to be the fastest comes first,
and of what is equally fast the fewest settings. `remedies` lists what is tried.
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
_TRIES = 6
"""Combinations whose step is computed before the search gives up."""
_COMPUTED = "computed"
"""Kind of the bytes that a step makes but for gradients, by which combinations are compared before they are planned."""
_SHARES = (25, 50, 75, 100)
"""Shares of the blocks that may wait, in per cent."""
_OF_HOST = {"cache", "save"}
"""Remedies that take less of the host's memory."""
_APART = ({"fsdp", "moments"}, {"cache", "readers"})
"""Remedies that do not go together: Adafactor wants whole parameters; captions of a cache need no encoder."""
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
    """The least that is left of what is held and computed, by kind."""
    slower: float = 1.0
    """Times that computing takes, about."""
    sent: float = 0.0
    """Bytes that are copied to the device in an update while it computes."""
    awaited: float = 0.0
    """Bytes that are copied while it waits for them."""


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
        return _tried([micro], (), again, say)[0]
    micros = oom.divisors(sizes.whole // sizes.ranks, sizes.micro)
    kept = {kind: float(count.bytes_of(kind)) for kind in static.KINDS}
    kept[_COMPUTED] = max(0.0, step.peak.passes - kept["gradients"]) * min(micros) / step.peak.micro
    lacking: list[tuple[float, set[str]]] = []
    for chosen in _likely(step, count, kept, typed):
        size, of_host = _left_of(kept, chosen), {remedy.name for remedy in chosen} & _OF_HOST
        # Another that was planned takes no more of the device, and of the host, and has no room.
        if any(size >= less and of_host <= helped for less, helped in lacking):
            continue
        given = [override for remedy in chosen for override in remedy.given]
        say(f"trying {' '.join(given)}")
        found, on_device = _tried(micros, given, again, say)
        if found or len(lacking) == _TRIES:
            return found
        lacking.append((size, of_host if on_device else _OF_HOST))
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
) -> tuple[Fitting | None, bool]:
    """With the largest of these micro-batches that has room, the smallest of which is tried first; and whether that has
    room on the device."""
    found: Fitting | None = None
    on_device = False
    *larger, smallest = sorted(micros, reverse=True)
    try:
        target = again([*given, f"{_MICRO}={smallest}"])
        parts = target.parts()
        counted = static.count(target.config, parts, target.mesh)
        steps = estimate.simulated_step(target, parts, counted, say)
    except UserError:  # it does not go with the rest of the recipe
        return None, False
    for micro in (smallest, *larger):
        peak = steps.peak(micro)
        more = (*given, f"{_MICRO}={micro}")
        if target.card is None or target.left(peak) >= 0:
            on_device = True
            cut = again(more)
            host = estimate.host_of(cut, parts, counted, peak)
            found = Fitting(cut, peak, more, host=host) if host.fits(target.ram) else found
        if found is None or (micro != smallest and found.peak is peak):
            break
    return found, on_device


def _likely(step: Step, count: MemoryCount, kept: Kept, typed: Container[str]) -> list[list[Remedy]]:
    """Combinations of remedies in the order in which they are tried: what changes least of what is learnt, the fastest,
    the fewest. Those are left out of which what is held has no room."""
    target = step.target
    known = [
        replace(r, given=(*r.given, *(own for own in r.repeated if own.partition("=")[0] not in typed)))
        for r in remedies(target.given, target, count)
        if not any(given.partition("=")[0] in typed for given in r.given)
    ]
    every = [list(chosen) for size in range(1, len(known) + 1) for chosen in combinations(known, size)]
    room = math.inf if target.card is None else target.card - (CONTEXT_BYTES if target.on_gpu else 0)
    held = {kind: size for kind, size in kept.items() if kind != _COMPUTED}
    fits = [chosen for chosen in filter(_go_together, every) if _left_of(held, chosen) <= room]
    return sorted(fits, key=lambda chosen: _cost(step, chosen))


def _cost(step: Step, chosen: Sequence[Remedy]) -> tuple[int, float, int]:
    """The order of a combination: by how much it changes, then by the predicted seconds of an update, then by size."""
    seconds, link = (1.0, math.inf) if step.host is None else (step.host.seconds, step.host.rates.link)
    computed = seconds * math.prod(remedy.slower for remedy in chosen)
    predicted = max(computed, sum(remedy.sent for remedy in chosen) / link)
    predicted += sum(remedy.awaited for remedy in chosen) / link
    return sum(remedy.harm for remedy in chosen), round(predicted, 9), len(chosen)


def _go_together(chosen: Sequence[Remedy]) -> bool:
    """True if no two give one setting, or exclude each other."""
    settings = [given.partition("=")[0] for remedy in chosen for given in remedy.given]
    names = {remedy.name for remedy in chosen}
    return len({*settings}) == len(settings) and not any(pair <= names for pair in _APART)


def remedies(config: Config, target: Target, count: MemoryCount) -> Iterator[Remedy]:
    """Remedies that the recipe does not use yet."""
    training, optimizer, mesh = config.training, config.optimizer, target.mesh
    node = mesh.devices // mesh.nodes
    if not training.gradient_checkpointing:
        yield Remedy("recompute", ("training.gradient_checkpointing=true",), spares=_left(computed=0.3), slower=1.3)
    if node > 1 and not mesh.splits:
        everything = dict.fromkeys(static.KINDS, 1 / node)
        yield Remedy("fsdp", (f"mesh.ici_fsdp_parallelism={node}",), spares=_left(**everything), slower=1.1)
    if training.frozen_precision == "no":
        yield Remedy("frozen", ("training.frozen_precision=bf16",), spares=_left(computed=0.7))
    if config.ema.enabled or config.ema.post_hoc:
        post_hoc = ("ema.post_hoc=[]",) if config.ema.post_hoc else ()
        yield Remedy("averages", ("ema.enabled=false", *post_hoc), harm=1, spares=_left(averages=0))
    if optimizer.name not in ("adafactor", "adamw_8bit") and not mesh.splits:
        rate = f"optimizer.learning_rate={optimizer.learning_rate:g}"
        yield Remedy("moments", ("optimizer.name=adafactor",), (rate,), harm=1, spares=_left(moments=0))
    if training.weights_dtype == "float32":
        half = _left(weights=0.5, gradients=0.5, reference=0.5)
        yield Remedy("weights", ("training.weights_dtype=bfloat16",), harm=2, spares=half)
    extends = all(own.part != "all" for own in config.adapters.values())
    if not extends and target.could_move_in_backward:
        once = ("optimizer.in_backward=after_norm",)
        yield Remedy("gradients", once, spares=_left(gradients=0), slower=1.7)
    if extends and training.base_precision == "no":
        for form, share, harm in (("int8", 0.25, 1), ("nf4", 0.14, 2)):
            spares = _left(weights=share, frozen=share)
            yield Remedy(form, (f"training.base_precision={form}",), harm=harm, spares=spares, slower=1.2)
    if target.on_gpu and not mesh.splits:
        yield from _to_host(config, count, target, extends)
    if target.ram is not None:
        yield from _of_host(config)


def _to_host(config: Config, count: MemoryCount, target: Target, extends: bool) -> Iterator[Remedy]:
    """Remedies that put into the host's memory what a device needs at times: the same numbers."""
    training, times = config.training, target.sizes.accumulation
    if not training.offload_activations and not training.compile:
        yield Remedy("activations", ("training.offload_activations=true",), spares=_left(computed=0.7), slower=1.15)
    moves = bool(config.optimizer.in_backward)
    if not training.swap_blocks and (extends or moves or target.could_move_in_backward):
        # What is trained is moved on the device, with its moments and averages, once in an update.
        once = {} if extends else dict.fromkeys(("moments", "averages"), 1)
        passes, given = dict.fromkeys(("weights", "quantized"), 2 * times), ("optimizer.in_backward=after_norm",)
        base = sum(count.bytes_of(kind) * sent for kind, sent in {**passes, **once}.items())
        for share in _SHARES:
            shares = dict.fromkeys({**passes, **once}, max(0.05, 1 - share / 100))
            yield Remedy(
                "swap", (f"training.swap_blocks={share}%", *(() if extends or moves else given)),
                spares=_left(**shares, **({} if extends else {"gradients": 0})), sent=base * share / 100,
                slower=1.0 if extends or moves else 1.7,
            )  # fmt: skip
    kinds, names = ("frozen", "quantized"), config.model.text_encoders()
    size = sum(each.kinds.get(kind, 0) for each in count.held if each.component in names for kind in kinds)
    if size and training.text_encoders == "resident":
        left = 1 - size / sum(map(count.bytes_of, kinds))
        spares = _left(frozen=left, quantized=left)
        yield Remedy("readers", ("training.text_encoders=offload",), spares=spares, awaited=size * times)


def _of_host(config: Config) -> Iterator[Remedy]:
    """Remedies that take, or leave, memory of the host or disk: only where the host's memory is known."""
    if config.cache.path is None and config.model.text_encoders():
        yield Remedy("cache", ("cache.path=auto",), harm=1, spares=_left(frozen=0), slower=0.9)
    if config.checkpoint.background:
        yield Remedy("save", ("checkpoint.background=false",), harm=1, slower=1.01)


def _left(**shares: float) -> Callable[[Kept], Kept]:
    """Leaves shares of some kinds of bytes, and all of the others."""
    return lambda kept: {kind: size * shares.get(kind, 1) for kind, size in kept.items()}


def _left_of(kept: Kept, chosen: Sequence[Remedy]) -> float:
    """The least bytes that these remedies leave."""
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
