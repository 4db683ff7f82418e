"""diffusers' pipelines of a folder that noise and step as `daguerre generate` does with the sampler ddim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers

from daguerre import plugins
from daguerre.generation import load
from daguerre.samplers.settings import SamplingSettings


def opened(pipeline: Any, folder: Path, steps: int, **components: Any) -> Any:
    """The pipeline of this class, with the scheduler that an export of the model would have."""
    pipe = pipeline.from_pretrained(folder, **components)
    config = load.find(str(folder), (), False).config(()).config
    objective = plugins.find("objectives", config.objective.name).build(config.objective)
    found = config.model.schedulers.scheduler_of(objective, SamplingSettings(sampler="ddim", num_inference_steps=steps))
    kind = getattr(diffusers, found.class_name)
    pipe.scheduler = kind.from_config({"_class_name": found.class_name} | found.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe
