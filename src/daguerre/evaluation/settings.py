"""Settings of an evaluation: what is measured, with which networks, on how many images, compared with what.

A protocol is a YAML file of these settings and of `sampling` settings; `daguerre evaluate` lays the command line over
it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from daguerre.evaluation.metric import MetricSettings
from daguerre.evaluation.networks.place import NetworkName, NetworkPlace
from daguerre.settings import ADDRESS, Plugin, Settings

PROTOCOLS = Path(__file__).parents[1] / "protocols"


class EvaluationSettings(Settings):
    """An evaluation."""

    metrics: dict[str, Annotated[SerializeAsAny[MetricSettings], Plugin("metrics", "name", MetricSettings)]] = Field(
        {}, validate_default=False
    )
    """What is measured: metrics by name, each with its settings; `[fid, kid]` takes their defaults. Without any, the
    metric that the source of a run names."""
    networks: dict[NetworkName, NetworkPlace] = Field({})
    """Feature networks, each with the place of its weights."""
    reference: Annotated[str | None, ADDRESS] = None
    """File of statistics that `daguerre reference` wrote, to compare with."""
    against: Annotated[str | None, ADDRESS] = None
    """Images that those of a folder are compared with one by one, matched by name: for psnr, ssim and lpips."""
    num_images: int = Field(1000, ge=2)
    """Images that are generated, or read of a folder; fewer if there are fewer prompts or images."""
    prompts_file: Annotated[str | None, ADDRESS] = None
    """Prompts, one image each: text with one a line, or CSV, TSV or JSONL as for `generate`. null: captions of
    the first held-out samples of a run."""
    crop_px: int | None = Field(None, ge=8)
    """Of a folder: side of the middle square that each image is cut and resized to, before the networks' own resize.
    null: images as they are."""
    sample_seed: int | None = Field(None, ge=0)
    """Of a folder: draws num_images of all by this seed; null takes the first."""
    guidance_scales: list[Annotated[float, Field(ge=0)]] | None = Field(None, min_length=1)
    """Guidance scales to evaluate one after the other; the report draws their curve. null: sampling.guidance_scale."""
    weights: Literal["ema", "raw"] | None = None
    """Weights of a checkpoint; null: the averaged ones, if it has them."""
    keep_images: bool = True
    """Keeps the generated images, for metrics that are asked for later. Their features are kept in any case."""

    @field_validator("metrics", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            value = {str(name): {} for name in value}
        if isinstance(value, dict):
            return {name: {"name": name, **(own or {})} if isinstance(own, dict | None) else own
                    for name, own in value.items()}  # fmt: skip
        return value

    @field_validator("networks", mode="before")
    @classmethod
    def _by_place(cls, value: Any) -> Any:
        return _places(value)


def _places(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: {"path": own} if isinstance(own, str) else own for name, own in value.items()}
    return value


class CompareSettings(Settings):
    """A comparison of an adapter with its base."""

    strengths: list[Annotated[float, Field(gt=0)]] = Field([1.0], min_length=1)
    """Strengths of the adapter; `0.5,1` is two, `0.4..1.2` five at equal steps, `0.4..1.2/3` three."""
    updates: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Saved updates. null: all that are there."""
    num_images: int = Field(20, ge=2)
    """Images of each of three lists of prompts by each set of weights; below 20 there are no intervals."""
    source: str | None = None
    """Source whose pictures are learnt. null: the one with the fewest."""
    prompts_file: Annotated[str | None, ADDRESS] = None
    """Prompts that no training picture has, as for `generate`. null: held-out captions, then sampling.prompts."""
    base_prompts_file: Annotated[str | None, ADDRESS] = None
    """Prompts that the base was made for. null: held-out captions of the run whose model the base is, or general
    ones."""
    networks: dict[Literal["dinov2", "clip"], NetworkPlace] = Field({})
    """dinov2 or clip, with the place of its weights, to compare images by. Without any, the base's own features."""
    weights: Literal["ema", "raw"] | None = None
    """Weights of a checkpoint; null: the averaged ones, if it has them."""

    @field_validator("strengths", mode="before")
    @classmethod
    def _of_range(cls, value: Any) -> Any:
        if isinstance(value, str) and (found := re.fullmatch(r"([\d.]+?)\.\.([\d.]+?)(?:/(\d{1,2}))?", value)):
            low, high, count = float(found[1]), float(found[2]), int(found[3] or 5)
            return [round(low + (high - low) * i / max(count - 1, 1), 6) for i in range(count)]
        if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)+", value):
            return [float(each) for each in value.split(",")]
        return value if isinstance(value, list | str) else [value]

    @field_validator("strengths", "updates")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        return None if value is None else sorted({*value})

    @field_validator("networks", mode="before")
    @classmethod
    def _by_place(cls, value: Any) -> Any:
        return _places(value)
