"""Training of a tiny LoRA of Qwen-Image as diffusers' train_dreambooth_lora_qwen_image.py does it: our side.

`tools/record_qwen_image_script.py` runs the script itself on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flux2_scripts
import pytest
from flux2_scripts import DECAY, PROMPT, RANK, pictures, thousandths
from recorded import LEARNING_RATE, PLAIN, Recorded, train
from tiny_families import qwen_image as tiny

from daguerre.objectives.algebra import Diffusion

RECORDED = Path(__file__).parent / "qwen_image_script.json"
SCRIPT = "train_dreambooth_lora_qwen_image.py"
PX, TOKENS = flux2_scripts.PX, 64


def ours(place: Path) -> Recorded:
    """The run whose batches the script is given. Noise levels are a thousand and have no shift, as the script's; the
    layers that are extended are the preset's."""
    own: dict[str, Any] = {
        "model": {"family": "qwen_image", "pretrained_model_name_or_path": str(tiny.write(place / "model"))},
        "data": {"source": "folder", "path": pictures(place / "pictures", 0), "resolution": PX},
        "adapters": {"own": {"name": "lora", "rank": RANK, "alpha": RANK, "init": "gaussian"}},
        "optimizer": {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []},
        "training": {"duration": "6 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"},
    }
    own["model"]["max_sequence_length"] = TOKENS
    own["data"] |= {"held_out_fraction": 0.0, "caption_dropout": 0.0, "captions": {"text": PROMPT}}
    own["training"] |= {"max_grad_norm": 1.0} | PLAIN["training"]
    own["optimizer"] |= PLAIN["optimizer"]
    schedules = {"objective": {"name": "flow", "schedule": {"name": "linear_flow"}}}
    schedules["lr_scheduler"] = {"name": "cosine", "warmup": "2 steps"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diffusion, "times", thousandths)
        return train(place, own | schedules)
