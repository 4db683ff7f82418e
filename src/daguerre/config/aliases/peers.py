"""Names from the trainers that most people come from, and what each becomes here: data alone, as in `alias_names`.

The names come from diffusers' example scripts (text_to_image, dreambooth), kohya's sd-scripts and SimpleTuner. A bare
number keeps the unit of its origin. A name with two meanings is refused with both. Names of parts that are not there
are in `alias_later`.
"""

from __future__ import annotations

from daguerre.config.aliases.peers_values import (
    caption_file,
    epochs,
    expected,
    idle,
    kept,
    length,
    minutes,
    optimizer,
    optimizer_args,
    prompts,
    prompts_file,
    rates,
    resumed,
    sampler,
    schedule,
    sized,
    switch,
    tokens,
    trackers,
    train_data,
    unless,
    updates,
)
from daguerre.config.aliases.values import Convert, Meaning, choose, min_snr, one, values

SAME = {
    # diffusers
    "num_validation_images": "sampling.num_images",
    "proportion_empty_prompts": "data.caption_dropout",
    "dataloader_num_workers": "loader.num_workers",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "noise_offset": "objective.noise.offset",
    "lr_power": "lr_scheduler.power",
    "pretrained_vae_model_name_or_path": "model.vae",
    "tokenizer_name": "model.tokenizer",
    "image_interpolation_mode": "data.interpolation",
    # kohya
    "output_name": "run_name",
    "max_data_loader_n_workers": "loader.num_workers",
    "caption_dropout_rate": "data.caption_dropout",
    "shuffle_caption": "data.captions.shuffle_tags",
    "keep_tokens": "data.captions.keep_tags",
    "caption_separator": "data.captions.tag_separator",
    "flip_aug": "data.random_flip",
    "dataset_repeats": "data.repeats",
    "resize_interpolation": "data.interpolation",
    "bucket_reso_steps": "data.buckets.step",
    "ip_noise_gamma": "objective.noise.input_perturbation",
    "lr_scheduler_power": "lr_scheduler.power",
    "lr_scheduler_min_lr_ratio": "lr_scheduler.final",
    "validation_split": "data.held_out_fraction",
    "training_comment": "description",
    # SimpleTuner
    "caption_dropout_probability": "data.caption_dropout",
    "ema_decay": "ema.decay",
    "rescale_betas_zero_snr": "objective.schedule.zero_terminal_snr",
    "validation_guidance": "sampling.guidance_scale",
    "validation_guidance_rescale": "sampling.guidance_rescale",
    "validation_num_inference_steps": "sampling.num_inference_steps",
    "validation_negative_prompt": "sampling.negative_prompt",
    "inference_scheduler_timestep_spacing": "sampling.timestep_spacing",
    # our own, which a pattern of names that are not there would catch
    "cache_gb": "data.cache_gb",
}
"""Another name for one of our settings."""

_FUSED, _AUTO = one("training.attention", "fused"), one("training.attention", "auto")
_HALF = "weights_dtype=float16 may make training unstable: weights_dtype=bfloat16 (full_bf16) serves better"
_PICTURES = "pictures are drawn at each save, which checkpoint.every sets"
_RUN_FOLDER = "a run keeps its numbers and event files in its own folder, {output_dir}/{run_name}"
_SECRET = "secrets never belong on the command line or in a recipe: the environment holds them"
_ONE = "`daguerre convert export RUN format=single_file` makes one file of them"
_CONVERTS = "`daguerre convert config FILE` makes a recipe of it"

_IDLE = {
    "validation_epochs": f"in diffusers' scripts it draws pictures; {_PICTURES}",
    "validation_steps": f"in diffusers' scripts it draws pictures; {_PICTURES}",
    "validation_step_interval": _PICTURES,
    "validation_epoch_interval": _PICTURES,
    "sample_every_n_steps": _PICTURES,
    "sample_every_n_epochs": _PICTURES,
    "sample_at_first": _PICTURES,
    "logging_dir": _RUN_FOLDER,
    "tracker_project_name": _RUN_FOLDER,
    "tracker_run_name": _RUN_FOLDER,
    "log_tracker_name": _RUN_FOLDER,
    "log_prefix": _RUN_FOLDER,
    "log_config": "config.yaml of the run is written always",
    "save_state": "every save holds the whole state",
    "save_state_on_train_end": "the end of a run is always saved, with its whole state",
    "save_precision": "`daguerre convert export RUN dtype=float16` writes weights in another precision",
    "use_safetensors": "weights are always written as .safetensors",
    "no_metadata": "`daguerre convert export` writes the files that other programs read",
    "persistent_data_loader_workers": "loader.num_workers is the number of processes that read, all through the run",
    "vae_batch_size": "latents are computed with the batch that is trained on",
    "text_encoder_batch_size": "captions are encoded with the batch that is trained on",
    "set_grads_to_none": "gradients are not kept from one update to the next",
    "prior_generation_precision": "class pictures are drawn as training computes",
    "tokenizer_cache_dir": "the hub's own cache is used, HF_HOME",
    "local_rank": "torchrun and srun say which process is which",
    "num_processes": "torchrun and srun say how many processes there are",
    "num_machines": "torchrun and srun say how many machines there are",
    "ddp_gradient_as_bucket_view": "how gradients are shared is no setting",
    "ddp_static_graph": "how gradients are shared is no setting",
    "disable_mmap_load_safetensors": "how weights are read is no setting",
    "lowram": "where weights are read to is no setting",
    "highvram": "where networks stay is no setting",
    "skip_save_text_encoder": "exports hold all networks, so that they can be drawn with",
    "debug_dataset": "`daguerre data show RECIPE` shows what is trained on",
    "foreach_ema": "optimizer.one_pass moves averages together with the weights",
    "dynamo_backend": "training.compile=blocks compiles by inductor",
    "v2": "the base says itself which text encoder it has",
}
"""A name that sets nothing here, and what serves instead, or why nothing is needed."""

_BUCKETS = (
    "buckets are bounded by their area (the square of data.resolution) and by data.buckets.max_aspect, the longest "
)
_BUCKETS += "side over the shortest: 256 to 1024 is 4; `daguerre convert config` works it out from kohya's TOML"
_NEAREST = "steps outside a range are drawn less often by objective.timestep_bias.name=range with its begin, end and a"
_NEAREST += " large multiplier; they cannot be left out"
_PYRAMID = (
    "objective.noise.pyramid is the noise of several grids that is here; its grids are halved each time, kohya's "
)
_PYRAMID += "are cut by factors that are drawn, so that no number of one is a number of the other"
_KEEP = "it is a number of updates or epochs in kohya's scripts; checkpoint.keep is the number of states that are kept"

_UNLESS: dict[str, tuple[tuple[str, ...], str]] = {
    # two meanings
    "clip_skip": (
        (),
        "the layer before the last is 2 in kohya's scripts, 1 in diffusers': write model.text_encoder_layer=-2 for it",
    ),
    "cache_dir": (
        (),
        "data.cache_dir is the folder for indexes and shards; where diffusers' scripts keep what they download is the "
        "environment's HF_HOME",
    ),
    "validation_seed": (
        (),
        "sampling.seed is that of the pictures, as in SimpleTuner; kohya's chooses what is held out, which "
        "follows from ids here",
    ),
    "offset_noise": (
        ("false",),
        "in diffusers' train_dreambooth.py it is noise_offset=0.1, in SimpleTuner it switches noise_offset on: write "
        "noise_offset=NUMBER",
    ),
    # other ways
    "training.batch_size": (
        (),
        "training.per_device_batch_size is the batch of one device, training.global_batch_size that of an update",
    ),
    "min_bucket_reso": ((), _BUCKETS),
    "max_bucket_reso": ((), _BUCKETS),
    "bucket_no_upscale": (
        ("false",),
        "pictures that are smaller than their bucket are enlarged, or with data.buckets.upscale=false left out and "
        "counted; none is trained at its own size",
    ),
    "min_timestep": (("0",), _NEAREST),
    "max_timestep": (("1000",), _NEAREST),
    "multires_noise_iterations": (("0",), _PYRAMID),
    "multires_noise_discount": ((), _PYRAMID),
    "reg_data_dir": (
        (),
        "class_data_dir is the folder of the class pictures, in the recipes sd15_dreambooth and others",
    ),
    "in_json": ((), "captions are read from files beside the pictures, or from a metadata.jsonl or table with columns"),
    "dataset_config": ((), _CONVERTS),
    "config_file": ((), _CONVERTS),
    "data_backend_config": ((), _CONVERTS),
    "resume": ((), "the same command goes on with a run; resume_from_checkpoint names another state of it"),
    "save_last_n_steps": ((), _KEEP),
    "save_last_n_epochs": ((), _KEEP),
    "save_last_n_steps_state": ((), _KEEP),
    "save_last_n_epochs_state": ((), _KEEP),
    "save_n_epoch_ratio": ((), "checkpoint.every is the interval between saves, such as '2 epochs'"),
    "caption_suffix": ((), "data.captions.templates=['{} SUFFIX'] puts words behind each caption"),
    "keep_tokens_separator": ((), "data.captions.keep_tags is the number of tags at the start that keep their places"),
    "caption_dropout_every_n_epochs": (("0",), "data.caption_dropout drops a share of captions in every epoch"),
    "lr_scheduler_type": ((), "lr_scheduler.name is one of the schedules here; none is imported by name"),
    "lr_scheduler_args": ((), "each setting of the schedule has a name of its own, in lr_scheduler"),
    "non_ema_revision": ((), "model.revision is the branch of the whole base; model.unet takes another place"),
    "hub_token": ((), _SECRET),
    "huggingface_token": ((), _SECRET),
    "wandb_api_key": ((), _SECRET),
}
"""A name that is an error, the values with which it asks for nothing, and what to use."""

CONVERTED: dict[str, Convert] = {
    **{name: idle(name, why) for name, why in _IDLE.items()},
    **{name: unless(off, why) for name, (off, why) in _UNLESS.items()},
    # lengths and intervals
    "max_train_steps": updates("training.duration"),
    "num_train_epochs": epochs,
    "max_train_epochs": epochs,
    "lr_warmup_steps": length("lr_warmup_steps", "lr_scheduler.warmup"),
    "lr_decay_steps": length("lr_decay_steps", "lr_scheduler.decay"),
    "checkpointing_steps": updates("checkpoint.every"),
    "checkpoint_step_interval": updates("checkpoint.every"),
    "save_every_n_steps": updates("checkpoint.every"),
    "save_every_n_epochs": length("save_every_n_epochs", "checkpoint.every", "epochs"),
    "checkpoint_epoch_interval": length("checkpoint_epoch_interval", "checkpoint.every", "epochs"),
    "checkpoints_total_limit": kept("checkpoints_total_limit"),
    "resume_from_checkpoint": resumed,
    # models
    "v_parameterization": switch("v_parameterization", one("objective.name", "v"), one("objective.name", "eps")),
    "prediction_type": choose(
        "prediction_type",
        values("objective.name", {"epsilon": "eps", "v_prediction": "v", "sample": "x0", "flow_matching": "flow"}),
    ),
    "max_token_length": tokens,
    "no_half_vae": expected("no_half_vae", "true", "the autoencoder computes in float32"),
    # data
    "train_data_dir": train_data,
    "resolution": sized,
    "center_crop": switch("center_crop", one("data.crop", "center"), one("data.crop", "random")),
    "random_crop": switch("random_crop", one("data.crop", "random"), one("data.crop", "center")),
    "enable_bucket": switch(
        "enable_bucket", one("data.buckets.aspects", "auto"), one("data.buckets.aspects", "square")
    ),
    "caption_prefix": lambda text: one("data.captions.prefix", f"{text} " if text else ""),
    "caption_extension": caption_file,
    # loss and noise
    "min_snr_gamma": min_snr("min_snr_gamma"),
    "debiased_estimation_loss": switch("debiased_estimation_loss", one("objective.weighting.name", "debiased")),
    "masked_loss": switch("masked_loss", one("objective.mask.outside_weight", "0")),
    "loss_type": choose(
        "loss_type",
        {name: Meaning((), (f"loss_type={name} is what happens anyway",)) for name in ("l2", "mse")},
        dict.fromkeys(("huber", "smooth_l1", "l1"), "a loss other than the squared error"),
    ),
    # learning
    "lr_scheduler": schedule,
    "optimizer": optimizer("optimizer"),
    "optimizer_type": optimizer("optimizer_type"),
    "optimizer_args": optimizer_args,
    "use_8bit_adam": switch("use_8bit_adam", one("optimizer.name", "adamw_8bit")),
    "use_lion_optimizer": switch("use_lion_optimizer", one("optimizer.name", "lion")),
    "unet_lr": rates("unet.*")("unet_lr"),
    "text_encoder_lr": rates("text_encoder*")("text_encoder_lr"),
    "learning_rate_te": rates("text_encoder.*")("learning_rate_te"),
    "learning_rate_te1": rates("text_encoder.*")("learning_rate_te1"),
    "learning_rate_te2": rates("text_encoder_2.*")("learning_rate_te2"),
    # precision and kernels
    "full_bf16": switch("full_bf16", one("training.weights_dtype", "bfloat16")),
    "full_fp16": switch("full_fp16", Meaning((("training.weights_dtype", "float16"),), (_HALF,))),
    "allow_tf32": switch(
        "allow_tf32", one("training.matmul_precision", "high"), one("training.matmul_precision", "highest")
    ),
    "disable_tf32": switch("disable_tf32", one("training.matmul_precision", "highest")),
    "enable_xformers_memory_efficient_attention": switch("enable_xformers_memory_efficient_attention", _FUSED, _AUTO),
    "diffusers_xformers": switch("diffusers_xformers", _FUSED, _AUTO),
    "sdpa": switch("sdpa", _AUTO),
    "mem_eff_attn": switch("mem_eff_attn", one("training.attention", "efficient"), _AUTO),
    "torch_compile": switch("torch_compile", one("training.compile", "blocks"), one("training.compile", "false")),
    "ddp_timeout": minutes,
    # pictures, exports and numbers
    "validation_prompt": prompts,
    "validation_prompts": prompts,
    "sample_prompts": prompts_file,
    "sample_sampler": sampler("sample_sampler"),
    "validation_scheduler": sampler("validation_scheduler"),
    "save_model_as": choose(
        "save_model_as",
        {
            name: Meaning(
                (), (f"save_model_as={name}: exports are folders in diffusers' format with .safetensors; {_ONE}",)
            )
            for name in ("safetensors", "diffusers", "diffusers_safetensors")
        },
        dict.fromkeys(("ckpt", "pt"), "writing pickled weights"),
    ),
    "report_to": trackers("report_to"),
    "log_with": trackers("log_with"),
}
"""A name whose value is another one here, which sets nothing, or which is refused."""

BESIDE: dict[str, tuple[str, str | None, str]] = {
    "lr_warmup_steps": ("lr_scheduler", "constant", "that schedule has no warm-up, constant_with_warmup has one"),
    "num_train_epochs": ("max_train_steps", None, "the number of updates is the length of the run"),
    "max_train_steps": (
        "max_train_epochs",
        None,
        "the number of epochs is the length of the run, as in kohya's scripts",
    ),
}
"""A name that has no effect beside another with this value (None: any that asks for something), and why."""
