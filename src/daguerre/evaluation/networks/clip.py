"""CLIP (Radford et al. 2021, arXiv 2103.00020): projected vectors of images and texts, by transformers' CLIPModel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import CLIPTokenizer

from daguerre import documents
from daguerre.errors import UserError
from daguerre.evaluation.networks import transformers
from daguerre.evaluation.networks.place import NetworkPlace, digest_of_files, folder_of, short
from daguerre.models.parts.text import tokenizers

PUBLISHED = "openai/clip-vit-large-patch14 (CLIP score) or openai/clip-vit-large-patch14-336 (CMMD)"
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

Crop = Literal["shorter_side", "square_first"]
"""`shorter_side`: the shorter side is resized, then the middle cropped, as CLIP's own processor does; `square_first`:
the middle square is cropped, then resized, as CMMD's code does. Both by Pillow's bicubic filter."""


@dataclass(frozen=True, eq=False)
class Network:
    """CLIP on a device."""

    model: Any
    text_tokens: CLIPTokenizer
    name: str
    digest: str
    crop: Crop
    mean: list[float]
    std: list[float]
    device: torch.device

    @property
    def label(self) -> str:
        return f"clip-{short(self.digest)}-{self.crop}"

    @property
    def about(self) -> dict[str, Any]:
        return {"network": self.name, "digest": self.digest, "resize": f"Pillow bicubic, {self.crop}"}

    @torch.inference_mode()
    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """[n, d] float32 of images [H, W, 3] uint8: projected, not normalised."""
        side = self.model.config.vision_config.image_size
        pixels = np.stack([cropped(image, side, self.crop) for image in images]).astype(np.float32) / 255
        mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
        x_BCHW = torch.from_numpy((pixels - mean) / std).permute(0, 3, 1, 2)
        return _vectors(self.model.get_image_features(pixel_values=x_BCHW.to(self.device)))

    @torch.inference_mode()
    def compute_texts(self, texts: Sequence[str]) -> np.ndarray:
        """[n, d] float32 of texts, cut at the length that the network reads."""
        longest = self.model.config.text_config.max_position_embeddings
        tokens = self.text_tokens(
            list(texts), padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
        ).to(self.device)
        return _vectors(self.model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask))


def load(place: NetworkPlace, device: torch.device, crop: Crop) -> Network:
    """CLIP of a folder, or of the hub's cache. UserError where it is missing."""
    folder = folder_of(place, "clip", PUBLISHED)
    digest = place.checked(digest_of_files(folder))
    model = transformers.load(folder, "CLIPModel", ("clip",))
    mean, std = transformers.processor(folder, _MEAN, _STD)
    text_tokens = _tokenizer(folder)
    return Network(model.to(device), text_tokens, Path(place.path).name, digest, crop, mean, std, device)


def _tokenizer(folder: Path) -> Any:
    own = folder / "tokenizer.json"
    try:
        made = tokenizers.opened(partial(CLIPTokenizer.from_pretrained, local_files_only=True), folder)
        problem = tokenizers.other_ids(made, own.read_bytes() if own.is_file() else None)
    except documents.MISREAD as error:
        problem = f"cannot be read: {str(error)[:300]}"
    if problem:
        raise UserError(f"the tokenizer of {folder} {problem}", code="damaged")
    return made


def cropped(pixels_HWC: np.ndarray, side: int, crop: Crop) -> np.ndarray:
    """[side, side, 3] uint8: the middle square of an image."""
    height, width = pixels_HWC.shape[:2]
    if crop == "square_first":
        least = min(height, width)
        pixels_HWC = _middle(pixels_HWC, least)
        height = width = least
    shape = (side, int(side * width / height)) if height <= width else (int(side * height / width), side)
    resized = Image.fromarray(pixels_HWC).resize(shape[::-1], Image.Resampling.BICUBIC)
    return _middle(np.asarray(resized), side)


def _middle(pixels_HWC: np.ndarray, side: int) -> np.ndarray:
    top, left = ((size - side) // 2 for size in pixels_HWC.shape[:2])
    return pixels_HWC[top : top + side, left : left + side]


def _vectors(found: Any) -> np.ndarray:
    """Newer versions of transformers give the vectors inside an object."""
    rows: np.ndarray = getattr(found, "pooler_output", found).float().cpu().numpy()
    return rows
