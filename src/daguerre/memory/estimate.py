"""Targets of `daguerre plan`: devices that need not be here, and the step of a recipe on them: does it fit?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from daguerre.assembly.batch_sizes import BatchSizes, batch_sizes, check_uncut_batches
from daguerre.assembly.parts import Components, outline
from daguerre.config.config import Config
from daguerre.distributed.mesh import Mesh
from daguerre.memory import peak as memory_peak
from daguerre.memory.host import Host, forecast
from daguerre.memory.peak import Peak, SimulatedStep
from daguerre.memory.report import format_size, wrap
from daguerre.memory.static import MemoryCount
from daguerre.models.placement import frozen_modules
from daguerre.training.performance import kernels, peak_rates
from daguerre.training.settings import bytes_of

CONTEXT_BYTES = 1_000_000_000
"""What a GPU holds in addition to tensors: CUDA's context and kernels (about .5 GB) and work spaces of its libraries.
An estimate."""
ROUNDING = 0.04
"""Share of what a step makes and drops that the allocator loses to rounding and gaps. An estimate."""

Say = Callable[[str], None]
"""Gets a line for each thing that takes its time."""


@dataclass(frozen=True)
class Target:
    """Devices and how they train."""

    config: Config
    """As it acts there, to be outlined on a CPU."""
    given: Config
    """As the recipe says."""
    mesh: Mesh
    on_gpu: bool
    card: int | None
    """Bytes of a device, as far as they are known."""
    sizes: BatchSizes
    ram: int | None = None
    """Bytes of a node's memory, as far as they are known."""

    def parts(self) -> Components:
        """The networks without memory, with the kernels that they have there."""
        parts = outline(self.config)
        check_uncut_batches(self.config, self.sizes, parts.objective, parts.net)
        return self.laid_out(parts)

    def laid_out(self, parts: Components) -> Components:
        """The parts, whose networks lie in memory as they do there."""
        if self.on_gpu:
            training = self.given.training
            fused = training.kernels in ("auto", "triton")
            last = fused if training.channels_last == "auto" else training.channels_last
            kernels.layout((parts.net, *frozen_modules(parts.net, parts.networks).values()), fused, last)
        return parts

    def left(self, peak: Peak) -> float:
        """Bytes of a device that a step leaves free; below 0 where there is no room."""
        assert self.card is not None
        return self.card - self.taken(peak)

    def taken(self, peak: Peak) -> int:
        """Bytes of a device that a step takes, with what is no tensor."""
        if not self.on_gpu:
            return peak.whole
        return peak.whole + CONTEXT_BYTES + round(ROUNDING * (peak.whole - peak.held))

    @property
    def could_move_in_backward(self) -> bool:
        """True if optimizer.in_backward would go with the recipe on this mesh, and is not set."""
        own = self.given.optimizer
        alone = self.sizes.accumulation == self.mesh.devices == 1
        return alone and not own.in_backward and not own.needs_all_gradients

    def notices(self) -> Iterator[str]:
        """Settings that act differently on these devices, or not at all."""
        mesh, settings = self.mesh, self.given.mesh
        if not mesh.splits and "shard_frozen" in settings.model_fields_set:
            yield "mesh.shard_frozen has no effect: neither fsdp nor tensor has more than one device"
        if not mesh.splits and "logical_axis_rules" in settings.model_fields_set:
            yield "mesh.logical_axis_rules split no parameter: neither fsdp nor tensor has more than one device"
        if self.given.training.compile:
            yield "training.compile: activations of compiled blocks are counted as if they were not compiled"
        if mesh.degree("tensor") > 1:
            yield "activations are counted as if tensor did not split them: a step takes less than this"


def of(config: Config, mesh: Mesh, card: str | None, sizes: BatchSizes | None = None, ram: str | None = None) -> Target:
    """The target of these options: GPUs, unless the recipe says cpu, or nothing says GPU and this machine has none."""
    training = config.training
    here = torch.cuda.is_available()
    on_gpu = training.device == "cuda" or (training.device == "auto" and (mesh.devices > 1 or card is not None or here))
    limits = [bytes_of(text) for text in (card, training.max_device_memory) if text is not None]
    sizes = sizes or batch_sizes(config, None, mesh.batch_ranks)
    acting = config.model_copy(update={"training": training.model_copy(update=_on_gpu(config) if on_gpu else {})})
    node = None if ram is None else bytes_of(ram)
    return Target(acting, config, mesh, on_gpu, min(limits, default=None), sizes, node)


def _on_gpu(config: Config) -> dict[str, Any]:
    """Settings by which a CPU without kernels of its own computes in a GPU's types."""
    training = config.training
    changes: dict[str, Any] = {"device": "cpu", "max_device_memory": None, "compile": False}
    changes |= {"kernels": "plain", "channels_last": False}
    if training.mixed_precision == "auto" and training.weights_dtype == "float32":
        changes["mixed_precision"] = "bf16"
    if training.attention != "math":
        changes["attention"] = "auto"
    return changes


@dataclass(frozen=True)
class Step:
    """A step's fullest moment, and the largest one that has room."""

    target: Target
    peak: Peak
    precision: str
    largest: Peak | None
    ways: tuple[str, ...]
    """Settings that take less, where the recipe's own micro-batch has no room."""
    host: Host | None = None
    """Memory of the host, disk and hours."""

    @property
    def fits(self) -> bool:
        """True if it has room on the device and in the host, or the room is not known."""
        return self.fits_device and self.fits_host

    @property
    def fits_host(self) -> bool:
        """True if it has room in the memory of a node, or that is not known."""
        return self.host is None or self.host.fits(self.target.ram)

    @property
    def fits_device(self) -> bool:
        """True if it has room on the device, or the room is not known."""
        return self.target.card is None or self.target.left(self.peak) >= 0

    def lines(self) -> list[str]:
        lines = wrap(self._batch())
        lines += [f"{label:<30}{size:>12}  {remark}".rstrip() for label, size, remark in self._rows()]
        return [*lines, *(f"  {way}" for way in self.ways)]

    def _batch(self) -> str:
        sizes, training = self.target.sizes, self.target.given.training
        bucket = memory_peak.largest_bucket(self.target.given)
        where = "a GPU" if self.target.on_gpu else "a CPU"
        again = ", activations recomputed" if training.gradient_checkpointing else ""
        cut = f"{sizes.ranks} x {sizes.accumulation} x {sizes.micro} (devices x micro-batches x samples)"
        size = f"{bucket} px"
        if self.peak.reference is not None:
            size += f" with references of at most {self.peak.reference} px"
        return f"global batch {sizes.whole} = {cut}, images of at most {size}, {self.precision} on {where}{again}"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        target, peak = self.target, self.peak
        moment = "these are computed" if peak.passes >= peak.update else "weights are moved"
        yield "held between updates", format_size(peak.held), "all of the above except gradients"
        made = format_size(peak.whole - peak.held)
        yield "made in a step", made, f"gradients, activations; most while {moment}"
        if peak.gathered:
            yield "  of these, gathered by fsdp", format_size(peak.gathered), "an estimate"
        yield "peak of all tensors", format_size(peak.whole), ""
        taken = target.taken(peak)
        if target.on_gpu:
            yield (
                "besides tensors",
                format_size(taken - peak.whole),
                "an estimate: CUDA context, workspaces, fragmentation",
            )
            yield "used in all", format_size(taken), ""
        if target.card is not None:
            free = target.left(peak)
            size = format_size(abs(free))
            verdict = f"fits, {size} free" if free >= 0 else f"DOES NOT FIT: {size} too much"
            yield "device", format_size(target.card), verdict
            if self.largest is not None:
                size = format_size(target.taken(self.largest))
                yield "largest micro-batch that fits", str(self.largest.micro), f"takes {size}"
            else:
                yield "largest micro-batch that fits", "none", "not even one sample fits; separate options:"

    def document(self) -> dict[str, object]:
        target = self.target
        found: dict[str, object] = {
            "micro_batch": self.peak.micro,
            "accumulation": target.sizes.accumulation,
            "global_batch": target.sizes.whole,
            "device": "cuda" if target.on_gpu else "cpu",
            "precision": self.precision,
            "held_bytes": self.peak.held,
            "passes_bytes": self.peak.passes,
            "update_bytes": self.peak.update,
            "gathered_bytes": self.peak.gathered,
            "peak_bytes": self.peak.whole,
            "taken_bytes": target.taken(self.peak),
        }
        if target.card is not None:
            found |= {"card_bytes": target.card, "fits": self.fits_device}
            found["largest_micro_batch"] = self.largest.micro if self.largest else 0
        return found


def simulated_step(
    target: Target, parts: Components, count: MemoryCount, say: Say = lambda stage: None
) -> SimulatedStep:
    """Steps of the recipe on these devices. The networks of `parts` are used up."""
    return SimulatedStep(target.config, parts, count, target.sizes.accumulation > 1, target.on_gpu, say)


def step(target: Target, parts: Components, count: MemoryCount, say: Say = lambda stage: None) -> Step:
    """A step of the recipe on these devices. The networks of `parts` are used up."""
    steps = simulated_step(target, parts, count, say)
    peak = steps.peak(memory_peak.images_at_once(target.config, target.sizes.micro))
    # Where not even what is held has room, no micro-batch needs to be tried.
    tried = target.card is not None and target.left(replace(peak, passes=0, update=0)) >= 0
    largest = memory_peak.largest_that_fits(steps, peak, target.left) if tried else None
    lacking = target.card is not None and target.left(peak) < 0
    ways = tuple(_ways(target, count, largest)) if lacking else ()
    return Step(target, peak, parts.precision, largest, ways, host_of(target, parts, count, peak))


def host_of(target: Target, parts: Components, count: MemoryCount, peak: Peak) -> Host:
    """The forecast for a node whose devices make such a step."""
    rates = peak_rates.assumed(target.card, target.on_gpu, parts.numerics.compute)
    return forecast(target.given, parts, count, peak, target.sizes, target.on_gpu, rates)


def _ways(target: Target, count: MemoryCount, largest: Peak | None) -> Iterator[str]:
    """Ways to need less, with what they spare where that is counted."""
    training, optimizer = target.given.training, target.given.optimizer
    if largest is not None:
        yield f"training.per_device_batch_size={largest.micro} computes the same updates in more micro-batches"
    numbers = sum(each.numbers for each in count.trained)
    if target.could_move_in_backward:
        gradients = format_size(count.bytes_of("gradients"))
        yield f"optimizer.in_backward=after_norm holds the largest gradient in place of {gradients}"
    if not training.gradient_checkpointing:
        yield "training.gradient_checkpointing=true stores fewer activations"
    if not training.offload_activations:
        yield "training.offload_activations=true keeps activations in the host's memory"
    readers = target.given.model.text_encoders()
    if size := sum(each.kinds.get("frozen", 0) for each in count.held if each.component in readers and not each.waits):
        yield f"training.text_encoders=offload keeps {format_size(size)} of text encoders in the host's memory"
    if target.given.ema.enabled:
        yield f"ema.enabled=false saves {format_size(4 * numbers)}"
    if optimizer.name == "adamw":
        yield f"optimizer.name=adamw_8bit saves about {format_size(6 * numbers)}, lion {format_size(4 * numbers)}"
    if training.weights_dtype == "float32":
        yield f"training.weights_dtype=bfloat16 saves {format_size(4 * numbers)} of weights and gradients"
    if count.mesh.degree("fsdp") == 1:
        node = count.mesh.devices // count.mesh.nodes
        many = "" if node > 1 else "devices=8 "
        degree = node if node > 1 else 8
        spared = format_size(count.whole * (degree - 1) / degree)
        yield f"{many}mesh.ici_fsdp_parallelism={degree} saves about {spared}, and gathers parameters when needed"
    yield "a smaller data.resolution"
