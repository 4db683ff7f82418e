"""Language models as text encoders: hidden states of their layers. They look back alone, from a text's first token on.

Of a model that also sees or speaks, only the decoder of its text is run, and what sees where images are among the
tokens (models/parts/text/pictures.py). Shape letters: B texts, T tokens, D features.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer

from daguerre.models.components import ComponentLoader
from daguerre.models.network import Facts
from daguerre.models.parts.text.network import TextNetwork, other_vocabulary
from daguerre.models.parts.text.seen import Seen
from daguerre.models.reading import Reading
from daguerre.models.weights.original_names import PrefixedNames

_CLASSES = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLModel"),
    "gemma2": ("Gemma2Model", "Gemma2ForCausalLM"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "mistral3": ("Mistral3ForConditionalGeneration", "Mistral3Model"),
}
"""Classes of transformers by `model_type`, the one first that is built from numbers. As names: each is a module of the
library that takes time to import, and a run needs one at most."""


_NAMES = PrefixedNames(("model.", "language_model."), apart=("visual.", "lm_head."))
"""In ComfyUI's files, which have the names of transformers before or after wrappers were put around them."""


class LanguageModel(TextNetwork):
    """A language model: Qwen, Gemma or Mistral."""

    name = "language_model"
    called = "language model"
    model_types = tuple(_CLASSES)
    facts = Facts(
        blocks=(
            *("Qwen3DecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer"),
            *("Gemma2DecoderLayer", "MistralDecoderLayer"),
        ),
        called=("Qwen2_5_VLTextModel", "Qwen3VLTextModel", "MistralModel"),  # the decoders of those that also see
        layers={
            "attention": ("layers.*.self_attn.[qkvo]_proj",),
            "ff": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj", "layers.*.mlp.down_proj"),
        },
        # Queries have more heads than keys and values, and so another shape.
        readers=(("self_attn", "k_proj", "v_proj"), ("mlp", "gate_proj", "up_proj")),
        published_bf16=True,
    )
    wide = True
    has_added_words = True
    file_keys = ("language_model",)
    file_names = _NAMES

    def width(self, config: Any) -> int:
        return int(config.get_text_config().hidden_size)

    def depth(self, config: Any) -> int:
        return int(config.get_text_config().num_hidden_layers)

    def window(self, config: Any) -> int:
        return int(config.get_text_config().max_position_embeddings)

    def network(
        self, components: ComponentLoader, component: str, config: Mapping[str, Any], reading: Reading, tokenizer: Any
    ) -> Any:
        known = _CLASSES[config["model_type"]]
        name = next((name for name in config.get("architectures") or () if name in known), known[0])
        kind = getattr(transformers, name)
        # Of a model that also sees, this number is inside its config of the text.
        decides = tokenizer is not None and hasattr(kind.config_class(), "vocab_size")
        return components.network(component, kind, {"vocab_size": len(tokenizer)} if decides else {}, _NAMES)

    def tokenizer(self, folder: Path) -> Any:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def problem(self, tokenizer: Any, config: Any, reading: Reading) -> str | None:
        if type(tokenizer).__name__.startswith("T5"):  # smaller, so that all of its numbers are tokens here, too
            return f"is one of T5, whose numbers mean other words to a {config.model_type}: give its own"
        return other_vocabulary(tokenizer, config.get_text_config().vocab_size)

    def read(
        self, network: Any, ids_BT: Tensor, mask_BT: Tensor | None, reading: Reading, images: Seen | None = None
    ) -> tuple[Tensor, Tensor | None]:
        decoder, wanted = network.get_decoder(), _numbers(network, reading)
        given: dict[str, Any] = {"input_ids": ids_BT}
        if images is not None:
            given = _with_images(decoder, ids_BT, images)
        if reading.padding_place is not None and mask_BT is not None:
            places_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
            given["position_ids"] = places_BT.masked_fill(mask_BT == 0, reading.padding_place)
        layers, seen = decoder.layers, dict[int, Tensor]()
        # transformers' own list of hidden states has the last one behind the norm, as of version 5; each is the input
        # of the layer behind it, and the last one that of the norm.
        behind = [*layers[: max(wanted)], decoder.norm]
        # By hooks, which keep the states that are read alone: all of them take gigabytes for a batch.
        hooks = [
            behind[layer].register_forward_pre_hook(lambda _, inputs, layer=layer: seen.update({layer: inputs[0]}))
            for layer in {*wanted}
        ]
        if ids_BT.is_meta:
            # transformers looks into numbers to choose a mask, and there are none; a whole mask it takes as it is.
            mask_BT = ids_BT.new_ones(len(ids_BT), 1, *2 * ids_BT.shape[1:], dtype=torch.bool)
        decoder.layers = layers[: max(wanted)]  # those behind would be run for nothing: of klein's a quarter
        try:
            # Without the cache of keys and values: nothing is written behind these tokens.
            decoder(attention_mask=mask_BT, use_cache=False, **given)
        finally:
            decoder.layers = layers
            for hook in hooks:
                hook.remove()
        states = [seen[layer] for layer in wanted]
        states = [decoder.norm(state) for state in states] if reading.final_norm else states
        return torch.cat(states, -1), None

    def unread(self, network: Any, reading: Reading) -> list[nn.Parameter]:
        """Layers behind the last one that is read, the last norm, and all that sees or speaks."""
        decoder = network.get_decoder()
        layers = decoder.layers[: max(_numbers(network, reading))]
        read = [decoder.embed_tokens, *layers, *([decoder.norm] if reading.final_norm else [])]
        depended = {id(parameter) for module in read for parameter in module.parameters()}
        return [parameter for parameter in network.parameters() if id(parameter) not in depended]


def _with_images(decoder: Any, ids_BT: Tensor, images: Seen) -> dict[str, Any]:
    """Arguments of a decoder for tokens with images among them."""
    places_3BT = images.places(ids_BT.shape[1], ids_BT.device).expand(-1, len(ids_BT), -1)
    given: dict[str, Any] = {"inputs_embeds": images.put(decoder.embed_tokens(ids_BT)), "position_ids": places_3BT}
    if images.deeper:
        is_image_BT = torch.zeros(ids_BT.shape, dtype=torch.bool, device=ids_BT.device)
        for start, end in images.stretches:
            is_image_BT[:, start:end] = True
        deeper = [rows_BSD.flatten(0, 1) for rows_BSD in images.deeper]
        given |= {"visual_pos_masks": is_image_BT, "deepstack_visual_embeds": deeper}
    return given


def _numbers(network: Any, reading: Reading) -> list[int]:
    """The hidden states that are read: the embeddings are 0, and each layer's has its number from 1 on."""
    return [layer % (len(network.get_decoder().layers) + 1) for layer in reading.layers]
