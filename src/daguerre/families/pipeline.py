"""What turns a folder of networks into a diffusers pipeline: the index, the scheduler's config, a page for people.

Writes text files only; the networks save themselves, and the folder is put in place by checkpoint/export.py.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from daguerre.families.scheduler import Scheduler
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.settings import SamplingSettings


def write_index(folder: Path, class_name: str, components: dict[str, Any], plan: Scheduler) -> None:
    """model_index.json (library and class of each component) and the scheduler's config."""
    made_with = {"_diffusers_version": version("diffusers")}
    index = {"_class_name": class_name} | made_with | components | {"scheduler": ["diffusers", plan.class_name]}
    _write_json(folder / "model_index.json", index)
    (folder / "scheduler").mkdir()
    config = {"_class_name": plan.class_name} | made_with | plan.config
    _write_json(folder / "scheduler" / "scheduler_config.json", config)


def write_card(
    folder: Path, class_name: str, objective: Diffusion, sampling: SamplingSettings, plan: Scheduler
) -> None:
    """README.md: how to draw with this pipeline what the run draws, and where that is not possible."""
    call = f"num_inference_steps={sampling.num_inference_steps}, guidance_scale={sampling.guidance_scale}"
    for name in ("guidance_rescale", "negative_prompt", "eta"):
        if value := getattr(sampling, name):
            call += f", {name}={value!r}"
    differs = "".join(f"* {notice}\n" for notice in plan.notices) or "* by less than 2/255 a pixel, in float32\n"
    (folder / "README.md").write_text(
        _CARD.format(
            class_name=class_name,
            call=call,
            scheduler=plan.class_name,
            objective=objective.settings.name,
            schedule=objective.settings.schedule.name,
            sampler=sampling.sampler,
            differs=differs,
            version=version("daguerre"),
        ),
        encoding="utf-8",
    )


_CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
---

A `{class_name}` trained with Daguerre {version}: objective `{objective}` on the schedule `{schedule}`.

```python
from diffusers import {class_name}

pipe = {class_name}.from_pretrained("path/to/this/folder")
image = pipe("a prompt", {call}).images[0]
```

Daguerre drew its own pictures of this model with the sampler `{sampler}` in these steps; the nearest scheduler of
diffusers is `{scheduler}`, which is in this folder. For the same initial noise its pictures differ from Daguerre's:

{differs}
Another scheduler must be told the same prediction type and noise levels: make it with
`from_config(pipe.scheduler.config)`, not with its defaults.
"""


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
