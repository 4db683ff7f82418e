"""The names that are written for kohya's layout are those that other programs' own code has: recorded by
tools/record_lora_names.py for all linear layers and convolutions of the published models."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from torch import nn

from daguerre.families.pretrained import bases
from daguerre.models.network import facts_of
from daguerre.models.weights import architectures

RECORD = json.loads((Path(__file__).parent / "recorded" / "lora_names.json").read_text(encoding="utf-8"))
ENDS = {"conv_in", "conv_out", "time_embedding_linear_N", "input_blocks_N_N", "out_N", "time_embed_N", "label_emb_N_N"}
"""Layers beside the blocks of a UNet, which sd-scripts does not train."""


@pytest.fixture(scope="module")
def written() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for model in RECORD["ComfyUI"]:
        made = bases.networks(architectures.FOLDER / model)
        for component, network in made.items():
            own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
            names = facts_of(network).names
            assert names is not None
            found.setdefault(model, []).extend(names.kohya(component, made, own))
    return found


@pytest.mark.parametrize(("program", "model"), [(program, model) for program, own in RECORD.items() for model in own])
def test_names_are_those_of_the_program(program, model, written):
    recorded = RECORD[program][model]
    unknown = {name for name in written[model] if re.sub(r"_\d+(?=_)", "_N", name) in recorded["unknown"]}
    known = sorted({*written[model]} - unknown)
    assert len(known) == recorded["known"]
    assert hashlib.sha256("\n".join(known).encode()).hexdigest() == recorded["sha256"]


def test_what_programs_have_no_place_for():
    """ComfyUI has all; A1111 no text projection, sd-scripts nor the layers beside the blocks."""
    assert not any(own["unknown"] for own in RECORD["ComfyUI"].values())
    assert [own["unknown"] for own in RECORD["webui"].values()] == [[], [], ["lora_te2_text_projection"]]
    for own in RECORD["sd-scripts"].values():
        rest = {re.sub(r"\d+", "N", name).removeprefix("lora_unet_") for name in own["unknown"]}
        assert rest <= ENDS | {"lora_teN_text_projection"}
