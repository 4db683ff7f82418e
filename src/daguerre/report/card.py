"""The model card of a published run: README.md with the fields that the hub reads, made of what is in its folder."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData

from daguerre.formatting import counted, format_duration
from daguerre.report import facts
from daguerre.report.run import Run, Sample

IMAGES = "images"
"""Folder of the sample images in the repository."""
_OWN_CARD = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_PLACE = "path/to/this/folder"


def write(
    run: Run, repository: str, kind: str, usage: str, images: Sequence[Sample], base: str | None, licence: str | None
) -> str:
    """The card.

    Args:
        kind: `pipeline`, `adapter`, or `network` for one that generates no images by itself.
        usage: README.md of that export, which says how to use it.
        images: Those that the card shows, in its folder `images`.
        base: The model of the hub that was trained, if there is one.
        licence: Its licence, or the one that was chosen.
    """
    parts = [f"# {run.name}", str(run.setting("description") or ""), _own_words(usage, repository)]
    parts += [*_gallery(images), *_training(run), *_data(run), *_evaluation(run), *_recipe(run)]
    return f"---\n{_fields(run, kind, images, base, licence)}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def image_file(number: int, sample: Sample) -> str:
    """The name of a sample image in the repository."""
    return f"{IMAGES}/{number:03d}{sample.path.suffix}"


def _fields(run: Run, kind: str, images: Sequence[Sample], base: str | None, licence: str | None) -> str:
    lora = ["lora"] if kind == "adapter" else []
    relation = "adapter" if kind == "adapter" else "finetune"
    fields: dict[str, Any] = {
        "license": licence,
        "library_name": "diffusers",
        "pipeline_tag": None if kind == "network" else "text-to-image",
        "tags": [*([] if kind == "network" else ["text-to-image"]), "diffusers", "daguerre", *lora],
        "base_model": base,
        "base_model_relation": relation if base else None,
        "instance_prompt": trigger_phrase(run) or None,
        "widget": [{"text": one.prompt, "output": {"url": image_file(i, one)}} for i, one in enumerate(images)] or None,
    }
    return ModelCardData(**{name: value for name, value in fields.items() if value is not None}).to_yaml().strip()


def trigger_phrase(run: Run) -> str:
    """The words that prompts need: captions that the recipe gives all images of a source; "" where there are none."""
    sources = run.setting("data.sources")
    owns = [own for own in sources.values() if isinstance(own, dict)] if isinstance(sources, dict) else []
    texts = [(own.get("captions") or {}).get("text") for own in owns if not own.get("generate")]
    return ", ".join(dict.fromkeys(str(text) for text in texts if text))


def _own_words(usage: str, repository: str) -> str:
    """The words of the export itself, with its place on the hub."""
    return _OWN_CARD.sub("", usage).strip().replace(_PLACE, repository)


def _gallery(images: Sequence[Sample]) -> list[str]:
    if not images:
        return []
    rows = [
        f"| ![{i}]({image_file(i, one)}) | {_cell(one.prompt) or '(no prompt)'} | {_cell(one.seed)} |"
        for i, one in enumerate(images)
    ]
    head = f"Not cherry-picked: the images that the run made at update {images[0].step:,}."
    return ["## Images", head, "\n".join(["| image | prompt | seed |", "|---|---|---|", *rows])]


def _training(run: Run) -> list[str]:
    step, samples = facts.progress(run)
    seconds, settings = (
        run.curves.training_seconds,
        ("model.family", "objective.name", "data.resolution", "optimizer.name"),
    )
    rows = {
        "length": f"{counted(step, 'update')}, {counted(samples, 'sample')}",
        "time": format_duration(seconds) if seconds else "",
        "device": facts.hardware(run),
        **{name: run.setting(name) for name in (*settings, "optimizer.learning_rate", "training.global_batch_size")},
        "adapters": ", ".join(run.setting("adapters") or {}),
        "validation loss": run.curves.last("validation/loss"),
        "Daguerre": (run.environment.get("packages") or {}).get("daguerre"),
    }
    return ["## Training", _table(("", ""), [[name, value] for name, value in rows.items() if value not in ("", None)])]


def _data(run: Run) -> list[str]:
    sources = run.setting("data.sources")
    rows = []
    for name, own in sources.items() if isinstance(sources, dict) else ():
        if isinstance(own, dict):
            place = own.get("name") if own.get("source") == "huggingface" else ""
            rows.append([name, own.get("source"), place or "", own.get("captions", {}).get("text") or ""])
    count = run.data.get("count")
    said = [f"{counted(count, 'sample')} are trained on."] if isinstance(count, int) else []
    skipped = run.data.get("skipped")
    for reason, entry in skipped.items() if isinstance(skipped, dict) else ():
        number = entry.get("count") if isinstance(entry, dict) else entry
        said.append(f"Left out or noted: {number} ({_cell(reason)}).")
    if not rows and not said:
        return []
    return ["## Data", _table(("source", "kind", "data set", "caption of all images"), rows), " ".join(said)]


def _evaluation(run: Run) -> list[str]:
    """The section with the numbers of the run's end, and of `daguerre evaluate` at its newest checkpoint."""
    tables = [_measured(metric, body, body) for metric, body in run.evaluation.items() if isinstance(body, dict)]
    told = [(found, one["tables"]) for one in run.evaluations if isinstance(found := one.get("protocol"), dict)
            and isinstance(one.get("tables"), dict)]  # fmt: skip
    newest = max((protocol.get("step", 0) for protocol, _ in told), default=0)
    for protocol, of_protocol in told:
        if protocol.get("step", 0) == newest:
            bodies = [(name, body) for name, body in of_protocol.items() if isinstance(body, dict)]
            tables += [_measured(name, body, protocol) for name, body in bodies]
    return ["## Evaluation", *(filter(None, tables) if any(tables) else ["This run was not evaluated."])]


def _measured(name: str, body: Mapping[str, Any], protocol: Mapping[str, Any]) -> str:
    """A table of a metric, with what of its protocol tells it from others; empty without numbers."""
    listed = body.get("rows")
    rows = [[row.get("name"), row.get("value")] for row in listed or [] if isinstance(row, dict)]
    how = [f"{body['count']:,} images"] if isinstance(body.get("count"), int) else []
    how += [f"update {protocol['step']:,}"] if isinstance(protocol.get("step"), int) else []
    how += [f"{protocol['sampler']}, {protocol.get('num_inference_steps')} steps"] if "sampler" in protocol else []
    how += [f"guidance {protocol['guidance_scale']}"] if "guidance_scale" in protocol else []
    return _table((f"{name} ({', '.join(how)})" if how else name, "measured"), rows)


def _recipe(run: Run) -> list[str]:
    how = "`recipe.yaml` holds all settings: `daguerre train recipe.yaml` with your own data and `run_name` repeats it."
    return ["## Recipe", how]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) if rows else ""


def _cell(value: Any) -> str:
    """A value in a cell of a table in Markdown: one line, and no markup of its own."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return re.sub(r"([\\`*_\[\]<>|#!])", r"\\\1", " ".join(text.split()))
