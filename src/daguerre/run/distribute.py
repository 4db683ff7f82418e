"""Multi-device runs: shards the networks over the mesh; runs an action on rank 0 and shares its result or error."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from daguerre import webhook
from daguerre.adapters.adapter import Attached
from daguerre.assembly import assistant, base_digests
from daguerre.assembly.parts import Components, load
from daguerre.checkpoint.signals import StopSignals
from daguerre.config.config import Config
from daguerre.distributed import parallelize, sharding_rules
from daguerre.distributed.launch import environment
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.process_group import Processes, Watching, start
from daguerre.distributed.rank0 import Agreement
from daguerre.distributed.sharding import MeshSharding
from daguerre.distributed.watchdog.failure import Failure
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.network import block_classes
from daguerre.models.placement import describe_unknown, frozen, of_net, placement
from daguerre.run.storage import RunStorage
from daguerre.training import device as devices
from daguerre.training.sharding import UNSHARDED, Sharding

_ENTRIES = ("encode", "decode")
"""Methods other than `forward` by which networks are called."""


@contextmanager
def process_group(config: Config, storage: RunStorage, stop: StopSignals) -> Iterator[Processes]:
    """The processes of a run, on their devices, each with its watchdog; they leave together."""

    def on_end(failure: Failure) -> None:
        # From the file: the watchdog acts while the main thread hangs, and must not wait for anything of it.
        known = storage.folder.read_status() or {}
        counts = {name: known.get(name, 0) for name in ("step", "samples", "total_steps")}
        storage.folder.write_status("failed", reason=failure.text, **counts)
        storage.abandon()
        if why := webhook.tell(storage.folder.path, "failed", failure.text, counts["step"], counts["total_steps"]):
            print(f"daguerre: {why}", file=sys.stderr, flush=True)

    kind = devices.choose_device(config.training.device).type
    world = environment.read()
    stacks = storage.folder.path / "stacks" if world.size > 1 else None
    with start(world, config.distributed, kind, Watching(stacks, on_end, lambda: stop.exit_code)) as processes:
        yield processes


def shard_networks(config: Config, parts: Components, processes: Processes, mesh: Mesh) -> tuple[Sharding, list[str]]:
    """Splits all networks of a run over the mesh; returns notices, too. All ranks hold all weights before.
    UserError if these differ, or if rules and networks do not fit."""
    if mesh.devices == 1:
        return UNSHARDED, []
    absent = encoders.absent(parts.family)
    present = {name: network for name, network in parts.networks.items() if name not in absent}
    still = frozen(parts.net, present)
    assistant.check_mesh(parts.family, mesh)
    _check_types(parts.net, mesh)
    weights = {"what is trained": parts.net, **{name: network.module for name, network in still.items()}}
    # Before they are split: a node with another version of the base would train another model, without any error.
    check_same_weights(weights, processes.agreement)
    axis_rules = config.mesh.logical_axis_rules
    notices = sharding_rules.check(axis_rules, mesh)
    grid = parallelize.device_mesh(mesh, parts.device.type)
    places = of_net(parts.net, parts.networks, axis_rules, mesh)
    problems, unknown = [*places.problems], [*places.unknown]
    # Attributes that count heads, by which the networks' code divides: a device of a tensor mesh has a part of them.
    counts = {count for network in present.values() for count in network.facts.counts}
    called = {name for network in present.values() for name in network.facts.called}
    split = parallelize.apply(parts.net, mesh, places.placed, grid, block_classes(present.values()), counts, called)
    for name, network in still.items():
        # A network that ranks call unequally often must not gather: the others would wait for ever.
        is_split = config.mesh.shard_frozen and name not in parts.family.uneven
        if is_split and mesh.splits:
            own_places = placement(network, axis_rules, mesh)
            problems += [(f"{name}.{parameter}", why) for parameter, why in own_places.problems]
            unknown += [] if network.facts.axes else [name]
            facts = network.facts
            parallelize.apply(network.module, mesh, own_places.placed, grid, facts.blocks, facts.counts, facts.called)
            for entry in (each for each in _ENTRIES if hasattr(network.module, each)):
                # FSDP2 gathers weights in hooks of `forward`: another method would compute with shards.
                register_fsdp_forward_method(network.module, entry)
    notices += describe_unknown(unknown, mesh)
    sharding = MeshSharding(parts.net, mesh, places.placed, split, processes.world.rank, processes.agreement)
    if problems:
        name, why = problems[0]
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        notices.append(f"not split according to the rules: {name} ({why}){more}; `daguerre plan` lists all")
    return sharding, notices


def _check_types(net: nn.Module, mesh: Mesh) -> None:
    """UserError for trained weights of several types that FSDP2 would gather together."""
    types = {p.dtype for p in net.parameters() if p.requires_grad}
    if mesh.degree("fsdp") > 1 and len(types) > 1:
        raise UserError(
            "some of the trained weights stay float32 while training.weights_dtype stores the others in 16 bits, and a "
            "mesh with fsdp holds weights of one type: set training.weights_dtype=float32 (with "
            "training.mixed_precision=bf16), or mesh.ici_fsdp_parallelism=1",
            code="conflict",
            setting="training.weights_dtype",
        )


def check_same_weights(networks: Mapping[str, nn.Module], agreement: Agreement) -> None:
    """UserError if ranks have loaded different weights: another version of the base in a node's cache."""
    everyone = agreement.gather({name: base_digests.digest_of(network) for name, network in networks.items()})
    for rank, theirs in enumerate(everyone):
        if other := [name for name, digest in theirs.items() if digest != everyone[0][name]]:
            raise UserError(
                f"rank {rank} has other weights than rank 0 in {', '.join(other)}: their nodes read different files. "
                "Give all nodes the same files (a shared folder, or the same revision in each cache)",
                code="conflict",
            )


@dataclass
class GatheredModel:
    """The model with whole networks, in the memory of rank 0's host, for exports of networks that are sharded."""

    config: Config
    leads: bool
    _attached: Attached | None = field(default=None, init=False, repr=False)

    def take(self, sharding: Sharding, own: Attached) -> Attached:
        """Copies the present weights of what is trained, one tensor after the other, onto the same base. Returns the
        adapters that have them on rank 0, its `own` elsewhere. All ranks call this."""
        assert isinstance(sharding, MeshSharding)
        if self.leads and self._attached is None:
            # Once a run: opening the base takes minutes, and its own weights never change.
            self._attached = load(self.config)[1]
            assert self._attached.names == own.names
        weights = {} if self._attached is None else self._attached.net.state_dict()
        with torch.no_grad():
            # One tensor after the other: the whole model may have no room on a device.
            for name, tensor in sharding.whole(own.names):
                if self._attached is not None:
                    weights[name].copy_(tensor)
        return self._attached or own
