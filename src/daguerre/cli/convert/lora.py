"""A LoRA in the names of another program: kohya's (ComfyUI, A1111), diffusers' or peft's.

usage: daguerre convert lora FILE|RUN|CONFIG format=kohya|diffusers|peft out=PLACE [base=MODEL] [dtype=float16]

Writes a LoRA, LoHa or LoKr of any program in another layout, with the strength that its writer gave it. It is read back
and compared. Nothing is left out: a key that finds no layer is an error.

  daguerre convert lora pytorch_lora_weights.safetensors format=kohya out=style.safetensors
  daguerre convert lora style.safetensors format=diffusers out=pytorch_lora_weights.safetensors
  daguerre convert lora runs/style format=peft out=style-peft
  daguerre convert lora lora_c_3b.yaml format=kohya out=fernando.safetensors base=cascade    # CONFIG: Stable Cascade's

  format=kohya       one file for ComfyUI, A1111 and kohya's scripts; SDXL's UNet in the names of the original layout
         diffusers   one file for diffusers' load_lora_weights, with ranks and alphas in its header
         peft        a folder of each component for PeftModel.from_pretrained
  out=PLACE          a new .safetensors file, of peft a new folder
  base=MODEL         the model that it is for: a folder in diffusers' layout, a run that trained a whole network, or a
                     single file. Needed only for models of other numbers than SD 1.x, 2.x, SDXL and Stable Cascade, and
                     for words. Of a run of a LoRA its own base is taken, if that is a folder here
  dtype=float16      or bfloat16, float32 (default: that of a file in 16 bits, else float32). In kohya's form a tensor
                     into which the strength of a layer with another alpha goes is float32, if 16 bits do not hold it
  ignore_tensors=[X] leaves out tensors of a single file that are refused as unknown, by patterns of their names

Words (train_tokens) that Stable Cascade's code has trained with its LoRA, whose names only its config says, are
written to the folder PLACE-words, as files of new tokens. The config names the LoRA's file: lora_checkpoint_path.

docs/adapters.md says which program reads what.
"""

from typing import Annotated

from pydantic import Field

from daguerre.cli.convert import loras
from daguerre.cli.convert import options as given
from daguerre.cli.convert.options import Dtype
from daguerre.families.pretrained import bases
from daguerre.models.lora_files import numbered
from daguerre.models.lora_files.forms import Form
from daguerre.models.weights import files
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `convert lora`."""

    format: Form
    out: str | None = None
    base: Annotated[str | None, ADDRESS] = None
    dtype: Dtype | None = None
    ignore_tensors: list[str] = Field([])


def run(arguments: list[str]) -> int:
    """Writes the file or the folder; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert lora", Options)
    source, out = loras.source(target), loras.place(options.out, options.format)
    base = loras.base(target, options.base, options.ignore_tensors)
    networks, additions = bases.fitting(source, base)
    if (words := numbered.with_words(source)) is not None:
        loras.write_words(words[0], source, out, base)
    if options.dtype:
        additions = loras.cast(additions, files.DTYPES[options.dtype], source)
    loras.write(options.format, out, networks, additions, loras.about(source))
    return 0
