"""Text conditioning of a denoiser: features of one or several text encoders, joined.

Frozen encoders run where captions are encoded; if one is trained, all run inside the net (models/trained_net.py). Shape
letters: B texts, K windows, T tokens, D features, P pooled features.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from daguerre.models import encoders
from daguerre.models.network import Facts
from daguerre.models.parts.text.encoder import Features, TextEncoder
from daguerre.models.parts.text.tokenizers import Tokens
from daguerre.types import OF_TEXTS, TOKENS, Batch, Cond

_KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@dataclass(frozen=True, eq=False)
class TextConditioning:
    """The text encoders of a family, in the order of their features."""

    encoders: tuple[TextEncoder, ...]
    pooled_window: Literal["first", "last", "weighted"] = "first"
    """Windows of a long text that the pooled features are taken of: one, or all, weighted by their tokens."""
    zero_null: bool = False
    """Whether the empty text is zeros, as SDXL's pipeline has it."""
    null: str = ""
    """Text that is read in place of the empty one."""

    @property
    def width(self) -> int:
        """D of the conditioning `text`."""
        return max(sum(one.width for one in part) for part in self._parts()["text"])

    @property
    def networks(self) -> dict[str, torch.nn.Module]:
        """The encoders by component."""
        return {one.name: one.encoder for one in self.encoders}

    def rules(self) -> dict[str, Any]:
        """Rules by which each encoder is read, its tokenizer, and how features are put together."""
        return {
            "readers": {one.name: one.rules() for one in self.encoders},
            "pooled_window": self.pooled_window,
            "zero_null": self.zero_null,
        } | ({"null": self.null} if self.null else {})  # caches of families without one stay valid

    @property
    def facts(self) -> dict[str, Facts]:
        """Facts of each encoder, as it is read, by component."""
        return {one.name: one.facts for one in self.encoders}

    def tokens(self, texts: Sequence[str]) -> Cond:
        """`empty` [B] bool, and of each encoder NAME_ids [B, K, T] and NAME_counts [B, K]; on the CPU.

        NAME_ragged [B] is there where texts of several lengths are filled up. It is its presence that counts: lengths
        on a device would be waited for.
        """
        read = {one.name: one.tokens([text or self.null for text in texts]) for one in self.encoders}
        # Tokenizers cut a long text at different places; features of encoders are joined window by window.
        n_windows = max(tokens.ids_BKT.shape[1] for tokens in read.values())
        # Asked of the caption itself: what is read in its place may be another text (`null`).
        cond = {"empty": torch.tensor([text == "" for text in texts], device="cpu")}
        for name, tokens in read.items():
            more = n_windows - tokens.ids_BKT.shape[1]
            cond[f"{name}_ids"] = torch.cat([tokens.ids_BKT, tokens.ids_BKT[:, -1:].expand(-1, more, -1)], 1)
            cond[f"{name}_counts"] = pad(tokens.counts_BK, (0, more), value=-1)
            if tokens.ragged:
                cond[f"{name}_ragged"] = torch.ones(len(texts), dtype=torch.bool, device="cpu")
        return cond

    def features(self, tokens: Cond, trained: Collection[str] = ()) -> Cond:
        """Conditioning of tokens on any device: `text` [B, T, D] (and the other names of hidden states), each with
        NAME_mask [B, T] (True: a token to attend to) where encoders say so or windows only pad the batch, and `pooled`
        [B, P] where it is read. Gradients flow through the encoders of the components `trained`; the others compute in
        float32."""
        device = encoders.device_of(self.encoders[0].encoder)
        # Nothing moves in an update: the tokens came with the pinned batch. Prompts come from the host.
        tokens = {name: rows.to(device) for name, rows in tokens.items()}
        read = {one.name: self._read(one, tokens, trained) for one in self.encoders}
        cond: dict[str, Tensor] = {}
        for name, parts in self._parts().items():
            hidden_BTD, mask_BT = _joined([[read[one.name] for one in part] for part in parts])
            cond[name] = hidden_BTD
            if mask_BT is not None:
                cond[f"{name}_mask"] = mask_BT
        pooled = [
            self._pooled(found.pooled_BKP, tokens[f"{name}_counts"])
            for name, found in read.items()
            if found.pooled_BKP is not None
        ]
        if pooled:
            cond["pooled"] = _side_by_side(pooled)
        return self._nulled(cond, tokens["empty"]) if self.zero_null else cond

    def _parts(self) -> Mapping[str, list[list[TextEncoder]]]:
        """By name of hidden states: the encoders of each part."""
        named: dict[str, list[TextEncoder]] = {}
        for one in self.encoders:
            if one.reading.text is not None:
                named.setdefault(one.reading.text, []).append(one)
        return {
            name: [[*part] for _, part in groupby(found, lambda one: one.reading.part)] for name, found in named.items()
        }

    def _read(self, encoder: TextEncoder, tokens: Cond, trained: Collection[str]) -> Features:
        ids_BKT, counts_BK = tokens[f"{encoder.name}_ids"], tokens[f"{encoder.name}_counts"]
        given = Tokens(ids_BKT, counts_BK, f"{encoder.name}_ragged" in tokens)
        with ExitStack() as stack:
            if encoder.name not in trained:
                stack.enter_context(frozen(ids_BKT.device))
            return self._features(encoder, given, tokens)

    def _features(self, encoder: TextEncoder, given: Tokens, tokens: Cond) -> Features:
        """Features of an encoder's tokens, which are among all of `tokens`."""
        return encoder.features(given)

    def _pooled(self, pooled_BKP: Tensor, counts_BK: Tensor) -> Tensor:
        if self.pooled_window == "first" or pooled_BKP.shape[1] == 1:
            return pooled_BKP[:, 0]
        # By the counts on the device: the host does not know how many windows each text has.
        if self.pooled_window == "last":
            last_B = (counts_BK >= 0).sum(1) - 1
            return pooled_BKP[torch.arange(len(pooled_BKP), device=last_B.device), last_B]
        weights_BK = counts_BK.clamp(min=0).to(pooled_BKP.dtype)
        weights_BK[:, 0] += weights_BK.sum(1) == 0  # the empty text has one window
        return (weights_BK[..., None] * pooled_BKP).sum(1) / weights_BK.sum(1, keepdim=True)

    def _nulled(self, cond: Mapping[str, Tensor], empty_B: Tensor) -> Cond:
        """Zeros for the features of empty texts."""
        # A product and no index: the host would wait for which texts are empty.
        keep_B = torch.logical_not(empty_B).float()
        return {
            name: rows if rows.dtype == torch.bool else rows * keep_B.reshape(-1, *[1] * (rows.ndim - 1)).to(rows.dtype)
            for name, rows in cond.items()
        }

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        """Texts that are cut, by index, with a message; not those that one encoder reads whole."""
        each = [one.truncated(texts) for one in self.encoders]
        return {index: how for index, how in each[-1].items() if all(index in cut for cut in each)}

    def lengths(self, batch: Batch) -> list[Hashable]:
        """The number of tokens of each caption that the denoiser reads, as a `Family.layout` of networks that must not
        read any others."""
        counts = {one: batch.draws.get(f"{TOKENS}{one.name}_counts") for one in self.encoders}
        lengths = [one.lengths(rows) for one, rows in counts.items() if rows is not None]
        masks = [rows for name, rows in batch.features.items() if name == f"{OF_TEXTS}text_mask"]
        each = [rows.sum(1).tolist() for rows in (*lengths, *masks)]
        return list(zip(*each, strict=True)) if each else [None] * len(batch.names)

    def files(self) -> dict[str, bytes]:
        """The tokenizers' files, as `tokenizer/FILE` and `tokenizer_2/FILE`."""
        return {
            f"{one.name.replace('text_encoder', 'tokenizer')}/{name}": content
            for one in self.encoders
            for name, content in one.files.items()
        }


@contextmanager
def frozen(device: torch.device) -> Iterator[None]:
    """Within the block, text encoders compute as they do where nothing is trained."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):  # not of the meta device
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(sdpa_kernel(_KERNELS))  # whatever was chosen for what is trained
        yield


def _joined(parts: Sequence[Sequence[Features]]) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, T, D] of parts one after another, narrower ones filled up with zeros (Esser et al. 2024, arXiv
    2403.03206); in each part encoders stand side by side. The mask [B, T] is None where no encoder has one."""
    sides = [_side_by_side([one.hidden_BTD for one in part]) for part in parts]
    # A token counts where any encoder of a part reads one: the other's features there are those of its padding.
    masks = [[one.mask_BT for one in part if one.mask_BT is not None] for part in parts]
    widest = max(side.shape[-1] for side in sides)
    hidden = [side if side.shape[-1] == widest else pad(side, (0, widest - side.shape[-1])) for side in sides]
    if not any(masks):
        return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)), None
    whole = [
        torch.stack(own).any(0) if own else side.new_ones(side.shape[:2], dtype=torch.bool)
        for own, side in zip(masks, sides, strict=True)
    ]
    return (hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)), torch.cat(whole, 1)


def _side_by_side(features: Sequence[Tensor]) -> Tensor:
    return features[0] if len(features) == 1 else torch.cat([*features], -1)
