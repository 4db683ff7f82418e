"""Preferences learnt by a tiny LoRA of Stable Diffusion as diffusers' train_diffusion_dpo.py does it: our side of it.

`tools/record_dpo_script.py` runs the script itself on the batches of such a run, and writes RECORDED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from adapter_scripts import DECAY, PX, RANK, squares
from PIL import Image
from recorded import LEARNING_RATE, PLAIN, Recorded, train
from tiny_models import write_sd

RECORDED = Path(__file__).parent / "dpo_script.json"
SCRIPT = "train_diffusion_dpo.py"
BATCH, BETA = 4, 5.0
"""The script subtracts means of about 1, whose roundings of 1e-7 count beta times: its 5000 would hide all else."""
NUMBERS = 4 * (PX // 2) ** 2
"""Of a latent: the tiny autoencoder halves each side once."""


def ours(place: Path) -> Recorded:
    """The run whose batches the script is given. Its beta multiplies means, and stands without the half of the paper's
    loss."""
    pictures = Path(squares(place / "pairs", 12, captions=True))
    noise = np.random.default_rng(7)
    for path in sorted(pictures.glob("???.png")):
        pixels = noise.integers(0, 256, (PX, PX, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.with_suffix(".rejected.png"))
    data = {"source": "folder", "resolution": PX, "path": str(pictures)}
    optimizer = PLAIN["optimizer"] | {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "weight_decay_exclude": []}
    training = {"duration": "6 steps", "global_batch_size": BATCH, "device": "cpu", "mixed_precision": "no"}
    recipe: dict[str, Any] = {
        "model": {"family": "sd", "pretrained_model_name_or_path": str(write_sd(place / "model"))},
        "objective": {"name": "dpo", "beta": 2 * BETA / NUMBERS},
        "adapters": {"own": {"name": "lora", "rank": RANK, "init": "gaussian"}},
        "data": data | {"held_out_fraction": 0.0, "caption_dropout": 0.0},
        "optimizer": optimizer,
        "training": training | {"max_grad_norm": 1.0} | PLAIN["training"],
    }
    return train(place, recipe)
