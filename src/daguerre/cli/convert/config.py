"""A recipe from a config of another trainer: kohya's TOML, OneTrainer, MaxDiffusion, MindOne and others.

usage: daguerre convert config FILE [out=FILE]

Reads a config of another trainer, detects which one and writes a recipe. What is lost is printed: keys that ask for
what is not supported here, or that this trainer does not read. The rest is counted, and listed by --all.

  daguerre convert config base14.yml
  daguerre convert config configs/training/sd_xl_base_finetune_910b_edm.yaml out=my-edm.yaml
  daguerre train base14.yml run_name=mine output_dir=out     the same in memory, where nothing of the config is lost

  out=FILE     the new recipe (default: NAME-daguerre.yaml in the current folder)
  --all        lists every key: what is lost, what is carried (our setting and its value), what sets nothing here
               and why, and what that trainer does without being asked

Understood are MaxDiffusion's flat files (base14.yml, base_xl.yml ...), MindOne SDXL's trees of target and params,
open-diffusion's groups with ??? and interpolation, Stable Cascade's configs; and kohya's TOML (with its
dataset_config) and the JSON of its GUI, OneTrainer's JSON, ai-toolkit's YAML and JSON, SimpleTuner's JSON and
config.env. What must be given there must be given here, and is named at the end. Refused keys do not stop it.

Exit code 0: the recipe is written and passes the check (but for what must be given). 2: it cannot be trained, because
its family is not supported yet, in which case it is still written; or because a value of the
config fits no setting here, or because it trains something else than networks, a LoRA, a ControlNet or new tokens
(SDXL's refiner, DreamBooth of MaxDiffusion), in which cases nothing is written. docs/coming-from.md says more.
"""

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from daguerre import errors, trees
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.cli import doctor
from daguerre.cli.convert import options
from daguerre.cli.parts import out_file
from daguerre.config import config as configs
from daguerre.config import converted, short_forms
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError, Problem
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.foreign import converters, files, signs
from daguerre.foreign.converters import CONVERT
from daguerre.foreign.reader import REQUIRED, Reading, references
from daguerre.formatting import shown
from daguerre.models.weights import resolve
from daguerre.settings import Settings
from daguerre.trees import Tree

ALL = "--all"
"""Asks for every key, and not for what is lost alone."""

_BASE = "pretrained_model_name_or_path"
_WEIGHTS = (".safetensors", ".ckpt")


class Options(Settings):
    """Options of `convert config`."""

    out: str | None = None


def run(arguments: list[str]) -> int:
    """Writes the recipe and the list; 0, or a UserError."""
    everything = ALL in arguments
    path, out = read([word for word in arguments if word != ALL])
    tree, twice = files.read(path)
    trainer = signs.trainer(tree)
    if trainer is None and (what := signs.unread(tree)):
        raise UserError(f"{path} is {what}", code="unsupported")
    if trainer is None:
        raise UserError(
            f"{path} is no config of {', '.join(CONVERT)}"
            + (": it looks like a recipe of ours, which needs no conversion" if "training" in tree else "")
        )
    reading = converters.converted(trainer, tree, str(path))
    values = converted.typed(Config, reading.values)
    required = check(values, str(path))
    for name in required:  # of those that their config does not have at all
        values = short_forms.layer({}, trees.merge(values, trees.nested(name, REQUIRED)), [])
    text = written(trainer, path, values, reading).encode()
    if out.exists() and out.read_bytes() != text:
        raise UserError(f"{out} exists: choose another file with out=FILE")
    write_bytes_atomically(out, text)
    for line in report(trainer, reading, everything):
        print(line)
    if twice:
        print(f"given twice ({trainer} uses the last one): {', '.join(twice)}")
    print(f"\nwritten: {out.resolve()}, a recipe from this config of {trainer}")
    for line in needs(values):
        print(line)
    if values["training"].get("duration") == "0 steps":
        print(
            f"it is for generating, not for training: daguerre generate {out} {' '.join(asked(values, path, reading))}"
        )
    else:
        print(f"daguerre train {shlex.quote(str(out))} trains it")
    if required:
        print(f"must be given on the command line: {', '.join(f'{name}=...' for name in required)}")
    return errors.DONE


def read(arguments: Sequence[str]) -> tuple[Path, Path]:
    """The config and the new file that the command line names."""
    name, chosen, _ = options.read(arguments, "convert config", Options)
    path = Path(name).expanduser()
    if not name or not path.is_file():
        stand_in = signs.stands_for(name)
        hint = f"; its counterpart ships with the package: daguerre recipes {stand_in}" if stand_in else ""
        raise UserError(
            f"{f'there is no file {name}' if name else 'which config?'}: give the file of a config{hint}",
            code="missing",
        )
    out = out_file.place(chosen.out or f"{path.stem}-daguerre.yaml")
    if out.exists() and out.samefile(path):
        raise UserError(f"{out} exists, and is the config: choose another file with out=FILE")
    return path, out


def written(trainer: str, path: Path, values: Tree, reading: Reading) -> str:
    refused = [line for line in reading.lines if line.kind == "refused"]
    head = [f"# A recipe made from {path.name}, a config of {trainer}, by `daguerre convert config`."]
    head += [f"# Defaults of {trainer}:"]
    head += [f"#   {name}: {shown(value)}" for name, value in reading.assumed.items()]
    head += ["# Not carried over:"] if refused else ["# Every key was carried over."]
    head += [f"#   {line.key}: {' '.join(line.text.split())}" for line in refused]
    return "\n".join(head) + "\n\n" + configs.as_yaml(values, references())


def check(values: Tree, source: str) -> list[str]:
    """Settings that must still be given. ConfigError for values that fit no setting here."""
    try:
        configs.load(source, (), values)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if not waits(problem, values)]
        if wrong:
            raise ConfigError(wrong, f"{source}, as a recipe") from error
        return [problem.path for problem in error.problems if problem.text.startswith("must be given")]
    return []


def needs(values: Tree) -> list[str]:
    """Lines on what the recipe asks for and this machine lacks: the file of the base model, the package of an
    optimizer."""
    place, chosen = values["model"].get(_BASE), values.get("optimizer", {}).get("name")
    found = []
    is_path = isinstance(place, str) and (Path(place).suffix in _WEIGHTS or not resolve.is_hub_id(place))
    if is_path and place != REQUIRED and resolve.here(place, resolve.Options()) is None:
        found.append(f"not on this machine: {place}. Put it there, or give another place: model.{_BASE}=PLACE")
    package = next((one for one, use in doctor.EXTRAS.items() if use == f"optimizer.name={chosen}"), None)
    if package is not None and find_spec(package) is None:
        found.append(f"not installed: {package}, for optimizer.name={chosen}: {errors.install(package)}")
    return found


def asked(values: Tree, path: Path, reading: Reading) -> list[str]:
    """Options that generating with a recipe needs that trains nothing."""
    again = catalogue.pretrained()[values["model"]["family"]].reconstructs
    controlled = any(own["name"] == "controlnet" for own in values.get("adapters", {}).values())
    found = ["image=PICTURE" if again else "prompt=TEXT"]
    found += ["control_from=PHOTO"] if controlled else []
    return found + ([f"use='{{{path}: 1}}'"] if reading.get("lora_checkpoint_path") else [])


def waits(problem: Problem, values: Tree) -> bool:
    """True if a problem may go away with what must still be given: of a value itself, or of the section around it."""
    missing = [path for path, value in trees.paths(short_forms.flat(values)) if value == REQUIRED]
    return problem.text.startswith("must be given") or any(path.startswith(f"{problem.path}.") for path in missing)


def report(trainer: str, reading: Reading, everything: bool) -> list[str]:
    """Lists what is lost first, as nobody reads a long list to its end, then what was guessed; lists the rest, or
    counts it."""
    titles = {"refused": "not carried over", "carried": "carried over", "notice": "nothing to carry"}
    width = min(max((len(line.key) for line in reading.lines), default=0), 48)
    listed = {
        title: [f"  {line.key:<{width}}  {line.text}" for line in reading.lines if line.kind == kind]
        for kind, title in titles.items()
    }
    listed[f"defaults of {trainer}"] = [f"  {path}: {shown(value)}" for path, value in reading.assumed.items()]
    shown_now = [title for title, rows in listed.items() if rows and (everything or title == titles["refused"])]
    found = [line for title in shown_now for line in (f"{title} ({len(listed[title])})", *listed[title])]
    guessed = [f"{line.key}: {line.text}" for line in reading.lines if "please check" in line.text and not everything]
    counts = [f"{title}: {len(rows)}" for title, rows in listed.items() if rows and title not in shown_now]
    lost = [] if listed[titles["refused"]] else ["every key was carried over, or sets nothing here"]
    return [*found, *guessed, *lost, *([f"{', '.join(counts)} (listed by {ALL})"] if counts else [])]
