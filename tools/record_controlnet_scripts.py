#!/usr/bin/env python3
"""Runs diffusers' train_controlnet.py and train_controlnet_sdxl.py themselves, on the batches and random numbers of our
runs, and records what they did for tests/parity/test_controlnet_parity.py. Run once, in the environment of the tests:

    git clone --depth 1 --branch v0.40.0 https://github.com/huggingface/diffusers /tmp/diffusers
    python tools/record_controlnet_scripts.py /tmp/diffusers/examples/controlnet

The scripts' `main` runs as it stands, with accelerate. In place of their data sets stand our batches, and in place of
torch's random numbers those that our run drew. Each script runs twice: as it is, and with what rounds otherwise in our
run: noise levels from float64 (theirs are a float32 product of a thousand numbers), AdamW's one kernel, and an
autoencoder whose channels stand last. SHA-256 of what was recorded with torch 2.13.0 and diffusers 0.42.1 on x86, one
thread:

    controlnet_scripts.json  d9b01d137e16d9a472a322dee6053cd5d3345e0d2d3c0df00644d44e7ecd7fa9
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "parity"), str(ROOT / "src")]

import controlnet_scripts as own  # noqa: E402
import datasets  # noqa: E402, F401
import diffusers  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from diffusers import AutoencoderKL, DDPMScheduler  # noqa: E402
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution  # noqa: E402
from recorded import LEARNING_RATE, STEPS, Recorded  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

BATCH = 4


class Rows(list[dict[str, Any]]):
    """Examples, with the `map` of a data set that computes embeddings of them all."""

    def map(self, function: Any, **_: Any) -> Rows:
        """Each with what the function makes of all."""
        columns = {name: [row[name] for row in self] for name in self[0]}
        made = function(columns)
        return Rows({**row, **{name: value[i] for name, value in made.items()}} for i, row in enumerate(self))


def script_of(path: Path) -> ModuleType:
    """The script as a module. Its torchvision is only asked for by data sets of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            patch.setitem(sys.modules, name, MagicMock())
        spec.loader.exec_module(module)
    return module


@contextmanager
def with_our_numbers(batches: list[Any], aligned: bool) -> Iterator[list[float]]:
    """The script draws what our run drew. Gives a list for its losses."""
    losses: list[float] = []
    draws = {name: iter([batch.draws[name] for batch in batches]) for name in ("posterior", "noise", "c_noise")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.models.autoencoders.vae.randn_tensor", lambda *_, **__: next(draws["posterior"]))
        patch.setattr(torch, "randn_like", lambda *_, **__: next(draws["noise"]))
        patch.setattr(torch, "randint", lambda *_, **__: next(draws["c_noise"]).long())
        patch.setattr(
            Accelerator, "log", lambda _, of, **__: losses.append(of["loss" if "loss" in of else "train_loss"])
        )
        if aligned:
            rounding_as_ours(patch)
        yield losses
    assert all(next(each, None) is None for each in draws.values()), "the script drew as often as our run"


def rounding_as_ours(patch: pytest.MonkeyPatch) -> None:
    """The same formulas in the orders and types of our run."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    levels = (1 - betas).cumprod(0)

    def add_noise(_: Any, x0: torch.Tensor, noise: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        a, s = (c.sqrt().float().view(-1, 1, 1, 1) for c in (levels[t_B], 1 - levels[t_B]))
        return a * x0 + s * noise

    class OneKernel(torch.optim.AdamW):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more, fused=True)

    encode = AutoencoderKL.encode

    def channels_last(vae: Any, pixels: torch.Tensor) -> Any:
        vae.to(memory_format=torch.channels_last)
        found = encode(vae, pixels.to(memory_format=torch.channels_last))
        found.latent_dist = DiagonalGaussianDistribution(found.latent_dist.parameters.contiguous())
        return found

    patch.setattr(DDPMScheduler, "add_noise", add_noise)
    patch.setattr(AutoencoderKL, "encode", channels_last)
    patch.setattr(torch.optim, "AdamW", OneKernel)


def run(script: ModuleType, family: str, place: Path, recorded: Recorded, aligned: bool) -> tuple[list[float], Any]:
    """Losses and last weights of the script."""
    batches = [batch for (batch,) in recorded.updates]
    queue = iter(batches)
    rows = Rows({"text": text} for batch in batches for text in batch.texts)
    kept: dict[str, Any] = {}

    def sd_dataset(_: Any, tokenizer: Any, __: Any) -> Rows:
        kept["tokenizer"] = tokenizer
        return rows

    def collate(_: Any) -> dict[str, Any]:
        batch = next(queue)
        found = {"conditioning_pixel_values": batch.images["control"][:, :3].float() / 255}
        found["pixel_values"] = batch.pixels_BCHW.float() / 127.5 - 1
        if family == "sd":
            tokenizer = kept["tokenizer"]
            limits: dict[str, Any] = {"max_length": tokenizer.model_max_length, "padding": "max_length"}
            found["input_ids"] = tokenizer(list(batch.texts), truncation=True, return_tensors="pt", **limits).input_ids
            return found
        of_text = {row["text"]: row for row in kept["rows"]}
        chosen = [of_text[text] for text in batch.texts]
        found["prompt_ids"] = torch.stack([row["prompt_embeds"] for row in chosen])
        names = ("text_embeds", "time_ids")
        found["unet_added_conditions"] = {name: torch.stack([row[name] for row in chosen]) for name in names}
        return found

    def prepared(embedded: Rows, _: Any) -> Rows:
        kept["rows"] = embedded
        return embedded

    out = place / f"script-{aligned}"
    given = [f"--pretrained_model_name_or_path={place / 'model'}", f"--controlnet_model_name_or_path={place / 'start'}"]
    given += [f"--output_dir={out}", f"--resolution={own.PX}", f"--train_batch_size={BATCH}", "--train_data_dir=none"]
    given += [f"--max_train_steps={STEPS}", f"--learning_rate={LEARNING_RATE}", f"--adam_weight_decay={own.DECAY}"]
    given += ["--lr_scheduler=cosine", "--lr_warmup_steps=2"]
    arguments = script.parse_args(given)
    arguments.report_to = None
    with pytest.MonkeyPatch.context() as patch, with_our_numbers(batches, aligned) as losses:
        patch.setattr(script, "collate_fn", collate)
        if family == "sd":
            patch.setattr(script, "make_train_dataset", sd_dataset)
        else:
            arguments.caption_column = "text"
            patch.setattr(script, "get_train_dataset", lambda *_: rows)
            patch.setattr(script, "prepare_train_dataset", prepared)
        script.main(arguments)
    return losses, load_file(out / "diffusion_pytorch_model.safetensors")


def differences(our_losses: list[float], mine: Any, losses: list[float], after: Any, before: Any) -> dict[str, float]:
    """The largest relative one of a loss, and of a tensor: over its largest number, and over its largest change."""
    loss = max(abs(a - b) / b for a, b in zip(our_losses, losses, strict=True))
    gaps = {name: float((mine[name] - after[name]).abs().max()) for name in after}
    return {
        "loss": loss,
        "weights": max(gap / float(after[name].abs().max()) for name, gap in gaps.items()),
        "change": max(gap / float((after[name] - before[name]).abs().max()) for name, gap in gaps.items()),
    }


def main() -> None:
    """Records both scripts."""
    folder, found = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    for family, name in own.SCRIPTS.items():
        with TemporaryDirectory() as temporary:
            place = Path(temporary)
            recorded = own.ours(family, place)
            before = load_file(place / "start" / "diffusion_pytorch_model.safetensors")
            losses, after = run(script_of(folder / name), family, place, recorded, aligned=False)
            aligned = run(script_of(folder / name), family, place, recorded, aligned=True)
            found[family] = {
                "script": name,
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
                "batches": own.batches_digest(recorded),
                "losses": losses,
                "moved": own.moved(after, before),
                "apart": differences(recorded.losses, own.weights(recorded), losses, after, before),
                "apart with our rounding": differences(recorded.losses, own.weights(recorded), *aligned, before),
            }
            print(family, {key: value for key, value in found[family].items() if key.startswith("apart")})
    own.RECORDED.write_text(json.dumps(found) + "\n")
    print(
        own.RECORDED.name,
        hashlib.sha256(own.RECORDED.read_bytes()).hexdigest(),
        torch.__version__,
        diffusers.__version__,
    )


if __name__ == "__main__":
    main()
