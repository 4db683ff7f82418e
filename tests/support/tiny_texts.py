"""Tiny text encoders and tokenizers of today's families, in diffusers' folders: hidden states are 32 numbers wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import enlarged, text_encoder, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from daguerre.models.components import ComponentLoader
from daguerre.models.parts.settings import CaptionedSettings
from daguerre.models.parts.text import encoder as text_encoders
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.settings import BASE, Component, ComponentSpec

WIDTH = 32


class Settings(CaptionedSettings):
    """Three text encoders and nothing else."""

    family: str = "texts"
    text_encoder_2: Component = BASE
    tokenizer_2: str = BASE
    text_encoder_3: Component = BASE
    tokenizer_3: str = BASE
    max_sequence_length: int | None = None


def conditioning(folder: Path, readings: Mapping[str, Reading], **values: Any) -> TextConditioning:
    """The text conditioning of a folder with these encoders, by component."""
    names = {name: name.replace("text_encoder", "tokenizer") for name in readings}

    class Own(Settings):
        components = {name: ComponentSpec("text_encoder") for name in names} | {
            name: ComponentSpec("tokenizer") for name in names.values()
        }

    components = ComponentLoader(Own(pretrained_model_name_or_path=str(folder), scheduler=None), 0)
    encoders = [text_encoders.load(components, name, names[name], reading) for name, reading in readings.items()]
    return TextConditioning(tuple(encoders), **values)


def clip(projected: bool = False, layers: int = 3, width: int = WIDTH) -> Any:
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return text_encoder(kind, width, layers, 24, "quick_gelu", projection_dim=width).eval()


def clip_tokenizer() -> Any:
    return tiny_tokenizer()


def t5(width: int = WIDTH) -> Any:
    numbers = {"d_kv": 16, "d_ff": 37, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    network = T5EncoderModel(T5Config(vocab_size=98, d_model=width, pad_token_id=0, eos_token_id=1, **numbers))
    return enlarged(network, "SelfAttention", 3.0).eval()


def t5_tokenizer() -> Any:
    """Letters, with T5's own padding and end; it does not say how long a text may be."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_/#@&+*%$"
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=special + [(letter, -3.0) for letter in letters], extra_ids=0)


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen's chat template, as far as pipelines use it."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|image_pad|>", "<|video_pad|>")
SPECIAL += ("<|vision_start|>", "<|vision_end|>")
# Words of the templates of Qwen-Image and Qwen-Image-2.1 that are one token each, so that these have their real
# lengths: their pipelines drop 34 and 14 tokens; that of Qwen-Image-Edit-2511, with more words, 64.
WORDS = [
    *("Com", "preh", "end", "Ġanalyze", "Ġprovided", "Ġprompt"),
    *("Ġrelationships", "Ġbackground", "Ġdetailing", "Ġquantity", "Ġtexture", "Ġspatial", "Ġobjects", "assistant"),
    *("Describe", "system", "Ġimage", "Ġcolor", "Ġshape", "Ġsize", "Ġtext", "user", "Ġthe", "Ġand", "Ġof", "Ġby"),
]
EDIT_WORDS = [
    *("Ġrequirements", "Ġmaintaining", "Ġconsistency", "Ġappropriate", "Ġinstruction", "Ġfeatures", "ĠGenerate"),
    *(
        "Ġoriginal",
        "Ġexplain",
        "Ġshould",
        "Ġmodify",
        "Ġinput",
        "Ġalter",
        "Ġmeets",
        "Ġwhile",
        "Ġwhere",
        "Ġthen",
        "Ġuser",
    ),
    *("color", "Ġthat", "Ġwith", "Ġkey", "Ġhow", "Ġnew", "Ġor", "Ġ(", "),", "'s", "Ġa", "ĊĊ"),
]


def qwen_tokenizer(more: Sequence[str] = ()) -> Any:
    """Bytes, the words of a template, `more` words and Qwen's special tokens."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(byte) for byte in letters] + [chr(256 + k) for k in range(256 - len(letters))]
    words = sorted([*WORDS, *more], key=len, reverse=True)
    merges = list(dict.fromkeys((word[:k], word[k]) for word in words for k in range(1, len(word))))
    pieces = dict.fromkeys([*symbols, *("".join(pair) for pair in merges), *SPECIAL])
    tokenizer = Qwen2Tokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:]]})
    tokenizer.chat_template = CHAT
    return tokenizer


def _decoder(layers: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 37, "num_attention_heads": 2, "num_key_value_heads": 1}
    return {**sizes, "num_hidden_layers": layers, "vocab_size": 600, "max_position_embeddings": 2048, **more}


def qwen3(kind: Any = Qwen3ForCausalLM, layers: int = 4, **more: Any) -> Any:
    return enlarged(kind(Qwen3Config(head_dim=16, **_decoder(layers, **more))), "proj", 4.0).eval()


def _image_tokens(tokenizer: Any) -> dict[str, int]:
    names = ("image", "<|image_pad|>"), ("video", "<|video_pad|>")
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names}


def qwen25_vl(words: Sequence[str] = ()) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    vision |= {"patch_size": 14, "fullatt_block_indexes": [0]}
    tokens = _image_tokens(qwen_tokenizer(words))
    config = Qwen2_5_VLConfig(text_config=_decoder(2, rope_parameters=rope), vision_config=vision, **tokens)
    return enlarged(Qwen2_5_VLForConditionalGeneration(config), "proj", 4.0).eval()


def qwen3_vl(kind: Any = Qwen3VLModel, layers: int = 4) -> Any:
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, **sections}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    vision |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = _image_tokens(qwen_tokenizer())
    config = Qwen3VLConfig(text_config=_decoder(layers, head_dim=16, **rope), vision_config=vision, **tokens)
    return enlarged(kind(config), "proj", 4.0).eval()


def qwen3_vl_processor(kind: Any = Qwen3VLProcessor, patch: int = 16, words: Sequence[str] = ()) -> Any:
    """A processor of images and text: the real one, but for the part for videos, which torchvision is needed for."""
    limits = {"shortest_edge": 32 * 32, "longest_edge": 1 << 24}
    tokenizer = qwen_tokenizer(words)
    pictures = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=limits)
    check = ProcessorMixin.check_argument_for_proper_class
    with pytest.MonkeyPatch.context() as patch:
        # it would refuse the stand-in
        patch.setattr(ProcessorMixin, check.__name__, lambda self, name, value: type(value))
        videos = SimpleNamespace(merge_size=2)
        made = kind(
            image_processor=pictures, tokenizer=tokenizer, video_processor=videos, chat_template=tokenizer.chat_template
        )

    def save_pretrained(folder: Any, **more: Any) -> None:
        tokenizer.save_pretrained(folder)
        pictures.save_pretrained(folder)

    made.save_pretrained = save_pretrained
    return made


def gemma_tokenizer() -> Any:
    """Letters behind a start; like the real one, it pads on the left."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_/#@&+*%$"
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *letters]
    tokenizer = GemmaTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def language_model(kind: Any) -> Any:
    config = kind.config_class(head_dim=16, **_decoder(3))
    return enlarged(kind(config), "proj", 4.0).eval()


def write(folder: Path, parts: Mapping[str, Any]) -> Path:
    """Writes networks and tokenizers as a pipeline's folder has them."""
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return folder


def seeded(make: Any, seed: int = 0) -> Any:
    """`make()` with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
