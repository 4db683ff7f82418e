"""Values that travel between the parts: a record, a batch, conditioning, a prompt, latents, the terms of a loss.

Shape letters used across the project:

    B  samples in a micro-batch      C  channels          H, W  height, width (pixels or latents)
    T  tokens                        D  features          N     timesteps of a schedule
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Image = TypeVar("Image")

IMAGE, MASK = "image", "mask"
"""Names of images of a sample: the one that is trained on, and the weights of its pixels."""
ALPHA = "alpha"
"""Name of the image that is trained on where its alpha channel alone is read, as its features are cached."""
IMAGE_PROMPT = "image_prompt"
"""Name of an image that says what is generated, as its caption does."""
CONTROLS = ("control", "control_2", "control_3", "control_4")
"""Names of control images of a sample, for as many adapters that read different ones."""
REJECTED = "rejected"
"""Name of the image of a pair that people like less."""
TARGETS = (REJECTED,)
"""Names of further images of a sample that become clean samples as the first one does, each cut by a frame of its own
to the same shape."""

REFERENCES = ("reference", *(f"reference_{number}" for number in range(2, 11)))
"""Names of reference images of a sample, in their order: pictures of any size that say what is generated, as its
caption does. They are conditioning, and never noised."""

SEEN = {name: f"seen_{name}" for name in REFERENCES}
"""Names of copies of reference images that a text encoder sees, where it sees them in another size."""

CAST_APART = "cast_apart"
"""Name of a mark on layers of a network whose weights are cast by what computes with them, and by nothing else."""
_WAITS = "waits_on_host"
"""Name of a mark on tensors of a network that stay in the host's memory, and are on its device while they are used."""

OF_IMAGES, OF_TEXTS = "image.", "text."
"""How the names of cached features begin: those of images and those of captions."""
TOKENS, NUMBERS = "tokens.", "numbers."
"""How the names of draws begin that are not random: captions as tokens, and numbers that the host knows."""


@dataclass(frozen=True)
class References:
    """Reference images as a family reads them: how many, and in which size each. Sizes are the picture's own, so those
    of one sample differ from those of another."""

    most: int
    """Most pictures of a sample, at most as many as `REFERENCES`."""
    least: int = 0
    """A sample with fewer is left out."""
    max_px: int = 1024 * 1024
    """Area in pixels to which a larger picture is scaled down."""
    step_px: int = 16
    """Both sides are multiples of this."""
    enlarges: bool = False
    """Whether a smaller picture is scaled up to `max_px`, too."""
    stretches: bool = False
    """Whether sides are rounded to multiples of `step_px`, which bends the aspect ratio a little; else what is over is
    cropped evenly at both ends."""
    pads: bool = False
    """Whether sides are rounded up, and what is missing is the picture's reflection; else what is over is cropped."""
    interpolation: str = "lanczos"
    """Filter of the resize, as in `data.interpolation`."""
    sizing: int | None = 0
    """The picture in whose size an image is generated where none is given: 0 the first, -1 the last; None: no picture,
    an image has the size that the model was trained in."""
    alone: References | None = None
    """The rule of a picture that is the only one of its sample, where that is another."""
    seen: References | None = None
    """The rule of the copy that a text encoder sees, where that has another size."""

    def of(self, count: int) -> References:
        """The rule of a sample with so many pictures."""
        return self.alone if count == 1 and self.alone is not None else self

    @property
    def names(self) -> tuple[str, ...]:
        return REFERENCES[: self.most]


def wait(tensor: Tensor) -> None:
    """Marks a tensor of a network that stays in the host's memory, and is on its device while it is used."""
    setattr(tensor, _WAITS, True)


def waits(tensor: object) -> bool:
    """True for a tensor that is marked so."""
    return getattr(tensor, _WAITS, False)


def as_seen(images: Mapping[str, Image]) -> list[Image]:
    """The reference images among these, in their order, as a text encoder sees them."""
    return [images.get(SEEN[name], images[name]) for name in REFERENCES if name in images]


Cond = Mapping[str, "Tensor"]
"""Conditioning by name; the leading dim of every tensor is B. `text` is [B, T, D] for text-to-image families."""


class Features(Protocol):
    """Cached features of one sample, or of a data set: the results of encoders in place of what they read."""

    def of(self, frames: Mapping[str, Any], text: str) -> Mapping[str, np.ndarray]:
        """Features by name of the parts of the images that a `data.images.decode.Frame` of each takes, and of a text;
        without a leading dim. OSError for a fault that may pass."""


@dataclass(frozen=True)
class Record:
    """One sample as a source yields it, before decoding."""

    key: str
    """A file name, or shard and index; for messages only, never an identity."""
    images: Mapping[str, bytes | np.ndarray]
    """Encoded image files by name, or pixels [H, W, 3] uint8 (control images also [H, W, 4]). `image` is there unless
    `sizes` has it; the others are `data/images/kinds.py`."""
    texts: Mapping[str, str]
    """Caption fields by name; the usual caption is `text`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Upright height and width of the images of which only cached features are read, by name."""
    features: Features | None = None
    """Cached features of what is chosen of the sample."""

    @property
    def image(self) -> bytes | np.ndarray:
        return self.images[IMAGE]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. A field that maps names to tensors is for the device; every other field stays on the host, and
    so does a mapping that is marked as `host`. `map` knows no more, so a new field is written here alone."""

    keys: np.ndarray
    """[B, 3] int64: sample id, epoch, repeat. With the run's seed they decide every random number."""
    images: Mapping[str, Tensor]
    """[B, C, H, W] uint8 by name, cropped the same way, channels last in memory. `image` is RGB, and there unless its
    features are; `mask` (255: counts in full, 0: outside) has one channel; control images have four, RGBA (alpha 0:
    unknown); `TARGETS` are RGB, and show their own scenes; `REFERENCES` are RGB, too, as many in each sample, and of
    sizes of their own, each of one size in all samples, and so are the copies of `SEEN`."""
    texts: list[str]
    """One caption a sample, after dropout."""
    valid_B: Tensor
    """float32, on the CPU: 1, or 0 for a slot whose sample could not be decoded."""
    names: list[str]
    """For messages."""
    sizes: np.ndarray
    """[B, 6] int32, for SDXL's conditioning: height and width of the stored image (upright), top and left of the crop
    in the resized image (0 for a slot whose sample could not be decoded), height and width of the crop, in all."""
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    """What is made of keys, captions and sizes while the device computes the batch before: random inputs of family,
    adapters and objective, `tokens.NAME` of the captions, `numbers.NAME`."""
    weights_B: Tensor | None = None
    """float32, on the CPU: factors of the losses (`loss_weight` of the source in a mix). None: all are 1."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """Cached results of encoders [B, ...], of any type: `image.NAME` of the images, `rejected.NAME` or `reference.NAME`
    of further ones, `text.NAME` of the captions; 0 for a slot whose sample could not be decoded."""
    sizes_of: Mapping[str, np.ndarray] = field(default_factory=dict, metadata={"host": True})
    """`sizes` of each of the `TARGETS` that the batch holds, by name."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] float32: numbers of the samples' metadata by name, such as a reward; 0 for a slot whose sample could not be
    decoded."""

    @property
    def pixels_BCHW(self) -> Tensor:
        """The images that are trained on: uint8, RGB."""
        return self.images[IMAGE]

    @property
    def references(self) -> tuple[Tensor, ...]:
        """The reference images [B, 3, h, w] uint8, in their order; those of each place are of one size."""
        return tuple(self.images[name] for name in REFERENCES if name in self.images)

    @property
    def seen(self) -> tuple[Tensor, ...]:
        """The reference images as a text encoder sees them."""
        return tuple(as_seen(self.images))

    @property
    def has_references(self) -> bool:
        """True if its samples have reference images, or cached features of them."""
        return any(name.partition(".")[0] in REFERENCES for name in (*self.images, *self.features))

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        """(3, H, W) of the images that are trained on."""
        if IMAGE in self.images:
            _, channels, height, width = self.images[IMAGE].shape
            return channels, height, width
        return (3, int(self.sizes[0, 4]), int(self.sizes[0, 5]))

    @property
    def adapter_inputs(self) -> AdapterInputs:
        """The part that adapters read."""
        return AdapterInputs(self.images, self.texts, self.draws)

    def map(self, change: Callable[[Any], Any], host: Callable[[Any], Any] = lambda value: value) -> Batch:
        """The batch with `change` of every tensor that is for the device, and `host` of every other field but None."""

        def changed(value: Any, stays: bool) -> Any:
            if isinstance(value, Mapping):
                return {name: (host if stays else change)(rows) for name, rows in value.items()}
            return None if value is None else host(value)

        return replace(
            self, **{each.name: changed(getattr(self, each.name), "host" in each.metadata) for each in fields(self)}
        )

    def rows(self, start: int, stop: int) -> Batch:

        def cut(value: Any) -> Any:
            return value[start:stop]

        return self.map(cut, host=cut)

    def at(self, rows: Sequence[int]) -> Batch:
        """The batch of these rows, in their order."""

        def chosen(value: Any) -> Any:
            return [value[row] for row in rows] if isinstance(value, list) else value[list(rows)]

        return self.map(chosen, host=chosen)

    def of(self, target: str) -> Batch:
        """The batch with one of its `TARGETS` in the place of the image that is trained on: with the pixels, the sizes
        and the draws of that image, and the same keys and captions."""
        start = f"{target}."
        own = {name.removeprefix(start): rows for name, rows in self.draws.items() if name.startswith(start)}
        images = {name: pixels for name, pixels in self.images.items() if name != IMAGE}
        images |= {IMAGE: self.images[target]} if target in self.images else {}
        # Cached features of the first image must not pass for those of the target.
        features = {name: rows for name, rows in self.features.items() if not name.startswith(OF_IMAGES)}
        features |= {
            OF_IMAGES + name.removeprefix(start): rows for name, rows in features.items() if name.startswith(start)
        }
        sizes = self.sizes_of.get(target, self.sizes)
        return replace(self, images=images, sizes=sizes, draws={**self.draws, **own}, features=features)


@dataclass(frozen=True)
class AdapterInputs:
    """The part of samples that adapters read, of those that are trained on and of images that are generated."""

    images: Mapping[str, Tensor]
    """[B, C, H, W] uint8 by name: those that adapters ask for, as in `Batch`; in training also the others."""
    texts: Sequence[str]
    """One a sample: captions, or the prompts of one side of guidance."""
    draws: Mapping[str, Tensor]
    """Random inputs that adapters ask for; in training also the others. Leading dim B."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The inputs of an image, besides its seed and size."""

    text: str
    negative: str = ""
    """The negative prompt; the empty one is trained by caption dropout."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Images [H, W, 3] uint8 by name, such as a control image; families name those that they read."""
    toward: str | None = None
    """Another text, between which and `text` this prompt lies (models/interpolation.py)."""
    share: float = 0.0
    """How far on the way to it, 0 to 1."""


@dataclass(frozen=True)
class Latents:
    """Sampled latents with their prompts and seeds, as a decoder may itself be a diffusion model."""

    x0_BCHW: Tensor
    prompts: Sequence[Prompt]
    """One a row."""
    seeds: Sequence[int]
    """One a row; keys of a decoder's random numbers, under a purpose of its own."""
    size_px: tuple[int, int] | None = None
    """Height and width of the images, where several sizes have latents of this shape. None: the one that fits best."""

    def __getitem__(self, rows: slice) -> Latents:
        return Latents(self.x0_BCHW[rows], self.prompts[rows], self.seeds[rows], self.size_px)


@dataclass(frozen=True)
class LossTerms:
    """Per-sample losses of a micro-batch, before they are weighted, summed and divided by the valid count."""

    loss_B: Tensor
    """Weighted loss of each sample, float32, mean over its elements."""
    quantile_B: Tensor
    """Quantile of each sample on the noise law, in [0, 1): 0 is the clean end. For the loss by quartile."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """More per-sample numbers [B] by name, logged as means."""
    raw_loss_B: Tensor | None = None
    """The loss without learnt weights, for validation. None: `loss_B` has none."""
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    """What the objective observes in addition to losses: sums over the micro-batch, by name."""
    log_snr_B: Tensor | None = None
    """Noise level of each sample, 2 ln(a/s), if the objective observes its losses by level."""


class Stateful(Protocol):
    """A holder of tensors that are learnt in addition to the weights: an objective."""

    def observe(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Notes the terms of a micro-batch [B], `valid_B` on their device. Never waits for the device."""

    def absorb(self, total: Callable[[Tensor], Tensor], skip: Tensor) -> None:
        """Learns from an update's observations: `total` sums over devices; if `skip` (0-dim bool on the device) nothing
        changes, as the weights do not."""

    def state(self) -> dict[str, Tensor]:
        """Tensors to keep, by name; empty for most."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores a `state`."""


Denoise = Callable[["Tensor", float], "Tensor"]
"""x0 [B, C, H, W] for x [B, C, H, W] at time t."""
FreshNoise = Callable[[int], "Tensor"]
"""The standard normal noise [B, C, H, W] that a sampler's step of this number adds."""


@dataclass(frozen=True)
class Grid:
    """The noise levels that a sampler visits, noisiest first: N calls of the denoiser and the clean end."""

    t_N: Tensor
    """Times at which the denoiser is called, float64, in the objective's own unit."""
    a: Tensor
    """[N + 1] float64: signal level at each time and at the end (1)."""
    s: Tensor
    """[N + 1] float64: noise level at each time and at the end (0)."""
    frame: Tensor
    """[N + 1] float64: x / frame is where second-order samplers take straight lines: `a` for variance-preserving
    paths (the variance-exploding frame of Karras et al. 2022; 1 where a = 0), 1 for flow and EDM."""
    prior_std: float
    """Standard deviation of the noise a sampler starts from."""

    def last(self, num_steps: int) -> Grid:
        """The last of these steps alone: the end of the way, from a level at which a sample has signal too."""
        first = len(self.t_N) - num_steps
        cut = {name: getattr(self, name)[first:] for name in ("t_N", "a", "s", "frame")}
        return replace(self, **cut)
