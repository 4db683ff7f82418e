"""Devices as a mesh of three axes: how many there are along each, and where each device stands.

`data` copies the model and splits the batch, `fsdp` splits the batch and the model's state, `tensor` splits single
layers. Each degree is the product of one between nodes (`dcn_`, the data centre's network) and one inside a node
(`ici_`, the links of its devices), as MaxDiffusion has them. No torch here: what the axes do to a network is
distributed/sharding_rules.py and distributed/parallelize.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from daguerre.errors import UserError

Axis = Literal["data", "fsdp", "tensor"]
AXES: tuple[Axis, ...] = ("data", "fsdp", "tensor")
"""Axes of the mesh, outermost first: neighbours of the last one talk most."""
AUTO = -1
"""A degree that takes what the others leave."""


@dataclass(frozen=True)
class Mesh:
    """A resolved mesh."""

    dcn: Mapping[str, int]
    """Degree of each axis between nodes."""
    ici: Mapping[str, int]
    """Degree of each axis inside a node."""
    order: tuple[str, ...] = AXES
    """The axes as ranks are numbered along them, outermost first."""

    @property
    def nodes(self) -> int:
        return prod(self.dcn.values())

    @property
    def devices(self) -> int:
        return self.nodes * prod(self.ici.values())

    def degree(self, axis: str) -> int:
        return self.dcn[axis] * self.ici[axis]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Degrees in the order of AXES."""
        return (self.degree("data"), self.degree("fsdp"), self.degree("tensor"))

    @property
    def batch_ranks(self) -> int:
        """Into how many parts a global batch is cut: the devices of one tensor group read the same."""
        return self.degree("data") * self.degree("fsdp")

    @property
    def splits(self) -> bool:
        """True if fsdp or tensor splits parameters over several devices."""
        return self.degree("fsdp") * self.degree("tensor") > 1

    def ranks(self) -> np.ndarray:
        """[data, fsdp, tensor] int64: the global rank that stands at each place.

        A launcher numbers ranks node by node. Along an axis, the part inside a node varies fastest.
        """
        within = [self.ici[axis] for axis in self.order]
        numbered = np.arange(self.devices).reshape(*(self.dcn[axis] for axis in self.order), *within)
        together = numbered.transpose(0, 3, 1, 4, 2, 5).reshape([self.degree(axis) for axis in self.order])
        return together.transpose([self.order.index(axis) for axis in AXES])

    def place(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        where = np.argwhere(self.ranks() == rank)[0]
        return dict(zip(AXES, where.tolist(), strict=True))

    def batch_rank(self, rank: int) -> int:
        """Index of the part of a global batch that a rank reads, from 0 to `batch_ranks` - 1."""
        place = self.place(rank)
        return place["data"] * self.degree("fsdp") + place["fsdp"]

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis!r}: {self.degree(axis)}' for axis in AXES)})"


def resolve(
    dcn: Mapping[str, int], ici: Mapping[str, int], devices: int, nodes: int, order: tuple[str, ...] = AXES
) -> Mesh:
    """The mesh of these degrees on what the launcher says there is. One degree of each kind may be -1.

    UserError where the degrees and the devices do not agree, with both numbers.
    """
    if devices % nodes:
        raise UserError(
            f"{devices} devices on {nodes} nodes: every node must have as many devices as the others", code="conflict"
        )
    between, inside = _filled("dcn", dcn, nodes, "nodes"), _filled("ici", ici, devices // nodes, "devices of a node")
    return Mesh(between, inside, order)


def _filled(kind: str, degrees: Mapping[str, int], there: int, what: str) -> dict[str, int]:
    """Degrees of one kind with -1 filled in."""
    name = {axis: f"{kind}_{axis}_parallelism" for axis in AXES}
    if wrong := [f"{name[axis]}={degrees[axis]}" for axis in AXES if degrees[axis] < 1 and degrees[axis] != AUTO]:
        raise UserError(f"{', '.join(wrong)}: a degree must be 1 or more, or -1 for the remaining devices")
    unknown = [axis for axis in AXES if degrees[axis] == AUTO]
    if len(unknown) > 1:
        raise UserError(
            f"{' and '.join(name[axis] for axis in unknown)} are both -1: only one of them can be", code="conflict"
        )
    known = prod(degree for degree in degrees.values() if degree != AUTO)
    given = " x ".join(f"{name[axis]} {degrees[axis]}" for axis in AXES if degrees[axis] not in (1, AUTO)) or "1"
    if unknown and there % known:
        raise UserError(
            f"{given} = {known} does not divide the {there} {what}: no whole number is left for {name[unknown[0]]}=-1",
            code="conflict",
            setting=f"mesh.{name[unknown[0]]}",
        )
    if not unknown and known != there:
        found = f"are {there} {what}" if there != 1 else f"is one {what.replace('s', '', 1)}"
        raise UserError(
            f"{given} = {known}, but there {found}: make the product {there}, or set one of "
            f"{', '.join(name.values())} to -1",
            code="conflict",
        )
    return {axis: there // known if degrees[axis] == AUTO else degrees[axis] for axis in AXES}
