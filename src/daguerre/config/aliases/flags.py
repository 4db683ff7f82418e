"""Options of other trainers that are written without a value, or with several: names alone.

What the names mean is in `alias_names` and `alias_peers`; here is only how a command line of theirs is cut.
"""

from __future__ import annotations

FLAGS = frozenset(
    {
        # diffusers
        *("allow_tf32", "center_crop", "enable_xformers_memory_efficient_attention", "gradient_checkpointing"),
        *("offset_noise", "pre_compute_text_embeddings", "push_to_hub", "random_flip", "scale_lr"),
        *("set_grads_to_none", "train_text_encoder", "use_8bit_adam", "use_ema", "with_prior_preservation"),
        *("dream_training", "foreach_ema", "offload_ema", "skip_save_text_encoder"),
        *("text_encoder_use_attention_mask", "use_dora"),
        # kohya's sd-scripts
        *("alpha_mask", "bucket_no_upscale", "cache_info", "cache_latents", "cache_latents_to_disk"),
        *("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk", "color_aug"),
        *("cpu_offload_checkpointing", "ddp_gradient_as_bucket_view", "ddp_static_graph", "debug_dataset"),
        *("debiased_estimation_loss", "diffusers_xformers", "dim_from_weights", "disable_mmap_load_safetensors"),
        *("enable_bucket", "enable_wildcard", "flip_aug", "fp8_base", "fp8_base_unet", "full_bf16", "full_fp16"),
        *("fused_backward_pass", "highvram", "ip_noise_gamma_random_strength", "log_config", "lowram"),
        *("masked_loss", "mem_eff_attn", "network_train_text_encoder_only", "network_train_unet_only"),
        *("no_half_vae", "no_metadata", "noise_offset_random_strength"),
        *("persistent_data_loader_workers", "random_crop", "sample_at_first", "save_state"),
        *("save_state_on_train_end", "scale_v_pred_loss_like_noise_pred", "sdpa", "shuffle_caption"),
        *("skip_cache_check", "torch_compile", "use_lion_optimizer", "use_object_template", "use_safetensors"),
        *("use_style_template", "v2", "v_parameterization", "weighted_captions", "xformers", "zero_terminal_snr"),
        # SimpleTuner
        *("disable_tf32", "rescale_betas_zero_snr"),
    }
)
"""`--name` alone is `name=true`; where `true` or `false` follows, that is its value."""

WORDS = frozenset({"validation_prompts"})
"""Take all the words that follow, up to the next option or setting."""
PAIRS = frozenset({"lr_scheduler_args", "network_args", "optimizer_args"})
"""Take all the words `key=value` that follow, up to the next option."""
