#!/usr/bin/env python3
"""Runs diffusers' scripts for a LoRA of FLUX.2 klein themselves, on the batches and random numbers of our runs, and
records what they did for tests/parity/test_flux2_scripts.py. Run once, in the environment of the tests:

    git clone https://github.com/huggingface/diffusers /tmp/diffusers && git -C /tmp/diffusers checkout 58eb52c0
    python tools/record_flux2_scripts.py /tmp/diffusers/examples/dreambooth

Each `main` runs as it stands, with accelerate. In place of its data set stand our batches, in place of torch's random
numbers those that our run drew, and the LoRA starts from our run's first numbers. SHA-256 of what was recorded with
torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    flux2_scripts.json  63fc677a953ef72780b77ed32501ca6b9c89432141505a4f958d513207a2c5e3
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_controlnet_scripts as scripts  # puts our folders on the path of modules

import flux2_scripts as own  # isort: skip
import diffusers
import pytest
import torch
from accelerate import Accelerator
from controlnet_scripts import moved
from diffusers.loaders.peft import PeftAdapterMixin
from recorded import LEARNING_RATE, STEPS, Recorded
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Examples(list[Any]):
    """In place of the script's data set."""

    custom_instance_prompts = False
    num_instance_images = 12


def arguments(name: str, place: Path) -> list[str]:
    """The script's command line."""
    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--output_dir={place / 'script'}"]
    given += [f"--resolution={own.PX}", f"--instance_data_dir={place / 'pictures'}", f"--instance_prompt={own.PROMPT}"]
    given += [f"--max_train_steps={STEPS}", f"--adam_weight_decay={own.DECAY}", "--train_batch_size=4"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2", "--seed=0"]
    given += [f"--rank={own.RANK}", f"--lora_alpha={own.RANK}", f"--max_sequence_length={own.TOKENS}"]
    if own.SCRIPTS[name]:
        return [*given, "--cond_image_column=reference", "--image_column=image", "--caption_column=text"]
    # The script without reference images reads the layers 10, 20 and 30 unless it is given the pipeline's.
    return [*given, "--text_encoder_out_layers", "9", "18", "27"]


def prepared(batch: Any) -> dict[str, Any]:
    """What the script's own loader gives of such a batch."""
    found = {"pixel_values": batch.pixels_BCHW.float() / 127.5 - 1, "prompts": batch.texts, "indices": [0, 1, 2, 3]}
    for pixels in batch.references:  # one at most
        found["cond_pixel_values"] = pixels.float() / 127.5 - 1
    return found


def run(
    path: Path, place: Path, recorded: Recorded, before: dict[str, Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last weights of the script, by the names of our weights."""
    script = scripts.script_of(path)
    batches = [batch for (batch,) in recorded.updates]
    rows, losses = Examples(prepared(batch) for batch in batches), list[float]()
    # With one prompt for all, the script with reference images repeats its embeddings once more at every step.
    rows.custom_instance_prompts = bool(own.SCRIPTS[path.name])
    noise = iter([batch.draws["noise"] for batch in batches])
    # The script takes the level of the index 1000 u, of levels that fall from 1.
    shares = iter([(1 - batch.draws["c_noise"].double()) + 5e-4 for batch in batches])
    networks: list[nn.Module] = []
    add = PeftAdapterMixin.add_adapter

    class Loader(DataLoader[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(rows, collate_fn=lambda given: given[0])

    def started(network: Any, *given: Any, **more: Any) -> None:
        add(network, *given, **more)
        networks.append(network)
        held = dict(network.named_parameters())
        assert {f"transformer.{name}" for name, p in held.items() if p.requires_grad} == before.keys()
        with torch.no_grad():
            for name, value in before.items():
                held[name.removeprefix("transformer.")].copy_(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeftAdapterMixin, "add_adapter", started)
        patch.setattr(torch, "randn_like", lambda *_, **__: next(noise))
        patch.setattr(script, "compute_density_for_timestep_sampling", lambda **_: next(shares))
        patch.setattr(script, "DreamBoothDataset", lambda **_: rows)
        patch.setattr(script, "BucketBatchSampler", lambda *_, **__: None)
        patch.setattr(torch.utils.data, "DataLoader", Loader)
        patch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
        patch.setattr(Accelerator, "log", lambda _, of, **__: losses.append(of["loss"]))
        script.main(script.parse_args(arguments(path.name, place)))
    after = {f"transformer.{name}": p.detach().clone() for name, p in networks[0].named_parameters()}
    return losses, {name: after[name] for name in before}


def main() -> None:
    """Records both scripts."""
    folder, found = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    for name in own.SCRIPTS:
        with TemporaryDirectory() as temporary:
            place = Path(temporary)
            recorded = own.ours(name, place)
            before = own.first(recorded, place)
            losses, after = run(folder / name, place, recorded, before)
            found[name] = {
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
                "batches": own.batches_digest(recorded),
                "losses": losses,
                "moved": moved(after, before),
                "apart": scripts.differences(recorded.losses, recorded.weights, losses, after, before),
            }
            print(name, found[name]["apart"], flush=True)
    own.RECORDED.write_text(json.dumps(found) + "\n")
    digest = hashlib.sha256(own.RECORDED.read_bytes()).hexdigest()
    print(own.RECORDED.name, digest, torch.__version__, diffusers.__version__)


if __name__ == "__main__":
    main()
