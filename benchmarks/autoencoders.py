#!/usr/bin/env python3
"""How well an autoencoder makes pictures again: PSNR of the mean latents, of the middle squares at 64 px, by picture.

python benchmarks/autoencoders.py VAE FOLDER          # any images; the ten photographs are scikit-image's
python benchmarks/autoencoders.py VAE emoji 'subgroup in ["sport", "food-sweet", "animal-bug", "musical-instrument"]'
"""

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from daguerre import plugins
from daguerre.data.dataset import open_datasets
from daguerre.evaluation.formulas import pairs

SIDE_PX = 64


def pictures(place: str, filters: str) -> dict[str, np.ndarray]:
    """Middle squares [64, 64, 3] by name; of emoji those that the filter names."""
    if place == "emoji":
        source = plugins.find("sources", "emoji")
        (dataset,) = open_datasets(source.Settings(filters=filters), ["train"])
        own = dataset.members[0].source
        found = {own.name(n): Image.fromarray(own.record(n).image) for n in dataset.selections[0].numbers.tolist()}
    else:
        found = {
            path.name: Image.open(path) for path in sorted(Path(place).iterdir()) if path.suffix in (".png", ".jpg")
        }
    return {name: _middle(image) for name, image in found.items()}


def _middle(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC))


@torch.no_grad()
def psnr_db(vae: AutoencoderKL, image: np.ndarray) -> float:
    x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    again = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
    return pairs.psnr(((again[0].permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8).numpy(), image)


def main(arguments: list[str]) -> None:
    place, of, *filters = arguments
    vae = AutoencoderKL.from_pretrained(place).float().eval()
    found = {name: psnr_db(vae, image) for name, image in pictures(of, *(filters or ["name != ''"])).items()}
    if len(found) <= 40:
        for name, value in found.items():
            print(f"{value:6.2f} dB  {name}")
    print(f"{np.mean([*found.values()]):6.2f} dB  mean of {len(found)}; the worst {min(found.values()):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
