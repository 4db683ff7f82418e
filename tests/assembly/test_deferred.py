"""Weights that are read when their type and place are known: the same numbers, read once, none of them too early."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel
from twins import Twins

from daguerre import deferred, errors
from daguerre.assembly import base_digests, parts
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.config.config import Config
from daguerre.kernels import narrow
from daguerre.models.weights import load

QUICK = ("sd15_lora", "sdxl_lora", "z_image_lora", "flux2_klein_4b_lora", "qwen_image_lora")
RECIPES = [name for name in recipe.shipped() if "lora" in name.split("_") and not name.startswith("quickstart")]
OTHERS = ("sd15", "sdxl_controlnet", "sd15_textual_inversion", "sdxl_pivotal", "cascade_c_controlnet_canny")
NARROW = ["training.weights_dtype=bfloat16", "training.frozen_precision=bf16"]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins"))


def config_of(name: str, twins: Twins, *given: str) -> Config:
    return configs.load(name, [*twins.overrides(name), "run_name=x", "training.device=cpu", *given]).config


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on networks are read as they are loaded, in float32."""
    monkeypatch.setattr(deferred, "is_on", lambda: False)


def states(config: Config) -> tuple[dict[str, Tensor], object]:
    """All tensors of what is built for training, and the digests of its base."""
    networks = parts.load(config, defers=True)
    digests = base_digests.begun(config, *networks)
    built = parts.build(config, networks=networks, trains=True)
    every = {**built.family.components, "net": built.net}
    found = {f"{name}.{own}": t for name, network in every.items() for own, t in network.state_dict().items()}
    return found, digests.ended()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [(n, t.dtype, t.shape, t.stride()) for n, t in ours.items()] == [
        (n, t.dtype, t.shape, t.stride()) for n, t in theirs.items()
    ]
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, NARROW if name.startswith("sd") else []) for name in QUICK[:3]),
        ("sd15_lora", ["training.base_precision=int8", "adapter.kind=dora"]),
        ("sd15_lora", ["training.text_encoders=offload", "training.swap_blocks=3", *NARROW]),
        *(
            pytest.param(name, more, marks=pytest.mark.long)
            for name in RECIPES
            for more in ([], ["training.base_precision=int8"])
        ),
        *(pytest.param(name, [], marks=pytest.mark.long) for name in OTHERS),
        pytest.param("sd15_lora", ["adapter.init=pissa"], marks=pytest.mark.long),
    ],
)
def test_what_is_built_is_the_same_to_the_bit(name, more, twins, monkeypatch):
    config = config_of(name, twins, *more)
    ours, digests = states(config)
    at_once(monkeypatch)
    theirs, others = states(config)
    assert_same(ours, theirs)
    assert digests == others, "a run goes on that was begun with weights in float32"


@pytest.mark.parametrize(
    "name", [name if name == "z_image_lora" else pytest.param(name, marks=pytest.mark.long) for name in RECIPES]
)
def test_twenty_updates_are_the_same_to_the_bit(name, twins, tmp_path, monkeypatch):
    """Weights, moments and losses."""
    given = [*twins.overrides(name), "run_name=x", "sampling.num_images=0", "checkpoint.export=false"]
    given += ["training.duration=20 steps"]
    found = []
    for place in (tmp_path / "later", tmp_path / "at_once"):
        if place.name == "at_once":
            at_once(monkeypatch)
        assert main.run(["train", name, *given, f"output_dir={place}"]) == errors.DONE
        (saved,) = (place / "x" / "checkpoints").glob("step-*20")
        lines = (place / "x" / "metrics" / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("learning/loss") for line in lines]
        tensors = {path.name: load_file(path) for path in saved.glob("*.safetensors")}
        found.append((losses, (saved / "base.json").read_text(), tensors))
    (losses, base, tensors), (others, their_base, their_tensors) = found
    assert losses == others
    assert base == their_base
    for file, own in tensors.items():
        assert_same(own, their_tensors[file])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_each_weight_is_read_once(precision, twins, monkeypatch):
    """For its digest, its place and its type together."""
    counts = Counter[str]()
    made = load._made

    def counted(given, dtype, used):
        counts[str(id(given))] += 1
        kept.append(given)
        return made(given, dtype, used)

    kept: list[object] = []  # so that no two have one address
    monkeypatch.setattr(load, "_made", counted)
    states(config_of("z_image_lora", twins, f"training.frozen_precision={precision}"))
    assert len(counts) > 50
    assert set(counts.values()) == {1}


def test_until_then_a_weight_has_no_memory_and_no_numbers(twins):
    family, attached = parts.load(config_of("sd15_lora", twins), defers=True)
    base = [p for p in family.components["unet"].parameters() if not p.requires_grad and p.dim() > 1]
    assert all(deferred.of(p) is not None and p.untyped_storage().nbytes() == 4 and p.isnan().all() for p in base)
    added = [p for p in attached.net.parameters() if p.requires_grad]
    assert added
    assert all(deferred.of(p) is None and not p.isnan().any() for p in added)


@pytest.mark.parametrize("file", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once(file, stored, tmp_path):
    numbers = (torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 3).to(file)
    save_file({"weight": numbers, "bias": numbers[0].clone()}, tmp_path / "x.safetensors")
    net = nn.Linear(48, 64)
    with deferred.deferring(), load.opening.opened(tmp_path / "x.safetensors", mapped=False) as opened:
        load.place(net, {"weight": opened.get_slice("weight")})
    assert deferred.of(net.weight) is not None
    deferred.store(net.weight, stored)
    assert net.weight.dtype == stored
    deferred.read(net)
    assert torch.equal(net.weight, numbers.float().to(stored))
    assert deferred.of(net.weight) is None


@pytest.mark.parametrize("fits", [True, False])
def test_an_encoder_of_float32_is_narrow_as_a_whole_or_not_at_all(fits, tmp_path):
    """What is found when the last of its weights is read sets back those that were read before."""
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    numbers = {f"{i}.weight": torch.randn(32, 32).bfloat16().float() for i in range(2)}
    numbers["1.weight"][-1, -1] += 0 if fits else 1e-6
    save_file(numbers, tmp_path / "x.safetensors")
    with deferred.deferring(), load.files.opened(tmp_path / "x.safetensors", mapped=False) as opened:
        load.place(net, {name: opened.get_slice(name) for name in numbers})
    assert narrow.store(net)
    deferred.read(net)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16 if fits else torch.float32}
    assert all(torch.equal(p.float(), numbers[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("differ", [False, True])
def test_weights_that_a_library_ties_are_tied_where_they_are_equal(differ, tmp_path):
    numbers = {"feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "num_heads": 2, "d_model": 16}
    made = T5EncoderModel(T5Config(**numbers, d_ff=32, num_layers=1, vocab_size=40, d_kv=4))
    made.config.to_json_file(tmp_path / "config.json")
    state = {name: value.clone() for name, value in made.state_dict().items()}
    state["encoder.embed_tokens.weight"] = state["shared.weight"] + differ
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = load.load(T5EncoderModel, tmp_path)
    with deferred.deferring():
        later = load.load(T5EncoderModel, tmp_path)
    deferred.read(later)
    assert_same(later.state_dict(), whole.state_dict())
    tied = [net.shared.weight is net.encoder.embed_tokens.weight for net in (whole, later)]
    assert tied == [not differ, not differ]


def test_what_is_damaged_meanwhile_is_said(tmp_path: Path):
    numbers = torch.randn(64, 48)
    save_file({"weight": numbers}, tmp_path / "x.safetensors")
    net = nn.Linear(48, 64, bias=False)
    with deferred.deferring(), load.opening.opened(tmp_path / "x.safetensors", mapped=False) as opened:
        load.place(net, {"weight": load.opening.Slice(tmp_path / "x.safetensors", opened.get_slice("weight"))})
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.truncate(200)
    with pytest.raises(errors.UserError, match="cannot be read as safetensors"):
        deferred.read(net)
