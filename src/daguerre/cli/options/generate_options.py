"""The command line of `generate`: its own options, and settings that images depend on.

Names that other trainers use are accepted as in `train`; a notice names those that images do not depend on.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from daguerre import yaml_text
from daguerre.config import config as configs
from daguerre.config import fields, overrides, short_forms
from daguerre.config import options as config_options
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.foreign.names import lookup, lora_config
from daguerre.foreign.names.relative import look_in
from daguerre.generation import load
from daguerre.generation.load import Model
from daguerre.models.settings import ASSISTANT
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Settings, Unused

PLACE = ("output_dir", "run_name")
SAMPLING = tuple(name for name in SamplingSettings.model_fields if name != "prompts")
MAY_CHANGE = (
    "sampling.",
    "training.device",
    "training.mixed_precision",
    "training.weights_dtype",
    "training.frozen_precision",
    "training.base_precision",
    "training.swap_blocks",
    "training.attention",
    "training.matmul_precision",
    "training.max_device_memory",
    "training.text_encoders",
    "resume_from_checkpoint",
)
"""Settings that may differ from those of a trained run; those of its networks are fixed."""
_PLACES = ("model.pretrained_model_name_or_path", "model.revision", "model.variant")
"""The place of a run's base, which may have moved: its weights are compared with those that the run recorded."""
_OF_BASE = ("model.", "objective.")
_BATCH = "training.per_device_batch_size"
EXAMPLES = {"prompt_file": "prompts_file", "out_dir": "out", "steps": "num_inference_steps"}
"""Flags of open-diffusion's generate_examples.py, and kohya's gen_img.py, that are options here."""
INPUTS = {
    **dict.fromkeys(("init_image", "image_path", "img"), "image"),
    **dict.fromkeys(("mask_image", "mask_path"), "mask"),
    "denoising_strength": "strength",
    **dict.fromkeys(("controlnet_image", "control_image"), "control"),
}
"""Names of diffusers, kohya's gen_img.py, MindOne and A1111 for what an image starts from."""
HARD_EDGE = ("padding_mask_crop", "mask_blur", "blur_factor")
"""Names of diffusers and A1111 for what is not done with masks."""
LORAS = ("lora", "loras", "lora_path", "lora_weights", "network_weights", "adapter_path")
"""Names of LoRAs' files in other programs."""


class Options(Settings):
    """Options of `generate` other than settings, as the help has them."""

    prompt: str | None = None
    interpolate_to: str | None = None
    """Another prompt, to which the images of `prompt` go in equal steps."""
    out: Annotated[str | None, ADDRESS] = None
    format: Literal["png", "jpeg", "webp", "webdataset"] = "png"
    quality: int | None = Field(None, ge=1, le=100)
    shard_image: Literal["jpeg", "png", "webp"] = "jpeg"
    shard_samples: int = Field(1000, ge=1)
    shard: str | None = None
    contact_sheet: bool = True
    base: bool = False
    use: dict[str, float] = Field({})
    """Strengths of LoRAs and new tokens, by file or run folder."""
    image: Annotated[str | list[str] | None, ADDRESS] = None
    """What images start from: a file for all, a folder or a list with one for each request."""
    mask: Annotated[str | list[str] | None, ADDRESS] = None
    """White where they are painted again."""
    strength: float | None = Field(None, gt=0, le=1)
    """Share of the steps that run from an image."""
    keep_unmasked: bool = True
    """What is black in a mask stays as it was, to the pixel."""
    control: Annotated[str | list[str] | None, ADDRESS] = None
    """Control image of the first ControlNet: a file for all, a folder or a list with one for each request."""
    control_2: Annotated[str | list[str] | None, ADDRESS] = None
    control_3: Annotated[str | list[str] | None, ADDRESS] = None
    control_4: Annotated[str | list[str] | None, ADDRESS] = None
    control_from: Annotated[str | list[str] | None, ADDRESS] = None
    """Photos of which control images are computed."""
    reference: Annotated[str | list[str] | None, ADDRESS] = None
    """Pictures that say what is generated, with the prompt, for models that read such: a file or a list of all those of
    each request, or a folder with one for each request."""
    image_prompt: Annotated[str | list[str] | None, ADDRESS] = None
    """Images that say what is generated, with the prompt, for models that read such."""
    condition: str | dict[str, Any] | None = None
    """The condition that computes them, for ControlNets that have none of their own."""
    controlnets: dict[str, float] = Field({})
    """Strengths of ControlNets that are added, by place."""
    controlnet_conditioning_scale: float | list[float] = 1.0
    """Strength of the model's own ControlNets, in place of the one that each was trained with."""
    control_guidance_start: float | list[float] = 0.0
    control_guidance_end: float | list[float] = 1.0
    """Shares of the steps between which ControlNets act."""
    guess_mode: bool = False
    """Weakens shallow residuals; the unguided side has none."""
    weights: Literal["ema", "raw"] | None = None
    """Weights of the checkpoint; None: the averaged ones, if it has them."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("shard_image", "shard_samples"), lambda own: own.format != "webdataset", "only with format=webdataset"),
        Unused(
            ("quality",),
            lambda own: "png" in (own.format, own.shard_image if own.format == "webdataset" else ""),
            "PNG is lossless; only JPEG and WebP have a quality",
        ),
    )

    @property
    def encoding(self) -> Literal["jpeg", "png", "webp"]:
        """Format of the images, alone or in shards."""
        return self.shard_image if self.format == "webdataset" else self.format


@dataclass(frozen=True)
class Arguments:
    """A command line that was read."""

    options: Options
    model: Model
    config: Config
    """With the settings of the command line."""
    notices: tuple[str, ...]


def read(arguments: Sequence[str], planned: bool = False) -> Arguments:
    """Reads the command line; where it is only `planned`, the run of a recipe need not be there. UserError or
    ConfigError if it cannot be used."""
    notices: list[str] = []
    given = _of_examples(overrides.split(arguments, short={"-o": "--out"}), notices)
    options, rest = config_options.own_options(given.overrides, Options)
    place: list[str] = []
    pairs: list[tuple[str, str]] = []
    for key, text in map(overrides.pair, rest):
        of_place = [] if key in SAMPLING or key == "resolution" else lookup.translate(key, text).values
        of_place = [(path, value) for path, value in of_place if path in PLACE]
        place += [f"{path}={value}" for path, value in of_place]
        pairs += [] if of_place else [(key, text)]
    model = load.find(given.recipe, place, options.base, rest, planned)
    plain = model.trained or model.config(()).config
    changes = changes_of(model, plain, pairs, notices)
    set_now = {change.partition("=")[0] for change in changes}
    if "sampling.num_images" not in set_now:
        changes.append("sampling.num_images=1")
    loaded = model.config(changes)
    check_changes(model, plain, loaded.config)
    if "sampling.prompts_file" in set_now and options.prompt is not None:
        raise UserError("prompt and prompts_file were both given: choose one", code="conflict")
    return Arguments(options, model, loaded.config, tuple(dict.fromkeys([*model.notices, *notices, *loaded.notices])))


def _of_examples(given: overrides.Arguments, notices: list[str]) -> overrides.Arguments:
    """The arguments with flags of generate_examples.py translated."""
    recipe, kept = given.recipe, []
    pairs = [overrides.pair(each) for each in given.overrides]
    places = [text for key, text in pairs if key == "controlnet_model_name_or_path"]
    scales = [text for key, text in pairs if key == "controlnet_conditioning_scale"]
    if places:  # MaxDiffusion's names
        kept.append(f"controlnets={{{json.dumps(places[-1])}: {scales[-1] if scales else 1}}}")
        pairs = [
            pair for pair in pairs if pair[0] not in ("controlnet_model_name_or_path", "controlnet_conditioning_scale")
        ]
    for key, text in pairs:
        if key == "pipeline" and not recipe:
            recipe = text
        elif key == "scratch_dir":
            notices.append("scratch_dir has no effect: each image is written directly to the output folder")
        elif key == "task" and text == "img2img":
            if not {"image", *INPUTS} & {overrides.pair(each)[0] for each in given.overrides}:
                raise UserError("task=img2img needs an image: give image=FILE", code="missing", setting="image")
        elif key in HARD_EDGE:
            raise UserError(
                f"{key} is not supported: the whole image is generated, and a mask's edge is where it is drawn; what "
                f"is black stays as it is in any case. Remove {key}",
                code="unsupported",
            )
        elif key in LORAS:
            raise UserError(f"{key} is no option: use='{{{text}: 1}}' adds a LoRA, with its strength", code="unknown")
        elif key == "lora_config":  # MaxDiffusion's
            kept.append(f"use={json.dumps(lora_config.strengths(yaml_text.value(text)))}")
        elif key == "tar":
            kept.append("format=webdataset")
        else:
            kept.append(f"{(EXAMPLES | INPUTS).get(key, key)}={text}")
    return replace(given, recipe=recipe, overrides=tuple(kept))


def changes_of(
    model: Model,
    plain: Config,
    pairs: Sequence[tuple[str, str]],
    notices: list[str],
    options: type[Settings] = Options,
) -> list[str]:
    """Overrides of the settings that images depend on; a notice names those that only matter for training. `options`
    are those of the verb."""
    tree = plain.model_dump()
    leaves, sections = fields.leaves_and_sections(Config, tree)
    look = look_in(dict(pairs), short_forms.flat(tree))
    changes = []
    for key, text in pairs:
        if key.removeprefix("sampling.") in SAMPLING:
            changes.append(f"sampling.{key.removeprefix('sampling.')}={text}")
            continue
        if key == "resolution":
            changes += [f"sampling.height={text}", f"sampling.width={text}"]
            continue
        meaning = lookup.translate(key, text, look)
        notices += meaning.notices
        for path, value in meaning.values:
            found = overrides.find(path, leaves, [*sections])
            full = ".".join([found[0], *found[1]]) if found else path
            if found is None:
                # The config knows which settings are near; here it is the options.
                near = difflib.get_close_matches(key, [*options.model_fields, *SAMPLING], n=1, cutoff=0.75)
                if near:
                    raise UserError(f"there is no option {key}; did you mean {near[0]}?", code="unknown")
            if full == _BATCH:
                changes.append(f"sampling.batch_size={value}")
            elif found and (path != key or "." not in key) and not full.startswith(_allowed(model, plain)):
                notices.append(f"{key} only affects training, not generation: ignored")
            else:
                changes.append(f"{full}={value}")
    return changes


def _allowed(model: Model, plain: Config) -> tuple[str, ...]:
    """Beginnings of the settings that the command may change."""
    if model.run is None:
        used = plain.adapters if plain.training.duration.number == 0 or model.trained else {}
        return *MAY_CHANGE, *_OF_BASE, *(f"adapters.{name}." for name in used)
    assert model.trained is not None
    return *MAY_CHANGE, *_PLACES, *(f"model.{name}" for name in model.trained.model.decoding)


def check_changes(
    model: Model, plain: Config, config: Config, verb: str = "generate", options: type[Settings] = Options
) -> None:
    """UserError for settings that are fixed by the run, or have no effect on images, with those that the verb takes."""
    allowed = _allowed(model, plain)
    idle = f"model.{ASSISTANT}"  # it acts where a loss is computed
    if config.training.weights_dtype != plain.training.weights_dtype:
        allowed = *allowed, "training.stochastic_rounding"  # has an effect with 16 bits alone, so that it comes or goes
    changes = configs.diff(plain, config)
    paths = [each.path for each in changes if not each.path.startswith(allowed) or each.path == idle]
    if not paths:
        return
    fixed = f"fixed when {model.run.path} was trained, or " if model.run else ""
    known = [name for name in options.model_fields if name != "base"]
    raise UserError(
        f"{', '.join(paths)}: {fixed}no effect on images; `{verb}` accepts "
        f"{', '.join([*known, *SAMPLING, *(name.rstrip('.') for name in allowed[1:])])}",
        code="unused",
    )
