"""Names of other trainers that mean something only together with other settings: functions from their text and the
rest.

Each takes the name, its text, a `Look` and the arguments of its row in names.yaml, and gives a `Meaning`.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from daguerre import trees, yaml_text
from daguerre.errors import UserError
from daguerre.foreign.names.tables import CONVERTED
from daguerre.foreign.names.values import NOTHING_ASKED, Meaning, listed, number, one
from daguerre.objectives.settings import TimestepBiasSettings
from daguerre.settings import Duration
from daguerre.storage import address

Look = Callable[[str], str | None]
"""The text of another name that is given, or of a setting by its path; None where neither is there."""

FLAX_BRANCHES = ("flax", "bf16", "refs/pr/95")
"""Branches of the base models that hold Flax weights; the main ones have torch's."""
FOREIGN_AXES = ("context",)
"""Axes of MaxDiffusion's mesh that are not there; each of degree 1 splits nothing."""
LENGTHS = ("length", "activation_length", "activation_kv_length")
"""Logical axes along the length of sequences, which nothing here is split along."""


def look_in(given: Mapping[str, str], tree: trees.Tree) -> Look:
    """A `Look` into names that were given, and into the settings of a tree."""

    def look(name: str) -> str | None:
        value = given.get(name, trees.get(tree, name))
        absent = value is trees.ABSENT or value is None
        return None if absent else value if isinstance(value, str) else json.dumps(value, default=str)

    return look


def is_true(text: str | None) -> bool:
    return text is not None and text.lower() == "true"


def idle(key: str, why: str) -> Meaning:
    """Nothing, and one line that says why."""
    return Meaning((), (f"{key} has no effect: {why}",))


def warmup_share(key: str, text: str, look: Look) -> Meaning:
    """`warmup_steps_fraction`: a share of the run, or of MaxDiffusion's `learning_rate_schedule_steps`."""
    share, planned = number(key, text), look("learning_rate_schedule_steps")
    length = f"{planned} steps" if planned and planned.isdigit() else look("training.duration") or ""
    with suppress(ValueError):
        duration = Duration(length)
        if duration.unit != "epochs":
            return one("lr_scheduler.warmup", f"{int(share * duration.number)} {duration.unit}")
    if share == 0:
        return one("lr_scheduler.warmup", "0 steps")
    raise UserError(
        "this is a share of the run: set training.duration in steps or samples, or set lr_scheduler.warmup",
        setting="training.duration",
    )


def generator(key: str, text: str, look: Look) -> Meaning:
    """Stable Cascade's weights of the stage that is trained."""
    return one("model.decoder" if look("model.family") == "cascade_b" else "model.prior", text)


def cycles(key: str, text: str, look: Look) -> Meaning:
    """`lr_num_cycles`: falls of a schedule that restarts; diffusers' scripts have it for all and read it for one."""
    schedule = look("lr_scheduler.name") or "constant"
    if schedule != "cosine_with_restarts":
        return idle(key, f"lr_scheduler={schedule} does not restart")
    return one("lr_scheduler.num_cycles", str(int(float(text))) if re.fullmatch(r"\d+\.0*", text) else text)


def base_loras(key: str, text: str, look: Look) -> Meaning:
    """`base_weights` with `base_weights_multiplier`: LoRAs of the base, and their strengths, 1 where none is given."""
    if key != "base_weights":
        return Meaning() if look("base_weights") else idle(key, "no base_weights are given")
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    strengths = [number("base_weights_multiplier", each) for each in listed(look("base_weights_multiplier") or "")]
    found = [
        {"path": path} | ({"strength": strengths[place]} if place < len(strengths) else {})
        for place, path in enumerate(listed(text))
    ]
    return one("model.loras", json.dumps(found))


def train_batch(key: str, text: str, look: Look) -> Meaning:
    """`train_batch_size`: samples of one device in one pass, and of an update on one device unless it accumulates.

    With prior preservation diffusers' and kohya's scripts add as many class images.
    """
    if not text.isdecimal():
        path = "training.per_device_batch_size"
        raise UserError("expected the number of samples per device and forward pass, such as 4", setting=path)
    with_class = look("data.sources.class") is not None
    count = int(text) * (2 if with_class else 1)
    said = (f"{key}={text} means {count} here, because each batch also has as many class images",) if with_class else ()
    beside = look("gradient_accumulation_steps") or look("global_batch_size")
    alone = () if beside else (("training.gradient_accumulation_steps", "1"),)
    return Meaning((("training.per_device_batch_size", str(count)), *alone), said)


def bias(key: str, text: str, look: Look) -> Meaning:
    """A number of a timestep bias, which acts with some strategies only."""
    name = key.removeprefix("timestep_bias")[1:]
    strategy = look("objective.timestep_bias.name") or "none"
    if strategy in TimestepBiasSettings.acts_with[name]:
        return one(f"objective.timestep_bias.{name}", text)
    instead = "begin and end select the steps" if strategy == "range" else "the strategy selects the steps"
    return Meaning((), (f"{key} has no effect with objective.timestep_bias.name={strategy}: {instead}",))


def tracker_project(key: str, text: str, look: Look) -> Meaning:
    """The project of `accelerate`'s trackers, which matters to Weights & Biases alone."""
    asked = any((look(name) or "").lower() in ("wandb", "all") for name in ("report_to", "log_with"))
    if text and (asked or look("logging.trackers.wandb") is not None):
        return one("logging.trackers.wandb.project", text)
    return idle(key, "TensorBoard has no projects; a run has its own folder, {output_dir}/{run_name}")


def profiler(key: str, text: str, look: Look) -> Meaning:
    """MaxDiffusion's `enable_profiler` with the updates that it skips and records, counted from the run's start."""
    if not is_true(look("enable_profiler")):
        return idle(key, "nothing is recorded without enable_profiler=True")
    if key != "enable_profiler":
        return Meaning()
    skipped, recorded = (
        int(number(name, look(name) or usual))
        for name, usual in (("skip_first_n_steps_for_profiler", "1"), ("profiler_steps", "5"))
    )
    return one("profiler.steps", f"[{skipped + 1}, {skipped + recorded}]")


def text_encoder_rate(key: str, text: str, look: Look) -> Meaning:
    """A learning rate of the text encoder alone."""
    adapters = json.loads(look("adapters") or "{}").values()
    here = any("text_encoder" in (own.get("train") or ()) for own in adapters if own)
    here = here or any((own.get("ranks") or {}).get("text_encoder") for own in adapters if own)
    if not (here or is_true(look("model.train_text_encoder"))):
        return idle(key, "the text encoder is not trained (train_text_encoder)")
    number(key, text)
    return one("optimizer.learning_rates", json.dumps({"text_encoder.*": float(text)}))


def revision(key: str, text: str, look: Look) -> Meaning:
    """`revision` of the base; branches of Flax weights stand for the main one, which has torch's."""
    if text in FLAX_BRANCHES and not is_true(look("model.pickled_weights")):
        return idle(key, f"{text} is a branch with Flax weights; the torch weights of the main branch are used")
    return one("model.revision", text)


def of_hub(key: str, text: str, look: Look, path: str) -> Meaning:
    """A setting that data sets of the hub alone have; empty text stands for their default."""
    source = look("data.source")
    if text and source == "huggingface":
        return one(path, text)
    return idle(key, f"data.source is {source}" if text else "this is the default of the data set")


def compile_cache(key: str, text: str, look: Look) -> Meaning:
    """`jax_cache_dir`: the folder of what was compiled."""
    if not text:
        return idle(key, "compiled code is cached in the user's cache folder")
    if look("training.compile") != "blocks":
        return idle(key, "it sets training.compile_cache_dir, but nothing is compiled unless training.compile=blocks")
    if address.is_remote(text):
        return idle(key, "compiled code is cached in a local folder (training.compile_cache_dir)")
    return one("training.compile_cache_dir", text)


def lightning(key: str, text: str, look: Look) -> Meaning:
    """MaxDiffusion's `lightning_repo` and `lightning_ckpt`, which together are a UNet."""
    repository, file = look("lightning_repo"), look("lightning_ckpt")
    if not text:
        return idle(key, "the UNet of the base model is used")
    if not repository or not file:
        raise UserError("set both lightning_repo and lightning_ckpt; or set model.unet=OWNER/NAME/FILE.safetensors")
    return one("model.unet", f"{repository}/{file}")


def global_norm(key: str, text: str, look: Look) -> Meaning:
    """Clipping by the global norm that MaxDiffusion's optimizer may do, in addition to what its trainers do."""
    limit = look("training.max_grad_norm")
    if is_true(text) and limit in (None, "null"):
        return one("training.max_grad_norm", "1.0")
    return idle(key, "training.max_grad_norm controls gradient clipping")


def lacks(axis: str, look: Look) -> bool:
    """True for an axis of theirs whose degree is 1, so that it splits nothing."""
    degrees = [look(f"{kind}_{axis}_parallelism") or "1" for kind in ("ici", "dcn")]
    return axis in FOREIGN_AXES and degrees == ["1", "1"]


def mesh(key: str, text: str, look: Look) -> Meaning:
    """A list of axes or of rules of the mesh, without axes that split nothing and that are not there."""
    left_out: list[str] = []
    kept = _without(yaml_text.value(text), look, left_out)
    if not left_out:
        return one(f"mesh.{key}", text)
    said = f"{key}: left out {', '.join(dict.fromkeys(left_out))}: these axes do not exist here and are not needed"
    return Meaning(((f"mesh.{key}", json.dumps(kept)),), (said,))


def _without(value: Any, look: Look, left_out: list[str]) -> Any:
    if not isinstance(value, list):
        return value
    kept = []
    for item in value:
        rule = isinstance(item, list) and len(item) == 2 and item[0] in LENGTHS
        if rule or (isinstance(item, str) and lacks(item, look)):
            left_out.append(item[0] if isinstance(item, list) else item)
        else:
            kept.append(_without(item, look, left_out))
    return kept


def foreign_degree(key: str, text: str, look: Look) -> Meaning:
    """A degree of an axis that is not there."""
    axis = key.split("_")[1]
    if text == "1":
        return Meaning(
            (), (f"{key}=1: left out, the axis {axis} does not exist here, and a degree of 1 has no effect",)
        )
    raise UserError(f"the axis {axis} (sequence parallelism) is not supported: only {key}=1 is accepted")


def conditions(key: str, text: str, look: Look) -> Meaning:
    """kohya's `conditioning_data_dir`: masks for its masked loss, else control images."""
    if text.lower() in ("none", "null", "false", ""):
        return idle(key, "no folder is given")
    masks = is_true(look("masked_loss")) or look("objective.mask") is not None
    return one("data.mask_dir" if masks else "data.control_dir", text)


def cached(key: str, text: str, look: Look, half: str, other: str) -> Meaning:
    """`cache_latents` and the like: one half in a cache, and the other one only if that is asked for, too."""
    if not is_true(text):
        return idle(key, "nothing is cached unless cache.path says where")
    both = any(is_true(look(name)) for name, row in CONVERTED.items() if row[:2] == ["cached", other])
    placed = any(look(name) is not None for name in ("cache_path", "cache.path", "data.cache"))
    rest = () if both else ((f"cache.{other}", "false"),)
    return Meaning(((f"cache.{half}", "true"), *rest, *(() if placed else (("cache.path", "auto"),))))


def cache_path(key: str, text: str, look: Look) -> Meaning:
    """MindOne's `cache_path`: where `task=cache` writes, and what is trained on without a `data_path`."""
    filled = look("task") != "cache" and look("data_path") is None and look("data.path") is None
    alone = (("data.source", "cache"), ("data.path", text)) if filled else ()
    return Meaning((("cache.path", text), *alone))
