"""What turns the networks of a run into a diffusers pipeline: the index, the scheduler's config, a page for people.

The networks save themselves, in the names that every version of their libraries reads; the folder is put in place by
checkpoint/export.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.export import scheduler
from daguerre.models.export.scheduler import Scheduler
from daguerre.models.family import Family
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings

_TEXT_PREFIX = "text_model."


@dataclass(frozen=True, eq=False)
class PipelineExporter:
    """Writes a family as a folder that stock diffusers opens offline, tokenizers included."""

    class_name: str
    """Of the pipeline."""
    index: Mapping[str, Any]
    """Further entries of model_index.json."""
    replaced: Mapping[str, Callable[[], nn.Module]]
    """Networks as the pipeline needs them, where it computes otherwise than the family, by component."""
    notices: tuple[str, ...] = ()
    """Where the pipeline does not do what the run does."""

    def __call__(self, family: Family, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """Puts the pipeline in place of `folder`. Returns what a person must be told: `notices`, and where the
        scheduler cannot draw what the run draws."""
        if not isinstance(objective, Diffusion):
            raise UserError(f"the objective {objective!r} is no diffusion: there is nothing to export")
        plan = scheduler.choose(objective, sampling)
        said = [*self.notices, *plan.notices]
        networks = {**family.components, **{name: make() for name, make in self.replaced.items()}}
        files = family.files()
        with replaced(folder) as fresh:
            for name, network in networks.items():
                save(network, fresh / name)
            for path, content in files.items():
                (fresh / path).parent.mkdir(exist_ok=True)
                (fresh / path).write_bytes(content)
            index = {
                name: [type(network).__module__.split(".")[0], type(network).__name__]
                for name, network in networks.items()
            }
            index |= {path.split("/")[0]: ["transformers", _tokenizer_class(networks, path)] for path in files}
            _write_index(fresh, self.class_name, index | dict(self.index), plan)
            _write_card(fresh, self.class_name, objective, sampling, plan.class_name, said)
        return said


def save(network: Any, folder: Path) -> None:
    """Config and weights of one network. A text encoder's names are those that transformers 4 reads as well as 5."""
    network.save_pretrained(folder, safe_serialization=True)
    if type(network).__name__ != "CLIPTextModel":
        return
    tensors = network.state_dict()
    named = {name if name.startswith(_TEXT_PREFIX) else _TEXT_PREFIX + name: value for name, value in tensors.items()}
    contiguous = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})


def _tokenizer_class(networks: Mapping[str, nn.Module], path: str) -> str:
    encoder = networks[path.split("/")[0].replace("tokenizer", "text_encoder")]
    return "T5Tokenizer" if type(encoder).__name__.startswith("T5") else "CLIPTokenizer"


def _write_index(folder: Path, class_name: str, components: Mapping[str, Any], plan: Scheduler) -> None:
    """model_index.json (library and class of each component) and the scheduler's config."""
    made_with = {"_diffusers_version": version("diffusers")}
    index = {"_class_name": class_name, **made_with, **components, "scheduler": ["diffusers", plan.class_name]}
    _write_json(folder / "model_index.json", index)
    (folder / "scheduler").mkdir()
    config = {"_class_name": plan.class_name} | made_with | plan.config
    _write_json(folder / "scheduler" / "scheduler_config.json", config)


def _write_card(
    folder: Path,
    class_name: str,
    objective: Diffusion,
    sampling: SamplingSettings,
    scheduler_class: str,
    notices: Sequence[str],
) -> None:
    """README.md: how to draw with this pipeline what the run draws, and where that is not possible."""
    call = f"num_inference_steps={sampling.num_inference_steps}, guidance_scale={sampling.guidance_scale}"
    for name in ("guidance_rescale", "negative_prompt", "eta"):
        if value := getattr(sampling, name):
            call += f", {name}={value!r}"
    differs = "".join(f"* {notice}\n" for notice in notices) or "* by less than 2/255 a pixel, in float32\n"
    (folder / "README.md").write_text(
        _CARD.format(
            class_name=class_name,
            call=call,
            scheduler=scheduler_class,
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
