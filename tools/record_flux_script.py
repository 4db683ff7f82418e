#!/usr/bin/env python3
"""Runs diffusers' train_dreambooth_lora_flux.py itself, on the batches and random numbers of our run, and records what
it did for tests/parity/test_flux_script.py. Run once, in the environment of the tests:

    git clone https://github.com/huggingface/diffusers /tmp/diffusers && git -C /tmp/diffusers checkout 58eb52c0
    python tools/record_flux_script.py /tmp/diffusers/examples/dreambooth

As in `record_flux2_scripts.py`; latents are drawn from the posterior. SHA-256 of what was recorded with torch 2.13.0
and diffusers 0.42.1 on x86, one thread:

    flux_script.json  d73673ef56b6a0159e6662c5712fc5d121686619022fdea4772b26db78cda4d1
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_flux2_scripts as flux2  # puts our folders on the path of modules

import flux_script as own  # isort: skip
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
    given += [f"--guidance_scale={own.GUIDANCE}"]
    return [*given, f"--rank={RANK}", f"--lora_alpha={RANK}", f"--max_sequence_length={own.TOKENS}"]


def prepared(batch: Any) -> dict[str, Any]:
    """What the script's own loader gives of such a batch."""
    return {"pixel_values": batch.pixels_BCHW.float() / 127.5 - 1, "prompts": batch.texts}


def script_of(path: Path) -> Any:
    """The script as a module, with a name that those of FLUX.2 have, too, and the one that it has as a command."""
    module = _script_of(path)
    parse_args = module.parse_args

    def parsed(given: list[str]) -> Any:
        module.args = parse_args(given)
        return module.args

    module.BucketBatchSampler, module.parse_args = None, parsed
    return module


_script_of = scripts.script_of


def main() -> None:
    """Records the script."""
    path = Path(sys.argv[1]) / own.SCRIPT
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        place = Path(temporary)
        recorded = own.ours(place)
        before = first(recorded, place)
        posterior = iter([batch.draws["posterior"] for (batch,) in recorded.updates])
        patch.setattr(scripts, "script_of", script_of)
        patch.setattr(flux2, "prepared", prepared)
        patch.setattr(flux2, "arguments", arguments)
        patch.setattr(flux2.own, "SCRIPTS", {own.SCRIPT: 1})
        drawn = lambda found, *_, **__: found.mean + found.std * next(posterior)  # noqa: E731
        patch.setattr(DiagonalGaussianDistribution, "sample", drawn)
        losses, after = flux2.run(path, place, recorded, before)
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
