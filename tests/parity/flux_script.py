"""Training of a tiny LoRA of FLUX.1 dev as diffusers' train_dreambooth_lora_flux.py does it: our side.

`tools/record_flux_script.py` runs the script itself on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flux2_scripts
import pytest
import tiny_texts
from flux2_scripts import DECAY, PROMPT, RANK, pictures, thousandths
from recorded import LEARNING_RATE, PLAIN, Recorded, train
from tiny_families import flux as tiny
from tiny_models import text_encoder, tiny_tokenizer
from transformers import CLIPTextModel

from daguerre.objectives.algebra import Diffusion

RECORDED = Path(__file__).parent / "flux_script.json"
SCRIPT = "train_dreambooth_lora_flux.py"
PX, TOKENS, GUIDANCE = flux2_scripts.PX, 16, 3.5
TARGETS = [
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_?_proj", "attn.to_add_out"),
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]
"""The layers that the script extends."""


def written(place: Path) -> Path:
    """The model, whose CLIP reads as many tokens as the script says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_texts, "clip", lambda: text_encoder(CLIPTextModel, tiny_texts.WIDTH, 3, 77, "quick_gelu"))
        patch.setattr(tiny_texts, "clip_tokenizer", lambda: tiny_tokenizer(77))
        return tiny.write(place)


def ours(place: Path) -> Recorded:
    """The run whose batches the script is given. Noise levels are a thousand and have no shift, as the script's."""
    data = {"source": "folder", "held_out_fraction": 0.0, "caption_dropout": 0.0, "resolution": PX}
    data |= {"path": pictures(place / "pictures", 0), "captions": {"text": PROMPT}}
    chosen = {"max_sequence_length": TOKENS, "training_guidance": GUIDANCE}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"}
    recipe: dict[str, Any] = {
        "model": {"family": "flux", "pretrained_model_name_or_path": str(written(place / "model")), **chosen},
        "objective": {"name": "flow", "schedule": {"name": "linear_flow"}},
        "adapters": {"own": {"name": "lora", "rank": RANK, "alpha": RANK, "init": "gaussian", "targets": TARGETS}},
        "data": data,
        "optimizer": optimizer,
        "lr_scheduler": {"name": "cosine", "warmup": "2 steps"},
        "training": training | {"max_grad_norm": 1.0} | PLAIN["training"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diffusion, "times", thousandths)
        return train(place, recipe)
