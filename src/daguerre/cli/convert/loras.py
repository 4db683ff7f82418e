"""Arguments and output that the verbs for LoRAs share: `lora`, `extract`, `resize` and `merge`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from daguerre import trees
from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli.convert import options as given
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.families.pretrained import bases
from daguerre.models.export.about import About
from daguerre.models.lora_files import forms, header, kohya
from daguerre.models.lora_files.addition import Addition
from daguerre.models.lora_files.contents import contents_of, find, notices
from daguerre.models.lora_files.forms import Form
from daguerre.models.lora_files.numbered import NumberedLoras
from daguerre.models.parts.text import token_files
from daguerre.models.weights import files, index
from daguerre.remote import local_copy


def source(target: str) -> Path:
    """The file of a LoRA that a bare word means: itself, or that of a run. UserError without a file."""
    if not target:
        raise UserError("no LoRA given: give a .safetensors file, or the folder of a run", code="missing")
    place = local_copy.located(target)
    found = find(place)
    for notice in notices(found):
        print(notice)
    if place.is_dir() and (tokens := token_files.find(place)) is not None:
        print(f"{target}: its new tokens are left out, as they are files of their own: {tokens}")
    elif place.is_file() and token_files.beside_a_lora(place) and token_files.find(place) is not None:
        print(f"{target}: the new tokens in it are left out: `daguerre convert tokens` writes them")
    return found


def base(target: str, place: str | None, ignored: Sequence[str]) -> Path | None:
    """The model that a LoRA is for: `place`, or the base of the run that it is from, if that is a folder of this
    machine. None for any other: published models need none. UserError as `bases.given`."""
    run = RunFolder(Path(target).expanduser())
    if place is None and run.config.is_file():
        own = trees.get(recipe.read(run.config), "model.pretrained_model_name_or_path")
        if isinstance(own, str) and index.find(Path(own).expanduser()) is not None:
            print(f"{target}: trained on {own}, by whose networks it is converted")
            place = own
    return bases.given(place, ignored)


def place(out: str | None, form: Form) -> Path:
    """The new file or folder. UserError where it does not go with the form, or is there."""
    found = given.new_place(out, "FOLDER" if form == "peft" else "style.safetensors")
    if (form == "peft") == (found.suffix == ".safetensors"):
        what = "a folder for each component, no .safetensors file" if form == "peft" else "a .safetensors file"
        raise UserError(f"out={out}: format={form} writes {what}", code="conflict", setting="out")
    return found


def about(file: Path) -> About:
    """The facts that a file's header tells of the LoRA."""
    return header.about(contents_of(file).metadata, file.stem)


def write_words(by: NumberedLoras, source: Path, out: Path, base: Path | None) -> None:
    """Writes the words that were trained with a LoRA as files of tokens, into a folder of their own."""
    if base is None:
        raise UserError(
            f"{source} has trained words with its LoRA, which start from a text encoder's vocabulary: give the model, "
            "base=FOLDER",
            code="missing",
            setting="base",
        )
    folder = out.with_name(f"{out.stem}-words")
    if folder.exists():
        raise UserError(f"{folder} exists, and the words of {source} would go there: choose another out=PLACE")
    new, existing = token_files.read(source, [by.reader(base)])
    told = token_files.metadata(bases.networks(base), about(source))
    with replaced(folder) as fresh:
        token_files.write(fresh, new, existing, told)
    print(f"{folder}: {', '.join([*new, *existing])}; read back")


def cast(additions: Mapping[str, list[Addition]], dtype: torch.dtype, source: Path) -> dict[str, list[Addition]]:
    """The additions in another type; says what that rounds. UserError for numbers that float16 does not hold."""
    found, lost, whole = dict[str, list[Addition]](), 0.0, 0.0
    for component, own in additions.items():
        found[component] = [each.to(dtype) for each in own]
        for before, after in zip(own, found[component], strict=True):
            files.check_range(before.factors, dtype, f"{source}, {component}.{before.layer}")
            for name, value in before.factors.items():
                lost += float((after.factors[name].double() - value.double()).square().sum())
                whole += float(value.double().square().sum())
    if lost:
        rounding = (lost / whole) ** 0.5
        print(f"rounded to {str(dtype).removeprefix('torch.')}: the tensors differ by {rounding:.1e} of their norm")
    return found


def write(
    form: Form, out: Path, networks: Mapping[str, nn.Module], additions: Mapping[str, list[Addition]], told: About
) -> None:
    """Writes a LoRA, which is read back and compared, and says what it holds."""
    make_folder(out.parent)
    forms.write(form, out, networks, additions, told)
    layers = {component: {each.layer for each in own} for component, own in additions.items()}
    counts = " and ".join(f"{len(own):,} layers of {component}" for component, own in layers.items())
    ranks = sorted({each.rank for own in additions.values() for each in own if each.rank})
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    for line in kohya.notices(networks, additions) if form == "kohya" else ():
        print(line)
    if form == "peft" and told.kept:
        print(f"left out, as peft's folders have no place for it: the header ({', '.join(sorted(told.kept))})")
    print(f"{out}: {counts}, {shown}, {given.size_of(out)}; read back, with the strength that it was given")
