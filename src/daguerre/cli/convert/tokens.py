"""New tokens (textual inversion) for diffusers, A1111, ComfyUI and kohya's scripts.

usage: daguerre convert tokens FILE|RUN out=FOLDER [name=NAME] [base=MODEL]

Reads new tokens in the layout of any program: diffusers, A1111 (also pickled, as tensors alone), ComfyUI, kohya's
scripts, and in the file of a LoRA, as OneTrainer has them. Writes a folder with learned_embeds.safetensors for
diffusers and a file of each token for the others, which call the token by the file's name. Each is read back and
compared, to the bit.

  daguerre convert tokens toy.pt name="<toy>" out=toy
  daguerre convert tokens style-with-words.safetensors out=words

  out=FOLDER   a new folder
  name=NAME    the token's name, in place of the one that the file has
  base=MODEL   the model that they are for: a folder in diffusers' layout or a single file. Needed only for models of
               other numbers than SD 1.x, 2.x, SDXL and Stable Cascade
  ignore_tensors=[X]   leaves out tensors of a single file that are refused as unknown, by patterns of their names

docs/tokens.md says which program reads what.
"""

from typing import Annotated

from pydantic import Field

from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.cli.convert import options as given
from daguerre.errors import UserError
from daguerre.families.pretrained import bases
from daguerre.formatting import counted
from daguerre.models.export.about import UNKNOWN
from daguerre.models.parts.text import token_files
from daguerre.remote import local_copy
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `convert tokens`."""

    out: str | None = None
    name: str | None = None
    base: Annotated[str | None, ADDRESS] = None
    ignore_tensors: list[str] = Field([])


def run(arguments: list[str]) -> int:
    """Writes the folder; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert tokens", Options)
    out, path = given.new_place(options.out, "FOLDER"), local_copy.located(target)
    if out.suffix == ".safetensors":
        raise UserError(f"out={out}: several files are written: give a folder", code="conflict", setting="out")
    if not target or not path.exists() or (found := token_files.find(path)) is None:
        raise UserError(
            f"{target or 'what?'}: there are no new tokens: give a file of some, or a run with adapter.name=tokens",
            code="missing",
        )
    if found.is_dir() and options.name:
        raise UserError(f"name={options.name}: it is for one file, and {found} is a folder; remove it", setting="name")
    base = bases.given(options.base, options.ignore_tensors)
    networks, new, existing = bases.fitting_tokens(found, base, options.name)
    make_folder(out.parent)
    encoders = [*next(iter([*new.values(), *existing.values()]))]
    with replaced(out) as fresh:
        token_files.write(fresh, new, existing, token_files.metadata(networks, UNKNOWN))
        (fresh / "README.md").write_text(token_files.card(new, encoders), encoding="utf-8")
    for name, rows in {**new, **existing}.items():
        counts = ", ".join(f"{counted(len(own), 'vector')} for {encoder}" for encoder, own in rows.items())
        print(f"{out}: {name}, {counts}; read back")
    return 0
