"""Names of other trainers that ask for a part which is not there: one table, and what each part waits for.

A row is a name (or a pattern), the part, and the values that ask for nothing. A part that has come makes its rows
stale, which a test forbids: `PARTS` says by which plug-in, verb or setting it would be known.
"""

from __future__ import annotations

from daguerre.config.aliases.names import LORA

OFF = ("false", "none", "null", "")
NONE_OF_IT = ("0", "0.0", *OFF)
_TOKENS = "training of new tokens (textual inversion)"
ABSENT = ("none", *OFF)

PARTS: dict[str, tuple[str, ...]] = {
    # part: patterns of what it would be here: KIND/NAME of a plug-in, verb/NAME, setting/PATH
    LORA: ("adapters/*lycoris*", "setting/adapters.*network*"),
    "ControlNet": ("adapters/*control*", "families/*control*"),
    _TOKENS: ("adapters/*token*", "adapters/*inversion*", "setting/*new_tokens*"),
    "the cache verb": ("verb/cache*",),
    "tracking by Weights & Biases": ("setting/logging.*wandb*", "setting/logging.track*"),
    "publishing to the hub": ("verb/publish*", "verb/push*", "setting/*hub*"),
    "a loss other than the squared error": ("setting/objective.*huber*", "setting/objective.loss*"),
    "masks in the alpha channel of pictures": ("setting/*alpha_mask*",),
    "weights in a caption, (word:1.2)": ("setting/*weighted*", "setting/*prompt_weight*"),
    "restarts of the learning rate": ("setting/lr_scheduler.*restarts*", "setting/lr_scheduler.*cycle*"),
    "dropping of single tags": ("setting/data.captions.*tag*drop*",),
    "alternatives inside a caption, {a|b}": ("setting/data.captions.*wild*", "setting/data.captions.*alternat*"),
    "a caption that grows during the run": ("setting/data.captions.*warm*",),
    "a change of colours": ("setting/data.*colour_*", "setting/data.*color_*"),
    "crops around faces": ("setting/data.*face*",),
    "weights of 8 bits": ("setting/*fp8*", "setting/*float8*"),
    "weights that wait in the host's memory": ("setting/*offload*", "setting/*swap*"),
    "an update that is made during the backward pass": ("setting/*backward*",),
    "noise whose strength is drawn": ("setting/objective.noise.*random*", "setting/objective.noise.*adaptive*"),
    "Perlin noise": ("setting/objective.noise.*perlin*",),
    "losses of v scaled like those of eps": ("setting/objective.weighting.*like*",),
    "learning rates by block": ("setting/optimizer.*block*",),
    "a text encoder that stops to learn before the end": ("setting/model.*stop*", "setting/training.*stop*"),
    "DREAM": ("setting/objective.*dream*",),
    "masks of padding in the text encoder": ("setting/model.*attention_mask*",),
    "choosing files of a data set of the hub": ("setting/data.*files*",),
    "training on the first samples alone (data.filters chooses)": ("setting/data.*max_samples*",),
    "clipping of each single number of the gradients": ("setting/training.*clip*",),
    "training on one batch again and again": ("setting/*reuse*",),
    "training in 8 bits": ("setting/*quantiz*",),
    "logging for MLPerf": ("setting/logging.*mllog*",),
    "distillation": ("objectives/*distil*", "setting/*distil*"),
}
"""The parts that are not there, and what would show that they are."""

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    # LoRA: kohya, diffusers, OneTrainer, SimpleTuner
    "network_*": (LORA, ABSENT),
    "lora_*": (LORA, ABSENT),
    "lycoris_*": (LORA, ABSENT),
    "use_dora": (LORA, OFF),
    "dim_from_weights": (LORA, OFF),
    "scale_weight_norms": (LORA, NONE_OF_IT),
    "base_weights*": (LORA, ABSENT),
    # ControlNet
    "controlnet": ("ControlNet", OFF),
    "conditioning_image_column": ("ControlNet", ABSENT),
    # textual inversion: diffusers, kohya
    "placeholder_token": (_TOKENS, ABSENT),
    "initializer_token": (_TOKENS, ABSENT),
    "learnable_property": (_TOKENS, ABSENT),
    "num_vectors*": (_TOKENS, ABSENT),
    "token_string": (_TOKENS, ABSENT),
    "init_word": (_TOKENS, ABSENT),
    "use_object_template": (_TOKENS, OFF),
    "use_style_template": (_TOKENS, OFF),
    # latents and texts computed once
    "pre_compute_text_embeddings": ("the cache verb", OFF),
    "skip_cache_check": ("the cache verb", OFF),
    "cache_latents_to_disk": ("the cache verb", OFF),
    "cache_text_encoder_outputs*": ("the cache verb", OFF),
    "cache_info": ("the cache verb", OFF),
    # accounts
    "tracker_*_id": ("tracking by Weights & Biases", OFF),
    "push_to_hub*": ("publishing to the hub", OFF),
    "push_checkpoints_to_hub": ("publishing to the hub", OFF),
    "hub_model_id": ("publishing to the hub", ABSENT),
    "huggingface_repo_*": ("publishing to the hub", OFF),
    "huggingface_path_in_repo": ("publishing to the hub", OFF),
    # losses and noise
    "huber_*": ("a loss other than the squared error", ABSENT),
    "alpha_mask": ("masks in the alpha channel of pictures", OFF),
    "scale_v_pred_loss_like_noise_pred": ("losses of v scaled like those of eps", OFF),
    "v_pred_like_loss": ("losses of v scaled like those of eps", NONE_OF_IT),
    "noise_offset_random_strength": ("noise whose strength is drawn", OFF),
    "ip_noise_gamma_random_strength": ("noise whose strength is drawn", OFF),
    "adaptive_noise_scale": ("noise whose strength is drawn", NONE_OF_IT),
    "perlin_noise": ("Perlin noise", NONE_OF_IT),
    "dream_*": ("DREAM", OFF),
    # pictures and captions
    "weighted_captions": ("weights in a caption, (word:1.2)", OFF),
    "caption_tag_dropout_rate": ("dropping of single tags", NONE_OF_IT),
    "enable_wildcard": ("alternatives inside a caption, {a|b}", OFF),
    "secondary_separator": ("alternatives inside a caption, {a|b}", ABSENT),
    "token_warmup_step": ("a caption that grows during the run", NONE_OF_IT),
    "token_warmup_min": ("a caption that grows during the run", ("1", *OFF)),
    "color_aug": ("a change of colours", OFF),
    "face_crop_aug_range": ("crops around faces", ABSENT),
    "text_encoder_use_attention_mask": ("masks of padding in the text encoder", OFF),
    # memory and learning rates
    "fp8_*": ("weights of 8 bits", OFF),
    "base_model_precision": ("weights of 8 bits", ("no_change", *OFF)),
    "cpu_offload_checkpointing": ("weights that wait in the host's memory", OFF),
    "blocks_to_swap": ("weights that wait in the host's memory", NONE_OF_IT),
    "offload_ema": ("weights that wait in the host's memory", OFF),
    "fused_backward_pass": ("an update that is made during the backward pass", OFF),
    "fused_optimizer_groups": ("an update that is made during the backward pass", NONE_OF_IT),
    "block_lr": ("learning rates by block", ABSENT),
    "stop_text_encoder_training": ("a text encoder that stops to learn before the end", ("-1", *NONE_OF_IT)),
    "lr_num_cycles": ("restarts of the learning rate", ("1", "1.0", *OFF)),
    "lr_scheduler_num_cycles": ("restarts of the learning rate", ("1", "1.0", *OFF)),
    "distillation_*": ("distillation", ABSENT),
}
"""Name (or pattern): the part that it asks for, and the values that ask for nothing; the first is named in messages."""
