"""The arithmetic of batch sizes: a recipe's global batch, cut into micro-batches of one device or several."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace

from torch import nn

from daguerre import plugins
from daguerre.config.config import Config, Loaded
from daguerre.data.plan.buckets import buckets
from daguerre.distributed.mesh import Mesh
from daguerre.errors import UserError
from daguerre.objectives.objective import Objective
from daguerre.training.settings import TrainingSettings, largest_divisor


def couples_samples(objective: Objective, net: nn.Module | None = None) -> str:
    """The thing that couples the samples of a batch with each other: a loss, or norms over the batch in what is
    trained; "" where nothing does."""
    if objective.couples_samples:
        return "this objective compares all samples of a batch with each other"
    # The exact type: KeptBatchNorm2d, of pretrained networks, normalises by what it has kept and couples nothing.
    norms = (name for name, module in (net.named_modules() if net else ()) if type(module) is nn.BatchNorm2d)
    if (first := next(norms, None)) is not None:
        return f"norms over the batch, such as {first}, are trained from random weights"
    return ""


def needs_whole_batch(config: Config, objective: Objective, net: nn.Module | None = None) -> str:
    """The reason why one backward pass has to see a global batch, on one device, or ""."""
    if form := config.optimizer.in_backward:
        return f"with optimizer.in_backward={form} each gradient is used up by the backward pass that makes it"
    return couples_samples(objective, net)


def check_uncut_batches(config: Config, sizes: BatchSizes, objective: Objective, net: nn.Module | None = None) -> None:
    """UserError where not one image has room in a micro-batch, or where what needs the global batch would see only a
    part of it."""
    area_px = max(bucket.area_px for bucket in buckets(config.data))
    if area_px > (config.loader.max_pixels or math.inf):
        raise UserError(
            f"loader.max_pixels={config.loader.max_pixels} is less than one image of the largest bucket ({area_px} "
            "pixels): raise it, or train on smaller images (data.resolution)",
            code="conflict",
            setting="loader.max_pixels",
        )
    why = needs_whole_batch(config, objective, net)
    if why and sizes.whole * area_px > (config.loader.max_pixels or math.inf):
        raise UserError(
            f"{why}, so the global batch of {sizes.whole} cannot be split, but it has {sizes.whole * area_px:,} "
            "pixels: remove loader.max_pixels, or choose a smaller global_batch_size",
            code="conflict",
            setting="loader.max_pixels",
        )
    if why and sizes.ranks > 1:
        raise UserError(
            f"{why}, so the global batch cannot be split over {sizes.ranks} devices: train on one device (or one "
            "tensor-parallel group)",
            code="conflict",
        )
    if why and sizes.accumulation > 1:
        raise UserError(
            f"{why}, so the global batch of {sizes.whole} cannot be computed as {sizes.accumulation} x "
            f"{sizes.micro} samples: remove training.per_device_batch_size and gradient_accumulation_steps, or choose "
            "a smaller global_batch_size",
            code="conflict",
            setting="training.per_device_batch_size",
        )


@dataclass(frozen=True)
class BatchSizes:
    """The split of a global batch."""

    whole: int
    """Samples of one update over all devices: decides what is learnt."""
    micro: int
    """Samples of one forward pass on one device."""
    ranks: int = 1
    """Devices that read different samples: the global batch is cut into so many parts first."""
    notices: tuple[str, ...] = ()
    """Messages about what differs from the recipe."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of one update on one device."""
        return self.whole // self.ranks // self.micro


_WHOLE, _MICRO, _ACCUMULATION = (
    f"training.{name}" for name in ("global_batch_size", "per_device_batch_size", "gradient_accumulation_steps")
)


def held(loaded: Loaded) -> frozenset[str]:
    """The batch sizes that may not give way to the number of devices: a global batch that the user has chosen, on the
    command line or in a file, and micro-batches that the command line gives."""
    return loaded.chosen & {_WHOLE} | loaded.typed & {_MICRO, _ACCUMULATION}


def _check_split(config: Config, mesh: Mesh) -> None:
    """UserError for a setting that does not go with weights that the mesh splits."""
    training, in_backward, cuts = config.training, config.optimizer.in_backward, mesh.degree("tensor") > 1
    alone = "train with data parallelism alone (mesh.ici_fsdp_parallelism=1 mesh.ici_tensor_parallelism=1)"
    refused = {
        "training.capture": mesh.splits and training.capture and (
            "=true records what one device computes, and on a mesh with fsdp or tensor devices send each other parts "
            f"of weights while they compute: remove it, or {alone}"
        ),
        "training.base_precision": cuts and training.base_precision != "no" and (
            f"={training.base_precision}: codes are made of whole rows or blocks of a weight, and the mesh's tensor "
            "axis cuts these: split the base over fsdp (mesh.ici_tensor_parallelism=1), or split one that is not "
            "quantised"
        ),
        "training.float8": cuts and training.float8 != "no" and (
            f"={training.float8}: scales are those of whole rows or matrices, and the mesh's tensor axis cuts these: "
            "split over fsdp (mesh.ici_tensor_parallelism=1), or set training.float8=no"
        ),
        "training.swap_blocks": mesh.splits and training.swap_blocks and (
            f"={training.swap_blocks}: blocks that wait in the host's memory are whole on each device, and a mesh with "
            "fsdp or tensor has parts of each block on every device: remove the setting, as fsdp saves more, or "
            f"{alone}"
        ),
        "training.offload_activations": mesh.splits and training.offload_activations and (
            " does not work on a mesh with fsdp or tensor, whose gathered weights would be taken for activations: "
            f"remove it, or {alone}"
        ),
        "optimizer.in_backward": cuts and in_backward and (
            f"={in_backward}: gradients of norms are summed over a tensor-parallel group after the backward pass, so "
            "that none can be used in it: train on one device, or remove it"
        ),
    }  # fmt: skip
    for setting, why in refused.items():
        if why:
            raise UserError(f"{setting}{why}", code="conflict", setting=setting)


def shared_out(loaded: Loaded, mesh: Mesh, recorded: int | None = None) -> BatchSizes:
    """Batch sizes of a recipe on a mesh; nothing is built. UserError for a mesh that it cannot be trained on."""
    config = loaded.config
    _check_split(config, mesh)
    whole = [role for role, own in config.objective.networks.items() if not own.splits]
    if whole and mesh.splits:
        raise UserError(
            f"the networks of this loss ({', '.join(whole)}) are called outside the one that is "
            "trained, and are not split over the mesh's fsdp and tensor axes: train with data parallelism alone "
            "(mesh.ici_fsdp_parallelism=1 mesh.ici_tensor_parallelism=1)",
            code="unsupported",
            setting="mesh.ici_fsdp_parallelism",
        )
    sizes = batch_sizes(config, recorded, mesh.batch_ranks, held(loaded))
    objective = plugins.find("objectives", config.objective.name).build(config.objective)
    check_uncut_batches(config, sizes, objective)
    return sizes


def batch_sizes(
    config: Config,
    recorded: int | None = None,
    ranks: int = 1,
    held: Container[str] = (_WHOLE, _MICRO, _ACCUMULATION),
) -> BatchSizes:
    """Batch sizes where so many devices read different samples; `recorded` is the global batch of the run's first
    start, which then holds. UserError where they do not divide and those that are `held` stand in the way."""
    whole, whole_notices = _whole(config.training, recorded, ranks, held)
    micro, micro_notices = _micro(config.training, whole, ranks, held)
    sizes = BatchSizes(whole, micro, ranks, (*whole_notices, *micro_notices))
    asked = config.training.gradient_accumulation_steps
    if 1 < asked != sizes.accumulation and not micro_notices and _ACCUMULATION not in held:
        sizes = replace(sizes, notices=(*sizes.notices, _accumulated(sizes, asked)))
    # Only a first start: later ones may have another number of devices, and the recorded global batch decides.
    if recorded is None and _MICRO in held:
        _refuse_other_product(config, sizes)
    if recorded is None and _ACCUMULATION in held:
        _refuse_other_accumulation(asked, sizes)
    return sizes


def _whole(training: TrainingSettings, recorded: int | None, ranks: int, held: Container[str]) -> tuple[int, list[str]]:
    """The global batch, and what to say of it."""
    asked, micro = training.global_batch_size, training.per_device_batch_size
    if recorded is None and asked is None:
        assert micro is not None, "the Config has checked it"
        return micro * training.gradient_accumulation_steps * ranks, []
    whole = recorded or asked or 0
    shared = -(-whole // ranks) * ranks
    if whole != shared and (recorded or _WHOLE in held):
        raise _unshared(whole, ranks, shared, recorded)
    if whole != shared:
        return shared, [_raised(whole, ranks, shared)]
    other = asked not in (None, whole) and _WHOLE not in held
    return whole, [f"the global batch stays at {whole} samples, with which this run was started"] if other else []


def _micro(training: TrainingSettings, whole: int, ranks: int, held: Container[str]) -> tuple[int, list[str]]:
    """The micro-batch, and what to say of it."""
    share, micro = whole // ranks, training.per_device_batch_size
    # What the command line says goes before a micro-batch of the recipe.
    if _ACCUMULATION in held and _MICRO not in held:
        micro = None
    wanted = micro or max(1, share // training.gradient_accumulation_steps)
    fitting = largest_divisor(share, wanted)
    if fitting == wanted:
        return fitting, []
    if (_MICRO if micro else _ACCUMULATION) not in held:
        return fitting, [_smaller(share, wanted, fitting, ranks)]
    of = f"{whole} samples" if ranks == 1 else f"{whole} samples, {share} a device,"
    raise UserError(
        f"the global batch of {of} cannot be split into micro-batches of {wanted}: choose a {_MICRO} (or "
        f"gradient_accumulation_steps) that divides it, such as {_MICRO}={fitting}, or remove it",
        code="conflict",
        setting="training.per_device_batch_size",
    )


def _unshared(whole: int, ranks: int, shared: int, recorded: int | None) -> UserError:
    said = (
        f"the global batch of {whole} samples cannot be split evenly over {ranks} devices (data x fsdp of the mesh): "
    )
    if recorded:
        return UserError(
            f"{said}the run was started with it. Use a number of devices that divides it, or start a new run with "
            f"{_WHOLE}={shared}",
            code="conflict",
            setting="training.global_batch_size",
        )
    return UserError(
        f"{said}set {_WHOLE}={shared} or another multiple of {ranks}, or use a number of devices that divides it",
        code="conflict",
        setting="training.global_batch_size",
    )


def _raised(whole: int, ranks: int, shared: int) -> str:
    return (
        f"the recipe's global batch of {whole} samples cannot be split evenly over {ranks} devices: {shared} is "
        f"used, with the same duration and learning rate; set {_WHOLE}={shared} to make this explicit"
    )


def _smaller(share: int, wanted: int, fitting: int, ranks: int) -> str:
    said = (
        f"micro-batches of {fitting} instead of the recipe's {wanted}: each device computes {share} of the "
        f"{share * ranks} samples of the global batch"
    )
    if share > wanted:
        return said
    return f"{said}, few for {ranks} devices; {_WHOLE}={wanted * ranks} would give each device more"


def _accumulated(sizes: BatchSizes, asked: int) -> str:
    return (
        f"gradients are accumulated over {sizes.accumulation} micro-batches instead of the recipe's {asked}: each "
        f"device computes {sizes.whole // sizes.ranks} of the {sizes.whole} samples of the global batch"
    )


def _refuse_other_product(config: Config, sizes: BatchSizes) -> None:
    """UserError where a new run says all three numbers, and they do not fit the devices. When a run goes on, the global
    batch decides alone, as there may be other devices."""
    asked = config.training.gradient_accumulation_steps
    given = config.training.per_device_batch_size is not None and asked > 1
    if given and sizes.accumulation != asked:
        raise UserError(
            f"training.global_batch_size={sizes.whole} is not per_device_batch_size {sizes.micro} x "
            f"gradient_accumulation_steps {asked} x {sizes.ranks} devices: remove one of the three",
            code="conflict",
            setting="training.gradient_accumulation_steps",
        )


def _refuse_other_accumulation(asked: int, sizes: BatchSizes) -> None:
    """UserError where a new run says how often gradients are accumulated, and a device's share has no such parts."""
    share = sizes.whole // sizes.ranks
    if asked > 1 and sizes.accumulation != asked:
        raise UserError(
            f"the global batch of {sizes.whole} samples, {share} a device, cannot be accumulated in {asked} equal "
            f"micro-batches: choose a {_ACCUMULATION} that divides {share}, such as {largest_divisor(share, asked)}, "
            "or remove it",
            code="conflict",
            setting=_ACCUMULATION,
        )
