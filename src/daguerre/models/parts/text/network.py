"""The contract of a kind of text encoder: the differences between networks of one library class, or a few, and others.

A kind is a module of this folder; `models/parts/text/encoder.py` chooses it by `model_type` of a network's config.
Kinds have no state: they are asked about a network and the way in which a family reads it. Shape letters: B texts, T
tokens, D features, P pooled features.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from daguerre.models.components import ComponentLoader
from daguerre.models.network import Facts
from daguerre.models.reading import Reading
from daguerre.models.weights.original_names import PrefixedNames

_SPARE, _SPARE_SHARE = 1024, 0.1
"""Most rows of embeddings that are no tokens: so many, or this share of them."""


class TextNetwork(ABC):
    """A kind of text encoder."""

    name: ClassVar[str]
    """Name by which a `Reading` allows it."""
    called: ClassVar[str]
    """Name in messages."""
    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` in its configs."""
    wide: ClassVar[bool] = False
    """Whether hidden states exceed the range of float16, so that caches keep them in bfloat16."""
    has_added_words: ClassVar[bool] = False
    """Whether its tokenizers have added tokens that are words, besides those that somebody trains."""
    file_keys: ClassVar[tuple[str, ...]]
    """Names by which other programs know the encoders of this kind in a model, in order, in files of new tokens."""
    file_names: ClassVar[PrefixedNames | None] = None
    """Names that ComfyUI's files have; None where they are those of the library."""
    chosen: ClassVar[bool] = False
    """Whether settings may choose another hidden state than the family's, and windows for long prompts."""
    facts: ClassVar[Facts] = Facts()
    """Facts of its networks, but for what a family does not read of them."""
    last_alone: ClassVar[bool] = False
    """Whether its last hidden state is read whatever a family reads of other kinds."""

    def width(self, config: Any) -> int:
        """D of one hidden state."""
        return int(config.hidden_size)

    def depth(self, config: Any) -> int:
        """Layers that have a hidden state."""
        return int(config.num_hidden_layers)

    @abstractmethod
    def window(self, config: Any) -> int:
        """Tokens that are counted for a text where there is no tokenizer."""

    @abstractmethod
    def network(
        self, components: ComponentLoader, component: str, config: Mapping[str, Any], reading: Reading, tokenizer: Any
    ) -> Any:
        """The network of this component, on the CPU in float32. `config` is its config or numbers; `tokenizer` (None
        where it is not there) decides some numbers of one that is built from numbers."""

    @abstractmethod
    def tokenizer(self, folder: Path) -> Any:
        """The tokenizer of a folder, for `tokenizers.opened`."""

    @abstractmethod
    def problem(self, tokenizer: Any, config: Any, reading: Reading) -> str | None:
        """Reason for which a tokenizer and a network do not belong together, behind "the tokenizer of ..."."""

    @abstractmethod
    def read(
        self, network: Any, ids_BT: Tensor, mask_BT: Tensor | None, reading: Reading
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, T, D times the number of layers] as diffusers' pipelines take them, and pooled features [B,
        P] where they are read. `mask_BT` has 1 for what attention sees, None for all."""

    @abstractmethod
    def unread(self, network: Any, reading: Reading) -> list[nn.Parameter]:
        """Parameters that nothing which is read depends on."""


def other_vocabulary(tokenizer: Any, size: int) -> str | None:
    """The problem with a tokenizer for embeddings of this size: more tokens than rows, or far fewer. Rows to spare are
    few: they round a size up. A smaller vocabulary of another model has numbers that mean other words here."""
    if 0 <= size - len(tokenizer) <= max(_SPARE, _SPARE_SHARE * size):
        return None
    return (
        f"has {len(tokenizer)} tokens, but the text encoder has {size}: they do not belong together, or the "
        "tokenizer's files are incomplete (tokenizer.json, or vocab.json with merges.txt)"
    )


def left_side(tokenizer: Any) -> str | None:
    """The problem of a tokenizer that cuts or fills texts on the left, for kinds that were trained on the right."""
    if "left" not in (tokenizer.padding_side, tokenizer.truncation_side):
        return None
    return (
        "cuts or fills texts on the left, which no text encoder here was trained with: remove padding_side and "
        "truncation_side from tokenizer_config.json"
    )
