"""A LoRA run of Krea 2, recorded and replayed by the parts of its stock pipeline, as diffusers'
train_dreambooth_lora_krea2.py calls them: prompts with their padding in the middle and a mask, a draw from the
autoencoder's posterior, packing, and the layers that the script extends.

Of the script's differences from the model none is here: noise levels have the model's law and shift, and alpha is the
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from data_sets import folder as images
from diffusers import Krea2Pipeline
from peft import LoraConfig
from recorded import LEARNING_RATE, Recorded, train
from tiny_families import krea2 as tiny
from torch import Tensor

from daguerre.assembly.parts import build
from daguerre.config import config as configs

RANK, PX, TOKENS = 4, 64, 64
TARGETS = [
    *("img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"),
    *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
    *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
]
"""The script's own choice: `ff.gate` is not among them."""
SHIFT = {"name": "linear_mu", "low_px": 256, "low_mu": 0.5, "high_px": 1280, "high_mu": 1.15}
CAPTIONS = ["a red circle", "a blue star", "", "a green square on a white table"]


class Replayed:
    """A pipeline's parts, as the script uses them."""

    def __init__(self, base: Path) -> None:
        self.pipe: Any = Krea2Pipeline.from_pretrained(base)
        self.transformer = self.pipe.transformer.requires_grad_(False).train()

    @torch.no_grad()
    def conditioning(self, batch: Any) -> Mapping[str, Any]:
        """Hidden states of the prompts, and which are no padding."""
        text, mask = self.pipe.encode_prompt(list(batch.texts), torch.device("cpu"), max_sequence_length=TOKENS)
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}

    @torch.no_grad()
    def latents(self, batch: Any) -> Tensor:
        vae = self.pipe.vae
        posterior = vae.encode((batch.pixels_BCHW.float() / 127.5 - 1)[:, :, None]).latent_dist
        z = posterior.mean + posterior.std * batch.draws["posterior"][:, :, None]
        mean, std = (torch.tensor(vae.config[f"latents_{each}"]).view(1, -1, 1, 1, 1) for each in ("mean", "std"))
        return ((z - mean) * (1.0 / std))[:, :, 0]

    def losses(self, batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        """Of x_s = (1 - s) x0 + s eps and the target eps - x0, their mean square."""
        x0, eps, s_B = self.latents(batch), batch.draws["noise"], batch.draws["c_noise"]
        (b, c, h, w), s = x0.shape, s_B.view(-1, 1, 1, 1)
        tokens = self.pipe._pack_latents((1 - s) * x0 + s * eps, b, c, h, w)
        n_text = conditioning["encoder_hidden_states"].shape[1]
        places = self.pipe.prepare_position_ids(n_text, h // 2, w // 2, "cpu")
        given = {"timestep": s_B, "position_ids": places, "return_dict": False, **conditioning}
        (y,) = self.transformer(hidden_states=tokens, **given)
        y = self.pipe._unpack_latents(y, h * 8, w * 8)[:, :, 0]
        return (y - (eps - x0)).square().mean(dim=(1, 2, 3))


def ours(base: Path, place: Path) -> Recorded:
    pictures = images(place / "pictures", 12)
    for number, path in enumerate(sorted(pictures.glob("*.txt"))):
        path.write_text(CAPTIONS[number % len(CAPTIONS)], encoding="utf-8")
    chosen = {"max_sequence_length": TOKENS, "text_encoder_select_layers": [*tiny.LAYERS]}
    data = {"source": "folder", "path": str(pictures), "resolution": PX, "crop": "random", "caption_dropout": 0.25}
    return train(
        place,
        {
            "model": {"family": "krea2", "pretrained_model_name_or_path": str(base), **chosen},
            "objective": {"name": "flow", "schedule": {"name": "linear_flow", "resolution_shift": SHIFT}},
            "adapters": {"lora": {"name": "lora", "rank": RANK, "init": "gaussian", "targets": TARGETS}},
            "data": {**data, "held_out_fraction": 0.0},
        },
    )


@pytest.mark.long  # of the quick tests, test_qwen_image_parity.py
def test_training_is_that_of_the_stock_parts(tmp_path):
    base = tiny.write(tmp_path / "base")
    recorded = ours(base, tmp_path)
    replayed = Replayed(base)
    net = replayed.transformer
    net.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
    first = build(configs.load(str(tmp_path / "recorded.yaml")).config, torch.device("cpu")).net.state_dict()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(first[f"transformer.{name}"])
    assert trained.keys() == {name.removeprefix("transformer.") for name in recorded.weights}
    rates = {"transformer": LEARNING_RATE}
    theirs = plain_loop.train(
        recorded.updates, replayed.losses, replayed.conditioning, {"transformer": net}, rates, fused=True
    )
    found = plain_loop.differences(recorded, theirs, plain_loop.overall)
    assert found["loss"] < 3e-7
    assert found["weights"] < 1e-6
