"""What MaxDiffusion's keys mean here: flat configs such as base14.yml, base21.yml or base_xl.yml."""

from __future__ import annotations

from typing import Any

from daguerre.commands import convert_config_models as models
from daguerre.commands.convert_config_reading import REQUIRED, Reading

UNASKED = {
    # What it does without a key: no averages, the caption of every sample, decay of every weight.
    "ema.enabled": False,
    "data.caption_dropout": 0.0,
    "optimizer.weight_decay_exclude": [],
}

SAME = {
    "learning_rate": "optimizer.learning_rate",
    "scale_lr": "optimizer.scale_lr",
    "resolution": "data.resolution",
    "seed": "seed",
    "from_pt": "model.pickled_weights",
    "per_device_batch_size": "training.per_device_batch_size",
    "max_grad_norm": "training.max_grad_norm",
    "adam_b1": "optimizer.beta1",
    "adam_b2": "optimizer.beta2",
    "adam_eps": "optimizer.epsilon",
    "adam_weight_decay": "optimizer.weight_decay",
    "random_flip": "data.random_flip",
    "enable_data_shuffling": "data.shuffle",
    "weights_dtype": "training.weights_dtype",
    "guidance_rescale": "sampling.guidance_rescale",
    "num_inference_steps": "sampling.num_inference_steps",
    "timestep_bias.strategy": "objective.timestep_bias.name",
}

NOTICES = {
    "write_metrics": "numbers are always written, to metrics/metrics.jsonl of the run",
    "gcs_metrics": "numbers stay in the run folder",
    "metrics_file": "numbers are written to metrics/metrics.jsonl of the run",
    "save_config_to_gcs": "config.yaml of the run is written always",
    "cache_latents_text_encoder_outputs": "latents and texts are computed as they are needed; the cache verb is not "
    "there yet",
    "tokenize_captions_num_proc": "loader.num_workers is the number of processes that read",
    "transform_images_num_proc": "loader.num_workers is the number of processes that read",
    "model_name": "the networks are those of pretrained_model_name_or_path",
    "flash_block_sizes": "the kernel chooses its blocks",
    "split_head_dim": "an order of axes of another engine",
    "hardware": "training.device",
    "max_train_samples": "max_train_steps is the length of the run",
    "num_train_epochs": "max_train_steps is the length of the run",
    "cache_dir": "the hub's own cache, HF_HOME",
    "save_final_checkpoint": "the end of a run is always saved",
    "checkpoint_dir": "a run keeps its checkpoints in its own folder",
    "tensorboard_dir": "a run keeps its event files in its own folder",
    "skip_first_n_steps_for_profiler": "profiling is not part of a run",
    "profiler_steps": "profiling is not part of a run",
    "lightning_from_pt": "a .safetensors file says itself what it is",
    "norm_num_groups": "the model's own config says it",
}

OFF: dict[str, tuple[Any, str]] = {
    "enable_mllog": (False, "numbers are written to metrics/metrics.jsonl of the run"),
    "reuse_example_batch": (False, "every update has its own batch"),
    "use_controlnet": (False, "ControlNet is not there yet"),
    "train_data_dir": ("", "dataset_name says what is trained on"),
    "base_output_directory": ("", "output_dir is the folder of the runs"),
    "cache_dreambooth_dataset": (False, "the cache verb is not there yet"),
    "diffusion_scheduler_config.rescale_zero_terminal_snr": (False, "the schedule is the model's own"),
}
"""Keys with the one value that asks for nothing, and what that means."""

WITH_BIAS: dict[str, tuple[str, ...]] = {"earlier": ("multiplier", "portion"), "later": ("multiplier", "portion")}
WITH_BIAS |= {"range": ("multiplier", "begin", "end"), "none": ()}


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    for key in ("run_name", "output_dir"):
        reading.carry(key, key, reading.get(key) or REQUIRED)
    _model(reading)
    for key, path in SAME.items():
        reading.carry(key, path)
    _data(reading)
    _schedule(reading)
    _bias(reading)
    _sampling(reading)
    reading.carry("log_period", "logging.every", f"{reading.get('log_period')} steps")
    for key in ("max_train_steps", "checkpoint_every", "snr_gamma", "activations_dtype", "precision", "attention"):
        reading.alias(key)
    for key in ("jax_cache_dir", "enable_profiler"):
        reading.alias(key)
    for key in [*reading.keys("ici_*"), *reading.keys("dcn_*"), "mesh_axes", "logical_axis_rules", "data_sharding"]:
        reading.carry(key, f"mesh.{key}")
    for key, text in NOTICES.items():
        reading.notice(key, text)
    for key, (value, what) in OFF.items():
        reading.expect(key, value, what)
    reading.assume(UNASKED)


def _model(reading: Reading) -> None:
    place = reading.get("pretrained_model_name_or_path", REQUIRED)
    found = models.base(place)
    why = found.doubt
    reading.assume({"model.family": found.family})
    reading.carry("pretrained_model_name_or_path", "model.pretrained_model_name_or_path", why=why)
    prediction = models.PREDICTIONS.get(str(reading.get("diffusion_scheduler_config.prediction_type")))
    if prediction:
        reading.carry("diffusion_scheduler_config.prediction_type", "objective.name", prediction)
    reading.notice("diffusion_scheduler_config.prediction_type", "the model's own")
    if reading.get("diffusion_scheduler_config.rescale_zero_terminal_snr") is True:
        reading.carry(
            "diffusion_scheduler_config.rescale_zero_terminal_snr", "objective.schedule.zero_terminal_snr", True
        )
    reading.assume({"objective.name": prediction or found.objective})
    _revision(reading)
    _unet(reading)
    _text_encoder(reading)


def _revision(reading: Reading) -> None:
    if reading.get("from_pt") is True:
        reading.carry("revision", "model.revision")
    reading.notice("revision", "a branch with Flax weights; the main branch has torch's, which are read here")


def _unet(reading: Reading) -> None:
    lightning = f"{reading.get('lightning_repo')}/{reading.get('lightning_ckpt')}"
    if reading.get("lightning_repo") and reading.get("lightning_ckpt"):
        reading.carry("lightning_repo", "model.unet", lightning)
    for key in ("lightning_repo", "lightning_ckpt"):
        reading.notice(key, "in model.unet" if reading.get(key) else "the base's UNet")
    if reading.get("unet_checkpoint"):
        reading.carry("unet_checkpoint", "model.unet")
    reading.notice("unet_checkpoint", "the base's UNet")
    if reading.get("train_new_unet") is True:
        reading.carry_all("train_new_unet", {"model.unet": None}, "random weights, with the base's numbers")
    reading.notice("train_new_unet", "the UNet starts from its pretrained weights")


def _text_encoder(reading: Reading) -> None:
    trained = reading.get("train_text_encoder") is True
    reading.carry("train_text_encoder", "model.train_text_encoder")
    if trained:
        rate = reading.get("text_encoder_learning_rate")
        reading.carry("text_encoder_learning_rate", "optimizer.learning_rates", {"text_encoder.*": rate})
    reading.notice("text_encoder_learning_rate", "the text encoder is not trained")


def _data(reading: Reading) -> None:
    reading.alias("dataset_name")
    reading.assume({"data.source": "huggingface"})
    hub = reading.values["data.source"] == "huggingface"
    if hub and not {"data.name", "data.path"} & reading.values.keys():
        reading.assume({"data.name": REQUIRED})
    if hub:
        for key, path in {"dataset_config_name": "data.config", "train_split": "data.split"}.items():
            if reading.get(key):
                reading.carry(key, path)
            reading.notice(key, "the data set's own")
        for key in ("image_column", "caption_column"):
            reading.carry(key, f"data.{key}")
    if reading.get("dataset_type") in ("", "tf", "hf", "grain"):
        reading.notice("dataset_type", "which of its readers; data.source says what is read here")
    if reading.get("dataset_save_location"):
        reading.alias("dataset_save_location")
    reading.notice("dataset_save_location", "the user's cache folder")
    reading.carry("center_crop", "data.crop", "center" if reading.get("center_crop") else "random")


def _schedule(reading: Reading) -> None:
    steps, share = reading.get("max_train_steps"), reading.get("warmup_steps_fraction")
    planned = reading.get("learning_rate_schedule_steps", -1)
    length = steps if planned in (-1, None, "") else planned
    if share and isinstance(length, int) and isinstance(share, int | float):
        reading.carry("warmup_steps_fraction", "lr_scheduler.warmup", f"{round(share * length)} steps")
    reading.notice("warmup_steps_fraction", "no warm-up")
    if planned in (-1, steps):
        reading.notice("learning_rate_schedule_steps", "the schedule is as long as the run")


def _bias(reading: Reading) -> None:
    strategy = str(reading.get("timestep_bias.strategy", "none"))
    acting = WITH_BIAS.get(strategy, ())
    for name in ("multiplier", "begin", "end", "portion"):
        if name in acting:
            reading.carry(f"timestep_bias.{name}", f"objective.timestep_bias.{name}")
        reading.notice(f"timestep_bias.{name}", f"no effect with strategy {strategy}")


def _sampling(reading: Reading) -> None:
    prompt = reading.get("prompt")
    reading.carry("prompt", "sampling.prompts", [prompt] if isinstance(prompt, str) else None)
    if reading.get("do_classifier_free_guidance") is False:
        reading.carry("do_classifier_free_guidance", "sampling.guidance_scale", 1.0)
        for key in ("guidance_scale", "negative_prompt"):
            reading.notice(key, "no guidance")
    reading.notice("do_classifier_free_guidance", "guidance_scale says it")
    reading.carry("guidance_scale", "sampling.guidance_scale")
    reading.carry("negative_prompt", "sampling.negative_prompt")
    spacing = reading.get("diffusion_scheduler_config.timestep_spacing")
    if spacing:
        reading.carry("diffusion_scheduler_config.timestep_spacing", "sampling.timestep_spacing")
    reading.notice("diffusion_scheduler_config.timestep_spacing", "sampling.timestep_spacing")
    name = str(reading.get("diffusion_scheduler_config._class_name") or "").removeprefix("Flax")
    if name in models.SCHEDULERS:
        reading.carry("diffusion_scheduler_config._class_name", "sampling.sampler", models.SCHEDULERS[name])
    if not name:
        reading.notice("diffusion_scheduler_config._class_name", "sampling.sampler")
