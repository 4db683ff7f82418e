"""Images from prompts, for the samples of a run, for its evaluation and for `daguerre generate`.

Puts together what the family, the adapters, the objective and the samplers do. Callers decide which weights the net
holds and which prompts there are; generation/image_files.py writes images to files.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from daguerre import __version__
from daguerre.assembly import assistant
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import controlnets
from daguerre.generation import images as input_images
from daguerre.generation.controlnets import AS_TRAINED, Steering
from daguerre.generation.images import InputImage
from daguerre.generation.prompts import IMAGES
from daguerre.memory import advice
from daguerre.models import interpolation
from daguerre.models.family import Family
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.known import Known
from daguerre.samplers.settings import CHURN, SamplingSettings
from daguerre.training import oom
from daguerre.types import IMAGE, MASK, REFERENCES, AdapterInputs, Cond, Latents, Prompt

_SETTINGS = ("sampler", "num_inference_steps", "eta", "timestep_spacing")
_OF_IMAGE = ("prompt", "negative_prompt", "seed", "height", "width", "guidance_scale", "guidance_rescale")
_OF_INPUT = ("strength", "keep_unmasked", *(f"{name}{suffix}" for name in IMAGES for suffix in ("", "_sha256")))
_OF_CONTROL = ("controlnets", *controlnets.OPTIONS, "condition")
_BETWEEN = ("interpolate_to", "interpolate_to_was", "interpolation")
_OF_FILE = ("file", "file_name", "bytes", "xxh3_128", "daguerre_id", "prompt_was", "initial_noise_sha256")
_OF_MODEL = ("run", "checkpoint", "step", "weights", "base", "pipeline", "model", "objective", "base_precision")
_OF_CODE = ("precision", "code_version")
KEYS = frozenset(
    {*_SETTINGS, "shift", *CHURN, *_OF_IMAGE, *_BETWEEN, *_OF_INPUT, *_OF_CONTROL, *_OF_FILE, *_OF_MODEL, *_OF_CODE}
)
"""Keys of an image's JSON: a list of prompts may have no column of these names other than its own."""
_BATCHES_AHEAD = 16
"""Look-ahead, in batches, when grouping requests of one image size."""
_DECODED_PX = 1 << 20
"""An autoencoder takes ten times the memory of the UNet: this many pixels are decoded at once."""


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """An image that is to be generated."""

    number: int
    """Its place among all; unique."""
    prompt: Prompt
    seed: int
    size_px: tuple[int, int]
    """Height and width."""
    guidance_scale: float
    name: str | None = None
    """Name of its file without suffix; None: by its number."""
    images: Mapping[str, InputImage] = field(default_factory=dict)
    """Files that it starts from, by name; in its batch they become `prompt.images`."""
    strength: float | None = None
    """Share of the steps that run from its `image`; None without one."""
    keep_unmasked: bool = True
    """What is black in its `mask` stays as it is in its `image`, to the pixel."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of its JSON."""
    shown: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part of the image that is kept; None for all of it."""

    @property
    def shown_px(self) -> tuple[int, int]:
        """Height and width of what is kept."""
        return self.size_px if self.shown is None else self.shown[2:]

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that the images of one batch share."""
        pictures = [(name, self.images[name].size_px) for name in REFERENCES if name in self.images]
        pictures += [(name, own.shape[:2]) for name, own in self.prompt.images.items() if name in REFERENCES]
        return self.size_px, self.guidance_scale, self.strength, frozenset(self.images), *pictures


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image that was generated."""

    request: ImageRequest
    pixels_HWC: np.ndarray
    """[H, W, 3] uint8."""
    truncated: Mapping[str, str] = field(default_factory=dict)
    """The truncation of a `prompt` or a `negative_prompt` that is longer than the family reads, in words."""
    is_finite: Tensor | None = None
    """True if all numbers of the clean sample are; on its device, as images that are only planned have none."""


class Stopped(Exception):
    """Generation was asked to stop; what was yielded is all there is."""


def image_size(config: Config, purpose: Literal["sample", "evaluation", "class_image"]) -> tuple[int, int]:
    """Height and width of the images that are generated for a purpose.

    Samples of a run and `daguerre generate` follow sampling.height and sampling.width. Class images are trained on and
    evaluation compares with what is trained on, so both have the size of the training images.
    """
    side = config.data.resolution
    return config.sampling.size_px(side) if purpose == "sample" else (side, side)


def generate(
    parts: Components,
    sampling: SamplingSettings,
    requests: Iterable[ImageRequest],
    stop: Callable[[], bool] = lambda: False,
    steering: Steering = AS_TRAINED,
) -> Iterator[GeneratedImage]:
    """Generates each of `requests`, batch after batch; those of one size and guidance come in their order.

    Image i depends on its own prompt and seed: its noise to the bit, its pixels within 1/255 whatever else is in
    the batch. The net is used as it is: in evaluation mode, with the weights to generate with. A few batches of
    `requests` are held, whatever their number. Raises Stopped if `stop`, asked before each batch, says so.
    """
    for batch in batches(requests, sampling.batch_size):
        if stop():
            raise Stopped
        with oom.explained("generating images", lambda: advice.of_generating(sampling)):
            yield from generate_batch(parts, sampling, batch, steering)


def check_finite(image: GeneratedImage) -> None:
    """UserError for NaN or infinity, which would be a black image without a word. Not for sample images of a run: its
    guard sees that it diverges, and stops it with the names of the images that it was trained on."""
    if image.is_finite is not None and not image.is_finite:
        request = image.request
        raise UserError(
            f"image {request.number} (seed {request.seed}) has NaN or infinity in place of a picture: weights hold "
            "such numbers (of the model, of a LoRA, or of a run whose loss became NaN), or numbers in 16 bits "
            "overflow: try training.mixed_precision=no, then the base without LoRAs",
            code="failed",
        )


def in_order(
    generate_each: Callable[[Iterable[ImageRequest]], Iterator[GeneratedImage]], requests: Iterable[ImageRequest]
) -> Iterator[GeneratedImage]:
    """The images that `generate_each` makes, in the order of `requests`; those that come early are held."""
    order: deque[int] = deque()
    ready: dict[int, GeneratedImage] = {}

    def read() -> Iterator[ImageRequest]:
        for request in requests:
            order.append(request.number)
            yield request

    for image in generate_each(read()):
        ready[image.request.number] = image
        while order and order[0] in ready:
            yield ready.pop(order.popleft())


def batches(requests: Iterable[ImageRequest], batch_size: int) -> Iterator[list[ImageRequest]]:
    """Batches of one size and guidance each, led by the first request that was in no batch yet."""
    source = iter(requests)
    waiting: list[ImageRequest] = []
    while True:
        waiting += islice(source, batch_size * _BATCHES_AHEAD - len(waiting))
        if not waiting:
            return
        batch: list[ImageRequest] = []
        others: list[ImageRequest] = []
        for request in waiting:
            fits = len(batch) < batch_size and request.kind == waiting[0].kind
            (batch if fits else others).append(request)
        waiting = others
        yield batch


def generate_batch(
    parts: Components, sampling: SamplingSettings, batch: Sequence[ImageRequest], steering: Steering = AS_TRAINED
) -> Iterator[GeneratedImage]:
    """The images of one batch, all of one size and guidance."""
    family, objective = generative(parts)
    shape = family.generated.latent_shape((3, *batch[0].size_px))
    settings = sampling.model_copy(update={"guidance_scale": batch[0].guidance_scale})
    _check_guidance(family, batch)
    runs_null = family.guidance.runs_null(settings.guidance_scale)
    seeds, texts = [request.seed for request in batch], [request.prompt for request in batch]
    images = [_pixels(parts, request, steering) for request in batch]
    cond, null = _conditioning(parts, batch, images, runs_null)
    known = None if batch[0].strength is None else _known(parts, images, seeds, batch[0].strength, shape)
    cond, null = controlnets.steered(parts, steering, shape, settings, known, (cond, null))
    with parts.autocast(), assistant.absent(family):
        x0 = draw(
            objective, parts.net, cond, null, shape, seeds, settings, parts.device, known, guidance=family.guidance
        )
    latents = Latents(x0, texts, seeds, batch[0].size_px)
    read = {"prompt": [prompt.text for prompt in texts]}
    read |= {"negative_prompt": [prompt.negative for prompt in texts]} if runs_null else {}
    read |= {"interpolate_to": ends} if (ends := interpolation.ends(texts)) else {}
    truncated = {name: family.truncated(sides) for name, sides in read.items()}
    is_finite_B = x0.isfinite().flatten(1).all(1)
    for rows in _cut(len(batch), batch[0].size_px):
        for i, pixels in enumerate(family.decode(latents[rows]), rows.start):
            if MASK in images[i] and batch[i].keep_unmasked:
                pixels = np.where(images[i][MASK], pixels, images[i][IMAGE])
            if (shown := batch[i].shown) is not None:
                top, left, height, width = shown
                pixels = pixels[top : top + height, left : left + width]
            cut = {name: found[i] for name, found in truncated.items() if i in found}
            yield GeneratedImage(batch[i], pixels, cut, is_finite_B[i])


def _check_guidance(family: Family, batch: Sequence[ImageRequest]) -> None:
    """UserError for a scale or a negative prompt of a single image that these weights do not take; those of the recipe
    were refused when the model was built."""
    scale, guidance = batch[0].guidance_scale, family.guidance
    if fault := guidance.fault(scale):
        raise UserError(fault, code="conflict", setting="sampling.guidance_scale")
    for request in batch:
        if request.prompt.negative and not guidance.runs_null(scale):
            what = f"negative_prompt is {request.prompt.negative!r}"
            raise UserError(guidance.without_null(what, scale), code="unused", setting="sampling.negative_prompt")


def _cut(count: int, size_px: tuple[int, int]) -> list[slice]:
    """The rows, of so many images of this size, that the autoencoder takes at once."""
    height, width = size_px
    at_once = max(1, _DECODED_PX // (height * width))
    return [slice(first, first + at_once) for first in range(0, count, at_once)]


def _pixels(parts: Components, request: ImageRequest, steering: Steering = AS_TRAINED) -> dict[str, np.ndarray]:
    """All images of a request [H, W, C] uint8 by name: of its prompt, of its files, and computed of its photo."""
    images = dict(request.prompt.images)
    if request.images:
        family, size_px = parts.family, request.size_px
        rule = family.prompt_references or family.references
        images |= input_images.pixels(request.images, size_px, family.trained_px(size_px), rule)
    return controlnets.with_computed(parts, images, request.seed, steering.condition)


def _known(
    parts: Components,
    images: Sequence[Mapping[str, np.ndarray]],
    seeds: Sequence[int],
    strength: float,
    shape: tuple[int, ...],
) -> Known:
    """The encoded images, and the cells of the latent in which any pixel is painted again."""
    height, width, _ = images[0][IMAGE].shape
    encoded = [
        parts.family.encode_images(_stacked(images[rows], IMAGE).to(parts.device), seeds[rows])
        for rows in _cut(len(images), (height, width))
    ]
    if MASK not in images[0]:
        return Known(torch.cat(encoded), strength)
    cells_B3HW = functional.adaptive_max_pool2d(_stacked(images, MASK).float(), shape[1:])
    return Known(torch.cat(encoded), strength, cells_B3HW[:, :1].to(parts.device) > 0)


def _stacked(images: Sequence[Mapping[str, np.ndarray]], name: str) -> Tensor:
    """The images of this name [B, C, H, W] uint8."""
    return torch.from_numpy(np.stack([of_one[name] for of_one in images])).permute(0, 3, 1, 2)


def _conditioning(
    parts: Components, batch: Sequence[ImageRequest], images: Sequence[Mapping[str, np.ndarray]], runs_null: bool
) -> tuple[Cond, Cond | None]:
    """Conditioning by the family and then by the adapters, as in training; where it `runs_null`, also the unguided
    side. `images` are those of each request."""
    # What sampling starts from and what adapters read is no part of the prompt: the family refuses what it cannot read.
    started = set() if batch[0].strength is None else {IMAGE, MASK} - {*parts.family.prompt_images}
    elsewhere = started | {*parts.attached.images}
    prompts = [
        replace(one.prompt, images={name: pixels for name, pixels in of_one.items() if name not in elsewhere})
        for one, of_one in zip(batch, images, strict=True)
    ]
    cond, null = parts.family.encode_prompts(prompts, (3, *batch[0].size_px), runs_null)
    inputs = _adapter_inputs(parts, batch, images)
    cond = parts.attached.condition(inputs, cond)
    if null is not None:
        null = parts.attached.condition(replace(inputs, texts=[prompt.negative for prompt in prompts]), null)
    return cond, null


def _adapter_inputs(
    parts: Components, batch: Sequence[ImageRequest], images: Sequence[Mapping[str, np.ndarray]]
) -> AdapterInputs:
    """The part of requests that adapters read: their images, which all requests have in one size, the prompts, and
    random numbers of the seeds, as keys (seed, 0, 0)."""
    wanted = parts.attached.images
    shapes = {name: {of_one[name].shape if name in of_one else None for of_one in images} for name in wanted}
    if missing := [name for name in wanted if None in shapes[name] or len(shapes[name]) > 1]:
        raise UserError(
            f"this model reads {', '.join(missing)} with the prompt, and there is none here: give "
            f"{missing[0]}=PICTURE to `daguerre generate` (docs/controlnet.md)",
            code="missing",
        )
    keys = np.array([(request.seed, 0, 0) for request in batch], dtype=np.int64)
    shape = parts.family.generated.latent_shape((3, *batch[0].size_px))
    draws = parts.attached.random_inputs(parts.seed, keys, shape)
    texts = [request.prompt.text for request in batch]
    inputs = AdapterInputs({name: _stacked(images, name) for name in wanted}, texts, draws)
    parts.attached.check(inputs)
    on_device = {name: rows.to(parts.device) for name, rows in inputs.images.items()}
    return replace(inputs, images=on_device, draws={name: rows.to(parts.device) for name, rows in draws.items()})


def numbered(number: int, total: int) -> str:
    """The name of image `number` of `total`."""
    return f"{number:0{max(3, len(str(total - 1)))}d}"


def image_metadata(parts: Components, sampling: SamplingSettings, request: ImageRequest) -> dict[str, Any]:
    """Everything other than the weights that an image depends on, and the digest of its noise, float32 in memory
    order."""
    height, width = request.size_px
    family, objective = generative(parts)
    noise = initial_noise([request.seed], family.generated.latent_shape((3, height, width)))
    schedule, shift = objective.settings.schedule, {}
    if sampling.shift is not None:
        shift = {"shift": sampling.shift_at(height * width)}
    elif schedule.resolution_shift.name != "none":
        shift = {"shift": schedule.at(height * width).shift}
    return {
        "prompt": request.prompt.text,
        "negative_prompt": request.prompt.negative,
        "seed": request.seed,
        "height": request.shown_px[0],
        "width": request.shown_px[1],
        "guidance_scale": request.guidance_scale,
        "guidance_rescale": sampling.guidance_rescale if family.guidance.runs_null(request.guidance_scale) else 0.0,
        **_between(request.prompt),
        **_started(request),
        **{name: getattr(sampling, name) for name in _SETTINGS},
        **sampling.churn,
        **shift,
        "precision": parts.precision,
        "initial_noise_sha256": sha256(noise.numpy().tobytes()).hexdigest(),
        "code_version": __version__,
    }


def _between(prompt: Prompt) -> dict[str, Any]:
    """The other prompt of one that lies between two, and how far on the way to it, for its JSON."""
    return {} if prompt.toward is None else {"interpolate_to": prompt.toward, "interpolation": prompt.share}


def _started(request: ImageRequest) -> dict[str, Any]:
    """The files that an image started from, for its JSON."""
    found: dict[str, Any] = {} if request.strength is None else {"strength": request.strength}
    for name, image in request.images.items():
        found |= {name: str(image.path), f"{name}_sha256": image.sha256}
    return found | ({"keep_unmasked": request.keep_unmasked} if MASK in request.images else {})


def generative(parts: Components, inputs: Collection[str] = ()) -> tuple[Family, Diffusion]:
    """Family and diffusion. UserError if they cannot generate from prompts, and from images of these names."""
    diffusion = parts.objective.diffusion
    if not parts.family.generates or diffusion is None:
        raise UserError(
            "this model cannot generate images from prompts: a text-to-image family and a diffusion objective are "
            "needed",
            code="unsupported",
        )
    if {IMAGE, MASK} & {*inputs} and not parts.family.encodes:
        raise UserError(
            "this family only decodes images, so nothing can start from one: remove image and mask",
            code="unsupported",
            setting="image",
        )
    return parts.family, diffusion
