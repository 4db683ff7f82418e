"""A mask that hides nothing is made on a GPU, where looking into it would make the host wait."""

import torch
from transformers import CLIPTextConfig, masking_utils

from daguerre.models.parts.text import masks


def test_a_mask_is_made_as_it_is_given():
    config = CLIPTextConfig(hidden_size=8, num_attention_heads=1, attn_implementation="sdpa")
    given = {"config": config, "inputs_embeds": torch.zeros(2, 5, 8), "past_key_values": None}

    def made(attention_mask):
        return masking_utils.create_causal_mask(attention_mask=attention_mask, **given)

    nothing, first = torch.ones(2, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert made(nothing) is None
    with masks.unread(torch.device("cpu")):
        assert made(nothing) is None
    with masks.unread(torch.device("cuda")):
        assert torch.equal(made(nothing), torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5))
        hidden = made(first)
    assert torch.equal(hidden, made(first)), "the same where something is hidden"
    assert made(nothing) is None
