"""The quality of a frozen autoencoder on images of the data, measured before the first update.

What an autoencoder loses can neither be learnt nor drawn behind it: one that was made for other images, such as the
quickstart's for eight flat colours, would spoil hours of training with a loss that looks like any other.
"""

from collections.abc import Iterator
from itertools import islice

import torch

from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.cached.source import CachedSource
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.evaluation.formulas import pairs
from daguerre.models import encoders
from daguerre.models.family import Family
from daguerre.models.settings import BASE
from daguerre.training import device
from daguerre.types import Latents, Prompt

POOR_DB = 20.0
"""PSNR below which a message says so. Stable Diffusion's autoencoder has 23 to 27 dB on photos of 256 px and more (its
model card; ours on the quickstart's images 37); photos behind the quickstart's have 12 to 16."""
_SMALL = "autoencoder"
"""The one that ships for any pictures (recipes/autoencoder.yaml)."""
_IMAGES, _PIXELS = 8, 1 << 21
"""Images that are looked at, and their pixels in all: some seconds on a CPU."""


def notices(config: Config, parts: Components, dataset: Dataset, encoded: int = 0) -> list[str]:
    """A line where the frozen autoencoder makes images of the data again poorly, or is not the base's own; [] for
    families without one, for a cache alone, which has no images, and where the autoencoder was left out of memory and
    has `encoded` nothing."""
    name = _autoencoder(parts.family, dataset)
    if name is None or (name in encoders.absent(parts.family) and not encoded):
        return []
    # The autoencoder alone: text encoders that a cache has left out would have no room beside it.
    with encoders.present(parts.family, parts.device, [name]):
        psnrs_db = list(_psnr_db(parts, dataset))
    mean_db = sum(psnrs_db) / len(psnrs_db) if psnrs_db else POOR_DB
    place = config.model.places.get(name)
    shown = getattr(config.model, "pretrained_model_name_or_path", place) if place == BASE else place
    found = f"the autoencoder ({shown}) makes images of this data set again with a PSNR of {mean_db:.1f} dB"
    if mean_db >= POOR_DB:
        # A base's own was made with it; one that was chosen is worth its number.
        return [f"{found} ({len(psnrs_db)} looked at)"] if psnrs_db and place != BASE else []
    if config.model.denoises_anew and any(adapter.name == "full" for adapter in config.adapters.values()):
        small = "" if shown == _SMALL else f"model.{name}={_SMALL}, a small one for any pictures that ships; "
        way_out = (
            f"Take one that knows such images: {small}that of another model; or one that was trained on these "
            "(`daguerre train quickstart_vae run_name=my_vae` with the same data.*, or longer, then "
            f"model.{name}=runs/my_vae/pipeline)"
        )
    else:  # another one would have latents that these weights do not know
        way_out = "The base model was trained on the latents of this autoencoder: take a base that knows such images"
    return [f"{found} only ({len(psnrs_db)} looked at; 25 is usual): what it loses cannot be learnt. {way_out}"]


def foreseen(family: Family, dataset: Dataset) -> list[str]:
    """A line that says what a run will measure, for a look at it without weights."""
    if _autoencoder(family, dataset) is None:
        return []
    return [
        "before its first update `train` measures how well the frozen autoencoder makes some of these images again, "
        f"and warns below {POOR_DB:g} dB; that needs weights, so it is not known here"
    ]


def _autoencoder(family: Family, dataset: Dataset) -> str | None:
    """The frozen network that encodes and decodes images of one size; None where the model has none, where diffusion
    decodes, where it is itself trained, or where a source has features and no images."""
    if any(isinstance(member.source, CachedSource) for member in dataset.members):
        return None
    if family.output is not None or not family.encodes or not family.generates:
        return None
    networks = family.networks.items()
    found = [name for name, network in networks if network.role == "autoencoder" and name not in family.trained]
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def _psnr_db(parts: Components, dataset: Dataset) -> Iterator[float]:
    """PSNR of each of the first images, as training crops them."""
    # The largest bucket bounds the memory and the time of this look.
    height, width = max((bucket.height_px, bucket.width_px) for bucket in dataset.buckets)
    count = max(1, min(_IMAGES, _PIXELS // (height * width)))
    for batch in islice(loader.fixed_batches(dataset, count, lambda _: 1), count):
        if not batch.valid_B.all():
            continue
        pixels_BCHW = device.on(parts.device, batch).pixels_BCHW
        height, width = pixels_BCHW.shape[2:]
        x0_BCHW = parts.family.encode_images(pixels_BCHW, [0])
        (again,) = parts.family.decode(Latents(x0_BCHW, [Prompt("")], [0], (height, width)))
        yield pairs.psnr(batch.pixels_BCHW[0].permute(1, 2, 0).numpy(), again)
