"""Configs of other trainers for tests, restated: the keys that they usually have, with numbers of our own choice."""

from __future__ import annotations

import re

MAXDIFFUSION = """\
run_name: ''
write_metrics: True
gcs_metrics: False
log_period: 100
pretrained_model_name_or_path: 'stabilityai/stable-diffusion-2-1'
unet_checkpoint: ''
revision: 'bf16'
from_pt: False
weights_dtype: 'float32'
activations_dtype: 'bfloat16'
precision: "HIGH"
attention: 'flash'
flash_block_sizes: {}
train_new_unet: False
train_text_encoder: True
text_encoder_learning_rate: 4.25e-6
snr_gamma: 5.0
timestep_bias: {
  strategy: "later",
  multiplier: 2.0,
  begin: 0,
  end: 1000,
  portion: 0.25
}
diffusion_scheduler_config: {
  _class_name: 'FlaxDDIMScheduler',
  prediction_type: 'v_prediction',
  rescale_zero_terminal_snr: False,
  timestep_spacing: 'trailing'
}
output_dir: 'out'
jax_cache_dir: ''
mesh_axes: ['data', 'fsdp', 'tensor']
logical_axis_rules: [
                      ['batch', 'data'],
                      ['conv_out', 'fsdp']
                    ]
data_sharding: [['data', 'fsdp', 'tensor']]
dcn_data_parallelism: -1
dcn_fsdp_parallelism: 1
dcn_tensor_parallelism: 1
ici_data_parallelism: -1
ici_fsdp_parallelism: 1
ici_tensor_parallelism: 1
dataset_name: 'someone/some-captions'
dataset_save_location: 'prepared'
train_split: 'train'
image_column: 'image'
caption_column: 'text'
resolution: 768
center_crop: False
random_flip: True
cache_latents_text_encoder_outputs: True
learning_rate: 1.e-6
scale_lr: False
max_train_samples: -1
max_train_steps: 1500
num_train_epochs: 1
seed: 3
per_device_batch_size: 4
checkpoint_every: 10000
warmup_steps_fraction: 0.1
learning_rate_schedule_steps: -1
adam_b1: 0.9
adam_b2: 0.98
adam_eps: 1.e-8
adam_weight_decay: 1.e-2
max_grad_norm: 1.0
enable_profiler: True
skip_first_n_steps_for_profiler: 5
prompt: "a lighthouse: at night"
negative_prompt: "fog"
guidance_scale: 7.5
guidance_rescale: 0.7
num_inference_steps: 30
"""

_TODAY = """\
timing_metrics_file: ""
write_timing_metrics: True
jit_initializers: True
mask_padding_tokens: True
attention_sharding_uniform: True
norm_num_groups: 32
skip_jax_distributed_system: False
base_output_directory: ""
allow_split_physical_axes: False
dataset_type: 'tf'
train_data_dir: ''
dataset_config_name: ''
hf_data_dir: ''
hf_train_files: ''
hf_access_token: ''
tokenize_captions_num_proc: 4
reuse_example_batch: False
enable_data_shuffling: True
enable_single_replica_ckpt_restoring: False
opt_enable_grad_clipping: False
max_grad_value: 1.0
opt_enable_grad_global_norm_clipping: False
profiler_steps: 5
enable_mllog: False
controlnet_model_name_or_path: 'someone/controlnet'
controlnet_image: 'https://example.org/hint.png'
instance_data_dir: ''
class_data_dir: ''
instance_prompt: ''
class_prompt: ''
prior_loss_weight: 1.0
num_class_images: 100
cache_dreambooth_dataset: False
quantization: ''
quantization_local_shard_count: -1
use_qwix_quantization: False
compile_topology_num_slices: -1
enable_ml_diagnostics: False
profiler_gcs_path: ""
enable_ondemand_xprof: False
dcn_context_parallelism: 1
ici_context_parallelism: 1
lora_config: {
  lora_model_name_or_path: [],
  scale: []
}
"""


def maxdiffusion(**given: str) -> str:
    """A config of MaxDiffusion's as of today, with values as YAML for some of its keys; None leaves a key out."""
    given = {"enable_profiler": "False", "mesh_axes": "['data', 'fsdp', 'context', 'tensor']"} | given
    given = {"data_sharding": "[['data', 'fsdp', 'context', 'tensor']]"} | given
    text = MAXDIFFUSION + _TODAY
    for key, value in given.items():
        text, found = re.subn(rf"^{key}:.*(\n +\S.*|\n}}|\n +\])*$", f"{key}: {value}", text, flags=re.MULTILINE)
        text += "" if found else f"{key}: {value}\n"
    return text


OPEN_DIFFUSION = """\
wandb:
    api_key: ???
    entity: a-group

system:
    gradient_accumulation: 2
    batch_size: 32
    workers: 6
    dist_backend: ${distributed.dist_backend}
    dist_url: ${distributed.dist_url}

distributed:
    dist_backend: 'nccl'
    dist_url: 'env://'

experiment:
    log_dir: ???
    name: ???
    project: "diffusion"
    num_examples_to_see: ???
    eval_caption_file: captions.txt
    num_eval_images: 100
    save_only_most_recent: True
    save_every: 2000
    requeue: True

optimizer:
    name: adamw
    params:
        learning_rate: 0.0001
        beta1: 0.9
        beta2: 0.98
        weight_decay: 0.01
        epsilon: 0.00000001

model:
    vae:
        pretrained: ???
    text_encoder:
        pretrained: ???
    tokenizer:
        pretrained: ???
    scheduler:
        pretrained: ???
    unet:
        target: diffusers.UNet2DConditionModel
        params:
            act_fn: "silu"
            attention_head_dim: 8
            block_out_channels: [320, 640, 1280, 1280]
            down_block_types: ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"]
            layers_per_block: 2
            norm_eps: 1e-05
            up_block_types: ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]
    use_ema: False
    mixed_precision: bf16
    gradient_checkpointing: True
    xformers: True

dataset:
    type: WebDataset
    params:
        path: ???
        batch_size: ${system.batch_size}
        workers: ${system.workers}
        num_examples_to_see: ${experiment.num_examples_to_see}
        resolution: 512
        filters:
            pwatermark: "<=0.5"
            original_width: ">=512"

lr_scheduler:
    scheduler: "ConstantWithWarmup"
    params:
        learning_rate: ${optimizer.params.learning_rate}
        warmup_length: 500
"""

CASCADE = """\
experiment_id: stage_c
checkpoint_path: /path/to/checkpoint
output_path: out
model_version: 3.6B
wandb_project: StableCascade
wandb_entity: someone
lr: 1.0e-4
batch_size: 256
image_size: 768
multi_aspect_ratio: [1/1, 1/2, 2/3, 9/16]
grad_accum_steps: 2
updates: 500000
backup_every: 50000
save_every: 2000
warmup_updates: 1
use_fsdp: False
ema_start_iters: 5000
ema_iters: 100
ema_beta: 0.9
webdataset_path:
  - s3://bucket/first
  - file:/data/second.tar
dataset_filters:
  - ['aesthetic_score', 'lambda s: s > 4.5']
  - ['nsfw_probability', 'lambda s: s < 0.01']
effnet_checkpoint_path: models/effnet.safetensors
generator_checkpoint_path: models/stage_c.safetensors
controlnet_blocks: [0, 4, 8]
rank: 4
"""

_EMBEDDER = """\
                  - is_trainable: False
                    input_key: {field}
                    target: gm.modules.embedders.modules.ConcatTimestepEmbedderND
                    params:
                      outdim: 256
"""
_SIZES = "".join(
    _EMBEDDER.format(field=field)
    for field in ("original_size_as_tuple", "crop_coords_top_left", "target_size_as_tuple")
)

_DISCRETE = """\
        denoiser_config:
            target: gm.modules.diffusionmodules.denoiser.DiscreteDenoiser
            params:
                num_idx: 1000
                weighting_config:
                    target: gm.modules.diffusionmodules.denoiser_weighting.EpsWeighting
                scaling_config:
                    target: gm.modules.diffusionmodules.denoiser_scaling.EpsScaling
                discretization_config:
                    target: gm.modules.diffusionmodules.discretizer.LegacyDDPMDiscretization
        sigma_sampler_config:
            target: gm.modules.diffusionmodules.sigma_sampling.DiscreteSampling
            params:
                num_idx: 1000
                discretization_config:
                    target: gm.modules.diffusionmodules.discretizer.LegacyDDPMDiscretization
"""

_EDM = """\
        scale_factor: 0.5
        latents_mean: [-1.6574, 1.886, -1.383, 2.5155]
        latents_std: [8.4927, 5.9022, 6.5498, 5.2299]
        denoiser_config:
            target: gm.modules.diffusionmodules.denoiser.Denoiser
            params:
                weighting_config:
                    target: gm.modules.diffusionmodules.denoiser_weighting.EDMWeighting
                    params:
                        sigma_data: 0.6
                scaling_config:
                    target: gm.modules.diffusionmodules.denoiser_scaling.EDMScaling
                    params:
                        sigma_data: 0.6
        sigma_sampler_config:
            target: gm.modules.diffusionmodules.sigma_sampling.EDMSampling
            params:
                p_mean: -1.0
                p_std: 1.4
"""

_MINDONE = """\
version: SDXL-base-1.0
model:
    target: gm.models.diffusion.DiffusionEngine
    params:
        disable_first_stage_amp: True
{denoiser}
        network_config:
            target: gm.modules.diffusionmodules.openaimodel.UNetModel
            params:
                adm_in_channels: 2816
                num_classes: sequential
                in_channels: 4
                out_channels: 4
                model_channels: 320
                attention_resolutions: [4, 2]
                num_res_blocks: 2
                channel_mult: [1, 2, 4]
                num_head_channels: 64
                use_spatial_transformer: True
                use_linear_in_transformer: True
                transformer_depth: {depth}
                context_dim: 2048
                spatial_transformer_attn_type: flash-attention
                legacy: False
                use_recompute: True
        conditioner_config:
            target: gm.modules.GeneralConditioner
            params:
                emb_models:
                  - is_trainable: True
                    input_key: txt
                    target: gm.modules.embedders.modules.FrozenCLIPEmbedder
                    params:
                      layer: hidden
                      layer_idx: 11
                      freeze: False
                      version: openai/clip-vit-large-patch14
                  - is_trainable: False
                    input_key: txt
                    target: gm.modules.embedders.modules.FrozenOpenCLIPEmbedder2
                    params:
                      arch: ViT-bigG-14-Text
                      freeze: True
                      layer: penultimate
                      always_return_pooled: True
                      legacy: False
{sizes}
        first_stage_config:
            target: gm.models.autoencoder.AutoencoderKLInferenceWrapper
            params:
                embed_dim: 4
                monitor: val/rec_loss
                ddconfig:
                    attn_type: vanilla
                    double_z: true
                    z_channels: 4
                    resolution: 256
                    in_channels: 3
                    out_ch: 3
                    ch: 128
                    ch_mult: [1, 2, 4, 4]
                    num_res_blocks: 2
                    attn_resolutions: []
                    dropout: 0.0
                lossconfig:
                    target: mindspore.nn.Identity
        loss_fn_config:
            target: gm.modules.diffusionmodules.loss.StandardDiffusionLoss
            params:
                offset_noise_level: 0.05
optim:
    base_learning_rate: 1.0e-6
    optimizer_config:
        target: mindspore.nn.AdamWeightDecay
        params:
            beta1: 0.9
            beta2: 0.98
            weight_decay: 0.01
    scheduler_config:
        target: gm.lr_scheduler.LambdaWarmUpScheduler
        params:
            warm_up_steps: 500
data:
    per_batch_size: 2
    total_step: 100000
    num_parallel_workers: 3
    python_multiprocessing: False
    shuffle: False
    dataset_config:
        target: gm.data.dataset.Text2ImageDataset
        params:
            target_size: 1024
            transforms:
                - target: gm.data.mappers.Resize
                  params:
                    size: 1024
                    interpolation: {interpolation}
                - target: gm.data.mappers.Rescaler
                  params:
                    isfloat: False
                - target: gm.data.mappers.AddOriginalImageSizeAsTupleAndCropToSquare
                - target: gm.data.mappers.Transpose
                  params:
                    type: hwc2chw
"""


def mindone(edm: bool = False, depth: str = "[1, 2, 10]", interpolation: int = 3) -> str:
    """A config of MindOne's, with noise by timesteps or EDM's."""
    denoiser = _EDM if edm else f"        scale_factor: 0.13025\n{_DISCRETE}"
    return _MINDONE.format(denoiser=denoiser, depth=depth, interpolation=interpolation, sizes=_SIZES)
