"""`daguerre plan`: the counts of real models against closed forms, and what a person reads."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from quick_cases import chosen

from daguerre import errors
from daguerre.assembly.parts import outline
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.distributed.sharding_rules import DEFAULT
from daguerre.memory import report, static

UNET = 2_567_463_684
FROZEN = 83_653_863 + 123_060_480 + 694_659_840
BLOCKS = {640: 10, 1280: 60}
"""Transformer blocks of SDXL's UNet by width: 2 x 2 + 3 x 2 of 640; 2 x 10 + 10 + 3 x 10 of 1280."""
ENCODERS = {768: 12, 1280: 32}
"""Layers of its text encoders by width."""
TEXT = 2048


def unet_split() -> int:
    """Numbers of the UNet that heads and mlp split: attention to itself and to text, and a gated layer of 4 d."""
    own, text, gated = (lambda d: 4 * d * d), (lambda d: 2 * d * d + 2 * TEXT * d), (lambda d: 8 * d * d + 8 * d)
    return sum(n * (own(d) + text(d) + gated(d) + 4 * d * d) for d, n in BLOCKS.items())


def encoders_split() -> int:
    """Of the text encoders: four projections (three with biases that are split), and two layers of 4 d."""
    return sum(n * (3 * (d * d + d) + d * d + 4 * d * d + 4 * d + 4 * d * d) for d, n in ENCODERS.items())


@pytest.fixture(scope="module")
def sdxl():
    """Bytes by kind, and the whole count, of SDXL with some settings; the networks are outlined once."""
    parts = outline(configs.load("sdxl", ["training.device=cpu"]).config)

    def counted(devices, nodes, *given):
        config = configs.load("sdxl", ["training.device=cpu", *given]).config
        numerics = replace(parts.numerics, weights=getattr(torch, config.training.weights_dtype))
        found = static.count(config, replace(parts, numerics=numerics), config.mesh.resolved(devices, nodes))
        return {kind: found.bytes_of(kind) for kind in static.KINDS} | {"total": found.whole}, found

    return counted


SPLITS = chosen(
    [(*split, averaged) for split in ((1, 1), (8, 1), (1, 2), (4, 2)) for averaged in (False, True)],
    lambda *split: split in ((1, 1, False), (8, 1, True), (4, 2, False)),
)


@pytest.mark.parametrize(("fsdp", "tensor", "averaged"), SPLITS)
def test_sdxl_on_64_devices_is_the_closed_form(fsdp, tensor, averaged, sdxl):
    mesh = [f"mesh.ici_fsdp_parallelism={fsdp}", f"mesh.ici_tensor_parallelism={tensor}"]
    held, count = sdxl(64, 8, *mesh, f"ema.enabled={str(averaged).lower()}")
    own = (UNET - unet_split()) / fsdp + unet_split() / (fsdp * tensor)
    frozen = (FROZEN - encoders_split()) / fsdp + encoders_split() / (fsdp * tensor)
    assert held["weights"] == pytest.approx(4 * own, rel=1e-4)
    assert held["gradients"] == held["weights"]
    assert held["moments"] == pytest.approx(8 * own, rel=1e-4)
    assert held["averages"] == (held["weights"] if averaged else 0)
    assert held["frozen"] == pytest.approx(4 * frozen, rel=1e-4)
    assert held["total"] == sum(count for kind, count in held.items() if kind != "total")
    assert count.mesh.batch_ranks == 64 // tensor
    if (fsdp, tensor) == (1, 1):
        assert held["weights"] == 4 * UNET
        assert held["frozen"] == 4 * FROZEN


def test_sixteen_bits_averages_and_whole_frozen_networks_count_as_they_are_stored(sdxl):
    more = ["mesh.ici_fsdp_parallelism=8", "mesh.shard_frozen=false", "training.weights_dtype=bfloat16"]
    found, _ = sdxl(8, 1, *more, "ema.enabled=true", "ema.post_hoc=[0.05, 0.1]")
    assert found["weights"] == found["gradients"] == pytest.approx(2 * UNET / 8, rel=1e-4)
    assert found["moments"] == pytest.approx(8 * UNET / 8, rel=1e-4)
    assert found["averages"] == pytest.approx(3 * 4 * UNET / 8, rel=1e-4)
    assert found["frozen"] == 4 * FROZEN


def test_every_parameter_is_told_and_they_add_up(sdxl):
    _, count = sdxl(8, 1, "mesh.ici_fsdp_parallelism=4", "mesh.ici_tensor_parallelism=2")
    found = report.document(count, [], True)
    parameters = {each["name"]: each for each in found["parameters"]}
    assert len(parameters) == 1680 + 248 + 196 + 517
    assert sum(prod(each["shape"]) for name, each in parameters.items() if name.startswith("unet.")) == UNET
    q = parameters["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"]
    assert (q["tensor_dim"], q["fsdp_dim"], q["numbers_per_device"]) == (0, 1, 1280 * 1280 // 8)
    assert q["bytes_per_device"] == {"weights": 819_200, "gradients": 819_200, "moments": 1_638_404, "averages": 0}
    weights = sum(each["bytes_per_device"].get("weights", 0) for each in found["parameters"])
    assert weights == found["bytes_per_device"]["weights"]
    assert sum(group["parameters"] for group in found["groups"]) == len(parameters)
    assert json.loads(json.dumps(found)) == found


def test_what_cannot_be_split_is_told_with_the_rule(sdxl):
    _, count = sdxl(4, 1, "mesh.ici_tensor_parallelism=4")
    said = " ".join(" ".join(report.describe_problems(count.problems, every=False)).split())
    assert "heads -> tensor is not possible: 10 heads over 4 devices: unet.down_blocks.1" in said
    assert "heads -> tensor is not possible: 1 heads over 4 devices: vae.encoder" in said
    rules = " ".join(" ".join(report.describe_rules(DEFAULT, count.mesh, count.notices)).split())
    assert "out_channels -> tensor has no effect: convolutions are not split by channel" in rules
    assert "used: activation_heads -> tensor; activation_kv -> tensor; heads -> tensor; mlp -> tensor" in rules
    assert "no effect, as these axes have one device: batch -> data; activation_batch -> data, fsdp; embed" in rules


def test_a_table_fits_a_terminal_of_100_columns(sdxl):
    _, count = sdxl(64, 8, "mesh.ici_fsdp_parallelism=4", "mesh.ici_tensor_parallelism=2")
    lines = report.describe_parameters(count, every=False)
    assert max(map(len, lines)) <= 98
    assert len(lines) < 100


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["devices=7", "nodes=2"], "7 devices on 2 nodes"),
        (["devices=8", "mesh.ici_fsdp_parallelism=3"], "ici_fsdp_parallelism 3 = 3 does not divide the 8 devices"),
        (["devices=8", "mesh.ici_data_parallelism=4"], "= 4, but there are 8 devices of a node"),
        (["devices=8", "mesh.ici_fsdp_parallelism=8", "optimizer.name=muon"], "optimizer.name=muon works on whole"),
        (["devices=0"], "devices = 0"),
        (["card=24"], "'24' is not a size"),
        (["device=8"], "allowed: auto, cpu, cuda"),
        (["mesh.logical_axis_rules=[[hands, [tensor]]]"], "['hands', ['tensor']]"),
    ],
)
def test_what_cannot_be_is_refused(given, text, capsys):
    assert main.run(["plan", "sdxl", *given]) == errors.REFUSED
    assert text in capsys.readouterr().err


def test_sizes_and_counts_of_any_length_are_written():
    assert [report.format_size(count) for count in (900, 3.2e6, 12.345e9, 1.09052e12)] == [
        "900 B", "3.20 MB", "12.35 GB", "1,090.52 GB",
    ]  # fmt: skip
    assert [report.format_number(count) for count in (320, 12_300, 2_567_460_000)] == ["320", "12.30 k", "2,567.46 M"]
