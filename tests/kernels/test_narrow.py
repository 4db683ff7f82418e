"""Frozen encoders in bf16: what they encode moves a little, all else not at all."""

import copy

import pytest
import tiny_texts
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from tiny_models import tiny_text_encoder, tiny_vae
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM, Qwen3Model, Qwen3VLForConditionalGeneration

from daguerre.kernels import channels_last, narrow, swap
from daguerre.models.parts.text.language_model import LanguageModel
from daguerre.models.reading import Reading

CPU = torch.device("cpu")


class Casts(TorchDispatchMode):
    """Counts casts of single tensors."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._to_copy.default
        return operation(*args, **kwargs or {})


def off(found, wanted):
    """Relative distance."""
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.fixture
def vae():
    torch.manual_seed(0)
    return tiny_vae().eval().requires_grad_(False)


@pytest.fixture
def reader():
    torch.manual_seed(0)
    return tiny_text_encoder().eval().requires_grad_(False)


@pytest.mark.parametrize("others", [[], [channels_last.enable], [swap.norms, channels_last.enable]])
def test_latents_move_by_thousandths_and_images_not_at_all(vae, others):
    pixels, latents = torch.rand(2, 3, 32, 32) * 2 - 1, torch.randn(2, vae.config.latent_channels, 8, 8)
    wanted, drawn = vae.encode(pixels).latent_dist.mean, vae.decode(latents).sample
    for enable in others:
        enable(vae)
    again = vae.decode(latents).sample
    assert narrow.enable([vae], CPU) == 1
    found = vae.encode(pixels).latent_dist.mean
    assert found.dtype == torch.float32
    assert 1e-5 < off(found, wanted) < 2e-2
    assert torch.equal(vae.decode(latents).sample, again)
    torch.testing.assert_close(again, drawn, rtol=1e-4, atol=1e-5)


def test_text_features_move_by_thousandths_in_every_layer(reader):
    ids = torch.randint(0, 500, (3, 16))
    wanted = reader(ids, output_hidden_states=True)
    assert narrow.enable([reader], CPU) == 1
    found = reader(ids, output_hidden_states=True)
    assert len(found.hidden_states) == len(wanted.hidden_states)
    pairs = [(found.last_hidden_state, wanted.last_hidden_state), (found.pooler_output, wanted.pooler_output)]
    pairs += zip(found.hidden_states[1:], wanted.hidden_states[1:], strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == torch.float32
        assert 1e-5 < off(mine, theirs) < 2e-2


def test_it_holds_where_autocast_is_switched_off_around_it(vae):
    pixels = torch.rand(1, 3, 32, 32)
    wanted = vae.encode(pixels).latent_dist.mean
    narrow.enable([vae], CPU)
    with torch.autocast("cpu", enabled=False):
        assert not torch.equal(vae.encode(pixels).latent_dist.mean, wanted)


@pytest.mark.parametrize("largest", [narrow.LARGEST, 3000])
def test_weights_that_are_cast_at_once_encode_to_the_same_bits(vae, reader, largest, monkeypatch):
    monkeypatch.setattr(narrow, "LARGEST", largest)
    pixels, ids, results, casts = torch.rand(2, 3, 32, 32), torch.randint(0, 500, (3, 16)), [], []
    for at_once in (False, True):
        networks = [copy.deepcopy(vae), copy.deepcopy(reader)]
        weights = [tensor for network in networks for tensor in network.state_dict().values()]
        assert narrow.enable(networks, CPU, at_once) == 2
        with Casts() as seen:
            read = networks[1](ids, output_hidden_states=True)
            results.append((networks[0].encode(pixels).latent_dist.mean, read.pooler_output, *read.hidden_states))
        casts.append(seen.count)
        after = [tensor for network in networks for tensor in network.state_dict().values()]
        assert all(tensor.data_ptr() == weight.data_ptr() for tensor, weight in zip(after, weights, strict=True))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert casts[1] < casts[0] / 2


def test_weights_are_there_again_after_an_error(reader):
    narrow.enable([reader], CPU, at_once=True)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        reader.encoder.layers[0](torch.ones(1, 2, 3), None)
    assert all(p.dtype == torch.float32 and isinstance(p, nn.Parameter) for p in reader.parameters())


@pytest.fixture(params=[Qwen3Model, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration])
def language_model(request):
    torch.manual_seed(0)
    kind = request.param
    made = tiny_texts.qwen3_vl() if kind is Qwen3VLForConditionalGeneration else tiny_texts.qwen3(kind)
    return made.eval().requires_grad_(False)


def hidden(network, ids):
    return LanguageModel().read(network, ids, None, Reading(layers=(-2,), final_norm=False))[0]


def test_language_models_are_narrow_whose_decoder_alone_is_called(language_model):
    ids = torch.randint(0, 200, (2, 9))
    wanted = hidden(language_model, ids)
    assert narrow.enable([language_model], CPU) == 1
    found = hidden(language_model, ids)
    assert found.dtype == torch.float32
    assert 1e-5 < off(found, wanted) < 2e-2


@pytest.mark.parametrize("at_once", [False, True])
def test_weights_that_are_stored_narrow_give_the_same_bits(language_model, at_once):
    ids = torch.randint(0, 200, (2, 9))
    assert not narrow.store(language_model), "random weights have more digits than bfloat16"
    for p in language_model.parameters():
        p.data = p.data.bfloat16().float()
    stored = copy.deepcopy(language_model)
    assert narrow.store(stored)
    types = {type(m): {p.dtype for p in m.parameters(recurse=False)} for m in stored.modules()}
    assert types[nn.Linear] == {torch.bfloat16}
    assert types[nn.Embedding] == {torch.float32}
    assert narrow.enable([language_model, stored], CPU, at_once) == 2
    assert torch.equal(hidden(stored, ids), hidden(language_model, ids))


def test_what_is_trained_stays(vae, reader):
    next(vae.parameters()).requires_grad_(True)
    reader.requires_grad_(True)
    assert narrow.enable([vae, reader, nn.Linear(2, 2)], CPU) == 0


def test_a_network_that_does_not_encode_stays():
    numbers = {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    assert narrow.enable([UNet2DConditionModel(**numbers).requires_grad_(False)], CPU) == 0


def test_a_copy_computes_with_its_own_weights(vae):
    narrow.enable([vae], CPU)
    pixels = torch.rand(1, 3, 32, 32)
    before = vae.encode(pixels).latent_dist.mean
    twin = copy.deepcopy(vae)
    for p in twin.encoder.parameters():
        p.zero_()
    assert torch.equal(vae.encode(pixels).latent_dist.mean, before)
    assert not torch.equal(twin.encode(pixels).latent_dist.mean, before)


def test_weights_are_written_as_they_were(vae, tmp_path):
    weights = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    narrow.enable([vae], CPU)
    vae.encode(torch.rand(1, 3, 32, 32))
    vae.save_pretrained(tmp_path)
    found = AutoencoderKL.from_pretrained(tmp_path).state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
