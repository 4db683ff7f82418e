"""A run on several devices: spreads its networks over the mesh, and lets one process act for all.

What happens in a run is training_run.py's; here is what only several processes need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from daguerre.checkpoint.stop import StopSignals
from daguerre.commands.homes import Home
from daguerre.commands.parts import Parts, load_family
from daguerre.commands.placement import frozen, of_net, placement
from daguerre.config import Config
from daguerre.errors import UserError
from daguerre.families.family import Family
from daguerre.parallel import apply, rules, world
from daguerre.parallel.agreement import Agreement
from daguerre.parallel.mesh import Mesh
from daguerre.parallel.sharding import MeshSharding
from daguerre.parallel.start import Processes, Watching, start
from daguerre.parallel.verdict import Verdict
from daguerre.training import device as devices
from daguerre.training.sharding import UNSHARDED, Sharding

_T = TypeVar("_T")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ENTRIES = ("encode", "decode")
"""Methods by which networks are called beside `forward`."""


@contextmanager
def together(config: Config, home: Home, stop: StopSignals) -> Iterator[Processes]:
    """The processes of a run, on their devices, each with its watchdog; they leave together."""

    def on_end(verdict: Verdict) -> None:
        known = home.folder.read_status() or {}
        counts = {name: known.get(name, 0) for name in ("step", "samples", "total_steps")}
        home.folder.write_status("failed", reason=verdict.text, **counts)
        home.abandon()

    kind = devices.choose_device(config.training.device).type
    own = world.read()
    stacks = home.folder.path / "stacks" if own.size > 1 else None
    with start(own, config.distributed, kind, Watching(stacks, on_end, lambda: stop.exit_code)) as processes:
        yield processes


def led(processes: Processes, act: Callable[[], _T]) -> _T:
    """What rank 0 does, as JSON on every rank; so is its UserError."""
    agreement = processes.agreement
    if processes.world.rank:
        told = agreement.tell()
        if "error" in told:
            raise _as_error(told)
        return told["result"]
    try:
        result = act()
    except UserError as error:
        agreement.tell({"error": str(error), "code": error.exit_code})
        raise
    return agreement.tell({"result": result})["result"]


def _as_error(told: Mapping[str, object]) -> UserError:
    error = UserError(told["error"])
    error.exit_code = int(str(told["code"]))
    return error


def spread(config: Config, parts: Parts, processes: Processes, mesh: Mesh) -> tuple[Sharding, list[str]]:
    """Splits all networks of a run over the mesh; and what a person should know of it. All ranks hold all weights
    before. UserError where these differ, or where rules and networks do not fit."""
    if mesh.devices == 1:
        return UNSHARDED, []
    still = frozen(parts.net, parts.family.components)
    refuse_other_weights({"what is trained": parts.net, **still}, processes.agreement)
    parts.numerics.store(parts.net)
    axis_rules = config.mesh.logical_axis_rules
    said = rules.check(axis_rules, mesh)
    grid = apply.device_mesh(mesh, parts.device.type)
    found = of_net(parts.net, parts.family.components, axis_rules, mesh)
    problems = [*found.problems]
    split = apply.apply(parts.net, mesh, found.placed, grid, parts.family.block_classes)
    for name, network in still.items():
        if config.mesh.shard_frozen and mesh.degree("fsdp") * mesh.degree("tensor") > 1:
            own = placement(network, axis_rules, mesh)
            problems += [(f"{name}.{parameter}", why) for parameter, why in own.problems]
            apply.apply(network, mesh, own.placed, grid, parts.family.block_classes)
            for entry in (each for each in _ENTRIES if hasattr(network, each)):
                register_fsdp_forward_method(network, entry)
    sharding = MeshSharding(parts.net, mesh, found.placed, split, processes.world.rank, processes.agreement)
    return sharding, said + _summary(problems)


def refuse_other_weights(networks: Mapping[str, nn.Module], agreement: Agreement) -> None:
    """UserError where ranks have loaded different weights: another version of the base in a node's cache."""
    everyone = agreement.gather({name: _digest(network) for name, network in networks.items()})
    for rank, theirs in enumerate(everyone):
        if other := [name for name, digest in theirs.items() if digest != everyone[0][name]]:
            raise UserError(
                f"rank {rank} has other weights than rank 0 in {', '.join(other)}: their nodes read different files. "
                "Give all nodes the same (a shared folder, or the same revision in each cache)"
            )


@torch.no_grad()
def _digest(network: nn.Module) -> str:
    """Of all weights, by sums of their words as whole numbers: exact in whatever order they are added."""
    found = hashlib.sha256()
    for name, p in network.named_parameters():
        words = p.detach().contiguous().view(_WORDS[p.element_size()])
        found.update(f"{name} {tuple(p.shape)} {int(words.sum(dtype=torch.int64))}\n".encode())
    return found.hexdigest()


@dataclass
class Whole:
    """The family with whole networks, in the memory of rank 0's host, for exports of what is split over devices."""

    config: Config
    leads: bool
    _family: Family | None = field(default=None, init=False, repr=False)

    def take(self, sharding: Sharding, own: Family) -> Family:
        """Takes up the present weights, one tensor after the other; the family that has them on rank 0, its `own`
        elsewhere. All ranks call this."""
        assert isinstance(sharding, MeshSharding)
        if self.leads and self._family is None:
            self._family = load_family(self.config)
        weights = {} if self._family is None else self._family.net.state_dict()
        with torch.no_grad():
            for name, tensor in sharding.whole():
                if name in weights:
                    weights[name].copy_(tensor)
        return self._family or own


def _summary(problems: list[tuple[str, str]]) -> list[str]:
    if not problems:
        return []
    name, why = problems[0]
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return [f"not split as the rules say: {name} ({why}){more}; `daguerre plan` lists all"]
