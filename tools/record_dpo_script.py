#!/usr/bin/env python3
"""Runs diffusers' train_diffusion_dpo.py itself, on the batches and random numbers of our run, and records what it did
for tests/parity/test_dpo_script.py. Run once, in the environment of the tests:

    git clone --depth 1 --branch v0.40.0 https://github.com/huggingface/diffusers /tmp/diffusers
    python tools/record_dpo_script.py /tmp/diffusers/examples/research_projects/diffusion_dpo

Its `main` runs as it stands, twice, as in `record_controlnet_scripts.py`. The LoRA starts from our run's first numbers.
SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    dpo_script.json  412929ee1ac3ef91941a38c8b9a322c7a90f155331d0c8fea227893587d603f6
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock

import record_adapter_scripts as adapters  # puts our folders on the path of modules
import record_controlnet_scripts as scripts

import dpo_script as own  # isort: skip
import diffusers
import pytest
import torch
from accelerate import Accelerator
from adapter_scripts import DECAY, PX, RANK, batches_digest
from controlnet_scripts import moved
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.autoencoders import vae
from recorded import LEARNING_RATE, STEPS, Recorded, first
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import CLIPTokenizer


def prepared(batch: Any, tokenizer: Any) -> dict[str, Any]:
    """What the script's own loader gives of such a batch: both images of a pair as channels."""
    pixels = torch.cat([batch.pixels_BCHW, batch.images["rejected"]], 1).float() / 127.5 - 1
    limits: dict[str, Any] = {"max_length": tokenizer.model_max_length, "padding": "max_length"}
    ids = tokenizer(list(batch.texts), truncation=True, return_tensors="pt", **limits).input_ids
    return {"pixel_values": pixels, "input_ids": ids}


def run(path: Path, place: Path, recorded: Recorded, before: dict[str, Tensor], aligned: bool) -> tuple[Any, Any]:
    """Losses and last weights of the script, by the names of our weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", MagicMock())
        script = scripts.script_of(path)
    batches = [batch for (batch,) in recorded.updates]
    tokenizer = CLIPTokenizer.from_pretrained(place / "model" / "tokenizer")
    rows = adapters.Examples(prepared(batch, tokenizer) for batch in batches)
    rejected, calls = iter([batch.draws["rejected.posterior"] for batch in batches]), count()
    networks: list[nn.Module] = []
    add = PeftAdapterMixin.add_adapter

    class Loader(DataLoader[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(rows, collate_fn=lambda given: given[0])

    def add_adapter(network: Any, *given: Any, **more: Any) -> None:
        add(network, *given, **more)
        networks.append(network)
        with torch.no_grad():
            for name, p in network.named_parameters():
                if f"unet.{name}" in before:
                    p.copy_(before[f"unet.{name}"])

    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--output_dir={place / f'script-{aligned}'}"]
    given += [f"--resolution={PX}", f"--max_train_steps={STEPS}", f"--adam_weight_decay={DECAY}", f"--rank={RANK}"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2"]
    given += [f"--train_batch_size={own.BATCH}", f"--vae_encode_batch_size={own.BATCH}", f"--beta_dpo={own.BETA:g}"]
    given += ["--dataset_name=none"]
    with pytest.MonkeyPatch.context() as patch, scripts.with_our_numbers(batches, aligned) as losses:
        posterior, noise = vae.randn_tensor, torch.randn_like
        # The images that are preferred are encoded first, and both of a pair have one noise.
        patch.setattr(vae, "randn_tensor", lambda *_, **__: next(rejected) if next(calls) % 2 else posterior())
        patch.setattr(torch, "randn_like", lambda *_, **__: torch.cat([noise()] * 2))
        patch.setattr(PeftAdapterMixin, "add_adapter", add_adapter)
        patch.setattr(script, "load_dataset", lambda *_, **__: rows)
        patch.setattr(torch.utils.data, "DataLoader", Loader)
        patch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
        patch.setattr(sys, "argv", [path.name, *given])
        script.main(script.parse_args())
    after = {f"unet.{name}": p.detach().clone() for name, p in networks[0].named_parameters()}
    return losses, {name: after[name] for name in before}


def main() -> None:
    """Records the script."""
    path = Path(sys.argv[1]) / own.SCRIPT
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        recorded = own.ours(place)
        before = first(recorded, place)
        losses, after = run(path, place, recorded, before, aligned=False)
        aligned = run(path, place, recorded, before, aligned=True)
        found = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "batches": batches_digest(recorded),
            "losses": losses,
            "losses with our rounding": aligned[0],
            "moved": moved(aligned[1], before),
            "apart": scripts.differences(recorded.losses, recorded.weights, losses, after, before),
            "apart with our rounding": scripts.differences(recorded.losses, recorded.weights, *aligned, before),
        }
    print(own.SCRIPT, {key: value for key, value in found.items() if key.startswith("apart")}, flush=True)
    own.RECORDED.write_text(json.dumps(found) + "\n")
    digest = hashlib.sha256(own.RECORDED.read_bytes()).hexdigest()
    print(own.RECORDED.name, digest, torch.__version__, diffusers.__version__)


if __name__ == "__main__":
    main()
