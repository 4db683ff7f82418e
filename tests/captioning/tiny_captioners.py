"""Tiny random networks of the classes of captioners that write text, with their processors."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def blip(folder: Path) -> Path:
    """A tiny random network of BLIP's class that says `red`, with its processor."""
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "red"]
    own = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 8, "num_hidden_layers": 1}
    own |= {"num_attention_heads": 2}
    texts = {"vocab_size": len(words) + 1, "encoder_hidden_size": 16, "max_position_embeddings": 32}
    # The first token of a caption is none of the tokenizer's, as in the published files.
    texts |= {"bos_token_id": len(words), "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3}
    config = transformers.BlipConfig(
        text_config=own | texts, vision_config=own | {"image_size": 16, "patch_size": 8}, projection_dim=8
    )
    torch.manual_seed(0)
    model = transformers.BlipForConditionalGeneration(config)
    model.text_decoder.get_output_embeddings().bias.data[words.index("red")] = 100.0
    model.save_pretrained(folder)
    images = transformers.BlipImageProcessorPil(size={"height": 16, "width": 16})
    tokens = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    transformers.BlipProcessor(images, tokens).save_pretrained(folder)
    return folder


def florence2(folder: Path) -> Path:
    """A tiny random network of Florence-2's class that says `red`, with its processor."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "<image>", "red", "Describe", "What", "does", "the"]
    vision = {"depths": (1, 1, 1, 1), "embed_dim": (8, 8, 8, 8), "num_heads": (1, 1, 1, 1), "num_groups": (1, 1, 1, 1)}
    texts = {"vocab_size": len(words), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    texts |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    texts |= {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
    texts |= {"max_position_embeddings": 64, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = transformers.Florence2Config(
        vision_config=vision | {"projection_dim": 16, "window_size": 2},
        text_config={"model_type": "bart", "decoder_start_token_id": 2, "forced_eos_token_id": 2, **texts},
        image_token_id=4, bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Florence2ForConditionalGeneration(config)
    model.get_output_embeddings().weight.data[5] *= 100
    model.save_pretrained(folder)
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    images = transformers.CLIPImageProcessorPil(
        size={"height": 64, "width": 64}, crop_size={"height": 64, "width": 64}, do_center_crop=False
    )
    images.image_seq_length = 5
    transformers.Florence2Processor(images, tokens).save_pretrained(folder)
    return folder


def qwen3_vl(folder: Path) -> Path:
    """A tiny random network of Qwen3-VL's class, with the files of its processor."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    vocabulary = [*special, "<|video_pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    own = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE,
        additional_special_tokens=vocabulary[:7],
    )  # fmt: skip
    texts = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    texts |= {"initializer_range": 0.5}  # so large that what stands before the last word counts
    texts |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048}
    texts |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=texts, vision_config=vision, image_token_id=5, video_token_id=6, vision_start_token_id=3,
        vision_end_token_id=4,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    size = {"shortest_edge": 4096, "longest_edge": 1 << 24}
    Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(
        folder
    )
    return folder
