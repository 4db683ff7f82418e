"""Makes the processes of a run a group: they meet, each gets its device and its watchdog, and at the end all leave
together. What the launcher says is distributed/launch/environment.py's; what the group computes is everybody else's.
"""

import faulthandler
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from daguerre.distributed.launch.environment import World
from daguerre.distributed.rank0 import Agreement, Meeting, RanksMissing
from daguerre.distributed.settings import DistributedSettings
from daguerre.distributed.watchdog import heartbeat
from daguerre.distributed.watchdog.failure import Failure, Limits
from daguerre.distributed.watchdog.processes import myself
from daguerre.distributed.watchdog.watchdog import StacksFile, Watchdog, within
from daguerre.errors import ReportedElsewhere, UserError

_LEAVE_SECONDS = 30.0
"""Longest wait of the first rank that is done for the last: they have saved by then."""
_DESTROY_SECONDS = 10.0
"""NCCL may wait for ever for a call that never ends."""
_LAST_SECONDS = 20.0
_SAME_ERROR_SECONDS = 2.0
"""Longest wait of ranks that refuse something, to hear whether the others refuse the same."""


@dataclass(frozen=True)
class Watching:
    """The run as the watchdog needs it."""

    stacks: Path | None
    """Folder on a local disk for stacks; None writes none."""
    on_end: Callable[[Failure], None]
    """Writes the status; called on one rank, from another thread, with three seconds to do it."""
    exit_code: Callable[[], int]
    """Exit code of the signal that came to this process; 0 while none has."""


@dataclass(frozen=True)
class Processes:
    """This process among those of a run, once all of them are here."""

    world: World
    device: torch.device
    backend: str
    """nccl or gloo; empty for one process, which has no group."""
    agreement: Agreement
    watch: Watchdog

    @property
    def leads(self) -> bool:
        """True on rank 0, which speaks and writes for all."""
        return self.world.rank == 0

    def cpu_group(self, seconds: float) -> dist.ProcessGroup:
        """Another group over the CPU, for one purpose such as saving; a collective call."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        assert isinstance(group, dist.ProcessGroup)
        return group


@contextmanager
def start(
    world: World,
    settings: DistributedSettings,
    device: str,
    watching: Watching,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Processes]:
    """All ranks, on devices of a kind (`cuda`, `cpu`, ...), until the block ends; then they leave together.

    RanksMissing names ranks that do not come. UserError for a backend or a device that this machine does not have.
    """
    own = own_device(world, device)
    backend = chosen_backend(settings, own)
    stacks = StacksFile(watching.stacks, world.rank) if watching.stacks is not None else None
    limits = Limits(settings.stuck_seconds, settings.silent_seconds)
    if world.size == 1:
        alone = heartbeat.HeartbeatServer(None, "", myself(0), 1, limits)
        with Watchdog(world, alone, stacks, watching.on_end) as watch:
            yield Processes(world, own, "", Agreement(None), watch)
        return
    _refuse_apple(own)
    store = _store(world, settings, environ)
    meeting = Meeting(store, world.rank, world.size, watching.exit_code)
    meeting.all_here("start", settings.rendezvous_seconds, stoppable=True)
    with ExitStack() as stack:
        link = _link(world, store, limits)
        watch = stack.enter_context(Watchdog(world, link, stacks, watching.on_end))
        if own.type == "cuda":
            torch.cuda.set_device(own)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=settings.timeout_seconds),
            device_id=own if backend == "nccl" else None,
        )
        stack.push(lambda kind, error, trace: _leave(meeting, error is None or isinstance(error, SystemExit)))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        agreement = Agreement(group)
        _refuse_shared_devices(agreement, own)
        with _one_voice(store, world):
            yield Processes(world, own, backend, agreement, watch)


def own_device(world: World, device: str) -> torch.device:
    """The device of this rank. UserError where its node has too few."""
    if device != "cuda" or world.size == 1:
        return torch.device(device)
    count = torch.cuda.device_count()
    if count == 1 or world.local_rank < count:  # a launcher may show each process its own one alone
        return torch.device("cuda", world.local_rank if count > 1 else 0)
    raise UserError(
        f"{world.local_size} processes on this node, but {count} GPUs: start one process per GPU (torchrun "
        f"--nproc-per-node={count}, srun --ntasks-per-node={count})",
        code="resources",
    )


def chosen_backend(settings: DistributedSettings, device: torch.device) -> str:
    """The backend for a device. UserError for one that this machine does not have, or that the device cannot use."""
    wanted = settings.dist_backend
    if wanted == "auto":
        wanted = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if wanted == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        why = "this build of torch does not have it" if device.type == "cuda" else f"the device is {device.type}"
        raise UserError(
            f"dist_backend=nccl: {why}; nccl needs GPUs: set dist_backend=gloo, or auto",
            code="unsupported",
            setting="distributed.dist_backend",
        )
    return wanted


def _store(world: World, settings: DistributedSettings, environ: Mapping[str, str]) -> dist.Store:
    """The store in which the ranks meet; nobody has come yet."""
    if settings.dist_url.startswith("file://"):
        return dist.FileStore(settings.dist_url.removeprefix("file://"), world.size)
    host, port = settings.address or (world.address, world.port)
    if not host or not port:
        raise UserError(
            f"MASTER_ADDR={host!r}, MASTER_PORT={port or ''}: both must be set for dist_url=env:// (torchrun sets "
            "them); or set dist_url=tcp://HOST:PORT of rank 0",
            code="missing",
            setting="distributed.dist_url",
        )
    of_agent = settings.address is None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = timedelta(seconds=settings.rendezvous_seconds)
    try:
        store = dist.TCPStore(
            host, port, world.size, world.rank == 0 and not of_agent, timeout=wait, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        raise RanksMissing(
            f"rank {world.rank} could not connect to rank 0 at {host}:{port} within {wait.total_seconds():g} s: {error}"
        ) from error
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return dist.PrefixStore(f"daguerre {attempt}", store)  # the agent's store outlives an attempt


def _link(world: World, store: dist.Store, limits: Limits) -> heartbeat.Heartbeat:
    """The watchdogs' connection."""
    me = myself(world.rank)
    if world.rank == 0:
        listener = heartbeat.listen()
        invited = heartbeat.invitation(listener, [world.address] if world.address else [])
        store.set("watchdog", json.dumps(invited))
        return heartbeat.HeartbeatServer(listener, invited["word"], me, world.size, limits)
    line = heartbeat.connect(json.loads(store.get("watchdog")), me)
    return heartbeat.HeartbeatClient(line, me, world.size, limits)


def _refuse_apple(own: torch.device) -> None:
    """UserError for several processes on an Apple GPU."""
    if own.type == "mps":
        raise UserError(
            "training.device=mps computes in one process: torch has no backend between Apple GPUs; use cpu",
            code="unsupported",
            setting="training.device",
        )


def _refuse_shared_devices(agreement: Agreement, own: torch.device) -> None:
    """UserError where two ranks were given one GPU."""
    if own.type != "cuda":
        return
    uuid = str(torch.cuda.get_device_properties(own).uuid)
    everyone = agreement.gather(uuid)
    sharing = [rank for rank, theirs in enumerate(everyone) if theirs == uuid]
    if len(sharing) > 1:
        raise UserError(
            f"ranks {', '.join(map(str, sharing))} use the same GPU: start one process per GPU", code="conflict"
        )


@contextmanager
def _one_voice(store: dist.Store, world: World) -> Iterator[None]:
    """Lets rank 0 alone show an error that all ranks have; one that only this rank has gets its number."""
    try:
        yield
    except UserError as error:
        with suppress(RuntimeError, dist.DistError):  # rank 0, which may hold the store, may be gone
            if world.rank == 0:
                store.set("error", str(error))
                _wait(lambda: store.add("error/heard", 0) == world.size - 1)
            elif _wait(lambda: store.check(["error"])):
                shown = store.get("error").decode()
                store.add("error/heard", 1)
                if shown == str(error):
                    raise ReportedElsewhere(error) from None
        if world.rank and not isinstance(error, ReportedElsewhere):
            error.args = (f"rank {world.rank}: {error}", *error.args[1:])
        raise


def _wait(condition: Callable[[], bool]) -> bool:
    """Waits a moment for a condition; True if it comes true."""
    deadline = time.monotonic() + _SAME_ERROR_SECONDS
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _leave(meeting: Meeting, ordered: bool) -> None:
    """Ends the group; after an error without a word to the others, who may be gone."""
    if ordered:
        # Whoever is late has saved too, and rank 0, which may hold the store, may have left a moment ago.
        with suppress(RanksMissing):
            meeting.all_here("end", _LEAVE_SECONDS)
    if not ordered or not within(_DESTROY_SECONDS, dist.destroy_process_group):
        # What is still under way in a thread below must not keep the process from ending.
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)
