"""Write a recipe for a LoRA of your own images; nothing is trained.

usage: daguerre init FOLDER [base=RECIPE|RUN|PIPELINE] [-o FILE] [key=value ...]

Looks at the images of a folder, says what was found (sizes, captions, near duplicates, what is cropped), and writes a
recipe with a comment on each setting, its length sized by the images, and eight sample prompts that differ. Then it
says what the recipe needs of a GPU, and the command that trains it.

  daguerre init my_images
  daguerre init my_images base=z_image_lora
  daguerre init my_dog data.captions.text="a photo of sks dog" base=sdxl_lora -o dog.yaml
  daguerre init my_images base=runs/my_model
  daguerre init my_images base=sdxl_lora model.pretrained_model_name_or_path=models/my_sdxl

  base=RECIPE   a shipped recipe of a LoRA, which brings the base model and its settings. Without it: one whose base
                model is on this machine, or sdxl_lora
  base=RUN      a run that trained a whole network, or a folder in diffusers' layout: that is the base model, and the
                other settings are those of the recipe of a LoRA for its family
  -o FILE       the recipe that is written (FOLDER's name and .yaml); a file that exists is left as it is
  key=value     settings of the recipe, as for `daguerre train`

docs/adapters.md says what the settings of a LoRA do, docs/data.md how captions are written.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from daguerre import errors, trees
from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.cli import plan
from daguerre.cli.data import figures, samples
from daguerre.cli.data.opened import Opened
from daguerre.cli.data.samples import Lost
from daguerre.cli.options import plan_options
from daguerre.cli.parts import out_file, own_base
from daguerre.config import annotated, cards, overrides, recipe
from daguerre.config import config as configs
from daguerre.config import options as config_options
from daguerre.config.config import Config
from daguerre.data import skipped
from daguerre.data.dataset import open_datasets
from daguerre.data.images import decode
from daguerre.data.images.headers import Undecodable
from daguerre.data.tools import detect, duplicates
from daguerre.errors import UserError
from daguerre.evaluation.formulas import jackknife
from daguerre.formatting import counted, format_size, titled, wrapped
from daguerre.memory import estimate, host, static
from daguerre.models.weights import resolve
from daguerre.run import lengths, summary
from daguerre.settings import ADDRESS, Settings
from daguerre.tracking.progress import Counter, Stages
from daguerre.trees import Tree

USUAL = "sdxl_lora"
"""The recipe where no base model is on this machine: the one that most guides and programs are about."""
_SMALL = "sd15_lora"
PROMPTS = 8
_ENLARGED = 1.5
"""Factor by which pictures are enlarged from which on a line says so."""
_COLUMNS = 116
_READ = 2000
"""Most images that are read."""
_KEPT = 5
"""Saves that are kept, so that `daguerre compare` finds each of the four of a run by the shipped recipes."""
_NAMED = 5
"""Most images held out that are named."""
_SCENES = (
    "on a beach",
    "in the snow",
    "at night under a street lamp",
    "as an oil painting",
    "as a pencil drawing",
    "seen from far away",
    "very close",
)
"""What is added to a caption where there are few: does what was learnt hold in other places?"""
_OWN_IMAGES = re.compile(r"\btrain (\w+) data\.source=folder data\.path=my_images run_name=my_run\b")


class Options(Settings):
    """Options of `init`, as the help has them."""

    base: str | None = Field(None, min_length=1)
    out: Annotated[str | None, ADDRESS] = Field(None, min_length=1)


@dataclass(frozen=True)
class Looked:
    """The images of a folder, as far as they were read."""

    captions: list[str]
    """Different ones, in the order of the images."""
    near: list[list[str]]
    """Names of images that show nearly the same, by group."""
    lost: skipped.Counts
    side_px: float
    """Of a square of the median area; NaN where none was read."""


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError where no recipe can be written."""
    words = config_options.split(arguments)
    options, rest = config_options.own_options(words.overrides, Options)
    if len(words.bare) != 1:
        raise UserError(f"init takes one folder of images, you gave {' '.join(words.bare) or 'none'}", code="missing")
    folder = words.bare[0]
    name = Path(folder).expanduser().resolve().name
    path = out_file.place(options.out or f"{name}.yaml")
    if path.exists():
        raise UserError(
            f"{path} exists and is left as it is: write elsewhere by -o FILE, or delete it", code="conflict"
        )
    places = _bases()
    own = None if options.base is None else own_base.found(options.base, places)
    here = _here(places)
    base, brought, settings = own or (_chosen(options.base, places, here), [], "")
    asked = {overrides.pair(one)[0] for one in rest}
    given = [one for one in brought if overrides.pair(one)[0] not in asked]
    given += [f"data.source={detect.kind([folder])}", f"data.path={folder}", f"run_name={name}", *rest]
    loaded = configs.load(base, given)
    looked, about_images, about_length = _look(loaded.config)
    command = f"daguerre train {shlex.quote(str(path))}"
    head = [
        f"A LoRA of the images in {folder}, from {options.base if own else f'the recipe {base}'}; written by "
        "`daguerre init`.",
        *wrapped(f"Settings are those of {settings} (docs/choosing.md)." * bool(settings), _COLUMNS),
        "",
        f"Command:  {command}",
        f"Length:   {about_length}",
        "",
        "Everything may be changed before the first start, which writes it to the run's config.yaml.",
    ]
    tree = _tree(loaded.config, looked.captions, asked)
    configs.load(str(path), (), tree)  # ConfigError for what could not be read back
    # On a GPU, where the recipe is for one, whatever this machine has.
    needs = _needs(base, ["training.device=cuda", *given] if base in places and not own else given)
    place = getattr(loaded.config.model, "pretrained_model_name_or_path", "")
    about_base = _about_base(base, place, places, here, settings)
    write_bytes_atomically(path, annotated.text(head, tree).encode())
    sections = {"Images": about_images, "Base model": about_base, "Length": wrapped(about_length, _COLUMNS)}
    sections |= {"Needs": needs, "Next": [f"read {path}, then", command]}
    print("\n".join([f"{path}: a recipe of a LoRA", *titled(sections)]))
    return errors.DONE


def _chosen(asked: str | None, places: Mapping[str, str], here: Sequence[str]) -> str:
    """The recipe that brings the base model; `places` are the `_bases`, of which those `here` have theirs on this
    machine. UserError for a shipped one that cannot."""
    if asked is None:
        return next(iter(here), USUAL)
    if asked in recipe.shipped() and asked not in places:
        raise UserError(
            f"base={asked} is no recipe of a LoRA for own images: give one of {', '.join(places)}, or the folder of a "
            "run that trained a whole network, such as runs/my_model, or of a pipeline",
            code="unknown",
            setting="base",
        )
    return asked


def _here(places: Mapping[str, str]) -> list[str]:
    """The recipes whose base model is on this machine."""
    return [name for name, place in places.items() if resolve.here(place, resolve.Options()) is not None]


def _about_base(chosen: str, place: str, places: Mapping[str, str], here: Sequence[str], settings: str) -> list[str]:
    """Lines on the base model at a place, and on how it was chosen: by a recipe, or as a folder of one's own, for which
    it is said where the `settings` are from."""
    said = f"{place}, by the settings of {settings}" if settings else f"{chosen}: {place}"
    lines = wrapped(said, _COLUMNS)
    if place == places.get(chosen) and chosen not in here:
        lines.append("not on this machine: training downloads it, and so does")
        lines.append(f"daguerre fetch {place}")
    if others := [name for name in here if name != chosen]:
        lines += wrapped(f"also on this machine: base={' or base='.join(others)}", _COLUMNS)
    return lines


def _bases() -> dict[str, str]:
    """The shipped recipes that train a LoRA on a folder of images, as their headers say, and the places of their base
    models; the usual one first."""
    found = {}
    for name, path in sorted(recipe.shipped().items(), key=lambda each: each[0] != USUAL):
        match = _OWN_IMAGES.search(cards.line(path, "Command"))
        if match and match[1] == name and [*(tree := recipe.tree(name)).get("adapters", ())] == ["lora"]:
            found[name] = _place(tree)
    return found


def _place(tree: Tree) -> str:
    return str(trees.get(tree, "model.pretrained_model_name_or_path"))


def _look(config: Config) -> tuple[Looked, list[str], str]:
    """The captions of the images, lines on what they show, and one on the length of the run. UserError where none can
    be trained on."""
    dataset, held_out = open_datasets(config.data, ["train", "held_out"])
    member = dataset.members[0]
    source, settings, index = member.source, member.settings, member.source.index
    assert index is not None, "what lies at a path has an end"
    assert dataset.count, "an epoch of it has one sample at least"
    assert dataset.size
    passes = np.zeros(index.count, dtype=bool)
    for chosen in (*dataset.selections, *held_out.selections):
        passes[chosen.numbers[:] if chosen is not None else []] = True
    data = Opened(settings, source, index, passes, source.report())
    looked, batch = _read(data, config.seed), batch_sizes(config).whole
    there = counted(figures.found(source, index), "image")
    lines = [f"{there}, {held_out.size or 0} of them held out: validated on, and never trained on"]
    apart = [source.name(int(number)) for chosen in held_out.selections if chosen for number in chosen.numbers[:_NAMED]]
    lines[0] += f" ({', '.join(apart)}{', ...' * (len(apart) < (held_out.size or 0))})" * bool(apart)
    lines += summary.describe_source(dataset, config, batch)
    lines += figures.summary(source, settings)[1:]
    lines += [f"{e['count']:,} cannot be read: {reason}" for reason, e in looked.lost.items()]
    side_px, wanted_px = looked.side_px, config.data.resolution
    if side_px * _ENLARGED < wanted_px:
        other = f", or base={_SMALL}, which trains at 512 px" if wanted_px > 512 else ""
        lines.append(
            f"half of them have the area of {side_px:.0f} x {side_px:.0f} px or less, and data.resolution={wanted_px} "
            "is trained: enlarged so much, they teach blur. Take larger originals; else give a smaller "
            f"data.resolution=SIZE{other}"
        )
    lines += [f"nearly the same, which is learnt as often as it is there: {', '.join(each)}" for each in looked.near]
    length = _length(config, batch, dataset.count, dataset.size)
    return looked, [part for line in lines for part in wrapped(line, _COLUMNS)], length


def _read(data: Opened, seed: int) -> Looked:
    """Reads the images and their captions."""
    numbers = data.drawn(_READ, seed, "init")
    lost: skipped.Counts = {}
    captions = dict[str, None]()
    copies, names, areas_px = list[np.ndarray](), list[str](), list[int]()
    with Counter("reading", len(numbers)) as counter:
        for sample in samples.seen(data, numbers, seed):
            counter.add(1)
            try:
                if isinstance(sample, Lost):
                    raise Undecodable(sample.reason)
                pixels_HWC, (height, width) = decode.sized(sample.record.image, data.settings, None)
                copies.append(duplicates.small_copy(pixels_HWC))
            except Undecodable as error:
                skipped.add(lost, str(error), sample.name if isinstance(sample, Lost) else sample.record.key)
                continue
            names.append(sample.record.key)
            areas_px.append(height * width)
            captions |= {sample.caption: None} if sample.caption else {}
    near = duplicates.groups(np.stack(copies)) if copies else []
    side_px = float(np.median(areas_px)) ** 0.5 if areas_px else np.nan
    return Looked([*captions], [[names[i] for i in group] for group in near], lost, side_px)


def _length(config: Config, batch: int, per_epoch: int, trained: int) -> str:
    """The recipe's length with so many samples in an epoch, made of so many images."""
    plain = lengths.fixed(config, {}, per_epoch, batch)[0].training.duration
    updates = plain.steps(batch, per_epoch)
    views = f"{updates * batch / trained:,.0f}"
    return (
        f"{updates:,} updates of {batch}: {counted(trained, 'image')} {views} times each, as the folder is today. The "
        "first start fixes it, and training.duration sets another"
    )


def _tree(config: Config, captions: Sequence[str], asked: Collection[str]) -> Tree:
    """The settings that are no defaults, the learning rate, the rank, and what is drawn and compared, unless it was
    `asked` for."""
    tree = configs.differing(config)
    shown = {"name": config.optimizer.name, "learning_rate": config.optimizer.learning_rate}
    tree = {**tree, "optimizer": {**shown, **tree.get("optimizer", {})}}  # what people change first, default or not
    ranks = {name: {"rank": one.rank} for name, one in config.adapters.items() if hasattr(one, "rank")}
    tree = trees.merge(tree, {"adapters": ranks})
    if config.sampling.num_images:  # a recipe may leave them out where drawing does not fit beside training
        own: dict[str, object] = {
            "sampling.prompts": sample_prompts(captions, config.sampling.prompts or ()),  # a base's run has its own
            "sampling.num_images": PROMPTS,
            "validation.compared_images": jackknife.FEWEST,
            "checkpoint.keep": _KEPT,
        }
        for path, value in own.items():  # in this order, so that equal folders give equal recipes
            if path not in asked:
                tree = trees.merge(tree, trees.nested(path, value))
    return tree


def sample_prompts(captions: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    """Eight prompts that differ: up to four captions that share the fewest words, then prompts that the base is `known`
    to draw, or the shortest caption in other places. No picture shows these: there copies and a look that does not hold
    are seen."""
    words = [frozenset(re.findall(r"\w+", caption.lower())) for caption in captions]
    chosen: list[int] = []
    while len(chosen) < min(PROMPTS // 2, len(captions)):
        shares = [max((_shared(words[i], words[j]) for j in chosen), default=0.0) for i in range(len(captions))]
        chosen.append(min((i for i in range(len(captions)) if i not in chosen), key=lambda i: shares[i]))
    shortest = min(captions, key=len).rstrip(" .,")
    # A small base knows no words but those that it was trained on, so that a scene would be noise to it.
    others = [one for one in known if one not in captions] or [f"{shortest}, {scene}" for scene in _SCENES]
    return [*(captions[i] for i in chosen), *others][:PROMPTS]


def _shared(a: frozenset[str], b: frozenset[str]) -> float:
    """Share of words that two captions have in common, of all words of both."""
    return len(a & b) / max(1, len(a | b))


def _needs(base: str, given: Sequence[str]) -> list[str]:
    """The memory that an update takes."""
    with Stages() as stages:
        stages.say("computing the memory of an update")
        target = plan.prepared(base, given, plan_options.Options())[1]
        parts = target.parts()
        step = estimate.step(target, parts, static.count(target.config, parts, target.mesh), stages.say)
    programs = format_size(host.programs(target.config, target.on_gpu))
    where = "a GPU" if target.on_gpu else f"this machine's memory, and {programs} for the programs"
    taken = format_size(target.taken(step.peak))
    return [f"{taken} of {where}, computed and not measured; `daguerre plan RECIPE card=SIZE` looks for what fits less"]
