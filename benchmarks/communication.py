"""Bytes that devices send each other in one update, and what that costs in time: arithmetic, no device.

A ring sends 2 (n-1)/n of what it sums, and (n-1)/n of what it gathers or scatters; groups of several nodes do so inside
a node first. Which collectives there are follows from where distributed/parallelize.py puts each parameter; the tests
count the bytes of real processes. docs/scaling.md has the assumptions and what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import ParameterSplit

Kind = Literal["sum", "gather", "scatter"]
"""All-reduce, all-gather, reduce-scatter."""
Phase = Literal["forward", "backward", "gradients"]
"""When: `gradients` are those of the last backward pass of an update."""
BUCKET_BYTES = 25 << 20
"""Gradients that are summed in one call; the last call cannot hide behind arithmetic."""


@dataclass(frozen=True)
class Collective:
    """Calls of one kind along one axis, in one update."""

    kind: Kind
    axis: str
    phase: Phase
    payload_bytes: int
    """Of all calls together: what is summed, what comes out of a gathering, what goes into a scattering."""
    calls: int

    def wire_bytes(self, mesh: Mesh) -> float:
        """What a device sends, by a ring."""
        return ring_bytes(self.kind, self.payload_bytes, mesh.degree(self.axis))


def ring_bytes(kind: Kind, payload_bytes: float, devices: int) -> float:
    """What each device of a ring sends (and receives)."""
    return (2 if kind == "sum" else 1) * payload_bytes * (devices - 1) / devices


def of_update(
    placed: Sequence[ParameterSplit],
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    unit_of: Callable[[str], str] = lambda name: "",
    bytes_of: Callable[[str], int] = lambda name: 4,
) -> list[Collective]:
    """What the trained parameters cost an update.

    Without `fsdp`: their gradients are summed along `data` once. With it: each unit is gathered in every forward and
    every backward pass, gradients are scattered along `fsdp` once, and what is left is summed along `data`.
    """
    parts = sum(each.elements(mesh) * bytes_of(each.name) for each in placed)
    found: list[Collective] = []
    if (degree := mesh.degree("fsdp")) > 1:
        units = len({unit_of(each.name) for each in placed})
        whole = parts * degree
        found += [
            Collective("gather", "fsdp", phase, whole * micro_batches, units * micro_batches)
            for phase in ("forward", "backward")
        ]
        found.append(Collective("scatter", "fsdp", "gradients", whole, units))
        if mesh.degree("data") > 1:
            found.append(Collective("sum", "data", "gradients", parts, units))
    elif mesh.degree("data") > 1:
        found.append(Collective("sum", "data", "gradients", parts, max(1, -(-parts // BUCKET_BYTES))))
    return found


@dataclass(frozen=True)
class TransformerBlock:
    """One of diffusers' BasicTransformerBlocks, whose products are split over `tensor`."""

    tokens: int
    """Of one image."""
    width: int


def of_tensor(
    blocks: Sequence[TransformerBlock], mesh: Mesh, samples: int, bytes_a_number: int, *, micro_batches: int = 1
) -> list[Collective]:
    """What tensor parallelism costs an update: activations, summed over `tensor`, of the samples of one device's
    micro-batch.

    Forward: the output of self attention, cross attention and feed-forward. Backward: the gradient of what each layer
    split by rows reads: queries, keys and values of self attention, queries of cross attention (text is not trained
    here), and the feed-forward's first layer.
    """
    if mesh.degree("tensor") == 1:
        return []
    numbers = samples * sum(block.tokens * block.width for block in blocks) * micro_batches * bytes_a_number
    calls = len(blocks) * micro_batches
    return [
        Collective("sum", "tensor", "forward", 3 * numbers, 3 * calls),
        Collective("sum", "tensor", "backward", 5 * numbers, 5 * calls),
    ]


@dataclass(frozen=True)
class Links:
    """How fast devices talk."""

    inside_gb_per_second: float
    """Between devices of a node, each direction of each device."""
    between_gb_per_second: float
    """Between nodes, each direction, a device's share."""
    call_seconds: float = 2e-5
    """Until a call along a ring begins to move bytes, for each doubling of its devices."""


H200_NODES = Links(inside_gb_per_second=360.0, between_gb_per_second=40.0)
"""Eight H200 a node: NVLink at 80 % of its 450 GB/s, and a 400 Gbit/s adapter a device at 80 % of its 50 GB/s."""


def seconds(collective: Collective, mesh: Mesh, links: Links) -> float:
    """Time of these calls if nothing else used the links: inside nodes first, a device's share between them after."""
    inside, between = mesh.ici[collective.axis], mesh.dcn[collective.axis]
    payload = collective.payload_bytes
    moved = ring_bytes(collective.kind, payload, inside) / (links.inside_gb_per_second * 1e9)
    moved += ring_bytes(collective.kind, payload / inside, between) / (links.between_gb_per_second * 1e9)
    return moved + collective.calls * links.call_seconds * math.log2(inside * between)


@dataclass(frozen=True)
class Step:
    """An update of one device by itself."""

    seconds: float
    backward_share: float = 2 / 3
    """Share of its time that is the backward pass."""
    jitter: float = 0.005
    """Standard deviation of its time over devices, as a share: all wait for the slowest."""
    micro_batches: int = 1

    @property
    def micro_seconds(self) -> float:
        """Time of a micro-batch."""
        return self.seconds / self.micro_batches


def exposed(collectives: Sequence[Collective], mesh: Mesh, links: Links, step: Step) -> dict[str, float]:
    """Seconds that an update waits, by cause.

    Sums over `tensor` hide behind nothing. Gathering hides behind the arithmetic of the pass it is made for, but for
    the first unit's. Gradients hide behind the last backward pass, with what gathering left of it, but for the last
    call. Devices that are late by chance are waited for.
    """
    taken = dict.fromkeys(("forward", "backward", "gradients"), 0.0)
    found = {"tensor": 0.0, "first and last calls": 0.0}
    for each in collectives:
        time = seconds(each, mesh, links)
        if each.axis == "tensor":
            found["tensor"] += time
            continue
        edges = step.micro_batches if each.kind == "gather" else 1
        found["first and last calls"] += edges * time / each.calls
        taken[each.phase] += time - edges * time / each.calls
    forward = step.seconds * (1 - step.backward_share)
    backward = step.seconds * step.backward_share
    found["gathering"] = max(0.0, taken["forward"] - forward) + max(0.0, taken["backward"] - backward)
    room = max(0.0, backward - taken["backward"]) / step.micro_batches
    found["gradients"] = max(0.0, taken["gradients"] - room)
    ranks = mesh.devices
    found["the slowest device"] = step.seconds * step.jitter * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
    return found


def efficiency(collectives: Sequence[Collective], mesh: Mesh, links: Links, step: Step) -> float:
    """Images a second and device, over those of one device by itself."""
    return step.seconds / (step.seconds + sum(exposed(collectives, mesh, links, step).values()))
