"""Textual inversion, recorded and replayed as diffusers' textual_inversion.py trains it: a table of embeddings that is
trained whole, by AdamW without clipping, and whose old rows are put back after each update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import Models
from recorded import train
from tiny_models import write_sd

RATE = 5e-3
SETTINGS: dict[str, Any] = {"name": "tokens", "placeholder_token": "<toy>", "initializer_token": "a", "num_vectors": 2}


@pytest.mark.long  # of the quick tests, test_adapter_scripts.py
@pytest.mark.parametrize(
    ("loss_of", "most"),
    [(lambda m: m.by_formula, 0.0), pytest.param(lambda m: m.by_scheduler, 1e-5, marks=pytest.mark.long)],
)
def test_rows_and_losses_are_those_of_diffusers_script(loss_of: Any, most: float, tmp_path: Path) -> None:
    """By the formula to the bit; by diffusers' scheduler, whose noise levels are float32, up to their rounding."""
    folder = write_sd(tmp_path / "model")
    recipe = {
        "model": {"family": "sd", "pretrained_model_name_or_path": str(folder)},
        "objective": {"name": "eps"},
        "adapters": {"tokens": SETTINGS},
        "lr_scheduler": {"name": "constant", "warmup": "0 steps"},
    }
    given = ["data.captions.text=<toy>", "data.captions.templates=object", "data.caption_dropout=0"]
    given += [f"optimizer.learning_rate={RATE}", "optimizer.weight_decay=1e-2", "training.max_grad_norm=null"]
    ours = train(tmp_path, recipe, *given)
    models = Models(folder)
    models.unet.requires_grad_(False)
    (tokenizer,), (encoder,) = models.tokenizers, models.texts
    names = ["<toy>", "<toy>_1"]
    start = tokenizer.convert_tokens_to_ids("a</w>")
    assert tokenizer.add_tokens(names) == 2
    encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    encoder.requires_grad_(False)
    table = encoder.get_input_embeddings().weight.requires_grad_(True)
    with torch.no_grad():
        table[514:] = table[start]
    before = table.detach().clone()
    optimizer = torch.optim.AdamW([table], lr=RATE, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8, fused=True)
    losses = []
    for (batch,) in ours.updates:
        texts = [text.replace("<toy>", " ".join(names)) for text in batch.texts]
        hidden = encoder(models.ids(texts)[0])[0]
        losses_B = loss_of(models)(batch, {"encoder_hidden_states": hidden})
        (losses_B.sum() / len(texts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            table[:514] = before[:514]
        losses.append(losses_B.detach().double().mean().item())  # as metrics have it
    (rows,) = ours.weights.values()
    moved = (rows - before[514:]).norm()
    found = {
        "loss": max(abs(a - b) / b for a, b in zip(ours.losses, losses, strict=True)),
        "rows": float((rows - table[514:]).detach().norm() / moved),
    }
    print(found, moved)
    assert moved > 0.1
    assert max(found.values()) <= most, found
