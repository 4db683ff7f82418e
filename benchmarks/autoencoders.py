#!/usr/bin/env python3
"""How well an autoencoder makes pictures again: PSNR of the mean latents, of the middle squares at 64 px, by picture.

python benchmarks/autoencoders.py VAE FOLDER          # any images
python benchmarks/autoencoders.py VAE FOLDER astronaut,camera,chelsea,coffee,hubble_deep_field,ihc,motorcycle_left,\
motorcycle_right,retina,rocket                        # of scikit-image's data: the ten photographs
python benchmarks/autoencoders.py VAE emoji 'subgroup in ["sport", "food-sweet", "animal-bug", "musical-instrument"]'

Of emoji also: how many are nearest to their own of all these, which is the most that pictures drawn behind it can reach
in the metric `emoji`; by the features of DINOv2, too, where the place of its weights follows the filter.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from daguerre.data.sources.emoji import Settings
from daguerre.evaluation.formulas import pairs
from daguerre.evaluation.metric import FeatureNetwork
from daguerre.evaluation.metrics import emoji
from daguerre.evaluation.networks import dinov2
from daguerre.evaluation.networks.place import NetworkPlace

SIDE_PX = 64


def pictures(place: str, chosen: str) -> dict[str, np.ndarray]:
    """Middle squares [64, 64, 3] by name; of emoji those that a filter chooses, else those of these names."""
    if place == "emoji":
        known = emoji.trained_on(Settings(resolution=SIDE_PX, filters=chosen or "name != ''"))
        return {one.name: picture for one, picture in known.items()}
    names = chosen.split(",") if chosen else None
    paths = [path for path in sorted(Path(place).iterdir()) if path.suffix in (".png", ".jpg")]
    return {path.name: _middle(Image.open(path)) for path in paths if names is None or path.stem in names}


def _middle(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC))


@torch.no_grad()
def made_again(vae: AutoencoderKL, image: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    again = vae.decode(vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
    found: np.ndarray = ((again[0].permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8).numpy()
    return found


def main(arguments: list[str]) -> None:
    place, of, *chosen = arguments[:3]
    vae = AutoencoderKL.from_pretrained(place).float().eval()
    real = pictures(of, *(chosen or [""]))
    again = {name: made_again(vae, image) for name, image in real.items()}
    psnrs_db = {name: pairs.psnr(again[name], image) for name, image in real.items()}
    if len(real) <= 40:
        for name, value in psnrs_db.items():
            print(f"{value:6.2f} dB  {name}")
    mean_db = np.mean([*psnrs_db.values()])
    print(f"{mean_db:6.2f} dB  mean of {len(real)}; the worst {min(psnrs_db.values()):.2f}")
    if of == "emoji":
        networks: dict[str, FeatureNetwork | None] = {"16 px RGB": None}
        for weights in arguments[3:]:
            networks["DINOv2"] = dinov2.load(NetworkPlace(path=weights), torch.device("cpu"), "pillow_bicubic")
        for name, network in networks.items():
            own, theirs = (emoji.features([*images.values()], network) for images in (again, real))
            share = emoji.among(emoji.distances(own, theirs), range(len(real)), 1)
            print(f"{100 * share:6.1f} %  nearest to their own, by {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
