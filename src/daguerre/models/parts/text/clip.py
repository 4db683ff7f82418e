"""CLIP's text encoder (Radford et al. 2021, arXiv 2103.00020), OpenAI's or OpenCLIP's, with a projection or without.

It looks back alone, so a text's features do not depend on its padding.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from daguerre.models.components import ComponentLoader
from daguerre.models.parts import facts
from daguerre.models.parts.text.network import TextNetwork, left_side
from daguerre.models.reading import Reading
from daguerre.models.weights.original_names import PrefixedNames


class CLIP(TextNetwork):
    """transformers' CLIPTextModel and CLIPTextModelWithProjection."""

    name = "clip"
    called = "CLIP"
    model_types = ("clip_text_model", "clip")
    facts = facts.CLIP_TEXT
    chosen = True
    file_keys = ("clip_l", "clip_g")
    file_names = PrefixedNames(("text_model.",), apart=("text_projection.",))

    def window(self, config: Any) -> int:
        return int(config.max_position_embeddings)

    def network(
        self, components: ComponentLoader, component: str, config: Mapping[str, Any], reading: Reading, tokenizer: Any
    ) -> Any:
        numbers = {} if tokenizer is None else decided(tokenizer)
        architectures = config.get("architectures") or ()
        is_place = isinstance(getattr(components.settings, component), str)
        # Opened with a projection, it would lack the weights of one: its file has none.
        if reading.pooled == "projected" and is_place and architectures == ["CLIPTextModel"]:
            return _projecting(components.network(component, CLIPTextModel, numbers))
        projects = reading.pooled == "projected" or "CLIPTextModelWithProjection" in architectures
        return components.network(component, CLIPTextModelWithProjection if projects else CLIPTextModel, numbers)

    def tokenizer(self, folder: Path) -> Any:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)

    def problem(self, tokenizer: Any, config: Any, reading: Reading) -> str | None:
        # transformers 5 silently builds a tokenizer of 2 tokens when the files are not what it expects.
        if len(tokenizer) != config.vocab_size:
            return (
                f"has {len(tokenizer)} tokens, but the text encoder has {config.vocab_size}: they do not belong "
                "together, or the tokenizer's files are incomplete (tokenizer.json, or vocab.json with merges.txt)"
            )
        if tokenizer.model_max_length > config.max_position_embeddings:
            return (
                f"sets model_max_length to {tokenizer.model_max_length}, but the text encoder reads "
                f"{config.max_position_embeddings} tokens: correct model_max_length in tokenizer_config.json"
            )
        return left_side(tokenizer)

    def read(
        self, network: Any, ids_BT: Tensor, mask_BT: Tensor | None, reading: Reading
    ) -> tuple[Tensor, Tensor | None]:
        (layer,) = reading.layers
        last = layer == -1 and reading.final_norm
        out = network(ids_BT, attention_mask=mask_BT, output_hidden_states=not last)
        hidden = out.last_hidden_state if last else out.hidden_states[layer]
        if reading.final_norm and not last:
            hidden = final_norm(network)(hidden)
        pooled = {"plain": "pooler_output", "projected": "text_embeds", None: None}[reading.pooled]
        return hidden, out[pooled] if pooled else None

    def unread(self, network: Any, reading: Reading) -> list[nn.Parameter]:
        """Layers behind the one that is read, and a last norm that is left out: pooled features come out of the last
        layer, and depend on all."""
        if reading.pooled:
            return []
        layers = next(m for name, m in network.named_modules() if name.endswith("encoder.layers"))
        behind: list[nn.Module] = list(layers)[len(layers) + reading.layers[0] + 1 :]
        behind += [] if reading.final_norm else [final_norm(network)]
        behind += [network.text_projection] if hasattr(network, "text_projection") else []
        return [parameter for module in behind for parameter in module.parameters()]


def final_norm(network: Any) -> Any:
    """CLIP's last norm, whose depth differs between versions of transformers."""
    return next(module for name, module in network.named_modules() if name.endswith("final_layer_norm"))


def decided(tokenizer: Any) -> dict[str, Any]:
    """Numbers that a tokenizer decides of a network that is built for it."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _projecting(network: Any) -> Any:
    """A CLIPTextModel with a projection that changes nothing, for families that read projected features."""
    config = copy.deepcopy(network.config)
    config.projection_dim = config.hidden_size
    with torch.device("meta"):
        made = transformers.CLIPTextModelWithProjection(config)
    # The same layers: what is trained and what is exported stay one network.
    made.text_model = network
    identity = torch.eye(config.hidden_size, device=network.device)
    made.text_projection.weight = nn.Parameter(identity, requires_grad=False)
    made.config.architectures = ["CLIPTextModelWithProjection"]
    return made.eval()


def as_read(network: Any, reading: Reading, stock: Reading) -> Any:
    """The network for a pipeline that reads it as `stock` says: with fewer layers if it is read earlier than there.
    Weights are shared, not copied."""
    (layer,), (theirs,) = reading.layers, stock.layers
    if layer >= theirs or reading.final_norm != stock.final_norm:
        return network
    layers = network.config.num_hidden_layers + layer - theirs
    config = type(network.config)(**(network.config.to_dict() | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        made = type(network)(config)
    tensors = network.state_dict()
    made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
    return made
