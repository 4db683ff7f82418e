#!/usr/bin/env python3
"""Runs diffusers' train_dreambooth_lora_krea2.py itself, on the batches and random numbers of our run, and records what
it did for tests/parity/test_krea2_script.py. Run once, in the environment of the tests:

    git clone https://github.com/huggingface/diffusers /tmp/diffusers && git -C /tmp/diffusers checkout 58eb52c0
    python tools/record_krea2_script.py /tmp/diffusers/examples/dreambooth

As in `record_flux2_scripts.py`; its images are videos of one frame, and latents are drawn from the posterior. SHA-256
of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    krea2_script.json  9b9671438754e1493f0a5ea0c5322ef849da6d6937372d827a838cb77e305b8e
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_flux2_scripts as flux2  # puts our folders on the path of modules

import krea2_script as own  # isort: skip
import diffusers
import pytest
import record_controlnet_scripts as scripts
import torch
from controlnet_scripts import moved
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from flux2_scripts import DECAY, PROMPT, RANK, batches_digest, first
from recorded import LEARNING_RATE, STEPS


def arguments(name: str, place: Path) -> list[str]:
    """The script's command line."""
    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--output_dir={place / 'script'}"]
    given += [f"--resolution={own.PX}", f"--instance_data_dir={place / 'pictures'}", f"--instance_prompt={PROMPT}"]
    given += [f"--max_train_steps={STEPS}", f"--adam_weight_decay={DECAY}", "--train_batch_size=4"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2", "--seed=0"]
    return [*given, f"--rank={RANK}", f"--lora_alpha={RANK}", f"--max_sequence_length={own.TOKENS}"]


def prepared(batch: Any) -> dict[str, Any]:
    """What the script's own loader gives of such a batch."""
    pixels = batch.pixels_BCHW.float() / 127.5 - 1
    return {"pixel_values": pixels[:, :, None], "prompts": batch.texts, "indices": [0, 1, 2, 3]}


def main() -> None:
    """Records the script."""
    path = Path(sys.argv[1]) / own.SCRIPT
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        place = Path(temporary)
        recorded = own.ours(place)
        before = first(recorded, place)
        posterior = iter([batch.draws["posterior"][:, :, None] for (batch,) in recorded.updates])
        for (batch,) in recorded.updates:  # of videos of one frame
            batch.draws["noise"] = batch.draws["noise"][:, :, None]
        patch.setattr(flux2, "prepared", prepared)
        patch.setattr(flux2, "arguments", arguments)
        patch.setattr(flux2.own, "SCRIPTS", {own.SCRIPT: 0})
        drawn = lambda found, *_, **__: found.mean + found.std * next(posterior)  # noqa: E731
        patch.setattr(DiagonalGaussianDistribution, "sample", drawn)
        losses, after = flux2.run(path, place, recorded, before)
        for (batch,) in recorded.updates:
            batch.draws["noise"] = batch.draws["noise"][:, :, 0]
        found = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "batches": batches_digest(recorded),
            "losses": losses,
            "moved": moved(after, before),
            "apart": scripts.differences(recorded.losses, recorded.weights, losses, after, before),
        }
    print(own.SCRIPT, found["apart"], flush=True)
    own.RECORDED.write_text(json.dumps(found) + "\n")
    digest = hashlib.sha256(own.RECORDED.read_bytes()).hexdigest()
    print(own.RECORDED.name, digest, torch.__version__, diffusers.__version__)


if __name__ == "__main__":
    main()
