"""The contract of every family with a pipeline, found by its file: its export is opened as what it was, and draws the
same image in diffusers, or says what differs."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import modular_pipelines
import numpy as np
import pytest
import tiny_families
import tiny_texts
import torch
from diffusers import DiffusionPipeline
from tiny_models import prompts

from daguerre import plugins
from daguerre.families.pretrained import catalogue
from daguerre.generation import load
from daguerre.models.compatibility import differences
from daguerre.models.family import Family
from daguerre.models.weights import index
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Latents


def needs_picture(name: str) -> bool:
    """Whether nothing is generated of a prompt alone; tests of such families draw with pictures."""
    rule = plugins.find("families", name).Settings.reference_rule
    return rule is not None and rule.least > 0


PROMPTS, SEEDS, SIDE_PX = ["a large red circle", "blue"], [3, 4], 64
PIPELINES = [name for name in sorted({*catalogue.pipelines().values()}) if not needs_picture(name)]


def built(section: dict[str, Any], family: Family) -> Diffusion:
    """The objective of a section, as the family's network reads noise levels."""
    settings: Any = family.pretrained.settings if family.pretrained else None
    module = plugins.find("objectives", section["name"])
    objective = module.build(module.Settings.model_validate(section))
    told: Diffusion = objective.with_noise_conditioning(settings.noise_conditioning, settings.time_scale)
    _, *cells = family.latent_shape((3, SIDE_PX, SIDE_PX))
    return replace(told, cell_px=SIDE_PX**2 / np.prod(cells), sampled_px=SIDE_PX**2)


def ours(family: Family, objective: Diffusion, sampling: SamplingSettings) -> np.ndarray:
    size = (3, SIDE_PX, SIDE_PX)
    sides = family.encode_prompts(prompts(PROMPTS), size, family.guidance.runs_null(sampling.guidance_scale))
    shape = family.latent_shape(size)
    x0 = draw(objective, family.net.eval(), *sides, shape, SEEDS, sampling, guidance=family.guidance)
    return family.decode(Latents(x0, prompts(PROMPTS), SEEDS)).astype(int)


def theirs(folder: Path, family: Family, sampling: SamplingSettings) -> np.ndarray:
    """The pipeline's images from the same noise, packed to tokens where it takes tokens. Each prompt is called by
    itself: not every pipeline hides padding."""
    latents: Any = initial_noise(SEEDS, family.latent_shape((3, SIDE_PX, SIDE_PX)))
    settings: Any = family.pretrained.settings if family.pretrained else None
    names = ["max_sequence_length", "text_encoder_out_layers"]
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": sampling.num_inference_steps}
    if (folder / index.MODULAR).is_file():
        more = {"max_sequence_length": settings.max_sequence_length}
        pipe: Any = modular_pipelines.opened(folder)
        return modular_pipelines.drawn(pipe, PROMPTS, latents, sampling.guidance_scale, **size, **more)
    # what opens a processor of images and text needs torchvision
    handed = {"processor": tiny_texts.qwen3_vl_processor()} if (folder / "processor").is_dir() else {}
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **handed)
    pipe.set_progress_bar_config(disable=True)
    latents = pipe._pack_latents(latents, *latents.shape) if hasattr(pipe, "_pack_latents") else latents
    taken = inspect.signature(pipe.__call__).parameters
    options = {name: value for name in names if name in taken and (value := getattr(settings, name, None))}
    options |= size
    scale = "true_cfg_scale" if "true_cfg_scale=" in (folder / "README.md").read_text() else "guidance_scale"
    options |= {scale: sampling.guidance_scale} | ({"negative_prompt": " "} if scale == "true_cfg_scale" else {})
    each = [
        pipe(prompt=prompt, latents=latents[row : row + 1], output_type="np", **options).images[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    return (np.stack(each)[..., :3] * 255).round().astype(int)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.long  # of the quick tests, each family draws the image of its pipeline, and test_sd_export.py
@pytest.mark.parametrize("name", PIPELINES)
def test_an_export_is_opened_as_it_was_and_draws_the_same_image_or_says_what_differs(name, tmp_path):
    family, folder = tiny_families.load(name, tmp_path), tmp_path / "pipeline"
    assert family.pretrained is not None
    scheduler = family.pretrained.scheduler()
    assert scheduler is not None, "tests of a family stand on a pipeline"
    objective = built(family.pretrained.settings.schedulers.objective_of(scheduler), family)
    # a shift of its own is the same at every size: tiny autoencoders make more tokens of an image than real ones
    shift = 3.0 if objective.settings.schedule.name == "linear_flow" else None
    sampling = SamplingSettings(sampler="ddim", num_inference_steps=6, guidance_scale=3.0, shift=shift)
    notices = family.export(folder, objective, sampling)
    kind = getattr(diffusers, family.pretrained.settings.pipeline_class, None)
    if (index := folder / "model_index.json").is_file():
        listed = {key for key in json.loads(index.read_text(encoding="utf-8")) if key[0] != "_"}
        if kind is not None:
            assert listed <= {*inspect.signature(kind).parameters}, "stock diffusers warns of what it does not take"
    opened = load.find(str(folder), [], False).config([]).config
    assert opened.model.family == name
    assert differences(opened.objective, objective) == []
    if notices:
        said = ("images differ", "equal in distribution only", "diffusers has no pipeline of these networks")
        assert any(each in notice for notice in notices for each in said)
        return
    found = ours(family, objective, sampling)
    assert np.abs(found - theirs(folder, family, sampling)).max() <= 2
    other = ours(family, objective, sampling.model_copy(update={"guidance_scale": 5.0}))
    assert np.abs(found - other).max() > 2, "else the comparison would not see the guidance"
