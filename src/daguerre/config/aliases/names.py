"""Names from other trainers and what each becomes here: data alone, in the order in which `aliases` looks.

The names come from MaxDiffusion, MindOne SDXL, open-diffusion and Stable Cascade. Recipes use our own names only. Names
that mean something beside other settings alone are in `alias_relative`.
"""

from __future__ import annotations

from collections.abc import Callable

from daguerre.config.aliases.values import (
    Convert,
    Meaning,
    averaged,
    base_model,
    cascade_ema,
    choose,
    clipped,
    component,
    counted,
    data_set,
    drawn,
    in_a_node,
    is_parallel,
    min_snr,
    mindone_data,
    offset_noise,
    one,
    placed,
    prediction,
    reader,
    requeue,
    rescaled,
    sampler,
    scheduler_class,
    token,
    unless_empty,
    values,
    verbatim,
    with_prior,
)
from daguerre.samplers.settings import SCHEDULERS

TRAINING, INFERENCE = (
    ("scheduler", "scheduler.training", "noise_scheduler_training"),
    ("scheduler.inference", "noise_scheduler_inference"),
)
"""open-diffusion's names of the scheduler, one for both or a pair."""
CLASSES = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
"""Classes of networks by which configs of others name them, by the component that each is."""
TRAINING_CLASSES = (
    *SCHEDULERS,
    *("DDPMScheduler", "DDPMNoiseScheduler", "PNDMScheduler", "LMSDiscreteScheduler"),
)
"""Schedulers whose noise levels in training are those of `scaled_linear`."""

SAME = {
    # MaxDiffusion
    "from_pt": "model.pickled_weights",
    "adam_b1": "optimizer.beta1",
    "adam_b2": "optimizer.beta2",
    "adam_eps": "optimizer.epsilon",
    "adam_weight_decay": "optimizer.weight_decay",
    "enable_data_shuffling": "data.shuffle",
    "num_class_images": "data.sources.class.generate.count",
    "prior_loss_weight": "data.sources.class.loss_weight",
    "sample_batch_size": "sampling.batch_size",
    # MindOne SDXL
    "per_batch_size": "training.per_device_batch_size",
    "use_ema": "ema.enabled",
    "use_recompute": "training.gradient_checkpointing",
    "lpw": "model.long_prompts",
    **{f"timestep_bias{mark}strategy": "objective.timestep_bias.name" for mark in "._"},  # MaxDiffusion, MindOne
    "optim.base_learning_rate": "optimizer.learning_rate",
    **{f"optim.optimizer_config.params.{name}": f"optimizer.{name}" for name in ("beta1", "beta2", "weight_decay")},
    "optim.optimizer_config.params.eps": "optimizer.epsilon",
    "data.per_batch_size": "training.per_device_batch_size",
    "data.num_parallel_workers": "loader.num_workers",
    "data.dataset_config.params.target_size": "data.resolution",
    "data.dataset_config.params.prompt_empty_probability": "data.caption_dropout",
    "data.dataset_config.params.lpw": "model.long_prompts",
    # open-diffusion
    "model.pretrained": "model.pretrained_model_name_or_path",
    "model.pt_path": "model.pretrained_model_name_or_path",
    **{f"model.{name}.pretrained": "model.scheduler" for name in TRAINING},
    **{
        f"model.{name}.params.{theirs}": f"objective.schedule.{ours}"
        for name in TRAINING
        for theirs, ours in {
            "num_train_timesteps": "num_train_timesteps",
            "beta_start": "beta_start",
            "beta_end": "beta_end",
            "rescale_betas_zero_snr": "zero_terminal_snr",
        }.items()
    },
    "dataset.params.class_mapping": "data.idx_to_prompt",
    **{f"model.{part}.pretrained": f"model.{part}" for part in ("unet", "vae", "text_encoder", "tokenizer")},
    "model.use_ema": "ema.enabled",
    "model.mixed_precision": "training.mixed_precision",
    "model.gradient_checkpointing": "training.gradient_checkpointing",
    "experiment.name": "run_name",
    "experiment.log_dir": "output_dir",
    "experiment.eval_caption_file": "sampling.prompts_file",
    "eval_caption_file": "sampling.prompts_file",
    "experiment.num_eval_images": "sampling.num_images",
    "num_eval_images": "sampling.num_images",
    "system.gradient_accumulation": "training.gradient_accumulation_steps",
    "system.batch_size": "training.per_device_batch_size",
    "system.workers": "loader.num_workers",
    "system.dist_backend": "distributed.dist_backend",
    "system.dist_url": "distributed.dist_url",
    "dataset.params.batch_size": "training.per_device_batch_size",
    "dataset.params.workers": "loader.num_workers",
    "dataset.params.resolution": "data.resolution",
    "dataset.params.filters": "data.filters",
    "dataset.params.idx_to_prompt": "data.idx_to_prompt",
    "lr_scheduler.params.learning_rate": "optimizer.learning_rate",
    # Stable Cascade
    "experiment_id": "run_name",
    "output_path": "output_dir",
    "lr": "optimizer.learning_rate",
    "shift": "objective.schedule.shift",
    "grad_accum_steps": "training.gradient_accumulation_steps",
    "image_size": "data.resolution",
    "multi_aspect_ratio": "data.buckets.aspects",
    "dataset_filters": "data.filters",
}
"""Another name for one of our settings."""

BELOW = {
    **{f"model.{part}.params.": f"model.{part}." for part in ("unet", "vae", "text_encoder")},
    "optimizer.params.": "optimizer.",
}
"""Another name for what stands before a setting's own name."""

_FP32, _BF16, _FP16 = (one("training.mixed_precision", name) for name in ("no", "bf16", "fp16"))
_AMP = Meaning(_BF16.values, ("ms_amp_level: bfloat16 over float32 weights, which needs no scaling of the loss",))
_HALF = (
    "weights in float16 may make training unstable, as they hold no large and no very small numbers: mixed_precision="
    "fp16 with weights_dtype=float32, or weights_dtype=bfloat16, serve better; the autoencoder stays in float32"
)
_O3, _FP16_WEIGHTS = (
    Meaning((("training.weights_dtype", "float16"),), (f"{given}: {_HALF}",))
    for given in ("ms_amp_level=O3", "param_fp16=True")
)

CONVERTED: dict[str, Convert] = {
    # lengths and intervals
    "updates": counted("training.duration", "steps"),
    "num_examples_to_see": counted("training.duration", "samples"),
    "experiment.num_examples_to_see": counted("training.duration", "samples"),
    "dataset.params.num_examples_to_see": counted("training.duration", "samples"),
    "data.total_step": counted("training.duration", "steps"),
    "checkpoint_every": counted("checkpoint.every", "samples"),
    "experiment.save_every": counted("checkpoint.every", "steps"),
    "save_every": counted("checkpoint.every", "steps"),
    "backup_every": counted("checkpoint.backup_every", "steps"),
    "warmup_updates": counted("lr_scheduler.warmup", "steps"),
    "lr_scheduler.params.warmup_length": counted("lr_scheduler.warmup", "steps"),
    "lr_scheduler.scheduler": choose(
        "lr_scheduler.scheduler",
        values("lr_scheduler.name", {"ConstantWithWarmup": "constant", "CosineWithWarmup": "cosine"}),
    ),
    "experiment.save_only_most_recent": choose(
        "save_only_most_recent", values("checkpoint.keep", {"True": "2", "False": "1000000"})
    ),
    "requeue": requeue,
    "experiment.requeue": requeue,
    # models and data
    "weight": base_model,
    "data_path": mindone_data,
    "dataset_name": data_set,
    "unet_checkpoint": unless_empty("model.unet", "the UNet is the base's"),
    "train_new_unet": choose("train_new_unet", {"True": one("model.unet", "null"), "False": Meaning()}),
    **{f"model.{part}.target": component(part, classes) for part, classes in CLASSES.items()},
    **{f"model.{name}.target": component("scheduler", TRAINING_CLASSES) for name in TRAINING},
    **{f"model.{name}.target": scheduler_class for name in INFERENCE},
    "diffusion_scheduler_config._class_name": scheduler_class,
    "diffusion_scheduler_config.prediction_type": prediction,
    **{f"model.{name}.params.prediction_type": prediction for name in TRAINING},
    "diffusion_scheduler_config.timestep_spacing": unless_empty(
        "sampling.timestep_spacing", "sampling.timestep_spacing stays as it is"
    ),
    "diffusion_scheduler_config.rescale_zero_terminal_snr": choose(
        "rescale_zero_terminal_snr", {"True": one("objective.schedule.zero_terminal_snr", "true"), "False": Meaning()}
    ),
    "dataset_save_location": unless_empty("data.cache_dir", "the user's cache folder"),
    "dataset_type": reader,
    "hf_access_token": token,
    "dataset.type": choose(
        "dataset.type",
        values(
            "data.source",
            {"WebDataset": "webdataset", "ClassificationWebDataset": "webdataset", "Parquet": "parquet"},
        ),
    ),
    "dataset.params.path": placed(),
    "webdataset_path": placed("webdataset"),
    "instance_data_dir": verbatim("data.sources.instance.path", ("data.sources.instance.source", "folder")),
    "instance_prompt": verbatim("data.sources.instance.captions.text"),
    "class_data_dir": verbatim("data.sources.class.path"),
    "class_prompt": verbatim("data.sources.class.captions.text"),
    "with_prior_preservation": with_prior,
    # pictures that are drawn
    "prompt": drawn,
    "guidance_rescale": rescaled,
    "do_classifier_free_guidance": choose(
        "do_classifier_free_guidance", {"True": Meaning(), "False": one("sampling.guidance_scale", "1")}
    ),
    # weighting and clipping
    "max_grad_norm": clipped,
    "adaptive_loss_weight": choose(
        "adaptive_loss_weight",
        values("objective.weighting.name", {"True": "adaptive", "False": "p2", "p2": "p2"}),
    ),
    "model.max_grad_norm": clipped,
    "snr_gamma": min_snr("snr_gamma"),
    "offset_noise_level": offset_noise,
    "clip_grad": choose("clip_grad", {"True": Meaning(), "False": one("training.max_grad_norm", "null")}),
    # averages
    "model.ema.path": averaged("ema.path"),
    "ema_start_iters": cascade_ema("ema.start_steps"),
    "ema_iters": cascade_ema("ema.every_steps"),
    "ema_beta": cascade_ema("ema.decay"),
    # precision
    "activations_dtype": choose("activations_dtype", {"float32": _FP32, "bfloat16": _BF16, "float16": _FP16}),
    "ms_amp_level": choose("ms_amp_level", {"O0": _FP32, "O1": _AMP, "O2": _AMP, "O3": _O3}),
    "param_fp16": choose("param_fp16", {"False": one("training.weights_dtype", "float32"), "True": _FP16_WEIGHTS}),
    "precision": choose(
        "precision", values("training.matmul_precision", {"DEFAULT": "medium", "HIGH": "high", "HIGHEST": "highest"})
    ),
    # kernels
    "attention": choose(
        "attention",
        values("training.attention", {"dot_product": "math", "flash": "fused", "cudnn_flash_te": "cudnn"})
        | values("training.attention", {"tokamax_flash": "fused"})
        | values("training.attention", {name: name for name in ("auto", "math", "efficient", "cudnn", "fused")}),
    ),
    "spatial_transformer_attn_type": choose(
        "spatial_transformer_attn_type", values("training.attention", {"flash-attention": "fused", "vanilla": "math"})
    ),
    "xformers": choose("xformers", values("training.attention", {"True": "fused", "False": "auto"})),
    "model.xformers": choose("model.xformers", values("training.attention", {"True": "fused", "False": "auto"})),
    # several devices
    "use_fsdp": choose("use_fsdp", {"True": in_a_node(1, -1), "False": in_a_node(-1, 1)}),
    "is_parallel": is_parallel,
}
"""A name whose value is another one here."""

VALUES: dict[str, Callable[[str], str]] = {
    "sampling.sampler": sampler,
}
"""A setting of ours whose values have other names elsewhere."""

REFUSED = {
    "batch_size": "it means the batch of one device in one trainer and the global batch in another: use "
    "per_device_batch_size or global_batch_size (sampling.batch_size is the pictures drawn at once)",
    "optimizer_weight": "resume_from_checkpoint restores the optimizer, the averages and the place in the data",
    "resume_step": "resume_from_checkpoint restores everything; name a checkpoint, such as step-00001000",
    "save_optimizer": "every checkpoint holds the optimizer; checkpoint.export writes weights alone",
    "wandb.api_key": "secrets never belong on the command line or in a recipe: the environment holds them",
    "dataset.params.filters.*": "filters are given together, as data.filters='{pwatermark: \"<=0.5\"}'",
    "checkpoint_path": "a run keeps its checkpoints in its own folder, {output_dir}/{run_name}: use output_dir",
}
"""A name (or pattern) that is an error, and what to use."""

_NUMBERS = "numbers are always written, to metrics/metrics.jsonl of the run, each logging.every"
_WORKERS = "loader.num_workers is the number of processes that read"
_KERNEL = "the attention kernel decides how it goes through its blocks"
_PROCESSES = "the processes of a run meet as the launcher says (docs/launching.md)"
_PROFILER = "profiling is not part of a run"
_CONTROLNET = "MaxDiffusion's training does not read it; drawing with a ControlNet is not there yet"
_RECORDS = "read by no training but that on TensorFlow's records, which cannot be read here"

NOTICES = {
    # MaxDiffusion
    **dict.fromkeys(("write_metrics", "gcs_metrics", "metrics_file"), _NUMBERS),
    **dict.fromkeys(("write_timing_metrics", "timing_metrics_file"), _NUMBERS),
    "log_period": "it says when TensorBoard's files are flushed; logging.every says how often numbers are written",
    "save_config_to_gcs": "config.yaml of the run is written always",
    "cache_latents_text_encoder_outputs": "latents and texts are computed as they are needed",
    **dict.fromkeys(("tokenize_captions_num_proc", "transform_images_num_proc", "grain_worker_count"), _WORKERS),
    "model_name": "the networks are those of pretrained_model_name_or_path",
    **dict.fromkeys(
        ("flash_block_sizes", "flash_block_sizes.*", "flash_min_seq_length", "split_head_dim", "mask_padding_tokens"),
        _KERNEL,
    ),
    "attention_sharding_uniform": "heads are split over the axis tensor, and sequences over none",
    "hardware": "training.device says what computes",
    **dict.fromkeys(("jit_initializers", "skip_jax_distributed_system", "allow_split_physical_axes"), _PROCESSES),
    **dict.fromkeys(("enable_single_replica_ckpt_restoring", "compile_topology_num_slices"), _PROCESSES),
    "quantization_local_shard_count": "nothing is quantized",
    "max_grad_value": "it acts with opt_enable_grad_clipping=True",
    "learning_rate_schedule_steps": "warmup_steps_fraction is a share of it; after warm-up the rate stays",
    "save_final_checkpoint": "the end of a run is always saved",
    "upload_ckpts_to_gcs": "checkpoints are where the run folder is, which output_dir says",
    "checkpoint_type": "checkpoints have one form (docs/checkpoints.md)",
    "checkpoint_dir": "a run keeps its checkpoints in its own folder",
    "base_output_directory": "output_dir is the folder of the runs",
    "tensorboard_dir": "a run keeps its event files in its own folder",
    **dict.fromkeys(("skip_first_n_steps_for_profiler", "profiler_steps", "profiler_gcs_path"), _PROFILER),
    "lightning_from_pt": "a .safetensors file says itself what it is",
    "norm_num_groups": "the model's own config says it",
    **{f"controlnet_{name}": _CONTROLNET for name in ("model_name_or_path", "from_pt", "conditioning_scale", "image")},
    **dict.fromkeys(("grain_train_files", "data_files_pattern", "extracted_files_dir", "tfrecords_dir"), _RECORDS),
    "no_records_per_shard": _RECORDS,
    # MindOne SDXL
    "data_sink": "prefetch_batches keeps batches ready ahead of the step",
    "sink_size": "prefetch_batches keeps batches ready ahead of the step",
    "sink_queue_size": "prefetch_batches is the number of batches kept ready",
    "python_multiprocessing": "num_workers is the number of processes that read and decode",
    "data.python_multiprocessing": "num_workers is the number of processes that read and decode",
    # open-diffusion
    **{f"model.{name}.pretrained": "pictures are drawn on the objective's own noise levels" for name in INFERENCE},
}
"""A name (or pattern) that is accepted with one printed line, which says what serves instead."""

ALWAYS = {
    "disable_first_stage_amp": ("true", "the autoencoder computes in float32"),
    **{f"model.{name}.params.beta_schedule": ("scaled_linear", "the schedule is scaled_linear") for name in TRAINING},
}
"""A name with the one value that always holds, and what that means; another value is an error."""

_OFF = ("false", "none", "null")
_CASCADE = "the family of Stable Cascade"
LORA = "LoRA by other trainers' names (here: adapter.name=lora, adapter.rank, adapter.alpha)"

LATER: dict[str, tuple[str, tuple[str, ...]]] = {
    "task": ("a task other than training (the cache verb)", ("txt2img", "train")),
    **{
        f"cache_{name}": ("the cache verb", _OFF)
        for name in ("latent", "latents", "text_embedding", "path", "dreambooth_dataset")
    },
    "enable_profiler": ("profiling a run", _OFF),
    "enable_ml_diagnostics": ("profiling a run", _OFF),
    "enable_ondemand_xprof": ("profiling a run", _OFF),
    "enable_mllog": ("logging for MLPerf", _OFF),
    "reuse_example_batch": ("training on one batch again and again", _OFF),
    "use_controlnet": ("ControlNet", _OFF),
    "quantization": ("training in 8 bits", ("", *_OFF)),
    "use_qwix_quantization": ("training in 8 bits", _OFF),
    "opt_enable_grad_clipping": ("clipping of each single number of the gradients", _OFF),
    "lora_config": (LORA, ("{}", *_OFF)),
    "lora_config.*": (LORA, ("[]", *_OFF)),
    **{f"hf_{name}": ("choosing files of a data set of the hub", ("", *_OFF)) for name in ("data_dir", "train_files")},
    "max_train_samples": ("training on the first samples alone (data.filters chooses)", ("-1", *_OFF)),
    "edm_objective": (_CASCADE, _OFF),
    "stage_a_checkpoint_path": (_CASCADE, _OFF),
    "experiment.project": ("tracking by Weights & Biases", _OFF),
    "wandb.mode": ("tracking by Weights & Biases", ("disabled", *_OFF)),
    "wandb.*": ("tracking by Weights & Biases", _OFF),
    "wandb_*": ("tracking by Weights & Biases", _OFF),
    "model_version": (_CASCADE, ()),
    "controlnet_*": ("ControlNet", _OFF),
    "module_filters": (LORA, _OFF),
    "rank": (LORA, _OFF),
    "train_tokens": ("training of new tokens", ("[]", *_OFF)),
    "effnet_checkpoint_path": (_CASCADE, _OFF),
    "previewer_checkpoint_path": (_CASCADE, _OFF),
    "generator_checkpoint_path": (_CASCADE, _OFF),
}
"""A name (or pattern) whose part is still to be written: what that is, and the values that ask for nothing."""
