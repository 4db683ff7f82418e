"""Training of a tiny LoRA of Krea 2 as diffusers' train_dreambooth_lora_krea2.py does it: our side.

`tools/record_krea2_script.py` runs the script itself on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flux2_scripts
import pytest
from flux2_scripts import DECAY, PROMPT, RANK, pictures, thousandths
from recorded import LEARNING_RATE, PLAIN, Recorded, train
from tiny_families import krea2 as tiny

from daguerre.objectives.algebra import Diffusion

RECORDED = Path(__file__).parent / "krea2_script.json"
SCRIPT = "train_dreambooth_lora_krea2.py"
PX, TOKENS = flux2_scripts.PX, 64
TARGETS = [
    *("img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"),
    *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
    *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
]
"""The layers that the script extends: it leaves out `ff.gate`."""


def ours(place: Path) -> Recorded:
    """The run whose batches the script is given. Noise levels are a thousand and have no shift, as the script's."""
    data = {"source": "folder", "held_out_fraction": 0.0, "caption_dropout": 0.0, "resolution": PX}
    data |= {"path": pictures(place / "pictures", 0), "captions": {"text": PROMPT}}
    chosen = {"max_sequence_length": TOKENS, "text_encoder_select_layers": [*tiny.LAYERS]}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"}
    recipe: dict[str, Any] = {
        "model": {"family": "krea2", "pretrained_model_name_or_path": str(tiny.write(place / "model")), **chosen},
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
