"""Builds the model, adapters and objective that a Config describes. Batch sizes are in batch_sizes.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from daguerre import deferred, keys, plugins, system
from daguerre.adapters.adapter import Attached, attach
from daguerre.adapters.lora_parts.forward import cast_together
from daguerre.adapters.settings import AdapterSettings
from daguerre.assembly import (
    assistant,
    base_loras,
    caption_words,
    float8_layers,
    left_out,
    loss_networks,
    offloaded,
    quantized_base,
    swapped,
)
from daguerre.assembly.null_caption import NullCaption
from daguerre.conditions import condition as conditions
from daguerre.conditions.condition import Images
from daguerre.config.config import Config
from daguerre.data.images import kinds
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import buckets
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.family import Family
from daguerre.models.network import Network, block_classes
from daguerre.models.settings import ASSISTANT, DenoiserSettings, DistilledSettings
from daguerre.models.weights import unfilled
from daguerre.objectives.autoencoder import Autoencoder
from daguerre.objectives.objective import Example, Net, Nets, Objective
from daguerre.training import device as devices
from daguerre.training.performance import activation_checkpointing, kernels
from daguerre.training.performance.offloading import Offload
from daguerre.training.performance.swapping import Swap
from daguerre.training.precision import dtypes
from daguerre.training.precision.dtypes import Autocast, Precision
from daguerre.training.settings import OptimizerSettings
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.training.state import TrainState
from daguerre.types import IMAGE, Batch, LossTerms, References


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
    others: Mapping[str, Net]
    """The networks that the loss is computed with besides `net`, by role."""
    null: NullCaption = field(default_factory=NullCaption, kw_only=True)
    """The empty caption, for a loss that needs it."""
    swaps: Mapping[str, Swap] = field(default_factory=dict, kw_only=True)
    """The blocks that wait in the host's memory, by the component that they are of."""
    offload: Offload | None = field(default=None, kw_only=True)
    """Sends activations to the host's memory; None where they stay."""

    @property
    def networks(self) -> dict[str, Network]:
        """The family's networks, and those that adapters have added."""
        return {**self.family.networks, **self.attached.added_networks}

    @cached_property
    def float32(self) -> frozenset[str]:
        """Names in the net of the parameters that stay float32, whatever type the others are stored in."""
        return _float32(self.family, self.attached)

    @cached_property
    def of_references(self) -> frozenset[str]:
        """Names in the net of the parameters that only reference images reach."""
        own = {id(p) for network in self.family.networks.values() for p in network.of_references}
        return frozenset(name for name, p in self.net.named_parameters() if id(p) in own)

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
        return self.loss_of(net, self.example(batch))

    def loss_of(self, net: Callable[..., Any], example: Example[Any]) -> LossTerms:
        """The loss of a micro-batch that is encoded already."""
        networks = (net, *self.family.components.values()) if isinstance(net, nn.Module) else ()
        passing = nullcontext() if self.offload is None else self.offload.passing(networks)
        with kernels.repeated(torch.is_grad_enabled()), passing:
            return self.objective.loss(Nets(net, self.others, self.family.guidance), example)

    def example(self, batch: Batch) -> Example[Any]:
        """The batch as the objective reads it: encoded by the family, and conditioned further by the adapters."""
        clean, conditions, null = {}, {}, {}
        # Frozen encoders are not bound to the attention kernel that was chosen for the trained networks.
        with self.numerics.frozen():
            for name, (x0, cond) in self.family.encode_each(batch, self.targets).items():
                of_image = batch if name == IMAGE else batch.of(name)
                clean[name], conditions[name] = x0, self.attached.condition(of_image.adapter_inputs, cond)
                if self.objective.needs.null:
                    conditions[name], null[name] = self.null.beside(
                        self.family, conditions[name], self.objective.needs.null_caption
                    )
        return Example(clean, conditions, self.objective.drawn.of(batch.draws), batch.columns, null)

    def losses_at(self, batch: Batch, quantiles: Iterable[float]) -> Iterator[LossTerms]:
        """The loss terms of a batch of the host at quantiles in [0, 1] of the objective's law of times, by `net` as it
        is. Like an update, this never waits for the device: `training.validation.one_behind` says how to read them."""
        sent = devices.on(self.device, batch)
        for quantile in quantiles:
            # Drawn on the host, where the images still are; what was sent before stays where it is.
            drawn = devices.on(self.device, replace(sent, draws=self.draws(batch, quantile)))
            with self.autocast():
                yield self.loss(self.net, drawn)

    def draws(self, batch: Batch, quantile: float | None = None) -> Mapping[str, Tensor]:
        """All that the loss needs of a batch in addition to its samples: random numbers by its keys, tokens of its
        captions and its sizes, on the CPU (`quantile` fixes the noise level), and weights of elements, where the images
        are. UserError for an image that an adapter cannot read."""
        # On the host, where the images still are: asking the device would wait for it.
        self.attached.check(batch.adapter_inputs)
        pixel_shape = batch.pixel_shape
        shape = self.family.latent_shape(pixel_shape)
        of_objective = self.objective.draws(self.seed, batch.keys, shape, quantile=quantile).tensors
        weights = self.objective.elements.draws(batch.images, shape)
        inputs = self.family.random_inputs(self.seed, batch.keys, pixel_shape)
        inputs |= self.attached.random_inputs(self.seed, batch.keys, shape)
        of_targets = {
            f"{name}.{draw}": rows for name in self.targets for draw, rows in self._draws_of(name, batch).items()
        }
        return {**self.family.told(batch), **inputs, **of_objective, **weights, **of_targets}

    def _draws_of(self, target: str, batch: Batch) -> dict[str, Tensor]:
        """The draws that belong to one of the targets: noise of its own for the autoencoder, and its sizes. Noise and
        time of the objective are those of the sample, so that they cancel where a loss compares its images."""
        seed = int(keys.words(self.seed, f"image {target}", 0, count=1)[0])
        inputs = self.family.random_inputs(seed, batch.keys, batch.pixel_shape)
        return inputs | self.family.numbers(batch.of(target))

    @property
    def images(self) -> Images:
        """The further images that a batch holds: stored by the sources (None), or computed."""
        asked = (*self.objective.elements.images, *self.objective.needs.images)
        return {**dict.fromkeys(asked), **self.conditioning_images}

    @property
    def conditioning_images(self) -> Images:
        """Those of them that say what is generated, as a prompt has them, too: adapters' and reference images."""
        rule = self.family.references
        return {**self.attached.images, **({} if rule is None else dict.fromkeys(rule.names, rule))}

    @property
    def is_ragged(self) -> bool:
        """True where not all samples of a bucket can be computed together."""
        return self.family.references is not None or self.family.layout is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The numbers of metadata that a batch holds."""
        return self.objective.needs.columns

    @property
    def targets(self) -> tuple[str, ...]:
        """Further images of a sample that become clean samples."""
        return self.objective.needs.images


@system.large_pieces_apart()  # of wide weights narrow ones are made, one after the other
def build(
    config: Config,
    device: torch.device | None = None,
    init_device: torch.device | None = None,
    networks: tuple[Family, Attached] | None = None,
    trains: bool = False,
    float32: Collection[str] = (),
) -> Components:
    """Loads the family and attaches the adapters, unless `networks` have come from `load`; builds the objective, and
    moves the networks to the device of the run: by default the one that the recipe names. Networks without weights draw
    theirs on the CPU, or on `init_device`. The net, whether it `trains` or not, and a denoiser that is frozen have
    weights of training.weights_dtype before they are moved, as the device may have no room for them in float32; those
    of the net that are named in `float32` keep theirs."""
    device = device or devices.choose_device(config.training.device)
    devices.prepare(config.training, device)
    if networks is None:
        with init_device or nullcontext():
            networks = load(config, defers=True)
    family, attached = networks
    # One layer after the other onto the device: the whole base in float32 may have no room there.
    waiting = swapped.chosen(config, family, trains)
    inside = [block for blocks in waiting.values() for block in blocks]
    quantized_base.quantize(config.training.base_precision, family, left_out.components(config), device, inside)
    _narrow_readers(config, family)
    offloaded.begin(config, family, device, encoders.absent(family))
    if trains:
        _refuse_distilled(config, family)
    _store(config, family, attached, device, float32)
    if trains:
        assistant.attach(family, dtypes.choose(config.training, device).compute)
    swapped.mark(waiting, family)
    encoders.moved(attached.net, device)
    return _assembled(config, family.to(device), attached, device, waiting)


def begin(
    config: Config, parts: Components, sharding: Sharding = UNSHARDED, optimizer: OptimizerSettings | None = None
) -> TrainState:
    """The state before the first update, by the recipe's optimizer or another one; `sharding` is where the networks
    are. UserError as from `TrainState.start`."""
    state = TrainState.start(
        parts.net, parts.objective.learnt, optimizer or config.optimizer, config.ema, parts.numerics, config.seed,
        sharding, parts.attached.names, parts.float32,
    )  # fmt: skip
    state.of_references = parts.of_references
    return state


def outline(
    config: Config, networks: tuple[Family, Attached] | None = None, float32: Collection[str] = ()
) -> Components:
    """The same parts without memory and without weights: networks on the meta device, of their numbers alone. Nothing
    is set for the process. `networks` that have come from `load` there are trained no more: their types are those that
    `build` gives them, too, where a training state decides otherwise."""
    device = devices.choose_device(config.training.device)
    with unfilled.outlining():
        family, attached = networks or load(config)
        if networks is None:
            _refuse_distilled(config, family)
        quantized_base.quantize(config.training.base_precision, family, left_out.components(config))
        _narrow_readers(config, family)
        offloaded.begin(config, family, device, left_out.components(config) if networks is None else ())
        if networks is None:
            _narrow_denoiser(config, family, device)
        else:
            _store(config, family, attached, device, float32)
        assistant.attach(family, dtypes.choose(config.training, device).compute)
        waiting = swapped.chosen(config, family, networks is None)
        swapped.mark(waiting, family)
    return _assembled(config, family, attached, device, waiting)


def load(config: Config, leave_out: Collection[str] = (), defers: bool = False) -> tuple[Family, Attached]:
    """The networks of a recipe, on the CPU, with its adapters. Components to `leave_out` take no memory until something
    needs them (models/encoders.py); with `defers` weights have none until `build` reads them (deferred/)."""
    config = caption_words.fixed(config)
    with encoders.leaving_out(leave_out), deferred.deferring(defers):
        family: Family = plugins.find("families", config.model.family).load(config.model, config.seed)
        base_loras.merge(config.model, family)
        reached = [name for own in config.adapters.values() for name in own.reaches(family.trainable)]
        family = family.training(reached) if family.trainable else family
        helping = assistant.opened(config, family)
        # First of all that changes networks: kernels, types and meshes then see the layers as they are trained.
        attached = attach(config.adapters, family, config.seed)
        # After the adapters: a teacher has none of them, and what they export has none of these.
        return assistant.added(*loss_networks.added(config, family, attached), helping)


def _float32(family: Family, attached: Attached) -> frozenset[str]:
    # By identity: a parameter has one name in its network and another one in the net.
    kept = {id(p) for network in {**family.networks, **attached.added_networks}.values() for p in network.float32}
    return attached.float32 | {name for name, p in attached.net.named_parameters() if id(p) in kept}


def _refuse_distilled(config: Config, family: Family) -> None:
    """UserError for weights that training would spoil."""
    if family.distilled and ASSISTANT not in family.networks:
        asserted = isinstance(config.model, DistilledSettings) and config.model.is_distilled is None
        base = ". If it is no distilled one, model.is_distilled=false says so" if asserted else ""
        raise UserError(
            "the base was distilled to few steps, which training undoes, so that it can only generate: train "
            f"{family.distilled}, and generate with this one and what was learnt; or give model.{ASSISTANT}=FILE, a "
            f"LoRA that undoes the distillation while others are trained (docs/families.md){base}",
            code="unsupported",
            setting="model.pretrained_model_name_or_path",
        )


def _store(config: Config, family: Family, attached: Attached, device: torch.device, float32: Collection[str]) -> None:
    """Stores the net, and denoisers outside of it, in the recipe's type; what is named in `float32` keeps its own."""
    dtypes.choose(config.training, device).store(attached.net, _float32(family, attached).union(float32))
    _narrow_denoiser(config, family, device)


def _narrow_denoiser(config: Config, family: Family, device: torch.device) -> None:
    """Stores a denoiser that is frozen outside of the net, a teacher's or where new tokens are trained, as the net's
    weights are stored."""
    for name, network in family.networks.items():
        if network.denoises and name not in family.trained:
            kept = {id(p) for p in network.float32}
            names = [name for name, p in network.module.named_parameters() if id(p) in kept]
            dtypes.choose(config.training, device).store(network.module, names)


def _narrow_readers(config: Config, family: Family) -> None:
    """Stores frozen text encoders in the type in which they encode, where their files have it."""
    for network in family.networks.values():
        frozen = not any(p.requires_grad for p in network.module.parameters())
        if network.facts.published_bf16 and frozen:
            kernels.store(config.training, network.module)


def beside(parts: Components, adapters: Mapping[str, AdapterSettings]) -> Components:
    """The parts with further adapters, for generation: on the same device, frozen, in evaluation mode."""
    parts.net.requires_grad_(False)
    # Around the net with the adapters of before, so that both kinds act together.
    more = attach(adapters, replace(parts.family, net=parts.net), parts.seed)
    encoders.moved(more.net.requires_grad_(False).eval(), parts.device)
    attached = Attached(more.net, {**parts.attached.trainables, **more.trainables}, parts.attached.beside)
    return replace(parts, attached=attached)


def _assembled(
    config: Config, family: Family, attached: Attached, device: torch.device, waiting: swapped.Chosen
) -> Components:
    """Family, adapters and objective, with what no section of the recipe can see alone refused."""
    numerics = dtypes.choose(config.training, device)
    objective = _objective(config)
    _refuse_other_nets(config, attached.net)
    objective.check(attached.net)
    _refuse_weights(config, objective)
    loss_networks.check(config, objective, family, attached.net)
    if config.model.overflows_float16 and torch.float16 in (numerics.compute, numerics.weights):
        of_weights = config.training.weights_dtype == "float16"
        setting, serves = ("weights_dtype", "bfloat16") if of_weights else ("mixed_precision", "bf16")
        raise UserError(
            f"activations of {config.model.family} exceed the range of float16: set training.{setting}={serves}",
            code="unsupported",
            setting=f"training.{setting}",
        )
    if family.generates:  # the weights may take another guidance than their class, which the config could check
        family.guidance.check(config.sampling)
    net = attached.net
    # Asked now, so that sizes and steps that cannot be are refused before hours of training, not after.
    sizes = {bucket: family.latent_shape((3, bucket.height_px, bucket.width_px)) for bucket in buckets(config.data)}
    if (diffusion := objective.diffusion) is not None:
        sampling, (bucket, shape) = config.sampling, next(iter(sizes.items()))
        cell_px = bucket.area_px / math.prod(shape[1:])
        sampled_px = math.prod(sampling.size_px(config.data.resolution))
        diffusion = replace(diffusion, cell_px=cell_px, sampled_px=sampled_px)
        objective = objective.with_diffusion(diffusion)
        diffusion.sampled(sampling).grid(sampling.num_inference_steps, sampling.timestep_spacing)
    attached.follow(objective)
    # The further networks too: a ControlNet has blocks of the denoiser's classes.
    compiled = block_classes([*family.networks.values(), *attached.added_networks.values()])
    teachers = [network.module for network in family.networks.values() if network.teacher is not None]
    float8_layers.enable(config, family, attached)
    kernels.apply(config.training, net, family.components.values(), compiled, device, teachers)
    if device.type == "cuda" and config.training.kernels != "plain":
        cast_together([*family.networks.values(), *attached.added_networks.values()])
    if config.training.gradient_checkpointing:
        activation_checkpointing.enable(net, family.components.values(), numerics.attention, attached.again)
    others = loss_networks.of(config.objective, family)
    swaps = swapped.begin(waiting, family, device)
    offload = Offload(device) if config.training.offload_activations else None
    parts = Components(family, objective, attached, device, numerics, config.seed, others, swaps=swaps, offload=offload)
    _refuse_idle_images(config, parts.images)
    _refuse_layouts(config, parts)
    return parts


def _objective(config: Config) -> Objective:
    """The objective with the noise conditioning of the network. UserError for a setting of it without noise levels."""
    objective: Objective = plugins.find("objectives", config.objective.name).build(config.objective)
    if not isinstance(config.model, DenoiserSettings):
        return objective
    if (diffusion := objective.diffusion) is not None:
        name, scale = config.model.noise_conditioning, config.model.time_scale
        return objective.with_diffusion(diffusion.with_noise_conditioning(name, scale))
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


def _refuse_layouts(config: Config, parts: Components) -> None:
    """UserError for an objective that compares samples which are not computed together."""
    if parts.is_ragged and parts.objective.couples_samples:
        raise UserError(
            f"objective.name={config.objective.name} compares the samples of a batch, and model.family="
            f"{config.model.family} computes samples of different layouts apart: choose another objective or family",
            code="conflict",
            setting="objective.name",
        )


def _refuse_dropout(config: Config, rule: References | None) -> None:
    for name, own in config.data.sources.items():
        if own.reference_dropout and (rule is None or rule.least):
            reads = "reads no reference images" if rule is None else "needs a reference image with each sample"
            raise UserError(
                f"data.sources.{name}.reference_dropout is {own.reference_dropout:g}, and this model {reads}: remove "
                "the setting" + (", or set model.references" if rule is None else ""),
                code="unused" if rule is None else "conflict",
                setting=f"data.sources.{name}.reference_dropout",
            )


def _refuse_idle_images(config: Config, images: Images) -> None:
    """UserError where a source makes images that nothing reads, says where they are, or drops those that are always
    needed."""
    _refuse_dropout(config, conditions.references(images))
    read = {setting for name in kinds.stored(images) for setting in KINDS[name].settings}
    for name, own in config.data.sources.items():
        for image in sorted(own.made - kinds.stored(images).keys()):
            raise UserError(
                f"data.sources.{name} draws a {KINDS[image].word} with each sample, and nothing in the recipe reads "
                f"it: add {KINDS[image].reader} for it, or choose another source (docs/data.md)",
                code="unused",
                setting=f"data.sources.{name}",
            )
        for kind in {kind.settings: kind for kind in KINDS.values()}.values():
            for setting in kind.settings:
                if setting not in read and getattr(own, setting, None) is not None:
                    raise UserError(
                        f"data.sources.{name}.{setting} has no effect: nothing in the recipe reads a stored "
                        f"{kind.word}. Remove it, or add {kind.reader} that does (docs/data.md)",
                        code="unused",
                        setting=f"data.sources.{name}.{setting}",
                    )
