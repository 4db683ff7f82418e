"""The adapter `tokens`: rows of their own, which diffusers reads, and a vocabulary that stays as it is to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from quick_cases import chosen
from safetensors.torch import load_file, save_file
from tiny_models import write_sd, write_sdxl
from torch import nn

from daguerre.assembly import base_digests
from daguerre.assembly.parts import Components, build, outline
from daguerre.config import config as configs
from daguerre.models.parts.text import new_tokens, token_files
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.tokenizers import files, loaded

PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
ENCODERS = {"sd": ["text_encoder"], "sdxl": ["text_encoder", "text_encoder_2"]}
TOY = ("adapter.name=tokens", "adapter.placeholder_token=<toy>", "adapter.num_vectors=3")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {"sd": write_sd(folder / "sd") or folder / "sd", "sdxl": write_sdxl(folder / "sdxl") or folder / "sdxl"}


def config(kind: str, base: Path, *given: str) -> configs.Config:
    tree = {
        "run_name": "x",
        "model": {"family": kind, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "data": {"source": "folder", "path": str(base), "resolution": 16},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    return configs.load("tokens", [*given], whole=tree).config


def built(kind: str, base: Path, *given: str) -> Components:
    parts = build(config(kind, base, *(given or TOY)), torch.device("cpu"))
    parts.net.eval()
    return parts


def readers(parts: Components) -> dict[str, TextEncoder]:
    return {reader.name: reader for reader in parts.family.text.encoders}


def rows(parts: Components) -> list[nn.Parameter]:
    """Those that are trained, an encoder each."""
    return [p for name, p in parts.net.named_parameters() if name.endswith(".rows")]


@torch.no_grad()
def moved(parts: Components) -> Components:
    generator = torch.Generator().manual_seed(1)
    for each in rows(parts):
        each.add_(torch.randn(each.shape, generator=generator))
    return parts


def loss(parts: Components, texts: list[str]) -> torch.Tensor:
    cond = parts.family.text.tokens(texts)
    cond |= {name: value.repeat(len(texts), 1) for name, value in {"sizes": torch.ones(1, 6)}.items()}
    if parts.family.components.keys().isdisjoint({"text_encoder_2"}):
        cond.pop("sizes")
    x = torch.randn(len(texts), *parts.family.latent_shape((3, 16, 16)), generator=torch.Generator().manual_seed(2))
    return parts.net(x, torch.full((len(texts),), 10.0), cond).square().mean()


QUICK = chosen(PIPELINES, lambda kind: kind == "sdxl")


@pytest.mark.parametrize("kind", QUICK)
def test_rows_learn_as_a_whole_table_does_whose_old_rows_are_put_back(kind, pipelines):
    """The oracle: diffusers' way, a table that is trained whole and whose old rows are restored after each update."""
    parts, base = built(kind, pipelines[kind]), built(kind, pipelines[kind])
    texts = ["a <toy>", "the <toy> of d", "nothing"]
    before = {name: p.clone() for name, p in parts.net.named_parameters()}
    with base.attached.merged():
        tables = [reader.encoder.get_input_embeddings().weight for reader in readers(base).values()]
        kept = [table.detach().clone() for table in tables]
        for table in tables:
            table.requires_grad_(True)
        ours, theirs = torch.optim.AdamW(rows(parts), lr=1e-2), torch.optim.AdamW(tables, lr=1e-2)
        for _ in range(4):
            ours.zero_grad(), theirs.zero_grad()
            first, second = loss(parts, texts), loss(base, texts)
            assert first.item() == second.item()
            first.backward(), second.backward()
            ours.step(), theirs.step()
            with torch.no_grad():
                for table, old in zip(tables, kept, strict=True):
                    table[:514] = old[:514]
        for table, own in zip(tables, rows(parts), strict=True):
            assert torch.equal(table[514:], own)
    trained = {name for name, p in parts.net.named_parameters() if not torch.equal(p, before[name])}
    assert trained == parts.attached.names
    assert sum(p.numel() for p in parts.net.parameters() if p.requires_grad) == sum(r.numel() for r in rows(parts))


PROMPTS = [
    "a <toy>",
    "<toy>",
    "a<toy>s, and <toy>",
    "two <toy> <toy>",
    "no",
    "",
    "a <toy>_1 alone",
    "x " * 40 + "<toy>",
]


@pytest.mark.parametrize("kind", QUICK)
def test_diffusers_reads_our_file_and_our_prompts_alike(kind, pipelines, tmp_path):
    parts = moved(built(kind, pipelines[kind]))
    assert parts.attached.export(tmp_path / "out", parts.objective, None) == []
    pipe = PIPELINES[kind].from_pretrained(pipelines[kind])
    for reader in readers(parts).values():
        mark = reader.name.removeprefix("text_encoder")
        encoder, tokenizer = getattr(pipe, reader.name), getattr(pipe, f"tokenizer{mark}")
        own = load_file(tmp_path / "out" / f"learned_embeds{mark}.safetensors")
        if kind == "sd":
            pipe.load_textual_inversion(tmp_path / "out")
        else:
            pipe.load_textual_inversion(own, text_encoder=encoder, tokenizer=tokenizer)
        assert {name: tuple(value.shape) for name, value in own.items()} == {"<toy>": (3, reader.width)}
        texts = [pipe.maybe_convert_prompt(text, tokenizer) for text in PROMPTS]
        options = {"padding": "max_length", "truncation": True, "max_length": 24, "return_tensors": "pt"}
        ids = tokenizer(texts, **options).input_ids
        assert torch.equal(ids, reader.tokens(PROMPTS).ids_BKT[:, 0])
        with torch.no_grad():
            assert torch.equal(encoder(ids).last_hidden_state, reader.encoder(ids).last_hidden_state)
    a1111 = load_file(tmp_path / "out" / "toy.safetensors")
    assert [*a1111] == (["emb_params"] if kind == "sd" else ["clip_g", "clip_l"])
    assert token_files.read(tmp_path / "out" / "toy.safetensors", [*readers(parts).values()])[0].keys() == {"<toy>"}


def test_pooled_features_are_those_of_the_end_of_the_text(pipelines):
    """The config says eos_token_id 2, with which CLIP pools at the highest id, which that of a new token is."""
    parts = built("sdxl", pipelines["sdxl"])
    plain, reader = built("sdxl", pipelines["sdxl"], "train_text_encoder_2=true"), readers(parts)["text_encoder_2"]
    assert readers(plain)["text_encoder_2"].encoder.text_model.eos_token_id == 2
    with torch.no_grad():
        for texts in (["a dog", ""], ["no new token"]):
            first, second = (readers(each)["text_encoder_2"] for each in (parts, plain))
            a, b = (each.features(each.tokens(texts)) for each in (first, second))
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])
        tokens = reader.tokens(["a <toy> dog"])
        ids = tokens.ids_BKT
        encoder = reader.encoder
        last = encoder.text_model(ids[0]).last_hidden_state[0, ids[0, 0].tolist().index(513)]
        assert torch.equal(encoder.text_projection(last), reader.features(tokens).pooled_BKP[0, 0])


def test_a_long_prompt_and_its_truncation_count_every_vector(pipelines):
    short = built("sd", pipelines["sd"])
    filling = "a " * 20
    assert short.family.truncated([f"{filling}a", f"{filling}<toy>"]) == {1: "cut to 24 tokens"}
    long = built("sd", pipelines["sd"], *TOY, "model.long_prompts=true")
    ids = readers(long)["text_encoder"].tokens([f"{filling}<toy> a", "a"]).ids_BKT
    assert ids.shape == (2, 2, 24)
    assert ids[0, 0, 21:23].tolist() == [514, 515]
    assert ids[0, 1, 1:4].tolist() == [516, 320, 513]
    assert long.family.truncated([filling * 3 + "<toy>"]) == {}


def id_of(parts: Components, token: str) -> int:
    return readers(parts)["text_encoder"].tokenizer.get_vocab()[token]


def test_rows_start_from_words_patterns_files_and_noise(pipelines, tmp_path):
    file = tmp_path / "from.safetensors"
    save_file({"emb_params": torch.arange(96.0).reshape(2, 48)}, file)
    starts = {"word": "{init: a, vectors: 2}", "text": "{init: a b}", "again": "{init: a b, vectors: 3}"}
    starts |= {"mean": '{init_pattern: "^[ab]</w>"}', "file": f"{{init_file: {file}}}", "noise": "{vectors: 9}"}
    given = [f"adapter.tokens.<{name}>={text}" for name, text in starts.items()]
    parts = built("sd", pipelines["sd"], "adapter.name=tokens", *given, "adapter.existing=[^c</w>]")
    part = parts.attached.trainables["tokens"].parts["text_encoder"]
    new, existing = part.rows()
    table = part.extended.weight
    a, b, c = (table[id_of(parts, f"{letter}</w>")] for letter in "abc")
    assert torch.equal(new["<word>"], torch.stack([a, a]))
    assert torch.equal(new["<text>"], torch.stack([a, b]))
    assert torch.equal(new["<again>"], torch.stack([a, b, a]))
    assert torch.equal(new["<mean>"], torch.stack([a, b]).mean(0)[None])
    assert torch.equal(new["<file>"], torch.arange(96.0).reshape(2, 48))
    assert 0.8 < new["<noise>"].std() / table.std() < 1.2
    assert torch.equal(existing["c</w>"], c[None])
    ids = readers(parts)["text_encoder"].tokens(["<mean> c"]).ids_BKT[0]
    assert torch.equal(part.extended(ids)[0, 1:3], torch.cat([new["<mean>"], existing["c</w>"]]))


def test_a_token_of_the_vocabulary_moves_and_others_stay(pipelines, tmp_path):
    parts = moved(built("sd", pipelines["sd"], "adapter.name=tokens", "adapter.existing=[^c</w>]"))
    plain = built("sd", pipelines["sd"], "train_text_encoder=true")
    with torch.no_grad():
        for text, same in (("a b", True), ("a c", False)):
            a, b = (r.features(r.tokens([text])) for p in (parts, plain) for r in readers(p).values())
            assert torch.equal(a.hidden_BTD, b.hidden_BTD) == same
    assert "Daguerre alone reads it" in parts.attached.export(tmp_path / "out", parts.objective, None)[0]
    new, existing = token_files.read(tmp_path / "out", [*readers(parts).values()])
    assert new == {}
    assert torch.equal(existing["c</w>"]["text_encoder"], rows(parts)[0])


@pytest.mark.parametrize("order", [("lora", "tokens"), pytest.param(("tokens", "lora"), marks=pytest.mark.long)])
def test_a_lora_shares_the_text_encoder(order, pipelines, tmp_path):
    given = ["adapters.full=null"]
    for name in order:
        given.append(f"adapters.{name}.name={name}")
    given += ["adapters.lora.ranks.text_encoder=2", "adapters.tokens.placeholder_token=<toy>"]
    parts = built("sd", pipelines["sd"], *given)
    trained = {name for name, p in parts.net.named_parameters() if p.requires_grad}
    assert trained == parts.attached.names
    assert {"rows", "weight"} == {name.rpartition(".")[2] for name in trained}
    assert len(parts.attached.trainables["tokens"].names) == 1
    loss(parts, ["a <toy>"]).backward()
    assert all(p.grad is not None for p in parts.net.parameters() if p.requires_grad)
    moved(parts)
    parts.attached.export(tmp_path / "out", parts.objective, None)
    assert (tmp_path / "out" / "tokens" / "learned_embeds.safetensors").is_file()
    assert (tmp_path / "out" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    digests = base_digests.of(config("sd", pipelines["sd"], *given), parts.family, parts.attached)
    plain = built("sd", pipelines["sd"])
    before = base_digests.of(config("sd", pipelines["sd"], *TOY), plain.family, plain.attached)
    assert digests["text_encoder"] == before["text_encoder"]


@pytest.mark.parametrize("kind", QUICK)
def test_a_merged_model_has_the_tokens_in_its_vocabulary(kind, pipelines, tmp_path):
    parts = moved(built(kind, pipelines[kind]))
    with torch.no_grad():
        wanted = {r.name: r.features(r.tokens(["a <toy> b"])) for r in readers(parts).values()}
    with parts.attached.merged():
        parts.family.export(tmp_path / "pipeline", parts.objective, config(kind, pipelines[kind], *TOY).sampling)
    again = built(kind, tmp_path / "pipeline", "train_text_encoder=true")
    pipe = PIPELINES[kind].from_pretrained(tmp_path / "pipeline")
    for reader in readers(again).values():
        reader.spellings["<toy>"] = "<toy> <toy>_1 <toy>_2"
        tokenizer = getattr(pipe, reader.name.replace("text_encoder", "tokenizer"))
        assert pipe.maybe_convert_prompt("a <toy> b", tokenizer) == "a <toy> <toy>_1 <toy>_2 b"
        with torch.no_grad():
            found = reader.features(reader.tokens(["a <toy> b"]))
        assert torch.equal(found[0], wanted[reader.name][0])
        assert found[1] is None or torch.equal(found[1], wanted[reader.name][1])


def test_networks_without_memory_have_the_same_rows(pipelines):
    parts, sketch = built("sdxl", pipelines["sdxl"]), outline(config("sdxl", pipelines["sdxl"], *TOY))
    assert {p.device.type for p in sketch.net.parameters()} == {"meta"}
    shapes = [{name: p.shape for name, p in each.net.named_parameters()} for each in (parts, sketch)]
    assert shapes[0] == shapes[1]
    assert parts.attached.names == sketch.attached.names


def test_rows_stay_float32_over_a_base_in_bfloat16_and_activations_are_computed_again(pipelines):
    given = (*TOY, "training.weights_dtype=bfloat16", "training.gradient_checkpointing=true")
    parts = built("sd", pipelines["sd"], *given)
    parts.numerics.store(parts.net, parts.attached.float32)
    assert {p.dtype for p in rows(parts)} == {torch.float32}
    parts.net.train()
    calls: list[int] = []
    layer = next(m for m in parts.family.components["text_encoder"].modules() if type(m).__name__ == "CLIPEncoderLayer")
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    with parts.autocast():
        loss(parts, ["a <toy>"]).backward()
    assert len(calls) == 2
    assert all(p.grad.dtype == torch.float32 for p in rows(parts))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["placeholder_token=a"], "'a' is a token already"),
        (["placeholder_token=<my toy>"], "has a space in it"),
        (["placeholder_token=<Toy>"], "call it '<toy>'"),
        (["placeholder_token=<toy>", 'tokens={"<toy>s": {}}'], "has the name of another one, '<toy>'"),
        (["placeholder_token=<toy>", 'tokens={"<toy>": {}}'], "given twice"),
        (["placeholder_token=<toy>", "num_vectors=23"], "reads texts of 22 tokens"),
        (["placeholder_token=<toy>", "initializer_token=abc", "num_vectors=2"], "of which the last would be lost"),
        (['tokens={"<toy>": {init: a, init_pattern: b}}'], "init and init_pattern"),
        (['tokens={"<toy>": {init_pattern: "^zebra"}}'], "no token of the vocabulary"),
        (['tokens={"<toy>": {init_pattern: "("}}'], "not a regular expression"),
        (['tokens={"<toy>": {init_file: /nowhere/a.safetensors}}'], "there is no such file"),
        (["existing=[zebra]"], "no token of the vocabulary"),
        (["num_vectors=2", "existing=[^a]"], "no effect without placeholder_token"),
        ([], "nothing would be trained"),
        (["placeholder_token=<toy>", "text_encoders=[unet]"], "new tokens need text encoders"),
        (["placeholder_token=<toy>", "text_encoders=[vae]"], "vae is not a component"),
    ],
)
def test_what_cannot_be_is_refused(given, said, pipelines):
    with pytest.raises(ValueError, match=r".") as caught:
        built("sd", pipelines["sd"], "adapter.name=tokens", *(f"adapter.{each}" for each in given))
    assert said in str(caught.value)


def test_two_adapters_of_one_part_are_refused(pipelines):
    given = [*TOY, "adapters.more.name=tokens", "adapters.more.placeholder_token=<b>"]
    with pytest.raises(ValueError, match="can train or extend its embeddings"):
        built("sd", pipelines["sd"], *given)
    given = [*TOY, "adapters.all.name=full", "adapters.all.train=[text_encoder]"]
    with pytest.raises(ValueError, match="can train or extend its weights"):
        built("sd", pipelines["sd"], *given)


def test_names_are_safe_for_files():
    names = token_files.file_names(["<toy>", "[toy]", "a/b", "..", "learned_embeds"])
    assert [*names.values()] == ["toy", "toy-2", "ab", "token", "learned_embeds-2"]


def test_a_tokenizer_is_read_from_its_files(pipelines):
    reader = readers(built("sd", pipelines["sd"], "train_text_encoder=true"))["text_encoder"]
    again = loaded(type(reader.tokenizer), reader.files)
    assert again.get_vocab() == reader.tokenizer.get_vocab()
    assert files(again)
    assert new_tokens.matching(reader, "^[ab]</w>") == ["a</w>", "b</w>"]
