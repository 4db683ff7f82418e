"""What other trainers do without being asked, in our settings: where it differs from what we do, and where it does not.

Of each trainer two tables name every setting of ours that changes what is learnt (a test forbids holes). DIFFERENT are
written into a recipe unless a key of theirs says otherwise; of SAME our default is theirs, or their config always says
it. What follows from other keys is in the reader of that trainer.
"""

from __future__ import annotations

from typing import Any

from daguerre.config_import.reader import REQUIRED

_EVERYWHERE = {
    # No caption is dropped, nothing is held out, gradients are not clipped, no average is kept.
    "data.caption_dropout": 0.0,
    "data.held_out_fraction": 0.0,
    "training.max_grad_norm": None,
    "ema.enabled": False,
}
_UNHELD = {"validation.every": None}
"""There is no loss to take on samples that are held out where none are. Not a matter of what is learnt."""

DIFFERENT: dict[str, dict[str, Any]] = {
    "MaxDiffusion": {
        **_EVERYWHERE,
        "data.interpolation": "bilinear",
        "optimizer.weight_decay_exclude": [],
        "training.frozen_precision": "bf16",  # with activations_dtype=bfloat16
        "training.stochastic_rounding": False,  # with weights_dtype=bfloat16
    },
    "MindOne": {
        **_EVERYWHERE,
        "seed": 42,
        "model.family": "sdxl",
        "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "model.zero_null_text": False,
        "data.path": REQUIRED,
        "data.resolution": 1024,
        "data.interpolation": "bilinear",
        "training.mixed_precision": "bf16",
        "optimizer.learning_rate": 1e-6,
        "optimizer.weight_decay": 1e-6,
        "optimizer.epsilon": 1e-6,  # of AdamWeightDecay
        "ema.name": "mindone",  # with use_ema
    },
    "open-diffusion": {
        **_EVERYWHERE,
        "optimizer.weight_decay_exclude": [],
        "training.frozen_precision": "bf16",  # with mixed_precision
        "ema.decay": 0.995,  # with use_ema
    },
    "Stable Cascade": {
        "model.family": "cascade_c",
        "data.path": REQUIRED,
        "data.caption_dropout": 0.05,
        "data.held_out_fraction": 0.0,
        "data.crop": "random",
        "data.interpolation": "bilinear",
        "objective.name": "eps",
        "objective.schedule.name": "cosine",
        "objective.weighting.name": "p2",
        "training.mixed_precision": "bf16",
        "optimizer.weight_decay_exclude": [],
    },
}

_ALIKE = {
    *("init_from", "adapters", "model.sample_posterior", "model.scaling_factor", "model.latents_mean"),
    *("model.latents_std", "model.variant", "model.text_encoder_layer", "model.long_prompts"),
    *("model.text_encoder_final_norm", "model.revision"),
    *(f"model.{part}" for part in ("unet", "vae", "text_encoder", "tokenizer")),
    *(f"objective.schedule.{name}" for name in ("num_train_timesteps", "beta_start", "beta_end", "shift", "rho")),
    *(f"objective.schedule.{name}" for name in ("zero_terminal_snr", "sigma_min", "sigma_max")),
    *(f"objective.times.{name}" for name in ("name", "mean", "std")),
    *(f"objective.timestep_bias.{name}" for name in ("name", "multiplier", "portion", "begin", "end")),
    *(f"objective.schedule.resolution_shift.{name}" for name in ("name", "base_px", "low_px", "low_mu")),
    *(f"objective.schedule.resolution_shift.{name}" for name in ("high_px", "high_mu")),
    *("model.noise_conditioning", "objective.mask.outside_weight", "objective.mask.normalise"),
    *(f"objective.weighting.{name}" for name in ("snr_gamma", "p2_k", "p2_gamma")),
    *(f"objective.noise.{name}" for name in ("offset", "offset_per", "pyramid", "pyramid_size")),
    *(f"objective.weighting.adaptive_{name}" for name in ("buckets", "decay")),
    "objective.noise.input_perturbation",
    *(f"data.buckets.{name}" for name in ("aspects", "resolutions", "step", "max_aspect", "upscale")),
    *("data.random_flip", "data.formats", "data.alpha_colour", "data.filters", "data.loss_weight", "data.repeats"),
    *(f"data.captions.{name}" for name in ("text", "fields", "weights", "join", "prefix", "templates")),
    *(f"data.captions.{name}" for name in ("shuffle_tags", "tag_separator", "keep_tags")),
    *("data.shuffle", "data.lanes", "data.lane_samples", "data.idx_to_prompt"),
    *("training.global_batch_size", "training.weights_dtype", "training.matmul_precision"),
    *("optimizer.name", "optimizer.scale_lr", "optimizer.learning_rates", "optimizer.beta1", "optimizer.beta2"),
    *(f"lr_scheduler.{name}" for name in ("name", "warmup", "final", "power", "decay", "decay_shape", "stages")),
    *(f"ema.{name}" for name in ("path", "ramp_steps", "every_steps", "start_steps", "post_hoc")),
}
"""Of all of them: a fine-tune of the whole UNet on squares, with AdamW at a rate that stays."""
_NUMBERS = {"optimizer.weight_decay", "optimizer.epsilon"}
_SDXL = {
    *(f"model.{name}_2" for name in ("text_encoder", "tokenizer", "text_encoder_layer")),
    *("model.text_encoder_final_norm_2", "model.long_prompts_pooled"),
}
_HUB = {
    *("data.source", "data.name", "data.config", "data.revision", "data.split", "data.image_column"),
    *("data.caption_column", "data.mask_column", "data.width_column", "data.height_column"),
}
_PREDICTED = {"objective.name", "objective.schedule.name", "objective.weighting.name"}
_WHICH = {"model.family", "model.pretrained_model_name_or_path"}

SAME: dict[str, set[str]] = {
    # What no key says and nobody's code fixes (seeds of torch, formats), what the reader finds out (the model and what
    # it predicts, where the data are), and what a config cannot do without stand here, too.
    "MaxDiffusion": _ALIKE
    | {"seed", "optimizer.learning_rate", "data.resolution", "data.crop", "training.mixed_precision"}
    | {"model.zero_null_text", "ema.name", "ema.decay"}  # without dropout and averages
    | _NUMBERS
    | _SDXL
    | _HUB
    | _PREDICTED
    | _WHICH,
    "MindOne": _ALIKE
    | {"optimizer.weight_decay_exclude", "training.frozen_precision", "training.stochastic_rounding", "data.crop"}
    | {"objective.sigma_data", "ema.decay"}
    | (_HUB - {"data.name", "data.config", "data.revision", "data.split"})
    | {"data.delimiter", "data.quote", "data.columns"}
    | _SDXL
    | _PREDICTED,
    "open-diffusion": _ALIKE
    | {"seed", "optimizer.learning_rate", "data.resolution", "data.crop", "data.interpolation", "data.source"}
    | {"training.mixed_precision", "training.stochastic_rounding", "ema.name"}
    | _NUMBERS
    | _PREDICTED
    | _WHICH,
    "Stable Cascade": _ALIKE
    | {"seed", "data.source", "data.resolution", "training.max_grad_norm", "training.frozen_precision"}
    | {"training.stochastic_rounding", "optimizer.learning_rate", "ema.enabled", "ema.name", "ema.decay"}
    | {"model.pretrained_model_name_or_path"}
    | _NUMBERS,
}


def unasked(trainer: str, *without: str) -> dict[str, Any]:
    """What a trainer does without being asked, but for some settings."""
    found = {path: value for path, value in DIFFERENT[trainer].items() if path not in without}
    return found | (_UNHELD if "data.held_out_fraction" in found else {})
