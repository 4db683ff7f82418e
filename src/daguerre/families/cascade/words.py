"""Words that Stability's code has trained with a LoRA: offsets to embeddings, and a config that says to which.

The file has numbers of the vocabulary alone. New words follow it in the order of the config, each from the mean of the
tokens that fit its pattern (zeros without one); the others are tokens of the vocabulary. Shape letters: N words, D
width of the embeddings.
"""

from pathlib import Path

import torch

from daguerre.errors import UserError
from daguerre.families.cascade import lora_names
from daguerre.families.cascade.settings import READS
from daguerre.models.components import ComponentLoader
from daguerre.models.lora_files.numbered import Config, Rows
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text import new_tokens
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.settings import PretrainedSettings
from daguerre.models.weights.opening import opened


def reader(settings: PretrainedSettings) -> TextEncoder:
    """The text encoder of a base, alone."""
    return text_encoder.load(ComponentLoader(settings, 0), "text_encoder", "tokenizer", READS)


def read(path: Path, config: Config, reader: TextEncoder) -> tuple[Rows, Rows]:
    """The new words of a config, as its LoRA's file has them, and the trained ones of the vocabulary. UserError where
    file, config and vocabulary do not agree."""
    with opened(config.file) as file:
        if not {lora_names.OFFSETS, lora_names.IDS} <= {*file.keys()}:
            raise UserError(f"{config.file} has no words, and train_tokens of {path} has some", code="conflict")
        offsets_ND, ids_N = file.get_tensor(lora_names.OFFSETS).float(), file.get_tensor(lora_names.IDS)
    table = new_tokens.table(reader).float()
    vocabulary: dict[int, str] = {number: word for word, number in reader.tokenizer.get_vocab().items()}
    if offsets_ND.shape != (len(ids_N), table.shape[1]):
        raise UserError(
            f"{config.file} was made for another model: its words are {tuple(offsets_ND.shape)}, and embeddings of "
            f"{reader.name} here are {table.shape[1]} numbers wide",
            code="unsupported",
        )
    fresh = [(name, start) for name, start in config.words if lora_names.is_new(name)]
    wanted = {number for name, _ in config.words if not lora_names.is_new(name)
              for number in new_tokens.ids_of(reader, new_tokens.matching(reader, name))}  # fmt: skip
    wanted |= {len(vocabulary) + place for place in range(len(fresh))}
    if {*ids_N.tolist()} != wanted:
        raise UserError(
            f"{config.file} has words of the numbers {_shown(ids_N.tolist())}, and train_tokens of {path} are those of "
            f"{_shown(wanted)} in this vocabulary: give the config that trained it, and its base",
            code="conflict",
        )
    new: Rows = {}
    existing: Rows = {}
    for number, offset_D in zip(ids_N.tolist(), offsets_ND, strict=True):
        if number in vocabulary:
            existing[vocabulary[number]] = (table[number] + offset_D)[None]
            continue
        name, start = fresh[number - len(vocabulary)]
        tokens = [] if start is None else new_tokens.ids_of(reader, new_tokens.matching(reader, start))
        first_D = table[tokens].mean(0) if tokens else torch.zeros_like(offset_D)
        new[name] = (first_D + offset_D)[None]
    return new, existing


def _shown(numbers: set[int] | list[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)) or "none"
