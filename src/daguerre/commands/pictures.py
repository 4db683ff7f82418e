"""Pictures from prompts, for the samples of a run, for its evaluation and for `daguerre generate`.

Puts together what the family, the objective and the samplers do, and writes PNG files with a JSON list of how each was
made. Which weights the net holds, and which prompts there are, is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from daguerre import __version__
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.commands.parts import Parts
from daguerre.errors import UserError
from daguerre.families.family import TextToImage
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import SamplingSettings

LISTING = "samples.json"


def draw_pictures(
    parts: Parts, resolution: int, sampling: SamplingSettings, prompts: Sequence[str], seeds: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yields one picture [resolution, resolution, 3] uint8 for each prompt and seed, in their order.

    Picture i depends on its own prompt and seed: its noise to the bit, its pixels within 1/255 whatever else is in
    the batch. The net is used as it is: in evaluation mode, with the weights that the pictures are wanted of.
    """
    family, objective = drawing(parts)
    shape = family.latent_shape((3, resolution, resolution))
    for first in range(0, len(prompts), sampling.batch_size):
        part = slice(first, first + sampling.batch_size)
        count = len(prompts[part])
        guided = sampling.guidance_scale > 1
        texts = [*prompts[part], *[sampling.negative_prompt] * count * guided]
        both = family.encode_prompts(texts, (3, resolution, resolution))
        cond = {name: rows[:count] for name, rows in both.items()}
        null = {name: rows[count:] for name, rows in both.items()} if guided else None
        with parts.autocast():
            x0 = draw(objective, parts.net, cond, null, shape, seeds[part], sampling, parts.device)
        yield from family.decode(x0)


def write_pictures(
    parts: Parts,
    resolution: int,
    sampling: SamplingSettings,
    prompts: Sequence[str],
    folder: Path,
    made_with: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Draws one picture a prompt, picture i from seed `sampling.seed` + i, into `folder`/000.png, 001.png ...

    `folder`/samples.json, written last, says of each how it was made; `made_with` (checkpoint, step) goes into each
    entry. Files of the same names are overwritten.
    """
    seeds = [sampling.seed + i for i in range(len(prompts))]
    shape = drawing(parts)[0].latent_shape((3, resolution, resolution))
    width = max(3, len(str(len(prompts) - 1)))
    make_folder(folder)
    paths, listing = [], []
    pictures = draw_pictures(parts, resolution, sampling, prompts, seeds)
    for i, (picture, prompt, seed) in enumerate(zip(pictures, prompts, seeds, strict=True)):
        path = folder / f"{i:0{width}d}.png"
        Image.fromarray(picture).save(path)
        listing.append({"file": path.name, "prompt": prompt, "seed": seed, "initial_noise_sha256": digest(seed, shape)})
        listing[-1] |= how(sampling) | {"code_version": __version__} | dict(made_with or {})
        paths.append(path)
    write_json_atomically(folder / LISTING, listing)
    return paths


def how(sampling: SamplingSettings) -> dict[str, Any]:
    """The settings that a picture depends on, beside prompt and seed."""
    names = ("negative_prompt", "sampler", "num_inference_steps", "eta", "guidance_scale", "guidance_rescale")
    return {name: getattr(sampling, name) for name in (*names, "timestep_spacing")}


def digest(seed: int, shape: tuple[int, ...]) -> str:
    """SHA-256 of a picture's initial noise, float32 in memory order."""
    return sha256(initial_noise([seed], shape).numpy().tobytes()).hexdigest()


def drawing(parts: Parts) -> tuple[TextToImage, Diffusion]:
    """Family and objective, if they can draw from prompts; else UserError."""
    if not isinstance(parts.family, TextToImage) or not isinstance(parts.objective, Diffusion):
        raise UserError(
            "this model does not draw pictures from prompts: that takes a text-to-image family and a diffusion"
        )
    return parts.family, parts.objective
