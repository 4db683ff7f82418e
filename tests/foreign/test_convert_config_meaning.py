"""A config of another trainer trains here what it trains there: by file, in memory, by names on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_configs
import pytest
import trainer_defaults
import yaml
from pydantic_core import PydanticUndefined

from daguerre import trees
from daguerre.cli import main
from daguerre.config import config, converted, fields, merge, recipe
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.foreign import converters, files, signs
from daguerre.foreign.names import lookup
from daguerre.foreign.reader import REQUIRED, Reading, Tables, leaves

MAXDIFFUSION = {"run_name": "x", "output_dir": "out", "dataset_name": "someone/captions", "train_text_encoder": False}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def reading_of(text: str) -> Reading:
    tree = recipe.read(file(text))
    trainer = signs.trainer(tree)
    assert trainer
    return converters.converted(trainer, tree, "theirs.yml")


def file(text: str) -> Path:
    path = Path("theirs.yml")
    path.write_text(text, encoding="utf-8")
    return path


def values_of(text: str) -> dict[str, Any]:
    return reading_of(text).values


def lost(text: str) -> set[str]:
    return {line.key for line in reading_of(text).lines if line.kind == "refused"}


# What they do without being asked

TREES = {
    "MaxDiffusion": [("sd", "eps", "huggingface"), ("sdxl", "v", "huggingface")],
    "MindOne": [("sdxl", "eps", "csv"), ("sdxl", "edm", "webdataset")],
    "open-diffusion": [("sd", "eps", "webdataset")],
    "Stable Cascade": [("cascade_c", "eps", "webdataset"), ("cascade_b", "eps", "webdataset")],
}
"""Families, objectives and sources that their configs come to."""


def settings(trainer: str) -> dict[str, fields.Leaf]:
    """Every setting that changes what is learnt."""
    found: dict[str, fields.Leaf] = {}
    for family, objective, source in TREES[trainer]:
        data = {"sources": {"images": {"source": source}}}
        known = merge.known(Config, {"model": {"family": family}, "objective": {"name": objective}, "data": data})
        found |= {
            path.replace("data.sources.images.", "data."): leaf
            for path, leaf in known.items()
            if leaf.resume == "identity" and path not in ("data.sources", "data.weights")
        }
    return found


UNASKED = {trainer: Tables(trainer.lower().replace(" ", "_").replace("-", "_"))["unasked"] for trainer in TREES}
OF_ALL = {"data.path", "data.source", "run_name", "training.duration", "validation.every"}
"""Written as well: what is trained on and how long, not how."""


@pytest.mark.parametrize("trainer", TREES)
def test_every_setting_that_changes_what_is_learnt_is_in_one_of_two_tables(trainer):
    different, same = set(UNASKED[trainer]), trainer_defaults.SAME[trainer]
    assert different & same <= {"data.source"}
    assert settings(trainer).keys() - different - same == set()
    assert (different | same) - settings(trainer).keys() <= OF_ALL


@pytest.mark.parametrize("trainer", TREES)
def test_what_is_written_differs_from_our_defaults(trainer):
    for path, leaf in settings(trainer).items():
        if path in UNASKED[trainer] and not leaf.plugin and leaf.default is not PydanticUndefined:
            assert UNASKED[trainer][path] != leaf.default, path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            foreign_configs.OPEN_DIFFUSION,
            {
                "training.max_grad_norm": None,
                "data.caption_dropout": 0.0,
                "data.held_out_fraction": 0.0,
                "optimizer.weight_decay_exclude": [],
                "training.frozen_precision": "bf16",
            },
        ),
        (
            foreign_configs.mindone(),
            {
                "training.max_grad_norm": None,
                "optimizer.epsilon": 1e-6,
                "training.mixed_precision": "bf16",
                "data.caption_dropout": 0.0,
                "ema.enabled": False,
                "seed": 42,
            },
        ),
        (
            foreign_configs.maxdiffusion(),
            {
                "training.max_grad_norm": 1.0,
                "data.interpolation": "bilinear",
                "data.held_out_fraction": 0.0,
                "training.frozen_precision": "bf16",
            },
        ),
        (
            foreign_configs.maxdiffusion(pretrained_model_name_or_path="stabilityai/stable-diffusion-xl-base-1.0"),
            {"training.max_grad_norm": None},
        ),
        (
            foreign_configs.maxdiffusion(
                pretrained_model_name_or_path="stabilityai/stable-diffusion-xl-base-1.0",
                opt_enable_grad_global_norm_clipping="True",
                max_grad_norm="0.5",
            ),
            {"training.max_grad_norm": 0.5},
        ),
        (foreign_configs.maxdiffusion(max_grad_norm="-1"), {"training.max_grad_norm": "null"}),
        (foreign_configs.maxdiffusion(weights_dtype="'bfloat16'"), {"training.stochastic_rounding": False}),
        (
            foreign_configs.CASCADE,
            {"data.caption_dropout": 0.05, "data.interpolation": "bilinear", "optimizer.weight_decay_exclude": []},
        ),
    ],
)
def test_their_defaults_are_written(text, expected):
    found = values_of(text)
    assert {path: found.get(path, "absent") for path in expected} == expected


def test_what_a_key_says_wins_over_what_they_do_without():
    text = foreign_configs.mindone().replace("weight_decay: 0.01", "weight_decay: 0.02\n            eps: 1.0e-8")
    assert (values_of(text)["optimizer.epsilon"], values_of(text)["optimizer.weight_decay"]) == (1e-8, 0.02)
    text = foreign_configs.OPEN_DIFFUSION.replace("use_ema: False", "use_ema: True\n    max_grad_norm: 0.7")
    assert (values_of(text)["ema.decay"], values_of(text)["training.max_grad_norm"]) == (0.995, 0.7)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("SDXL-base-1.0", "SDXL-refiner-1.0", "SDXL's refiner: the refiner is not planned"),
        ("target_size_as_tuple", "aesthetic_score", "SDXL's refiner"),
    ],
)
def test_what_trains_something_else_is_named_and_not_converted(old, new, words, capsys):
    path = file(foreign_configs.mindone().replace(old, new))
    assert main.run(["convert", "config", str(path), "out=ours.yaml", "--all"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("ours.yaml").exists()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"num_frames": "81"}, "a model of videos (num_frames)"),
        ({"flux_name": "flux-dev"}, "a model of flow matching (flux_name)"),
        ({"model_name": "z_image", "model_type": "T2I"}, "a model of flow matching (model_type)"),
        ({"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev"}, "(black-forest-labs/FLUX.1-dev)"),
    ],
)
def test_other_models_of_maxdiffusion_make_no_recipe_of_stable_diffusion(capsys, given, what):
    path = file(foreign_configs.maxdiffusion(**given))
    assert main.run(["convert", "config", str(path), "out=ours.yaml"]) == 2
    assert what in capsys.readouterr().err
    assert not Path("ours.yaml").exists()


def test_dreambooth_of_maxdiffusion_is_named_and_not_converted(capsys):
    path = file(foreign_configs.maxdiffusion(instance_data_dir="mine"))
    assert main.run(["convert", "config", str(path)]) == 2
    assert "daguerre train sd15_dreambooth instance_data_dir=" in capsys.readouterr().err


@pytest.mark.parametrize("freeze", ["True", None])
def test_a_text_encoder_that_mindone_freezes_is_not_trained(freeze):
    """`freeze` of its class is True unless it is given, and holds whatever is_trainable says."""
    own = "" if freeze is None else f"                      freeze: {freeze}\n"
    text = foreign_configs.mindone().replace("                      freeze: False\n", own, 1)
    reading = reading_of(text)
    assert "model.train_text_encoder" not in reading.values
    said = [line for line in reading.lines if line.kind == "refused"]
    assert [line.key.rpartition(".")[2] for line in said] == ["is_trainable"]
    assert "model.train_text_encoder=true trains it" in said[0].text


@pytest.mark.parametrize(
    ("old", "new", "key", "text"),
    [
        ("DiffusionEngine", "DiffusionEngineMultiGraph", "model.target", None),
        ("mindspore.nn.AdamWeightDecay", "gm.modules.optimizers.AdamWeightDecayZeRO1", "optimizer_config.target", None),
        ("FrozenOpenCLIPEmbedder2", "FrozenOpenCLIPEmbedder2_CLIPTokenizer", "emb_models.1.params.arch", None),
        (
            "FrozenCLIPEmbedder\n",
            "FrozenCnCLIPEmbedder\n",
            "emb_models.0.params.layer",
            "the base's own takes its place",
        ),
        ("LambdaWarmUpScheduler", "MultiStepLR", "scheduler_config.target", "MultiStepLR: the rate stays as it is"),
    ],
)
def test_other_classes_of_mindone(old, new, key, text):
    reading = reading_of(foreign_configs.mindone().replace(old, new))
    refused = {line.key: line.text for line in reading.lines if line.kind == "refused"}
    assert [text in why for name, why in refused.items() if name.endswith(key)] == [True] * (text is not None)
    assert reading.values["optimizer.epsilon"] == 1e-6


def test_new_tokens_of_mindone_are_clipped_and_all_else_is_frozen():
    text = foreign_configs.mindone().replace("Text2ImageDataset\n", "Text2ImageDatasetTextualInversion\n")
    found = values_of(text)
    assert found["training.max_grad_norm"] == 1.0
    assert "model.train_text_encoder" not in found


def test_shapes_of_mindone_are_buckets():
    shapes = "            multi_aspect: [[704, 1408], [1024, 1024]]\n"
    text = foreign_configs.mindone().replace("            target_size: 1024\n", shapes)
    found = values_of(text)
    assert (found["data.buckets.aspects"], found["data.resolution"]) == (["704/1408", "1024/1024"], 1024)


# MaxDiffusion as of today


def test_nothing_of_todays_config_is_lost():
    assert lost(foreign_configs.maxdiffusion()) == set()


def test_an_axis_of_degree_one_is_left_out_with_a_line():
    rules = "[['batch', 'data'], ['activation_length', 'fsdp'], ['activation_batch', ['data', 'fsdp', 'context']]]"
    reading = reading_of(foreign_configs.maxdiffusion(logical_axis_rules=rules))
    tree = converted.typed(Config, reading.values)["mesh"]
    assert tree["mesh_axes"] == ["data", "fsdp", "tensor"]
    assert tree["data_sharding"] == [["data", "fsdp", "tensor"]]
    assert tree["logical_axis_rules"] == [["batch", "data"], ["activation_batch", ["data", "fsdp"]]]
    said = {line.key: line.text for line in reading.lines}
    for key in ("mesh_axes", "data_sharding", "logical_axis_rules", "ici_context_parallelism"):
        assert "left out" in said[key]
    assert lost(foreign_configs.maxdiffusion(ici_context_parallelism="2")) >= {"ici_context_parallelism"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"log_period": "10000000000"}, {"logging.every": "absent"}),
        ({"guidance_rescale": "-1"}, {"sampling.guidance_rescale": "0"}),
        ({"dataset_name": "''"}, {"data.name": REQUIRED, "data.source": "huggingface"}),
        ({"dataset_type": "'grain'"}, {"data.path": REQUIRED, "data.source": "webdataset"}),
        (
            {"warmup_steps_fraction": "0.1", "learning_rate_schedule_steps": "3000"},
            {"lr_scheduler.warmup": "300 steps"},
        ),
        ({"warmup_steps_fraction": "0.0"}, {"lr_scheduler.warmup": "0 steps"}),
        ({"attention": "'tokamax_flash'"}, {"training.attention": "fused"}),
        ({"revision": "'v2'"}, {"model.revision": "v2"}),
        ({"revision": "'bf16'"}, {"model.revision": "absent"}),
    ],
)
def test_a_key_of_today(given, expected):
    found = values_of(foreign_configs.maxdiffusion(**given))
    assert {path: found.get(path, "absent") for path in expected} == expected


@pytest.mark.parametrize("kind", ["tfrecord", "grain"])
def test_records_are_refused_with_the_way(kind):
    (line,) = [x for x in reading_of(foreign_configs.maxdiffusion(dataset_type=kind)).lines if x.key == "dataset_type"]
    assert line.kind == "refused"
    assert "daguerre data pack" in line.text
    with pytest.raises(config.ConfigError, match="daguerre data pack"):
        config.load("sd14", [f"dataset_type={kind}"])


def test_of_keys_given_twice_the_last_counts_where_it_does_there(capsys):
    path = file(
        "resolution: 256\n" + foreign_configs.maxdiffusion() + "timestep_bias: {strategy: none, strategy: later}\n"
    )
    assert main.run(["convert", "config", str(path), "out=ours.yaml", "--all"]) == 0
    assert "given twice (MaxDiffusion uses the last one): resolution, timestep_bias, timestep_bias.strategy" in (
        capsys.readouterr().out
    )
    ours = recipe.read(Path("ours.yaml"))
    assert (ours["data"]["resolution"], ours["objective"]["timestep_bias"]["name"]) == (768, "later")
    path = file(foreign_configs.OPEN_DIFFUSION.replace("    workers: 6\n", "    workers: 6\n    workers: 7\n"))
    with pytest.raises(UserError, match="duplicate key workers"):
        files.read(path)


# The same meaning in a file and on the command line


def other(value: Any) -> list[Any]:
    """Other values of the kind of one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 if value > 0 else 5]
    return []


OTHERS: dict[str, list[Any]] = {
    "snr_gamma": [3.0, -1],
    "checkpoint_every": [-1],
    "guidance_rescale": [-1, 0.5],
    "warmup_steps_fraction": [0.0, 0.2],
    "max_grad_norm": [0.5, -1],
    "timestep_bias.strategy": ["earlier"],
    "timestep_bias.portion": [0.5],
    "timestep_bias.begin": [10],
    "diffusion_scheduler_config._class_name": ["", "FlaxPNDMScheduler", "EulerDiscreteScheduler"],
    "diffusion_scheduler_config.prediction_type": ["v_prediction", ""],
    "diffusion_scheduler_config.timestep_spacing": ["leading", ""],
    "attention": ["dot_product", "tokamax_flash"],
    "precision": ["DEFAULT"],
    "activations_dtype": ["bfloat16"],
    "weights_dtype": ["float32"],
    "dataset_name": ["other/captions"],
    "dataset_config_name": ["", "plain"],
    "train_split": ["test"],
    "image_column": ["image"],
    "caption_column": ["words"],
    "unet_checkpoint": ["", "a/b"],
    "revision": ["flax", "v2"],
    "dataset_save_location": ["elsewhere"],
    "jax_cache_dir": ["", "cache", "gs://b/cache"],
    "prompt": ["a: cat"],
    "negative_prompt": ["rain"],
    "run_name": ["y"],
    "output_dir": ["there"],
    "pretrained_model_name_or_path": ["CompVis/stable-diffusion-v1-4"],
    "train_text_encoder": [True],
    "mesh_axes": [["fsdp", "context", "data", "tensor"]],
    "data_sharding": [[["data", "fsdp"]]],
    "logical_axis_rules": [[["batch", "data"], ["activation_length", "fsdp"], ["embed", "fsdp"]]],
    "ici_data_parallelism": [2],
    "dcn_data_parallelism": [2],
    "lora_config.scale": [[]],
    "log_period": [1e10],
    "learning_rate_schedule_steps": [3000],
    "seed": [4],
}
NOT_ALIKE = {
    "num_train_epochs": "the length of a run on the command line, where MaxDiffusion's code reads it nowhere",
    "cache_dir": "data.cache_dir on the command line",
    "controlnet_model_name_or_path": "on the command line what a ControlNet starts from, as in diffusers' script; "
    "MaxDiffusion's training reads none",
}
BESIDE = {
    "learning_rate_schedule_steps": ["warmup_steps_fraction=0.1"],
    "max_train_steps": ["warmup_steps_fraction=0.1"],
    "from_pt": ["revision=bf16"],
    "enable_profiler": ["skip_first_n_steps_for_profiler=5", "profiler_steps=5"],
    "train_text_encoder": ["text_encoder_learning_rate=4.25e-6"],
}
"""What follows from two keys in a file wants both on the command line."""


def text_of(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, width=1 << 20).split("\n...")[0].strip()
    )


def base() -> dict[str, Any]:
    tree = yaml.safe_load(foreign_configs.maxdiffusion())
    tree["model"] = None
    del tree["model"]
    scheduler = {"prediction_type": "epsilon"}
    tree["diffusion_scheduler_config"] |= scheduler
    return tree | MAXDIFFUSION | {"pretrained_model_name_or_path": "stabilityai/stable-diffusion-2-base"}


DREAMBOOTH = {f"{kind}_{what}" for kind in ("instance", "class") for what in ("data_dir", "prompt")}
DREAMBOOTH |= {"prior_loss_weight", "num_class_images"}
"""On the command line these mean something on a recipe of DreamBooth; as a whole config they are such a recipe."""
KEYS = [key for key, _ in leaves(base()) if key not in {*NOT_ALIKE, *DREAMBOOTH}]


def outcome(name: str, given: list[str], tree: dict[str, Any] | None) -> Any:
    """The config, or that it is refused."""
    try:
        return config.load(name, given, tree).config
    except UserError:
        return "refused"


def as_recipe(tree: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    reading = converters.converted("MaxDiffusion", tree, "theirs.yml")
    return converted.typed(Config, reading.values), {line.key for line in reading.lines if line.kind == "refused"}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return as_recipe(base())[0]


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[] if number % 8 == 0 else [pytest.mark.long]) for number, key in enumerate(KEYS)]
)
def test_a_key_means_on_the_command_line_what_it_means_in_a_file(key, plain):
    before = trees.get(base(), key)
    for value in OTHERS.get(key, other(before)) or [before]:
        changed = trees.merge(trees.without(base(), key), trees.nested(key, value))
        tree, refused = as_recipe(changed)
        by_file = "refused" if key in refused else outcome("file", [], tree)
        by_name = outcome("line", [f"{key}={text_of(value)}", *BESIDE.get(key, [])], plain)
        assert by_name == by_file, (key, value)


@pytest.mark.parametrize("text", [foreign_configs.OPEN_DIFFUSION, foreign_configs.CASCADE, foreign_configs.mindone()])
def test_names_of_the_others_mean_the_same_alone(text):
    """What is read from a file by a name of the command line is what the command line makes of it."""
    reading = reading_of(text)
    counted = 0
    for line in reading.lines:
        value = reading.whole[line.key]
        only_whole = line.key.startswith(("dataset.params.filters.", "model_version", "batch_size"))  # refused alone
        if line.kind != "carried" or value == REQUIRED or only_whole or not lookup.known(line.key):
            continue
        translated = lookup.translate(line.key, text_of(value)).values
        meaning = {path.replace("adapter.", "adapters.lora."): said for path, said in translated}
        for path, said in meaning.items():
            ours = reading.values.get(path, trees.get(converted.typed(Config, reading.values), path))
            assert text_of(ours) == said or yaml.safe_load(said) == ours, line.key
            counted += 1
    assert counted > 5


# In memory


def test_a_file_of_theirs_trains_as_it_is():
    text = foreign_configs.maxdiffusion(train_text_encoder="False")
    found = config.load(str(file(text)), ["run_name=x", "max_train_steps=500", "loader.num_workers=2"])
    assert found.config.training.duration == "500 steps"
    assert found.config.lr_scheduler.warmup == "50 steps"  # a tenth of the new length, as there
    assert found.config.loader.num_workers == 2
    assert "is a config of MaxDiffusion, read as a recipe" in found.notices[0]
    assert "data.held_out_fraction: 0.0" in found.notices[1]
    assert any("left out context" in line for line in found.notices)
    assert config.peek("theirs.yml", ["run_name=x"]) == ("out", "x")
    assert config.load("theirs.yml", ["run_name=x"]).config.run_name == "x"


def test_a_file_of_which_something_would_be_lost_says_what_and_how_to_go_on():
    path = str(file(foreign_configs.maxdiffusion(enable_mllog="True", train_text_encoder="False")))
    with pytest.raises(UserError) as caught:
        config.load(path, ["run_name=x"])
    assert "enable_mllog: logging for MLPerf is not supported yet" in str(caught.value)
    assert f"daguerre convert config {path}" in str(caught.value)
    assert config.load(path, ["run_name=x", "enable_mllog=False"]).config.run_name == "x"
    with pytest.raises(UserError, match="controlnet_blocks: a ControlNet needs controlnet_filter"):
        config.load(str(file(foreign_configs.CASCADE)))


def test_a_recipe_of_ours_is_no_config_of_theirs():
    assert converted.of(Config, "sd14", []) is None
    assert converted.of(Config, "nothing.yml", []) is None
    assert config.load("sd14", ["run_name=y"]).config.run_name == "y"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("configs/templates/imagenet.yaml", "imagenet_scratch"),
        ("sd_v2_base_stage1.yaml", "sd2_scratch_stage1"),
        ("configs/templates/sd_v2_base_stage2.yaml", "sd2_scratch_stage2"),
        ("configs/laion/from-scratch.yaml", "sd2_scratch_stage1"),
        ("src/maxdiffusion/configs/base15.yml", "sd15"),
        ("from-scratch.yaml", None),
    ],
)
def test_a_template_that_is_not_here_stands_for_a_recipe(name, ours):
    assert recipe.stand_in(name) == ours


def test_the_refiners_file_is_said_to_be_not_planned():
    with pytest.raises(UserError, match="refiner is not planned"):
        recipe.locate("configs/training/sd_xl_refiner_finetune.yaml")
