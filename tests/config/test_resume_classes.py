"""Every setting has its class: identity (a run is refused another value), elastic (who computes), free (what is kept
and told). A new setting is an identity one until it is listed here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticSerializationError

from daguerre import plugins
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import config as configs
from daguerre.config import fields, merge
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.run.resume import check_same_recipe
from daguerre.settings import Settings
from daguerre.trees import paths

ELASTIC = {
    *(f"loader.{name}" for name in ("max_pixels", "num_workers", "prefetch_batches")),
    *(f"mesh.{kind}_{axis}_parallelism" for kind in ("dcn", "ici") for axis in ("data", "fsdp", "tensor")),
    *(f"mesh.{name}" for name in ("data_sharding", "logical_axis_rules", "mesh_axes", "shard_frozen")),
    "optimizer.one_pass",
    *(f"training.{name}" for name in ("attention", "channels_last", "compile", "device", "kernels")),
    *(f"training.{name}" for name in ("gradient_accumulation_steps", "per_device_batch_size")),
}
FREE = {
    *("training.compile_cache_dir", "training.text_encoders"),
    *(
        "optimizer.in_backward",
        "training.capture",
        "training.offload_activations",
        "training.swap_blocks",
    ),  # to the bit as without
    *(f"cache.{name}" for name in ("batch_size", "dtype", "images", "only", "path", "shard_mb", "texts")),
    *("allow_change", "description", "output_dir", "resume_from_checkpoint", "run_name"),
    "plugins",  # their digests are compared apart: tests/config/test_outside_plugins.py
    *(f"checkpoint.{name}" for name in ("background", "backup_every", "every", "export", "keep", "max_failed_saves")),
    *(
        f"data.{name}"
        for name in (
            "cache_dir",
            "cache_gb",
            "checked_pairs",
            "checked_prompts",
            "control_dir",
            "font",
            "mask_dir",
            "max_skipped",
            "path",
            "reference_dir",
            "rejected_dir",
        )
    ),
    *("data.kept_prompts", "data.marks"),
    *(f"data.generate.{name}" for name in ("count", "prompt", "seed")),
    *("distributed.dist_backend", "distributed.dist_url"),
    *(f"distributed.{name}_seconds" for name in ("rendezvous", "silent", "stuck", "timeout")),
    *("lr_scheduler.on_new_duration", "lr_scheduler.restart_from"),
    *("model.previewer", "model.resolution_multiple"),  # of Stage C
    "model.reconstruction_scale",  # of Stage B
    *(f"model.decode.{name}" for name in ("name", "num_inference_steps", "guidance_scale", "guidance_rescale")),
    *(f"model.decode.{name}" for name in ("shift", "sampler", "prediction")),
    *("logging.every", "logging.trackers", "model.pickled_weights", "model.ignore_tensors", "model.scheduler"),
    "model.probe",
    *(
        "logging.trackers.tensorboard.name",
        *(f"logging.trackers.wandb.{n}" for n in ("entity", "mode", "name", "project")),
    ),
    *(f"sampling.{name}" for name in ("batch_size", "eta", "guidance_rescale", "guidance_scale", "height", "width")),
    *(f"sampling.{name}" for name in ("negative_prompt", "num_images", "num_inference_steps", "prompts")),
    *(f"sampling.{name}" for name in ("prompts_file", "sampler", "seed", "shift", "timestep_spacing")),
    *(f"sampling.{name}" for name in ("s_churn", "s_noise", "s_tmax", "s_tmin")),
    *(f"training.{name}" for name in ("duration", "gradient_checkpointing", "max_device_memory")),
    "training.max_nonfinite_steps",
    *("profiler.ranks", "profiler.steps"),
    *(f"validation.{name}" for name in ("compared_images", "every", "num_levels", "num_samples", "raw_weights")),
}
SECTIONS = {"families": "model.family", "objectives": "objective.name"}
SECTIONS |= {"sources": "data.source", "optimizers": "optimizer.name"}


def classes() -> dict[str, str]:
    """The class of every setting there is, those of all plug-ins among them."""
    found: dict[str, str] = {}
    trees: list[dict[str, Any]] = [{}, {"logging": {"trackers": [*plugins.names("trackers")]}}]
    for kind, path in SECTIONS.items():
        section, _, key = path.partition(".")
        trees += [{section: {key: name}} for name in plugins.names(kind)]
    for tree in trees:
        for path, leaf in merge.known(Config, tree).items():
            if path == "model.previewer" and tree["model"]["family"] == "previewer":
                assert leaf.resume == "identity", "what is trained there; cascade_c only decodes with it"
                continue
            assert found.setdefault(path, leaf.resume) == leaf.resume, f"{path} is of two classes"
    return found


def test_every_setting_has_the_class_that_is_listed_here():
    found = classes()
    assert len(found) > 200
    assert {path for path, resume in found.items() if resume == "elastic"} == ELASTIC
    assert {path for path, resume in found.items() if resume == "free"} == FREE
    assert set(found.values()) == {"identity", "elastic", "free"}


def put(settings: Settings, path: str, value: Any) -> Settings:
    """The settings with this value in one place, whatever is allowed there."""
    name, _, rest = path.partition(".")
    if isinstance(settings, dict):
        return settings | {name: put(settings[name], rest, value)}
    inner = put(getattr(settings, name), rest, value) if rest else value
    return settings.model_copy(update={name: inner})


def changed(settings: Settings, path: str) -> Settings:
    """The settings with another value in one place, of a type that can be written there."""
    for value in (0.123456, "other", ["other"]):
        new = put(settings, path, value)
        with suppress(PydanticSerializationError):
            new.model_dump(mode="json")
            return new
    raise AssertionError(path)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "recipe", ["quickstart", *(pytest.param(name, marks=pytest.mark.long) for name in ("sdxl", "sd15_dreambooth"))]
)
def test_a_run_goes_on_with_another_value_of_elastic_and_free_settings_alone(recipe):
    old = configs.load(recipe, ["training.global_batch_size=8"]).config
    written = set(_paths(old))
    assert len(written) > 90
    for path in written:
        new = changed(old, path)
        path = path.replace("data.sources.images.", "data.")
        if re.sub(r"^data\.sources\.\w+", "data", path) in ELASTIC | FREE:
            assert check_same_recipe(old, new, RunFolder(Path("run"))) == []
            continue
        if path == "ema.post_hoc":
            new = put(old, path, [0.05])
        with pytest.raises(UserError, match=rf"a run with other settings:\n(.*\n)*  {path}: ") as refusal:
            check_same_recipe(old, new, RunFolder(Path("run")))
        section, name, setting, *_ = [*path.split("."), "", ""]
        of_weights = section == "adapters" and setting in {"name", *old.adapters[name].of_weights}
        if of_weights or path in ("init_from", "ema.path", "ema.post_hoc"):
            assert "It cannot be continued so: " in str(refusal.value)
            assert "allow_change" not in str(refusal.value)
            with pytest.raises(UserError, match="It cannot be continued so: "):
                check_same_recipe(old, new.model_copy(update={"allow_change": [path]}), RunFolder(Path("run")))
            continue
        # A value can leave others without effect, which differ then, too.
        way_on = str(refusal.value).partition("allow_change='[")[2].partition("]'")[0].split(", ")
        assert path in way_on
        allowed = new.model_copy(update={"allow_change": way_on})
        assert [change.path for change in check_same_recipe(old, allowed, RunFolder(Path("run")))] == way_on
        sections = new.model_copy(update={"allow_change": [each.partition(".")[0] for each in way_on]})
        assert len(check_same_recipe(old, sections, RunFolder(Path("run")))) == len(way_on)


def _paths(config: Config) -> list[str]:
    """Settings that act in a recipe, down to the innermost group; without those that map names to values."""
    leaves = fields.leaves(Config, config.model_dump())
    mappings = {path for path in leaves if path.endswith(".captions.weights")}
    found = paths(config.model_dump(mode="json"))
    return [path for path, value in found if path in leaves.keys() - mappings and not isinstance(value, dict)]
