"""Write captions of pictures by a network.

usage: daguerre caption FOLDER with=NAME [path=FOLDER|OWNER/NAME] [key=value ...]

Captions the pictures of a folder, and of those in it, which have none by this captioner yet: the same command goes on
where it was stopped.

  daguerre caption photos with=florence2                       a field `florence2` in photos/NAME.json
  daguerre caption photos with=florence2 tasks='[more_detailed_caption, caption]'
  daguerre caption photos with=blip path=models/blip write=txt       photos/NAME.txt, where no such file is
  daguerre caption photos with=qwen3_vl prompt="Describe this photograph in one sentence."
  daguerre caption drawings with=wd14 general_threshold=0.4 remove_underscore=true

  with=NAME          florence2, blip, qwen3_vl (sentences) or wd14 (tags)
  path=PLACE         folder of its network, or OWNER/NAME of the hub; default: as it is published
  digest=SHA256      refuses other weights
  field=NAME         field of NAME.json, by default the captioner's name; train on it with data.captions.fields=[NAME]
  write=txt          NAME.txt in place of a field
  again=true         captions all pictures, and replaces what there is
  batch_size=8, device=cuda

docs/data-tools.md says more.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from daguerre import errors, plugins, trees
from daguerre.captioning import folder as of_folder
from daguerre.config import config, fields, options, overrides
from daguerre.data import skipped
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.settings import Settings
from daguerre.training.device import choose_device
from daguerre.trees import Tree


class Options(Settings):
    """Options of what is captioned, and where captions go."""

    field: str | None = Field(None, pattern=r"^\w+$")
    """Field of NAME.json. null: the captioner's name."""
    write: Literal["json", "txt"] = "json"
    """Kind of the files."""
    again: bool = False
    """Whether captions that are there are replaced."""
    batch_size: int = Field(8, ge=1)
    """Pictures at once."""
    device: str | None = None
    """cuda, cpu or mps. null: the first GPU, else the CPU."""


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 where pictures could not be read; UserError."""
    words = options.split(arguments)
    if len(words.bare) != 1:
        raise UserError("`daguerre caption` takes one folder of pictures and with=NAME", code="missing")
    wanted, others = options.own_options(words.overrides, Options)
    given = dict(overrides.pair(each) for each in others)
    if len(given) < len(others):
        raise UserError("an option is given twice", code="conflict")
    if "with" not in given:
        known = ", ".join(plugins.names("captioners"))
        raise UserError(f"with=NAME is missing: choose a captioner, {known}", code="missing", setting="with")
    captioner = plugins.find("captioners", given.pop("with"))
    settings = _checked(captioner.Settings, given)
    name = wanted.field or settings.name
    if wanted.write == "txt" and wanted.field is not None:
        raise UserError("field has no effect with write=txt: remove it", code="unused", setting="field")
    device = wanted.device or choose_device("auto").type
    place = Path(words.bare[0]).expanduser()
    counts = of_folder.caption(
        place, lambda: captioner.load(settings, device), name, wanted.write, wanted.again, wanted.batch_size, _tell
    )
    kept = f", {counts.known:,} had one" if counts.known else ""
    silent = f", {counts.empty:,} got none (nothing was found in them)" if counts.empty else ""
    print(f"{counted(counts.written, 'caption')} written{kept}{silent}")
    if counts.left_out:
        print(skipped.table(counts.left_out))
    if counts.unreadable:
        more = " ..." if len(counts.unreadable) > 5 else ""
        print(f"{len(counts.unreadable):,} cannot be read: {', '.join(counts.unreadable[:5])}{more}")
    return errors.FAILED if counts.unreadable or skipped.unusable(counts.left_out) else errors.DONE


def _checked(cls: type[Settings], given: dict[str, str]) -> Any:
    """The settings of options as text. ConfigError names each that cannot be."""
    leaves = fields.leaves(cls)
    tree: Tree = {}
    for key, text in given.items():
        annotation = leaves[key].field.annotation if key in leaves else str
        tree = trees.merge(tree, trees.nested(key, overrides.typed(text, annotation)))
    return config.checked(cls, tree, [], [], "the command, whose options --help explains")


def _tell(done: int, total: int) -> None:
    print(f"{done:,} of {total:,}", flush=True)
