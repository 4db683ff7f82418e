"""T5's encoder as a text encoder (Raffel et al. 2020, arXiv 1910.10683): its last hidden state is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import T5Tokenizer

from daguerre.models.components import ComponentLoader
from daguerre.models.parts import facts
from daguerre.models.parts.text.network import TextNetwork, left_side, other_vocabulary
from daguerre.models.reading import Reading

_WINDOW = 512
_MOST_TOKENS = 1 << 16
"""A T5 without a limit of its own has 1e30 in transformers, and captions would be padded to that."""


class T5(TextNetwork):
    """transformers' T5EncoderModel."""

    name = "t5"
    called = "T5"
    model_types = ("t5",)
    facts = facts.T5
    last_alone = True
    file_keys = ("t5xxl",)

    def width(self, config: Any) -> int:
        return int(config.d_model)

    def window(self, config: Any) -> int:
        """512, as it was trained: its places are relative, so that nothing in its config limits a text."""
        return _WINDOW

    def network(
        self, components: ComponentLoader, component: str, config: Mapping[str, Any], reading: Reading, tokenizer: Any
    ) -> Any:
        decided = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
        return components.network(component, transformers.T5EncoderModel, decided)

    def tokenizer(self, folder: Path) -> Any:
        return T5Tokenizer.from_pretrained(folder, local_files_only=True)

    def problem(self, tokenizer: Any, config: Any, reading: Reading) -> str | None:
        if problem := other_vocabulary(tokenizer, config.vocab_size):
            return problem
        if reading.max_tokens is None and tokenizer.model_max_length > _MOST_TOKENS:
            return (
                "does not set the number of tokens of a caption: set model_max_length in tokenizer_config.json (T5's "
                "were trained with 512; 77 takes less time and memory)"
            )
        return left_side(tokenizer)

    def read(
        self, network: Any, ids_BT: Tensor, mask_BT: Tensor | None, reading: Reading
    ) -> tuple[Tensor, Tensor | None]:
        return network(ids_BT, attention_mask=mask_BT).last_hidden_state, None

    def unread(self, network: Any, reading: Reading) -> list[nn.Parameter]:
        return []
