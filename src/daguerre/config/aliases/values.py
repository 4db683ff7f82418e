"""What the values of other trainers' names become: functions from the text that was given to our settings.

Each takes the text of one `key=value` and gives a `Meaning`. Which name means what is the table in `alias_names`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daguerre import plugins
from daguerre.data.tools import detect
from daguerre.distributed.launch import environment
from daguerre.errors import UserError
from daguerre.samplers.settings import SCHEDULERS

SAMPLERS = {
    **{name.lower(): sampler for name, sampler in SCHEDULERS.items()},
    "euler_a": "euler_ancestral",
    "uni_pc": "unipc",
    "uni_pc_bh2": "unipc",
    "dpmsolverpp": "dpmpp_2m",
}
"""Names of samplers elsewhere, in small letters, `pp` for `++`, `_` for spaces, without k-diffusion's `k_`."""

NOTHING_ASKED = ("none", "null", "")


@dataclass(frozen=True)
class Meaning:
    """What one `key=value` says in our own names."""

    values: tuple[tuple[str, str], ...] = ()
    """Settings and the text that each is given."""
    notices: tuple[str, ...] = ()
    implied: tuple[tuple[str, Callable[[], str | None]], ...] = ()
    """Settings that follow where nothing else sets them, and how their text is found; None where they need none."""


Convert = Callable[[str], Meaning]


def one(path: str, text: str) -> Meaning:
    """One setting."""
    return Meaning(((path, text),))


def choose(key: str, options: Mapping[str, Meaning], later: Mapping[str, str] | None = None) -> Convert:
    """A converter that looks the value up, whatever its case; `later` holds the values that are not there yet."""

    def convert(text: str) -> Meaning:
        found = {name.lower(): meaning for name, meaning in options.items()}.get(text.lower())
        if found is not None:
            return found
        absent = {name.lower(): what for name, what in (later or {}).items()}.get(text.lower())
        raise UserError(
            f"{absent} is not there yet" if absent else f"{key} is one of {', '.join(options)}, got {text!r}"
        )

    return convert


def values(path: str, texts: Mapping[str, str]) -> dict[str, Meaning]:
    """Options of `choose` that all set one path."""
    return {name: one(path, text) for name, text in texts.items()}


def counted(path: str, unit: str) -> Convert:
    """A converter of a bare number in the unit that it has where the name comes from; -1 and 0 switch off."""

    def convert(text: str) -> Meaning:
        off = text in ("-1", "0") and path.startswith("checkpoint.")
        return one(path, "null" if off else f"{text} {unit}" if text.replace("_", "").isdigit() else text)

    return convert


def averaged(path: str) -> Convert:
    """A converter to a setting of the averages, which are then kept."""
    return lambda text: Meaning(((path, text),), implied=(("ema.enabled", lambda: "true"),))


def cascade_ema(path: str) -> Convert:
    """A converter of a number of Stable Cascade's averages, which chooses their form as well."""

    def convert(text: str) -> Meaning:
        number(path.partition(".")[2], text)
        kept = averaged(path)(text)
        return Meaning((("ema.name", "stable_cascade"), *kept.values), implied=kept.implied)

    return convert


def clipped(text: str) -> Meaning:
    """A limit of the gradients' norm, which at 0 or less is off."""
    off = text != "null" and number("max_grad_norm", text, " (0 or less: gradients are not clipped)") <= 0
    return one("training.max_grad_norm", "null" if off else text)


def rescaled(text: str) -> Meaning:
    """MaxDiffusion's `guidance_rescale`, which below 0 is off."""
    return one("sampling.guidance_rescale", "0" if number("guidance_rescale", text) < 0 else text)


def unless_empty(path: str, otherwise: str) -> Convert:
    """A converter of a text that MaxDiffusion leaves empty where it gives none; `otherwise` says what is then."""
    return lambda text: one(path, text) if text else Meaning((), (f"no {path}: {otherwise}",))


def drawn(text: str) -> Meaning:
    """One prompt of the pictures that a run draws."""
    return one("sampling.prompts", json.dumps([text], ensure_ascii=False))


NEAREST_SAMPLER = {"PNDMScheduler": "dpmpp_2m"}
"""Schedulers that are not there, and the sampler that comes nearest in steps and order."""
PREDICTIONS = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}
"""diffusers' prediction types and the objectives that they are."""


def scheduler_class(text: str) -> Meaning:
    """The class of a scheduler that draws, as a sampler; empty text stands for the base's own."""
    name = text.rpartition(".")[2].removeprefix("Flax")
    if name in NEAREST_SAMPLER:
        sampler = NEAREST_SAMPLER[name]
        said = f"{name} is not there: pictures are drawn by {sampler}, of the same cost"
        return Meaning((("sampling.sampler", sampler),), (said,))
    if not name:
        return Meaning((), ("sampling.sampler says how pictures are drawn",))
    return choose("a scheduler that draws", values("sampling.sampler", SCHEDULERS))(name)


def prediction(text: str) -> Meaning:
    """diffusers' `prediction_type`; empty text stands for the model's own."""
    if not text:
        return Meaning((), ("objective.name says what is predicted",))
    return choose("prediction_type", values("objective.name", PREDICTIONS))(text)


PACK = (
    "records of TensorFlow and grain cannot be read: give the pictures that they were made from (data.path=...), or "
    "make shards of those once: daguerre data pack PICTURES -o SHARDS, then data_path=SHARDS"
)


def reader(text: str) -> Meaning:
    """MaxDiffusion's `dataset_type`: which of its readers."""
    if text in ("tfrecord", "grain"):
        raise UserError(PACK)
    if text == "synthetic":
        raise UserError("made-up batches are for timing: daguerre bench")
    said = Meaning((), ("dataset_type: data.source says what is read",))
    return choose("dataset_type", dict.fromkeys(("tf", "hf", ""), said))(text)


def token(text: str) -> Meaning:
    """A token of the hub, which is a secret."""
    if text:
        raise UserError("secrets never belong on the command line or in a recipe: the environment holds HF_TOKEN")
    return Meaning((), ("hf_access_token is empty: the environment may hold HF_TOKEN",))


def component(part: str, classes: Sequence[str]) -> Convert:
    """A converter of the class of a component, which is one of a closed list."""
    said = Meaning((), (f"model.{part}: a class that it has anyway",))

    def convert(text: str) -> Meaning:
        return choose(f"the class of model.{part}", dict.fromkeys(classes, said))(text.rpartition(".")[2])

    return convert


def min_snr(key: str) -> Convert:
    """A converter of gamma, which at 0 or less is off; `none` and empty text ask for nothing."""

    def convert(text: str) -> Meaning:
        if text.lower() in NOTHING_ASKED:
            return Meaning()
        on = number(key, text, " (0 or less switches it off)") > 0
        name = "objective.weighting.name"
        return Meaning(((name, "min_snr"), ("objective.weighting.snr_gamma", text))) if on else one(name, "none")

    return convert


def offset_noise(text: str) -> Meaning:
    """MindOne's `offset_noise_level`: one offset for all channels of a sample."""
    offset = one("objective.noise.offset", text)
    if number("offset_noise_level", text) == 0:
        return offset
    return Meaning((*offset.values, ("objective.noise.offset_per", "sample")))


def number(name: str, text: str, more: str = "") -> float:
    """The number that a text is. UserError for another text."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} is a number{more}, got {text!r}") from None


def placed(source: str = "") -> Convert:
    """A converter of a path to data; its source is known, or told by what lies there, unless it is given."""

    def convert(text: str) -> Meaning:
        def kind() -> str:
            return source or detect.kind(_listed(text))

        def name() -> str | None:
            with suppress(UserError):  # of unknown kind: said where the source is looked for
                return "null" if kind() == "huggingface" else None  # a data set has a path or a name
            return None

        return Meaning((("data.path", text),), implied=(("data.source", kind), ("data.name", name)))

    return convert


def mindone_data(text: str) -> Meaning:
    """MindOne's `data_path`: a folder whose CSV files have the columns `dir` (paths) and `text`, or as `placed`."""
    folder = Path(text).expanduser()
    tables = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not tables or not {"dir", "text"} <= _columns(tables[0]):
        return placed()(text)
    columns = (("data.image_column", lambda: "dir"), ("data.caption_column", lambda: "text"))
    return Meaning((("data.path", text),), implied=(("data.source", lambda: "csv"), *columns))


def _columns(table: Path) -> set[str]:
    with table.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return set(next(csv.reader(file), []))


def _listed(text: str) -> Sequence[str]:
    return [part.strip() for part in text[1:-1].split(",")] if text.startswith("[") else [text]


def verbatim(path: str, *more: tuple[str, str]) -> Convert:
    """A converter of text that sets something else beside."""
    return lambda text: Meaning((*more, (path, text)))


def with_prior(text: str) -> Meaning:
    """diffusers' `with_prior_preservation`: whether there is a class set beside the instance set."""
    if text.lower() == "true":
        return Meaning((), (f"with_prior_preservation={text} is what happens anyway: there is a class set",))
    raise UserError(
        "train the instance set alone instead: data.source=folder data.path=DIR 'data.captions.text=a photo of ...'"
    )


def data_set(text: str) -> Meaning:
    """MaxDiffusion's `dataset_name`: a data set of the hub, or a path; the name of a source here is that source."""
    if not text:
        raise UserError("it names no data set: give one of the hub or a path")
    if text in plugins.names("sources"):
        return one("data.source", text)
    if Path(text).expanduser().exists():
        return placed()(text)
    return Meaning((("data.source", "huggingface"), ("data.name", text)))


def base_model(text: str) -> Meaning:
    """MindOne's `weight`; its own checkpoints are MindSpore's."""
    if text.endswith(".ckpt"):
        raise UserError(
            f"weight={text}: checkpoints of MindSpore cannot be read. Give the model that it was made from (a hub id, "
            "a folder in diffusers' layout or a .safetensors file); a .ckpt of torch is "
            "pretrained_model_name_or_path=FILE pickled_weights=true"
        )
    return one("model.pretrained_model_name_or_path", text)


def requeue(text: str) -> Meaning:
    """open-diffusion's `requeue`: whether the same command goes on with the run, or refuses one that exists."""
    options = values("resume_from_checkpoint", {"True": "latest", "False": "never"})
    return choose("requeue", options)(text)


def in_a_node(data: int, fsdp: int) -> Meaning:
    """Degrees of the mesh inside a node; -1 is what the others leave."""
    return Meaning((("mesh.ici_data_parallelism", str(data)), ("mesh.ici_fsdp_parallelism", str(fsdp))))


def is_parallel(text: str) -> Meaning:
    """MindOne's `is_parallel`, compared with how the job was launched."""
    if text.lower() not in ("true", "false"):
        raise UserError(f"is_parallel is one of True, False, got {text!r}")
    launched = environment.read()
    if text.lower() == "true" and launched.size == 1:
        raise UserError(
            f"is_parallel={text}, and one process was launched: start it by torchrun or srun, or leave it out"
        )
    if text.lower() == "false" and launched.size > 1:
        raise UserError(f"is_parallel={text}, and {launched} were launched: start one, or leave it out")
    return Meaning((), (f"is_parallel={text} is what happens anyway: {launched}",))


def sampler(text: str) -> str:
    """A sampler's name here, for one of A1111, ComfyUI, kohya's trainer or diffusers; another text stays as it is."""
    name = text.strip().lower().replace("++", "pp").replace(" ", "_").removeprefix("k_")
    known = SAMPLERS.get(name, name)
    return known if known in plugins.names("samplers") else text
