"""Settings of a data set, those that every source has, and those of the loader. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from daguerre import plugins
from daguerre.data.alternatives import Lines
from daguerre.data.caption_templates import TEMPLATES
from daguerre.data.filters.filter import Filters
from daguerre.data.images.words import words
from daguerre.data.plan.buckets import check_fractions
from daguerre.settings import ADDRESS, ELASTIC, FREE, Plugin, Settings, Unused

LARGEST_PX = 1 << 16
"""Longest side of an image that is trained on: file formats end there."""

ImageFormat = Literal["jpeg", "png", "webp", "gif", "bmp", "tiff"]
Colour = Annotated[str, Field(pattern=r"^#[0-9a-fA-F]{6}$")]


class CaptionSettings(Settings):
    """The caption that a sample is trained on, before `caption_dropout`."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("keep_tags",), lambda own: not own.reads_tags, "no effect without shuffle_tags=true or tag_dropout"),
        Unused(
            ("tag_separator",),
            lambda own: not own.reads_tags and own.tag_group is None,
            "no effect without shuffle_tags=true, tag_dropout or tag_group",
        ),
        Unused(("weights",), lambda own: own.join is not None, "weights draw one field, join takes all of them"),
        Unused(
            ("fields", "weights", "join", "lines"),
            lambda own: own.text is not None,
            "text is the caption of every image",
        ),
    )

    text: str | None = Field(None, pattern=r"\S", exclude_if=lambda text: text is None)
    """The caption of every image, whatever its source says of it; then images need no captions (those in tar shards
    still do: their indexes hold captioned ones only). Default: what the `fields` say."""

    fields: tuple[str, ...] = Field(("text",), min_length=1)
    """Caption fields of a record. Of several, one is drawn for each sample and epoch, or all are joined (`join`)."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """How often each of the fields is drawn, one number a field; fields that a sample lacks are not drawn. Default:
    alike."""
    join: str | None = None
    """Joins the fields in their order with this text between, instead of drawing one."""
    lines: Lines | None = Field(None, exclude_if=lambda lines: lines is None)
    """What a caption of several lines means: `first` (as kohya's scripts take it), `drawn` (one of them for each sample
    and epoch: OneTrainer) or `joined` with spaces. Default: joined, and a note says so."""
    prefix: str = ""
    """Stands before every caption that is not dropped."""
    templates: tuple[str, ...] = ()
    """Sentences with `{}` for the caption; one is drawn for each sample and epoch. For class names and new tokens.
    object and style: the lists of textual inversion, such as 'a photo of a {}' and 'a painting in the style of {}'."""
    shuffle_tags: bool = False
    """Puts the parts of the caption (between `tag_separator`) in another order each epoch."""
    tag_separator: str = Field(", ", min_length=1)
    """What stands between tags; white space around tags is taken off before they are shuffled."""
    keep_tags: int = Field(0, ge=0)
    """Tags at the start that keep their places, and are never left out."""
    tag_dropout: float = Field(0.0, ge=0, le=1, exclude_if=lambda share: share == 0)
    """Share of the tags that are left out, drawn for each tag, sample and epoch."""
    tag_group: str | None = Field(None, min_length=1, exclude_if=lambda text: text is None)
    """Stands between tags that move, and are left out, together (kohya's `secondary_separator`, `;;;`); `tag_separator`
    takes its place afterwards."""
    wildcards: bool = Field(False, exclude_if=lambda wildcards: not wildcards)
    """Draws one of the alternatives of each `{a|b}` in a caption, for each sample and epoch; `{{` and `}}` are
    braces."""

    @field_validator("templates", mode="before")
    @classmethod
    def _named(cls, templates: Any) -> Any:
        """The list of a name, which may also stand alone in a list."""
        name = templates[0] if isinstance(templates, list | tuple) and len(templates) == 1 else templates
        return TEMPLATES.get(name, templates) if isinstance(name, str) else templates

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.fields):
            raise ValueError(f"weights: {len(self.fields)} fields want {len(self.fields)} weights")
        if self.weights is not None and not any(self.weights):
            raise ValueError("weights: one at least must be above 0")
        if any(template.count("{}") != 1 for template in self.templates):
            raise ValueError(
                "templates: each must have {} once, where the caption goes, such as 'a photo of a {}'; "
                "or object, or style"
            )
        return self

    @property
    def reads_tags(self) -> bool:
        """True where captions are taken apart into tags."""
        return self.shuffle_tags or self.tag_dropout > 0

    @property
    def is_endless(self) -> bool:
        """True where a caption may be another one each time."""
        return self.reads_tags or self.wildcards

    @property
    def used(self) -> tuple[str, ...]:
        """The fields of which a sample needs one: all but those of weight 0; none where `text` is the caption."""
        if self.text is not None:
            return ()
        weights = self.weights or (1.0,) * len(self.fields)
        return tuple(name for name, weight in zip(self.fields, weights, strict=True) if weight > 0)

    def words(self) -> frozenset[str]:
        """The words that these settings themselves bring into captions."""
        return frozenset(words(self.text or "", self.prefix, *self.templates))


class GenerateSettings(Settings):
    """Images that the model generates into a source's folder before it is trained: the class images of DreamBooth. They
    are generated as `sampling` says, at `data.resolution`, and kept; none where there are enough, nor once training has
    begun."""

    prompt: str | list[str] | None = None
    """The prompt, or a list of prompts, from which images are generated in turn. Default: `captions.text`."""
    count: int = Field(100, ge=1)
    """How many images the folder is brought to; those that are there, whoever made them, count."""
    seed: int = Field(0, ge=0)
    """Image i of those that are generated starts from the noise of seed + i alone."""

    @field_validator("prompt")
    @classmethod
    def _says_something(cls, prompt: str | list[str] | None) -> str | list[str] | None:
        each = [prompt] if isinstance(prompt, str) else prompt
        if each is not None and not (each and all(text.strip() for text in each)):
            raise ValueError("a prompt is empty")
        return prompt


class BucketSettings(Settings):
    """Images of several shapes: each goes to the bucket whose aspect ratio is nearest, and a global batch is of one
    bucket. What is left over in a bucket at the end of an epoch leads that bucket's next epoch."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("step",), lambda own: own.aspects == "square", "no effect with aspects=square"),
        Unused(("max_aspect",), lambda own: own.aspects != "auto", "no effect without aspects=auto"),
        Unused(("random",), lambda own: own.aspects == "square", "no effect with aspects=square"),
    )

    aspects: Literal["square", "auto"] | Annotated[tuple[float | str, ...], AfterValidator(check_fractions)] = "square"
    """`square`: one bucket of resolution x resolution. A list of aspect ratios such as [1/1, 2/3, 9/16], each of which
    also stands for its mirror image. `auto`: every shape of `step` within `max_aspect`."""
    resolutions: tuple[Annotated[int, Field(ge=8, le=LARGEST_PX)], ...] | None = None
    """Several resolutions: each image goes to the largest that it fills without being enlarged,
    else to the smallest. Default: `data.resolution` alone."""
    step: int = Field(64, ge=1)
    """Widths and heights of buckets are multiples of this, in pixels."""
    max_aspect: float = Field(2.0, ge=1)
    """Longest side over shortest of the `auto` buckets."""
    upscale: bool = True
    """Whether an image smaller than its bucket is enlarged; if not, it is left out and counted."""
    random: float = Field(0.0, ge=0, le=1, exclude_if=lambda share: share == 0)
    """Share of the images that go to a bucket of any aspect instead of the nearest, by their ids, so that each shape
    also sees what is cropped otherwise. Stability's code for Stable Cascade has 0.05."""


class SharedSettings(Settings):
    """Settings shared by all sources of a data set: the shapes of batches and what images are made of."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("crops",), lambda own: own.crop != "random", "no effect without crop=random"),
        Unused(("saliency",), lambda own: own.crop != "smart", "no effect without crop=smart"),
    )

    resolution: int = Field(512, ge=8, le=LARGEST_PX)
    """Side of the square images that are trained on, in pixels; with buckets, the square root of their largest
    area."""
    buckets: BucketSettings = BucketSettings()
    """Shapes other than the square."""
    crop: Literal["center", "random", "smart"] = "center"
    """Which part of an image that was resized to cover its bucket is taken. smart: around what it shows, in three of
    ten cases moved by up to a fifth of its sides, as in Stability's training of Stable Cascade."""
    saliency: Annotated[str | None, ADDRESS] = Field(None, exclude_if=lambda place: place is None)
    """File with the weights of the network by which that code finds what an image shows (its saliency_model.pt).
    Default: what differs most in colour from the image's mean, which needs no weights."""
    crops: int | None = Field(None, ge=1, exclude_if=lambda crops: crops is None)
    """With crop=random: each image has so many crops, and an epoch takes one of them; so they can be cached. Default: a
    new one each time."""
    random_flip: bool = False
    """Mirror half of the images left to right."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "area", "lanczos"] = "bicubic"
    """Filter of the resize."""
    formats: tuple[ImageFormat, ...] = Field(("jpeg", "png", "webp"), min_length=1)
    """Kinds of image files that are decoded, known by their first bytes; all others are left out and counted."""
    alpha_colour: Colour = "#ffffff"
    """What lies under transparent pixels, as #rrggbb."""
    alpha_mask: bool = Field(False, exclude_if=lambda asked: not asked)
    """Whether the alpha channel of an image is its mask, where it has no mask of its own. For `objective.mask`."""
    max_skipped: float = Field(0.01, ge=0, le=1, json_schema_extra=FREE)
    """Share of samples that cannot be used above which a run is refused, or stops (once 10 were found): a sign that the
    data, not an image, is broken."""
    cache_dir: Annotated[str | None, ADDRESS] = Field(None, json_schema_extra=FREE)
    """Folder for indexes and for shards of object stores. Default: the user's cache folder."""
    cache_gb: float = Field(100.0, gt=0, json_schema_extra=FREE)
    """Most that shards of object stores take in `cache_dir`, in GB (1e9 bytes); those used longest ago go first."""

    def named(self) -> Mapping[str, SourceSettings]:
        """The sources by the names that messages give them; one alone has none."""
        raise NotImplementedError

    @property
    def kinds(self) -> str:
        """The kinds of the sources, for people."""
        return ", ".join(dict.fromkeys(own.source for own in self.named().values()))

    def shares(self) -> list[Fraction]:
        """The frequency with which each source is drawn, in any scale."""
        return [Fraction(1)]


class SourceSettings(SharedSettings):
    """Base of every source's `Settings`. A source's file adds its own fields and narrows `source`."""

    around: ClassVar[frozenset[str]] = frozenset(SharedSettings.model_fields)

    source: str
    """Name of the source: a file in data/sources."""
    captions: CaptionSettings = CaptionSettings()
    """Which words a sample is trained on."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Share of captions replaced by the family's null caption, so that guidance has something to guide from."""
    reference_dropout: float = Field(0.0, ge=0, le=1)
    """Share of samples that are trained without their reference images, from the caption alone."""
    filters: Filters = Filters()
    """Which samples are trained on, by their metadata: an expression (`original_width >= 512 and punsafe < 0.1`), a
    mapping (`{pwatermark: "<=0.5"}`), or a list of pairs (`[[aesthetic_score, "lambda s: s > 4.5"]]`). A sample that
    lacks a field is left out and counted."""
    held_out_fraction: float = Field(0.05, ge=0, le=0.5)
    """Share of samples kept out of training for the validation loss, chosen by id; at least one where there are two or
    more samples and this is above 0."""
    loss_weight: float = Field(1, gt=0, allow_inf_nan=False, exclude_if=lambda weight: weight == 1)
    """What the loss of this source's samples is multiplied by in a mix of sources. The sum over a batch is still
    divided by the count of its samples; the validation loss knows no weights."""
    repeats: int = Field(1, ge=1)
    """How often each sample is trained on in an epoch, each time with its own noise, crop and caption."""
    shuffle: bool = True
    """Draw a new order each epoch; off: the source's own order."""
    lanes: int = Field(16, ge=1)
    """Shards that are read at the same time when the order is drawn. Samples are shuffled over `lanes` x
    `lane_samples` places; more mix better, and need more room in the cache where shards are far away."""
    lane_samples: int = Field(4096, ge=1)
    """Samples of a lane that are shuffled together with those of the other lanes."""

    def named(self) -> Mapping[str, SourceSettings]:
        return {"": self}

    @property
    def endless(self) -> bool:
        """True where samples are made as they are needed: a source without an index."""
        return False

    @property
    def made(self) -> frozenset[str]:
        """Names of the further images (`types.py`) that are drawn with each sample: a recipe that reads none of them is
        refused."""
        return frozenset()

    def words(self) -> frozenset[str] | None:
        """Every word of the captions, where the settings alone say them; None where they are read."""
        return None if self.captions.text is None else self.captions.words()


NAMELESS = "images"
"""What the only source is called that has no name of its own."""
LEAST_SHARE = 1e-6
"""Least share of the samples that a source may have."""


class DataSettings(SharedSettings):
    """One source or a mix of several, each drawn in proportion to its weight and each with its own repeats,
    filters and captions."""

    sources: dict[str, Annotated[SerializeAsAny[SourceSettings], Plugin("sources", "source", SourceSettings)]] = Field(
        min_length=1
    )
    """What is trained on: sources by a name of your own, such as `{photos: {source: folder, path: DIR}, art: {...}}`,
    each with the settings of its kind; those of one alone may stand in `data` itself."""
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, exclude_if=lambda weights: not weights
    )
    """How often each source is drawn, in any scale, by its name; 1 for those that are not named. Within a source every
    sample comes equally often."""

    @model_validator(mode="before")
    @classmethod
    def _sources_take_the_resolution(cls, given: Any) -> Any:
        """Asks every source whether it has the resolution; where none is given it is the usual one of their kind."""
        sources = given.get("sources") if isinstance(given, dict) else None
        if not isinstance(sources, dict):
            return given
        written = {name: own for name, own in sources.items() if isinstance(own, dict)}
        for name, own in written.items():
            if shared := [field for field in own if field in SourceSettings.around]:
                raise ValueError(f"{name}: {', '.join(shared)} is the same for all sources: set it in data itself")
        kinds = {str(own.get("source")) for own in written.values()}
        if "resolution" not in given and len(kinds) == 1:
            known = all(plugins.exists("sources", kind) for kind in kinds)
            settings = plugins.find("sources", kinds.pop()).Settings if known else cls
            return given | {"resolution": settings.model_fields["resolution"].default}
        asked = {"resolution": given.get("resolution", cls.model_fields["resolution"].default)}
        return given | {"sources": sources | {name: own | asked for name, own in written.items()}}

    @field_validator("sources")
    @classmethod
    def _complete(cls, sources: dict[str, SourceSettings], info: ValidationInfo) -> dict[str, SourceSettings]:
        """The sources with the settings that hold for all."""
        found = {}
        for name, own in sources.items():
            other = {field: value for field, value in info.data.items() if value != getattr(own, field)}
            found[name] = own.model_copy(update=other)
        return found

    @field_serializer("sources", mode="wrap")
    def _without_shared(self, sources: Any, handler: SerializerFunctionWrapHandler) -> Any:
        return {
            name: {field: value for field, value in own.items() if field not in SourceSettings.around}
            for name, own in handler(sources).items()
        }

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if unknown := sorted(set(self.weights) - set(self.sources)):
            raise ValueError(f"weights: there is no source {', '.join(unknown)}; there are {', '.join(self.sources)}")
        for name, share in zip(self.sources, self.shares(), strict=True):
            if share / sum(self.shares()) < LEAST_SHARE:
                raise ValueError(f"weights: {name} would be sampled less than once in {1 / LEAST_SHARE:,.0f} samples")
        if len(self.sources) == 1 and any("loss_weight" in own.model_fields_set for own in self.sources.values()):
            raise ValueError(
                "loss_weight weights a source against other sources (data.sources.NAME.loss_weight), but this is "
                "the only source: remove it"
            )
        return self

    def unused(self) -> dict[str, str]:
        """Of what holds for all sources, the settings without effect on any."""
        first, *others = [own.unused() for own in self.sources.values()]
        found = {name: why for name, why in first.items() if name in SourceSettings.around}
        return {name: why for name, why in found.items() if all(name in other for other in others)}

    def named(self) -> Mapping[str, SourceSettings]:
        return {"": self.sources[NAMELESS]} if [*self.sources] == [NAMELESS] else self.sources

    def words(self) -> frozenset[str] | None:
        """Every word of the captions, where the settings alone say them; None where they are read."""
        each = [own.words() for own in self.sources.values()]
        return None if None in each else frozenset().union(*(words for words in each if words is not None))

    def shares(self) -> list[Fraction]:
        """The weights, exactly as they were written, in the order of `sources`."""
        return [Fraction(str(self.weights.get(name, 1.0))) for name in self.sources]


class LoaderSettings(Settings):
    """Batches made ahead of the loop; none of it changes what is trained on."""

    num_workers: int = Field(0, ge=0, json_schema_extra=ELASTIC)
    """Processes that read and decode. 0: a thread of the training process, which is enough for rendered images; large
    photographs want 1 or more."""
    prefetch_batches: int = Field(2, ge=1, json_schema_extra=ELASTIC)
    """Batches (each of `per_device_batch_size`) kept ready, or in the making, a worker."""
    max_pixels: int | None = Field(None, ge=64, json_schema_extra=ELASTIC)
    """Most pixels (width x height x samples) of a micro-batch: buckets with larger images are computed in smaller
    micro-batches. Default: no bound but `per_device_batch_size`."""
