"""Adapters over a base of few bits (training.base_precision): loss, resume, what is written, the plan, refusals."""

from __future__ import annotations

import json
import re

import forked_runs
import pytest
import torch
from adapter_runs import MESHES, Place, assert_equal, updated
from quick_cases import chosen, long
from safetensors import safe_open

from daguerre import errors
from daguerre.assembly.parts import build, outline
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.distributed.parallelize import blocks
from daguerre.memory import static
from daguerre.memory.peak import gathered_bytes
from daguerre.models.lora_files.addition import KOHYA_FILE
from daguerre.training.precision import quantized

RECIPE = """
run_name: lora
model: {family: KIND}
objective: {name: eps}
adapters: {style: {name: lora, rank: 4, ranks: {text_encoder: 2}}}
data: {source: folder, resolution: 16}
training: {duration: "4 steps", global_batch_size: 4, base_precision: int8}
optimizer: {learning_rate: 1e-2}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: [a dog]}
validation: {every: null}
"""
PRODUCTS = ("int8_products", "float8_products")
FORMS = (*quantized.Form.__args__, *PRODUCTS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp("quantized"), "sd", RECIPE)
    assert made.train("whole") == errors.DONE
    return made


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_and_its_files_are_the_usual_ones(place, capsys):
    assert place.train("plain", "training.base_precision=no") == errors.DONE
    assert place.train("stopped", "training.duration=2 steps") == errors.DONE
    assert place.train("stopped") == errors.DONE
    said = capsys.readouterr().out
    assert "unet: 48 linear layers in int8" in said
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("whole", group), place.tensors("stopped", group))
    # Another base than the plain one is computed with, but not recorded: its digest is that of the unquantised weights.
    files = [place.folder / name / "checkpoints/step-00000004/base.json" for name in ("whole", "plain")]
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())
    assert place.numbers("whole", "learning/loss") != place.numbers("plain", "learning/loss")
    assert {name: t.shape for name, t in place.exported("whole").items()} == {
        name: t.shape for name, t in place.exported("plain").items()
    }
    names = []
    for run in ("whole", "plain"):
        with safe_open(place.folder / run / "adapter" / KOHYA_FILE, "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    # generate takes the base as it was trained on, and says so
    assert main.run(["generate", str(place.folder / "whole"), "prompt=a dog"]) == errors.DONE
    assert "with the base in int8" in capsys.readouterr().out


@pytest.mark.long
def test_another_form_is_another_run(place, capsys):
    assert place.train("whole", "training.base_precision=float8") == errors.REFUSED
    assert "training.base_precision: " in capsys.readouterr().err


@pytest.mark.parametrize(("form", "updates"), [("int8_products", 10), *long((form, 30) for form in FORMS)])
def test_the_loss_falls_and_the_base_stands_still(place, form, updates):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    given = place.config(f"training.base_precision={form}", "optimizer.learning_rate=3e-2", "ema.enabled=false")
    parts = build(given, torch.device("cpu"))
    before = {name: value.clone() for name, value in parts.net.state_dict().items() if name not in parts.attached.names}
    assert any(name.endswith(".codes") for name in before)
    _, losses = updated(given, parts, updates)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = parts.net.state_dict()
    assert all(torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)) for name, value in before.items())


def outlined(given: configs.Config) -> list[tuple[str, tuple[int, ...]]]:
    """Weights of all networks without adapters."""
    parts = outline(given.model_copy(update={"adapters": {}}))
    return [
        (f"{c}.{n}", tuple(p.shape)) for c, net in parts.family.components.items() for n, p in net.named_parameters()
    ]


@pytest.mark.parametrize("form", chosen(FORMS, lambda form: form == "int8_products"))
def test_the_plan_counts_what_is_held(place, form):
    """nf4 needs no library to be planned."""
    given = place.config(f"training.base_precision={form}")
    counted = static.count(given, outline(given), given.mesh.resolved(1, 1))
    plain = place.config("training.base_precision=no")
    whole = static.count(plain, outline(plain), plain.mesh.resolved(1, 1))
    layers = [each for each in counted.held if "quantized" in each.kinds]
    assert len(layers) == 60
    of_scales = sum(-(-each.numbers // 64) if form == "nf4" else each.placed.shape[0] for each in layers)
    numbers = sum(each.numbers for each in layers)
    assert counted.bytes_of("quantized") == numbers * (0.5 if form == "nf4" else 1) + 4 * of_scales
    float32 = 4 * numbers
    assert counted.whole - counted.bytes_of("quantized") == whole.whole - float32
    # and by the names that the layers have without adapters
    assert {*outlined(plain)} >= {(each.placed.name, each.placed.shape) for each in layers}
    if form != "nf4":
        parts = build(given, torch.device("cpu"))
        found = [layer for network in parts.family.components.values() for _, layer in quantized.layers(network)]
        assert sum(layer.held_bytes for layer in found) == counted.bytes_of("quantized")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["adapter.name=full"], "is for a base that adapters leave as it is .* of unet its weights are trained"),
        (["devices=2", "mesh.ici_tensor_parallelism=2"], "the mesh's tensor axis cuts these: split the base over fsdp"),
    ],
)
def test_what_it_does_not_go_with_is_refused(place, more, why, capsys):
    assert main.run(["plan", str(place.recipe), *place.given(*more)]) == errors.REFUSED
    assert re.search(why, " ".join(capsys.readouterr().err.split()))


def test_the_plan_counts_a_share_of_the_codes_where_fsdp_splits_them(place):
    given = place.config("training.base_precision=int8_products")
    one, two = (
        static.count(given, outline(given), given.mesh.model_copy(update={"ici_fsdp_parallelism": n}).resolved(n, 1))
        for n in (1, 2)
    )
    assert two.bytes_of("quantized") == one.bytes_of("quantized") / 2  # all layers have an even number of rows
    parts = outline(given)
    assert gathered_bytes(parts, one, given.mesh.shard_frozen) == 0
    # The largest block of codes is gathered, with its buffer and the next one's.
    largest = max(
        sum(tensor.nbytes for tensor in quantized.tensors(block))
        for block in blocks(parts.net, ["BasicTransformerBlock"])
    )
    assert gathered_bytes(parts, two, given.mesh.shard_frozen) >= 4 * largest


@pytest.mark.long
def test_codes_that_fsdp_splits_train_as_whole_ones(place, tmp_path):
    """Codes are gathered as they are. Products of 8 bits are wide for few rows, so that both meshes have micro-batches
    of two samples; and after an update, whose sums differ in the last bits, some inputs round to the next code."""
    forms, more = ("int8", "float8", *PRODUCTS), ("optimizer.epsilon=1e-6", "training.per_device_batch_size=2")
    meshes = {"one": (1, 1, 1, 1), "fsdp2": MESHES["fsdp2"]}
    plan = [
        place.on(f"{form}-{name}", mesh, f"training.base_precision={form}", *more)
        for form in forms
        for name, mesh in meshes.items()
    ]
    assert all(code == 0 for run in forked_runs.together(tmp_path, plan) for code in run)
    for form in forms:
        losses = [place.numbers(f"{form}-{name}", "learning/loss") for name in meshes]
        assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-6), form
        assert losses[1] == pytest.approx(losses[0], rel=1e-5 if form not in PRODUCTS else 1e-2), form


ADAPTERS = {
    "controlnet": ["adapter.name=controlnet", "adapter.condition=canny", "training.gradient_checkpointing=true"],
    "tokens": ["adapter.name=tokens", "adapter.placeholder_token=<cat>", "adapter.initializer_token=a"],
    "dora": ["adapters.style.kind=dora", "training.weights_dtype=bfloat16"],
    "boft": ["adapters.style.kind=boft"],
}


@pytest.mark.parametrize("adapter", chosen(ADAPTERS, lambda adapter: adapter == "dora"))
def test_every_adapter_that_adds_something_trains_over_it(place, adapter):
    given = place.config(*ADAPTERS[adapter], "optimizer.learning_rate=3e-2", "ema.enabled=false")
    parts = build(given, torch.device("cpu"))
    counts = {name: len([*quantized.layers(network)]) for name, network in parts.family.components.items()}
    assert counts == {"unet": 48, "vae": 0, "text_encoder": 12}
    before = {name: p.detach().clone() for name, p in parts.net.named_parameters() if p.requires_grad}
    updated(given, parts, 2)
    after = dict(parts.net.named_parameters())
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    assert all(value.dtype == torch.float32 for value in before.values())
