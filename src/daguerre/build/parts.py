"""The parts that a Config names, built and put together. What they do together is the verbs' affair."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from daguerre import plugins
from daguerre.adapters.adapter import Attached, attach
from daguerre.adapters.lora_parts.forward import cast_together
from daguerre.adapters.settings import AdapterSettings
from daguerre.build import beside as beside_loss
from daguerre.build import quantized_base
from daguerre.conditions.condition import Images
from daguerre.config.config import Config, Loaded
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import buckets
from daguerre.distributed.mesh import Mesh
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.family import Family
from daguerre.models.settings import DenoiserSettings
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.autoencoder import Autoencoder
from daguerre.objectives.objective import Objective
from daguerre.training import device as devices
from daguerre.training.performance import activation_checkpointing, kernels
from daguerre.training.precision import dtypes
from daguerre.training.precision.dtypes import Autocast, Precision
from daguerre.training.settings import OptimizerSettings, TrainingSettings, largest_divisor
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.training.state import TrainState
from daguerre.types import Batch, Cond, LossTerms


@dataclass(frozen=True)
class Components:
    """Networks, objective and what is trained of it, on their device."""

    family: Family
    objective: Objective
    attached: Attached
    """What is trained."""
    device: torch.device
    numerics: Precision
    """What the trained networks compute with, and how they are stored while they are trained."""
    seed: int

    @property
    def net(self) -> nn.Module:
        """The module that the objective calls: it holds all that is trained."""
        return self.attached.net

    @property
    def autocast(self) -> Autocast:
        """The context of a forward pass of `net`."""
        return self.numerics.forward

    @property
    def precision(self) -> str:
        """`fp32`, `bf16` or `fp16`, and what else is not as usual."""
        return str(self.numerics)

    def loss(self, net: nn.Module, batch: Batch) -> LossTerms:
        """The loss of a micro-batch: the one place where family and objective meet."""
        x0, cond = self.encode(batch)
        return self.objective.loss(net, x0, cond, batch.draws)

    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        """Clean samples and conditioning of a batch, by the family and then by the adapters."""
        with self.numerics.frozen():
            x0, cond = self.family.encode(batch)
            return x0, self.attached.condition(batch, cond)

    def draws(self, batch: Batch, quantile: float | None = None) -> Mapping[str, Tensor]:
        """All that the loss needs of a batch beside its samples: random numbers by its keys, tokens of its captions and
        its sizes, on the CPU (`quantile` fixes the noise level), and weights of elements, where the images are.
        UserError for an image that an adapter cannot read."""
        self.attached.check(batch)
        pixel_shape = batch.pixel_shape
        shape = self.family.latent_shape(pixel_shape)
        of_objective = self.objective.draws(self.seed, batch.keys, shape, quantile=quantile)
        weights = self.objective.elements.draws(batch.images, shape)
        inputs = self.family.random_inputs(self.seed, batch.keys, pixel_shape)
        inputs |= self.attached.random_inputs(self.seed, batch.keys, shape)
        return {**self.family.told(batch), **inputs, **of_objective, **weights}

    @property
    def images(self) -> Images:
        """The images that a batch holds beside those that are trained on: stored by the sources (None), or computed."""
        return {**dict.fromkeys(self.objective.elements.images), **self.attached.images}


def build(
    config: Config,
    device: torch.device | None = None,
    init_device: torch.device | None = None,
    networks: tuple[Family, Attached] | None = None,
    trains: bool = False,
) -> Components:
    """Loads the family and attaches the adapters, unless `networks` have come from `load`; builds the objective, and
    moves the networks to the device of the run: by default the one that the recipe names. Networks without weights draw
    theirs on the CPU, or on `init_device`. The net that `trains`, and a frozen denoiser beside it, have weights of
    training.weights_dtype before they are moved, as the device may have no room for them in float32."""
    device = device or devices.choose_device(config.training.device)
    devices.prepare(config.training, device)
    if networks is None:
        with init_device or nullcontext():
            networks = load(config)
    family, attached = networks
    quantized_base.quantize(config.training.base_precision, family, device)
    if trains:
        dtypes.choose(config.training, device).store(attached.net, attached.float32)
        _narrow_denoiser(config, family, device)
    encoders.moved(attached.net, device)
    return _assembled(config, family.to(device), attached, device)


def begin(
    config: Config, parts: Components, sharding: Sharding = UNSHARDED, optimizer: OptimizerSettings | None = None
) -> TrainState:
    """The state before the first update, by the recipe's optimizer or another one; `sharding` is where the networks
    are. UserError as from `TrainState.start`."""
    return TrainState.start(
        parts.net, parts.objective.learnt, optimizer or config.optimizer, config.ema, parts.numerics, config.seed,
        sharding, parts.attached.names, parts.attached.float32,
    )  # fmt: skip


def outline(config: Config) -> Components:
    """The same parts without memory and without weights: networks on the meta device, of their numbers alone. Nothing
    is set for the process."""
    device = devices.choose_device(config.training.device)
    with torch.device("meta"):
        family, attached = load(config)
        quantized_base.quantize(config.training.base_precision, family)
        _narrow_denoiser(config, family, device)
    return _assembled(config, family, attached, device)


def load(config: Config, leave_out: Collection[str] = ()) -> tuple[Family, Attached]:
    """The networks of a recipe, on the CPU, with its adapters. Components to `leave_out` take no memory until something
    needs them (models/encoders.py)."""
    with encoders.leaving_out(leave_out):
        family: Family = plugins.find("families", config.model.family).load(config.model, config.seed)
        reached = [name for own in config.adapters.values() for name in own.reaches(family.trainable)]
        family = family.training(reached) if family.trainable else family
        attached = attach(config.adapters, family, config.seed)
        return beside_loss.added(config.objective, family, attached, config.seed)


def _narrow_denoiser(config: Config, family: Family, device: torch.device) -> None:
    """Stores a denoiser that is frozen outside of the net, as beside new tokens, as the net's weights are stored."""
    for name, network in family.components.items():
        if family.specs[name].role == "denoiser" and name not in family.trained:
            dtypes.choose(config.training, device).store(network)


def beside(parts: Components, adapters: Mapping[str, AdapterSettings]) -> Components:
    """The parts with further adapters, for generation: on the same device, frozen, in evaluation mode."""
    parts.net.requires_grad_(False)
    more = attach(adapters, replace(parts.family, net=parts.net), parts.seed)
    more.net.requires_grad_(False).to(parts.device).eval()
    attached = Attached(more.net, {**parts.attached.trainables, **more.trainables}, parts.attached.beside)
    return replace(parts, attached=attached)


def _assembled(config: Config, family: Family, attached: Attached, device: torch.device) -> Components:
    """Family, adapters and objective, with what no section of the recipe can see alone refused."""
    numerics = dtypes.choose(config.training, device)
    objective = _objective(config).beside(beside_loss.of(config.objective, family))
    _refuse_other_nets(config, attached.net)
    objective.check(attached.net)
    _refuse_weights(config, objective)
    if config.model.overflows_float16 and torch.float16 in (numerics.compute, numerics.weights):
        of_weights = config.training.weights_dtype == "float16"
        setting, serves = ("weights_dtype", "bfloat16") if of_weights else ("mixed_precision", "bf16")
        raise UserError(
            f"activations of {config.model.family} exceed the range of float16: set training.{setting}={serves}",
            code="unsupported",
            setting=f"training.{setting}",
        )
    net = attached.net
    # Asked now, so that sizes and steps that cannot be are refused before hours of training, not after.
    sizes = {bucket: family.latent_shape((3, bucket.height_px, bucket.width_px)) for bucket in buckets(config.data)}
    if isinstance(objective, Diffusion):
        sampling, (bucket, shape) = config.sampling, next(iter(sizes.items()))
        cell_px = bucket.area_px / math.prod(shape[1:])
        sampled_px = math.prod(sampling.size_px(config.data.resolution))
        objective = replace(objective, cell_px=cell_px, sampled_px=sampled_px)
        objective.sampled(sampling.shift).grid(sampling.num_inference_steps, sampling.timestep_spacing)
    kernels.apply(config.training, net, family.components.values(), family.block_classes, device)
    if device.type == "cuda" and config.training.kernels != "plain" and not config.training.compile:
        cast_together((*family.components.values(), net))
    if config.training.gradient_checkpointing:
        activation_checkpointing.enable(net, family.components.values(), numerics.attention)
    parts = Components(family, objective, attached, device, numerics, config.seed)
    _refuse_idle_images(config, parts.images)
    return parts


def _objective(config: Config) -> Objective:
    """The objective as the network is told its noise levels. UserError where it has none to tell."""
    objective: Objective = plugins.find("objectives", config.objective.name).build(config.objective)
    if not isinstance(config.model, DenoiserSettings):
        return objective
    if isinstance(objective, Diffusion):
        return objective.telling(config.model.noise_conditioning, config.model.time_scale)
    if config.model.noise_conditioning != "auto":
        raise UserError(
            f"model.noise_conditioning has no effect: the objective {config.objective.name} is not a diffusion "
            "objective, so it has no noise level: remove the setting",
            code="unused",
            setting="model.noise_conditioning",
        )
    return objective


def _refuse_other_nets(config: Config, net: nn.Module) -> None:
    """UserError for an objective that makes images again with a net that does something else, and the other way
    round."""
    makes, wanted = isinstance(net, Autoencoder), config.objective.reconstructs
    if makes != wanted:
        does = "makes images again" if makes else "makes no images again"
        raise UserError(
            f"objective.name={config.objective.name} cannot train model.family={config.model.family}, which {does}: "
            "the objective autoencoder belongs to the families autoencoder, stage_a and previewer, and to no others",
            code="conflict",
            setting="objective.name",
        )


def _refuse_weights(config: Config, objective: Objective) -> None:
    """UserError where sources weigh their samples' losses, and the objective gives no sample a loss of its own."""
    sources = config.data.sources.items()
    weighed = [f"data.sources.{name}.loss_weight" for name, own in sources if own.loss_weight != 1]
    if objective.couples_samples and weighed:
        raise UserError(
            f"{', '.join(weighed)}: the objective {config.objective.name} compares the samples of a batch with each "
            "other, so no sample has its own loss to weight: remove the setting; data.weights sets how often each "
            "source is sampled",
            code="conflict",
        )


def _refuse_idle_images(config: Config, images: Images) -> None:
    """UserError where a source says where images are that nothing reads."""
    read = {setting for name, condition in images.items() if condition is None for setting in KINDS[name].settings}
    for name, own in config.data.sources.items():
        for kind in {kind.settings: kind for kind in KINDS.values()}.values():
            for setting in kind.settings:
                if setting not in read and getattr(own, setting, None) is not None:
                    raise UserError(
                        f"data.sources.{name}.{setting} has no effect: nothing in the recipe reads a stored "
                        f"{kind.word}. Remove it, or add {kind.reader} that does (docs/conditions.md)",
                        code="unused",
                        setting=f"data.sources.{name}.{setting}",
                    )


def couples_samples(objective: Objective, net: nn.Module | None = None) -> str:
    """The thing that couples the samples of a batch with each other: a loss, or norms over the batch in what is
    trained; "" where there is none."""
    if objective.couples_samples:
        return "this objective compares all samples of a batch with each other"
    norms = (name for name, module in (net.named_modules() if net else ()) if type(module) is nn.BatchNorm2d)
    if (first := next(norms, None)) is not None:
        return f"norms over the batch, such as {first}, are trained from random weights"
    return ""


def check_uncut_batches(config: Config, couples: str, sizes: BatchSizes) -> None:
    """UserError where not one image has room in a micro-batch, or where what couples the samples of a batch would see
    only a part of the global batch."""
    area_px = max(bucket.area_px for bucket in buckets(config.data))
    if area_px > (config.loader.max_pixels or math.inf):
        raise UserError(
            f"loader.max_pixels={config.loader.max_pixels} is less than one image of the largest bucket ({area_px} "
            "pixels): raise it, or train on smaller images (data.resolution)",
            code="conflict",
            setting="loader.max_pixels",
        )
    if couples and sizes.whole * area_px > (config.loader.max_pixels or math.inf):
        raise UserError(
            f"{couples}, so the global batch of {sizes.whole} cannot be split, but it has {sizes.whole * area_px:,} "
            "pixels: remove loader.max_pixels, or choose a smaller global_batch_size",
            code="conflict",
            setting="loader.max_pixels",
        )
    if couples and sizes.ranks > 1:
        raise UserError(
            f"{couples}, so the global batch cannot be split over {sizes.ranks} devices: train on one device (or one "
            "tensor-parallel group)",
            code="conflict",
        )
    if couples and sizes.accumulation > 1:
        raise UserError(
            f"{couples}, so the global batch of {sizes.whole} cannot be computed as {sizes.accumulation} x "
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
    """Into how many parts it is cut before: devices that read different samples."""
    notices: tuple[str, ...] = ()
    """What is otherwise than the recipe says, for people."""

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


def shared_out(loaded: Loaded, mesh: Mesh, recorded: int | None = None) -> BatchSizes:
    """Batch sizes of a recipe on a mesh; nothing is built. UserError for a mesh that it cannot be trained on."""
    config = loaded.config
    if config.training.base_precision != "no" and mesh.degree("fsdp") * mesh.degree("tensor") > 1:
        raise UserError(
            f"training.base_precision={config.training.base_precision}: layers of few bits cannot be split over the "
            "mesh's fsdp and tensor axes: train with data parallelism alone (mesh.ici_fsdp_parallelism=1 "
            "mesh.ici_tensor_parallelism=1), or split a base that is not quantised",
            code="conflict",
            setting="training.base_precision",
        )
    if config.objective.beside and mesh.degree("fsdp") * mesh.degree("tensor") > 1:
        raise UserError(
            f"the networks of this loss ({', '.join(config.objective.beside)}) are called outside the one that is "
            "trained, and are not split over the mesh's fsdp and tensor axes: train with data parallelism alone "
            "(mesh.ici_fsdp_parallelism=1 mesh.ici_tensor_parallelism=1)",
            code="unsupported",
            setting="mesh.ici_fsdp_parallelism",
        )
    sizes = batch_sizes(config, recorded, mesh.batch_ranks, held(loaded))
    objective = plugins.find("objectives", config.objective.name).build(config.objective)
    check_uncut_batches(config, couples_samples(objective), sizes)
    return sizes


def batch_sizes(
    config: Config,
    recorded: int | None = None,
    ranks: int = 1,
    held: Container[str] = (_WHOLE, _MICRO, _ACCUMULATION),
) -> BatchSizes:
    """Batch sizes where so many devices read different samples; `recorded` is the global batch of the run's first
    start, which then holds. UserError where they do not divide and those that are `held` stand in the way."""
    whole, of_whole = _whole(config.training, recorded, ranks, held)
    micro, of_micro = _micro(config.training, whole, ranks, held)
    sizes = BatchSizes(whole, micro, ranks, (*of_whole, *of_micro))
    if recorded is None and _MICRO in held:
        _refuse_other_product(config, sizes)
    return sizes


def _whole(training: TrainingSettings, recorded: int | None, ranks: int, held: Container[str]) -> tuple[int, list[str]]:
    """The global batch, and what to say of it."""
    given, micro = training.global_batch_size, training.per_device_batch_size
    if recorded is None and given is None:
        assert micro is not None, "the Config has checked it"
        return micro * training.gradient_accumulation_steps * ranks, []
    whole = recorded or given or 0
    shared = -(-whole // ranks) * ranks
    if whole != shared and (recorded or _WHOLE in held):
        raise _unshared(whole, ranks, shared, recorded)
    if whole != shared:
        return shared, [_raised(whole, ranks, shared)]
    other = given not in (None, whole) and _WHOLE not in held
    return whole, [f"the global batch stays at {whole} samples, with which this run was started"] if other else []


def _micro(training: TrainingSettings, whole: int, ranks: int, held: Container[str]) -> tuple[int, list[str]]:
    """The micro-batch, and what to say of it."""
    share, micro = whole // ranks, training.per_device_batch_size
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
