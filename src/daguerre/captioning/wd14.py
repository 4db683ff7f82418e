"""The captioner `wd14`: tags of anime pictures, by SmilingWolf's taggers (ONNX).

The formula is that of sd-scripts' tag_images_by_wd14_tagger.py: the picture is put into the middle of a white square,
resized to the network's size, with its channels as blue, green, red in 0 to 255, without further normalisation; the
network gives a probability for each line of selected_tags.csv, and tags at or above the threshold of their category are
taken in the order of that file.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from daguerre.captioning.captioner import NetworkSettings, folder_of
from daguerre.data.images.transparency import on_white
from daguerre.errors import UserError, install

GENERAL, CHARACTER, RATING = "0", "4", "9"
"""Categories of selected_tags.csv."""


class Settings(NetworkSettings):
    """Tags, by a tagger in ONNX with its selected_tags.csv."""

    published: ClassVar[str] = "SmilingWolf/wd-swinv2-tagger-v3"
    files: ClassVar[tuple[str, ...]] = ("model.onnx", "selected_tags.csv")
    weights: ClassVar[str] = "model.onnx"

    name: Literal["wd14"] = "wd14"
    """Tags of anime pictures."""
    general_threshold: float = Field(0.35, ge=0, le=1)
    """Least probability of a general tag."""
    character_threshold: float = Field(0.35, ge=0, le=1)
    """Least probability of the name of a character."""
    rating: bool = False
    """Whether the likeliest rating (general, sensitive ...) is the last tag."""
    characters_first: bool = False
    """Whether names of characters stand before general tags."""
    remove_underscore: bool = False
    """Whether tags of more than three letters have spaces in place of underscores."""
    separator: str = ", "
    """What stands between tags."""
    undesired: list[str] = Field([])
    """Tags that are left out."""


@dataclass(frozen=True)
class Tag:
    """A line of selected_tags.csv."""

    name: str
    category: str


@dataclass(frozen=True, eq=False)
class Tagger:
    """A network and its tags."""

    settings: Settings
    session: Any
    tags: Sequence[Tag]
    side_px: int

    def captions(self, images: Sequence[Image.Image]) -> list[dict[str, str]]:
        pixels_BHWC = np.stack([prepared(image, self.side_px) for image in images])
        name = self.session.get_inputs()[0].name
        (found_BT,) = self.session.run(None, {name: pixels_BHWC})
        return [{self.settings.name: chosen(self.settings, self.tags, found_T)} for found_T in found_BT]


def prepared(image: Image.Image, side_px: int) -> np.ndarray:
    """[side, side, 3] float32 in 0 to 255: blue, green, red of the image in the middle of a white square. Smaller by
    the mean over areas, larger by Lanczos' filter, as sd-scripts does by OpenCV."""
    plain = on_white(image)
    size = max(plain.size)
    square = Image.new("RGB", (size, size), (255, 255, 255))
    square.paste(plain, ((size - plain.width) // 2, (size - plain.height) // 2))
    values_HWC = np.asarray(square)[:, :, ::-1].astype(np.float32)
    if size == side_px:
        return np.ascontiguousarray(values_HWC)
    kernel = Image.Resampling.BOX if size > side_px else Image.Resampling.LANCZOS
    # In float32, channel by channel: of 8 bits Pillow rounds after each direction, OpenCV once.
    channels = [Image.fromarray(values_HWC[:, :, i]).resize((side_px, side_px), kernel) for i in range(3)]
    return np.clip(np.rint(np.stack([np.asarray(channel) for channel in channels], axis=2)), 0, 255)


def chosen(settings: Settings, tags: Sequence[Tag], probabilities_T: np.ndarray) -> str:
    """The tags that are likely enough, in the order of their file."""
    least = {GENERAL: settings.general_threshold, CHARACTER: settings.character_threshold}
    found: dict[str, list[str]] = {GENERAL: [], CHARACTER: []}
    rating: tuple[float, str] | None = None
    for tag, probability in zip(tags, probabilities_T.tolist(), strict=True):
        name = tag.name
        if settings.remove_underscore and len(name) > 3:  # shorter ones are faces, such as o_o
            name = name.replace("_", " ")
        if tag.category == RATING and (rating is None or probability > rating[0]):
            rating = probability, name
        elif tag.category in least and probability >= least[tag.category] and name not in settings.undesired:
            found[tag.category].append(name)
    order = (CHARACTER, GENERAL) if settings.characters_first else (GENERAL, CHARACTER)
    last = [rating[1]] if settings.rating and rating is not None and rating[1] not in settings.undesired else []
    return settings.separator.join([*(name for category in order for name in found[category]), *last])


def load(settings: Settings, device: str) -> Tagger:
    """The tagger on the CPU, or on a GPU where onnxruntime has one. UserError where it cannot be used."""
    folder = folder_of(settings)
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"onnxruntime is not installed: {install('onnxruntime')}", code="not_installed") from error
    wanted = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()] + ["CPUExecutionProvider"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    broken = onnxruntime.capi.onnxruntime_pybind11_state
    try:
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=providers)
    except (RuntimeError, broken.InvalidProtobuf, broken.Fail, broken.InvalidGraph) as error:
        raise UserError(f"{folder}/model.onnx cannot be read as ONNX: {str(error)[:300]}", code="damaged") from error
    shape, tags = session.get_inputs()[0].shape, _tags(folder / "selected_tags.csv")
    if len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3 or not isinstance(shape[1], int):
        raise UserError(
            f"{folder}/model.onnx reads {shape}, and a tagger reads [images, side, side, 3]", code="unsupported"
        )
    (count,) = {each.shape[-1] for each in session.get_outputs()[:1]}
    if len(session.get_outputs()) != 1 or count != len(tags):
        raise UserError(f"{folder}: the network knows {count} tags, and selected_tags.csv {len(tags)}", code="conflict")
    return Tagger(settings, session, tags, shape[1])


def _tags(path: Path) -> list[Tag]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [Tag(row["name"], row["category"]) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError, csv.Error) as error:
        raise UserError(
            f"{path} is no list of tags (tag_id, name, category, count): {error}", code="damaged"
        ) from error
