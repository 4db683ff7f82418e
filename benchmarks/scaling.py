"""Expected efficiency on 8 to 1,024 devices, by the arithmetic of communication.py: the table of docs/scaling.md.

python benchmarks/scaling.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import communication

from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import ParameterSplit

DEVICES = (8, 64, 256, 1024)
A_NODE = 8


@dataclass(frozen=True)
class Case:
    """A model on one device: how fast it is aimed to be there, and how many images it takes at once."""

    name: str
    parameters: int
    units: int
    samples_per_second: float
    samples: int


CASES = (
    Case("SD 2.1, 512 px, 64 a device", 865_910_724, 40, 175, 64),
    Case("SD 2.1, 512 px, 8 a device", 865_910_724, 40, 150, 8),
    Case("SDXL, 1024 px, 8 a device", 2_567_463_684, 90, 21, 8),
    Case("SDXL, 1024 px, 2 a device", 2_567_463_684, 90, 17, 2),
)


def mesh(devices: int, sharded: bool) -> Mesh:
    """Data parallelism over all, or the model split inside each node and copied between nodes."""
    nodes = devices // A_NODE
    inside = {"data": 1, "fsdp": A_NODE, "tensor": 1} if sharded else {"data": A_NODE, "fsdp": 1, "tensor": 1}
    return Mesh({"data": nodes, "fsdp": 1, "tensor": 1}, inside)


def collectives(case: Case, where: Mesh) -> list[communication.Collective]:
    """Of a model whose units are of one size."""
    fsdp = 0 if where.degree("fsdp") > 1 else None
    each = [ParameterSplit(str(i), (case.parameters // case.units,), (), None, fsdp, False) for i in range(case.units)]
    return communication.of_update(each, where, unit_of=lambda name: name)


def lines() -> Iterator[str]:
    """The table."""
    yield "| model | update alone | way | " + " | ".join(f"{n:,} devices" for n in DEVICES) + " |"
    yield "|---|---|---|" + "---|" * len(DEVICES)
    for case in CASES:
        step = communication.Step(case.samples / case.samples_per_second)
        for way, sharded in (("data", False), ("data x fsdp 8", True)):
            cells = []
            for devices in DEVICES:
                where = mesh(devices, sharded)
                found = collectives(case, where)
                share = communication.efficiency(found, where, communication.H200_NODES, step)
                sent = sum(each.wire_bytes(where) for each in found)
                cells.append(f"{share:.0%}, {sent / 1e9:.1f} GB")
            yield f"| {case.name} | {1e3 * step.seconds:.0f} ms | {way} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
