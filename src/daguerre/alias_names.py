"""Names from other trainers and what each becomes here: data alone, in the order in which `aliases` looks.

The names come from MaxDiffusion, MindOne SDXL, open-diffusion and Stable Cascade. Recipes use our own names only.
"""

from __future__ import annotations

from collections.abc import Callable

from daguerre.alias_values import (
    Convert,
    Meaning,
    averaged,
    base_model,
    cascade_ema,
    choose,
    counted,
    data_set,
    in_a_node,
    is_parallel,
    min_snr,
    mindone_data,
    offset_noise,
    one,
    placed,
    requeue,
    sampler,
    values,
    verbatim,
    with_prior,
)

SAME = {
    # MaxDiffusion
    "revision": "model.revision",
    "from_pt": "model.pickled_weights",
    "unet_checkpoint": "model.unet",
    "dataset_save_location": "data.cache_dir",
    "num_class_images": "data.sources.class.generate.count",
    "prior_loss_weight": "data.sources.class.loss_weight",
    "sample_batch_size": "sampling.batch_size",
    # MindOne SDXL
    "per_batch_size": "training.per_device_batch_size",
    "use_ema": "ema.enabled",
    "use_recompute": "training.gradient_checkpointing",
    "lpw": "model.long_prompts",
    **{
        f"timestep_bias{mark}{name}": f"objective.timestep_bias.{'name' if name == 'strategy' else name}"
        for mark in "._"  # MaxDiffusion, MindOne
        for name in ("strategy", "multiplier", "begin", "end", "portion")
    },
    # open-diffusion
    "model.pretrained": "model.pretrained_model_name_or_path",
    **{
        f"model.{part}.pretrained": f"model.{part}"
        for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    },
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
    "grad_accum_steps": "training.gradient_accumulation_steps",
    "image_size": "data.resolution",
    "multi_aspect_ratio": "data.buckets.aspects",
    "dataset_filters": "data.filters",
}
"""Another name for one of our settings."""

BELOW = {
    "model.unet.params.": "model.unet.",
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
    "max_train_steps": counted("training.duration", "steps"),
    "updates": counted("training.duration", "steps"),
    "num_examples_to_see": counted("training.duration", "samples"),
    "experiment.num_examples_to_see": counted("training.duration", "samples"),
    "dataset.params.num_examples_to_see": counted("training.duration", "samples"),
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
    "dataset.type": choose("dataset.type", values("data.source", {"WebDataset": "webdataset", "Parquet": "parquet"})),
    "dataset.params.path": placed(),
    "webdataset_path": placed("webdataset"),
    "instance_data_dir": verbatim("data.sources.instance.path", ("data.sources.instance.source", "folder")),
    "instance_prompt": verbatim("data.sources.instance.captions.text"),
    "class_data_dir": verbatim("data.sources.class.path"),
    "class_prompt": verbatim("data.sources.class.captions.text"),
    "with_prior_preservation": with_prior,
    # weighting and clipping
    "snr_gamma": min_snr,
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

NOTICES = {
    "data_sink": "prefetch_batches keeps batches ready ahead of the step",
    "sink_size": "prefetch_batches keeps batches ready ahead of the step",
    "sink_queue_size": "prefetch_batches is the number of batches kept ready",
    "python_multiprocessing": "num_workers is the number of processes that read and decode",
    "jax_cache_dir": "nothing is compiled before it runs, so there is nothing to keep",
}
"""A name that is accepted with one printed line, which says what serves instead."""

IDLE_BESIDE: dict[str, tuple[str, str, str]] = {
    "timestep_bias_portion": ("objective.timestep_bias.name", "range", "begin and end say which steps"),
    "timestep_bias.portion": ("objective.timestep_bias.name", "range", "begin and end say which steps"),
}
"""A name that is accepted with one printed line where a setting has this value; what serves instead."""

ALWAYS = {
    "disable_first_stage_amp": ("true", "the autoencoder computes in float32"),
}
"""A name with the one value that always holds, and what that means; another value is an error."""

_OFF = ("false", "none", "null")
_CASCADE = "the family of Stable Cascade"

LATER: dict[str, tuple[str, tuple[str, ...]]] = {
    "task": ("a task other than training (the cache verb)", ("txt2img", "train")),
    "cache_*": ("the cache verb", _OFF),
    "enable_profiler": ("profiling a run", _OFF),
    "experiment.project": ("tracking by Weights & Biases", _OFF),
    "wandb.mode": ("tracking by Weights & Biases", ("disabled", *_OFF)),
    "wandb.*": ("tracking by Weights & Biases", _OFF),
    "wandb_*": ("tracking by Weights & Biases", _OFF),
    "model_version": (_CASCADE, ()),
    "controlnet_*": ("ControlNet", _OFF),
    "module_filters": ("LoRA", _OFF),
    "rank": ("LoRA", _OFF),
    "train_tokens": ("training of new tokens", ("[]", *_OFF)),
    "effnet_checkpoint_path": (_CASCADE, _OFF),
    "previewer_checkpoint_path": (_CASCADE, _OFF),
    "generator_checkpoint_path": (_CASCADE, _OFF),
}
"""A name (or pattern) whose part is still to be written: what that is, and the values that ask for nothing."""
