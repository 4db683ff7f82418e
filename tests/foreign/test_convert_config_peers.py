"""`daguerre convert config` for kohya's TOML, OneTrainer, ai-toolkit and SimpleTuner: every key, with its unit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import peer_configs
import pytest
import recipe_values
from test_convert_config import ODD, places, said

from daguerre.cli import main
from daguerre.cli.convert import config as convert_config
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.foreign import converters, files, signs
from daguerre.foreign.reader import REQUIRED, Reading, leaves

FILES = {
    "kohya.toml": "kohya's sd-scripts",
    "images.toml": "kohya's sd-scripts",
    "onetrainer.json": "OneTrainer",
    "ai_toolkit.yaml": "ai-toolkit",
    "simpletuner.json": "SimpleTuner",
    "config.env": "SimpleTuner",
}


KOHYAS_BASE = "stable-diffusion-v1-5/stable-diffusion-v1-5"


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Converts a config, its text changed or not: exit code, our values by path, {key: (kind, text)}, the output."""
    monkeypatch.chdir(tmp_path)
    for name, text in peer_configs.texts().items():
        path = tmp_path / ("config" if name == "backends.json" else "") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, count in {"dog": 3, "any": 12, "cats": 5}.items():
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.jpg").write_bytes(b"")

    def run(name: str, text: str | None = None):
        if text is not None:
            Path(name).write_text(text, encoding="utf-8")
        Path("ours.yaml").unlink(missing_ok=True)
        code = main.run(["convert", "config", name, "out=ours.yaml", "--all"])
        output = capsys.readouterr()
        values = recipe_values.values(Path("ours.yaml")) if Path("ours.yaml").exists() else {}
        return code, values, said(output.out), output.out + output.err

    return run


def differing(values: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {path: values.get(path) for path, value in expected.items() if values.get(path) != value}


def refused(lines: dict[str, tuple[str, str]]) -> set[str]:
    return {key for key, (kind, _) in lines.items() if kind == "refused"}


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_dropped(convert, name, tmp_path):
    code, _, lines, output = convert(name)
    tree, _ = files.read(tmp_path / name)
    assert signs.trainer(tree) == FILES[name]
    assert code == 0, output
    assert set(lines) == {key for key, _ in leaves(tree)}
    assert f"written: {tmp_path / 'ours.yaml'}, a recipe from this config of {FILES[name]}" in output


def test_kohya_with_its_data_sets(convert):
    _, values, lines, output = convert("kohya.toml")
    expected = {
        "run_name": "dogs",
        "output_dir": "out",
        "model.family": "sd",
        "model.text_encoder_layer": -2,
        "model.text_encoder_final_norm": True,
        "model.long_prompts": True,
        "objective.name": "eps",
        "objective.weighting.snr_gamma": 5,
        "objective.noise.offset": 0.05,
        "data.source": None,
        "data.resolution": 768,
        "data.random_flip": True,
        "data.interpolation": "area",
        "data.buckets.aspects": "auto",
        "data.buckets.max_aspect": 4.0,
        "data.sources.dog.captions.text": "sks dog",
        "data.sources.dog.captions.shuffle_tags": True,
        "data.sources.dog.captions.keep_tags": 1,
        "data.sources.dog.caption_dropout": 0.0,
        "data.sources.any.loss_weight": 0.5,
        # 3 x 10 images, and class images as often
        "data.weights.dog": 30.0,
        "data.weights.any": 30.0,
        # 10 epochs of 60 images in batches of 4; max_train_steps does not count beside them
        "training.duration": "150 steps",
        "checkpoint.every": "15 steps",
        "checkpoint.backup_every": "15 steps",
        "cache.path": "auto",
        "cache.texts": False,
        "training.per_device_batch_size": 4,
        "training.weights_dtype": "bfloat16",
        "training.max_grad_norm": None,
        "optimizer.name": "adamw_8bit",
        "optimizer.weight_decay": 0.1,
        "optimizer.beta2": 0.99,
        "optimizer.weight_decay_exclude": [],
        "lr_scheduler.name": "constant",
        "lr_scheduler.warmup": "100 steps",
        "ema.enabled": False,
        "validation.every": None,
    }
    assert differing(values, expected) == {}
    assert refused(lines) == {"some_new_option"}
    within = {key: text for key, (kind, text) in lines.items() if kind == "carried" and "of its source" in text}
    assert within["datasets.0.subsets.0.image_dir"] == "path of its source"
    assert within["datasets.0.subsets.0.num_repeats"] == "repeats of its source, or data.weights"
    assert {"captions.shuffle_tags of its source", "captions.keep_tags of its source"} <= {*within.values()}
    defaults = output.partition("defaults of kohya's sd-scripts")[2]
    assert "data.sources.dog.caption_dropout" in defaults
    assert "data.sources.dog.path" not in defaults


def test_what_is_not_on_this_machine_is_said(convert, monkeypatch):
    """The base of a path, and the package of an optimizer; what the hub has is downloaded."""
    monkeypatch.setattr(convert_config, "find_spec", lambda name: None)
    here = peer_configs.texts()["kohya.toml"].replace(KOHYAS_BASE, "models/mine.safetensors")
    *_, output = convert("kohya.toml", here)
    assert "not on this machine: models/mine.safetensors. Put it there" in output
    assert "not installed: bitsandbytes, for optimizer.name=adamw_8bit: " in output
    assert "pip install" in output
    monkeypatch.setattr(convert_config, "find_spec", lambda name: object())
    *_, output = convert("kohya.toml", here.replace("models/mine.safetensors", "a/b"))
    assert "not on this machine" not in output
    assert "not installed" not in output


def test_captions_beside_the_images_come_before_the_folders_words(convert, tmp_path):
    (tmp_path / "images/dog/0.txt").write_text("a dog", encoding="utf-8")
    _, values, _, _ = convert("kohya.toml")
    assert "data.sources.dog.captions.text" not in values
    assert values["data.sources.any.captions.text"] == "dog"


def test_kohyas_folders_with_repeats_in_their_names(convert, tmp_path):
    for name in ("10_sks dog", "notes"):
        (tmp_path / "sets" / name).mkdir(parents=True)
    text = (
        'pretrained_model_name_or_path = "a/b"\noutput_name = "x"\ntrain_data_dir = "sets"\nresolution = "512,512"\n'
        'max_train_steps = 800\nlr_scheduler = "cosine"\nlr_warmup_steps = 0.1\n'
    )
    code, values, lines, _ = convert("flat.toml", text)
    expected = {
        "data.source": "folder",
        "data.path": "sets/10_sks dog",
        "data.repeats": 10,
        "data.captions.text": "sks dog",
        "data.resolution": 512,
        "lr_scheduler.warmup": "80 steps",
        "training.per_device_batch_size": 1,
        "optimizer.learning_rate": 2e-6,
    }
    assert code == 0
    assert differing(values, expected) == {}
    assert not refused(lines)


def test_kohyas_masks_are_those_of_its_conditioning_images(convert, tmp_path):
    data = peer_configs.KOHYA_DATA.replace("image_dir", 'conditioning_data_dir = "masks"\n  image_dir', 1)
    assert data != peer_configs.KOHYA_DATA
    (tmp_path / "images.toml").write_text(data)
    code, values, _, _ = convert("kohya.toml")  # what those images are without a masked loss
    assert (code, values["adapters.controlnet.name"]) == (0, "controlnet")
    code, values, lines, output = convert("kohya.toml", peer_configs.KOHYA.replace("seed = 42", "masked_loss = true"))
    assert code == 0, output
    first = next(path for path in values if path.endswith(".mask_dir"))
    assert first.startswith("data.sources.")
    assert (values[first], values["objective.mask.outside_weight"]) == ("masks", 0)
    assert refused(lines) == {"some_new_option"}


def test_onetrainers_masks(convert):
    text = peer_configs.texts()["onetrainer.json"]
    given = {"masked_training": True, "unmasked_weight": 0.3, "normalize_masked_area_loss": True}
    given |= {"unmasked_probability": 0.0, "masked_prior_preservation_weight": 0.2}
    code, values, lines, output = convert("onetrainer.json", json.dumps(json.loads(text) | given))
    assert code == 0, output
    assert (values["objective.mask.outside_weight"], values["objective.mask.normalise"]) == (0.3, True)
    assert "masked_prior_preservation_weight" in refused(lines)
    assert not {"masked_training", "unmasked_weight", "unmasked_probability"} & refused(lines)


def test_onetrainer(convert):
    _, values, lines, output = convert("onetrainer.json")
    expected = {
        "run_name": "first",
        "output_dir": "workspace",
        "model.family": "sdxl",
        "adapters.full.train": ["unet", "text_encoder"],
        "model.text_encoder_layer": -3,
        "objective.weighting.name": "min_snr",
        "objective.noise.offset": 0.03,
        "data.path": "images/cats",
        "data.repeats": 3,
        "data.crop": "random",
        "data.captions.keep_tags": 2,
        "data.caption_dropout": 0.0,
        "training.duration": "20 epochs",
        "training.mixed_precision": "bf16",
        "optimizer.name": "adafactor",
        "optimizer.learning_rates.text_encoder.*": 2e-6,
        "lr_scheduler.warmup": "50 steps",  # 200 batches, of which four are an update
        "lr_scheduler.final": 0.1,
        "ema.decay": 0.998,
        "checkpoint.every": "2 epochs",
        "sampling.prompts": ["a cat: at night"],
        "sampling.guidance_scale": 6.0,
    }
    assert differing(values, expected) == {}
    # the text encoder is trained for 30 epochs there, and the run has 20
    assert refused(lines) == {"frobnicate", "huber_strength", "ema_update_step_interval"}
    assert "hidden-word" not in output + Path("ours.yaml").read_text(encoding="utf-8")


def test_onetrainers_cosine_ends_at_half_of_the_peak_which_is_said(convert):
    text = json.dumps(json.loads(peer_configs.texts()["onetrainer.json"]) | {"learning_rate_scheduler": "COSINE"})
    _, values, lines, _ = convert("onetrainer.json", text)
    assert (values["lr_scheduler.name"], values["lr_scheduler.final"]) == ("cosine", 0.55)  # 0.1 of the peak at least
    kind, why = lines["learning_rate_scheduler"]
    assert kind == "refused"
    # modules/util/lr_scheduler_util.py: 0.1 + 0.9 * 0.5 * (1 + cos(pi / 4)); half-way to 0.55 along a cosine
    assert "half-way it has 0.87 of the peak there, 0.78 here" in why


def test_ai_toolkit(convert):
    _, values, lines, _ = convert("ai_toolkit.yaml")
    expected = {
        "run_name": "first_try",
        "model.family": "sdxl",
        "data.resolution": 768,
        "data.captions.shuffle_tags": True,
        "data.caption_dropout": 0.05,
        "data.buckets.aspects": "auto",
        "training.duration": "2000 steps",
        "training.gradient_accumulation_steps": 2,
        "training.mixed_precision": "bf16",
        "optimizer.name": "adamw_8bit",
        "lr_scheduler.name": "cosine",
        "ema.decay": 0.99,
        "checkpoint.every": "250 steps",
        "checkpoint.keep": 4,
        "sampling.width": 1024,
    }
    assert differing(values, expected) == {}
    assert refused(lines) == {"config.process.0.train.weight_jitter"}


def test_simpletuner(convert):
    _, values, lines, _ = convert("simpletuner.json")
    expected = {
        "run_name": "first",
        "model.family": "sdxl",
        "data.path": "images/cats",
        "data.repeats": 10,  # nine more than once
        "data.resolution": 1024,  # one megapixel
        "data.crop": "random",
        "data.buckets.aspects": "square",
        "data.caption_dropout": 0.2,
        "training.duration": "3000 steps",
        "training.weights_dtype": "bfloat16",
        "training.mixed_precision": "auto",
        "training.max_grad_norm": None,
        "optimizer.learning_rate": 1e-6,
        "lr_scheduler.power": 0.8,
        "lr_scheduler.final": 0.4,
        "sampling.prompts": ["a cat"],
        "sampling.height": 768,
        "ema.enabled": False,
    }
    assert differing(values, expected) == {}
    assert refused(lines) == {"max_grad_norm", "layer_freeze_strategy"}


def test_simpletuners_shell_variables_are_read_and_not_run(convert):
    _, values, lines, output = convert("config.env")
    expected = {
        "run_name": "run-of-full",
        "output_dir": "out/models",
        "objective.name": "v",
        "objective.schedule.zero_terminal_snr": True,
        "training.duration": "300 steps",
        "training.attention": "fused",
        "lr_scheduler.warmup": "100 steps",  # with a warm-up, `constant` is constant_with_warmup there
        "data.path": REQUIRED,
    }
    assert differing(values, expected) == {}
    assert lines["hub_token"] == ("refused", "secrets stay in the environment")
    assert "root:" not in output


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("$((MAX_NUM_STEPS / 10))", "30 steps"),  # as its example has it
        ("$((${MAX_NUM_STEPS}-250))", "50 steps"),
        ("$(( 40 + 2 ))", "42 steps"),
    ],
)
def test_simpletuners_sums_of_a_shell_are_whole_numbers(convert, given, ours):
    text = "export MODEL_TYPE=full\nMAX_NUM_STEPS=300\nTRAIN_BATCH_SIZE=1\nLR_SCHEDULE=linear\n"
    _, values, _, output = convert("config.env", f"{text}LR_WARMUP_STEPS={given}  # a share\n")
    assert values["lr_scheduler.warmup"] == ours, output


@pytest.mark.parametrize("given", ["$((MAX_NUM_STEPS / 0))", "$((1 / NOTHING))", f"$(({'9' * 30} * 2))"])
def test_a_sum_without_a_number_is_the_users_error(convert, given):
    code, values, _, output = convert("config.env", f"MODEL_TYPE=full\nTRAIN_BATCH_SIZE=1\nLR_WARMUP_STEPS={given}\n")
    assert (code, values) == (2, {})
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["kohya.toml", "ai_toolkit.yaml", "simpletuner.json"])
def test_an_optimizer_that_is_paged_there_is_not_here_which_is_said(convert, name):
    given = {
        "ai_toolkit.yaml": ("adamw8bit", "PagedAdamW8bit"),
        "simpletuner.json": ("adamw_bf16", "bnb-adamw8bit-paged"),
    }
    text = peer_configs.texts()[name]
    if name == "kohya.toml":
        text += '\n[more]\noptimizer_type = "PagedAdamW8bit"\n'
    else:
        assert given[name][0] in text
        text = text.replace(*given[name])
    _, values, lines, _ = convert(name, text)
    assert values["optimizer.name"] == "adamw_8bit"
    assert any("not paged to the host" in text for _, text in lines.values())


def changed(name: str, given: dict[str, Any]) -> str:
    """A fixture's text with other values, by dotted paths."""
    tree = json.loads(peer_configs.texts()[name])
    for path, value in given.items():
        holder, (*groups, key) = tree, path.split(".")
        for group in groups:
            holder = holder[int(group) if isinstance(holder, list) else group]
        holder[key] = value
    return json.dumps(tree)


SIMPLETUNER = [
    ({"--train_batch_size": "16"}, {"training.per_device_batch_size": 16}, set()),
    ({"--minimum_image_size": 512}, {}, {"minimum_image_size"}),
    ({"--minimum_image_size": 0}, {}, set()),
    (
        {"--timestep_bias_strategy": "range", "--timestep_bias_begin": 200, "--timestep_bias_multiplier": 2},
        {"objective.timestep_bias.name": "range", "objective.timestep_bias.begin": 200},
        set(),
    ),
    ({"--timestep_bias_portion": 0.25}, {}, set()),  # without a strategy
    ({"--lr_scale": True}, {"optimizer.scale_lr": True}, set()),
    ({"--lr_scale": True, "--lr_scale_sqrt": True}, {}, {"lr_scale_sqrt"}),
    ({"--offset_noise": True, "--noise_offset": 0.05}, {"objective.noise.offset": 0.05}, {"offset_noise"}),
    ({"--offset_noise": True, "--noise_offset_probability": 1.0}, {"objective.noise.offset": 0.1}, set()),
    ({"--optimizer": "bnb-lion8bit-paged"}, {}, {"optimizer"}),
    (
        {"--optimizer": "optimi-lion", "--optimizer_config": "weight_decay=0.1"},
        {"optimizer.name": "lion", "optimizer.beta2": 0.99, "optimizer.weight_decay": 0.1},
        set(),
    ),
    ({"--optimizer": "prodigy"}, {}, {"optimizer"}),
    ({"--adam_weight_decay": 0.5}, {"optimizer.weight_decay": None}, set()),  # of DeepSpeed's optimizer alone
    ({"--use_ema": True, "--ema_update_interval": 10}, {"ema.decay": 0.99}, {"ema_update_interval"}),
    (
        {"--pretrained_model_name_or_path": None, "--model_family": "sd2x", "--model_flavour": "2.1"},
        {
            "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-2-1",
            "objective.name": "v",
            "objective.schedule.zero_terminal_snr": True,
        },
        set(),
    ),
    (
        {"--pretrained_model_name_or_path": None, "--model_flavour": "mine"},
        {"model.pretrained_model_name_or_path": REQUIRED},
        {"model_flavour"},
    ),
    (
        {"--model_type": "lora", "--lora_init_type": "pissa", "--lora_rank": 8},
        {"adapters.lora.init": "pissa", "adapters.lora.rank": 8},
        set(),
    ),
    (
        {"--model_type": "lora", "--lora_init_type": "pissa", "--use_dora": True},
        {"adapters.lora.kind": "dora"},
        {"lora_init_type"},
    ),
    ({"--model_type": "lora", "--lora_init_type": "loftq"}, {"adapters.lora.init": None}, {"lora_init_type"}),
    (
        {"--model_type": "lora", "--train_text_encoder": True, "--text_encoder_lr": 1e-5},
        {"adapters.lora.ranks.text_encoder_2": 16, "optimizer.learning_rates.text_encoder.*": 1e-5},
        set(),
    ),
]


@pytest.mark.parametrize(("given", "expected", "lost"), SIMPLETUNER)
def test_a_key_of_simpletuner(convert, given, expected, lost):
    code, values, lines, output = convert("simpletuner.json", changed("simpletuner.json", given))
    assert code == 0, output
    assert differing(values, expected) == {}
    assert refused(lines) == {"max_grad_norm", "layer_freeze_strategy", *lost}


DATA_SETS = [
    ([{"resolution": 512, "resolution_type": "pixel_area"}], {"data.resolution": 512}, set()),
    ([{"resolution": 512}, {"resolution": 768}], {}, {"data_backends.1.resolution"}),
    ([{"minimum_image_size": 512, "maximum_image_size": 2048}], {}, {"minimum_image_size", "maximum_image_size"}),
    ([{"train_batch_size": 8}], {}, {"train_batch_size"}),
    ([{"train_batch_size": 2}], {}, set()),  # that of all
    ([{"crop": False, "crop_aspect": "square"}], {"data.buckets.aspects": "auto"}, set()),
    ([{"crop": True}], {"data.buckets.aspects": "square", "data.crop": "random"}, set()),
    ([{"crop": True, "crop_style": "face"}], {}, {"crop_style"}),
    ([{"caption_strategy": "textfile"}], {"data.captions.lines": "drawn"}, set()),
    ([{"caption_strategy": "textfile", "disable_multiline_split": True}], {"data.captions.lines": "joined"}, set()),
    ([{"caption_strategy": "parquet"}], {}, {"caption_strategy"}),
    ([{"is_regularisation_data": True}], {}, {"is_regularisation_data"}),
    ([{"caption_strategy": "textfile", "caption_shuffle": {"enable": True, "position_start": 2}}],
     {"data.captions.shuffle_tags": True, "data.captions.keep_tags": 2}, set()),
    (
        [
            {"id": "a", "conditioning_data": "m"},
            {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "masks"},
        ],
        {"data.mask_dir": "masks", "objective.mask.outside_weight": 0},
        set(),
    ),
    ([{}, {"id": "m", "dataset_type": "conditioning", "conditioning_type": "mask"}], {}, {"conditioning_type"}),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "expected", "lost"), DATA_SETS)
def test_a_data_set_of_simpletuner(convert, tmp_path, sets, expected, lost):
    plain = {"type": "local", "instance_data_dir": "images/cats"}
    (tmp_path / "config/backends.json").write_text(json.dumps([plain | given for given in sets]))
    given = {"--resolution": 1024, "--resolution_type": "pixel_area"}
    code, values, lines, output = convert("simpletuner.json", changed("simpletuner.json", given))
    assert code == 0, output
    assert differing(values, expected) == {}
    names = {key.partition(".")[2].partition(".")[2] or key for key in refused(lines)}
    wanted = {name.partition(".")[2].partition(".")[2] or name for name in lost}
    assert wanted <= names - {"max_grad_norm", "layer_freeze_strategy"}
    assert bool(wanted) == bool(names - {"max_grad_norm", "layer_freeze_strategy"})


ONETRAINER = [
    ({"epochs": 40}, {}, {"text_encoder.stop_training_after"}),
    ({"unet.model_name": "elsewhere"}, {}, set()),  # which its code does not read
    ({"layer_filter": "attn"}, {}, {"layer_filter"}),
    ({"optimizer.amsgrad": True}, {}, {"optimizer.amsgrad"}),
    ({"optimizer.optimizer": "PRODIGY", "optimizer.d0": 1e-5}, {"optimizer.d0": 1e-5}, {"text_encoder.learning_rate"}),
    ({"optimizer.optimizer": "ADAMW", "optimizer.d0": 1e-5}, {"optimizer.d0": None}, set()),
    ({"concepts.0.type": "VALIDATION"}, {"data.path": REQUIRED}, set()),
    ({"concepts.0.image.enable_random_rotate": True}, {}, {"concepts.0.image.enable_random_rotate"}),
    ({"concepts.0.balancing_strategy": "SAMPLES", "concepts.0.balancing": 20}, {"data.repeats": 4}, set()),
    ({"generalized_offset_noise": True, "timestep_shift": 3.0}, {}, {"generalized_offset_noise", "timestep_shift"}),
    ({"learning_rate_scheduler": "REX"}, {}, {"learning_rate_scheduler"}),
    (
        {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": 3.0},
        {"lr_scheduler.name": "cosine_with_restarts", "lr_scheduler.num_cycles": 3},
        set(),
    ),
    ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, {}, {"learning_rate_scheduler"}),
    ({"training_method": "LORA", "lora_weight_dtype": "BFLOAT_16"}, {}, {"lora_weight_dtype"}),
    ({"training_method": "LORA", "lora_model_name": "l.safetensors"}, {"init_from": "l.safetensors"}, set()),
    ({"training_method": "LORA", "lora_decompose": True}, {"adapters.lora.kind": "dora"}, {"lora_decompose"}),
    (
        {"training_method": "LORA", "lora_decompose": True, "lora_decompose_output_axis": True},
        {"adapters.lora.kind": "dora"},
        set(),
    ),
]


@pytest.mark.parametrize(("given", "expected", "lost"), ONETRAINER)
def test_a_key_of_onetrainer(convert, given, expected, lost):
    code, values, lines, output = convert("onetrainer.json", changed("onetrainer.json", given))
    assert code == 0, output
    assert differing(values, expected) == {}
    assert refused(lines) == {"frobnicate", "huber_strength", "ema_update_step_interval", *lost}


def test_of_data_sets_that_say_different_things_the_second_is_told(convert):
    concept = json.loads(peer_configs.texts()["onetrainer.json"])["concepts"][0]
    other = concept | {"image": {"enable_random_flip": False, "enable_crop_jitter": True}}
    _, values, lines, _ = convert("onetrainer.json", changed("onetrainer.json", {"concepts": [concept, other]}))
    assert values["data.random_flip"] is True
    assert "concepts.1.image.enable_random_flip" in refused(lines)
    assert "concepts.1.image.enable_crop_jitter" not in refused(lines)


AI_TOOLKIT = [
    ("weight_jitter: 0.1", "max_denoising_steps: 500", {}, {"train.max_denoising_steps"}),
    ("weight_jitter: 0.1", "noise_multiplier: 1.0", {"optimizer.epsilon": 1e-6}, set()),
    ("weight_jitter: 0.1", "optimizer_params: {weight_decay: 0.2, amsgrad: true}", {"optimizer.weight_decay": 0.2},
     {"train.optimizer_params.amsgrad"}),
    ("device: cuda:0", "trigger_word: sks", {"data.captions.text": "sks"}, {"train.weight_jitter"}),
    ("folder_path: images/cats", "folder_path: elsewhere\n          trigger_word: sks",
     {"data.captions.prefix": "sks ", "data.captions.text": None},
     {"train.weight_jitter", "datasets.0.folder_path"}),  # whose captions may have the word
    ("device: cuda:0", "network: {linear: 8}", {"adapters.lora.alpha": 1.0}, {"train.weight_jitter"}),
    ("device: cuda:0", "training_seed: 7", {"seed": 7}, {"train.weight_jitter"}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected", "lost"), AI_TOOLKIT)
def test_a_key_of_ai_toolkit(convert, old, new, expected, lost):
    code, values, lines, output = convert("ai_toolkit.yaml", peer_configs.AI_TOOLKIT.replace(old, new))
    assert code == 0, output
    assert differing(values, expected) == {}
    assert refused(lines) == {f"config.process.0.{name}" for name in lost}


def test_losses_are_told_first_and_the_rest_on_request(convert, capsys):
    found = []
    for words in ([], ["--all"]):
        assert main.run(["convert", "config", "simpletuner.json", "out=mine.yaml", *words]) == 0
        found.append(capsys.readouterr().out)  # the same recipe is written again
    short, long = found
    assert short.startswith("not carried over (2)\n  max_grad_norm")
    assert long.startswith("not carried over (2)\n")
    assert "carried over: 2" in short
    assert "(listed by --all)" in short
    assert "train_batch_size" in long
    assert "train_batch_size" not in short
    Path("mine.yaml").write_text("other: words\n")
    assert main.run(["convert", "config", "simpletuner.json", "out=mine.yaml"]) == 2


@pytest.mark.parametrize(
    ("name", "old", "new", "word"),
    [
        ("onetrainer.json", "FINE_TUNE", "FINE_TUNE_VAE", "the autoencoder of a base"),
        (
            "onetrainer.json",
            "STABLE_DIFFUSION_XL_10_BASE",
            "STABLE_DIFFUSION_35",
            "a model of type STABLE_DIFFUSION_35",
        ),
        ("ai_toolkit.yaml", "      device", "      network: {type: lokr}\n      device", "a network of type lokr"),
        ("ai_toolkit.yaml", "is_xl", "is_v3", "a model of type v3"),
        ("simpletuner.json", '"full"', '"deepfloyd"', "model_type=deepfloyd"),
        ("simpletuner.json", '"sdxl"', '"sd3"', "a model of the family sd3"),
        ("config.env", "FLUX=false", "FLUX=true", "a model of the family flux"),
    ],
)
def test_what_trains_something_else_makes_no_recipe(convert, name, old, new, word):
    code, values, _, output = convert(name, Path(name).read_text(encoding="utf-8").replace(old, new))
    assert (code, values) == (2, {})
    assert f"{word}" in output
    assert "which is not supported yet: no recipe was written" in output


@pytest.mark.parametrize("name", ["kohya.toml", "config.env"])
def test_other_formats_below_a_recipe_are_refused_with_the_command(convert, name):
    with pytest.raises(configs.UserError, match=rf"daguerre convert config .*{name}"):
        recipe.layers(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.toml", "a = "), ("x.json", "{"), ("x.json", "[1]"), ("x.env", "A='")],
)
def test_a_file_that_is_damaged_is_the_users_error(convert, name, text):
    code, values, _, output = convert(name, text)
    assert (code, values) == (2, {})
    assert "Traceback" not in output


@pytest.mark.parametrize("seed", range(16))
def test_whatever_a_config_says_it_is_a_recipe_or_a_users_error(convert, seed):
    drawn = random.Random(seed)
    name = drawn.choice(["onetrainer.json", "simpletuner.json", "ai_toolkit.yaml", "kohya.json"])
    tree, _ = files.read(Path(name.replace("kohya.json", "kohya.toml")))
    name = name.replace(".yaml", ".json")
    for holder, key in drawn.sample(list(places(tree)), 3):
        holder[key] = drawn.choice(ODD)
    code, values, lines, output = convert(name, json.dumps(tree))
    assert code in (0, 2)
    assert "Traceback" not in output
    assert bool(values) == bool(lines)


@pytest.mark.parametrize("convert_theirs", [converters.CONVERT[name] for name in set(FILES.values())])
def test_a_reader_leaves_nothing_unsaid(convert_theirs):
    reading = Reading({"strange.key": 1, "run_name": "x"})
    convert_theirs(reading)
    reading.finish()
    assert not reading.rest


def test_a_config_without_end_is_the_users_error(convert):
    with pytest.raises(UserError):
        files.read(Path("nowhere.toml"))
