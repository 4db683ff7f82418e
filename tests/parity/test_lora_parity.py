"""LoRA runs, recorded and replayed: diffusers' train_text_to_image_lora.py, its SDXL form, and DreamBooth with LoRA.

The plain loop adds the LoRA as these scripts do, by `add_adapter` of diffusers and transformers with a LoraConfig of
theirs (alpha = rank, init gaussian, attention's four products), and starts it from the run's own first numbers. By the
published formulas every gradient and weight was 0.0 apart where it was measured (x86, one thread); losses are summed in
another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from peft import LoraConfig
from plain_loop import Models
from recorded import LEARNING_RATE, train
from test_dreambooth_parity import CLASS, WEIGHT, WRITERS, sources
from torch import Tensor, nn

from daguerre.assembly.parts import build
from daguerre.config import config as configs

RANK = 4
TARGETS = {"unet": ["to_k", "to_q", "to_v", "to_out.0"], "text": ["q_proj", "k_proj", "v_proj", "out_proj"]}
TEXT_RATE = 2e-5


def recipe(family: str, base: Path, encoders: tuple[str, ...]) -> dict[str, Any]:
    lora = {"name": "lora", "rank": RANK, "init": "gaussian", "ranks": dict.fromkeys(encoders, RANK)}
    found: dict[str, Any] = {
        "model": {"family": family, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": {"lora": lora},
    }
    if encoders:
        rates = {f"{name}.*": TEXT_RATE for name in encoders}
        found["optimizer"] = {"learning_rate": LEARNING_RATE, "one_pass": False, "learning_rates": rates}
    return found


def with_lora(models: Models, encoders: tuple[str, ...], place: Path) -> dict[str, nn.Module]:
    """The networks with a LoRA, by their names in the run, at the first numbers of the run."""
    models.unet.requires_grad_(False)
    for text in models.texts:
        text.requires_grad_(False)
    texts = dict(zip(("text_encoder", "text_encoder_2"), models.texts, strict=False))
    found = {"unet": models.unet} | {name: texts[name] for name in encoders}
    config = configs.load(str(place / "recorded.yaml")).config
    first = build(config, torch.device("cpu")).net.state_dict()
    for part, network in found.items():
        targets = TARGETS["unet" if part == "unet" else "text"]
        network.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=targets))
        with torch.no_grad():
            for name, p in network.named_parameters():
                if f"{part}.{name}" in first and p.requires_grad:
                    p.copy_(first[f"{part}.{name}"])
                else:  # also the layers behind the one that is read, which no gradient reaches there
                    p.requires_grad_(False)
    return found


CASES = {
    "train_text_to_image_lora.py": ("sd", ()),
    "train_text_to_image_lora_sdxl.py --train_text_encoder": ("sdxl", ("text_encoder", "text_encoder_2")),
}


@pytest.mark.long  # of the quick tests, test_adapter_scripts.py replays what the first of them wrote
@pytest.mark.parametrize("script", CASES)
def test_equal_to_the_published_formulas(script: str, tmp_path: Path) -> None:
    family, encoders = CASES[script]
    base = WRITERS[family](tmp_path / "model")
    ours = train(tmp_path, recipe(family, base, encoders))
    models = Models(base)
    networks = with_lora(models, encoders, tmp_path)
    rates = {name: TEXT_RATE if name in encoders else LEARNING_RATE for name in networks}
    theirs = plain_loop.train(ours.updates, models.by_formula, getattr(models, family), networks, rates, fused=True)
    found = plain_loop.differences(ours, theirs, plain_loop.largest)
    assert max(found.values()) <= 1e-6, found


@pytest.mark.long  # of the quick tests, test_dreambooth_parity.py has the loss
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_dreambooth_with_a_lora_is_the_published_loss(family: str, tmp_path: Path) -> None:
    base = WRITERS[family](tmp_path / "model")
    members = sources(tmp_path)
    ours = train(tmp_path, recipe(family, base, ()) | {"data": {"source": "mix", "resolution": 16, "sources": members}})
    models = Models(base)
    networks = with_lora(models, (), tmp_path)

    def dreambooth(batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        losses_B = models.by_formula(batch, conditioning)
        of_class_B = torch.tensor([text == CLASS for text in batch.texts])
        loss = losses_B[torch.logical_not(of_class_B)].mean() + WEIGHT * losses_B[of_class_B].mean()
        return (loss / 2).expand(len(losses_B))  # the loop takes the mean over the batch

    reader = getattr(models, family)
    theirs = plain_loop.train(ours.updates, dreambooth, reader, networks, {"unet": LEARNING_RATE}, fused=True)
    found = plain_loop.differences(ours, theirs, plain_loop.overall)
    assert max(found.values()) <= 1e-6, found
