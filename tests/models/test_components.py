"""Where the components of a model come from: the base, another place, numbers, one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TEXT_WIDTH, TINY_UNET, prompts, write_sd, write_sdxl
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from daguerre.errors import Absent, UserError
from daguerre.families import sd, sdxl
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Family
from daguerre.models.weights import resolve
from daguerre.models.weights.resolve import Options


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("other"), seed=9)


def load(base: Path, **settings: Any) -> Family:
    return sd.load(sd.Settings(pretrained_model_name_or_path=str(base), **settings), seed=1)


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(next((folder / name).glob("*.safetensors")))


def holds(network: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    own = network.state_dict()
    return all(torch.equal(own[name.removeprefix("text_model.")], value) for name, value in tensors.items())


@pytest.mark.parametrize("name", ["unet", "vae", "text_encoder"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_component_of_another_place(base: Path, other: Path, name: str, whole: bool):
    """The place is a whole pipeline, or the component's own folder."""
    parts = load(base, **{name: str(other if whole else other / name)}).components
    assert holds(parts[name], weights(other, name))
    assert all(holds(parts[rest], weights(base, rest)) for rest in {"unet", "vae", "text_encoder"} - {name})


def test_null_is_random_weights_of_the_bases_numbers(base: Path):
    """One line: everything else pretrained, and the UNet from scratch. The UNet's weights need not be there."""
    made = load(base, unet=None)
    assert made.components["unet"].config.block_out_channels == load(base).components["unet"].config.block_out_channels
    assert not holds(made.components["unet"], weights(base, "unet"))
    again = load(base, unet=None)
    assert holds(again.components["unet"], made.components["unet"].state_dict())
    assert made.pretrained.is_random("unet")


def test_null_needs_no_weights_of_the_base(base: Path, tmp_path: Path):
    folder = shutil.copytree(base, tmp_path / "copy")
    next((folder / "unet").glob("*.safetensors")).unlink()
    load(folder, unet=None)
    with pytest.raises(UserError, match=r"lacks unet/diffusion_pytorch_model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("place", ["./nowhere", ".models/sd15", "--/x", "models/sd15."])
def test_a_path_is_not_taken_for_a_name_of_the_hub(place: str):
    """By its shape it could be OWNER/NAME, which the hub does not allow with these marks."""
    with pytest.raises(UserError, match="there is no folder"):
        resolve.locate(place, {})
    with pytest.raises(UserError, match="there is no file"):
        resolve.file(f"{place}/unet.safetensors", Options())


def test_a_network_from_one_file_of_its_own_names(base: Path, other: Path, tmp_path: Path):
    file = tmp_path / "unet_of_4_steps.safetensors"
    save_file({name: value.half() for name, value in weights(other, "unet").items()}, file)
    made = load(base, unet=str(file))
    assert next(made.components["unet"].parameters()).dtype == torch.float32
    assert holds(
        made.components["unet"], {name: value.half().float() for name, value in weights(other, "unet").items()}
    )
    save_file({"conv_in.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="does not have the weights of this UNet2DConditionModel"):
        load(base, unet=str(file))
    with pytest.raises(UserError, match="there is no file"):
        load(base, unet=str(tmp_path / "absent.safetensors"))


def test_tensors_without_a_place_are_named(base: Path, tmp_path: Path):
    folder = shutil.copytree(base / "unet", tmp_path / "unet")
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | {"down_blocks.0.gate.weight": torch.zeros(2)}, file)
    reading = load(base, unet=str(folder)).pretrained
    assert reading is not None
    assert [f"{folder} has down_blocks.0.gate.weight in" in line for line in reading.unread] == [True]
    reading = load(base, unet=str(folder), ignore_tensors=["*.gate.weight"]).pretrained
    assert reading is not None
    assert reading.unread == []


def test_a_text_encoder_of_numbers_is_built_for_its_tokenizer(base: Path):
    numbers = {"hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = load(base, text_encoder=numbers, unet=TINY_UNET).training(["unet", "text_encoder"])
    config = made.text.encoders[0].encoder.config
    assert (config.vocab_size, config.max_position_embeddings) == (
        514,
        made.text.encoders[0].tokenizer.model_max_length,
    )
    assert {name.partition(".")[0] for name in made.net.state_dict()} == {"unet", "text_encoder"}


@pytest.mark.parametrize("kind", [{}, {"model_type": "t5"}])
def test_misspelt_numbers_of_a_text_encoder_are_refused(base: Path, kind: dict[str, str]):
    with pytest.raises(UserError, match=r"model\.text_encoder: .* has no num_layer.? \(did you mean num_"):
        load(base, text_encoder={"num_layer": 1, **kind}, unet=TINY_UNET)


def test_weights_of_a_variant(base: Path, tmp_path: Path):
    folder = shutil.copytree(base, tmp_path / "copy")
    for file in list(folder.glob("*/*.safetensors")):
        file.rename(file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    assert holds(load(folder, variant="fp16").components["unet"], weights(base, "unet"))
    with pytest.raises(UserError, match=r"lacks unet/diffusion_pytorch_model\.safetensors.*set model.variant=fp16"):
        load(folder)


def test_the_variant_is_chosen_for_each_network_by_what_lies_there(base: Path, tmp_path: Path):
    folder = shutil.copytree(base, tmp_path / "copy")
    with pytest.raises(UserError, match=r"no network of .* has weights of the variant 'fp16'; .*: none"):
        load(folder, variant="fp16")
    plain = folder / "unet" / "diffusion_pytorch_model.safetensors"
    other = {name: value + 1 for name, value in load_file(plain).items()}
    save_file(other, plain.with_name("diffusion_pytorch_model.fp16.safetensors"))
    found = load(folder, variant="fp16").components
    assert holds(found["unet"], other)
    assert holds(found["vae"], weights(base, "vae"))
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    vae.rename(vae.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(UserError, match=r"model\.vae: .*set model\.variant=fp16"):
        load(base, vae=str(folder / "vae"))
    assert holds(load(base, vae=str(folder / "vae"), variant="fp16").components["vae"], weights(base, "vae"))


def test_shards_that_did_not_arrive_are_missed(base: Path, tmp_path: Path):
    """A download that was killed leaves an index without its shards: it is not taken for whole."""
    folder = shutil.copytree(base, tmp_path / "copy")
    whole = folder / "unet" / "diffusion_pytorch_model.safetensors"
    index = whole.with_name(f"{whole.name}.index.json")
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    tensors = load_file(whole)
    half = len(tensors) // 2
    for shard, names in zip(shards, (list(tensors)[:half], list(tensors)[half:]), strict=True):
        save_file({name: tensors[name] for name in names}, whole.with_name(shard))
    placed = {name: shards[i >= half] for i, name in enumerate(tensors)}
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))
    whole.unlink()
    assert holds(load(folder).components["unet"], tensors)
    whole.with_name(shards[1]).unlink()
    with pytest.raises(UserError, match=f"lacks unet/{shards[1]}"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with pytest.raises(UserError, match=r"names '\.\./\.\./secret\.safetensors', which does not exist"):
        load(folder)


def test_the_shards_of_a_variant_are_asked_for_by_both_their_names():
    asked = resolve._patterns(resolve._of_variant({"unet": resolve.network("unet", Options(variant="fp16"))}, "fp16"))
    assert {name for name in asked if "-of-" in name} == {
        "unet/diffusion_pytorch_model.fp16-*-of-*.safetensors",
        "unet/diffusion_pytorch_model-*-of-*.fp16.safetensors",
    }


def test_a_t5_reads_captions(base: Path, tmp_path: Path):
    """As StableDiffusionPipeline would: the last hidden state of all tokens, no mask."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *[(f"▁{c}", -1.0) for c in "abcdefgh"]]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=12)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = T5Config(vocab_size=32, d_model=TEXT_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(tmp_path / "text_encoder")
    made = load(base, text_encoder=str(tmp_path), tokenizer=str(tmp_path), unet=TINY_UNET)
    texts = ["a b c", ""]
    ids = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt").input_ids
    encoder = T5EncoderModel.from_pretrained(tmp_path / "text_encoder")
    with torch.no_grad():
        assert torch.equal(made.encode_prompts(prompts(texts), (3, 16, 16))[0]["text"], encoder(ids).last_hidden_state)
    said = tmp_path / "tokenizer" / "tokenizer_config.json"
    said.write_text(json.dumps({k: v for k, v in json.loads(said.read_text()).items() if k != "model_max_length"}))
    with pytest.raises(UserError, match="does not set the number of tokens of a caption: set model_max_length"):
        load(base, text_encoder=str(tmp_path), tokenizer=str(tmp_path), unet=TINY_UNET)
    with pytest.raises(UserError, match="is a T5"):
        load(base, text_encoder=str(tmp_path), tokenizer=str(tmp_path), unet=TINY_UNET, long_prompts=True)


def test_an_encoder_of_another_kind_is_refused(base: Path, tmp_path: Path):
    folder = shutil.copytree(base / "text_encoder", tmp_path / "text_encoder")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "bert"}))
    with pytest.raises(UserError, match=r"'bert': text encoders can be CLIP or T5"):
        load(base, text_encoder=str(folder))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_config_does_not_say_which_code_computes_attention(base: Path, tmp_path: Path, name: str):
    """transformers would fetch it from the hub, and run it."""
    folder = shutil.copytree(base, tmp_path / "copy")
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "stranger/kernels"}))
    for text_encoder in ("base", None):
        made = load(folder, text_encoder=text_encoder)
        assert made.text.encoders[0].encoder.config._attn_implementation == "sdpa"


def test_what_is_not_trained_is_no_part_of_the_state(base: Path):
    made = load(base).training(["text_encoder"])
    assert {name.partition(".")[0] for name in made.net.state_dict()} == {"text_encoder"}
    assert not any(p.requires_grad for p in made.components["unet"].parameters())
    assert not any(p.requires_grad for p in load(base).text.encoders[0].encoder.parameters())


@pytest.mark.parametrize("write", [write_sd, write_sdxl])
def test_without_memory_the_networks_have_the_same_shapes(write: Any, tmp_path: Path):
    family = sd if write is write_sd else sdxl
    settings = family.Settings(pretrained_model_name_or_path=str(write(tmp_path)))
    with torch.device("meta"):
        bare = family.load(settings, 0)
    whole = family.load(settings, 0)
    assert {p.device.type for part in bare.components.values() for p in part.parameters()} == {"meta"}
    for name, part in whole.components.items():
        shapes = {key: value.shape for key, value in part.state_dict().items()}
        assert {key: value.shape for key, value in bare.components[name].state_dict().items()} == shapes
    assert bare.latent_shape((3, 16, 16)) == whole.latent_shape((3, 16, 16))


def test_what_a_model_is_made_of(monkeypatch, tmp_path: Path):
    """Offline: a known hub model is described by the numbers that ship, and its files are named."""
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resolve.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = "stabilityai/stable-diffusion-2-base"
    settings = sd.Settings(pretrained_model_name_or_path=name, unet=None, vae="stabilityai/sd-vae-ft-mse")
    with torch.device("meta"):
        family = sd.load(settings, 0)
    wanted = {w.place: resolve.missing_files(tmp_path, w.needed) for w in family.pretrained.wanted()}
    assert wanted[name] == [
        "unet/config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer_config.json",
    ]
    assert wanted["stabilityai/sd-vae-ft-mse"] == ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"]
    assert resolve.here(name, Options()) is None
    with pytest.raises(Absent, match="daguerre fetch stabilityai/sd-vae-ft-mse -o DIR"):
        sd.load(settings, 0)
    (of_file,) = ComponentLoader(sd.Settings(pretrained_model_name_or_path="model.safetensors"), 0).wanted()
    assert of_file.needed == {}, "a single file is all that is read"


def test_a_revision_is_of_the_hub_alone(base: Path):
    with pytest.raises(UserError, match=r"model\.revision has no effect on .* set model\.revision=null"):
        load(base, revision="main")
