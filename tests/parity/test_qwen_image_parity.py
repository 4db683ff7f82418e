"""LoRA runs of Qwen-Image-2.1 and Qwen-Image, recorded and replayed by the parts of their stock pipelines: prompts,
autoencoder, packing and transformer as diffusers' train_dreambooth_lora_qwen_image.py and _qwenimage21.py call them.

Of the scripts' differences from the models none is here: noise levels have the model's law and shift, and captions of
several lengths share no call of Qwen-Image-2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import tiny_texts
import torch
from data_sets import folder as images
from diffusers import QwenImage21Pipeline, QwenImagePipeline
from peft import LoraConfig
from recorded import LEARNING_RATE, Recorded, train
from tiny_families import qwen_image, qwen_image_21
from torch import Tensor

from daguerre.assembly.parts import build
from daguerre.config import config as configs

RANK, PX = 4, 64
TARGETS = ["to_k", "to_q", "to_v", "to_out.0"]
SHIFT = {"name": "linear_mu", "low_px": 256, "low_mu": 0.5, "high_px": 1448.1546878700494, "high_mu": 0.9}
CAPTIONS = ["a red circle", "a blue star", "", "a green square on a white table"]


class Replayed:
    """A pipeline's parts, as the scripts use them."""

    def __init__(self, base: Path, kind: Any) -> None:
        handed = {"processor": tiny_texts.qwen3_vl_processor()} if kind is QwenImage21Pipeline else {}
        self.pipe = kind.from_pretrained(base, low_cpu_mem_usage=False, **handed)
        self.transformer = self.pipe.transformer.requires_grad_(False).train()
        self.is_21 = kind is QwenImage21Pipeline

    @torch.no_grad()
    def latents(self, batch: Any) -> Tensor:
        """(z - mean) / std of a draw from the posterior; Qwen-Image-2.1's pixels are opaque."""
        vae, pixels = self.pipe.vae, batch.pixels_BCHW.float() / 127.5 - 1
        if self.is_21:
            vae.to(memory_format=torch.channels_last)
            pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        posterior = vae.encode(pixels[:, :, None]).latent_dist
        z = posterior.mean + posterior.std * batch.draws["posterior"][:, :, None]
        mean, std = (torch.tensor(vae.config[f"latents_{each}"]).view(1, -1, 1, 1, 1) for each in ("mean", "std"))
        return ((z - mean) / std)[:, :, 0]

    @torch.no_grad()
    def conditioning(self, batch: Any) -> Mapping[str, Any]:
        """Hidden states of the prompts, and which are no padding."""
        text, mask, *_ = self.pipe.encode_prompt([text or " " for text in batch.texts], device="cpu")
        return {"encoder_hidden_states": text, "encoder_hidden_states_mask": mask}

    def losses(self, batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        """Of x_s = (1 - s) x0 + s eps and the target eps - x0, their mean square."""
        x0, eps, s_B = self.latents(batch), batch.draws["noise"], batch.draws["c_noise"]
        (b, c, h, w), s = x0.shape, s_B.view(-1, 1, 1, 1)
        factor = 16 if self.is_21 else 8
        tokens = self.pipe._pack_latents((1 - s) * x0 + s * eps, b, c, h, w)
        text, mask = conditioning["encoder_hidden_states"], conditioning["encoder_hidden_states_mask"]
        if self.is_21:  # padding changes what the stock transformer makes of an image, so each caption goes alone
            lengths = [text.shape[1]] * b if mask is None else mask.sum(1).tolist()
            y = torch.cat(
                [
                    self.of_21(tokens[i : i + 1], s_B[i : i + 1], text[i : i + 1, :n], (h, w))
                    for i, n in enumerate(lengths)
                ]
            )
        else:
            (y,) = self.transformer(
                hidden_states=tokens,
                timestep=s_B,
                img_shapes=[[(1, h // 2, w // 2)]] * b,
                return_dict=False,
                **conditioning,
            )
        y = self.pipe._unpack_latents(y[:, -tokens.shape[1] :], h * factor, w * factor, factor)[:, :, 0]
        return (y - (eps - x0)).square().mean(dim=(1, 2, 3))

    def of_21(self, tokens: Tensor, s_B: Tensor, text: Tensor, size: tuple[int, int]) -> Tensor:
        h, w = size
        of_image = torch.cat([torch.zeros(1, text.shape[1]), torch.ones(1, h * w // 4)], 1).bool()
        (y,) = self.transformer(
            hidden_states=tokens,
            timestep=s_B,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, h, w)]],
            img_mask=of_image,
            return_dict=False,
        )
        return y[:, -tokens.shape[1] :]


def ours(family: str, base: Path, place: Path) -> Recorded:
    pictures = images(place / "pictures", 12)
    for number, path in enumerate(sorted(pictures.glob("*.txt"))):
        path.write_text(CAPTIONS[number % len(CAPTIONS)], encoding="utf-8")
    model = {"family": family, "pretrained_model_name_or_path": str(base), "max_sequence_length": 64}
    schedule = {"name": "linear_flow", "resolution_shift": SHIFT, "terminal": 0.02}
    data = {"source": "folder", "path": str(pictures), "resolution": PX, "crop": "random", "caption_dropout": 0.25}
    return train(
        place,
        {
            "model": model,
            "objective": {"name": "flow", "schedule": schedule},
            "adapters": {"lora": {"name": "lora", "rank": RANK, "init": "gaussian"}},
            "data": {**data, "held_out_fraction": 0.0},
        },
    )


@pytest.mark.parametrize(
    ("tiny", "kind"),
    [(qwen_image_21, QwenImage21Pipeline), pytest.param(qwen_image, QwenImagePipeline, marks=pytest.mark.long)],
    ids=["2.1", "first"],
)
def test_training_is_that_of_the_stock_parts(tiny, kind, tmp_path):
    base = tiny.write(tmp_path / "base")
    recorded = ours(tiny.__name__.rpartition(".")[2], base, tmp_path)
    replayed = Replayed(base, kind)
    net = replayed.transformer
    net.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
    first = build(configs.load(str(tmp_path / "recorded.yaml")).config, torch.device("cpu")).net.state_dict()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.requires_grad:
                p.copy_(first[f"transformer.{name}"])
    lengths = [{len(text.split()) for text in batch.texts} for update in recorded.updates for batch in update]
    assert max(map(len, lengths)) > 1, "no batch had captions of several lengths"
    rates = {"transformer": LEARNING_RATE}
    theirs = plain_loop.train(
        recorded.updates, replayed.losses, replayed.conditioning, {"transformer": net}, rates, fused=True
    )
    found = plain_loop.differences(recorded, theirs, plain_loop.overall)
    assert found["loss"] < 3e-7
    assert found["weights"] < 1e-6
