#!/usr/bin/env python3
"""Runs diffusers' scripts for LoRA, DreamBooth with LoRA and textual inversion themselves, on the batches and random
numbers of our runs, and records what they did for tests/parity/test_adapter_scripts.py. Run once, in the environment of
the tests:

    git clone --depth 1 --branch v0.40.0 https://github.com/huggingface/diffusers /tmp/diffusers
    python tools/record_adapter_scripts.py /tmp/diffusers/examples

Each `main` runs as it stands, twice, as in `record_controlnet_scripts.py`. A LoRA starts from our run's first numbers,
which are put in where the script adds it. The second time SDXL's DreamBooth, which encodes its two prompts one by one,
encodes them together, as our batches do. SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86,
one thread:

    adapter_scripts.json  e52b29065c464fa487a4ca36144688e757952c6ef657dbbbf4fbe4f860074f93
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record_controlnet_scripts as scripts  # puts our folders on the path of modules

import adapter_scripts as own  # isort: skip
import diffusers
import pytest
import torch
from accelerate import Accelerator
from controlnet_scripts import moved
from diffusers.loaders.peft import PeftAdapterMixin
from recorded import LEARNING_RATE, STEPS, Recorded, first
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import CLIPTokenizer, PreTrainedModel


def arguments(name: str, place: Path, out: Path) -> list[str]:
    """The script's command line."""
    case = own.CASES[name]
    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--output_dir={out}", f"--resolution={own.PX}"]
    given += [f"--max_train_steps={STEPS}", f"--adam_weight_decay={own.DECAY}"]
    if name == "textual_inversion.py":
        given += [f"--placeholder_token={own.TOKEN}", "--initializer_token=a", f"--num_vectors={own.VECTORS}"]
        given += [f"--learning_rate={own.TOKEN_RATE}", f"--train_batch_size={case.batch}", "--train_data_dir=none"]
        return [*given, "--lr_scheduler=constant"]
    given += [f"--learning_rate={LEARNING_RATE}", "--lr_scheduler=cosine", "--lr_warmup_steps=2", f"--rank={own.RANK}"]
    given += ["--train_text_encoder"] if case.encoders else []
    if "dreambooth" not in name:
        return [*given, f"--train_batch_size={case.batch}", "--train_data_dir=none"]
    given += [f"--train_batch_size={case.batch // 2}", f"--instance_data_dir={place / 'instance'}"]
    given += [f"--class_data_dir={place / 'class'}", "--num_class_images=5", "--with_prior_preservation"]
    given += [f"--instance_prompt={own.INSTANCE}", f"--class_prompt={own.CLASS}", f"--prior_loss_weight={own.PRIOR}"]
    return given


def class_last(batch: Any) -> Any:
    """The batch as DreamBooth's scripts have it: one half of the instance, then one of the class."""
    order = sorted(range(len(batch.texts)), key=lambda i: batch.texts[i] == own.CLASS)
    return batch.map(lambda tensor: tensor[order], host=lambda values: [values[i] for i in order])


def prepared(batch: Any, place: Path) -> dict[str, Any]:
    """What the scripts' own loaders give of such a batch."""
    found: dict[str, Any] = {"pixel_values": batch.pixels_BCHW.float() / 127.5 - 1, "prompts": list(batch.texts)}
    names = [own.TOKEN, *(f"{own.TOKEN}_{i}" for i in range(1, own.VECTORS))]
    texts = [text.replace(own.TOKEN, " ".join(names)) for text in batch.texts]
    for folder, keys in (("tokenizer", ("input_ids", "input_ids_one")), ("tokenizer_2", ("input_ids_two",))):
        if (place / "model" / folder).is_dir():
            tokenizer = CLIPTokenizer.from_pretrained(place / "model" / folder)
            tokenizer.add_tokens(names)
            limits: dict[str, Any] = {"max_length": tokenizer.model_max_length, "padding": "max_length"}
            made = tokenizer(texts, truncation=True, return_tensors="pt", **limits)
            found |= dict.fromkeys(keys, made.input_ids) | {"attention_mask": made.attention_mask}
    found["original_sizes"] = [tuple(map(int, row[:2])) for row in batch.sizes]
    found["crop_top_lefts"] = [tuple(map(int, row[2:4])) for row in batch.sizes]
    return found


def together(encode: Any) -> Any:
    """Prompts are encoded in a batch of both."""
    both = [own.INSTANCE, own.CLASS]

    def encoded(networks: Any, tokenizers: Any, prompt: str) -> list[Tensor]:
        return [value[both.index(prompt)][None] for value in encode(networks, tokenizers, both)]

    return encoded


class Examples(list[Any]):
    """In place of each of the scripts' data sets."""

    column_names = ("image", "text")
    custom_instance_prompts = False

    def with_transform(self, *_: Any, **__: Any) -> Examples:
        """The same."""
        return self


def run(path: Path, place: Path, recorded: Recorded, before: dict[str, Tensor], aligned: bool) -> tuple[Any, Any]:
    """Losses and last weights of the script, by the names of our weights."""
    script, out = scripts.script_of(path), place / f"script-{aligned}"
    batches = [batch for (batch,) in recorded.updates]
    batches = [class_last(batch) for batch in batches] if "dreambooth" in path.name else batches
    rows = Examples(prepared(batch, place) for batch in batches)
    networks: dict[str, nn.Module] = {}

    class Loader(DataLoader[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(rows, collate_fn=lambda given: given[0])

    def started(add: Any) -> Any:
        def add_adapter(network: Any, *given: Any, **more: Any) -> None:
            add(network, *given, **more)
            parts = {"CLIPTextModel": "text_encoder", "CLIPTextModelWithProjection": "text_encoder_2"}
            part = parts.get(type(network).__name__, "unet")
            networks[part] = network
            with torch.no_grad():
                for name, p in network.named_parameters():
                    if f"{part}.{name}" in before:
                        p.copy_(before[f"{part}.{name}"])

        return add_adapter

    with pytest.MonkeyPatch.context() as patch, scripts.with_our_numbers(batches, aligned) as losses:
        for mixin in (PeftAdapterMixin, PreTrainedModel):
            patch.setattr(mixin, "add_adapter", started(mixin.add_adapter))
        for name in ("load_dataset", "DreamBoothDataset", "TextualInversionDataset"):
            made = {"train": rows} if name == "load_dataset" else rows
            patch.setattr(script, name, lambda *_, made=made, **__: made, raising=False)
        if aligned and path.name == "train_dreambooth_lora_sdxl.py":
            patch.setattr(script, "encode_prompt", together(script.encode_prompt))
        patch.setattr(torch.utils.data, "DataLoader", Loader)
        patch.setattr(Accelerator, "init_trackers", lambda *_, **__: None)
        patch.setattr(sys, "argv", [path.name, *arguments(path.name, place, out)])
        takes = script.main.__code__.co_argcount
        script.main(*[script.parse_args() for _ in range(takes)])
    if not networks:
        ((name, _),) = before.items()
        return losses, {name: load_file(out / "learned_embeds.safetensors")[own.TOKEN]}
    after = {f"{part}.{n}": p.detach().clone() for part, net in networks.items() for n, p in net.named_parameters()}
    return losses, {name: after[name] for name in before}


def main() -> None:
    """Records all scripts."""
    folder, found = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    for name in own.CASES:
        (path,) = folder.glob(f"*/{name}")
        with TemporaryDirectory() as temporary:
            place = Path(temporary)
            recorded = own.ours(name, place)
            before = first(recorded, place)
            losses, after = run(path, place, recorded, before, aligned=False)
            aligned = run(path, place, recorded, before, aligned=True)
            found[name] = {
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "batches": own.batches_digest(recorded),
                "losses": losses,
                "moved": moved(after, before),
                "apart": scripts.differences(recorded.losses, recorded.weights, losses, after, before),
                "apart with our rounding": scripts.differences(recorded.losses, recorded.weights, *aligned, before),
            }
            print(name, {key: value for key, value in found[name].items() if key.startswith("apart")}, flush=True)
    own.RECORDED.write_text(json.dumps(found) + "\n")
    digest = hashlib.sha256(own.RECORDED.read_bytes()).hexdigest()
    print(own.RECORDED.name, digest, torch.__version__, diffusers.__version__)


if __name__ == "__main__":
    main()
