"""Values of other trainers' names, translated: functions from the text that was given to our settings.

Each takes the name and the text of one `name=value`, then the arguments of its row in names.yaml (which says which
name means what), and gives a `Meaning`. Each raises UserError for a text that means nothing here.
"""

import csv
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from daguerre import documents, plugins
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
    "came": "came",
    "soap": "soap",
    "stableadamw": "stable_adamw",
}
"""Optimizers of other trainers, their names in small letters without `_` and `-`, and ours."""
NOT_PAGED = "the same update, but its state stays on the device: it is not paged to the host"
NOTHING_ASKED = ("none", "null", "")


@dataclass(frozen=True)
class Meaning:
    """The meaning of one `key=value` in our own names."""

    values: tuple[tuple[str, str], ...] = ()
    """Settings and the text that each is given."""
    notices: tuple[str, ...] = ()
    implied: tuple[tuple[str, Callable[[], str | None]], ...] = ()
    """Settings that follow where nothing else sets them, and how their text is found; None where they need none."""


def one(path: str, text: str) -> Meaning:
    return Meaning(((path, text),))


def notice(text: str) -> Meaning:
    """No setting, and a line that says why."""
    return Meaning((), (text,))


def number(name: str, text: str, more: str = "") -> float:
    """The number that a text is. UserError for another text."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} must be a number{more}, got {text!r}") from None


# Choices


def choose(key: str, text: str, options: Mapping[str, Mapping[str, str]]) -> Meaning:
    """One of some options, whatever its case. An option is our settings and their texts, and maybe a `notice`; or why
    it is `refused`; or a part that comes `later`."""
    found = next((option for name, option in options.items() if name.lower() == text.lower()), None)
    if found is None:
        known = [name for name, option in options.items() if name and not {"refused", "later"} & {*option}]
        raise UserError(f"{key} is one of {', '.join(known)}, got {text!r}")
    said = {name: line.replace("{}", text) for name, line in found.items()}
    if "refused" in said or "later" in said:
        raise UserError(said.get("refused") or f"{said['later']} is not supported yet", code="unsupported")
    lines = (said.pop("notice"),) if "notice" in said else ()
    return Meaning(tuple(said.items()), lines)


def renamed(key: str, text: str, path: str, names: Mapping[str, str]) -> Meaning:
    """One setting whose values have other names here."""
    return choose(key, text, {theirs: {path: ours} for theirs, ours in names.items()})


def section(key: str, text: str, options: Mapping[str, Mapping[str, str]]) -> Meaning:
    """One of some options, or a group {...}, which is our own section of the same name."""
    return one(key, text) if text.lstrip().startswith("{") else choose(key, text, options)


def sets(key: str, text: str, values: Mapping[str, str]) -> Meaning:
    """Several settings, `{}` in which is the text; spaces around it are left out where it is empty."""
    texts = {path: value.replace("{}", text) for path, value in values.items()}
    return Meaning(tuple((path, value if text else value.strip()) for path, value in texts.items()))


def one_class(key: str, text: str, *classes: str) -> Meaning:
    """The class of a component, which is one of a closed list."""
    return choose(key, text.rpartition(".")[2], {name: {"notice": "a class that it has anyway"} for name in classes})


def training_scheduler(key: str, text: str) -> Meaning:
    """The class of a scheduler whose noise levels in training are those of `scaled_linear`."""
    return one_class(
        key, text, *SCHEDULERS, "DDPMScheduler", "DDPMNoiseScheduler", "PNDMScheduler", "LMSDiscreteScheduler"
    )


def scheduler_class(key: str, text: str) -> Meaning:
    """The class of a scheduler that draws, as a sampler; empty text stands for the base's own."""
    name = text.rpartition(".")[2].removeprefix("Flax")
    if name == "PNDMScheduler":  # dpmpp_2m comes nearest in steps and order
        line = f"{name} is not available: images are generated with dpmpp_2m, which costs the same"
        return Meaning((("sampling.sampler", "dpmpp_2m"),), (line,))
    if not name:
        return notice("images are generated with the sampler of sampling.sampler")
    return renamed("a scheduler that draws", name, "sampling.sampler", SCHEDULERS)


# What sets nothing, or is refused


def unless(key: str, text: str, why: str, *off: str) -> Meaning:
    """A name that is refused, but for values that ask for nothing."""
    if text.lower() in (*off, *NOTHING_ASKED):
        return Meaning()
    raise UserError(f"not a Daguerre setting: {why}", code="unknown")


def expected(key: str, text: str, value: str, what: str, instead: str = "") -> Meaning:
    """A name that has one value here."""
    if text.lower() == value:
        return notice(f"{key}={text} is always so: {what}")
    raise UserError(instead or f"{what}, always: {key}={value} is accepted")


def absent(key: str, text: str, part: str, *off: str) -> Meaning:
    """A name that asks for a part which is not supported yet, but for values that ask for nothing."""
    if text.lower() in off:
        return notice(f"{key}={text} has no effect: {part} is not supported yet")
    accepted = f"; {key}={off[0]} is accepted" if off else ""
    raise UserError(f"{part} is not supported yet{accepted}", code="unsupported")


def unless_empty(key: str, text: str, path: str, otherwise: str) -> Meaning:
    """A text that MaxDiffusion leaves empty where it gives none; `otherwise` says what is then."""
    return one(path, text) if text else notice(f"no {path}: {otherwise}")


# Lengths and numbers


def counted(key: str, text: str, path: str, unit: str, off: str = "") -> Meaning:
    """A bare number in the unit that it has where the name comes from. 0 and -1 set the text `off`, if there is one;
    if it is `unset`, they ask for nothing, as no text does."""
    nothing = text in ("0", "-1")
    if off == "unset" and (nothing or text.lower() in NOTHING_ASKED):
        return Meaning()
    if off and nothing:
        return one(path, off)
    return one(path, f"{text} {unit}" if text.replace("_", "").isdigit() else text)


def cascade_warmup(key: str, text: str) -> Meaning:
    """Updates of a warm-up of Stable Cascade, whose first has a learning rate of 0: a warm-up of one has no effect."""
    return counted(key, "0" if text == "1" else text, "lr_scheduler.warmup", "steps")


def length(key: str, text: str, path: str, unit: str) -> Meaning:
    """A length in updates or epochs; kohya takes a warm-up below 1 for a share of the run."""
    if re.fullmatch(r"\d+(\.0*)?", text):
        return one(path, f"{int(float(text))} {unit}")
    if re.fullmatch(r"0?\.\d+", text):
        raise UserError(f"kohya's scripts read this as a share of the run: set a number of updates, such as {key}=500")
    return one(path, text)


def kept(key: str, text: str) -> Meaning:
    """A number of checkpoints that are kept; two is the least here."""
    if text.lower() in (*NOTHING_ASKED, "0"):
        return one("checkpoint.keep", "1000000")
    if text != "1":
        return one("checkpoint.keep", text)
    line = f"{key}=1: two are kept, because an old checkpoint is deleted only after a newer one is complete"
    return Meaning((("checkpoint.keep", "2"),), (line,))


def resumed(key: str, text: str) -> Meaning:
    """`resume_from_checkpoint`: their `checkpoint-500` is our `step-00000500`."""
    found = re.fullmatch(r"(?:.*/)?checkpoint-(\d+)/?", text)
    if found is None:
        return one(key, text)
    name = f"step-{int(found[1]):08d}"
    return Meaning(
        ((key, name),),
        (
            f"{key}={text}: the checkpoint of that update is called {name} here; checkpoints of other trainers "
            "cannot be read",
        ),
    )


def profiled(key: str, text: str) -> Meaning:
    """`profile=steps 10..15`: the updates that the profiler records."""
    found = re.fullmatch(r"(?:steps?\s+)?(\d+)\s*(?:\.\.\s*(\d+))?", text.strip())
    if text.lower() in NOTHING_ASKED:
        return one("profiler.steps", "null")
    if found is None:
        raise UserError(f"write the updates as in profile='steps 10..15', got {text!r}")
    return one("profiler.steps", f"[{found[1]}, {found[2] or found[1]}]")


def minutes(key: str, text: str, path: str) -> Meaning:
    return one(path, f"{number(key, text) * 60:g}")


def clipped(key: str, text: str) -> Meaning:
    """A limit of the gradients' norm, which at 0 or less is off."""
    off = text != "null" and number("max_grad_norm", text, " (0 or less: gradients are not clipped)") <= 0
    return one("training.max_grad_norm", "null" if off else text)


def rescaled(key: str, text: str) -> Meaning:
    """MaxDiffusion's `guidance_rescale`, which below 0 is off."""
    return one("sampling.guidance_rescale", "0" if number(key, text) < 0 else text)


def min_snr(key: str, text: str) -> Meaning:
    """Gamma, which at 0 or less is off."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    on = number(key, text, " (0 or less switches it off)") > 0
    name = "objective.weighting.name"
    return Meaning(((name, "min_snr"), ("objective.weighting.snr_gamma", text))) if on else one(name, "none")


def offset_noise(key: str, text: str) -> Meaning:
    """MindOne's `offset_noise_level`: one offset for all channels of a sample."""
    per_sample = (("objective.noise.offset_per", "sample"),) if number(key, text) else ()
    return Meaning((("objective.noise.offset", text), *per_sample))


def rate(key: str, text: str, pattern: str) -> Meaning:
    """A learning rate of a part of the model, by a pattern of parameters' names."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    if number(key, text) == 0:
        return notice(f"{key}=0: not trained there, as model.train_text_encoder=false says here")
    return one("optimizer.learning_rates", json.dumps({pattern: float(text)}))


def averaged(key: str, text: str, path: str) -> Meaning:
    """A setting of the averages, which are then kept."""
    return Meaning(((path, text),), implied=(("ema.enabled", lambda: "true"),))


def cascade_ema(key: str, text: str, path: str) -> Meaning:
    """A number of Stable Cascade's averages, which chooses their form as well."""
    number(path.partition(".")[2], text)
    found = averaged(key, text, path)
    return Meaning((("ema.name", "stable_cascade"), *found.values), implied=found.implied)


# Data


def placed(key: str, text: str, source: str = "") -> Meaning:
    """A path to data; its source is known, or found by what lies there, unless it is given."""
    listed = [part.strip() for part in text[1:-1].split(",")] if text.startswith("[") else [text]

    def kind() -> str:
        from daguerre.data.tools import detect  # imports pyarrow, which most settings need not wait for

        return source or detect.kind(listed)

    def name() -> str | None:
        with suppress(UserError):  # of unknown kind: said where the source is looked for
            return "null" if kind() == "huggingface" else None  # a data set has a path or a name
        return None

    return Meaning((("data.path", text),), implied=(("data.source", kind), ("data.name", name)))


def mindone_data(key: str, text: str) -> Meaning:
    """MindOne's `data_path`: a folder whose CSV files have the columns `dir` (paths) and `text`, one with the
    prompt.json of ControlNet's data (a line {source, target, prompt} for each image), or as `placed`."""
    folder = Path(text).expanduser()
    if (prompts := folder / "prompt.json").is_file():
        keys = {"image_column": "target", "caption_column": "prompt", "control_column": "source"}
        implied = (("data.source", lambda: "jsonl"), *((f"data.{name}", lambda k=key: k) for name, key in keys.items()))
        return Meaning((("data.path", str(prompts)),), implied=implied)
    tables = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not tables or not {"dir", "text"} <= _columns(tables[0]):
        return placed(key, text)
    columns = (("data.image_column", lambda: "dir"), ("data.caption_column", lambda: "text"))
    return Meaning((("data.path", text),), implied=(("data.source", lambda: "csv"), *columns))


def _columns(table: Path) -> set[str]:
    with table.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return set(next(csv.reader(file), []))


def data_set(key: str, text: str) -> Meaning:
    """MaxDiffusion's `dataset_name`: a data set of the hub, or a path; the name of a source here is that source."""
    if not text:
        raise UserError("it is empty: give the name of a data set on the hub, or a path")
    if plugins.exists("sources", text):
        return one("data.source", text)
    if Path(text).expanduser().exists():
        return placed(key, text)
    return Meaning((("data.source", "huggingface"), ("data.name", text)))


def repeats_of(folder: Path) -> dict[Path, tuple[int, str]]:
    """Folders named as kohya's DreamBooth data sets are (`10_sks dog`): how often each is repeated, and its caption."""
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = {path: re.fullmatch(r"(\d+)_(.*)", path.name, re.DOTALL) for path in below}
    return {path: (int(name[1]), name[2]) for path, name in found.items() if name and int(name[1])}


def train_data(key: str, text: str) -> Meaning:
    """`train_data_dir`: in diffusers' scripts a folder of images, in kohya's one of folders such as `10_sks dog`."""
    if not text:
        return notice("train_data_dir is empty: another option names the data set")
    if found := repeats_of(Path(text).expanduser()):
        path, (repeats, caption) = next(iter(found.items()))
        raise UserError(
            f"its {len(found)} folder{'s' * (len(found) > 1)} such as {path.name!r} have the layout of kohya's "
            "scripts (repeats and caption in the folder's name). One of them is data.source=folder "
            f"data.path={str(path)!r} data.repeats={repeats}, with data.captions.text={caption!r} if there are no "
            "captions; `daguerre convert config` turns kohya's TOML into a mix of all of them"
        )
    return placed(key, text, "folder")


def sized(key: str, text: str) -> Meaning:
    """`resolution`: kohya also writes `512,512`."""
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2:
        return one("data.resolution", text)
    if sides[0] == sides[1]:
        return one("data.resolution", sides[0])
    area = number(key, sides[0]) * number(key, sides[1])
    raise UserError(
        "one number here: the side of the square, or with buckets the root of their largest area "
        f"({round(area**0.5)} for this one)"
    )


def caption_file(key: str, text: str) -> Meaning:
    """kohya's `caption_extension`, also without its dot: .txt files are what is read anyway."""
    if f".{text.lstrip('.')}" == ".txt":
        return notice("caption_extension=.txt is the default: cat.txt has the caption of cat.jpg")
    return Meaning((("data.caption_extension", f".{text.lstrip('.')}"),))


# Models, optimizers, devices


def base_model(key: str, text: str) -> Meaning:
    """MindOne's `weight`; its own checkpoints are MindSpore's."""
    if text.endswith(".ckpt"):
        raise UserError(
            f"{key}={text}: checkpoints of MindSpore cannot be read. Give the model that it was made from (a hub id, "
            "a folder in diffusers' layout or a .safetensors file); a .ckpt of torch is "
            "pretrained_model_name_or_path=FILE pickled_weights=true"
        )
    return one("model.pretrained_model_name_or_path", text)


def optimizer(key: str, text: str) -> Meaning:
    """An optimizer's name; a group {...} is our own section."""
    if text.lstrip().startswith("{"):
        return one("optimizer", text)
    # kohya's scripts import others by a module's name, such as pytorch_optimizer.CAME.
    plain = text.rpartition(".")[2].lower().replace("_", "").replace("-", "")
    if plugins.exists("optimizers", text):
        return one("optimizer.name", text)
    if plain in OPTIMIZERS:
        return Meaning((("optimizer.name", OPTIMIZERS[plain]),), (NOT_PAGED,) if plain.startswith("paged") else ())
    if plain == "adamwbf16":
        return Meaning((("optimizer.name", "adamw"), ("training.weights_dtype", "bfloat16")))
    raise UserError(f"{key} is one of {', '.join(plugins.names('optimizers'))} here, got {text!r}")


_OPTIMIZER_ARGS = {
    **{name: f"optimizer.{name}" for name in ("weight_decay", "beta3", "d0", "d_coef", "growth_rate")},
    **{name: f"optimizer.{name}" for name in ("use_bias_correction", "safeguard_warmup", "decay_rate")},
    **{name: f"optimizer.{name}" for name in ("clip_threshold", "precondition_frequency", "max_precondition_dim")},
    "eps": "optimizer.epsilon",
}
_OPTIMIZER_OFF = {"relative_step": "false", "scale_parameter": "false", "warmup_init": "false", "decouple": "true"}


def optimizer_args(key: str, text: str) -> Meaning:
    """kohya's `optimizer_args`: a list of `name=value`, such as `["weight_decay=0.1", "betas=0.9,0.99"]`."""
    found: list[tuple[str, str]] = []
    pairs = [part for item in listed(text) for part in (shlex.split(item) if item.count("=") > 1 else [item])]
    for pair in pairs:
        name, _, value = (part.strip() for part in pair.partition("="))
        if name == "betas":
            betas = (beta.strip(" ()") for beta in value.split(","))
            found += zip(("optimizer.beta1", "optimizer.beta2", "optimizer.beta3"), betas, strict=False)
        elif name == "eps" and "," in value:
            sizes = (size.strip(" ()") for size in value.split(","))
            found += zip(("optimizer.epsilon", "optimizer.residual_epsilon"), sizes, strict=False)
        elif name in _OPTIMIZER_ARGS:
            found.append((_OPTIMIZER_ARGS[name], value))
        elif value.lower() != _OPTIMIZER_OFF.get(name):
            allowed = ", ".join(("betas", *_OPTIMIZER_ARGS, *(f"{n}={v}" for n, v in _OPTIMIZER_OFF.items())))
            raise UserError(f"optimizer_args: {pair} is not known here; known are {allowed}")
    return Meaning(tuple(found))


def listed(text: str) -> list[str]:
    """The members of a list as JSON or TOML write it, or the words of a text."""
    if not text.startswith("["):
        return shlex.split(text)
    try:
        return [str(item) for item in documents.parse(text)]
    except ValueError:
        return [item.strip(" '\"") for item in text.strip("[] ").split(",") if item.strip()]


def is_parallel(key: str, text: str) -> Meaning:
    """MindOne's `is_parallel`, compared with how the job was launched."""
    if text.lower() not in ("true", "false"):
        raise UserError(f"is_parallel must be True or False, got {text!r}")
    launched = environment.read()
    if text.lower() == "true" and launched.size == 1:
        raise UserError(
            f"is_parallel={text}, but only one process was started: start the run with torchrun or srun, or remove it"
        )
    if text.lower() == "false" and launched.size > 1:
        raise UserError(f"is_parallel={text}, and {launched} were started: start one, or remove it")
    return notice(f"is_parallel={text} has no effect: {launched}")


# Generated images


def drawn(key: str, text: str) -> Meaning:
    """One prompt of the images that a run generates."""
    return one("sampling.prompts", json.dumps([text], ensure_ascii=False))


def prompts(key: str, text: str) -> Meaning:
    """`validation_prompt`, `validation_prompts`: what is generated at each save."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    return one("sampling.prompts", text) if text.startswith("[") else drawn(key, text)


def prompt_lines(lines: Iterable[str]) -> list[str]:
    """The prompts among the lines of kohya's `sample_prompts`: those that start with # are comments."""
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def prompts_file(key: str, text: str) -> Meaning:
    """kohya's `sample_prompts`: a file with one prompt a line, where lines may hold options such as `--w 768`."""
    path = Path(text).expanduser()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    if path.suffix in (".toml", ".json") or any(re.search(r"\s--\w", line) for line in lines):
        raise UserError(
            f"{text} has options after its prompts, which cannot be used here: give a text file with one prompt a "
            "line, and sampling.width, sampling.height, sampling.guidance_scale ... for all of them"
        )
    kept = prompt_lines(lines)
    if len(kept) < sum(bool(line.strip()) for line in lines):
        return one("sampling.prompts", json.dumps(kept, ensure_ascii=False))
    return one("sampling.prompts_file", text)


def sampler(text: str) -> str:
    """A sampler's name here, for one of A1111, ComfyUI, kohya's trainer or diffusers; another text stays as it is."""
    name = text.strip().lower().replace("++", "pp").replace(" ", "_").removeprefix("k_")
    known = SAMPLERS.get(name, name)
    return known if plugins.exists("samplers", known) else text


def named_sampler(key: str, text: str) -> Meaning:
    """A sampler's name in kohya's scripts, or diffusers' class."""
    if plugins.exists("samplers", sampler(text)):
        return one("sampling.sampler", sampler(text))
    raise UserError(f"{key}={text} is not available; there are {', '.join(plugins.names('samplers'))}")
