"""Arguments, names and the typing of an override's text; the names of other trainers."""

from typing import Any, Literal

import pytest

from daguerre import plugins
from daguerre.config import config, fields, merge, overrides
from daguerre.config.config import Config, load
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError
from daguerre.foreign.names import lookup, tables
from daguerre.settings import Duration

TREE = {"data": {"source": "folder"}, "objective": {"name": "v"}}


def test_every_way_to_write_an_override():
    given = overrides.split(["--config", "a.yaml", "--seed", "3", "--run_name=x", "lr=1", "--dry-run"], ["--dry-run"])
    assert given.recipe == "a.yaml"
    assert given.overrides == ("seed=3", "run_name=x", "lr=1")
    assert given.flags == {"--dry-run"}
    assert overrides.split(["--checkpoint_every", "-1"]).overrides == ("checkpoint_every=-1",)
    assert overrides.split(["config=x.yaml"]).recipe == "x.yaml"
    assert overrides.split([]).recipe == ""
    assert overrides.pair("--per-device-batch-size=3") == ("per_device_batch_size", "3")
    assert overrides.pair("prompt=a=b") == ("prompt", "a=b")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["a", "b"], "one recipe"),
        (["--seed"], "needs a value"),
        (["--dry-run"], "there is no --dry-run here"),
        (["-x"], "no option"),
        (["a", "config=b"], "a and b"),
    ],
)
def test_arguments_that_make_no_sense(arguments, word):
    with pytest.raises(UserError, match=word):
        overrides.split(arguments)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("001", str, "001"),
        ("no", str | None, "no"),
        ("null", str | None, None),
        ("null", str, "null"),
        ("a cat: on a mat", str, "a cat: on a mat"),
        ("[a]", str, "[a]"),
        ("1e-4", float, 1e-4),
        ("1e6", int, 1_000_000),
        ("1.5", int, 1.5),
        ("True", bool, True),
        ("off", bool, False),
        ("no", Literal["auto", "no", "bf16"], "no"),
        ("20 steps", Duration | None, "20 steps"),
        ("null", Duration | None, None),
        ("[32, 64]", tuple[int, ...], [32, 64]),
        ("[001, no, a b]", list[str] | None, ["001", "no", "a b"]),
        ("['*.scale', b]", list[str], ["*.scale", "b"]),
        ("[*.scale, b]", list[str], ["*.scale", "b"]),
        ("{a: 1e-4}", dict[str, Any] | None, {"a": 1e-4}),
        ("[1", list[int], "[1"),
        ("fast", float, "fast"),
    ],
)
def test_text_is_typed_by_its_field(text, annotation, value):
    found = overrides.typed(text, annotation)
    assert found == value
    assert type(found) is type(value)


@pytest.fixture(scope="module")
def leaves() -> dict[str, fields.Leaf]:
    return merge.known(Config, TREE | {"model": {"family": "sd"}})


def test_every_setting_is_reached_by_its_path_and_by_a_name_of_its_own(leaves):
    for path in leaves:
        assert overrides.find(path, leaves, []) == (path, ())
        name = path.rpartition(".")[2]
        same = [other for other in leaves if other.rpartition(".")[2] == name]
        if len(same) == 1 and name not in tables.REFUSED:
            assert overrides.find(name, leaves, []) == (path, ())
    assert overrides.find("seed", leaves, []) == ("seed", ())
    assert overrides.find("model.unet.layers.n", leaves, []) == ("model.unet", ("layers", "n"))
    assert overrides.find("nothing", leaves, []) is None
    with pytest.raises(UserError, match=r"checkpoint.every, validation.every or logging.every"):
        overrides.find("every", leaves, [])


EXAMPLES = {
    "max_train_steps": ("500", {"training.duration": "500 steps"}),
    "num_examples_to_see": ("64000", {"training.duration": "64000 samples"}),
    "checkpoint_every": ("-1", {"checkpoint.every": "null"}),
    "save_every": ("1000", {"checkpoint.every": "1000 steps"}),
    "snr_gamma": ("-1", {"objective.weighting.name": "none"}),
    "clip_grad": ("False", {"training.max_grad_norm": "null"}),
    "weights_dtype": ("float32", {"weights_dtype": "float32"}),
    "activations_dtype": ("bfloat16", {"training.mixed_precision": "bf16"}),
    "ms_amp_level": ("O2", {"training.mixed_precision": "bf16"}),
    "param_fp16": ("False", {"training.weights_dtype": "float32"}),
    "use_ema": ("True", {"ema.enabled": "True"}),
    "ema_start_iters": ("5000", {"ema.name": "stable_cascade", "ema.start_steps": "5000"}),
    "ema_iters": ("100", {"ema.name": "stable_cascade", "ema.every_steps": "100"}),
    "ema_beta": ("0.9", {"ema.name": "stable_cascade", "ema.decay": "0.9"}),
    "learning_rate": ("1", {"learning_rate": "1"}),
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_a_seeds_name_becomes_ours(key):
    text, values = EXAMPLES[key]
    assert dict(lookup.translate(key, text).values) == values


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("euler_a", "euler_ancestral"),
        ("Euler a", "euler_ancestral"),
        ("k_euler_a", "euler_ancestral"),
        ("k_heun", "heun"),
        ("EulerAncestralDiscreteScheduler", "euler_ancestral"),
        ("DPM++ 2M", "dpmpp_2m"),
        ("dpmsolver++", "dpmpp_2m"),
        ("DPM++ 2M SDE", "dpmpp_2m_sde"),
        ("dpmpp_2m_sde", "dpmpp_2m_sde"),
        ("UniPC", "unipc"),
        ("uni_pc", "unipc"),
        ("UniPCMultistepScheduler", "unipc"),
        ("LCM", "lcm"),
        ("LCMScheduler", "lcm"),
    ],
)
@pytest.mark.parametrize("key", ["sampler", "--sampling.sampler"])
def test_samplers_have_the_names_of_other_programs(key, theirs, ours):
    assert load("quickstart", [f"{key}={theirs}"]).config.sampling.sampler == ours


def test_what_is_no_sampler_is_told_as_it_was_written():
    with pytest.raises(ConfigError, match=r"there is no 'DPM2 a' in samplers; there are: ddim, dpmpp_2m"):
        load("quickstart", ["sampler=DPM2 a"])


def test_a_filter_joins_a_group_and_drops_no_expression():
    given = ["data.path=x", "data.filters.punsafe=<=0.1"]
    filters = load("sd2_scratch_stage1", given).config.data.sources["images"].filters
    assert filters.root == {"pwatermark": "<=0.5", "original_width": ">=256", "original_height": ">=256"} | {
        "punsafe": "<=0.1"
    }
    alone = (
        load("sd15", ["data.source=folder", "data.path=x", "data.filters.width=64"])
        .config.data.sources["images"]
        .filters
    )
    assert str(alone) == "width == 64"
    with pytest.raises(ConfigError, match=r"is no group of fields here: give it whole, in place of .*group in"):
        load("emoji", ["data.filters.width=64"])


def test_a_kind_of_lora_is_no_adapter():
    with pytest.raises(ConfigError, match=r"'dora' in adapters. Did you mean name=lora and kind=dora\?"):
        load("sdxl", ["adapter.name=dora"])


def test_min_snr_comes_with_its_gamma():
    values = dict(lookup.translate("snr_gamma", "5").values)
    assert values == {"objective.weighting.name": "min_snr", "objective.weighting.snr_gamma": "5"}
    with pytest.raises(UserError, match="number"):
        lookup.translate("snr_gamma", "big")


def of_plugins() -> set[str]:
    """Settings of adapters as one alone is written, and of sources that are tables."""
    tokens = merge.known(Config, {"adapters": {"tokens": {"name": "tokens"}}})
    stages = [merge.known(Config, {"model": {"family": name}}) for name in ("cascade_c", "cascade_b")]
    table = merge.known(Config, {"data": {"sources": {"x": {"source": "csv"}}}})
    found = {path.replace("adapters.tokens.", "adapter.") for path in tokens}
    return found.union(*stages) | {path.replace("data.sources.x.", "data.") for path in table}


def test_what_the_tables_name_exists(leaves):
    """A path that is renamed must be renamed in the tables; the members of a mix have names of the recipe."""
    named = set(tables.SAME.values()) | {path for _, values in EXAMPLES.values() for path in values if "." in path}
    mixed = {path for path in named if path.startswith(("data.sources.", "logging.trackers."))}
    assert named - mixed <= {*leaves, *of_plugins()}
    trackers = merge.known(Config, {"logging": {"trackers": [*plugins.names("trackers")]}})
    assert {path for path in mixed if path.startswith("logging.")} <= set(trackers)
    ours = {*leaves, "data.sources"}
    assert {*tables.SAME, *tables.CONVERTED} & ours == {"resume_from_checkpoint"}  # whose value theirs may be, too


@pytest.mark.parametrize("key", tables.REFUSED)
def test_refused_names_say_what_to_use(key):
    with pytest.raises(UserError, match=r"not a Daguerre setting: .{20}"):
        lookup.translate(key, "1")


@pytest.mark.parametrize("key", tables.NOTICES)
def test_names_without_counterpart_are_one_notice(key):
    meaning = lookup.translate(key, "1")
    assert meaning.values == ()
    assert len(meaning.notices) == 1
    assert key in meaning.notices[0]


def test_names_of_later_work_are_refused_unless_they_ask_for_nothing():
    for key in ("enable_mllog", "reuse_example_batch", "scale_weight_norms"):
        with pytest.raises(UserError, match="not supported yet"):
            lookup.translate(key, "8")
    for key, text in (("reuse_example_batch", "False"), ("is_parallel", "False")):
        assert "has no effect" in lookup.translate(key, text).notices[0]


@pytest.mark.parametrize("table", [tables.CONVERTED], ids=["CONVERTED"])
def test_a_value_that_means_nothing_is_an_error(table):
    counted = {"max_train_steps", "updates", "warmup_updates", "num_examples_to_see", "checkpoint_every", "save_every"}
    counted |= {"warmup_length", "backup_every", "total_step", "num_train_epochs", "max_train_epochs", "lr_decay_steps"}
    counted |= {"checkpointing_steps", "checkpoint_step_interval", "save_every_n_steps", "save_every_n_epochs"}
    counted |= {"checkpoint_epoch_interval", "checkpoints_total_limit", "lr_warmup_steps", "resolution"}
    counted |= {
        "save_ckpt_interval",
        "save_steps",
        "log_interval",
        "log_every",
        "log_freq",
        "logging_steps",
        "max_num_ckpt",
    }
    any_text = {"webdataset_path", "path", "data_path", "dataset_name", "weight", "resume_from_checkpoint"}
    any_text |= {"instance_data_dir", "prompt", "train_data_dir", "caption_prefix", "caption_extension"}
    any_text |= {"unet_checkpoint", "dataset_save_location", "timestep_spacing"}  # what they set checks the text
    any_text |= {
        "lora_layers",
        "module_filters",
        "rank",
        "lora_rank",
        "lora_r",
        "lora_dim",
        "lora_alpha",
        "lora_dropout",
    }
    any_text |= {"tlora_min_rank", "tlora_alpha", "min_rank", "alpha_rank_scale"}
    any_text |= {"lora_r", "network_dropout", "instance_data_path", "clip_text_model_name"}
    any_text |= {"controlnet_blocks", "controlnet_bottleneck_mode", "controlnet_checkpoint_path"}
    any_text |= {"controlnet_model_name_or_path"}
    any_text |= {"validation_prompt", "validation_prompts", "sample_prompts"}
    refused = r"got 'nonsense'|train the instance set alone|not a Daguerre setting|rename the nonsense"
    refused += r"|nonsense is not available|nonsense is not known here|is accepted|is not supported yet"
    refused += r"|nonsense cannot be read|expected pairs|expected a pair|nonsense is none of"
    for key in table.keys() - lookup.RELATIVE:
        if key.rpartition(".")[2] not in counted | any_text:
            with pytest.raises(UserError, match=refused):
                lookup.translate(key, "nonsense")


BIAS = ["--timestep_bias_multiplier", "2", "--timestep_bias_strategy", "range"]
BIAS += ["--timestep_bias_begin", "200", "--timestep_bias_end", "500"]


def test_mindones_timestep_bias_means_the_same_here():
    loaded = config.load("quickstart", overrides.split([*BIAS, "--snr_gamma", "5.0"]).overrides)
    objective = loaded.config.objective
    assert objective.timestep_bias.model_dump() == {"name": "range", "multiplier": 2, "begin": 200, "end": 500}
    assert (objective.weighting.name, objective.weighting.snr_gamma) == ("min_snr", 5.0)
    assert loaded.notices == ()


@pytest.mark.parametrize("mark", ["_", "."])
def test_portion_beside_range_is_one_notice(mark):
    portion = [f"--timestep_bias{mark}portion", "0.25"]
    loaded = config.load("quickstart", overrides.split([*portion, *BIAS]).overrides)
    assert loaded.config.objective.timestep_bias.name == "range"
    assert len(loaded.notices) == 1
    assert f"timestep_bias{mark}portion has no effect with objective.timestep_bias.name=range" in loaded.notices[0]
    with pytest.raises(config.ConfigError, match=r"objective\.timestep_bias\.portion = \S+\n +no effect with 'range'"):
        config.load("quickstart", [*overrides.split(BIAS).overrides, "objective.timestep_bias.portion=0.25"])


def test_maxdiffusions_timestep_bias_means_the_same_here():
    given = ["timestep_bias.strategy=later", "timestep_bias.multiplier=2", "timestep_bias.portion=0.1"]
    bias = config.load("quickstart", given).config.objective.timestep_bias
    assert (bias.name, bias.multiplier, bias.portion) == ("later", 2, 0.1)
    assert config.load("quickstart", ["timestep_bias.strategy=none"]).config.objective.timestep_bias.name == "none"


def test_the_path_of_images_for_a_source_without_one_says_which_sources_have_it():
    with pytest.raises(
        config.ConfigError, match=r"(?s)data\.path = \S+\s+this .* only with data\.source=.*folder"
    ) as error:
        config.load("quickstart", ["data.path=my_images"])
    assert "sd15_dreambooth" not in str(error.value)


@pytest.mark.parametrize("override", ["timestep_bias_strategy=later", "snr_gamma=5", "objective.times.std=2"])
def test_a_noise_level_of_an_objective_that_has_none_says_which_have(override):
    with pytest.raises(config.ConfigError, match=r"this setting exists only with objective\.name=edm or .*v"):
        config.load("quickstart_text", [override])
    with pytest.raises(config.ConfigError, match=r"no such setting\. Did you mean objective\.times\.std"):
        config.load("quickstart", ["objective.times.sdt=2"])


def test_stable_cascades_data_section_means_the_same_here():
    given = [
        "webdataset_path=[s3://path/to/your/first/dataset/on/s3, file:/path/to/your/local/dataset.tar]",
        "dataset_filters=[[aesthetic_score, 'lambda s: s > 4.5'], [nsfw_probability, 'lambda s: s < 0.01']]",
        "multi_aspect_ratio=[1/1, 1/2, 1/3, 2/3, 3/4, 1/5, 2/5, 3/5, 4/5, 1/6, 5/6, 9/16]",
        "image_size=1024",
    ]
    shared = config.load("quickstart", given).config.data
    data = shared.sources["images"]
    assert data.source == "webdataset"
    assert data.path == ("s3://path/to/your/first/dataset/on/s3", "file:/path/to/your/local/dataset.tar")
    assert str(data.filters) == "aesthetic_score > 4.5 and nsfw_probability < 0.01"
    assert data.buckets.aspects[-1] == "9/16"
    assert data.resolution == 1024
