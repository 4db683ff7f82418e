"""The names in the guides of other trainers, as the table of what each becomes lists them.

COMMAND_LINE are those that a command line may give; CONVERTED those that only `convert config` reads, by the key that
stands for them in the configs of tests/support/foreign_configs.py.
"""

from __future__ import annotations

import foreign_configs
from omegaconf import OmegaConf

from daguerre.foreign.reader import leaves

BIAS = ("strategy", "multiplier", "begin", "end", "portion")
AXES = ("data", "fsdp", "tensor")

COMMAND_LINE: dict[str, set[str]] = {
    "MaxDiffusion": {
        *("run_name", "output_dir", "learning_rate", "max_train_steps", "resolution", "seed"),
        *("pretrained_model_name_or_path", "revision", "from_pt", "unet_checkpoint", "per_device_batch_size"),
        *("weights_dtype", "activations_dtype", "precision", "attention"),
        *("dataset_name", "dataset_save_location", "jax_cache_dir"),
        *("mesh_axes", "logical_axis_rules", "data_sharding"),
        *(f"{kind}_{axis}_parallelism" for kind in ("ici", "dcn") for axis in AXES),
        *("checkpoint_every", "snr_gamma", *(f"timestep_bias.{name}" for name in BIAS)),
    },
    "MindOne": {
        *("weight", "optimizer_weight", "resume_step", "save_optimizer"),
        *("data_path", "per_batch_size", "gradient_accumulation_steps", "max_grad_norm", "use_ema", "scale_lr"),
        *("clip_grad", "max_device_memory", "is_parallel"),
        *("data_sink", "sink_size", "sink_queue_size", "python_multiprocessing"),
        *("ms_amp_level", "param_fp16", "disable_first_stage_amp", "use_recompute", "spatial_transformer_attn_type"),
        *(f"timestep_bias_{name}" for name in BIAS),
        *("offset_noise_level", "task", "cache_latent", "cache_text_embedding", "cache_path", "lpw"),
    },
    "open-diffusion": {
        *("wandb.api_key", "wandb.entity", "wandb.project", "wandb.mode"),
        *("system.gradient_accumulation", "batch_size", "system.workers"),
        *("distributed.dist_backend", "distributed.dist_url"),
        *("experiment.log_dir", "experiment.name", "experiment.project", "experiment.num_examples_to_see"),
        *("experiment.save_every", "experiment.save_only_most_recent", "experiment.requeue"),
        *("experiment.eval_caption_file", "experiment.num_eval_images"),
        *("lr_scheduler.scheduler", "lr_scheduler.params.warmup_length", "model.pretrained"),
        *(f"model.{part}.pretrained" for part in ("vae", "text_encoder", "tokenizer", "scheduler", "unet")),
        *("model.use_ema", "ema.path", "mixed_precision", "gradient_checkpointing", "xformers"),
        *("dataset.type", "dataset.params.path", "dataset.params.resolution", "dataset.params.filters"),
        "dataset.params.idx_to_prompt",
    },
    "Stable Cascade": {
        *("experiment_id", "checkpoint_path", "output_path", "model_version"),
        *("lr", "grad_accum_steps", "image_size", "multi_aspect_ratio", "updates", "save_every", "backup_every"),
        *("warmup_updates", "use_fsdp", "ema_start_iters", "ema_iters", "ema_beta"),
        *("webdataset_path", "dataset_filters", "wandb_project", "wandb_entity"),
        *("controlnet_blocks", "module_filters", "rank", "train_tokens"),
        *("effnet_checkpoint_path", "previewer_checkpoint_path", "lora_checkpoint_path", "dtype", "captions_getter"),
        *("bucketeer_random_ratio", "clip_text_model_name", "clip_image_model_name", "allow_tf32"),
        *("checkpoint_extension", "dist_file_subfolder"),
    },
}

MODEL = "model.params"
EMBEDDERS = f"{MODEL}.conditioner_config.params.emb_models"
CONVERTED: dict[str, set[str]] = {
    "MaxDiffusion": set(),
    "MindOne": {
        *(f"{MODEL}.denoiser_config.params.{name}_config.target" for name in ("weighting", "scaling")),
        f"{MODEL}.sigma_sampler_config.target",
        *(f"{EMBEDDERS}.0.{name}" for name in ("is_trainable", "input_key", "params.layer", "params.layer_idx")),
        *(f"{EMBEDDERS}.0.params.version", f"{EMBEDDERS}.2.params.outdim"),
        *(f"{MODEL}.first_stage_config.target", f"{MODEL}.network_config.params.transformer_depth"),
        *(f"{MODEL}.loss_fn_config.target", "optim.base_learning_rate", "optim.scheduler_config.params.warm_up_steps"),
        *(f"optim.optimizer_config.params.{name}" for name in ("beta1", "beta2", "weight_decay")),
        *("data.total_step", "data.num_parallel_workers", "data.shuffle", "data.dataset_config.params.target_size"),
        "data.dataset_config.params.transforms.0.params.interpolation",
        *(f"data.dataset_config.params.transforms.{number}.target" for number in range(4)),
    },
    "open-diffusion": {
        *("system.batch_size", "optimizer.name"),
        *(f"optimizer.params.{name}" for name in ("learning_rate", "beta1", "beta2", "weight_decay", "epsilon")),
        *("model.unet.target", "model.unet.params.act_fn"),
    },
    "Stable Cascade": {"batch_size"},
}


def keys_of_fixtures(trainer: str) -> set[str]:
    """The keys in the configs that the tests of `convert config` read."""
    texts = {
        "MaxDiffusion": foreign_configs.MAXDIFFUSION,
        "MindOne": foreign_configs.mindone(),
        "open-diffusion": foreign_configs.OPEN_DIFFUSION,
        "Stable Cascade": foreign_configs.CASCADE,
    }
    return {key for key, _ in leaves(OmegaConf.to_container(OmegaConf.create(texts[trainer]), resolve=False))}
