"""The training step beside diffusers': what its example scripts do, and the best their user can make of it.

    python benchmarks/peers.py [RECIPE] [peers=NAME,NAME] [options of `daguerre bench`] [key=value]

Same network, initial weights, latents, text features, noise and timesteps for all; AdamW over all parameters alike, as
the example has it, at a rate of 1e-4 (larger ones magnify rounding, and take no other time). `diffusers-default`:
float32 weights, autocast to bf16 on a GPU, AdamW as torch builds it, clip_grad_norm_, EMAModel with its defaults, the
loss read every step, DDPMScheduler. `diffusers-best`: channels_last, torch.compile, fused AdamW,
EMAModel(foreach=True), the attention kernel that is fastest on this network. Both get the noise for nothing; the
example draws it. Public interfaces only.

Stage C and Stage B of Stable Cascade have no example there: the same loop around diffusers' StableCascadeUNet and
DDPMWuerstchenScheduler, with the weights of P2 where the recipe has them. Dropout inside the network is left out of
both, as each would draw its own.

Recipes with a LoRA of the UNet are put beside train_text_to_image_lora.py's step (frozen UNet in 16 bits where it
computes so, float32 LoRA by `add_adapter`), those with a ControlNet beside train_controlnet.py's (`ControlNetModel`
beside a frozen UNet), SD and SDXL alike; averages only where the recipe keeps them, as these scripts have none. Where
the recipe computes activations again, so do they, in the network that is trained (`--gradient_checkpointing`).

No number without parity: before it is timed, each contestant trains 20 updates, and its losses and averaged weights
must agree with the first one's. One that does not gets a row that says so and no ratio.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    ControlNetModel,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    StableCascadeUNet,
    UNet2DConditionModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, cast_training_params
from peft import LoraConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from daguerre import plugins
from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.bench import inputs, random_model, report, variants
from daguerre.bench import options as bench_options
from daguerre.bench.inputs import Encoded
from daguerre.bench.timing import Result
from daguerre.cli import bench
from daguerre.config import overrides
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.models.controlnets import controlled
from daguerre.training import device as devices
from daguerre.training import oom

PEERS = ("diffusers-default", "diffusers-best")
STEPS = 20
ALIKE = {"optimizer.weight_decay_exclude": "[]", "optimizer.learning_rate": "1e-4"}
"""The example decays all parameters alike."""
LIMITS = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (1e-2, 0.3)}
"""Largest differences by type: of a loss, relative; of the averaged weights, relative to how far they have moved."""


class NoParity(UserError):
    """Two trainings of the same thing came out differently: their speeds say nothing about each other."""


@dataclass(frozen=True)
class Given:
    """What all contestants start from: weights on the CPU, and encoded micro-batches on the device."""

    config: Config
    """With networks that are on this machine."""
    random_weights: bool
    unet: Mapping[str, Any]
    """Its numbers."""
    weights: Mapping[str, Tensor]
    """Of the UNet."""
    trained: Mapping[str, Tensor]
    """What is trained, by the names of its own network."""
    embedding: tuple[int, ...]
    """Channels of a ControlNet's embedding of the picture."""
    ring: list[Encoded]
    accumulation: int
    compute: torch.dtype
    device: torch.device
    flops_per_sample: float


def adapter_of(config: Config) -> Any:
    """The settings of the one adapter. UserError for what no example trains."""
    every: list[Any] = list(config.adapters.values())
    own = every[0]
    usual = {
        "full": lambda: own.reaches(config.model.trainable()) == config.model.trainable()[:1],
        "lora": lambda: (own.kind, own.ranks, own.lora_fa) == ("lora", {}, False) and own.targets == "attention"
        and not (own.rank_pattern or own.alpha_pattern or own.dropout_pattern or own.dropout),
        "controlnet": lambda: own.size in (None, "large")
        and (own.conditioning_scale, own.conditioning_dropout) == (1, 0),
    }  # fmt: skip
    if len(every) > 1 or own.name not in usual or not usual[own.name]():
        raise UserError(
            "adapters: diffusers' examples train the whole UNet, a LoRA of its attention layers, or a ControlNet, each "
            "alone and without dropout"
        )
    return own


def is_cascade(config: Config) -> bool:
    """True of Stage C and Stage B of Stable Cascade."""
    return config.model.family.startswith("cascade_")


def refuse(config: Config) -> None:
    """UserError for what the examples do not train."""
    adapter_of(config)
    if config.training.base_precision != "no":
        raise UserError("training.base_precision: these examples do not train beside a base of few bits; leave it out")
    settings: Any = config.objective
    if is_cascade(config):
        if settings.name != "eps" or settings.schedule.name != "cosine" or settings.schedule.shift != 1:
            raise UserError("objective: DDPMWuerstchenScheduler has eps on the cosine schedule, without a shift")
        if settings.weighting.name not in ("none", "p2"):
            raise UserError("objective.weighting: this loop has no adaptive weights; choose p2 or none")
        if adapter_of(config).name != "full":
            raise UserError("adapters: this loop trains the whole stage")
        return
    if settings.name not in ("eps", "v") or settings.schedule.name != "scaled_linear":
        raise UserError("objective: diffusers' example trains eps and v on the scaled-linear schedule")
    if settings.weighting.name != "none":
        raise UserError("objective.weighting: the losses of diffusers' example are not weighted; leave it out")


def given(config: Config, folder: Path) -> Given:
    """Built once, and forgotten but for this."""
    config, notice = random_model.at_hand(config, folder)
    parts = variants.built(config, random_weights=bool(notice))
    sizes = batch_sizes(config)
    ring = inputs.encoded_ring(config, parts, sizes, random_weights=bool(notice))
    with parts.device if notice and parts.device.type != "cpu" else nullcontext():
        family: Any = plugins.find("families", config.model.family).load(config.model, config.seed)
    unet = family.components[config.model.networks("denoiser")[0]]
    weights = {name: p.detach().cpu() for name, p in unet.state_dict().items()}
    begun = {name: p.detach().cpu() for name, p in parts.net.named_parameters() if p.requires_grad}
    channels = [each.network.config.conditioning_embedding_out_channels for each in controlled.beside(parts.net)]
    return Given(
        config, bool(notice), dict(unet.config), weights, {name.partition(".")[2]: p for name, p in begun.items()},
        tuple(*channels), ring, sizes.accumulation, parts.numerics.compute, parts.device,
        variants.step_flops(config, parts),
    )  # fmt: skip


def without_dropout(network: torch.nn.Module) -> None:
    """Its dropout layers drop nothing from now on."""
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


class Diffusers:
    """A training loop of diffusers' and torch's own parts."""

    def __init__(self, given: Given, best: bool) -> None:
        config, self._given, self._best = given.config, given, best
        self.samples = len(given.ring[0].batch.names) * given.accumulation
        self.flops_per_sample, self.compute = given.flops_per_sample, given.compute
        with given.device:
            kind = StableCascadeUNet if is_cascade(config) else UNet2DConditionModel
            self.unet: Any = kind.from_config(dict(given.unet))
        without_dropout(self.unet)
        self.unet.load_state_dict(given.weights)
        self.controlnet: Any = None
        self.trained = self._adapted()
        self._net = self.unet
        o: Any = config.optimizer
        # On a CPU inductor (torch 2.13) gives wrong gradients of images with channels last, so they stay first there.
        self._last = best and given.device.type != "cpu"
        if self._last:
            for network in filter(None, (self.unet, self.controlnet)):
                network.to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.AdamW(
            self.trained, lr=o.learning_rate, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay,
            eps=o.epsilon, fused=best or None,
        )  # fmt: skip
        self._rates = get_scheduler("constant", optimizer=self._optimizer)
        averages = config.ema.enabled
        self.ema = EMAModel(self.trained, decay=config.ema.decay, foreach=best) if averages else None
        objective: Any = config.objective
        self._scheduler: Any = DDPMWuerstchenScheduler() if is_cascade(config) else DDPMScheduler(
            num_train_timesteps=objective.schedule.num_steps, beta_schedule="scaled_linear",
            beta_start=objective.schedule.beta_start, beta_end=objective.schedule.beta_end,
            prediction_type="v_prediction" if objective.name == "v" else "epsilon",
            rescale_betas_zero_snr=objective.schedule.zero_terminal_snr,
        )  # fmt: skip
        self._kernel = fastest_kernel(self, given.ring[0]) if best else None
        options = {"layout_optimization": False} if given.device.type == "cpu" else None
        if best:
            self._net = torch.compile(self.unet, options=options)
            self.controlnet = self.controlnet and torch.compile(self.controlnet, options=options)
        self._batches = (given.ring[i % len(given.ring)] for i in count())
        self._loss = torch.zeros(())

    def _adapted(self) -> list[torch.nn.Parameter]:
        """Puts the networks on the device as the example of this adapter does. What is trained, in our order."""
        own, device = adapter_of(self._given.config), self._given.device
        network: Any = self.unet
        if own.name != "full":
            self.unet.requires_grad_(False)
            for p in self.unet.parameters():  # `unet.to(dtype=...)` says the same, with a warning
                p.data = p.data.to(self.compute)
        if own.name == "lora":
            alpha = own.rank if own.alpha is None else own.alpha
            targets = ["to_k", "to_q", "to_v", "to_out.0"]
            self.unet.add_adapter(
                LoraConfig(r=own.rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)
            )
            cast_training_params(self.unet, dtype=torch.float32)
        if own.name == "controlnet":
            channels = self._given.embedding
            network = ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=channels).float()
            self.controlnet = network.requires_grad_(True)
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, value in self._given.trained.items():
                trained[name].copy_(value)
        assert trained.keys() == self._given.trained.keys()
        for each in filter(None, (self.unet, self.controlnet)):
            each.to(device).train()
        if self._given.config.training.gradient_checkpointing:
            network.enable_gradient_checkpointing()
        return [dict(network.named_parameters())[name] for name in self._given.trained]

    def _predicted(self, noisy: Tensor, timesteps: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        """What the UNet says, with the ControlNet's residuals where there is one."""
        sized = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
        told: dict[str, Any] = {"added_cond_kwargs": sized, "return_dict": False}
        if self.controlnet is None:
            return self._net(noisy, timesteps, cond["text"], **told)[0]
        down, mid = self.controlnet(noisy, timesteps, cond["text"], cond["controlnet"], **told)
        more = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return self._net(noisy, timesteps, cond["text"], **told, **more)[0]

    def forward(self, each: Encoded) -> Tensor:
        """The loss of a micro-batch."""
        if is_cascade(self._given.config):
            return self._cascade(each)
        draws, cond = each.batch.draws, each.cond
        timesteps = draws["c_noise"].long()
        noisy = self._scheduler.add_noise(each.x0_BCHW, draws["noise"], timesteps)
        velocity = self._scheduler.config.prediction_type == "v_prediction"
        target = self._scheduler.get_velocity(each.x0_BCHW, draws["noise"], timesteps) if velocity else draws["noise"]
        if self._last:
            noisy = noisy.to(memory_format=torch.channels_last)
        in_16_bits = self.compute != torch.float32
        with torch.autocast(self._given.device.type, dtype=self.compute if in_16_bits else None, enabled=in_16_bits):
            found = self._predicted(noisy, timesteps, cond)
        return F.mse_loss(found.float(), target.float(), reduction="mean")

    def _cascade(self, each: Encoded) -> Tensor:
        """The loss of a micro-batch of a stage of Stable Cascade, by the time in [0, 1] of its levels."""
        noise, time, cond = each.batch.draws["noise"], each.batch.draws["c_noise"], each.cond
        noisy = self._scheduler.add_noise(each.x0_BCHW, noise, time)
        own = {"effnet": cond["effnet"]} if "effnet" in cond else {
            "clip_text": cond["text"], "clip_img": cond["image"][:, None]
        }  # fmt: skip
        if self._last:
            noisy = noisy.to(memory_format=torch.channels_last)
        in_16_bits = self.compute != torch.float32
        with torch.autocast(self._given.device.type, dtype=self.compute if in_16_bits else None, enabled=in_16_bits):
            found = self._net(noisy, time, clip_text_pooled=cond["pooled"][:, None], **own, return_dict=False)[0]
        losses = F.mse_loss(found.float(), noise.float(), reduction="none").mean((1, 2, 3))
        settings: Any = self._given.config.objective
        if settings.weighting.name == "none":
            return losses.mean()
        return (losses * (1 - self._scheduler._alpha_cumprod(time, time.device).flatten())).mean()

    def begin(self) -> None:
        """float32 is multiplied as in ours."""
        devices.prepare(self._given.config.training, self._given.device)

    def step(self) -> None:
        """One update."""
        total: Any = 0.0
        with sdpa_kernel(self._kernel) if self._kernel is not None else nullcontext():
            for each in islice(self._batches, self._given.accumulation):
                loss = self.forward(each) / self._given.accumulation
                loss.backward()
                # The example reads every loss; who cares for speed does not.
                total += loss.detach() if self._best else loss.item()
        limit = self._given.config.training.max_grad_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, limit)
        self._optimizer.step()
        self._rates.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.step(self.trained)
        self._loss = total

    def loss(self) -> float:
        """Of the last update."""
        return float(self._loss)

    def averages(self) -> list[Tensor]:
        """In the order of ours; what is trained itself where the recipe keeps none."""
        return list(self.trained if self.ema is None else self.ema.shadow_params)

    def waited(self) -> float:
        """There is nothing to wait for."""
        return 0.0

    def close(self) -> None:
        """Compiled code is let go."""
        if self._best:
            torch.compiler.reset()


class Daguerre(variants.Update):
    """Our update, in the shape of the others."""

    def __init__(self, config: Config, options: bench_options.Options, folder: Path) -> None:
        super().__init__(config, options, folder)
        without_dropout(self.state.net)

    def averages(self) -> list[Tensor]:
        """In the order of what is trained; that itself where the recipe keeps none."""
        return list((self.state.ema.averages or self.state.trained).values())


Trained = Diffusers | Daguerre


def fastest_kernel(peer: Diffusers, each: Encoded) -> SDPBackend | None:
    """The attention kernel with which a forward and backward pass takes least; None for torch's own choice."""
    tried: dict[SDPBackend | None, float] = {}
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for kernel in [None, *(kernels if peer._given.device.type == "cuda" else [])]:
        with ExitStack() as stack:
            if kernel is not None:
                stack.enter_context(sdpa_kernel(kernel))
            try:
                tried[kernel] = bench.measured.best_seconds(lambda: peer.forward(each).backward(), peer._given.device)
            except RuntimeError as error:
                if oom.ran_out(error):
                    raise
        peer._optimizer.zero_grad(set_to_none=True)
    return min(tried, key=lambda kernel: tried[kernel])


@dataclass
class Gate:
    """What the first contestant's 20 updates gave, and how far each other's differ from it."""

    start: Mapping[str, Tensor] = field(default_factory=dict)
    """What is trained, before."""
    found: dict[str, dict[str, float | None]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)

    def admit(self, name: str, trained: Trained) -> Trained:
        """Trains 20 updates. NoParity where they come out otherwise than the first contestant's."""
        losses = []
        trained.begin()
        for _ in range(STEPS):
            trained.step()
            losses.append(trained.loss())
        averages = [average.detach().to("cpu", torch.float32, copy=True) for average in trained.averages()]
        if not self.losses:
            self.losses, self.averages = losses, averages
            self._refuse_standstill()
            return trained
        gaps = {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, self.losses, strict=True)),
            "averages": self._apart(averages),
        }
        self.found[name] = {what: gap if math.isfinite(gap) else None for what, gap in gaps.items()}
        limits = dict(zip(gaps, LIMITS[trained.compute], strict=True))
        if any(math.isnan(gap) or gap > limits[what] for what, gap in gaps.items()):
            raise NoParity(f"no parity over {STEPS} updates, so no number: {told(gaps)}; allowed {told(limits)}")
        bench.print_now(f"{name}: parity over {STEPS} updates: {told(gaps)}")
        return trained

    def _apart(self, averages: Sequence[Tensor]) -> float:
        apart = sum(float((a - b).double().square().sum()) for a, b in zip(averages, self.averages, strict=True))
        return (apart / self._moved()) ** 0.5

    def _moved(self) -> float:
        begun = [self.start[name] for name in self.start]
        return sum(float((a - b).double().square().sum()) for a, b in zip(self.averages, begun, strict=True))

    def _refuse_standstill(self) -> None:
        """Weights that did not move would agree with anything."""
        if not self._moved() > 0 or not all(map(math.isfinite, self.losses)):
            raise NoParity(f"nothing was learnt in {STEPS} updates that others could be compared with")


def told(gaps: Mapping[str, float]) -> str:
    """Gaps, or limits, in words."""
    return f"losses {gaps['loss']:.1e}, averaged weights {gaps['averages']:.1e} of their way"


def makers(request: bench_options.Request, wanted: Sequence[str], folder: Path) -> tuple[dict[str, Any], Gate]:
    """What builds each contestant and takes it through the gate; ours come first."""
    for variant in request.variants:
        refuse(variant.config)
    gate = Gate()
    common = cache(lambda: given(request.variants[0].config, folder))  # made while the budget runs

    def ours(name: str, config: Config) -> Trained:
        gate.start = gate.start or common().trained
        return gate.admit(name, Daguerre(config, request.options, folder))

    def theirs(name: str) -> Trained:
        gate.start = gate.start or common().trained
        return gate.admit(name, Diffusers(common(), best=name == "diffusers-best"))

    made = {variant.name: partial(ours, variant.name, variant.config) for variant in request.variants}
    return made | {name: partial(theirs, name) for name in wanted}, gate


def read(arguments: Sequence[str]) -> tuple[bench_options.Request, list[str]]:
    """The request, ours named `daguerre` where no variants are, and the peers."""
    pairs = [overrides.pair(word) for word in arguments if "=" in word]
    named = dict(pairs).get("peers", ",".join(PEERS)).split(",")
    if unknown := [name for name in named if name not in PEERS]:
        raise UserError(f"peers: there is no {unknown[0]!r}; there are {', '.join(PEERS)}")
    rest = [word for word in arguments if not word.startswith("peers=")]
    rest = rest if any("=" not in word for word in rest) else ["quickstart", *rest]
    rest += [] if any(name == "variants" for name, _ in pairs) else ["variants={daguerre: []}"]
    rest += [] if any(name == "out" for name, _ in pairs) else ["out=bench-peers.json"]
    rest += [f"{name}={value}" for name, value in ALIKE.items() if name not in dict(pairs)]
    request = bench_options.read(rest)
    if request.options.inputs != "latents" or request.options.part != "step":
        raise UserError("inputs and part: contestants are given latents and do whole updates")
    return request, named


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    try:
        request, wanted = read(arguments)
        with tempfile.TemporaryDirectory() as folder:
            made, gate = makers(request, wanted, Path(folder))
            where = devices.choose_device(request.variants[0].config.training.device)
            out = Path(request.options.out or "")
            code = bench.measure(request, made, where, out, {"parity": gate.found})
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    print("\n".join(said for own in request.variants for peer in wanted if (said := against(rows, own.name, peer))))
    return code


def against(rows: Mapping[str, Mapping[str, Any]], own: str, peer: str) -> str:
    """How much faster ours is than a peer; nothing where one of them has no numbers."""
    both = []
    for name in (peer, own):
        told = rows.get(name, {})
        row = Result(name, samples=told.get("samples", 0), alone=told.get("alone", False))
        row.seconds, row.cpu_seconds = told.get("seconds", []), told.get("cpu_seconds", [])
        both.append(row)
    wall, cpu = report.between(both[0], both[1]), report.between(both[0], both[1], cpu=True)
    return "" if wall is None else f"{own} against {peer}: {wall} by the clock, {cpu} in processor time"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
