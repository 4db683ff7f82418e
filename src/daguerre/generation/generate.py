"""Pictures from prompts, for the samples of a run, for its evaluation and for `daguerre generate`.

Puts together what the family, the objective and the samplers do. Which weights the net holds, and which prompts there
are, is the caller's affair; how pictures become files is in generation/image_files.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np

from daguerre import __version__
from daguerre.build.parts import Parts
from daguerre.errors import UserError
from daguerre.memory import advice
from daguerre.models.family import Family
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import CHURN, SamplingSettings
from daguerre.training import oom
from daguerre.types import Latents, Prompt

_SETTINGS = ("sampler", "num_inference_steps", "eta", "timestep_spacing")
_OF_PICTURE = ("prompt", "negative_prompt", "seed", "height", "width", "guidance_scale", "guidance_rescale")
_OF_FILE = ("file", "file_name", "bytes", "xxh3_128", "daguerre_id", "prompt_was", "initial_noise_sha256")
_OF_MODEL = ("run", "checkpoint", "step", "weights", "base", "pipeline", "model", "objective")
_OF_CODE = ("precision", "code_version")
KEYS = frozenset({*_SETTINGS, "shift", *CHURN, *_OF_PICTURE, *_OF_FILE, *_OF_MODEL, *_OF_CODE})
"""What the JSON of a picture says itself: a list of prompts may have no column of these names, beside its own."""
_BATCHES_AHEAD = 16
"""How many batches further a list is read to fill one with pictures of one size."""
_DECODED_PX = 1 << 20
"""An autoencoder takes ten times the memory of the UNet: this many pixels are decoded at once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A picture that is to be drawn."""

    number: int
    """Its place among all; unique."""
    prompt: Prompt
    seed: int
    size_px: tuple[int, int]
    """Height and width."""
    guidance_scale: float
    name: str | None = None
    """What its file is to be called, without suffix; None: by its number."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it, for its JSON."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What the pictures of one batch have in common."""
        return self.size_px, self.guidance_scale


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture that was drawn."""

    wanted: Wanted
    pixels_HWC: np.ndarray
    """[H, W, 3] uint8."""
    cut: str | None
    """What was done to a prompt that is longer than the family reads."""


class Stopped(Exception):
    """Drawing was told to stop; what was yielded is all there is."""


def draw_all(
    parts: Parts, sampling: SamplingSettings, wanted: Iterable[Wanted], stop: Callable[[], bool] = lambda: False
) -> Iterator[Drawn]:
    """Draws each of `wanted`, batch after batch; those of one size and guidance come in their order.

    Picture i depends on its own prompt and seed: its noise to the bit, its pixels within 1/255 whatever else is in
    the batch. The net is used as it is: in evaluation mode, with the weights that the pictures are wanted of. A few
    batches of `wanted` are held, whatever their number. `stop` is asked before each batch: Stopped is raised where it
    says so.
    """
    for batch in batches(wanted, sampling.batch_size):
        if stop():
            raise Stopped
        with oom.explained("drawing pictures", lambda: advice.of_drawing(sampling)):
            yield from draw_batch(parts, sampling, batch)


def in_order(draw: Callable[[Iterable[Wanted]], Iterator[Drawn]], wanted: Iterable[Wanted]) -> Iterator[Drawn]:
    """What `draw` makes of `wanted`, in their order; those that come early are held."""
    order: deque[int] = deque()
    ready: dict[int, Drawn] = {}

    def read() -> Iterator[Wanted]:
        for one in wanted:
            order.append(one.number)
            yield one

    for drawn in draw(read()):
        ready[drawn.wanted.number] = drawn
        while order and order[0] in ready:
            yield ready.pop(order.popleft())


def batches(wanted: Iterable[Wanted], batch_size: int) -> Iterator[list[Wanted]]:
    """Pictures of one size and guidance each, led by the first that was in no batch yet."""
    source = iter(wanted)
    waiting: list[Wanted] = []
    while True:
        waiting += islice(source, batch_size * _BATCHES_AHEAD - len(waiting))
        if not waiting:
            return
        batch: list[Wanted] = []
        others: list[Wanted] = []
        for one in waiting:
            fits = len(batch) < batch_size and one.kind == waiting[0].kind
            (batch if fits else others).append(one)
        waiting = others
        yield batch


def draw_batch(parts: Parts, sampling: SamplingSettings, batch: Sequence[Wanted]) -> Iterator[Drawn]:
    """The pictures of one batch, all of one size and guidance."""
    family, objective = drawing(parts)
    height, width = batch[0].size_px
    shape = family.latent_shape((3, height, width))
    settings = sampling.model_copy(update={"guidance_scale": batch[0].guidance_scale})
    prompts, seeds = [one.prompt for one in batch], [one.seed for one in batch]
    cond, null = family.encode_prompts(prompts, (3, height, width), settings.guided)
    with parts.autocast():
        x0 = draw(objective, parts.net, cond, null, shape, seeds, settings, parts.device)
    latents = Latents(x0, prompts, seeds)
    cut = family.truncated([prompt.text for prompt in prompts])
    at_once = max(1, _DECODED_PX // (height * width))
    for first in range(0, len(batch), at_once):
        for i, pixels in enumerate(family.decode(latents[first : first + at_once]), first):
            yield Drawn(batch[i], pixels, cut.get(i))


def draw_pictures(
    parts: Parts,
    resolution: int,
    sampling: SamplingSettings,
    prompts: Sequence[str],
    seeds: Sequence[int],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[np.ndarray]:
    """Yields one picture [resolution, resolution, 3] uint8 for each prompt and seed, in their order; see `draw_all`.

    For metrics, which read pictures as large as those that are trained on.
    """
    size_px, negative, scale = (resolution, resolution), sampling.negative_prompt, sampling.guidance_scale
    pairs = enumerate(zip(prompts, seeds, strict=True))
    wanted = (Wanted(i, Prompt(prompt, negative), seed, size_px, scale) for i, (prompt, seed) in pairs)
    for drawn in draw_all(parts, sampling, wanted, stop):
        yield drawn.pixels_HWC


def numbered(number: int, total: int) -> str:
    """The name of picture `number` of `total`."""
    return f"{number:0{max(3, len(str(total - 1)))}d}"


def about(parts: Parts, sampling: SamplingSettings, one: Wanted) -> dict[str, Any]:
    """All that a picture depends on beside the weights, and what tells its noise."""
    height, width = one.size_px
    return {
        "prompt": one.prompt.text,
        "negative_prompt": one.prompt.negative,
        "seed": one.seed,
        "height": height,
        "width": width,
        "guidance_scale": one.guidance_scale,
        "guidance_rescale": sampling.guidance_rescale if one.guidance_scale > 1 else 0.0,
        **{name: getattr(sampling, name) for name in _SETTINGS},
        **sampling.churn,
        **_shift(parts, sampling, height * width),
        "precision": parts.precision,
        "initial_noise_sha256": digest(one.seed, drawing(parts)[0].latent_shape((3, height, width))),
        "code_version": __version__,
    }


def _shift(parts: Parts, sampling: SamplingSettings, area_px: int) -> dict[str, float]:
    """The shift of the noise levels, where the recipe's schedule does not say it by itself."""
    schedule = drawing(parts)[1].settings.schedule
    if sampling.shift is not None:
        return {"shift": sampling.shift}
    return {} if schedule.resolution_shift.name == "none" else {"shift": schedule.at(area_px).shift}


def digest(seed: int, shape: tuple[int, ...]) -> str:
    """SHA-256 of a picture's initial noise, float32 in memory order."""
    return sha256(initial_noise([seed], shape).numpy().tobytes()).hexdigest()


def drawing(parts: Parts) -> tuple[Family, Diffusion]:
    """Family and objective, if they can draw from prompts; else UserError."""
    if not parts.family.generates or not isinstance(parts.objective, Diffusion):
        raise UserError(
            "this model does not draw pictures from prompts: that takes a text-to-image family and a diffusion"
        )
    return parts.family, parts.objective
