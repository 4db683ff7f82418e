"""Settings that families share. No torch here."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticUndefined

from daguerre.settings import ADDRESS, FREE, Settings, Unused
from daguerre.types import REFERENCES, References

if TYPE_CHECKING:
    from daguerre.models.schedulers.scheduler import Schedulers
    from daguerre.samplers.guidance import Guidance

SAFETENSORS = (".safetensors", ".sft")
"""Endings of one format; the second is that of Black Forest Labs' first files."""
GGUF = ".gguf"
SINGLE_FILES = (*SAFETENSORS, ".ckpt", ".pt", ".bin")
"""Suffixes of files that hold a model, or one of its networks."""
BASE = "base"
"""A component of `pretrained_model_name_or_path`."""
INDEX = "model_index"
"""The index of a pipeline, next to the configs of its components."""
SCHEDULER = "scheduler"
"""The config of its scheduler, next to them."""
Component = Annotated[str | dict[str, Any] | None, ADDRESS]
"""Source of a network: `base`, another place, the numbers of its config, or null: the base's numbers."""


ASSISTANT: Final = "assistant"
"""A LoRA that acts in training alone: the setting that names it, and its name among the networks."""
Role = Literal["denoiser", "autoencoder", "text_encoder", "image_encoder", "tokenizer", "control", "loss", "assistant"]
"""What a network is for. control: it adds to the denoiser; loss: only the objective reads it; assistant: it adds to the
denoiser while a loss is computed."""


class ComponentSpec(NamedTuple):
    """A component of a family as its settings declare it, without torch. Shared code asks for the role: only a family
    knows its components' names."""

    role: Role
    trainable: bool = False
    """Whether adapters can train it, or add to it. False for all of a family that always trains what it has."""
    folder: str = ""
    """The folder of a pipeline that has it, where that is not named after the component."""

    @property
    def extensible(self) -> bool:
        """True if adapters can add to it, too; what reads or makes images is trained whole or not at all."""
        return self.trainable and self.role in ("denoiser", "text_encoder")


def reachable(specs: Mapping[str, ComponentSpec]) -> tuple[str, ...]:
    """The components that adapters reach unless they name others: the first that is trainable, and those to which
    adapters can add."""
    names = [name for name, spec in specs.items() if spec.trainable]
    return tuple(name for name in names if name == names[0] or specs[name].extensible)


class FamilySettings(Settings):
    """Base of every family's `Settings`, which adds its own fields and narrows `family`."""

    family: str
    """Name of the family: a file in families."""

    components: ClassVar[Mapping[str, ComponentSpec]] = {}
    """The family's networks and tokenizers by name."""
    guidance: ClassVar["Guidance | None"] = None
    """What a guidance scale does to the family's denoiser; None for a family that does not generate from prompts."""
    overflows_float16: ClassVar[bool] = False
    """Whether activations of the networks exceed the range of float16, so that training and generating refuse it."""
    reconstructs: ClassVar[bool] = False
    """Whether the model reconstructs its input: an image that is given is then that input, and sampling is
    started from only where a strength is given."""
    reference_rule: ClassVar[References | None] = None
    """The reference images that a prompt may have; None for families that read none."""
    decoding: ClassVar[tuple[str, ...]] = ()
    """Settings, components among them, of what only makes images of clean samples: nothing that is learnt depends on
    them, so `generate` may choose others than a run."""
    of_students: ClassVar[tuple[str, ...]] = ()
    """Settings of what is added to a denoiser and has learnt nothing yet, so that a teacher has none of it."""

    @field_validator("*", mode="before")
    @classmethod
    # To pathlib an empty text is the working directory: `model.vae=` would silently be another place.
    def _not_empty(cls, given: Any, info: ValidationInfo) -> Any:
        if given == "":
            usual = cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)
            text = (
                "remove it" if usual is PydanticUndefined else f"remove it, or write {json.dumps(usual)} for the usual"
            )
            raise ValueError(f"is empty, and no place or name: {text}")
        return given

    @classmethod
    def networks(cls, *roles: str) -> tuple[str, ...]:
        """Names of the networks of these roles; of all where none is named."""
        # A tokenizer has no weights: what counts, moves or digests networks must not meet it.
        wanted = roles or {spec.role for spec in cls.components.values()} - {"tokenizer"}
        return tuple(name for name, spec in cls.components.items() if spec.role in wanted)

    @classmethod
    def tokenizers(cls) -> tuple[str, ...]:
        return tuple(name for name, spec in cls.components.items() if spec.role == "tokenizer")

    @classmethod
    def text_encoders(cls) -> tuple[str, ...]:
        """Names of the text encoders, in the order of the tokenizers whose tokens they read."""
        return tuple(name for name, spec in cls.components.items() if spec.role == "text_encoder")

    @classmethod
    def folder_of(cls, name: str) -> str:
        """The folder of a pipeline that has a component."""
        return (cls.components[name].folder if name in cls.components else "") or name

    @classmethod
    def trainable(cls) -> tuple[str, ...]:
        """Names of the components that adapters reach, the one first that is trained by default."""
        return reachable(cls.components)

    @property
    def places(self) -> Mapping[str, Any]:
        """Source of each network by component: `base`, another place, numbers or None. {} for families whose networks
        always start from random weights."""
        return {}

    def of_captions(self, texts: Callable[[], Iterable[str]]) -> Self:
        """The settings with what they leave to the captions of the data, whose `texts` are read only for that."""
        return self

    def teacher(self, place: str, *more: str) -> Self:
        """The settings of a teacher whose denoiser, and `more` components, come from a place; all else is as here. What
        only a student has is left out (`of_students`)."""
        usual = {name: type(self).model_fields[name].default for name in self.of_students}
        return self.model_copy(update=dict.fromkeys((*self.networks("denoiser"), *more), place) | usual)

    @property
    def denoises_anew(self) -> bool:
        """True if what denoises comes from no place: it starts from random weights."""
        own = [self.places[name] for name in self.networks("denoiser") if name in self.places]
        # Both null and numbers are random weights; a place is a text.
        return bool(own) and not any(isinstance(place, str) for place in own)


class DenoiserSettings(FamilySettings):
    """Settings of families whose network is trained by diffusion."""

    noise_conditioning: Literal["auto", "timestep", "log_sigma", "cosine_time", "flow_time"] = "auto"
    """The network's noise-level input. auto: the time of the objective's own schedule;
    timestep: the index of the level in the table without a shift, which Stable Diffusion's networks know; log_sigma:
    ln(sigma)/4 (EDM); cosine_time: Stable Cascade's time; flow_time: s / (a + s)."""
    time_scale: ClassVar[float] = 1000.0
    """Factor of times in [0, 1]: diffusers' UNets embed numbers from 0 to 1000."""


class ProbedSettings(DenoiserSettings):
    """Settings of families of whose weights not all files say what they predict."""

    probe: bool = Field(True, json_schema_extra=FREE)
    """`train` looks before its first update at what the weights predict, by 16 images, where their files do not say;
    weights that plainly are of another kind than the objective are refused. off: nobody looks."""

    kinds: ClassVar[Mapping[str, Mapping[str, Any]]]
    """The objectives that published weights are of, by name: sections of a recipe."""


class LatentSettings(DenoiserSettings):
    """Settings of families that train on the latents of a frozen autoencoder."""

    sample_posterior: bool = True
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off: take the posterior's mean."""


class ScaledSettings(LatentSettings):
    """Settings of families whose recipes may choose how latents are scaled: z = (x - mean) scaling_factor / std."""

    scaling_factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Latents are multiplied by this. null: the autoencoder's own."""
    latents_mean: list[float] | None = None
    """Mean of each latent channel, subtracted before scaling. null: the autoencoder's own, if it has one."""
    latents_std: list[float] | None = None
    """Standard deviation of each latent channel, divided by before scaling. null: the autoencoder's own, if it has
    one. Zeros for the mean and ones here switch the autoencoder's off."""

    @model_validator(mode="after")
    def _statistics_are_whole(self) -> Self:
        mean, std = self.latents_mean, self.latents_std
        if (mean is None) != (std is None):
            given, absent = ("latents_mean", "latents_std") if std is None else ("latents_std", "latents_mean")
            raise ValueError(
                f"{given} is given without {absent}: set both, with one number per latent channel, or neither"
            )
        if len(mean or ()) != len(std or ()):
            counts = f"latents_mean has {len(mean or ())} numbers and latents_std {len(std or ())}"
            raise ValueError(f"{counts}: set one per latent channel")
        if not all(number > 0 for number in std or ()):
            raise ValueError(f"latents_std is {std}: every number must be above 0")
        return self


class BaseLoRA(Settings):
    """A LoRA that belongs to the base of a run."""

    path: Annotated[str, ADDRESS]
    """A file of any program, a run's folder, OWNER/NAME/FILE.safetensors of the hub, or OWNER/NAME."""
    strength: float = Field(1.0, allow_inf_nan=False)
    """What it adds is multiplied by this; below 0 it is taken away."""


class PretrainedSettings(FamilySettings):
    """Settings of families whose networks are those of a diffusers pipeline; each component is a field of its family.

    A component is `base` (it comes from pretrained_model_name_or_path), another place (a pipeline's folder, the
    component's own folder, a hub id, a .safetensors file, OWNER/NAME/FILE.safetensors of the hub), the numbers of its
    config (random weights drawn from the run's seed), or null (random weights, with the base's own numbers).
    """

    pretrained_model_name_or_path: Annotated[str, ADDRESS]
    """The base: `quickstart` (shipped), a folder in diffusers' layout, a hub id such as
    `stabilityai/stable-diffusion-2-base`, which is read from the local cache first, or a single-file checkpoint."""
    revision: str | None = None
    """Branch, tag or commit of a base on the hub. null: its main branch."""
    variant: str | None = None
    """Weights in another form, such as `fp16`, of each network that has them: files named
    diffusion_pytorch_model.fp16.safetensors."""
    pickled_weights: bool = Field(False, json_schema_extra=FREE)
    """Also take old pickled files (.bin, .ckpt) where there are no others: read as tensors alone, converted once."""
    ignore_tensors: list[str] = Field([], json_schema_extra=FREE)
    """Patterns of tensors' names (`*` and `?`) that are left out of files of weights. What belongs to weights in a way
    that is not known here, or marks how they are used, is refused unless it is named here."""
    loras: list[BaseLoRA] = Field([], exclude_if=lambda loras: not loras)
    """LoRAs that are added to the weights of the denoiser before training: [{path: style.safetensors, strength: 0.8}].
    What is trained is for the base with them."""
    scheduler: Annotated[str | None, ADDRESS] = Field(BASE, json_schema_extra=FREE)
    """Place of the scheduler's config that the pretrained network was trained with: where the objective differs, a line
    says so. null: no comparison."""

    pipeline_class: ClassVar[str]
    """The class of diffusers' pipelines that an export is opened with."""
    further_classes: ClassVar[tuple[str, ...]] = ()
    """Further classes whose folders are opened: of weights that the library gives a class of their own."""
    schedulers: ClassVar["Schedulers"]
    """The schedulers of that class: which objective each stands for, and which one an objective is exported with. Every
    family that is trained by diffusion has them."""
    own_scheduler: ClassVar[Mapping[str, Any] | None] = None
    """The config of the scheduler that the class makes where its folder has none."""
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sections of a recipe that generates with such a pipeline: the size of its images, and how they are sampled."""
    told_by_index: ClassVar[Mapping[str, str]] = {}
    """Settings that the index of a base (model_index.json) tells, by their names there."""
    of_null: ClassVar[Collection[str]] = ()
    """Those of them that say how the empty text is read. Weights draw images of prompts with either value."""
    files_tell_numbers: ClassVar[bool] = False
    """Whether the numbers of a network are read off its single file; else they are the base's."""
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            ("variant",),
            lambda s: s.pretrained_model_name_or_path.endswith(SINGLE_FILES),
            "a single file has no variants",
        ),
    )

    @property
    def places(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.networks()}

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """`usual` for a pipeline whose networks have these configs, by component, which may tell more than its class,
        as may its index (`INDEX`) and its scheduler (`SCHEDULER`). A network that comes from elsewhere has none."""
        return cls.usual

    @classmethod
    def published(cls, file: str) -> Mapping[str, Any] | None:
        """Numbers of the network in a published single file, by the file's name; None where they are not known."""
        return None

    @classmethod
    def of_base(cls) -> set[str]:
        """The components that come from the base where nothing else is said."""
        return {name for name in cls.components if cls.model_fields[name].default == BASE}


class ReferenceSettings(FamilySettings):
    """Settings of families that read reference images, as their `reference_rule` says."""

    references: int = Field(0, ge=0, le=len(REFERENCES))
    """Most reference images of a sample in training; 0: none are read. Samples may have fewer."""

    @property
    def trained_references(self) -> References | None:
        """The reference images that are read in training."""
        if not self.references or self.reference_rule is None:
            return None
        return replace(self.reference_rule, most=self.references)


class DistilledSettings(PretrainedSettings):
    """Settings of families some of whose weights were distilled to few steps: they generate, and are not trained."""

    is_distilled: bool | None = None
    """Whether the transformer was distilled to few steps: it generates, and is not trained. null: as the base's
    model_index.json says, which says nothing of a transformer from elsewhere."""
