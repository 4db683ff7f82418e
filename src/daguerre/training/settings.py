"""Settings of the loop: how long, in which batches, with which schedule and averages. No torch here."""

import itertools
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from daguerre.errors import UserError
from daguerre.settings import ADDRESS, ELASTIC, FREE, Choice, Duration, Settings, Unused, interval

_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COMPUTES = {"float32": ("auto", "no", "bf16", "fp16"), "bfloat16": ("auto", "bf16"), "float16": ("auto", "fp16")}
"""Values of mixed_precision that go with each weights_dtype."""


def bytes_of(text: str) -> int:
    """Bytes of a size such as `59GB` or `40 GiB`; UserError for another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _BYTES or not float(match[1]):
        raise UserError(f"{text!r} is not a size: write a number and one of {', '.join(_BYTES)}, such as '59GB'")
    return int(float(match[1]) * _BYTES[match[2]])


def _sized(text: str) -> str:
    bytes_of(text)
    return text


Size = Annotated[str, AfterValidator(_sized)]
"""A text that `bytes_of` reads."""


Blocks = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^(?:100|[1-9]?\d)(?:\.\d+)?%$")] | Literal["auto"]
"""A number of blocks, or a share of them in per cent; auto: one that is found."""


def largest_divisor(whole: int, at_most: int) -> int:
    """The largest number up to `at_most` that divides `whole`."""
    return max(number for number in range(1, min(whole, at_most) + 1) if whole % number == 0)


class TrainingSettings(Settings):
    """Length, batches, precision and guards of a run."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("stochastic_rounding",), lambda own: own.weights_dtype == "float32", "float32 weights are not rounded"),
        Unused(("compile_cache_dir",), lambda own: not own.compile, "nothing is compiled with compile=false"),
    )

    duration: Duration = Field(json_schema_extra=FREE)
    """Length of the run: `"20k steps"` (updates), `"1.5M samples"` or `"3 epochs"`. May be another on resume; where the
    learning rate falls, lr_scheduler.on_new_duration says what becomes of it."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples of one update over all devices. Default: per-device batch x accumulation x devices, then recorded."""
    per_device_batch_size: int | None = Field(None, ge=1, json_schema_extra=ELASTIC)
    """Samples of one forward pass on one device. Default: the global batch divided by devices and accumulation."""
    gradient_accumulation_steps: int = Field(1, ge=1, json_schema_extra=ELASTIC)
    """Micro-batches whose gradients make one update."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down; null for no clipping."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Type in which the trained networks compute: `no`: float32; `bf16`, `fp16` (which scales the loss): autocast over
    the weights; `auto`: that of weights_dtype, and for float32 weights bf16 on a GPU, float32 on a CPU."""
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the weights of the denoiser and of what is trained are stored. Moments, averages, adapters and the
    arithmetic of an update stay float32, and so do the weights of frozen encoders and decoders but for those that
    frozen_precision stores."""
    frozen_precision: Literal["no", "bf16"] = "no"
    """Type in which the frozen autoencoder and text encoders encode: `no`: float32; `bf16`: autocast, which takes a
    fraction of the time on a GPU and moves latents and text features by some thousandths; language models and T5, whose
    files have it, are also stored so."""
    base_precision: Literal["no", "nf4", "int8", "float8", "int8_products", "float8_products"] = "no"
    """Form of the linear layers of frozen networks while adapters train: of denoiser and text encoders, inside
    their blocks. nf4 (4.5 bits a weight, by bitsandbytes), int8 and float8 (8 bits): less memory, more time;
    int8_products, float8_products (W8A8): inputs are rounded to 8 bits, too, and multiplied so, which with
    compile=blocks takes less time. The adapters stay float32. generate and evaluate use the base in it too, unless they
    get another value; files are for the base as it is."""
    float8: Literal["no", "tensorwise", "rowwise"] = "no"
    """Linear layers of the trained denoiser, inside its blocks, are multiplied in float8, forward and backward, with a
    scale for a whole matrix or for each row: less time on a GPU that has it, with compile=blocks. Weights and all else
    keep their types."""
    text_encoders: Literal["resident", "offload"] = Field("resident", json_schema_extra=FREE)
    """Where frozen text encoders are: `resident`: in the memory of the device; `offload`: in that of the host, and on
    the device, one after the other, while they read the captions of a micro-batch, or prompts: less memory, more time,
    the same numbers. Another way is a cache of captions (cache.path)."""
    swap_blocks: Blocks = Field(0, json_schema_extra=FREE)
    """Blocks of the denoiser, at even distances, whose weights wait in the host's memory: a number of them, or a share
    such as "50%"; 0 for none; auto: as many as a step by `daguerre plan` needs to have room in the free memory of the
    device at the run's first start, which the run keeps. Two of them at a time are on the device, one that computes
    and the next one, so that three are the fewest. Trained weights, whose moments and averages wait, too, need
    optimizer.in_backward. Less memory, the same numbers."""
    offload_activations: bool = Field(False, json_schema_extra=FREE)
    """Activations wait in the host's memory between the forward and the backward pass: less memory, the same numbers.
    With gradient_checkpointing these are what goes into each block, which is little to copy."""
    stochastic_rounding: bool = True
    """bfloat16, float16 weights: round up or down by chance after an update, so that on average none is too small to
    count; off: round to the nearest, which loses small updates."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Matrix products of float32: `highest`: float32; `high`: TF32 or the like; `medium`: bfloat16 inside, where the
    device can. Convolutions are not concerned."""
    attention: Literal["auto", "measured", "math", "flash", "efficient", "cudnn", "fused"] = Field(
        "auto", json_schema_extra=ELASTIC
    )
    """Attention kernel of the trained networks: `measured`: the fastest for each shape, found out when it is first
    computed and remembered on this machine; `auto`: measured on a GPU, else torch chooses; `math`: plain products;
    `flash`, `efficient`, `cudnn`: this one or an error; `fused`: the best of these for the device and precision."""
    kernels: Literal["auto", "plain", "triton"] = Field("auto", json_schema_extra=ELASTIC)
    """Code for norms, gates and matrix products: `plain`: torch's own operators; `triton`: GroupNorm with SiLU,
    and GEGLU, each as one kernel, and LayerNorm in the type of its input, or an error; `auto`: these on a GPU; on a CPU
    the faster library for each product."""
    channels_last: Literal["auto"] | bool = Field("auto", json_schema_extra=ELASTIC)
    """Images inside the networks have their channels last in memory, which convolutions compute faster, and on a GPU
    the convolutions' weights; `auto`: on a CPU, and on a GPU with the norms of Triton (others put channels first
    again)."""
    compile: Literal[False, "blocks"] = Field(False, json_schema_extra=ELASTIC)
    """`blocks`: torch compiles each block of the trained networks for each shape; the first steps take minutes, later
    ones less time. On a CPU it needs a C++ compiler."""
    capture: bool = Field(False, json_schema_extra=FREE)
    """Forward and backward passes are recorded as a CUDA graph, for each shape of batches when it comes for the third
    time, and replayed by one launch: less time where the GPU waits for the host between small kernels (a LoRA, small
    images), the same numbers. Each further shape takes memory for gradients of its own. Needs a GPU; several sum their
    gradients after the passes."""
    compile_cache_dir: Annotated[str | None, ADDRESS] = Field(None, min_length=1, json_schema_extra=FREE)
    """Folder of this machine in which compiled code is kept. null: TORCHINDUCTOR_CACHE_DIR, or the user's cache
    folder."""
    gradient_checkpointing: bool = Field(False, json_schema_extra=FREE)
    """Compute activations again in the backward pass rather than keep them: less memory, a fourth to a third more
    time, the same numbers."""
    max_device_memory: Size | None = Field(None, json_schema_extra=FREE)
    """Most memory of the GPU that is taken, such as `59GB` (1e9 bytes) or `40GiB` (2^30); null for all of it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", json_schema_extra=ELASTIC)
    """Device of the run; `auto` takes a GPU of CUDA or ROCm if there is one. mps: an Apple GPU."""
    max_nonfinite_steps: int = Field(5, ge=1, json_schema_extra=FREE)
    """Updates in a row with a non-finite loss or gradient (each is skipped and counted) after which the run stops.
    Overflows by which the loss scale of fp16 finds its size do not count."""

    @model_validator(mode="after")
    def _compiles_what_is_fixed(self) -> Self:
        if self.compile and self.attention == "measured":
            raise ValueError(
                "attention=measured does not work with compile=blocks, because compiled code cannot pause to "
                "measure: choose a kernel, or remove attention"
            )
        return self

    @model_validator(mode="after")
    def _compiles_what_stays(self) -> Self:
        if self.compile and self.offload_activations:
            raise ValueError(
                "offload_activations does not work with compile=blocks: compiled blocks whose activations wait in the "
                "host's memory have not been tested; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _records_what_stays(self) -> Self:
        copying = {
            "offload_activations": self.offload_activations, "swap_blocks": self.swap_blocks,
            "text_encoders=offload": self.text_encoders == "offload",
        }  # fmt: skip
        if self.capture and (name := next((name for name, is_on in copying.items() if is_on), None)):
            raise ValueError(
                f"capture does not work with {name}, whose copies between host and device are no part of what is "
                "recorded: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _computes_in_the_weights_type(self) -> Self:
        allowed = _COMPUTES[self.weights_dtype]
        if self.mixed_precision not in allowed:
            raise ValueError(
                f"mixed_precision={self.mixed_precision} does not work with weights_dtype={self.weights_dtype}: "
                f"16-bit weights are used without conversion, so it must be {' or '.join(allowed)}; "
                "weights_dtype=float32 works with every value"
            )
        return self


InBackward = Literal[False, "after_norm", "at_once"]


class OptimizerSettings(Settings):
    """Base of every optimizer's `Settings`. An optimizer's file narrows `name` and adds its own fields."""

    averages_weights: ClassVar[bool] = False
    """It evaluates at averaged weights of its own, which an EMA and a falling learning rate would spoil."""
    made_with: ClassVar[tuple[str, ...]] = ()
    """Settings without which the numbers of its state mean nothing: another value resets it."""
    needs_all_gradients: ClassVar[str] = ""
    """Why it cannot move a weight before the gradients of all are known, as `in_backward` does; "" where it can."""
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("weight_decay_exclude",),
            lambda own: own.weight_decay == 0 and not any(own.weight_decays.values()),
            "no effect while weight_decay is 0",
        ),
    )

    name: str
    """Name of the optimizer: a file in training/optimizers."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    scale_lr: bool = False
    """Multiply the learning rates with the global batch size."""
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Peak learning rates of parameters by patterns of their names, in place of learning_rate: {"text_encoder.*":
    5e-6}. The schedule acts on all of them. A parameter may match one pattern only."""
    learning_rate_factors: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Factors on the learning rates of parameters by patterns of their names: {"*.lora_B.*": 16} is LoRA+. A parameter
    may match one pattern only."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, applied to matrices and convolution kernels, not to biases and norms."""
    weight_decays: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Weight decays of parameters by patterns of their names, in place of weight_decay: {"text_encoder.*": 0.1}. Those
    that weight_decay_exclude spares stay without. A parameter may match one pattern only."""
    weight_decay_exclude: list[str] | None = None
    """Parameters without weight decay, by patterns of their names such as `*norm*` or `*.bias`; null for all of fewer
    than two dims (biases and norms)."""
    in_backward: InBackward = Field(False, json_schema_extra=FREE)
    """Move each weight during the backward pass, as soon as its gradient is whole, and free the gradient: the largest
    one is held in place of all. `after_norm`: a backward pass before that finds the norm of all: the same updates, for
    about half as much time again; `at_once`: no more time, but no clipping. On one device, without accumulation."""

    @field_validator("in_backward")
    @classmethod
    def _one_by_one(cls, in_backward: InBackward) -> InBackward:
        if in_backward and cls.needs_all_gradients:
            raise ValueError(f"{cls.needs_all_gradients}: remove it, or use another optimizer")
        return in_backward


class AdamSettings(OptimizerSettings):
    """Settings of optimizers with AdamW's two moments."""

    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""


class Stage(Settings):
    """A falling learning rate after training.duration of a run was changed. Written by the program."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("ends",), lambda own: own.ends is None, "the updates in planned say it"),
    )

    start: int = Field(ge=0)
    """Updates that are done when it begins."""
    planned: int = Field(ge=0)
    """Updates after which what it takes the place of would have ended."""
    ends: Duration | None = None
    """The same where the run's length was given in samples or epochs: it goes before `planned`, and before `start` of
    hold, as their updates change with the global batch."""
    name: Literal["hold", "decay"]
    """The rate stays as it is, or falls from there until the run's end."""
    share: float = Field(gt=0, le=1)
    """Share of the peak learning rate at which it begins."""


_FALLING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay")


class LRSchedulerSettings(Choice):
    """Learning rate over the run, counted in updates."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("restart_from",), lambda own: own.on_new_duration in ("refuse", "stretch"), "it is for hold and decay"),
    )
    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("final", "on_new_duration", "restart_from", "stages"), _FALLING),
        "num_cycles": ("cosine_with_restarts",),
        "power": ("polynomial",),
        "decay": ("warmup_stable_decay",),
        "decay_shape": ("warmup_stable_decay",),
    }

    name: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"] = (
        "constant"
    )
    """After warm-up: stay at the peak, or fall until the run's end along a line, half a cosine, several of them one
    after the other, each from the peak, or a power of the time left; warmup_stable_decay stays at the peak and falls
    in the last updates only."""
    warmup: Duration = Duration("0 steps")
    """Linear rise from zero to the peak learning rate."""
    final: float = Field(0.0, ge=0, le=1)
    """Share of the peak learning rate that is left at the run's end."""
    num_cycles: int = Field(1, ge=1)
    """cosine_with_restarts: falls from the peak, of one length each."""
    power: float = Field(1.0, gt=0)
    """polynomial: exponent of the share of the fall that is still to come."""
    decay: Duration | None = None
    """warmup_stable_decay: length of the fall; by default the last tenth of the run."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """warmup_stable_decay: a line, half a cosine, or 1 - sqrt(share of the fall), which falls fast at first."""
    on_new_duration: Literal["refuse", "stretch", "hold", "decay"] = Field("refuse", json_schema_extra=FREE)
    """A run that goes on with another training.duration while the rate falls: `stretch`: the schedule as if
    it had had that duration from the start, so that the rate jumps; `hold`: the old schedule to its end, then its last
    rate; `decay`: from the present rate to `final` over the updates that are left; `refuse`: asks. For this start."""
    restart_from: float | None = Field(None, gt=0, le=1, json_schema_extra=FREE)
    """hold, decay: share of the peak learning rate to go on from in place of the rate that was reached."""
    stages: list[Stage] = Field([])
    """Changes that on_new_duration has made to the schedule. Written by the program; left out, the run's are taken."""

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: list[Stage]) -> list[Stage]:
        if any(before.start > after.start for before, after in itertools.pairwise(stages)):
            raise ValueError(
                "each stage must begin after the one before it; remove stages, which Daguerre writes itself"
            )
        return stages


class EMASettings(Choice):
    """Exponential moving average of the trained weights, counted in updates."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("path", "name", "decay", "ramp_steps", "every_steps", "start_steps"),
            lambda own: not own.enabled,
            "no effect while ema.enabled is false",
        ),
        Unused(("ramp_steps", "start_steps"), lambda own: own.path is not None, "there is no warm-up after ema.path"),
    )
    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "ramp_steps": ("mindone",),
        "every_steps": ("stable_cascade",),
        "start_steps": ("stable_cascade",),
    }

    enabled: bool = True
    """Keep averaged weights; images, validation and exports use them."""
    path: Annotated[str | None, ADDRESS] = None
    """Weights from which the average starts in place of the network's: a run folder, a checkpoint, a folder in
    diffusers' layout or a .safetensors file. It is then taken for an old one: the decay begins without a warm-up."""
    name: Literal["diffusers", "mindone", "stable_cascade"] = "diffusers"
    """Decay of update n: diffusers: min(decay, n / (9 + n)); mindone: decay x (1 - exp(-n /
    ramp_steps)); stable_cascade: decay in every so manieth update, a copy of the weights before a start."""
    decay: float = Field(0.9999, ge=0, lt=1)
    """Largest decay."""
    ramp_steps: int = Field(2000, ge=1)
    """mindone: updates after which the decay is at 63 % of its largest value."""
    every_steps: int = Field(100, ge=1)
    """stable_cascade: updates between two moves of the average."""
    start_steps: int = Field(5000, ge=0)
    """stable_cascade: updates up to which the average is a copy of the weights."""
    post_hoc: list[float] = Field([])
    """Widths of power-function averages that checkpoints keep besides, [0.05, 0.1] for instance, each as large as the
    weights; averages of other widths are rebuilt from them later."""

    @field_validator("post_hoc")
    @classmethod
    def _widths(cls, widths: list[float]) -> list[float]:
        if any(not 0.01 <= width <= 0.28 for width in widths) or len(set(widths)) < len(widths):
            raise ValueError(f"widths are from 0.01 to 0.28, each once, such as [0.05, 0.1]; got {widths}")
        return widths


class ProfilerSettings(Settings):
    """A record of some updates, for chrome://tracing and ui.perfetto.dev."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("ranks",), lambda own: own.steps is None, "no effect while profiler.steps is null"),
    )

    steps: list[int] | None = Field(None, json_schema_extra=FREE)
    """First and last update to record, such as [10, 15], counted from the run's start: their trace and a table of the
    operators are written to profile/ of the run. These updates take longer. null for none."""
    ranks: Literal["first", "all"] = Field("first", json_schema_extra=FREE)
    """first: rank 0 records; all: every process does, into files of its own."""

    @field_validator("steps")
    @classmethod
    def _first_and_last(cls, steps: list[int] | None) -> list[int] | None:
        if steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
            raise ValueError(f"must be the first and the last update, such as [10, 15]; got {steps}")
        return steps


class ValidationSettings(Settings):
    """Loss on held-out samples with fixed noise at fixed noise levels."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("num_samples", "num_levels", "raw_weights"), lambda own: own.every is None, "no effect while every is null"
        ),
    )
    _intervals = field_validator("every")(interval)

    every: Duration | None = Field(Duration("500 steps"), json_schema_extra=FREE)
    """Interval; null for none."""
    num_samples: int = Field(64, ge=1, json_schema_extra=FREE)
    """Held-out samples (fewer if the source holds out fewer)."""
    num_levels: int = Field(8, ge=1, json_schema_extra=FREE)
    """Noise levels, at the mid-points of equal parts of the time law."""
    raw_weights: bool = Field(False, json_schema_extra=FREE)
    """Measures the weights as they are trained, too, without their average: `validation/loss_raw`. It takes as long
    again."""
    compared_images: int = Field(0, ge=0, json_schema_extra=FREE)
    """At the end of the run of an adapter that has a strength: images of each of three lists of prompts, by the adapter
    and by its base, which say what was learnt, copied and forgotten (as `daguerre compare` does afterwards). Below 20
    there are no intervals. 0, or sampling.num_images=0: none."""
