#!/usr/bin/env python3
"""Records files that LyCORIS writes, and what it makes of them, for tests/models/test_lora_files.py. Run once.

    python3 -m venv /tmp/lycoris && /tmp/lycoris/bin/pip install -e '.[dev]' lycoris-lora==4.1.3
    /tmp/lycoris/bin/python tools/record_lycoris.py

A tiny Stable Diffusion of a fixed seed gets a LoCon, a LoHa and a LoKr with random numbers, each with an alpha unlike
its dim; and three with Tucker decompositions and DoRA over the outputs (`_out`) or inputs (`_in`) of a weight. Kept are
some modules of the middle block and of the text encoder, and for each what it adds to the output of its layer for the
input sin(0), sin(1), ... of the weight's shape. SHA-256 of what was recorded with torch 2.13.0:

    lycoris_locon.safetensors  00ca95d78cf0be581b36df9e7da5f4331529447567b8c740e89bc363bf2d26c5
    lycoris_loha.safetensors   ffa614a684e644afd2ce25ee8431dd3205def76e84249097fcc3fdc163cdc487
    lycoris_lokr.safetensors   5b999448081c93df968de8fcc3fb4b53f36a20c6a7120663f8e6c720cbd61332
    lycoris_locon_tucker_dora_in.safetensors
        2bd06a986784df6d97887d1c871ab4087b5d7ef63c75f87bebbe2ee5e13b23fc
    lycoris_loha_tucker_dora_out.safetensors
        25cbd8a31afaf0274f514b4ce09863a4c8ba0725aa8931e21e4d3a07452085c6
    lycoris_lokr_tucker_dora_out.safetensors
        1a471e73fc9bb78ff25483426863201765f04dc04a818d2942d156632b45f860
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]

import torch  # noqa: E402
from diffusers import StableDiffusionPipeline  # noqa: E402
from lycoris.config import PRESET  # noqa: E402
from lycoris.kohya import create_network  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_models import tiny_sd_folder  # noqa: E402

FOLDER = ROOT / "tests" / "models" / "recorded"
FILES: dict[str, dict[str, object]] = {
    "locon": {},
    "loha": {},
    "lokr": {},
    "locon_tucker_dora_in": {"use_tucker": True, "dora_wd": True, "wd_on_output": False},
    "loha_tucker_dora_out": {"use_tucker": True, "dora_wd": True, "wd_on_output": True},
    "lokr_tucker_dora_out": {"use_tucker": True, "dora_wd": True, "wd_on_output": True},
}
"""Arguments of the network by file; the algorithm is the first word."""


def record(name: str, base: Path) -> None:
    """Writes lycoris_NAME.safetensors: LyCORIS' tensors, and `seen.MODULE` beside them."""
    algorithm = name.partition("_")[0]
    pipe = StableDiffusionPipeline.from_pretrained(base)
    blocks = {"unet_target_module": ["Transformer2DModel", "ResnetBlock2D"], "unet_target_name": []}
    PRESET["full"] |= blocks  # its own finds a layer of the time embedding twice in diffusers 0.42
    options = {"algo": algorithm, "conv_dim": 2, "conv_alpha": 3, "preset": "full", "factor": 4}
    options |= FILES[name]
    network = create_network(1.0, 3, 2, pipe.vae, pipe.text_encoder, pipe.unet, **options)
    network.apply_to(pipe.text_encoder, pipe.unet, True, True)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, torch.Tensor] = {}
    kept = ("_mid_block_", "_te_") if not FILES[name] else ("_mid_block_resnets_0", "_0_attn2", "layers_0_mlp")
    for module in network.loras:
        if (
            not any(part in module.lora_name for part in kept)
            or "_up_" in module.lora_name
            or "_down_" in module.lora_name
        ):
            continue
        with torch.no_grad():
            for part, p in module.named_parameters():
                noise = torch.randn(p.shape, generator=generator) * 0.3
                p.copy_(p * (1 + noise) if part == "dora_scale" else noise)
        layer = module.org_module[0]
        vector = torch.arange(layer.weight[0].numel(), dtype=torch.float32).sin().reshape(1, *layer.weight.shape[1:])
        with torch.no_grad():  # the trained layer itself: get_diff_weight of LoHa and LoKr counts alpha / dim twice
            change = module.eval()(vector) - module.org_forward(vector)
        if change.dim() == 4:  # around the middle of the image is no border
            change = change[:, :, change.shape[2] // 2, change.shape[3] // 2]
        own = module.custom_state_dict() if hasattr(module, "custom_state_dict") else module.state_dict()
        found |= {f"{module.lora_name}.{part}": value for part, value in own.items()}
        found[f"seen.{module.lora_name}"] = change.flatten()
    path = FOLDER / f"lycoris_{name}.safetensors"
    save_file({name: value.detach().contiguous().clone() for name, value in found.items()}, path)
    print(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def main() -> None:
    """Records all."""
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as temporary:
        base = tiny_sd_folder(Path(temporary))
        for name in FILES:
            record(name, base)


if __name__ == "__main__":
    main()
