"""Names from other trainers on the command line: what each becomes here, and what is said where nothing does.

The tables are data; `translate` looks a name up. Recipes use our own names only. The names come from MaxDiffusion,
MindOne SDXL, open-diffusion and Stable Cascade. A bare integer keeps the unit of its origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from daguerre.errors import UserError

Pairs = list[tuple[str, str]]
"""Settings and the text that each is given."""


@dataclass(frozen=True)
class Meaning:
    """What one `key=value` says in our own names."""

    values: tuple[tuple[str, str], ...]
    notices: tuple[str, ...] = ()


def translate(key: str, text: str) -> Meaning:
    """Our settings for a key of the command line; a key that is in no table is returned as it is.

    UserError for a key that is refused, that is not there yet, or whose value has no counterpart.
    """
    if key in SAME:
        return Meaning(((SAME[key], text),))
    if key in CONVERTED:
        return Meaning(tuple(CONVERTED[key](text)))
    if key in REFUSED:
        raise UserError(f"not a setting here: {REFUSED[key]}")
    if key in NOTICES:
        return Meaning((), (f"{key} has no counterpart on this engine: {NOTICES[key]}",))
    later = next((row for pattern, row in LATER.items() if fnmatchcase(key, pattern)), None)
    if later is None:
        return Meaning(((key, text),))
    what, idle = later
    if text.lower() in idle:
        return Meaning((), (f"{key}={text} is what happens anyway: {what} is not there yet",))
    raise UserError(f"{what} is not there yet" + (f"; {key}={idle[0]} is accepted" if idle else ""))


def idle_beside(key: str, given: Pairs) -> str | None:
    """What to say of a name that has no effect beside these settings; None where it has one."""
    path, value, instead = IDLE_BESIDE.get(key, ("", "", ""))
    return f"{key} has no effect with {path}={value}: {instead}" if (path, value) in given else None


def _choose(key: str, options: Mapping[str, Pairs], later: Mapping[str, str] | None = None) -> Callable[[str], Pairs]:
    """A converter that looks the value up, whatever its case; `later` holds the values that are not there yet."""

    def convert(text: str) -> Pairs:
        found = {name.lower(): pairs for name, pairs in options.items()}.get(text.lower())
        if found is not None:
            return found
        absent = {name.lower(): what for name, what in (later or {}).items()}.get(text.lower())
        raise UserError(
            f"{absent} is not there yet" if absent else f"{key} is one of {', '.join(options)}, got {text!r}"
        )

    return convert


def _counted(path: str, unit: str) -> Callable[[str], Pairs]:
    """A converter of a bare number in the unit that it has where the name comes from; -1 and 0 switch off."""

    def convert(text: str) -> Pairs:
        off = text in ("-1", "0") and path == "checkpoint.every"
        return [(path, "null" if off else f"{text} {unit}" if text.replace("_", "").isdigit() else text)]

    return convert


def _cascade_ema(path: str) -> Callable[[str], Pairs]:
    """A converter of a number of Stable Cascade's averages, which chooses their form as well."""

    def convert(text: str) -> Pairs:
        try:
            float(text)
        except ValueError:
            raise UserError(f"{path.partition('.')[2]} is a number, got {text!r}") from None
        return [("ema.name", "stable_cascade"), (path, text)]

    return convert


def _min_snr(text: str) -> Pairs:
    try:
        gamma = float(text)
    except ValueError:
        raise UserError(f"snr_gamma is a number (0 or less switches it off), got {text!r}") from None
    name = "objective.weighting.name"
    return [(name, "min_snr"), ("objective.weighting.snr_gamma", text)] if gamma > 0 else [(name, "none")]


SAME = {
    # MaxDiffusion
    "dataset_name": "data.source",
    # MindOne SDXL
    "weight": "model.pretrained_model_name_or_path",
    "data_path": "data.path",
    "per_batch_size": "training.per_device_batch_size",
    "use_ema": "ema.enabled",
    "offset_noise_level": "objective.noise.offset",
    **{
        f"timestep_bias{mark}{name}": f"objective.timestep_bias.{'name' if name == 'strategy' else name}"
        for mark in "._"  # MaxDiffusion, MindOne
        for name in ("strategy", "multiplier", "begin", "end", "portion")
    },
    # open-diffusion
    "model.pretrained": "model.pretrained_model_name_or_path",
    "model.use_ema": "ema.enabled",
    "model.mixed_precision": "training.mixed_precision",
    "experiment.name": "run_name",
    "experiment.log_dir": "output_dir",
    "system.gradient_accumulation": "training.gradient_accumulation_steps",
    "system.workers": "loader.num_workers",
    # Stable Cascade
    "experiment_id": "run_name",
    "lr": "optimizer.learning_rate",
    "grad_accum_steps": "training.gradient_accumulation_steps",
    "image_size": "data.resolution",
    "multi_aspect_ratio": "data.buckets.aspects",
    "dataset_filters": "data.filters",
}
"""Another name for one of our settings."""

_FP32, _BF16 = [("training.mixed_precision", "no")], [("training.mixed_precision", "bf16")]

CONVERTED: dict[str, Callable[[str], Pairs]] = {
    # lengths and intervals
    "max_train_steps": _counted("training.duration", "steps"),
    "updates": _counted("training.duration", "steps"),
    "num_examples_to_see": _counted("training.duration", "samples"),
    "experiment.num_examples_to_see": _counted("training.duration", "samples"),
    "checkpoint_every": _counted("checkpoint.every", "samples"),
    "experiment.save_every": _counted("checkpoint.every", "steps"),
    "save_every": _counted("checkpoint.every", "steps"),
    "warmup_updates": _counted("lr_scheduler.warmup", "steps"),
    # data
    "webdataset_path": lambda text: [("data.source", "webdataset"), ("data.path", text)],
    # weighting and clipping
    "snr_gamma": _min_snr,
    "clip_grad": _choose("clip_grad", {"True": [], "False": [("training.max_grad_norm", "null")]}),
    # averages
    "ema_start_iters": _cascade_ema("ema.start_steps"),
    "ema_iters": _cascade_ema("ema.every_steps"),
    "ema_beta": _cascade_ema("ema.decay"),
    # precision
    "weights_dtype": _choose(
        "weights_dtype",
        {"float32": []},
        {"bfloat16": "storing weights in bfloat16", "float16": "storing weights in float16"},
    ),
    "activations_dtype": _choose(
        "activations_dtype", {"float32": _FP32, "bfloat16": _BF16}, {"float16": "computing in float16"}
    ),
    "ms_amp_level": _choose(
        "ms_amp_level", {"O0": _FP32, "O1": _BF16, "O2": _BF16}, {"O3": "training with float16 weights"}
    ),
    "param_fp16": _choose("param_fp16", {"False": []}, {"True": "training with float16 weights"}),
}
"""A name whose value is another one here."""

REFUSED = {
    "batch_size": "it means the batch of one device in one trainer and the global batch in another: use "
    "per_device_batch_size or global_batch_size (sampling.batch_size is the pictures drawn at once)",
    "optimizer_weight": "resume_from_checkpoint restores the optimizer, the averages and the place in the data",
    "resume_step": "resume_from_checkpoint restores everything; name a checkpoint, such as step-00001000",
    "save_optimizer": "every checkpoint holds the optimizer; checkpoint.export writes weights alone",
    "wandb.api_key": "secrets never belong on the command line or in a recipe: the environment holds them",
}
"""A name that is an error, and what to use."""

NOTICES = {
    "data_sink": "prefetch_batches keeps batches ready ahead of the step",
    "sink_size": "prefetch_batches keeps batches ready ahead of the step",
    "sink_queue_size": "prefetch_batches is the number of batches kept ready",
    "python_multiprocessing": "num_workers is the number of processes that read and decode",
}
"""A name that is accepted with one printed line, which says what serves instead."""

IDLE_BESIDE: dict[str, tuple[str, str, str]] = {
    "timestep_bias_portion": ("objective.timestep_bias.name", "range", "begin and end say which steps"),
    "timestep_bias.portion": ("objective.timestep_bias.name", "range", "begin and end say which steps"),
}
"""A name that is accepted with one printed line where a setting has this value; what serves instead."""

_OFF = ("false", "none", "null")

LATER: dict[str, tuple[str, tuple[str, ...]]] = {
    "jax_cache_dir": ("a folder for compiled code", ()),
    "dataset_save_location": ("a prepared form of a data set", ()),
    "from_pt": ("the choice of pickled weights", ()),
    "revision": ("the choice of a model's revision", ()),
    "unet_checkpoint": ("a UNet from another place than its model", ()),
    "precision": ("the choice of the float32 matmul precision", ("default",)),
    "attention": ("the choice of an attention kernel", ()),
    "spatial_transformer_attn_type": ("the choice of an attention kernel", ()),
    "xformers": ("the choice of an attention kernel", _OFF),
    "model.xformers": ("the choice of an attention kernel", _OFF),
    "mesh_axes": ("training on several devices", ()),
    "logical_axis_rules": ("training on several devices", ()),
    "data_sharding": ("training on several devices", ()),
    "ici_*_parallelism": ("training on several devices", ("1", "-1")),
    "dcn_*_parallelism": ("training on several devices", ("1", "-1")),
    "use_fsdp": ("training on several devices", _OFF),
    "is_parallel": ("training on several devices", _OFF),
    "distributed.*": ("training on several devices", ()),
    "max_device_memory": ("a cap of the device's memory", ()),
    "disable_first_stage_amp": ("the choice of the autoencoder's precision", ()),
    "use_recompute": ("recomputing activations (gradient checkpointing)", _OFF),
    "gradient_checkpointing": ("recomputing activations (gradient checkpointing)", _OFF),
    "model.gradient_checkpointing": ("recomputing activations (gradient checkpointing)", _OFF),
    "task": ("a task other than training (the cache verb)", ("txt2img", "train")),
    "cache_*": ("the cache verb", _OFF),
    "lpw": ("prompts longer than one text window", _OFF),
    "ema.path": ("starting the averages from other weights", _OFF),
    "requeue": ("refusing a run that exists already", ("true",)),
    "experiment.requeue": ("refusing a run that exists already", ("true",)),
    "experiment.eval_caption_file": ("pictures from a file of captions", _OFF),
    "experiment.num_eval_images": ("pictures from a file of captions", _OFF),
    "wandb.*": ("tracking by Weights & Biases", ()),
}
"""A name (or pattern) whose part is still to be written: what that is, and the values that ask for nothing."""
