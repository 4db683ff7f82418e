"""Forecasts memory of the host, disk and hours of a run, from counts alone: nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import ceil

from torch import Tensor

from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.plan.buckets import Bucket
from daguerre.formatting import counted
from daguerre.memory.peak import Peak, largest_bucket
from daguerre.memory.report import format_size, wrap
from daguerre.memory.static import MemoryCount
from daguerre.models import encoders
from daguerre.models.hosts import host
from daguerre.models.network import Network
from daguerre.settings import Duration
from daguerre.training.performance.peak_rates import Rates
from daguerre.training.precision import quantized
from daguerre.types import waits

PROCESS_BYTES = 700_000_000
"""A process with Python, torch, diffusers and transformers, and all else that a run imports: measured on Linux with a
CPU build of torch, at the end of a run, when its networks were gone."""
CUDA_BYTES = 1_450_000_000
"""In addition with CUDA: its libraries, and what its driver maps. An estimate, as the 2.15 GB of both are."""
NF4_BYTES = 50_000_000
"""In addition with bitsandbytes."""
WORKER_BYTES = 350_000_000
"""A loader process, which imports torch alone. Measured on Linux."""
CASTS = "a weight that is widened"
WIDE_BYTES = 4
"""Bytes of a number in float32."""
_READ_BYTES = 6
"""Bytes of a number of the one weight that is read at a time: float32, and the 16 bits of its file or its place."""
_CODED_BYTES = 13
"""The same where 8 bits are made of it on the host: float32, its shares of the scale, these rounded, and codes."""
_CAST_BYTES = 8
"""Bytes of a number of the one weight of few bits that a CPU widens to 16 bits, in addition: codes and product are
float32 on their way."""


@dataclass(frozen=True)
class Host:
    """The share of one machine in a run, but for its devices."""

    reading: Mapping[str, int]
    """Bytes of memory by what they are for, while networks are read."""
    training: Mapping[str, int]
    """The same, once they are there."""
    disk: Mapping[str, int]
    """Bytes of a whole run, of all machines."""
    rates: Rates
    seconds: float
    """Of an update."""
    updates: int | None
    """None where their number depends on the data."""
    at_most: bool = False
    """Their number depends on the data, and this is its limit."""
    doing: str = "while it trains"
    """What is done when networks are there, in words."""
    drawing: Mapping[str, int] = field(default_factory=dict)
    """The same as `training`, while encoders whose results a cache has read prompts of sample images."""
    processes: int = 1
    """Of this machine, each with networks of its own."""

    @property
    def memory(self) -> int:
        """Bytes of the fullest moment."""
        return sum(self._fullest[1].values())

    @property
    def _fullest(self) -> tuple[str, Mapping[str, int]]:
        """It in words, and its bytes."""
        moments = {
            self.doing: self.training,
            "while networks are read": self.reading,
            "while prompts of sample images are read": self.drawing,
        }
        return max(moments.items(), key=lambda moment: sum(moment[1].values()))

    def fits(self, ram: int | None) -> bool:
        """True if a node of so many bytes has room, or its memory is not known."""
        return ram is None or self.memory <= ram

    @property
    def hours(self) -> float | None:
        """Hours of all updates; None where their number depends on the data."""
        return None if self.updates is None else self.updates * self.seconds / 3600

    def lines(self, ram: int | None) -> list[str]:
        """Memory and disk, for a terminal."""
        moment, parts = self._fullest
        of_all = f", {self.processes} ranks" if self.processes > 1 else ""
        lines = [f"{f'memory of the host{of_all}':<30}{format_size(self.memory):>12}  most {moment}"]
        lines += [f"{f'  {name}':<30}{format_size(size):>12}" for name, size in parts.items() if size]
        if ram is not None:
            free = ram - self.memory
            verdict = f"fits, {format_size(free)} free" if free >= 0 else f"DOES NOT FIT: {format_size(-free)} too much"
            lines.append(f"{'host':<30}{format_size(ram):>12}  {verdict}")
        if not self.disk:
            return lines
        lines.append(f"{'disk':<30}{format_size(sum(self.disk.values())):>12}  without data and caches")
        return [*lines, *(f"{f'  {name}':<30}{format_size(size):>12}" for name, size in self.disk.items() if size)]

    def time_lines(self) -> list[str]:
        """Hours and what they assume, for a terminal."""
        lines = [f"{'an update':<30}{self.seconds:>10.3g} s"]
        if self.hours is not None:
            limit = "at most " * self.at_most
            lines.append(f"{f'{limit}{self.updates:,} updates':<30}{_hours(self.hours):>12}")
        else:
            lines.append(f"{'1,000 updates':<30}{_hours(self.seconds / 3.6):>12}")
        said = f"computed, not measured: {self.rates}; without saves, samples, validation and waits for data"
        if self.at_most:
            said += "; how many updates there are depends on the images: `daguerre train RECIPE --dry-run` counts them"
        return [*lines, *wrap(said)]

    def document(self) -> dict[str, object]:
        return {
            "memory_bytes": self.memory,
            "reading": dict(self.reading),
            "training": dict(self.training),
            "drawing": dict(self.drawing),
            "disk": dict(self.disk),
            "seconds_per_update": self.seconds,
            "updates": self.updates,
            "updates_at_most": self.at_most,
            "hours": self.hours,
            "assumed": str(self.rates),
        }


def forecast(
    config: Config, parts: Components, count: MemoryCount, peak: Peak, sizes: BatchSizes, gpu: bool, rates: Rates
) -> Host:
    """The forecast for one node of a mesh, whose devices train as `peak` says. Networks need no memory."""
    processes = count.mesh.devices // count.mesh.nodes
    base = programs(config, gpu)
    absent = {*parts.family.components} - {each.component for each in count.held}
    read = {name: size * processes for name, size in networks_read(config, parts, gpu, absent).items()}
    reading = {"programs": base * processes, **read}
    bucket, loader = largest_bucket(config), config.loader
    batch = peak.micro * bucket.area_px * 3 * (1 + len(parts.images))
    training = {
        "programs": base * processes,
        "tensors": 0 if gpu else peak.whole * processes,
        CASTS: 0 if gpu else widened(parts) * processes,
        "networks that wait": count.on_host * processes,
        "loader processes": loader.num_workers * (WORKER_BYTES + loader.prefetch_batches * batch) * processes,
        "batches": (loader.prefetch_batches + 1 + gpu) * batch * processes,
        "the copy of a save": count.saved_bytes * config.checkpoint.background // count.mesh.nodes,
    }
    work = peak.pass_work * sizes.accumulation + peak.update_work
    updates = _updates(config.training.duration, sizes.whole)
    disk = _disk(config, parts, count, bucket, updates)
    # Encoders that wait are copied before they compute, blocks while others do.
    readers = sum(map(encoders.held_bytes, filter(encoders.waiting, parts.family.components.values())))
    seconds = max(work.seconds(rates), peak.sent * sizes.accumulation / rates.link)
    seconds += readers * sizes.accumulation / rates.link
    drawing, draws = {}, config.sampling.num_images and absent.intersection(config.model.text_encoders())
    if gpu and draws and not count.mesh.splits:
        drawing = {**training, "the denoiser, which makes room": _makes_room(parts) * processes}
    at_most = config.training.duration.at_most is not None
    return Host(reading, training, disk, rates, seconds, updates, at_most, drawing=drawing, processes=processes)


def programs(config: Config, gpu: bool) -> int:
    """Bytes of a process without its networks."""
    return PROCESS_BYTES + CUDA_BYTES * gpu + NF4_BYTES * (config.training.base_precision == "nf4")


def _makes_room(parts: Components) -> int:
    """Bytes of denoisers' frozen weights that do not wait in the host's memory."""
    stored, networks = _stored(parts), encoders.denoisers(parts.family)
    frozen = [p for network in networks for p in network.parameters() if not p.requires_grad]
    every = [*frozen, *(codes for network in networks for codes in quantized.tensors(network))]
    return sum(stored(tensor) for tensor in every if not waits(tensor))


def _stored(parts: Components) -> Callable[[Tensor], int]:
    """Bytes of a weight as it is stored: the net of an outline is float32 until a training state is made of it."""
    narrow = {id(p) for name, p in parts.net.named_parameters() if name not in parts.float32}
    size = parts.numerics.weights.itemsize
    return lambda tensor: tensor.numel() * (size if id(tensor) in narrow else tensor.element_size())


def networks_read(config: Config, parts: Components, gpu: bool, absent: Collection[str] = ()) -> dict[str, int]:
    """Bytes of the host while the networks of one process are read, but for those that are `absent`: of what is made or
    read in float32, of what is read straight to its place and type there (deferred/), and of one weight on its
    way."""
    wide, kept, largest, known = 0, 0, 0, set[int]()
    at_once, stored = _at_once(config, parts), _stored(parts)
    for name, network in parts.networks.items():
        if name in absent:
            continue
        waiting = encoders.waiting(network.module) is not None
        for own, p in [*network.module.named_parameters(), *quantized.codes(network.module)]:
            if id(p) in known:
                continue
            known.add(id(p))
            if name in at_once or host(own)[1]:
                wide += p.numel() * WIDE_BYTES
            elif waiting or waits(p) or not gpu:
                kept += stored(p)
        whole = [p.numel() * _READ_BYTES for p in network.module.parameters()]
        coded = [layer.numbers for _, layer in quantized.layers(network.module)]
        largest = max([largest, *whole, *(count * (_READ_BYTES if gpu else _CODED_BYTES) for count in coded)])
    return {"networks in float32": wide, "networks in their types": kept, "the largest weight": largest}


def widened(parts: Components) -> int:
    """Bytes that a CPU needs in addition to its tensors while it widens a weight of few bits in a pass."""
    layers = [each for net in parts.family.components.values() for _, each in quantized.layers(net)]
    narrow = parts.numerics.compute.itemsize < WIDE_BYTES
    return max([each.numbers for each in layers], default=0) * _CAST_BYTES * narrow


def _at_once(config: Config, parts: Components) -> set[str]:
    """The networks that are in float32 as a whole at first: those that are made of numbers, autoencoders, and those of
    which an adapter reads weights."""
    networks, own = parts.networks, parts.family.networks
    made = {name for name, network in networks.items() if name not in own or _is_made(config, name, network)}
    reading = [own for own in config.adapters.values() if own.reads_weights]
    reached = [own.reaches(parts.family.trainable) for own in reading if not own.separate]
    whole = networks if any(own.separate for own in reading) else ()
    return made.union(whole, *reached)


def _is_made(config: Config, name: str, network: Network) -> bool:
    of_numbers = network.teacher is None and not isinstance(config.model.places.get(name), str)
    return of_numbers or network.role == "autoencoder"


def _updates(duration: Duration, batch: int) -> int | None:
    """Updates of a run, at most; None of one whose length is counted in epochs."""
    length = duration.at_most or duration
    return None if length.unit == "epochs" else length.steps(batch, None)


def _disk(
    config: Config, parts: Components, count: MemoryCount, bucket: Bucket, updates: int | None
) -> Mapping[str, int]:
    """Bytes on disk at the end of a run, and of the save before the oldest is deleted."""
    settings, sampling = config.checkpoint, config.sampling
    saves = _times(settings.every, updates) + 1
    kept = settings.keep + 1 + _times(settings.backup_every, updates)
    trained = sum(each.all_numbers for each in count.trained) * 4
    networks = [p.numel() * p.element_size() for net in parts.family.components.values() for p in net.parameters()]
    whole = any(own.whole for own in parts.attached.trainables.values())
    pixels = (sampling.width or bucket.width_px) * (sampling.height or bucket.height_px) * 3
    return {
        counted(min(kept, saves), "checkpoint"): min(kept, saves) * count.saved_bytes,
        "export": (sum(networks) if whole else trained) * settings.export,
        "sample images, at most": saves * sampling.num_images * pixels,
    }


def _times(every: Duration | None, updates: int | None) -> int:
    """The number of times that something is done in a run, as far as that is known without data."""
    known = every is not None and updates is not None and every.unit == "steps"
    return updates // every.number if known and every and updates else 0


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{ceil(hours * 60)} min"
