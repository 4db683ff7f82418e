"""Exports a run as a diffusers pipeline: networks, index, scheduler, tokenizers and a page that says how to use it.

The networks save themselves, in the names that every version of their libraries reads; the folder is put in place by
checkpoint/export.py.
"""

import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
from torch import nn

from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.parts.text.names import hub_name
from daguerre.models.settings import PretrainedSettings
from daguerre.models.weights import index, seals
from daguerre.models.weights.files import write_json
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings

_EXAMPLE = """\
from diffusers import {class_name}

pipe = {class_name}.from_pretrained("path/to/this/folder")
image = pipe("a prompt", {call}).{result}
"""
TRUE_CFG: dict[str, Any] = {
    "example": _EXAMPLE.replace("{call}", "negative_prompt={negative!r}, true_cfg_scale={scale}, {call}"),
    "unknown": ("guidance_scale", "guidance_rescale", "negative_prompt"),
}
"""Fields of a `PipelineExporter` for pipelines whose guidance_scale is that of distilled networks: classifier-free
guidance is another argument there, which acts where a negative prompt is given."""
_ALWAYS, _AT_TIMES = ("num_inference_steps", "guidance_scale"), ("guidance_rescale", "negative_prompt", "eta")
"""Settings that a call of a pipeline is given, and those that it is given where they are not the usual ones."""


@dataclass(frozen=True, eq=False)
class PipelineExporter:
    """Writes a family as a folder that stock diffusers opens offline, tokenizers included."""

    settings: PretrainedSettings
    """The family's settings, which name its class of pipelines and their schedulers."""
    index: Mapping[str, Any]
    """Further entries of the pipeline's index."""
    replaced: Mapping[str, Callable[[], nn.Module]]
    """Networks as the pipeline needs them, where it computes otherwise than the family, by component."""
    notices: tuple[str, ...] = ()
    """Differences between what the pipeline and the run do."""
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further JSON files, by relative path."""
    unlisted: Collection[str] = ()
    """Networks that are written with the pipeline's own, which knows no such component."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Folders that the pipeline's class asks for, too, with the content of others."""
    left_out: Collection[str] = ()
    """Networks that are not written."""
    result: str = "images[0]"
    """What a call of the pipeline returns, for the page."""
    example: str = _EXAMPLE
    """How to call it with `{call}`, for the page; `{scale}` is the guidance scale,
    `{negative}` the negative prompt."""
    unknown: Collection[str] = ()
    """Settings of sampling that its calls do not take."""
    blocks: str | None = None
    """The class of blocks of a modular pipeline; None for a plain one."""

    def __call__(self, family: Family, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """Puts the pipeline in place of `folder`. Returns messages for the user: `notices`, and where the scheduler
        cannot generate what the run generates."""
        diffusion = objective.diffusion
        if diffusion is None:
            raise UserError(
                f"the objective {objective!r} is not a diffusion objective: there is nothing to export",
                code="unsupported",
            )
        plan = self.settings.schedulers.scheduler_of(diffusion, sampling)
        notices = [*self.notices, *plan.notices]
        networks = {**family.components, **{name: make() for name, make in self.replaced.items()}}
        networks = {name: network for name, network in networks.items() if name not in self.left_out}
        classes = {name: type(network) for name, network in networks.items()}
        entries = {name: _named(kind) for name, kind in classes.items() if name not in self.unlisted}
        provenance = {"_diffusers_version": version("diffusers")}
        # Written beside the old one: a run that is killed here leaves the pipeline of the save before.
        with replaced(folder) as fresh:
            for name, network in networks.items():
                save(network, fresh / name)
            for path, content in family.files().items():
                component, _, name = path.partition("/")
                own = fresh / self.settings.folder_of(component)
                own.mkdir(exist_ok=True)
                (own / name).write_bytes(content)
            read_by = dict(zip(self.settings.text_encoders(), self.settings.tokenizers(), strict=True))
            for encoder in () if family.text is None else family.text.encoders:
                entries[self.settings.folder_of(read_by[encoder.name])] = ["transformers", encoder.tokenizer_class]
            entries |= {**self.index, "scheduler": ["diffusers", plan.class_name]}
            file, listed = self._index(entries)
            write_json(fresh / file, {"_class_name": self.settings.pipeline_class, **provenance, **listed})
            (fresh / "scheduler").mkdir()
            config = {"_class_name": plan.class_name, **provenance, **plan.config}
            write_json(fresh / "scheduler" / "scheduler_config.json", config)
            for copy, own_folder in self.copies.items():
                shutil.copytree(fresh / own_folder, fresh / copy)
            for path, document in self.documents.items():
                (fresh / path).parent.mkdir(exist_ok=True)
                write_json(fresh / path, document)
            card = _card(self, diffusion, sampling, plan.class_name, notices)
            (fresh / "README.md").write_text(card, encoding="utf-8")
        return notices

    def _index(self, entries: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name and content of the pipeline's index."""
        if self.blocks is None:
            # Not every family has a pipeline there: none of its parts is then asked for.
            asked = getattr(getattr(diffusers, self.settings.pipeline_class, None), "_optional_components", ())
            absent: dict[str, Any] = {name: [None, None] for name in asked if name not in entries}
            return index.PLAIN, absent | entries
        return index.MODULAR, {"_blocks_class_name": self.blocks, **index.modular(entries)}


def _named(kind: type) -> Any:
    """Library and class of a network, as an index has it."""
    package, *_, folder, _ = kind.__module__.split(".")
    in_pipeline = ".pipelines." in kind.__module__
    return [folder if in_pipeline else package, kind.__name__]


def save(network: Any, folder: Path) -> None:
    """Config and weights of one network, by the names that the hub's files have for them."""
    network.save_pretrained(folder, safe_serialization=True)
    names = {name: hub_name(network, name) for name in network.state_dict()}
    if any(own != name for name, own in names.items()):
        tensors = {names[name]: value.detach().cpu() for name, value in network.state_dict().items()}
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        (folder / "model.safetensors").unlink(missing_ok=True)
        seals.write(folder / "model.safetensors", contiguous)
    else:
        for path in sorted(folder.glob("*.safetensors")):
            seals.seal(path)


def _card(
    own: PipelineExporter,
    objective: Diffusion,
    sampling: SamplingSettings,
    scheduler_class: str,
    notices: Sequence[str],
) -> str:
    """README.md: how to generate with this pipeline what the run generates, and where that is not possible."""
    given = {name: getattr(sampling, name) for name in (*_ALWAYS, *_AT_TIMES)}
    given = {name: value for name, value in given.items() if name in _ALWAYS or value}
    call = ", ".join(f"{name}={value!r}" for name, value in given.items() if name not in own.unknown)
    levels = objective.sampled(sampling).schedule.settings
    ours = {"sampler": sampling.sampler, **given} | ({"shift": levels.shift} if levels.acts("shift") else {})
    return _CARD.format(
        class_name=own.settings.pipeline_class,
        example=own.example.format(
            class_name=own.settings.pipeline_class,
            call=call,
            result=own.result,
            scale=sampling.guidance_scale,
            negative=sampling.negative_prompt,
        ),
        scheduler=scheduler_class,
        objective=objective.settings.name,
        schedule=objective.settings.schedule.name,
        options=shlex.join(f"{name}={value}" for name, value in ours.items()),
        differs="".join(f"* {notice}\n" for notice in notices) or "* by less than 2/255 a pixel, in float32\n",
        version=version("daguerre"),
    )


_CARD = """\
---
library_name: diffusers
pipeline_tag: text-to-image
---

A `{class_name}` trained with Daguerre {version}: objective `{objective}` on the schedule `{schedule}`.

```python
{example}```

Daguerre generated its own images of this model with the options

    {options}

which `daguerre generate` needs where it is given this folder without its run. The nearest scheduler of diffusers is
`{scheduler}`, which is in this folder. For the same initial noise its images differ from Daguerre's:

{differs}
Another scheduler needs the same prediction type and noise levels: make it with
`from_config(pipe.scheduler.config)`, not with its defaults.
"""
