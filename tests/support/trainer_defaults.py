"""Settings of ours whose default is what other trainers do without being asked, or that their configs always say.

Beside `unasked` of src/daguerre/foreign/trainers/TRAINER.yaml; together they name every setting that changes
what is learnt.
"""

from __future__ import annotations

_ALIKE = {
    *("init_from", "adapters", "model.sample_posterior", "model.scaling_factor", "model.latents_mean"),
    *("model.latents_std", "model.variant", "model.text_encoder_layer", "model.long_prompts"),
    *("model.text_encoder_final_norm", "model.revision", "model.guidance_embedding"),
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
    *(f"data.buckets.{name}" for name in ("aspects", "resolutions", "step", "max_aspect", "upscale", "random")),
    *(
        "data.random_flip",
        "data.formats",
        "data.alpha_colour",
        "data.alpha_mask",
        "data.filters",
        "data.loss_weight",
        "data.repeats",
        "data.crops",
        "data.saliency",
        "data.reference_dropout",
    ),
    *(f"data.captions.{name}" for name in ("text", "fields", "weights", "join", "lines", "prefix", "templates")),
    *(f"data.captions.{name}" for name in ("shuffle_tags", "tag_separator", "keep_tags", "tag_dropout", "tag_group")),
    "data.captions.wildcards",
    *(f"objective.loss.{name}" for name in ("name", "huber_c", "huber_schedule", "huber_scale")),
    *("data.shuffle", "data.lanes", "data.lane_samples", "data.idx_to_prompt"),
    *("training.global_batch_size", "training.weights_dtype", "training.base_precision", "training.matmul_precision"),
    *("training.float8", "model.loras"),
    *("optimizer.name", "optimizer.scale_lr", "optimizer.learning_rates", "optimizer.beta1", "optimizer.beta2"),
    *("optimizer.learning_rate_factors", "optimizer.weight_decays", "objective.schedule.terminal"),
    *(
        f"lr_scheduler.{name}"
        for name in ("name", "warmup", "final", "num_cycles", "power", "decay", "decay_shape", "stages")
    ),
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
    *("data.caption_column", "data.mask_column", "data.control_column"),
    *("data.rejected_column", "data.preference_column", "data.reference_column"),
    *("data.width_column", "data.height_column"),
}
_PREDICTED = {"objective.name", "objective.schedule.name", "objective.weighting.name"}
_WHICH = {"model.family", "model.pretrained_model_name_or_path"}
_OF_SD = {"model.unet", "model.vae", "model.sample_posterior", "model.scaling_factor"}
_OF_SD |= {"model.latents_mean", "model.latents_std", "model.guidance_embedding"}
_CASCADE = {
    *(f"model.{name}" for name in ("prior", "decoder", "vqgan", "effnet", "size", "image_encoder", "image_prompts")),
    *(f"model.{name}" for name in ("image_embedding_dropout", "effnet_dropout", "effnet_scale")),
}

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
    | {"objective.sigma_data", "objective.prediction", "ema.decay", "ema.name"}
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
    "Stable Cascade": (_ALIKE - _OF_SD)
    | _CASCADE
    | {"seed", "data.crop", "data.source", "data.resolution", "training.max_grad_norm", "training.frozen_precision"}
    | {"training.stochastic_rounding", "optimizer.learning_rate", "ema.enabled", "ema.name", "ema.decay"}
    | _NUMBERS,
}
