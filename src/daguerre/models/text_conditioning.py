"""Text conditioning of a UNet: features of one or several text encoders, side by side.

Frozen encoders run where captions are encoded; if one is trained, all run inside the net (models/trained_net.py). Shape
letters: B texts, K windows, T tokens of a window, D features, P pooled features.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from daguerre.models.text_encoder import TextEncoder, unread
from daguerre.models.tokenizers import Tokens
from daguerre.types import Cond

_KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@dataclass(frozen=True, eq=False)
class TextConditioning:
    """The text encoders of a family, in the order of their features."""

    readers: tuple[TextEncoder, ...]
    pooled_window: Literal["first", "last", "weighted"] = "first"
    """Windows of a long text that the pooled features are taken of: one, or all, weighted by their tokens."""
    zero_null: bool = False
    """Whether the empty text is zeros, as SDXL's pipeline has it."""

    @property
    def width(self) -> int:
        """D of all encoders together."""
        return sum(reader.width for reader in self.readers)

    @property
    def networks(self) -> dict[str, torch.nn.Module]:
        """The encoders by component."""
        return {reader.name: reader.encoder for reader in self.readers}

    def rules(self) -> dict[str, Any]:
        """Rules by which each encoder is read, its tokenizer, and how features are put together."""
        return {
            "readers": {reader.name: reader.rules() for reader in self.readers},
            "pooled_window": self.pooled_window,
            "zero_null": self.zero_null,
        }

    @property
    def unread(self) -> list[torch.nn.Parameter]:
        """Parameters that no feature depends on."""
        return [parameter for reader in self.readers for parameter in unread(reader)]

    def tokens(self, texts: Sequence[str]) -> Cond:
        """`empty` [B] bool, and of each encoder NAME_ids [B, K, T] and NAME_counts [B, K]; on the CPU."""
        found = {reader.name: reader.tokens(texts) for reader in self.readers}
        n_windows = max(tokens.ids_BKT.shape[1] for tokens in found.values())
        cond = {"empty": torch.tensor([text == "" for text in texts], device="cpu")}
        for name, tokens in found.items():
            more = n_windows - tokens.ids_BKT.shape[1]
            cond[f"{name}_ids"] = torch.cat([tokens.ids_BKT, tokens.ids_BKT[:, -1:].expand(-1, more, -1)], 1)
            cond[f"{name}_counts"] = pad(tokens.counts_BK, (0, more), value=-1)
        return cond

    def features(self, tokens: Cond, trained: Collection[str] = ()) -> Cond:
        """`text` [B, K T, D], `pooled` [B, P] of an encoder that has it, and `text_mask` [B, K T] (1: a token to
        attend to) where windows only pad the batch, of tokens on any device. Gradients flow through the encoders of the
        components `trained`; the others compute in float32."""
        hidden, cond, device = [], {}, self.readers[0].encoder.device
        tokens = {name: rows.to(device) for name, rows in tokens.items()}
        for reader in self.readers:
            own = Tokens(tokens[f"{reader.name}_ids"], tokens[f"{reader.name}_counts"])
            with ExitStack() as stack:
                if reader.name not in trained:
                    stack.enter_context(torch.no_grad())
                    if torch.amp.is_autocast_available(where := own.ids_BKT.device.type):  # not of the meta device
                        stack.enter_context(torch.autocast(where, enabled=False))
                    stack.enter_context(sdpa_kernel(_KERNELS))  # whatever was chosen for what is trained
                features_BTD, pooled_BKP = reader.features(own.ids_BKT)
            hidden.append(features_BTD)
            if pooled_BKP is not None:
                cond["pooled"] = self._pooled(pooled_BKP, own.counts_BK)
        cond["text"] = hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)
        used_BK = torch.stack([tokens[f"{reader.name}_counts"] for reader in self.readers]).amax(0) >= 0
        if used_BK.shape[1] > 1:
            n_tokens = tokens[f"{self.readers[0].name}_ids"].shape[2]
            cond["text_mask"] = used_BK.repeat_interleave(n_tokens, 1)
        return self._nulled(cond, tokens["empty"]) if self.zero_null else cond

    def _pooled(self, pooled_BKP: Tensor, counts_BK: Tensor) -> Tensor:
        if self.pooled_window == "first" or pooled_BKP.shape[1] == 1:
            return pooled_BKP[:, 0]
        if self.pooled_window == "last":
            last_B = (counts_BK >= 0).sum(1) - 1
            return pooled_BKP[torch.arange(len(pooled_BKP), device=last_B.device), last_B]
        weights_BK = counts_BK.clamp(min=0).to(pooled_BKP.dtype)
        weights_BK[:, 0] += weights_BK.sum(1) == 0  # the empty text has one window
        return (weights_BK[..., None] * pooled_BKP).sum(1) / weights_BK.sum(1, keepdim=True)

    def _nulled(self, cond: dict[str, Tensor], empty_B: Tensor) -> Cond:
        keep_B = torch.logical_not(empty_B).float()
        return cond | {
            name: cond[name] * keep_B.reshape(-1, *[1] * (cond[name].ndim - 1)).to(cond[name].dtype)
            for name in ("text", "pooled")
            if name in cond
        }

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        return {index: how for reader in self.readers for index, how in reader.truncated(texts).items()}

    def files(self) -> dict[str, bytes]:
        """The tokenizers' files, as `tokenizer/FILE` and `tokenizer_2/FILE`."""
        return {
            f"{reader.name.replace('text_encoder', 'tokenizer')}/{name}": content
            for reader in self.readers
            for name, content in reader.files.items()
        }
