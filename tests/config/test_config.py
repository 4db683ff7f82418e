"""The config tree: load, extend, override, refuse, dump, diff."""

import contextlib
import json
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_cases import chosen
from twins import left_to_users

from daguerre import plugins, trees
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import fields, merge, recipe
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError
from daguerre.distributed.launch.slurm import SlurmSettings
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, Settings

BASE = """
run_name: tiny
output_dir: out/${run_name}
model: {family: sd, pretrained_model_name_or_path: somewhere}
objective: {name: v, schedule: {shift: 2}, weighting: {name: min_snr, snr_gamma: 4}, noise: {offset: 0.1}}
data: {source: shapes, jitter_px: 2, resolution: 64}
training: {duration: 20 steps, global_batch_size: 4}
ema: {decay: 0.9}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def beside(base: Path, text: str, name: str = "more.yaml") -> str:
    path = base.parent / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(path: Path | str, *overrides: str) -> Config:
    return configs.load(str(path), overrides).config


def problems(path: Path | str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        configs.load(str(path), overrides)
    for problem in caught.value.problems:
        assert problem.path in str(caught.value)
        assert problem.text.splitlines()[0] in str(caught.value)
    return {problem.path: problem.text for problem in caught.value.problems}


def test_a_recipe_becomes_a_frozen_config_of_the_plugins_own_settings(base):
    config = load(base)
    assert config.output_dir == "out/tiny"
    assert type(config.data.sources["images"]) is plugins.find("sources", "shapes").Settings
    assert type(config.objective) is plugins.find("objectives", "v").Settings
    assert config.training.duration.number == 20
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_a_bare_exponent_is_a_number(base):
    more = beside(base, "extends: base.yaml\noptimizer: {learning_rate: 1e-4}")
    assert load(more).optimizer.learning_rate == 1e-4


def test_the_extending_recipe_wins_and_mappings_merge(base):
    middle = "extends: base.yaml\nmodel: {unet: {block_out_channels: [32, 64], layers_per_block: 1}}\nseed: 1"
    beside(base, middle, "middle.yaml")
    config = load(beside(base, "extends: middle.yaml\nmodel: {unet: {layers_per_block: 2}}"))
    assert config.model.unet == {"block_out_channels": [32, 64], "layers_per_block": 2}
    assert (config.seed, config.run_name) == (1, "tiny")


def test_a_section_whose_keys_are_all_comments_changes_nothing(base):
    assert load(beside(base, "extends: base.yaml\ndata:\nema:\n  # decay: 0.5")) == load(base)


def test_another_plugin_drops_the_old_ones_keys_and_keeps_the_shared_ones(base):
    loaded = configs.load(str(base), ["objective.name=flow"])
    assert loaded.config.objective.name == "flow"
    assert loaded.config.objective.noise.offset == 0.1
    assert loaded.config.objective.weighting.snr_gamma == 4
    assert [notice for notice in loaded.notices if "objective.schedule" in notice]
    more = configs.load(beside(base, "extends: base.yaml\nobjective: {name: flow}"))
    assert more.config == loaded.config
    assert more.notices == loaded.notices


def test_what_the_user_gives_beside_a_new_plugin_is_never_dropped(base):
    found = problems(base, "objective.name=flow", "objective.schedule.zero_terminal_snr=true")
    assert "no effect" in found["objective.schedule.zero_terminal_snr"]


def test_a_switch_drops_what_it_leaves_idle_only_from_below(base):
    loaded = configs.load(str(base), ["ema.enabled=false", "objective.weighting.name=none"])
    assert not loaded.config.ema.enabled
    assert {"ema.decay", "objective.weighting.snr_gamma"} <= {w for n in loaded.notices for w in n.split()}
    assert "no effect" in problems(base, "ema.enabled=false", "ema.decay=0.5")["ema.decay"]
    assert "no effect" in problems(base, "validation.every=null", "validation.num_levels=3")["validation.num_levels"]


FOLDER = "data: {source: folder, path: x, crop: random, buckets: {aspects: auto, step: 8}, resolution: 64}"
TAGS = "captions: {shuffle_tags: true, tag_separator: ;}"


@pytest.mark.parametrize(
    ("data", "override", "dropped"),
    [
        (FOLDER, "data.buckets.aspects=square", ["data.buckets.step"]),
        (FOLDER, "data.source=shapes", ["data.path", "data.crop", "data.buckets"]),
        (
            f"data: {{source: folder, path: x, {TAGS}}}",
            "data.captions.shuffle_tags=false",
            ["data.captions.tag_separator"],
        ),
        (
            f"data: {{source: mix, sources: {{a: {{source: folder, path: x, {TAGS}}}}}}}",
            "data.sources.a.captions.shuffle_tags=false",
            ["data.sources.a.captions.tag_separator"],
        ),
        (
            "data: {source: folder, path: x, captions_from: folder_names, idx_to_prompt: [a, b]}",
            "data.captions.fields=[other]",
            ["data.captions_from", "data.idx_to_prompt"],
        ),
    ],
)
def test_settings_that_others_leave_without_effect_drop_out_only_from_below(base, data, override, dropped):
    recipe_file = beside(base, f"extends: base.yaml\n{data}")
    told = {word.strip(":,") for notice in configs.load(recipe_file, [override]).notices for word in notice.split()}
    assert {path for path in dropped if path not in told} == set()
    (base.parent / "config.yaml").write_text(configs.dump(load(recipe_file)), encoding="utf-8")
    assert load(base.parent, override) == load(recipe_file, override)
    given = {"step": "8", "buckets": "{step: 8}", "tag_separator": ";", "idx_to_prompt": "[a, b]"}
    again = f"{dropped[-1]}={given[dropped[-1].rpartition('.')[2]]}"
    assert "no effect" in "".join(problems(base.parent, override, again).values())


def test_what_had_no_effect_where_it_was_given_is_refused_there(base):
    idle = beside(base, "extends: base.yaml\ndata: {source: folder, path: x, buckets: {step: 8}}")
    assert "no effect" in problems(idle)["data.buckets.step"]
    assert "no effect" in problems(idle, "data.buckets.upscale=false")["data.buckets.step"]
    assert load(idle, "data.buckets.aspects=auto").data.buckets.step == 8


def test_all_problems_come_in_one_message(base):
    more = beside(
        base,
        """
extends: base.yaml
run_nme: x
run_name: "???"
training: {duration: 20 stps, learning_rate: 1e-4, mixed_precision: fp8, global_batch_size: yes}
data: {resolution: "64", jitter_px: 25}
objective: {weighting: {name: minsnr}}
optimizer: fast
lr_scheduler: {name: linear}
sampling: {num_inference_steps: 0, prompts: a}
ema: {enabled: false, decay: 0.9}
""",
    )
    found = problems(more, "loader.num_worker=3", "every=3", "data.crop=round")
    assert "must be given" in found["run_name"]
    assert "Did you mean run_name?" in found["run_nme"]
    assert "'20k steps'" in found["training.duration"]
    assert "Did you mean optimizer.learning_rate?" in found["training.learning_rate"]
    assert found["training.mixed_precision"] == "allowed: auto, no, bf16, fp16"
    assert found["training.global_batch_size"] == "allowed: a whole number from 1 or null"
    assert found["data.resolution"] == "allowed: a whole number from 8 to 65536"
    assert found["data.jitter_px"] == "allowed: a number from 0 to 20"
    assert "min_snr" in found["objective.weighting.name"]
    assert "group of settings" in found["optimizer"]
    assert found["sampling.num_inference_steps"] == "allowed: a whole number from 1"
    assert "list" in found["sampling.prompts"]
    assert "no effect" in found["ema.decay"]
    assert "Did you mean loader.num_workers?" in found["loader.num_worker"]
    assert "checkpoint.every" in found["every"]
    assert found["data.crop"] == "allowed: center, random, smart"
    assert len(found) == 16


def test_an_empty_recipe_is_told_everything_that_it_lacks(base):
    found = problems(beside(base, "{}"))
    assert {"run_name", "model.family", "objective.name", "data.source", "training.duration"} == set(found)
    assert "shapes" in found["data.source"]


def test_a_name_of_another_trainer_in_a_file_is_told_what_to_write(base):
    theirs = "extends: base.yaml\nmax_train_steps: 100\ntrain_batch_size: 4\nbatch_size: 4\ndream_training: true\n"
    found = problems(beside(base, theirs))
    assert found["max_train_steps"].endswith("in a recipe write training.duration: 100 steps")
    assert "training.per_device_batch_size: 4 and" in found["train_batch_size"]
    assert "global_batch_size" in found["batch_size"]
    assert "DREAM is not supported yet" in found["dream_training"]


@pytest.mark.parametrize("path", ["checkpoint.every", "checkpoint.backup_every", "validation.every", "logging.every"])
def test_an_interval_of_nothing_is_refused(base, path):
    assert "write null for none" in problems(base, f"{path}=0 steps")[path]
    assert "write null for none" in problems(base, f"{path}=1 epochs up to 0 steps")[path]


def test_a_key_of_another_plugin_names_it(base):
    assert "exists only with adapter.name=controlnet" in problems(base, "condition=canny")["condition"]
    found = problems(base, "objective.sigma_data=1", "sigma_data=1")
    assert "exists only with objective.name=edm" in found["objective.sigma_data"]
    assert "exists only with objective.name=edm" in found["sigma_data"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("epochs=10", "training.duration"),
        ("max_steps=10", "training.duration"),
        ("base_model=x", "model.pretrained_model_name_or_path"),
        ("trigger_word=sks", "data.captions.prefix"),
        ("block_lr=1e-5", "optimizer.learning_rates"),
        ("cache.only=true", "or set cache.path=auto"),
    ],
)
def test_what_people_try_first_is_answered_with_the_setting(base, typed, meant):
    name = typed.partition("=")[0]
    assert meant in problems(base, typed)[name]


def test_of_a_plugin_that_does_not_exist_only_the_name_is_reported(base):
    assert list(problems(base, "data.source=folders", "data.path=x")) == ["data.source"]


def test_a_key_that_is_given_twice_is_said(base):
    loaded = configs.load(str(base), ["seed=1", "lr=1e-3", "seed=2", "learning_rate=1e-3"])
    assert loaded.config.seed == 2
    assert loaded.notices == ("seed is given twice: 2 is used, 1 is ignored",)


def test_a_secret_is_refused_and_not_shown(base):
    for override in ("wandb.api_key=abc123", "wandb_key=abc123", "hub_token=abc123"):
        with pytest.raises(ConfigError, match="environment") as caught:
            load(base, override)
        assert "abc123" not in str(caught.value)
    with pytest.raises(ConfigError, match="secrets") as caught:
        load(beside(base, "extends: base.yaml\nwandb: {api_key: abc123}"))
    assert "abc123" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_keys", "path", "word"),
    [
        (["per_device_batch_size=3"], "training.global_batch_size", "multiple"),
        (["gradient_accumulation_steps=3"], "training.global_batch_size", "multiple"),
        (
            ["per_device_batch_size=4", "gradient_accumulation_steps=2", "global_batch_size=4"],
            "training.global_batch_size",
            "is not a multiple",
        ),
        (["global_batch_size=null"], "training.global_batch_size", "must be given"),
        (["lr_scheduler.warmup=21 steps"], "lr_scheduler.warmup", "longer"),
        (
            ["lr_scheduler.name=warmup_stable_decay", "lr_scheduler.warmup=11 steps", "lr_scheduler.decay=10 steps"],
            "lr_scheduler.decay",
            "after its warm-up of '11 steps'",
        ),
        (["run_name=a/b"], "run_name", "folder"),
        (["run_name="], "run_name", "folder"),
        (["seed=-1"], "seed", "from 0"),
    ],
)
def test_sections_that_do_not_fit(base, given_keys, path, word):
    assert word in problems(base, *given_keys)[path]


@pytest.mark.parametrize(
    ("recipe_says", "given", "dropped", "sizes"),
    [
        (
            "global_batch_size: 16, per_device_batch_size: 2",
            ["gradient_accumulation_steps=4"],
            "per_device",
            (16, None, 4),
        ),
        (
            "global_batch_size: 16, per_device_batch_size: 2",
            ["per_device_batch_size=1", "gradient_accumulation_steps=4"],
            "global",
            (None, 1, 4),
        ),
        (
            "global_batch_size: 16, gradient_accumulation_steps: 4",
            ["per_device_batch_size=8"],
            "gradient_accumulation",
            (16, 8, 1),
        ),
        (
            "per_device_batch_size: 2, gradient_accumulation_steps: 4",
            ["global_batch_size=6"],
            "gradient_accumulation",
            (6, 2, 1),
        ),
        ("global_batch_size: 8, per_device_batch_size: 2", ["gradient_accumulation_steps=4"], "", (8, 2, 4)),
        ("global_batch_size: 8, per_device_batch_size: 2", ["per_device_batch_size=4"], "", (8, 4, 1)),
    ],
)
def test_of_three_batch_sizes_the_recipes_own_gives_way(base, recipe_says, given, dropped, sizes):
    path = beside(base, BASE.replace("global_batch_size: 4", recipe_says))
    loaded = configs.load(path, given)
    training = loaded.config.training
    found = (training.global_batch_size, training.per_device_batch_size, training.gradient_accumulation_steps)
    assert found == sizes
    said = [notice for notice in loaded.notices if "dropped out" in notice]
    assert [f"training.{dropped}" in notice for notice in said] == ([True] if dropped else [])


def test_batches_that_fit(base):
    assert load(base, "per_device_batch_size=2").training.per_device_batch_size == 2
    assert load(base, "per_device_batch_size=2", "gradient_accumulation_steps=2")
    assert load(base, "global_batch_size=null", "per_device_batch_size=2", "gradient_accumulation_steps=3")


def test_overrides_of_a_recipe_are_seen_by_its_interpolations_but_hold_none(base):
    assert load(base, "run_name=001").output_dir == "out/001"
    assert load(base, "run_name=${seed}").output_dir == "out/${seed}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("run_name: ${oc.env:HOME}", "oc.env"),
        ("run_name: ${nothing}", "nothing"),
        ("run_name: ${oc.create:{}}", "oc.create"),
        ("run_name: ${description}\ndescription: ${run_name}", "Recursive"),
    ],
)
def test_interpolation_reaches_the_recipe_only(base, text, word):
    with pytest.raises(UserError, match=word):
        load(beside(base, f"extends: base.yaml\n{text}"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: text not in ("???", "null"))
TRICKY = st.sampled_from(
    ["001", "no", "1e-4", "a cat: on a mat", "~", "[1]", "${seed}", "\\${x", "1:30", "é\u2028", ".nan", " "]
)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(
    negative_prompt=TEXTS | TRICKY,
    description=TEXTS | TRICKY,
    rate=st.floats(1e-12, 1.0),
    prompts=st.none() | st.lists(TEXTS | TRICKY, max_size=3),
    seed=st.integers(0, 1 << 62),
    every=st.sampled_from(["null", "7 steps", "1.5M samples", "3 epochs"]),
)
def test_what_is_overridden_is_dumped_and_read_back(
    tmp_path_factory, negative_prompt, description, rate, prompts, seed, every
):
    folder = tmp_path_factory.mktemp("run")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    overrides = [f"negative_prompt={negative_prompt}", f"description={description}", f"learning_rate={rate!r}"]
    config = load(folder / "base.yaml", *overrides, f"seed={seed}", f"checkpoint.every={every}")
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"prompts": prompts})})
    assert (config.sampling.negative_prompt, config.description) == (negative_prompt, description)
    assert (config.optimizer.learning_rate, config.seed) == (rate, seed)
    (folder / "config.yaml").write_text(configs.dump(config), encoding="utf-8", newline="\n")
    again = load(folder)
    assert again == config
    assert configs.dump(again) == configs.dump(config)
    assert configs.diff(config, again) == []


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 100)
    | st.floats()
    | st.sampled_from(["", "v", "flow", "eps", "3 steps", "${seed}"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "a", "unet"]), inner, max_size=2)
    ),
    max_leaves=4,
)
PATHS = [found.path for found in fields.walk(Config, {"model": {"family": "sd"}, "objective": {"name": "v"}})]


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(PATHS), VALUES, min_size=1, max_size=3))
def test_whatever_a_recipe_says_is_a_config_or_a_users_error(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    tree: dict = {"extends": "base.yaml"}
    for path, value in changes.items():
        with contextlib.suppress(TypeError, AttributeError):  # a path inside a value that is no mapping
            tree = trees.merge(tree, trees.nested(path, value))
    (folder / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")
    try:
        config = load(folder / "config.yaml")
    except UserError:
        return
    (folder / "again.yaml").write_text(configs.dump(config), encoding="utf-8")
    assert configs.dump(load(folder / "again.yaml")) == configs.dump(config)


@pytest.mark.parametrize("name", plugins.names("objectives"))
def test_every_objective_is_dumped_and_read_back(base, name):
    given = {"noise": ", noise: {offset: 0.3}", "teacher": ", teacher: {path: a_model}"}
    more = "".join(given.get(field, "") for field in plugins.find("objectives", name).Settings.model_fields)
    config = load(beside(base, f"extends: base.yaml\nobjective: {{name: {name}{more}}}", "x.yaml"))
    dumped = beside(base, configs.dump(config), "config.yaml")
    assert load(dumped) == config


def test_switched_off_sections_are_dumped_and_read_back(base):
    config = load(base, "use_ema=False", "validation.every=null", "snr_gamma=0", "clip_grad=False")
    assert load(beside(base, configs.dump(config))) == config


def test_a_run_folder_is_a_recipe(base):
    (base.parent / "config.yaml").write_text(configs.dump(load(base)), encoding="utf-8")
    assert load(base.parent, "seed=3").seed == 3


def test_diff_says_what_changed_and_whether_a_resume_may(base):
    old, new = load(base), load(base, "seed=3", "num_workers=2", "training.duration=9 epochs", "model.unet.groups=8")
    changes = {change.path: (change.old, change.new, change.resume) for change in configs.diff(old, new)}
    assert changes == {
        "seed": (0, 3, "identity"),
        "model.unet": ("base", {"groups": 8}, "identity"),
        "loader.num_workers": (0, 2, "elastic"),
        "training.duration": ("20 steps", "9 epochs", "free"),
    }


def test_diff_knows_what_may_change_of_a_source_in_a_mix(base):
    sources = "a: {source: folder, path: x}, b: {source: csv, path: [y, z]}"
    mix = beside(base, f"extends: base.yaml\ndata: {{source: mix, sources: {{{sources}}}, weights: {{a: 1}}}}")
    given = ["data.sources.a.path=elsewhere", "data.sources.b.path=[w]", "data.sources.b.repeats=2"]
    changes = configs.diff(load(mix), load(mix, *given, "data.weights.a=3"))
    assert {change.path: change.resume for change in changes} == {
        "data.sources.a.path": "free",
        "data.sources.b.path": "free",
        "data.sources.b.repeats": "identity",
        "data.weights.a": "identity",
    }


def test_peek_reads_place_and_name_only(base):
    assert configs.peek(str(base)) == ("out/tiny", "tiny")
    assert configs.peek(str(base), ["nonsense=1", "--experiment.name=x"]) == ("out/x", "x")
    assert configs.peek(beside(base, "run_name: x"), ["output_dir=/o"]) == ("/o", "x")
    with pytest.raises(ConfigError, match="run_name"):
        configs.peek(beside(base, "seed: 1"))


def every_leaf() -> list[fields.Leaf]:
    found: dict[str, fields.Leaf] = {}
    sections = {path: (plugin.key, plugin.kind) for path, plugin in fields.plugin_sections(Config).items()}
    for section, (key, kind) in {**sections, "data": ("source", "sources")}.items():
        for name in plugins.names(kind):
            found |= merge.known(Config, {section: {key: name}})
    return list(found.values())


def test_every_setting_is_documented():
    assert [leaf.path for leaf in every_leaf() if len(leaf.doc) < 8] == []


def test_every_setting_says_what_it_allows():
    for leaf in every_leaf():
        words = fields.allowed(leaf)
        assert words, leaf.path
        assert "typing" not in words, leaf.path


def test_limits_of_a_part_of_a_setting_are_said():
    words = next(fields.allowed(leaf) for leaf in every_leaf() if leaf.path == "sampling.shift")
    assert words == "a number above 0 or empirical or null"


SHIPPED = sorted(recipe.shipped())


@pytest.mark.parametrize("name", chosen(SHIPPED, lambda name: name in SHIPPED[::5]))
def test_what_differs_from_the_defaults_is_the_whole_recipe(name, tmp_path):
    """A recipe of it alone is the same config."""
    whole = load(name, *left_to_users(name))
    short = configs.differing(whole)
    (tmp_path / "short.yaml").write_text(configs.as_yaml(short), encoding="utf-8")
    again = load(tmp_path / "short.yaml")
    assert again == whole
    assert configs.differing(again) == short
    count, every = (len(list(trees.paths(each))) for each in (short, whole.model_dump(mode="json")))
    assert count < every / 3


def test_nothing_that_is_a_default_is_among_what_differs(base):
    found = configs.differing(load(base))
    assert found["ema"] == {"decay": 0.9}
    assert found["model"]["family"] == "sd"
    assert not found.keys() & {"adapters", "optimizer", "loader", "mesh", "logging", "sampling"}
    assert configs.differing(load(base, "optimizer.beta2=0.9"))["optimizer"]["name"] == "adamw"


TEXTS = {
    # settings that are no paths or addresses: names, and what is learnt or drawn
    "caption_extension",
    "run_name", "resume_from_checkpoint", "allow_change", "fields", "text", "join", "prefix", "templates",
    "tag_separator", "prompt", "prompts", "negative_prompt", "source", "alpha_colour", "aspects", "columns", "digest",
    "config", "revision", "split", "weights", "sources", "image_column", "caption_column", "mask_column",
    "width_column", "height_column", "family", "variant", "words", "name", "logical_axis_rules", "dist_url", "sampler",
    "placeholder_token", "initializer_token", "tokens", "init", "init_pattern", "existing", "text_encoders", "word",
    "adapters", "train", "targets", "ranks", "rank_pattern", "alpha_pattern", "dropout_pattern", "trigger_phrase",
    "adamw_for", "learning_rates", "learning_rate_factors", "weight_decays", "weight_decay_exclude",
    "max_device_memory", "variants",
    "shard", "card", "control_column", "rejected_column", "preference_column", "reference_column",
    "trackers", "project", "entity", "plugins", "set", "metrics", "ignore_tensors",
    "networks", "caption", "tag_group", "separator", "undesired", "swap_blocks",
}  # fmt: skip


def test_every_setting_that_can_be_an_address_keeps_no_secret():
    """A new setting of text is an `Annotated[str, ADDRESS]`, or is put among the texts."""
    for kind in ("families", "objectives", "adapters", "sources", "optimizers", "trackers"):
        for name in plugins.names(kind):
            plugins.find(kind, name)
    classes, found = [Settings], {}
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        # The options of a job refuse secrets: what is in an sbatch file must be written out. A verb keeps none.
        # Neither do files of actions and of the queue, of words whose secrets were put aside before.
        # Plug-ins of other tests may be there still.
        files = ("daguerre.cli.", "daguerre.checkpoint.actions", "daguerre.queue.", "daguerre.outside.")
        passing = issubclass(cls, SlurmSettings) or cls.__module__.startswith(files)
        if cls.__module__.startswith("daguerre.") and not passing:
            found |= {f"{cls.__module__}.{cls.__name__}.{name}": field for name, field in cls.model_fields.items()}
    texts = {path: field for path, field in found.items() if str in _members(field.annotation)}
    kept = {path for path, field in texts.items() if ADDRESS in field.metadata}
    other = {path.rpartition("daguerre.")[2] for path in texts.keys() - kept if path.rpartition(".")[2] not in TEXTS}
    networks = {"families.clip.Settings.text_encoder"}  # its numbers
    assert {path for path in other if not path.endswith(".idx_to_prompt")} == networks  # `Labels` keeps none itself
    assert len(kept) >= 18


def _members(annotation):
    inner = {each for member in fields.alternatives(annotation) for each in (member, *get_args(member))}
    return inner if get_origin(annotation) is not Literal else set()


@pytest.mark.parametrize(
    ("recipe_name", "overriding", "told"),
    [
        (
            "sd15_dreambooth",
            ["data.sources.class=null", "run_name=x"],
            r"sampling\.prompts\[1\] refers to data\.sources\.class\.captions\.text, "
            r"and there is no data\.sources\.class .*give sampling\.prompts a value of its own",
        ),
        (
            "sd15_dreambooth",
            ["data.sources.class.generate=null"],
            r"class\.path refers to .*generate\.count, and there is no data\.sources\.class\.generate ",
        ),
        ("quickstart", ["data.resolution=70"], r"drawn and checked at 64 px.*data\.source=folder"),
        ("quickstart", ["model.vae="], r"model\.vae.*is empty.*\"base\""),
        ("sd15", ["run_name=x", "model.text_encoder="], r"model\.text_encoder.*is empty"),
        ("sd15", ["run_name=x", "model.pretrained_model_name_or_path="], "is empty, and no place or name: remove it"),
        ("quickstart", ["init_from="], r"init_from = \"\"\s+is empty; allowed: text or null"),
        ("quickstart", ["output_dir="], "is empty; allowed: text"),
    ],
)
def test_what_an_override_breaks_is_told_in_our_words(recipe_name, overriding, told):
    with pytest.raises(UserError, match=f"(?s){told}") as caught:
        configs.load(recipe_name, overriding)
    for theirs in ("Interpolation", "less than or equal", "lacks vae"):
        assert theirs not in str(caught.value)


def test_the_name_that_was_meant_comes_before_others(capsys):
    assert main.run(["train", "quickstrat"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean quickstart? `daguerre recipes` lists all.\n")
    assert main.run(["trian"]) == 2
    said = capsys.readouterr().err
    assert said.index("Did you mean `daguerre train`?") < said.index("generate")
    with pytest.raises(UserError, match=r"^there is no 'gray' in conditions\. Did you mean 'grey'\? There are: "):
        plugins.check("conditions", "gray")


@pytest.mark.parametrize("value", ["5", "unet", "{a: 1}"])
def test_networks_to_train_are_a_list(value):
    with pytest.raises(ConfigError, match=r"adapters\.full\.train = (.|\n)*allowed: a list"):
        configs.load("quickstart", [f"adapters.full.train={value}"])
