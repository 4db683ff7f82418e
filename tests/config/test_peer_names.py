"""What the names of diffusers' and kohya's scripts become on the command line, row by row; and what is not there."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from daguerre import plugins, trees
from daguerre.cli import main
from daguerre.config import config, fields, merge, overrides, short_forms
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError
from daguerre.foreign import signs
from daguerre.foreign.names import lookup, tables

TENSORBOARD = {"tensorboard": {"name": "tensorboard"}}
WANDB = {"wandb": {"name": "wandb", "project": None, "entity": None, "mode": None}}

CARRIED = [
    # diffusers: lengths are updates, but for epochs; the batch is that of one device
    ("train_batch_size=4", {"training.per_device_batch_size": 4, "training.gradient_accumulation_steps": 1}),
    ("train_batch_size=4", {"training.global_batch_size": None}),
    ("validation_prompt=a cat: at night", {"sampling.prompts": ["a cat: at night"]}),
    ('validation_prompts=["a", "b"]', {"sampling.prompts": ["a", "b"]}),
    ("save_steps=500", {"checkpoint.every": "500 steps"}),
    ("network_weights=style.safetensors", {"init_from": "style.safetensors"}),
    ("num_validation_images=3", {"sampling.num_images": 3}),
    ("num_train_epochs=3", {"training.duration": "3 epochs"}),
    ("num_train_epochs=0", {"training.duration": "4k steps"}),
    ("max_train_steps=700", {"training.duration": "700 steps"}),
    ("lr_warmup_steps=100", {"lr_scheduler.warmup": "100 steps"}),
    ("lr_warmup_steps=0", {"lr_scheduler.warmup": "0 steps"}),
    ("lr_scheduler=constant", {"lr_scheduler.name": "constant", "lr_scheduler.warmup": "0 steps"}),
    ("lr_scheduler=constant_with_warmup", {"lr_scheduler.name": "constant", "lr_scheduler.warmup": "500 steps"}),
    ("lr_scheduler=linear", {"lr_scheduler.name": "linear"}),
    ("lr_scheduler=cosine", {"lr_scheduler.name": "cosine"}),
    ("lr_scheduler=polynomial", {"lr_scheduler.name": "polynomial"}),
    ("lr_scheduler=cosine_with_restarts", {"lr_scheduler.name": "cosine_with_restarts"}),
    ("lr_scheduler={name: cosine, final: 0.1}", {"lr_scheduler.name": "cosine", "lr_scheduler.final": 0.1}),
    ("checkpointing_steps=250", {"checkpoint.every": "250 steps"}),
    ("checkpoints_total_limit=5", {"checkpoint.keep": 5}),
    ("checkpoints_total_limit=1", {"checkpoint.keep": 2}),
    ("resume_from_checkpoint=latest", {"resume_from_checkpoint": "latest"}),
    ("resume_from_checkpoint=out/checkpoint-500", {"resume_from_checkpoint": "step-00000500"}),
    ("center_crop=true", {"data.crop": "center"}),
    ("center_crop=False", {"data.crop": "random"}),
    ("proportion_empty_prompts=0.2", {"data.caption_dropout": 0.2}),
    ("dataloader_num_workers=8", {"loader.num_workers": 8}),
    ("adam_beta1=0.8", {"optimizer.beta1": 0.8}),
    ("adam_beta2=0.95", {"optimizer.beta2": 0.95}),
    ("adam_weight_decay=0.1", {"optimizer.weight_decay": 0.1}),
    ("adam_epsilon=1e-6", {"optimizer.epsilon": 1e-6}),
    ("max_grad_norm=0", {"training.max_grad_norm": None}),
    ("max_grad_norm=2", {"training.max_grad_norm": 2.0}),
    ("noise_offset=0.1", {"objective.noise.offset": 0.1}),
    ("prediction_type=v_prediction", {"objective.name": "v"}),
    ("use_8bit_adam=true", {"optimizer.name": "adamw_8bit"}),
    ("use_8bit_adam=false", {"optimizer.name": "adamw"}),
    ("allow_tf32=true", {"training.matmul_precision": "high"}),
    ("enable_xformers_memory_efficient_attention=true", {"training.attention": "fused"}),
    ("image_interpolation_mode=lanczos", {"data.interpolation": "lanczos"}),
    ("report_to=tensorboard", {"logging.trackers": TENSORBOARD}),
    ("report_to=none", {"logging.trackers": {}}),
    ("report_to=wandb", {"logging.trackers": WANDB}),
    ("report_to=all", {"logging.trackers": TENSORBOARD | WANDB}),
    ("log_with=wandb", {"logging.trackers": WANDB}),
    ("wandb_project=mine", {"logging.trackers.wandb.project": "mine"}),
    ("snr_gamma=5.0", {"objective.weighting.snr_gamma": 5.0}),
    ("dataset_name=someone/captions", {"data.source": "huggingface", "data.name": "someone/captions"}),
    ("unet_lr=1e-6", {"optimizer.learning_rates": {"unet.*": 1e-6}}),
    ("learning_rate_te2=1e-6", {"optimizer.learning_rates": {"text_encoder_2.*": 1e-6}}),
    ("text_encoder_lr=1e-6", {"optimizer.learning_rates": {"text_encoder*": 1e-6}}),
    # kohya
    ("output_name=mine", {"run_name": "mine"}),
    ("max_train_epochs=4", {"training.duration": "4 epochs"}),
    ("save_every_n_steps=300", {"checkpoint.every": "300 steps"}),
    ("save_every_n_epochs=2", {"checkpoint.every": "2 epochs"}),
    ("max_data_loader_n_workers=2", {"loader.num_workers": 2}),
    ("min_snr_gamma=5", {"objective.weighting.name": "min_snr", "objective.weighting.snr_gamma": 5.0}),
    ("min_snr_gamma=0", {"objective.weighting.name": "none"}),
    ("debiased_estimation_loss=true", {"objective.weighting.name": "debiased"}),
    ("masked_loss=true", {"objective.mask": {"outside_weight": 0.0, "normalise": False}}),
    ("ip_noise_gamma=0.1", {"objective.noise.input_perturbation": 0.1}),
    ("caption_dropout_rate=0.05", {"data.caption_dropout": 0.05}),
    ("shuffle_caption=true", {"data.captions.shuffle_tags": True}),
    ("loss_type=smooth_l1", {"objective.loss": {"name": "smooth_l1", "huber_c": 0.1, "huber_schedule": "snr"}}),
    ("loss_type=mae", {"objective.loss": {"name": "l1"}}),
    ("caption_tag_dropout_rate=0.1", {"data.captions.tag_dropout": 0.1}),
    ("enable_wildcard=true", {"data.captions.wildcards": True}),
    ("secondary_separator=;;;", {"data.captions.tag_group": ";;;"}),
    ("caption_prefix=photo", {"data.captions.prefix": "photo "}),
    ("flip_aug=false", {"data.random_flip": False}),
    ("random_crop=true", {"data.crop": "random"}),
    ("dataset_repeats=10", {"data.repeats": 10}),
    ("resolution=768,768", {"data.resolution": 768}),
    ("enable_bucket=true", {"data.buckets.aspects": "auto"}),
    ("optimizer_type=AdamW8bit", {"optimizer.name": "adamw_8bit"}),
    ("optimizer_type=AdaFactor", {"optimizer.name": "adafactor"}),
    ("optimizer=Lion", {"optimizer.name": "lion"}),
    ("optimizer_args=weight_decay=0.1 betas=0.8,0.9", {"optimizer.weight_decay": 0.1, "optimizer.beta2": 0.9}),
    ("full_bf16=true", {"training.weights_dtype": "bfloat16"}),
    ("fp8_base=true", {"training.base_precision": "float8"}),
    ("base_model_precision=nf4-bnb", {"training.base_precision": "nf4"}),
    ("base_model_precision=no_change", {"training.base_precision": "no"}),
    ("xformers=true", {"training.attention": "fused"}),
    ("sdpa=true", {"training.attention": "auto"}),
    ("v_parameterization=true", {"objective.name": "v"}),
    ("max_token_length=225", {"model.long_prompts": True}),
    ("max_token_length=75", {"model.long_prompts": False}),
    ("learning_rate_te1=1e-6", {"optimizer.learning_rates": {"text_encoder.*": 1e-6}}),
    ("validation_split=0.1", {"data.held_out_fraction": 0.1}),
    ("ddp_timeout=30", {"distributed.timeout_seconds": 1800.0}),
    ("torch_compile=true", {"training.compile": "blocks"}),
    ("sample_sampler=euler", {"sampling.sampler": "euler"}),
    ("training_comment=first try", {"description": "first try"}),
    # SimpleTuner
    ("caption_dropout_probability=0.1", {"data.caption_dropout": 0.1}),
    ("validation_guidance=4", {"sampling.guidance_scale": 4.0}),
    # LoRA
    ("network_dim=8", {"adapters.lora.rank": 8}),
    ("network_alpha=4", {"adapters.lora.alpha": 4.0}),
    ("network_dropout=0.1", {"adapters.lora.dropout": 0.1}),
    ("rank=4", {"adapters.lora.rank": 4, "adapters.lora.alpha": None}),
    ("lora_rank=4", {"adapters.lora.rank": 4}),
    ("lora_alpha=2", {"adapters.lora.alpha": 2.0}),
    ("lora_dropout=0.1", {"adapters.lora.dropout": 0.1}),
    ("use_dora=true", {"adapters.lora.kind": "dora"}),
    ("tlora_min_rank=2", {"adapters.lora.tlora_min_rank": 2, "adapters.lora.tlora_alpha": 1.0}),
    ("loraplus_unet_lr_ratio=4", {"optimizer.learning_rate_factors": {"unet.*.lora_B.*": 4.0}}),
    ("loraplus_text_encoder_lr_ratio=4", {"optimizer.learning_rate_factors": {"text_encoder*.lora_B.*": 4.0}}),
    ("lora_layers=to_q, to_v", {"adapters.lora.targets": ["to_q", "to_v"]}),
    ("module_filters=['.attn']", {"adapters.lora.targets": ["*.to_*"]}),
    ("network_module=networks.lora", {"adapters.lora.rank": 4, "adapters.lora.alpha": 1.0}),
    # our own, which a pattern must not catch
    ("cache_gb=5", {"data.cache_gb": 5.0}),
    ("cache_latents=true", {"cache.images": True, "cache.texts": False, "cache.path": "auto"}),
    ("cache_text_encoder_outputs=true", {"cache.images": False, "cache.texts": True, "cache.path": "auto"}),
]
SAID = {
    "conditioning_data_dir=none": "no folder is given",
    "use_controlnet=true": "adapter.name=controlnet",
    # one line and nothing else
    "logging_dir=logs": "own folder",
    "validation_epochs=5": "checkpoint.every",
    "validation_steps=100": "checkpoint.every",
    "sample_every_n_steps=100": "checkpoint.every",
    "sample_every_n_epochs=1": "checkpoint.every",
    "persistent_data_loader_workers=true": "loader.num_workers",
    "save_precision=fp16": "daguerre convert export",
    "save_model_as=safetensors": "daguerre convert export",
    "v2=true": "the base model sets its text encoder",
    "no_half_vae=true": "the autoencoder computes in float32",
    "lr_num_cycles=1": "lr_scheduler=constant does not restart",
    "lr_scheduler_num_cycles=3": "lr_scheduler=constant does not restart",
    "network_dim=none": "has no effect",
    "caption_extension=.txt": "is the default",
    "loss_type=l2": "is the default",
}
REFUSED = {
    # two meanings, both named
    "clip_skip=2": ("kohya", "diffusers", "text_encoder_layer=-2"),
    "cache_dir=x": ("data.cache_dir", "HF_HOME"),
    "validation_seed=1": ("sampling.seed", "kohya"),
    "offset_noise=true": ("train_dreambooth.py", "SimpleTuner", "noise_offset="),
    "lr_warmup_steps=0.1": ("a share of the run",),
    "batch_size=4": ("per_device_batch_size", "global_batch_size"),
    # another way
    "min_bucket_reso=256": ("data.buckets.max_aspect",),
    "max_bucket_reso=1024": ("data.buckets.max_aspect",),
    "min_timestep=100": ("objective.timestep_bias",),
    "multires_noise_iterations=6": ("objective.noise.pyramid",),
    "multires_noise_discount=0.3": ("objective.noise.pyramid",),
    "resolution=512,768": ("627",),
    "dataset_config=x.toml": ("daguerre convert config",),
    "config_file=x.toml": ("daguerre convert config",),
    "max_timestep=900": ("objective.timestep_bias",),
    "save_last_n_steps=300": ("checkpoint.keep",),
    "save_last_n_epochs=3": ("checkpoint.keep",),
    "max_train_samples=100": ("data.filters chooses",),
    "optimizer_type=DAdaptAdam": ("adafactor, adamw",),
    "optimizer_args=momentum=0.9": ("momentum=0.9 is not known here",),
    "hub_token=hidden-word": ("never put secrets",),
    # not there yet
    "network_module=networks.oft": ("networks.oft is not read; networks.lora, networks.lora_fa, lycoris.kohya are",),
    "network_args=conv_dim=4": ("add network_module=networks.lora",),
    "scale_weight_norms=1": ("a limit on the norm of a LoRA's layers is not supported yet",),
    "hub_model_id=me/x": ("`daguerre publish RUN OWNER/NAME`",),
    "push_to_hub=true": ("`daguerre publish RUN OWNER/NAME`",),
    "color_aug=true": ("is not supported yet",),
    "alpha_mask=true": ("data.alpha_mask", "objective.mask={}"),
    "weighted_captions=true": ("is not supported yet",),
}


@pytest.mark.parametrize(("given", "values"), CARRIED, ids=[given for given, _ in CARRIED])
def test_a_name_is_our_setting_with_its_unit(given, values):
    found = config.load("sd15", overrides.split([f"--{given.partition('=')[0]}", given.partition("=")[2]]).overrides)
    tree = short_forms.flat(found.config.model_dump(mode="json"))
    assert {path: trees.get(tree, path) for path in values} == values


@pytest.mark.parametrize("given", SAID)
def test_a_name_that_sets_nothing_is_one_line(given):
    found = config.load("sd15", [given])
    assert found.config == config.load("sd15").config
    assert len(found.notices) == 1
    assert SAID[given] in found.notices[0]


@pytest.mark.parametrize("given", REFUSED)
def test_a_refused_name_says_what_to_use(given):
    with pytest.raises(ConfigError) as caught:
        config.load("sd15", [given])
    assert all(word in str(caught.value) for word in REFUSED[given]), str(caught.value)
    assert "Did you mean" not in str(caught.value)
    assert "hidden-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "path", "value", "said"),
    [
        (["lr_scheduler=constant", "lr_warmup_steps=500"], "lr_scheduler.warmup", "0 steps", "constant_with_warmup"),
        (["num_train_epochs=100", "max_train_steps=800"], "training.duration", "800 steps", "number of updates"),
        (["max_train_steps=800", "max_train_epochs=2"], "training.duration", "2 epochs", "number of epochs"),
        (["max_train_steps=0", "num_train_epochs=2"], "training.duration", "2 epochs", ""),
    ],
)
def test_what_counts_beside_what_is_as_in_their_scripts(given, path, value, said):
    found = config.load("sd15", given)
    assert trees.get(short_forms.flat(found.config.model_dump(mode="json")), path) == value
    assert len(found.notices) == bool(said)
    assert not said or (said in found.notices[0] and "has no effect" in found.notices[0])


TOGETHER = [
    (["shuffle_caption=true", "keep_tokens=2"], "data.captions.keep_tags", 2),
    (["shuffle_caption=true", "caption_separator=;"], "data.captions.tag_separator", ";"),
    (["enable_bucket=true", "bucket_reso_steps=32"], "data.buckets.step", 32),
    (["v_parameterization=true", "zero_terminal_snr=true"], "objective.schedule.zero_terminal_snr", True),
    (["lr_scheduler=polynomial", "lr_power=2"], "lr_scheduler.power", 2.0),
    (["lr_num_cycles=3", "lr_scheduler=cosine_with_restarts"], "lr_scheduler.num_cycles", 3),
    (["lr_scheduler=cosine_with_restarts", "lr_scheduler_num_cycles=1"], "lr_scheduler.num_cycles", 1),
    (["lr_scheduler=cosine_with_min_lr", "lr_scheduler_min_lr_ratio=0.1"], "lr_scheduler.final", 0.1),
    (["lr_scheduler=warmup_stable_decay", "lr_decay_steps=200"], "lr_scheduler.decay", "200 steps"),
    (["use_ema=true", "ema_decay=0.99"], "ema.decay", 0.99),
    (["network_module=networks.lora", "network_dim=8"], "adapters.lora.ranks", {"text_encoder": 8}),
    (["network_module=networks.lora", "network_train_unet_only=true"], "adapters.lora.ranks", {}),
    (["network_module=networks.lora", "network_dim=8", "network_alpha=0"], "adapters.lora.alpha", 8.0),
    (["network_module=networks.lora"], "adapters.lora.targets", "attention+ff"),
    (["network_module=lycoris.kohya", "network_args=algo=loha"], "adapters.lora.kind", "loha"),
    (["network_module=lycoris.kohya", "network_args=preset=attn-only"], "adapters.lora.targets", "attention"),
    (["network_module=networks.lora", "network_args=conv_dim=2"], "adapters.lora.targets", "attention+ff+conv"),
    (
        ["network_module=networks.lora", "network_args=conv_dim=2"],
        "adapters.lora.rank_pattern",
        {"conv[12]": 2, "*samplers.*.conv": 2},
    ),
    (["min_rank=1", "alpha_rank_scale=2"], "adapters.lora.tlora_alpha", 2.0),
    (["network_dim=8", "loraplus_lr_ratio=16"], "optimizer.learning_rate_factors", {"*.lora_B.*": 16.0}),
    (
        ["base_weights=a.safetensors", "base_weights_multiplier=0.5"],
        "model.loras",
        [{"path": "a.safetensors", "strength": 0.5}],
    ),
]


@pytest.mark.parametrize(("given", "path", "value"), TOGETHER, ids=lambda row: row[-1] if isinstance(row, list) else "")
def test_names_that_need_another(given, path, value):
    found = config.load("sd15", given)
    assert trees.get(short_forms.flat(found.config.model_dump(mode="json")), path) == value
    assert not found.notices


def test_kohyas_folder_of_conditions_holds_masks_of_a_masked_loss_else_control_images():
    given = ["source=folder", "train_data_dir=x", "conditioning_data_dir=y"]
    assert config.load("sd15", given).config.data.sources["images"].control_dir == "y"
    assert config.load("sd15", [*given, "masked_loss=true"]).config.data.sources["images"].mask_dir == "y"


def test_two_rates_are_one_mapping():
    found = config.load("sdxl", ["learning_rate_te1=1e-6", "learning_rate_te2=2e-6"])
    assert found.config.optimizer.learning_rates == {"text_encoder.*": 1e-6, "text_encoder_2.*": 2e-6}
    assert not found.notices


def test_train_data_dir_is_a_folder_of_images_or_a_data_set_of_kohyas(tmp_path):
    found = config.load("sd15", [f"train_data_dir={tmp_path}"]).config.data.sources["images"]
    assert (found.source, found.path) == ("folder", str(tmp_path))
    (tmp_path / "10_sks dog").mkdir()
    with pytest.raises(ConfigError, match=r"data.repeats=10, with data.captions.text='sks dog'"):
        config.load("sd15", [f"train_data_dir={tmp_path}"])


def test_prompts_with_options_are_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n", encoding="utf-8")
    assert config.load("sd15", [f"sample_prompts={path}"]).config.sampling.prompts_file == str(path)
    path.write_text("a cat --w 512 --d 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="options after its prompts"):
        config.load("sd15", [f"sample_prompts={path}"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gradient_checkpointing"], ["gradient_checkpointing=true"]),
        (["--center-crop", "--random_flip"], ["center-crop=true", "random_flip=true"]),
        (["--use_ema", "True", "--xformers"], ["use_ema=True", "xformers=true"]),
        (["--enable_bucket", "run_name=x"], ["enable_bucket=true", "run_name=x"]),
        (["--seed", "3", "--v2"], ["seed=3", "v2=true"]),
        (["--guidance_scale", "-1"], ["guidance_scale=-1"]),
        (["--validation_prompts", "a cat", "a dog", "seed=3"], ['validation_prompts=["a cat", "a dog"]', "seed=3"]),
        (["--optimizer_args", "a=1", "b=2", "--v2"], ['optimizer_args=["a=1", "b=2"]', "v2=true"]),
    ],
)
def test_switches_and_lists_as_their_scripts_take_them(words, expected):
    assert list(overrides.split(["sd15", *words]).overrides) == expected
    assert overrides.split([*words[:1], "sd15"] if len(words) == 1 else ["sd15", *words]).recipe == "sd15"


@pytest.mark.parametrize("words", [["--run_name"], ["--run_name", "--seed=3"], ["--seed", "--center_crop"]])
def test_other_options_need_a_value(words):
    with pytest.raises(UserError, match="needs a value"):
        overrides.split(words)


@pytest.mark.parametrize("name", sorted(tables.FLAGS | tables.WORDS | tables.PAIRS))
def test_a_switch_is_a_name_that_means_something(name):
    known = name in {*tables.SAME, *tables.CONVERTED, *tables.NOTICES}
    known = known or any(fnmatchcase(name, row) for row in tables.LATER) or short_forms.SWITCH.fullmatch(name)
    assert known or any(path.endswith(f".{name}") for path in settings_that_exist()), name


def settings_that_exist() -> set[str]:
    """The paths of all settings, whichever plug-ins are chosen."""
    found = set()
    sections = {path: (plugin.key, plugin.kind) for path, plugin in fields.plugin_sections(Config).items()}
    for section, (key, kind) in {**sections, "data": ("source", "sources")}.items():
        for name in plugins.names(kind):
            found |= set(merge.known(Config, {section: {key: name}}))
    return found


def test_no_row_of_a_part_that_is_there():
    there = {f"{kind}/{name}" for kind in plugins.FOLDERS for name in plugins.names(kind)}
    there |= {f"verb/{name}" for verb in ("", "data", "convert") for name in main.verbs(verb)}
    there |= {f"setting/{path}" for path in settings_that_exist()}
    stale = {
        part: [name for name in there for pattern in patterns if fnmatchcase(name, pattern)]
        for part, patterns in tables.PARTS.items()
    }
    assert not {part: names for part, names in stale.items() if names}
    assert set(tables.PARTS) <= {part for part, _ in tables.LATER.values()}


def test_every_other_part_is_one_that_no_name_of_ours_would_show():
    others = {"ControlNet for Stable Cascade", "ControlNet", "LoRA", "new tokens", "a recipe"}
    others |= {"a profiling service of Google (profiler.steps records updates here)"}
    parts = {part for part, _ in tables.LATER.values()}
    assert parts - set(tables.PARTS) <= others
    files = {re.split(" is not | for | have ", what)[0] for what in signs.LATER.values()}
    assert files - set(tables.PARTS) <= others | {"SDXL's refiner"}


def test_a_test_for_stale_rows_sees_one(monkeypatch):
    monkeypatch.setitem(tables.PARTS, "DREAM", ["adapters/full"])
    with pytest.raises(AssertionError):
        test_no_row_of_a_part_that_is_there()


@pytest.mark.parametrize("table", [tables.SAME, tables.CONVERTED, tables.BESIDE])
def test_names_are_written_as_they_are_looked_up(table):
    assert not [name for name in table if "-" in name]


def test_no_table_catches_a_setting_of_ours():
    """But for those that have two meanings, and those whose value is also understood as other trainers write it."""
    names = {name for path in settings_that_exist() for name in (path, path.rpartition(".")[2])}
    for name in sorted(names - {"cache_dir", "batch_size", "attention", "scheduler"}):
        assert lookup.translate(name, "1", lambda _: None).values, name


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("train_batch_siz=1", "train_batch_size"),
        ("learning_rte=1", "optimizer.learning_rate"),
        ("global_batchsize=8", "training.global_batch_size"),
        ("caption_dropout_prob=0.1", "data.caption_dropout"),
        ("eval_batch_size=4", ""),
        ("num_batch_size=4", ""),
        ("optimizer.lr=1", "optimizer.learning_rate"),
        ("optimizer.type=lion", "optimizer.name"),
        ("optimizer.weight_decy=1", "optimizer.weight_decay"),
        ("lr_scheduler.warmup_steps=1", "lr_scheduler.warmup"),
        ("training.grad_accum=1", "training.gradient_accumulation_steps"),
        ("training.dtype=bf16", ""),
        ("sampling.cfg=3", ""),
        ("training.epochs=3", ""),
        ("max_len=4", ""),
        ("warmup_ratio=4", ""),
    ],
)
def test_only_a_misspelt_name_is_answered_with_another(given, hint):
    with pytest.raises(ConfigError) as caught:
        config.load("sd15", [given])
    assert (f"Did you mean {hint}?" in str(caught.value)) if hint else "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("training.epochs=3", "the length of a run is training.duration"),
        ("instance_token=sks", "instance_prompt='a photo of sks dog'"),
        ("data.dir=photos", "data.source=folder"),
        ("ema=false", "ema.enabled=false switches it off"),
        ("validation=null", "validation.every=null switches it off"),
        ("optimizer=null", "optimizer is one of"),
        ("data.sources.images=null", "there must be one at least"),
        ("training.compile=true", "allowed: false, blocks"),
        ("scheduler=cosine", "such as lr_scheduler.name=cosine"),
        ("prompts=a star", """such as prompts='["a star"]'"""),
    ],
)
def test_a_refusal_says_what_serves(given, said):
    with pytest.raises(ConfigError) as caught:
        config.load("quickstart", [given])
    assert said in str(caught.value)


COMMANDS = [
    # as the guides of the scripts have them, but for the program and its recipe
    "sd15 --train_data_dir images --use_ema --resolution=512 --center_crop --random_flip --train_batch_size=1 "
    "--gradient_accumulation_steps=4 --gradient_checkpointing --mixed_precision=fp16 --max_train_steps=15000 "
    "--learning_rate=1e-05 --max_grad_norm=1 --lr_scheduler=constant --lr_warmup_steps=0 --output_dir=out",
    "sdxl --enable_xformers_memory_efficient_attention --proportion_empty_prompts=0.2 --train_batch_size=1 "
    "--gradient_accumulation_steps=4 --gradient_checkpointing --max_train_steps=10000 --use_8bit_adam "
    "--learning_rate=1e-06 --lr_scheduler=constant --lr_warmup_steps=0 --mixed_precision=fp16 --report_to=tensorboard "
    "--validation_epochs 5 --checkpointing_steps=5000 --validation_prompt=x",
    "sd15_dreambooth --instance_data_dir=dog --instance_prompt=dog --class_prompt=dogs --with_prior_preservation "
    "--prior_loss_weight=1.0 --train_batch_size=1 --gradient_accumulation_steps=1 --learning_rate=5e-6 "
    "--lr_scheduler=constant --lr_warmup_steps=0 --num_class_images=200 --max_train_steps=800 --use_8bit_adam",
    "sd15 --output_name=x --train_data_dir=images --resolution=512,512 --train_batch_size=1 --learning_rate=1e-5 "
    "--max_train_epochs=10 --save_every_n_epochs=1 --optimizer_type=AdamW8bit --xformers --mixed_precision=fp16 "
    "--gradient_checkpointing --save_model_as=safetensors --seed=42 --enable_bucket --shuffle_caption --keep_tokens=1 "
    "--caption_extension=.txt --max_data_loader_n_workers=2 --optimizer_args weight_decay=0.1 betas=0.9,0.99",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:12])
def test_commands_of_their_guides(command):
    given = overrides.split(command.split())
    found = config.load(given.recipe, given.overrides).config
    twice = given.recipe == "sd15_dreambooth"  # as many class images
    assert found.training.per_device_batch_size == 1 + twice
    assert found.training.global_batch_size in (None, 1 + twice)
    assert json.dumps(found.model_dump(mode="json"))


@pytest.mark.parametrize("head", ["diffusers' example scripts", "kohya's sd-scripts"])
def test_the_names_on_the_page_are_tested(head):
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|") and "---" not in line][1:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    every = (*(given for given, _ in CARRIED), *SAID, *REFUSED, *(row for given, _, _ in TOGETHER for row in given))
    tested = {row.partition("=")[0] for row in every}
    said = " ".join(COMMANDS)
    assert len(named) > 20
    assert not [name for name in sorted(named) if name not in tested and f"--{name}" not in said], named - tested


def test_a_command_of_diffusers_controlnet_script_is_split_into_its_options():
    words = ["sd15_controlnet", "--validation_image", "1.png", "2.png", "--validation_prompt", "red circle", "cyan one"]
    given = overrides.split([*words, "--max_train_steps=3"])
    loaded = config.load(given.recipe, given.overrides)
    assert loaded.config.sampling.prompts == ["red circle", "cyan one"]
    assert loaded.config.training.duration == "3 steps"
    assert any(line.startswith("validation_image is ignored") for line in loaded.notices)
    one = overrides.split(["sd15", "--validation_prompt", "a cat: at night"])
    assert config.load("sd15", one.overrides).config.sampling.prompts == ["a cat: at night"]


@pytest.mark.parametrize("given", ["rank=4", "lora_rank=4", "adapter.rank=4", "adapters.lora.rank=4"])
def test_another_rank_beside_the_alpha_of_a_recipe_is_told(given):
    """diffusers' `--rank` is alpha, too; sdxl_lora has alpha 16 for rank 32."""

    def told(*more):
        notices = config.load("sdxl_lora", ["data.source=folder", "data.path=x", *more]).notices
        return [line for line in notices if "alpha" in line]

    (line,) = told(given)
    assert line.startswith("adapters.lora.rank=4 keeps the recipe's alpha 16, which was for rank 32")
    for more in (["adapter.rank=32"], [given, "adapter.alpha=4"], [given, "adapter.alpha=null"]):
        assert not told(*more)
    with pytest.raises(ConfigError, match=r"adapters\.lora\.rank"):
        told("rank=0")


def test_an_alpha_that_is_no_number_and_a_rank_that_is_left_out(tmp_path):
    """The first is the user's error, of the second the usual rank counts."""
    for alpha, rank, lines in ((16, 4, 1), (16, 16, 0), ("much", 4, None)):
        tree = {"extends": "sd15_lora", "adapters": {"lora": {"alpha": alpha}}}
        (tmp_path / "own.yaml").write_text(json.dumps(tree | {"run_name": "x"}))
        given = [str(tmp_path / "own.yaml"), ["data.source=folder", "data.path=x", f"adapter.rank={rank}"]]
        if lines is None:
            with pytest.raises(ConfigError, match=r"adapters\.lora\.alpha"):
                config.load(*given)
        else:
            assert len([line for line in config.load(*given).notices if "keeps the recipe's alpha" in line]) == lines


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("sd15_lora", "train_text_encoder=true", "adapters.lora.ranks.text_encoder=RANK extends it"),
        ("sd15_lora", "train_unet=false", "adapters.lora.ranks.unet=null keeps it off"),
        ("sd15_controlnet", "train_text_encoder=true", "controlnet, which trains no component"),
    ],
)
def test_a_switch_of_full_says_what_the_recipe_has_in_its_place(name, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config.load(name, ["data.source=folder", "data.path=x", given])
