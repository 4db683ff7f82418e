"""New tokens on a mesh: their rows belong to the embeddings, whatever a text encoder's library calls them."""

import pytest
import torch
import transformers

from daguerre.distributed import sharding_rules
from daguerre.distributed.settings import MeshSettings
from daguerre.models.hosts import ROWS, host
from daguerre.models.network import Network
from daguerre.models.parts.text import encoder, new_tokens
from daguerre.models.parts.text.tokenizers import AbsentTokenizer
from daguerre.models.placement import placement

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LANGUAGE = {**TINY, "num_key_value_heads": 2, "head_dim": 16}
NETWORKS = {
    "clip": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TINY)),
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    ),
    "qwen3": lambda: transformers.Qwen3Model(transformers.Qwen3Config(**LANGUAGE)),
    "qwen3 that writes": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LANGUAGE)),
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**LANGUAGE)),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_of_new_tokens_have_a_place(kind: str, tensor: int):
    network = NETWORKS[kind]()
    reader = encoder.TextEncoder("text_encoder", network, AbsentTokenizer(77), {})
    new_tokens.attach(reader, {"<cat>": torch.zeros(2, 32)}, {})
    names = [name for name, _ in network.named_parameters()]
    (rows,) = (name for name in names if name.endswith(".rows"))
    assert host(rows) == (rows, ROWS)
    mesh = MeshSettings(ici_fsdp_parallelism=2, ici_tensor_parallelism=tensor, ici_data_parallelism=1).resolved(
        2 * tensor, 1
    )
    found = placement(Network(network, "text_encoder", reader.kind.facts), sharding_rules.DEFAULT, mesh)
    assert [each.name for each in found.placed] == names
    assert next(each for each in found.placed if each.name == rows).tensor is None
    assert found.patterns[rows] == rows
    assert not found.problems
