"""LoRAs of Stage C and Stage B: files that Stability's own code has written, ComfyUI's names, what is refused."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cascade_networks import loaded
from tiny_cascade import stage_b, stage_c, write_decoder, write_prior
from torch import nn

from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.families import cascade_c
from daguerre.families.cascade import lora_names, words
from daguerre.models.export.about import UNKNOWN
from daguerre.models.lora_files import forms, header, read
from daguerre.models.lora_files.addition import KOHYA_FILE
from daguerre.models.parts.text import new_tokens, token_files

HERE = Path(__file__).parent
DIGESTS = {
    "lora_attn.safetensors": "3e7f23d1d85cf990",
    "lora_more.safetensors": "8ed718e11df5ebb7",
    "lora.npz": "ada610b4c4dcb7f5",
}


def added(network: nn.Module, file: Path) -> None:
    """Puts a file's additions into the weights of a network."""
    for each in read.read(file, {"prior": network})["prior"]:
        weight: Any = network.get_submodule(each.layer).weight
        weight.data.copy_(each.weight(weight.data))


def test_files_are_those_that_were_recorded():
    assert {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16] for name in DIGESTS} == DIGESTS


@torch.no_grad()
@pytest.mark.parametrize("name", ["attn", "more"])
def test_a_numbered_file_has_the_effect_that_it_has_in_stabilitys_code(name):
    network, r = loaded("prior"), torch.tensor([0.2, 0.9])
    with np.load(HERE / "stability.npz") as file:
        given = [torch.from_numpy(file[f"given/{part}"]) for part in ("x_c", "pooled", "text", "image")]
    before = network(given[0], r, *given[1:]).sample
    added(network, HERE / f"lora_{name}.safetensors")
    wanted = torch.from_numpy(np.load(HERE / "lora.npz")[name])
    found = network(given[0], r, *given[1:]).sample
    assert (wanted - before).abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_a_numbered_file_is_converted_to_names(form, tmp_path):
    networks = {"prior": loaded("prior")}
    additions = read.read(HERE / "lora_attn.safetensors", networks)
    forms.write(form, tmp_path / "named.safetensors", networks, additions)  # reads back what it has written
    assert len(additions["prior"]) == 4 * 6, "q, k, v and the output of the attention of six blocks"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda t: t | {"embeddings.embeddings": torch.ones(1, 1280), "embeddings.indices": torch.tensor([49408])},
         r"trained words .*49408.* only in the YAML"),
        (lambda t: {name: value for name, value in t.items() if "weights.3." not in name}, "layers are missing"),
        (lambda t: {name: value for name, value in t.items() if int((re.findall(r"\d+", name) or ["9"])[0]) < 4},
         "numbers its 4 layers without their names"),
    ],
)  # fmt: skip
def test_what_a_numbered_file_does_not_say_is_refused(changed, said, tmp_path):
    tensors = changed(load_file(HERE / "lora_attn.safetensors"))
    save_file(tensors, tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match=said):
        read.read(tmp_path / "theirs.safetensors", {"prior": loaded("prior")})


def test_a_numbered_file_is_refused_by_other_models():
    with pytest.raises(UserError, match="a LoRA for Stage C of Stable Cascade, which this model is not"):
        read.read(HERE / "lora_attn.safetensors", {"unet": nn.Linear(2, 2)})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bases")
    return {"prior": stage_c(write_prior(folder / "c")), "decoder": stage_b(write_decoder(folder / "b"))}


def config(model: dict[str, Any], *given: str) -> configs.Config:
    tree = {
        "run_name": "x",
        "model": model,
        "objective": {"name": "eps", "schedule": {"name": "cosine"}},
        "data": {"source": "folder", "path": ".", "resolution": 32},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    return configs.load("lora", ["adapter.name=lora", "adapter.rank=2", *given], whole=tree).config


@pytest.mark.parametrize("component", ["prior", "decoder"])
def test_names_are_comfyuis(component, bases, tmp_path):
    """Its rule: the names of Stability's file, attention's fused product as to_q, to_k, to_v, dots as underscores."""
    layers = "to_q, to_k, to_v, to_out.0, clip_txt_pooled_mapper, q_proj, k_proj, v_proj, out_proj"
    own = [f"adapter.targets=[{layers}]", "adapter.ranks.text_encoder=2"]
    parts = build(config(bases[component], *own), torch.device("cpu"))
    parts.attached.export(tmp_path / "out", parts.objective, None)
    there = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / "out" / KOHYA_FILE) if ".lora_" in name}
    recorded = [name.removesuffix(".weight") for name in load_file(HERE / f"{component}.safetensors")]
    theirs = {
        f"{'lora_prior_unet' if component == 'prior' else 'lora_unet'}_{layer.replace('.', '_')}"
        for name in recorded
        for layer in [name.replace("in_proj_weight", part) for part in ("to_q", "to_k", "to_v")]
    }
    texts = {name for name in there if name.startswith("lora_prior_te_text_model_encoder_layers_")}
    assert len(texts) == 2 * 4
    assert there - texts
    blocks = {re.sub(r"_blocks_\d+_\d+_", "_blocks_N_N_", name) for name in theirs}
    assert {re.sub(r"_blocks_\d+_\d+_", "_blocks_N_N_", name) for name in there - texts} <= blocks


@pytest.mark.parametrize(("component", "frozen"), [("prior", "effnet"), ("decoder", "vqgan"), ("decoder", "effnet")])
def test_what_makes_latents_has_no_adapter(component, frozen, bases):
    with pytest.raises(UserError, match=rf"{frozen} is not a component .* it reads or makes images"):
        config(bases[component], f"adapter.ranks.{frozen}=2")


@pytest.fixture
def worded(bases, tmp_path) -> Any:
    """A config of Stability's code whose LoRA has words beside it: `[rex]` from the tokens that begin with d, and all
    tokens that begin with e, with offsets; the reader of the base that it is for, and (table, offsets, ids) of all."""
    reader = _reader(bases)
    table = new_tokens.table(reader).clone()
    vocabulary = reader.tokenizer.get_vocab()
    existing = [number for word, number in vocabulary.items() if re.search("^e", word)]
    ids = torch.tensor([len(vocabulary), *existing])
    offsets = torch.randn(len(ids), table.shape[1], generator=torch.Generator().manual_seed(3))
    own = load_file(HERE / "lora_attn.safetensors") | {"embeddings.embeddings": offsets, "embeddings.indices": ids}
    save_file(own, tmp_path / "lora.safetensors")
    said = {"module_filters": [".attn"], "rank": 3, "train_tokens": [["[rex]", "^d"], ["^e", None]]}
    path = tmp_path / "lora_c_3b.yaml"
    path.write_text(yaml.safe_dump({**said, "lora_checkpoint_path": "lora.safetensors"}))
    return path, reader, (table, offsets, ids)


def _reader(bases: dict[str, dict[str, Any]]) -> Any:
    return words.reader(cascade_c.Settings.model_validate(bases["prior"]))


def test_words_beside_a_numbered_file_are_those_of_its_config(worded):
    """As their code puts them into the table: what a new word starts from, and an offset each."""
    path, reader, (table, offsets, ids) = worded
    new, existing = words.read(path, lora_names.config(path), reader)
    vocabulary = reader.tokenizer.get_vocab()
    start = table[[number for word, number in vocabulary.items() if word.startswith("d")]].mean(0)
    assert new.keys() == {"[rex]"}
    torch.testing.assert_close(new["[rex]"][0], start + offsets[0])
    assert {vocabulary[word] for word in existing} == {*ids[1:].tolist()}
    for number, offset in zip(ids[1:].tolist(), offsets[1:], strict=True):
        word = next(word for word, own in vocabulary.items() if own == number)
        assert torch.equal(existing[word][0], table[number] + offset)


@pytest.mark.long  # of the quick tests, the config is converted with its words
def test_generate_takes_a_config_with_its_lora_and_its_words(worded, bases, tmp_path, capsys):
    """The words and the layers each change the image; without the config the file is refused."""
    path, _, _ = worded
    model, drawn = bases["prior"], {}
    given = [f"model.effnet={model['effnet']}", f"model.previewer={model['previewer']}", "guidance_scale=20"]
    given += [f"model.prior={HERE / 'prior.safetensors'}", "height=64", "width=64", "num_inference_steps=2"]
    command = ["generate", model["pretrained_model_name_or_path"], "prompt=a [rex]", *given]
    for name, use in (
        ("base", "{}"),
        ("layers", f"{{{HERE / 'lora_attn.safetensors'}: 1}}"),
        ("both", f"{{{path}: 1}}"),
    ):
        assert main.run([*command, f"out={tmp_path / name}", f"use={use}"]) == 0
        drawn[name] = np.asarray(Image.open(tmp_path / name / "000.png")).astype(int)
    said = capsys.readouterr().out
    assert "[rex], 1 vector for text_encoder" in said
    assert "layers of prior" in said
    assert all(np.abs(drawn["both"] - drawn[other]).max() > 2 for other in ("base", "layers"))
    assert main.run([*command, f"use={{{tmp_path / 'lora.safetensors'}: 1}}"]) == 2
    assert "give that YAML in place of the file" in capsys.readouterr().err


def test_a_config_is_converted_with_its_words(worded, bases, tmp_path, capsys):
    path, reader, _ = worded
    given = ["convert", "lora", str(path), "format=kohya", f"out={tmp_path / 'rex.safetensors'}"]
    assert main.run(given) == 2
    assert "base=FOLDER" in capsys.readouterr().err
    prior = save_prior(bases, tmp_path)
    assert main.run([*given, f"base={prior}"]) == 0, capsys.readouterr().err
    assert any(".lora_" in name for name in load_file(tmp_path / "rex.safetensors"))
    new, existing = words.read(path, lora_names.config(path), reader)
    again = token_files.read(tmp_path / "rex-words", [reader])
    assert [{name: own["text_encoder"].tolist() for name, own in each.items()} for each in again] == [
        {name: rows.tolist() for name, rows in each.items()} for each in (new, existing)
    ]
    for written, kind in (("rex.safetensors", "lora"), ("rex-words/rex.safetensors", "textual-inversion")):
        with safe_open(tmp_path / written, "pt") as file:
            told = file.metadata()
        assert told["modelspec.architecture"] == f"stable-cascade-v1-prior/{kind}"
        assert "modelspec.resolution" not in told, "the config does not say it"
        assert "ss_base_model_version" not in told
    of_onetrainer = load_file(tmp_path / "rex-words" / "rex.safetensors")
    assert [*of_onetrainer] == ["clip_g"]
    assert token_files.read(tmp_path / "rex-words" / "rex.safetensors", [reader])[0].keys() == {"[rex]"}


@pytest.mark.parametrize(("component", "said"), [("prior", "prior"), ("decoder", "stage-b")])
def test_headers_name_the_stage(component, said):
    found = header.modelspec({component: loaded(component)}, UNKNOWN)
    assert found["modelspec.architecture"] == f"stable-cascade-v1-{said}/lora"


@pytest.mark.long
def test_tokens_in_the_file_of_a_lora_are_used_with_it(bases, tmp_path):
    """As OneTrainer bundles them: the same images as of both from files of their own."""
    width = new_tokens.table(_reader(bases)).shape[1]
    rows = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    base, lora = save_prior(bases, tmp_path), tmp_path / "lora.safetensors"
    theirs = str(HERE / "lora_attn.safetensors")
    assert main.run(["convert", "lora", theirs, "format=kohya", f"base={base}", f"out={lora}"]) == 0
    save_file({"clip_g": rows}, tmp_path / "toy.safetensors")
    save_file(load_file(lora) | {"bundle_emb.toy.clip_g": rows}, tmp_path / "both.safetensors")
    model = bases["prior"]
    asked = [f"model.effnet={model['effnet']}", f"model.previewer={model['previewer']}", "guidance_scale=20"]
    command = ["generate", str(base), "prompt=a toy", *asked, "height=64", "width=64", "num_inference_steps=2"]
    used = {"lora": f"{lora}: 0.7", "whole": f"{tmp_path / 'both.safetensors'}: 0.7"}
    used["apart"] = f"{used['lora']}, {tmp_path / 'toy.safetensors'}: 1"
    drawn = {}
    for name, places in used.items():
        assert main.run([*command, f"out={tmp_path / name}", f"use={{{places}}}"]) == 0
        drawn[name] = np.asarray(Image.open(tmp_path / name / "000.png")).astype(int)
    assert np.array_equal(drawn["apart"], drawn["whole"])
    assert np.abs(drawn["apart"] - drawn["lora"]).max() > 2


def save_prior(bases, folder: Path) -> Path:
    """The base with the recorded Stage C."""
    base = shutil.copytree(bases["prior"]["pretrained_model_name_or_path"], folder / "base")
    loaded("prior").save_pretrained(base / "prior")
    return base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_tokens": [["[rex]", "^d"]]}, "are those of"),
        ({"lora_checkpoint_path": "other.safetensors"}, "there is no such file"),
        ({"lora_checkpoint_path": None}, "does not say where its LoRA is"),
        ({"module_filters": None, "drop": "module_filters"}, "no config of a LoRA"),
        ({"train_tokens": ["^e"]}, "must be pairs"),
    ],
)
def test_configs_that_do_not_fit_are_refused(change, message, worded):
    path, reader, _ = worded
    said = {**yaml.safe_load(path.read_text()), **change}
    said = {name: value for name, value in said.items() if name not in ("drop", change.get("drop"))}
    path.write_text(yaml.safe_dump(said))
    with pytest.raises(UserError, match=message):
        words.read(path, lora_names.config(path), reader)
