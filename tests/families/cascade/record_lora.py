"""Writes lora_*.safetensors and lora.npz: LoRAs of Stability's own code on the recorded Stage C, and what it predicts
with them. Run once, outside of the tests, in a clone of Stability-AI/StableCascade (7a7d341):

    python .../tests/families/cascade/record_lora.py CLONE

The numbers of the layers are those of `module_filters` in FILTERS; `DIGESTS` in test_cascade_loras.py are the files'.
"""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

HERE = Path(__file__).parent
FILTERS = {"attn": [".attn"], "more": [".attn", ".kv_mapper", ".channelwise"]}


def code(clone):
    """Stability's Stage C and LoRA; what they import and do not need is stood in for."""
    package = ModuleType("modules")
    package.__path__ = [str(Path(clone) / "modules")]
    sys.modules["modules"] = package
    sys.modules["modules.controlnet"] = ModuleType("modules.controlnet")
    sys.modules["modules.controlnet"].ControlNetDeliverer = object
    return importlib.import_module("modules.stage_c"), importlib.import_module("modules.lora")


def main(clone):
    stage_c, lora = code(clone)
    given = {
        name: torch.from_numpy(value) for name, value in np.load(HERE / "stability.npz").items() if "given/" in name
    }
    x, text, pooled, image = (given[f"given/{name}"] for name in ("x_c", "text", "pooled", "image"))
    made = {}
    for name, filters in FILTERS.items():
        widths = {"c_hidden": [16, 16], "nhead": [1, 1], "blocks": [[1, 2], [2, 1]], "c_cond": 16}
        network = stage_c.StageC(**widths, c_clip_text=24, c_clip_text_pooled=20, c_clip_img=12)
        network.load_state_dict(load_file(HERE / "prior.safetensors"))
        lora.apply_lora(network.eval(), filters=filters, rank=3)
        own = nn.ModuleDict({"embeddings": lora.ReToken([]), "weights": nn.ModuleList()})
        own["weights"].extend(module for module in network.modules() if isinstance(module, lora.LoRA))
        torch.manual_seed(len(filters))
        for layer in own["weights"]:
            layer.lora_down.data.normal_(std=0.2)
        with torch.no_grad():
            made[name] = network(x, torch.tensor([0.2, 0.9]), text, pooled, image).numpy()
        save_file(own.state_dict(), HERE / f"lora_{name}.safetensors")
    np.savez_compressed(HERE / "lora.npz", **made)
    for path in sorted([*HERE.glob("lora_*.safetensors"), HERE / "lora.npz"]):
        print(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:16], path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1])
