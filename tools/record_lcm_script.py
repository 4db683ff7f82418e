#!/usr/bin/env python3
"""Runs diffusers' train_lcm_distill_lora_sdxl.py itself, on the batches and random numbers of our run, and records what
it did for tests/parity/test_lcm_script.py. Run once, in the environment of the tests:

    git clone --depth 1 --branch v0.40.0 https://github.com/huggingface/diffusers /tmp/diffusers
    python tools/record_lcm_script.py /tmp/diffusers/examples/consistency_distillation

Its `main` runs as it stands, twice, as in `record_controlnet_scripts.py`: the second time with noise levels from
float64 also in the table that it reads, whose roundings the division by a small signal level magnifies. The LoRA starts
from our run's first numbers. SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    lcm_script.json  e1b453ae8c57031e10ed5657537b4278d860a6461eaa0523b79d4b92d7174eb7
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_adapter_scripts as adapters  # puts our folders on the path of modules
import record_controlnet_scripts as scripts

import lcm_script as own  # isort: skip
import diffusers
import pytest
import torch
from accelerate import Accelerator
from adapter_scripts import DECAY, PX, RANK, batches_digest
from controlnet_scripts import moved
from diffusers import DDPMScheduler
from diffusers.loaders.peft import PeftAdapterMixin
from recorded import LEARNING_RATE, STEPS, Recorded, first
from torch import Tensor, nn
from torch.utils.data import DataLoader


def prepared(batch: Any) -> dict[str, Any]:
    """What the script's own loader gives of such a batch."""
    found = {"pixel_values": batch.pixels_BCHW.float() / 127.5 - 1, "captions": list(batch.texts)}
    sizes = {"original_sizes": slice(0, 2), "crop_top_lefts": slice(2, 4)}
    return found | {name: [tuple(map(int, row[part])) for row in batch.sizes] for name, part in sizes.items()}


def run(path: Path, place: Path, recorded: Recorded, before: dict[str, Tensor], aligned: bool) -> tuple[Any, Any]:
    """Losses and last weights of the script, by the names of our weights."""
    script, batches = scripts.script_of(path), [batch for (batch,) in recorded.updates]
    rows = adapters.Examples(prepared(batch) for batch in batches)
    steps = iter([((batch.draws["c_noise"] + 1) / 20 - 1).round().long() for batch in batches])
    low, high = own.SCALES
    scales = iter([(batch.draws["scale"].double() - low) / (high - low) for batch in batches])
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

    given = [f"--pretrained_teacher_model={place / 'model'}", f"--output_dir={place / f'script-{aligned}'}"]
    given += [f"--resolution={PX}", f"--max_train_steps={STEPS}", f"--adam_weight_decay={DECAY}", "--loss_type=huber"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2"]
    given += [f"--lora_rank={RANK}", f"--lora_alpha={own.ALPHA:g}", f"--train_batch_size={own.BATCH}"]
    given += [f"--w_min={low - 1:g}", f"--w_max={high - 1:g}", "--train_data_dir=none"]
    with pytest.MonkeyPatch.context() as patch, scripts.with_our_numbers(batches, aligned) as losses:
        patch.setattr(torch, "randint", _counting(torch.randint, steps))
        patch.setattr(torch, "rand", lambda *_, **__: next(scales))
        patch.setattr(PeftAdapterMixin, "add_adapter", add_adapter)
        if aligned:
            patch.setattr(DDPMScheduler, "from_pretrained", _exact(DDPMScheduler.from_pretrained))
        patch.setattr(script, "load_dataset", lambda *_, **__: {"train": rows})
        for name in ("log_validation", "resolve_interpolation_mode"):
            patch.setattr(script, name, lambda *_, **__: None)
        patch.setattr(torch.utils.data, "DataLoader", Loader)
        patch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
        patch.setattr(sys, "argv", [path.name, *given])
        script.main(script.parse_args())
    after = {f"unet.{name}": p.detach().clone() for name, p in networks[0].named_parameters()}
    return losses, {name: after[name] for name in before}


def _counting(drawn: Any, steps: Any) -> Any:
    """The solver's step of each sample, in place of the timestep that our numbers would give."""

    def randint(*given: Any, **more: Any) -> Any:
        drawn(*given, **more)
        return next(steps)

    return randint


def _exact(make: Any) -> Any:
    """A scheduler whose noise levels are float64: the script reads its table, too."""

    def made(*given: Any, **more: Any) -> Any:
        scheduler = make(*given, **more)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        scheduler.alphas_cumprod = (1 - betas).cumprod(0)
        return scheduler

    return made


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
            "losses with our levels": aligned[0],
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
