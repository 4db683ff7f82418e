#!/usr/bin/env python3
"""Runs diffusers' DreamBooth scripts for LoRAs of models that are trained by flow matching themselves, on the batches
and random numbers of our runs, and records what they did for tests/parity/test_flow_scripts.py. Run once, in the
environment of the tests; the scripts of Qwen-Image-2.1 are of a later commit, 01e3a5d6:

    git clone https://github.com/huggingface/diffusers /tmp/diffusers && git -C /tmp/diffusers checkout 58eb52c0
    python tools/record_flow_scripts.py /tmp/diffusers/examples/dreambooth [SCRIPT ...]

Each `main` runs as it stands, with accelerate. In place of its data set stand our batches, in place of torch's random
numbers those that our run drew, and the LoRA starts from our run's first numbers. Scripts that are not named keep what
was recorded of them. SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one thread:

    flow_scripts.json  ee2097fe77bae484107d9ef2b592dafe049e5f9e4907447cb1e7ad677703949b
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_controlnet_scripts as scripts  # puts our folders on the path of modules

import flow_scripts as own  # isort: skip
import diffusers
import pytest
import tiny_texts
import torch
from accelerate import Accelerator
from controlnet_scripts import moved
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from flow_scripts import DECAY, PROMPT, RANK, SCRIPTS, Script, batches_digest
from PIL import Image
from recorded import LEARNING_RATE, STEPS, Recorded, first
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCH = 4


class Examples(list[Any]):
    """In place of the script's data set."""

    custom_instance_prompts = False
    num_instance_images = BATCH * STEPS


def arguments(script: Script, place: Path) -> list[str]:
    """The script's command line."""
    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--output_dir={place / 'script'}"]
    data = "dataset_name" if script.references and "21" in script.family else "instance_data_dir"
    given += [f"--resolution={script.px}", f"--{data}={place / 'pictures'}", f"--instance_prompt={PROMPT}"]
    given += [f"--max_train_steps={STEPS}", f"--adam_weight_decay={DECAY}", f"--train_batch_size={BATCH}"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2", "--seed=0"]
    return [*given, f"--rank={RANK}", f"--lora_alpha={RANK}", *script.given]


def prepared(script: Script, batch: Any, number: int) -> dict[str, Any]:
    """What the script's own loader gives of such a batch, the `number`-th."""

    def pixels(given: Tensor) -> Tensor:
        found = given.float() / 127.5 - 1
        if "21" in script.family:  # whose autoencoder has a channel for how opaque a picture is
            found = torch.cat([found, torch.ones_like(found[:, :1])], 1)
        return found[:, :, None] if script.frames else found

    indices = [*range(number * BATCH, (number + 1) * BATCH)]
    found = {"pixel_values": pixels(batch.pixels_BCHW), "prompts": batch.texts, "indices": indices}
    for shown in batch.references:  # one at most
        pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()).convert("RGBA") for each in shown]
        found |= {"cond_pixel_values": pixels(shown), "cond_pil_images": pictures, "instance_prompts": batch.texts}
    return found


def run(
    path: Path, place: Path, recorded: Recorded, before: dict[str, Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last weights of the script, by the names of our weights."""
    module, script = scripts.script_of(path), SCRIPTS[path.name]
    batches = [batch for (batch,) in recorded.updates]
    rows, losses = Examples(prepared(script, batch, i) for i, batch in enumerate(batches)), list[float]()
    rows.custom_instance_prompts = script.of_each
    frames = (slice(None), slice(None), None) if script.frames else ()
    noise = iter([batch.draws["noise"][frames] for batch in batches])
    posterior = iter([batch.draws["posterior"][frames] for batch in batches if script.posterior])
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
        if script.posterior:
            drawn = lambda found, *_, **__: found.mean + found.std * next(posterior)  # noqa: E731
            patch.setattr(DiagonalGaussianDistribution, "sample", drawn)
        patch.setattr(module, "compute_density_for_timestep_sampling", lambda **_: next(shares))
        patch.setattr(module, "DreamBoothDataset", lambda **_: rows)
        patch.setattr(module, "BucketBatchSampler", lambda *_, **__: None, raising=False)
        if hasattr(module, "Qwen3VLProcessor"):  # which cannot be read without torchvision
            patch.setattr(module.Qwen3VLProcessor, "from_pretrained", lambda *_, **__: tiny_texts.qwen3_vl_processor())
        patch.setattr(torch.utils.data, "DataLoader", Loader)
        patch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
        patch.setattr(Accelerator, "log", lambda _, of, **__: losses.append(of["loss"]))
        module.args = module.parse_args(arguments(script, place))  # which some read as they stand in a command
        module.main(module.args)
    after = {f"transformer.{name}": p.detach().clone() for name, p in networks[0].named_parameters()}
    return losses, {name: after[name] for name in before}


def main() -> None:
    """Records the scripts that are named, or all."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [*SCRIPTS]
    found = json.loads(own.RECORDED.read_text()) if own.RECORDED.exists() else {}
    torch.set_num_threads(1)
    for name in names:
        with TemporaryDirectory() as temporary:
            place = Path(temporary)
            recorded = own.ours(SCRIPTS[name], place)
            before = first(recorded, place)
            losses, after = run(folder / name, place, recorded, before)
            found[name] = {
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
                "batches": batches_digest(recorded),
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
