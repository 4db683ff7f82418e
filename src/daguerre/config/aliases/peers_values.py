"""What the values of diffusers', kohya's and others' names become: functions from a given text to our settings.

Which name means what is the table in `alias_peers`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from daguerre import plugins
from daguerre.config.aliases.values import NOTHING_ASKED, Convert, Meaning, choose, number, one, placed, values
from daguerre.config.aliases.values import sampler as named_sampler
from daguerre.errors import UserError

OPTIMIZERS = {
    "adamw": "adamw",
    "adamw8bit": "adamw_8bit",
    "pagedadamw8bit": "adamw_8bit",
    "lion": "lion",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
    "adamwschedulefree": "schedule_free",
    "schedulefreeadamw": "schedule_free",
    "muon": "muon",
}
"""Optimizers of other trainers, their names in small letters without `_` and `-`, and ours."""
SCHEDULES = ("linear", "cosine", "polynomial", "warmup_stable_decay")


def switch(key: str, true: Meaning, false: Meaning | None = None) -> Convert:
    """A converter of True and False; False asks for nothing where it says nothing else."""
    return choose(key, {"True": true, "False": false or Meaning()})


def idle(key: str, why: str) -> Convert:
    """A converter of a name that sets nothing here: one line says why, or what serves instead."""
    return lambda text: Meaning((), (f"{key} sets nothing here: {why}",))


def unless(off: Sequence[str], why: str) -> Convert:
    """A converter of a name that is refused, but for values that ask for nothing."""

    def convert(text: str) -> Meaning:
        if text.lower() in (*off, *NOTHING_ASKED):
            return Meaning()
        raise UserError(f"not a setting here: {why}")

    return convert


def expected(key: str, value: str, what: str) -> Convert:
    """A converter of a name that has one value here; another one is an error."""

    def convert(text: str) -> Meaning:
        if text.lower() == value.lower():
            return Meaning((), (f"{key}={text} is what happens anyway: {what}",))
        raise UserError(f"{what}: {key}={value} is accepted")

    return convert


def epochs(text: str) -> Meaning:
    """`num_train_epochs`, `max_train_epochs`: passes over the data; 0 leaves the length to the number of updates."""
    if text in ("0", "-1") or text.lower() in NOTHING_ASKED:
        return Meaning()
    return one("training.duration", f"{text} epochs" if text.isdigit() else text)


def updates(path: str) -> Convert:
    """A converter of a number of updates; 0 and less ask for nothing."""

    def convert(text: str) -> Meaning:
        if text in ("0", "-1") or text.lower() in NOTHING_ASKED:
            return Meaning()
        return one(path, f"{text} steps" if text.replace("_", "").isdigit() else text)

    return convert


def length(key: str, path: str, unit: str = "steps") -> Convert:
    """A converter of a length in updates or epochs; kohya takes a warm-up below 1 for a share of the run."""

    def convert(text: str) -> Meaning:
        if re.fullmatch(r"\d+(\.0*)?", text):
            return one(path, f"{int(float(text))} {unit}")
        if re.fullmatch(r"0?\.\d+", text):
            raise UserError(f"a share of the run in kohya's scripts: give updates, as in {key}=500")
        return one(path, text)

    return convert


def schedule(text: str) -> Meaning:
    """`lr_scheduler`: the schedule's name in diffusers' and kohya's scripts; a group {...} is our own section."""
    name = "lr_scheduler.name"
    if text.lstrip().startswith("{"):
        return one("lr_scheduler", text)
    once = "one cycle of cosine_with_restarts is cosine; further ones are not there yet"
    options = {
        "constant": Meaning(((name, "constant"), ("lr_scheduler.warmup", "0 steps"))),
        "constant_with_warmup": one(name, "constant"),
        **{kind: one(name, kind) for kind in SCHEDULES},
        "cosine_with_restarts": Meaning(((name, "cosine"),), (once,)),
        "cosine_with_min_lr": one(name, "cosine"),
    }
    later = dict.fromkeys(("adafactor", "inverse_sqrt", "piecewise_constant", "rex", "sine"), f"the schedule {text}")
    return choose("lr_scheduler", options, later)(text)


def optimizer(key: str) -> Convert:
    """A converter of an optimizer's name; a group {...} is our own section."""

    def convert(text: str) -> Meaning:
        if text.lstrip().startswith("{"):
            return one("optimizer", text)
        plain = text.lower().replace("_", "").replace("-", "")
        if text in plugins.names("optimizers"):
            return one("optimizer.name", text)
        if plain in OPTIMIZERS:
            return one("optimizer.name", OPTIMIZERS[plain])
        if plain == "adamwbf16":
            return Meaning((("optimizer.name", "adamw"), ("training.weights_dtype", "bfloat16")))
        raise UserError(f"{key} is one of {', '.join(plugins.names('optimizers'))} here, got {text!r}")

    return convert


_OPTIMIZER_ARGS = {
    **{name: f"optimizer.{name}" for name in ("weight_decay", "beta3", "d0", "d_coef", "growth_rate")},
    **{name: f"optimizer.{name}" for name in ("use_bias_correction", "safeguard_warmup", "decay_rate")},
    "eps": "optimizer.epsilon",
}
_OPTIMIZER_OFF = {"relative_step": "false", "scale_parameter": "false", "warmup_init": "false", "decouple": "true"}


def optimizer_args(text: str) -> Meaning:
    """kohya's `optimizer_args`: a list of `name=value`, such as `["weight_decay=0.1", "betas=0.9,0.99"]`."""
    values: list[tuple[str, str]] = []
    pairs = [part for item in listed(text) for part in (shlex.split(item) if item.count("=") > 1 else [item])]
    for pair in pairs:
        name, _, value = (part.strip() for part in pair.partition("="))
        if name == "betas":
            values += zip(
                ("optimizer.beta1", "optimizer.beta2"), (b.strip(" ()") for b in value.split(",")), strict=False
            )
        elif name in _OPTIMIZER_ARGS:
            values.append((_OPTIMIZER_ARGS[name], value))
        elif value.lower() != _OPTIMIZER_OFF.get(name):
            allowed = ", ".join(("betas", *_OPTIMIZER_ARGS, *(f"{n}={v}" for n, v in _OPTIMIZER_OFF.items())))
            raise UserError(f"optimizer_args: {pair} has no meaning here; there are {allowed}")
    return Meaning(tuple(values))


def listed(text: str) -> list[str]:
    """The members of a list as JSON or TOML write it, or the words of a text."""
    if not text.startswith("["):
        return shlex.split(text)
    try:
        return [str(item) for item in json.loads(text)]
    except ValueError:
        return [item.strip(" '\"") for item in text.strip("[] ").split(",") if item.strip()]


def kept(key: str) -> Convert:
    """A converter of a number of checkpoints that are kept; two is the least here."""

    def convert(text: str) -> Meaning:
        if text.lower() in (*NOTHING_ASKED, "0"):
            return one("checkpoint.keep", "1000000")
        notice = f"{key}=1: two are kept, as an older one is deleted after a newer one is safe"
        return Meaning((("checkpoint.keep", "2" if text == "1" else text),), (notice,) if text == "1" else ())

    return convert


def resumed(text: str) -> Meaning:
    """`resume_from_checkpoint`: their `checkpoint-500` is our `step-00000500`."""
    found = re.fullmatch(r"(?:.*/)?checkpoint-(\d+)/?", text)
    if found is None:
        return one("resume_from_checkpoint", text)
    name = f"step-{int(found[1]):08d}"
    notice = f"resume_from_checkpoint={text}: the state of that update is called {name} here; theirs cannot be read"
    return Meaning((("resume_from_checkpoint", name),), (notice,))


def prompts(text: str) -> Meaning:
    """`validation_prompt`, `validation_prompts`: what is drawn at each save."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    return one("sampling.prompts", text if text.startswith("[") else json.dumps([text], ensure_ascii=False))


def prompts_file(text: str) -> Meaning:
    """kohya's `sample_prompts`: a file with one prompt a line, where lines may hold options such as `--w 768`."""
    path = Path(text).expanduser()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    if path.suffix in (".toml", ".json") or any(re.search(r"\s--\w", line) for line in lines):
        raise UserError(
            f"{text} holds options beside its prompts, which have no meaning here: give a text file with one prompt a "
            "line, and sampling.width, sampling.height, sampling.guidance_scale ... for all of them"
        )
    return one("sampling.prompts_file", text)


def sampler(key: str) -> Convert:
    """A converter of a sampler's name in kohya's scripts, or of diffusers' class."""

    def convert(text: str) -> Meaning:
        ours = named_sampler(text)
        if ours in plugins.names("samplers"):
            return one("sampling.sampler", ours)
        raise UserError(f"{key}={text} is not there; there are {', '.join(plugins.names('samplers'))}")

    return convert


def sized(text: str) -> Meaning:
    """`resolution`: kohya also writes `512,512`."""
    sides = [side.strip() for side in text.split(",")]
    if len(sides) == 2 and sides[0] == sides[1]:
        return one("data.resolution", sides[0])
    if len(sides) == 2:
        raise UserError(
            f"one number here: the side of the square, or with buckets the root of their largest area "
            f"({round((number('resolution', sides[0]) * number('resolution', sides[1])) ** 0.5)} for this one)"
        )
    return one("data.resolution", text)


def rates(*patterns: str) -> Callable[[str], Convert]:
    """A converter of learning rates of parts of the model, by patterns of parameters' names."""

    def named(key: str) -> Convert:
        def convert(text: str) -> Meaning:
            if text.lower() in NOTHING_ASKED:
                return Meaning()
            if number(key, text) == 0:
                return Meaning((), (f"{key}=0: not trained there, as model.train_text_encoder=false says here",))
            return one("optimizer.learning_rates", json.dumps(dict.fromkeys(patterns, float(text))))

        return convert

    return named


def tokens(text: str) -> Meaning:
    """kohya's `max_token_length`: 75 cuts captions, 150 and 225 read them in windows of 75."""
    if text in ("75", "77") or text.lower() in NOTHING_ASKED:
        return one("model.long_prompts", "false")
    if text not in ("150", "225"):
        raise UserError(f"max_token_length is 75, 150 or 225, got {text!r}")
    notice = f"max_token_length={text}: captions of any length are read in windows of 75 tokens"
    return Meaning((("model.long_prompts", "true"),), (notice,))


def trackers(key: str) -> Convert:
    """A converter of what numbers are reported to."""
    named = values("logging.tensorboard", {"tensorboard": "true", "none": "false", "null": "false"})
    wandb = "tracking by Weights & Biases"
    return choose(key, named, {"wandb": wandb, "all": wandb, "comet_ml": "tracking by Comet", "mlflow": "MLflow"})


def minutes(text: str) -> Meaning:
    """kohya's `ddp_timeout`."""
    return one("distributed.timeout_seconds", f"{number('ddp_timeout', text) * 60:g}")


def caption_file(text: str) -> Meaning:
    """kohya's `caption_extension`: captions beside pictures are in .txt files here."""
    if f".{text.lstrip('.')}" == ".txt":
        return Meaning((), ("caption_extension=.txt is what happens anyway: cat.txt is the caption of cat.jpg",))
    raise UserError(
        f"captions beside pictures are read from .txt and .json files: rename the {text} files, or list them in a "
        "metadata.jsonl"
    )


def repeats_of(folder: Path) -> dict[Path, tuple[int, str]]:
    """Folders named as kohya's DreamBooth data sets are (`10_sks dog`): how often each is repeated, and its caption."""
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {path: re.fullmatch(r"(\d+)_(.*)", path.name, re.DOTALL) for path in below}
    return {path: (int(name[1]), name[2]) for path, name in found.items() if name and int(name[1])}


def train_data(text: str) -> Meaning:
    """`train_data_dir`: in diffusers' scripts a folder of pictures, in kohya's one of folders such as `10_sks dog`."""
    if not text:
        return Meaning((), ("train_data_dir is empty: the data set is named otherwise",))
    if found := repeats_of(Path(text).expanduser()):
        path, (repeats, caption) = next(iter(found.items()))
        raise UserError(
            f"its {len(found)} folder{'s' * (len(found) > 1)} such as {path.name!r} are a data set of kohya's scripts "
            f"(repeats and caption in the name). One of them is data.source=folder data.path={str(path)!r} "
            f"data.repeats={repeats}, with data.captions.text={caption!r} if there are no captions; "
            "`daguerre convert config` makes a mix of all from kohya's TOML"
        )
    return placed("folder")(text)
