"""Distillation of SDXL into a tiny LoRA as diffusers' train_lcm_distill_lora_sdxl.py does it: our side of it.

`tools/record_lcm_script.py` runs the script itself on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter_scripts import DECAY, PX, RANK, squares
from recorded import LEARNING_RATE, PLAIN, Recorded, train
from tiny_models import write_sdxl

RECORDED = Path(__file__).parent / "lcm_script.json"
SCRIPT = "train_lcm_distill_lora_sdxl.py"
BATCH, ALPHA = 4, 2.0
SCALES = (6.0, 16.0)
"""The script's w, from 5 to 15, and 1."""


def ours(place: Path) -> Recorded:
    """The run whose batches the script is given. It clips no gradients: the parameters that it names for that are an
    iterator that its optimizer has used up."""
    pictures = squares(place / "pictures", 12, captions=True)
    data = {"source": "folder", "path": pictures, "resolution": PX, "held_out_fraction": 0.0, "caption_dropout": 0.0}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": BATCH, "device": "cpu", "mixed_precision": "no"}
    lora = {"name": "lora", "rank": RANK, "alpha": ALPHA, "targets": "attention+ff+conv"}
    recipe: dict[str, Any] = {
        "model": {"family": "sdxl", "pretrained_model_name_or_path": str(write_sdxl(place / "model"))},
        "objective": {"name": "lcm", "guidance_min": SCALES[0], "guidance_max": SCALES[1], "distance_c": 0.001},
        "adapters": {"own": lora},
        "data": data,
        "optimizer": optimizer,
        "training": training | {"max_grad_norm": None} | PLAIN["training"],
    }
    return train(place, recipe)
