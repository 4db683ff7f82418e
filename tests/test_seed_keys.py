"""What each name of the other trainers' guides becomes on the command line: the whole table, row by row.

`alias`: the setting and its value; `notice`: one printed line; `refused`: a message that says what to use. What only
`convert config` reads is tested with it (tests/foreign/test_convert_config.py) and listed here, so that nothing
of the table is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import foreign_names
import pytest

from daguerre import trees
from daguerre.cli import doctor, main
from daguerre.config import config, overrides, short_forms
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError


@dataclass(frozen=True)
class Row:
    """One `key=value` and what it becomes."""

    given: str
    values: dict[str, Any] = field(default_factory=dict)
    notice: str = ""
    refused: str = ""
    beside: tuple[str, ...] = ()
    """Further overrides that it needs to mean anything."""
    recipe: str = "sdxl"

    @property
    def name(self) -> str:
        return self.given.partition("=")[0]


def alias(given: str, /, *beside: str, on: str = "sdxl", notice: str = "", **values: Any) -> Row:
    return Row(given, {path.replace("__", "."): value for path, value in values.items()}, notice, "", beside, on)


def notice(given: str, words: str) -> Row:
    return Row(given, notice=words)


def refused(given: str, words: str, *beside: str) -> Row:
    return Row(given, refused=words, beside=beside)


LATER = "not supported yet"

MAXDIFFUSION = [
    alias("run_name=001", run_name="001"),
    alias("output_dir=out", output_dir="out"),
    alias("output_dir=gs://bucket/", output_dir="gs://bucket"),
    alias("output_dir=s3://bucket/runs", output_dir="s3://bucket/runs"),
    alias("learning_rate=1e-5", optimizer__learning_rate=1e-5),
    alias("max_train_steps=2000", training__duration="2000 steps"),
    alias("resolution=256", data__resolution=256),
    alias("seed=3", seed=3),
    alias("pretrained_model_name_or_path=a/b", model__pretrained_model_name_or_path="a/b"),
    alias("revision=main", model__revision="main"),
    alias("from_pt=True", model__pickled_weights=True),
    alias("unet_checkpoint=folder/unet", model__unet="folder/unet"),
    alias("per_device_batch_size=1", training__per_device_batch_size=1),
    alias("weights_dtype=float32", training__weights_dtype="float32"),
    alias("weights_dtype=bfloat16", training__weights_dtype="bfloat16"),
    alias("activations_dtype=float32", training__mixed_precision="no"),
    alias("activations_dtype=bfloat16", training__mixed_precision="bf16"),
    alias("activations_dtype=float16", training__mixed_precision="fp16"),
    alias("precision=DEFAULT", training__matmul_precision="medium"),
    alias("precision=HIGH", training__matmul_precision="high"),
    alias("precision=HIGHEST", training__matmul_precision="highest"),
    alias("attention=dot_product", training__attention="math"),
    alias("attention=flash", training__attention="fused"),
    alias("attention=cudnn_flash_te", training__attention="cudnn"),
    alias("dataset_name=someone/captions", data__source="huggingface", data__name="someone/captions"),
    alias("dataset_name=shapes", "resolution=64", data__source="shapes"),
    alias("dataset_save_location=prepared", data__cache_dir="prepared"),
    notice("jax_cache_dir=gs://bucket/cache", "nothing is compiled unless training.compile=blocks"),
    alias("jax_cache_dir=cache", "training.compile=blocks", training__compile_cache_dir="cache"),
    alias("mesh_axes=['data', 'fsdp', 'tensor']", mesh__mesh_axes=["data", "fsdp", "tensor"]),
    alias("mesh_axes=['tensor', 'data', 'fsdp']", mesh__mesh_axes=["tensor", "data", "fsdp"]),
    refused("mesh_axes=['data', 'fsdp', 'model']", "data, fsdp, tensor"),
    refused("mesh_axes=['data', 'fsdp']", "the axes are data, fsdp, tensor, each once"),
    alias(
        "logical_axis_rules=[['batch', 'data'], ['activation_batch', ['data', 'fsdp']]]",
        mesh__logical_axis_rules=[["batch", ["data"]], ["activation_batch", ["data", "fsdp"]]],
    ),
    refused("logical_axis_rules=[['batch', 'model']]", "data, fsdp, tensor"),
    alias("data_sharding=[['data', 'fsdp', 'tensor']]", mesh__data_sharding=["data", "fsdp", "tensor"]),
    alias("data_sharding=['data', 'fsdp']", mesh__data_sharding=["data", "fsdp"]),
    *(
        alias(f"{kind}_{axis}_parallelism={degree}", **{f"mesh__{kind}_{axis}_parallelism": degree})
        for kind in ("ici", "dcn")
        for axis in ("data", "fsdp", "tensor")
        for degree in (-1, 1, 2)
    ),
    refused("ici_fsdp_parallelism=-2", "from -1"),
    alias("checkpoint_every=10000", checkpoint__every="10000 samples"),
    alias("checkpoint_every=-1", checkpoint__every=None),
    alias("snr_gamma=5", objective__weighting__name="min_snr", objective__weighting__snr_gamma=5.0),
    alias("snr_gamma=-1", objective__weighting__name="none"),
    alias("timestep_bias.strategy=later", objective__timestep_bias__name="later"),
    alias("timestep_bias.multiplier=2", "timestep_bias.strategy=earlier", objective__timestep_bias__multiplier=2.0),
    alias("timestep_bias.begin=100", "timestep_bias.strategy=range", objective__timestep_bias__begin=100),
    alias("timestep_bias.end=700", "timestep_bias.strategy=range", objective__timestep_bias__end=700),
    alias("timestep_bias.portion=0.1", "timestep_bias.strategy=later", objective__timestep_bias__portion=0.1),
]

MAXDIFFUSION += [
    alias("adam_b1=0.8", optimizer__beta1=0.8),
    alias("adam_b2=0.98", optimizer__beta2=0.98),
    alias("adam_eps=1e-7", optimizer__epsilon=1e-7),
    alias("adam_weight_decay=0.02", optimizer__weight_decay=0.02),
    alias("max_grad_norm=-1", training__max_grad_norm=None),
    alias("opt_enable_grad_global_norm_clipping=True", "training.max_grad_norm=null", training__max_grad_norm=1.0),
    refused("opt_enable_grad_clipping=True", LATER),
    alias("warmup_steps_fraction=0.1", "max_train_steps=2000", lr_scheduler__warmup="200 steps"),
    alias("warmup_steps_fraction=0.1", "training.duration=64k samples", lr_scheduler__warmup="6400 samples"),
    alias(
        "warmup_steps_fraction=0.1",
        "learning_rate_schedule_steps=500",
        notice="is a share of it",
        lr_scheduler__warmup="50 steps",
    ),
    refused("warmup_steps_fraction=0.1", "set training.duration in steps or samples", "training.duration=3 epochs"),
    alias("num_train_epochs=3", training__duration="3 epochs"),
    alias("diffusion_scheduler_config._class_name=FlaxDDIMScheduler", sampling__sampler="ddim"),
    alias(
        "diffusion_scheduler_config._class_name=PNDMScheduler", notice="costs the same", sampling__sampler="dpmpp_2m"
    ),
    alias("diffusion_scheduler_config.prediction_type=v_prediction", objective__name="v"),
    alias("diffusion_scheduler_config.timestep_spacing=leading", sampling__timestep_spacing="leading"),
    alias(
        "diffusion_scheduler_config.rescale_zero_terminal_snr=True",
        "objective.name=v",
        objective__schedule__zero_terminal_snr=True,
    ),
    alias("train_new_unet=True", model__unet=None),
    alias("train_new_unet=False", model__unet="base"),
    alias("train_split=test", data__split="test"),
    notice("train_split=", "default of the data set"),
    alias("dataset_config_name=plain", data__config="plain"),
    alias("center_crop=True", data__crop="center"),
    alias("center_crop=False", data__crop="random"),
    alias("enable_data_shuffling=False", data__shuffle=False),
    alias("prompt=a: cat", sampling__prompts=["a: cat"]),
    alias("guidance_rescale=-1", sampling__guidance_rescale=0.0),
    alias("do_classifier_free_guidance=False", sampling__guidance_scale=1.0),
    notice("log_period=10000000000", "logging.every sets how often"),
    notice("dataset_type=tf", "data.source"),
    refused("dataset_type=tfrecord", "daguerre data pack"),
    refused("dataset_type=grain", "daguerre data pack"),
    refused("dataset_name=", "it is empty"),
    notice("ici_context_parallelism=1", "left out"),
    notice("dcn_context_parallelism=1", "left out"),
    refused("ici_context_parallelism=2", "sequence parallelism"),
    alias(
        "mesh_axes=['data', 'fsdp', 'context', 'tensor']", notice="left out", mesh__mesh_axes=["data", "fsdp", "tensor"]
    ),
    alias(
        "logical_axis_rules=[['activation_length', 'fsdp'], ['batch', 'data']]",
        notice="left out activation_length",
        mesh__logical_axis_rules=[["batch", ["data"]]],
    ),
    notice("text_encoder_learning_rate=1e-6", "the text encoder is not trained"),
    alias(
        "text_encoder_learning_rate=1e-6",
        "train_text_encoder=True",
        optimizer__learning_rates={"text_encoder.*": 1e-6},
    ),
    alias("lightning_repo=a/b", "lightning_ckpt=c.safetensors", model__unet="a/b/c.safetensors"),
    refused("lightning_repo=a/b", "set both lightning_repo"),
    notice("lightning_ckpt=", "the UNet of the base model is used"),
    notice("learning_rate_schedule_steps=100", "warmup_steps_fraction is a share of it"),
    alias("revision=flax", "from_pt=True", model__revision="flax"),
    notice("revision=flax", "branch with Flax weights"),
    notice("unet_checkpoint=", "the base's"),
    notice("dataset_save_location=", "cache folder"),
    notice("controlnet_image=x", "training does not read it"),
    refused("hf_access_token=abc", "HF_TOKEN"),
    refused("quantization=int8", LATER),
]

DREAMBOOTH = "sdxl_dreambooth"
MAXDIFFUSION += [
    alias("instance_data_dir=mine", on=DREAMBOOTH, data__sources__instance__path="mine"),
    alias("instance_data_dir=mine", on=DREAMBOOTH, data__sources__instance__source="folder"),
    alias("instance_data_path=mine", on=DREAMBOOTH, data__sources__instance__path="mine"),
    alias("class_data_path=kind", on=DREAMBOOTH, data__sources__class__path="kind"),
    Row("train_data_repeat=10", notice="as many class images as images of the subject"),
    Row("only_save_lora=true", notice="a checkpoint holds the LoRA alone"),
    alias("instance_prompt=a: sks dog", on=DREAMBOOTH, data__sources__instance__captions__text="a: sks dog"),
    alias("class_data_dir=dogs", on=DREAMBOOTH, data__sources__class__path="dogs"),
    alias("class_prompt=a dog", on=DREAMBOOTH, data__sources__class__captions__text="a dog"),
    alias("num_class_images=300", on=DREAMBOOTH, data__sources__class__generate__count=300),
    alias("prior_loss_weight=0.5", on=DREAMBOOTH, data__sources__class__loss_weight=0.5),
    alias("sample_batch_size=3", on=DREAMBOOTH, sampling__batch_size=3),
    notice("with_prior_preservation=True", "there is a class set"),
    refused("with_prior_preservation=False", "data.source=folder data.path=DIR"),
    Row("instance_data_dir=mine", {"data.sources.instance.path": "mine"}, notice="DreamBooth, so the recipe"),
    Row("instance_data_dir=mine", refused="are in sd15_dreambooth and sdxl_dreambooth", recipe="quickstart"),
    notice("cache_dreambooth_dataset=False", "images are read as they are needed"),
    notice("enable_profiler=False", "has no effect"),
    alias("enable_profiler=True", profiler__steps=[2, 6]),
    alias(
        "enable_profiler=True",
        "skip_first_n_steps_for_profiler=5",
        "profiler_steps=10",
        profiler__steps=[6, 15],
    ),
    notice("profiler_steps=10", "nothing is recorded without enable_profiler=True"),
]

RANGE = "timestep_bias_strategy=range"
TOKENS = {"on": "sdxl_textual_inversion"}
MINDONE = [
    alias("instance_data_path=mine", on="sdxl_dreambooth", data__sources__instance__path="mine"),
    alias("class_data_path=dogs", on="sdxl_dreambooth", data__sources__class__path="dogs"),
    notice("train_data_repeat=10", "as many class images"),
    notice("generate_class_image_config=configs/inference/sd_xl_base.yaml", "by the settings in sampling"),
    notice("enable_modelarts=False", "torchrun and srun launch a job"),
    alias("placeholder_token=<toy>", "data.path=x", adapters__tokens__placeholder_token="<toy>", **TOKENS),
    alias("initializer_token=toy", "data.path=x", adapters__tokens__initializer_token="toy", **TOKENS),
    alias("num_vectors=10", "data.path=x", adapters__tokens__num_vectors=10, **TOKENS),
    alias("learnable_property=style", "data.path=x", data__captions__text="<thing>", **TOKENS),
    alias("drop_text_prob=0.5", data__caption_dropout=0.5),
    alias(
        "group_lr_scaler=4",
        on="sdxl_controlnet",
        optimizer__learning_rate_factors={"controlnet*.controlnet_*": 4.0},
    ),
    notice("only_save_lora=True", "a checkpoint holds the LoRA alone"),
    alias("save_path=runs/first", output_dir="runs/first"),
    alias("total_step=3000", training__duration="3000 steps"),
    alias("save_ckpt_interval=500", checkpoint__every="500 steps"),
    alias("max_num_ckpt=5", checkpoint__keep=5),
    alias("log_interval=5", logging__every="5 steps"),
    notice("infer_during_train=True", "at each save"),
    notice("infer_interval=500", "at each save"),
    notice("sd_xl_base_ratios=1.0", "sampling.width"),
    notice("ms_mode=0", "training.compile"),
    notice("jit_level=O2", "training.compile"),
    notice("device_target=Ascend", "training.device"),
    notice("overflow_still_update=True", "not finite"),
    notice("dataset_load_tokenizer=True", "where they are encoded"),
    notice("ms_enable_allreduce_fusion=True", "how gradients are shared"),
    notice("save_ckpt_only_rank_zero=True", "save one checkpoint together"),
    notice("max_embeddings_multiples=3", "long_prompts"),
    refused("ckpt_url=s3://bucket/base", "weight is the base model"),
    refused("train_url=s3://bucket/out", "save_path"),
    refused("multi_data_url=s3://bucket/data", "data_path"),
    refused("pretrain_url=s3://bucket/base", "weight is the base model"),
    refused("ckpt_dir=folder", "weight is the base model"),
    notice("version=SDXL-base-1.0", "the recipe sets the base model"),
    refused("version=SDXL-refiner-1.0", "SDXL's refiner is not supported"),
    alias("weight=model.safetensors", model__pretrained_model_name_or_path="model.safetensors"),
    refused("weight=sd_xl_base_1.0_ms.ckpt", "checkpoints of MindSpore cannot be read"),
    refused("optimizer_weight=x.ckpt", "resume_from_checkpoint"),
    refused("resume_step=100", "resume_from_checkpoint"),
    refused("save_optimizer=True", "checkpoint"),
    alias("data_path=a.tar", data__source="webdataset", data__path="a.tar"),
    alias("data_path=part-{000..009}.tar", data__source="webdataset"),
    alias("data_path=a.csv", "data.source=parquet", data__source="parquet", data__path="a.csv"),
    refused("data_path=nowhere", "there is nothing at 'nowhere'"),
    alias("per_batch_size=1", training__per_device_batch_size=1),
    alias("gradient_accumulation_steps=8", training__gradient_accumulation_steps=8),
    alias("max_grad_norm=0.5", training__max_grad_norm=0.5),
    alias("optim.base_learning_rate=1e-5", optimizer__learning_rate=1e-5),
    alias("optim.optimizer_config.params.eps=1e-6", optimizer__epsilon=1e-6),
    alias("data.per_batch_size=2", training__per_device_batch_size=2),
    alias("data.total_step=1000", training__duration="1000 steps"),
    alias("data.dataset_config.params.target_size=512", data__resolution=512),
    alias("use_ema=True", ema__enabled=True),
    alias("use_ema=False", ema__enabled=False),
    alias("scale_lr=True", optimizer__scale_lr=True),
    alias("clip_grad=False", training__max_grad_norm=None),
    alias("clip_grad=True", training__max_grad_norm=1.0),
    alias("max_grad_norm=0.5", "clip_grad=True", training__max_grad_norm=0.5),
    alias("max_grad_norm=0.5", "clip_grad=False", notice="clip_grad=True clips", training__max_grad_norm=None),
    alias("max_device_memory=59GB", training__max_device_memory="59GB"),
    notice("is_parallel=False", "one process"),
    refused("is_parallel=True", "start the run with torchrun or srun"),
    notice("data_sink=True", "prefetch_batches"),
    notice("sink_size=100", "prefetch_batches"),
    notice("sink_queue_size=10", "prefetch_batches"),
    notice("python_multiprocessing=True", "num_workers"),
    alias("ms_amp_level=O0", training__mixed_precision="no"),
    alias("ms_amp_level=O1", training__mixed_precision="bf16", notice="needs no scaling"),
    alias("ms_amp_level=O2", training__mixed_precision="bf16", notice="needs no scaling"),
    alias("ms_amp_level=O3", training__weights_dtype="float16", notice="unstable"),
    alias("param_fp16=True", training__weights_dtype="float16", notice="autoencoder stays in float32"),
    alias("param_fp16=False", training__weights_dtype="float32"),
    notice("disable_first_stage_amp=True", "float32"),
    notice("disable_first_stage_amp=False", "float32, always"),
    alias("use_recompute=True", training__gradient_checkpointing=True),
    alias("spatial_transformer_attn_type=flash-attention", training__attention="fused"),
    alias("spatial_transformer_attn_type=vanilla", training__attention="math"),
    alias("timestep_bias_strategy=earlier", objective__timestep_bias__name="earlier"),
    alias("timestep_bias_multiplier=2", RANGE, objective__timestep_bias__multiplier=2.0),
    alias("timestep_bias_begin=200", RANGE, objective__timestep_bias__begin=200),
    alias("timestep_bias_end=500", RANGE, objective__timestep_bias__end=500),
    alias("timestep_bias_portion=0.25", RANGE, objective__timestep_bias__name="range", notice="portion has no effect"),
    alias("timestep_bias_portion=0.5", "timestep_bias_strategy=later", objective__timestep_bias__portion=0.5),
    alias("offset_noise_level=0.05", objective__noise__offset=0.05, objective__noise__offset_per="sample"),
    alias("offset_noise_level=0", objective__noise__offset=0.0),
    alias("task=cache", "cache_path=./cache_data", cache__only=True),
    alias("cache_latent=True", cache__images=True, cache__texts=False, cache__path="auto"),
    alias("cache_latent=True", "cache_text_embedding=True", cache__images=True, cache__texts=True),
    alias("cache_text_embedding=True", "cache_path=x", cache__texts=True, cache__images=False, cache__path="x"),
    alias("cache_path=./cache_data", cache__path="./cache_data", data__source="cache", data__path="./cache_data"),
    alias("cache_path=./cache_data", "task=cache", cache__path="./cache_data"),
    notice("cache_latent=False", "has no effect"),
    alias("lpw=True", model__long_prompts=True),
    alias("lpw=False", model__long_prompts=False),
]

OPEN_DIFFUSION = [
    refused("wandb.api_key=abc", "set the environment variable"),
    alias("wandb.entity=me", logging__trackers__wandb__entity="me"),
    alias("wandb.project=mine", logging__trackers__wandb__project="mine"),
    alias("wandb.mode=online", logging__trackers__wandb__mode="online"),
    alias("wandb.mode=disabled", logging__trackers__wandb__mode="disabled"),
    alias("system.gradient_accumulation=2", training__gradient_accumulation_steps=2),
    refused("batch_size=32", "per_device_batch_size or global_batch_size"),
    alias("system.batch_size=1", training__per_device_batch_size=1),
    alias("system.workers=6", loader__num_workers=6),
    alias("distributed.dist_backend=nccl", distributed__dist_backend="nccl"),
    refused("distributed.dist_backend=mpi", "auto, nccl, gloo"),
    alias("distributed.dist_url=env://", distributed__dist_url="env://"),
    alias("distributed.dist_url=tcp://host:1234", distributed__dist_url="tcp://host:1234"),
    refused("distributed.dist_url=host:1234", "tcp://HOST:PORT"),
    alias("system.dist_backend=gloo", distributed__dist_backend="gloo"),
    alias("system.dist_url=tcp://host:1234", distributed__dist_url="tcp://host:1234"),
    alias("experiment.log_dir=logs", output_dir="logs"),
    alias("experiment.name=finetuning", run_name="finetuning"),
    alias("experiment.project=diffusion", logging__trackers__wandb__project="diffusion"),
    alias("experiment.num_examples_to_see=64000", training__duration="64000 samples"),
    alias("num_examples_to_see=64000", training__duration="64000 samples"),
    alias("experiment.save_every=2000", checkpoint__every="2000 steps"),
    alias("experiment.save_only_most_recent=True", checkpoint__keep=2),
    alias("experiment.save_only_most_recent=False", checkpoint__keep=1000000),
    alias("experiment.requeue=True", resume_from_checkpoint="latest"),
    alias("experiment.requeue=False", resume_from_checkpoint="never"),
    alias("requeue=False", resume_from_checkpoint="never"),
    alias("experiment.eval_caption_file=captions.txt", "sampling.prompts=null", sampling__prompts_file="captions.txt"),
    alias("experiment.num_eval_images=100", sampling__num_images=100),
    alias("optimizer.name=adamw", optimizer__name="adamw"),
    alias("optimizer.params.learning_rate=1e-4", optimizer__learning_rate=1e-4),
    alias("optimizer.params.beta1=0.8", optimizer__beta1=0.8),
    alias("optimizer.params.beta2=0.98", optimizer__beta2=0.98),
    alias("optimizer.params.weight_decay=0.02", optimizer__weight_decay=0.02),
    alias("optimizer.params.epsilon=1e-7", optimizer__epsilon=1e-7),
    alias("lr_scheduler.scheduler=ConstantWithWarmup", lr_scheduler__name="constant"),
    alias("lr_scheduler.scheduler=CosineWithWarmup", lr_scheduler__name="cosine"),
    alias("lr_scheduler.params.warmup_length=500", lr_scheduler__warmup="500 steps"),
    alias("lr_scheduler.params.learning_rate=1e-4", optimizer__learning_rate=1e-4),
    alias("model.pretrained=a/b", model__pretrained_model_name_or_path="a/b"),
    alias("model.vae.pretrained=a/b", model__vae="a/b"),
    alias("model.text_encoder.pretrained=a/b", model__text_encoder="a/b"),
    alias("model.tokenizer.pretrained=a/b", model__tokenizer="a/b"),
    alias("model.scheduler.pretrained=a/b", model__scheduler="a/b"),
    alias("model.unet.pretrained=a/b", model__unet="a/b"),
    alias("model.unet.params.layers_per_block=1", model__unet__layers_per_block=1, on="sd2_scratch"),
    alias("model.use_ema=True", ema__enabled=True),
    alias("ema.path=other/average", "use_ema=true", ema__path="other/average"),
    alias("model.ema.path=other/average", ema__path="other/average", ema__enabled=True),
    alias("model.mixed_precision=bf16", training__mixed_precision="bf16"),
    alias("mixed_precision=bf16", training__mixed_precision="bf16"),
    alias("model.gradient_checkpointing=True", training__gradient_checkpointing=True),
    alias("gradient_checkpointing=False", training__gradient_checkpointing=False),
    alias("model.xformers=True", training__attention="fused"),
    alias("xformers=True", training__attention="fused"),
    alias("xformers=False", training__attention="auto"),
    alias("dataset.type=WebDataset", "data.path=a.tar", data__source="webdataset"),
    alias("dataset.type=ClassificationWebDataset", "data.path=a.tar", data__source="webdataset"),
    alias("dataset.params.class_mapping=imagenet", "data_path=a.tar", data__idx_to_prompt="imagenet"),
    alias("model.max_grad_norm=0.5", training__max_grad_norm=0.5),
    alias("model.pt_path=a/b", model__pretrained_model_name_or_path="a/b"),
    alias("model.noise_scheduler_inference.target=EulerDiscreteScheduler", sampling__sampler="euler"),
    alias("model.noise_scheduler_training.params.prediction_type=v_prediction", objective__name="v"),
    alias("model.noise_scheduler_training.params.beta_start=0.001", objective__schedule__beta_start=0.001),
    notice("model.unet.target=UNet2DConditionModel", "model.unet"),
    refused("model.unet.target=os.system", "UNet2DConditionModel"),
    alias("dataset.params.path={000..009}.tar", data__source="webdataset", data__path="{000..009}.tar"),
    alias("dataset.params.path=pipe:aws s3 cp s3://b/{00..09}.tar -", data__source="webdataset"),
    alias("dataset.params.resolution=256", data__resolution=256),
    alias("dataset.params.filters={pwatermark: '<=0.5'}", data__filters={"pwatermark": "<=0.5"}),
    alias("dataset.params.filters.pwatermark=<=0.5", data__filters={"pwatermark": "<=0.5"}),
    alias("dataset.params.idx_to_prompt=imagenet", "data_path=a.tar", data__idx_to_prompt="imagenet"),
    alias("dataset.params.batch_size=1", training__per_device_batch_size=1),
    alias("dataset.params.workers=2", loader__num_workers=2),
    alias("dataset.params.num_examples_to_see=100", training__duration="100 samples"),
]

CASCADE = [
    alias("experiment_id=stage_c", run_name="stage_c"),
    refused("checkpoint_path=/x", "output_dir"),
    alias("output_path=out", output_dir="out"),
    alias(
        "model_version=3.6B",
        model__family="cascade_c",
        model__pretrained_model_name_or_path="stabilityai/stable-cascade-prior",
    ),
    alias("lr=1e-4", optimizer__learning_rate=1e-4),
    alias("grad_accum_steps=2", training__gradient_accumulation_steps=2),
    alias("image_size=768", data__resolution=768),
    alias("multi_aspect_ratio=[1/1, 2/3]", data__buckets__aspects=["1/1", "2/3"]),
    alias("updates=1000", training__duration="1000 steps"),
    alias("save_every=500", checkpoint__every="500 steps"),
    alias("backup_every=50000", checkpoint__backup_every="50000 steps"),
    alias("backup_every=-1", checkpoint__backup_every=None),
    alias("warmup_updates=10", lr_scheduler__warmup="10 steps"),
    alias("use_fsdp=False", mesh__ici_fsdp_parallelism=1, mesh__ici_data_parallelism=-1),
    alias("use_fsdp=True", mesh__ici_fsdp_parallelism=-1, mesh__ici_data_parallelism=1),
    alias("ema_start_iters=5000", ema__enabled=True, ema__name="stable_cascade", ema__start_steps=5000),
    alias("ema_iters=100", ema__enabled=True, ema__name="stable_cascade", ema__every_steps=100),
    alias("ema_beta=0.9", ema__enabled=True, ema__name="stable_cascade", ema__decay=0.9),
    alias(
        "webdataset_path=[s3://b/a.tar, file:/c.tar]",
        data__source="webdataset",
        data__path=["s3://b/a.tar", "file:/c.tar"],
    ),
    alias("dataset_filters=[['score', 'lambda s: s > 4.5']]", data__filters=[["score", "lambda s: s > 4.5"]]),
    alias("wandb_project=x", logging__trackers__wandb__project="x"),
    alias("wandb_entity=x", logging__trackers__wandb__entity="x"),
    alias("controlnet_blocks=[0, 4]", adapters__controlnet__name="controlnet", adapters__controlnet__blocks=[0, 4]),
    alias(
        "controlnet_filter=CannyFilter",
        adapters__controlnet__reads="grey",
        adapters__controlnet__condition={"name": "canny", "low": 100, "high": 200, "side_px": 224},
    ),
    refused("controlnet_filter=PidiFilter", "there is no PiDiNet here"),
    refused("controlnet_filter_params={'resize': 224}", "adapter.condition"),
    refused("controlnet_filter_params.resize=224", "adapter.condition"),
    alias("controlnet_bottleneck_mode=simple", adapters__controlnet__bottleneck="simple"),
    alias(
        "controlnet_checkpoint_path=x.safetensors", adapters__controlnet__controlnet_model_name_or_path="x.safetensors"
    ),
    alias("controlnet_model_name_or_path=x", adapters__controlnet__controlnet_model_name_or_path="x"),
    alias("module_filters=['.attn']", adapters__lora__targets=["*.to_*"], adapters__lora__alpha=1.0),
    alias("rank=4", "module_filters=['.attn']", adapters__lora__rank=4, adapters__lora__alpha=1.0),
    alias("train_tokens=[['^snail', null]]", adapters__tokens__existing=["^snail"]),
    alias("effnet_checkpoint_path=x.safetensors", "model_version=3.6B", model__effnet="x.safetensors"),
    alias("previewer_checkpoint_path=x.safetensors", "model_version=3.6B", model__previewer="x.safetensors"),
    alias("stage_a_checkpoint_path=x.safetensors", "model_version=3B", model__vqgan="x.safetensors"),
    alias("edm_objective=True", objective__name="v", objective__schedule__name="cosine"),
    alias("generator_checkpoint_path=x.safetensors", "model_version=3.6B", model__prior="x.safetensors"),
    alias("generator_checkpoint_path=x.safetensors", "model_version=3B", model__decoder="x.safetensors"),
    alias("shift=4", objective__schedule__shift=4.0),
    alias("dtype=bfloat16", training__weights_dtype="bfloat16"),
    alias("captions_getter=[txt, identity]", data__captions__fields=["text"]),
    alias(
        "captions_getter=[json, captions_getter]",
        data__captions__fields=["og_caption", "caption"],
        data__captions__weights=[0.05, 0.95],
        notice="inside old_caption",
    ),
    alias("captions_getter=[json, \"lambda j: j['blip']\"]", data__captions__fields=["blip"]),
    refused("captions_getter=[json, 'lambda j: open(j)']", "does not run"),
    alias("bucketeer_random_ratio=0.1", "multi_aspect_ratio=[1/1, 2/3]", data__buckets__random=0.1),
    alias(
        "clip_text_model_name=laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        "model_version=3.6B",
        model__text_encoder="laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        model__tokenizer="laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    ),
    alias(
        "clip_image_model_name=openai/clip-vit-large-patch14",
        "model_version=3.6B",
        model__image_encoder="openai/clip-vit-large-patch14",
    ),
    alias("allow_tf32=False", training__matmul_precision="highest"),
    notice("checkpoint_extension=pt", "safetensors"),
    notice("dist_file_subfolder=x", "dist_url"),
    alias("lora_checkpoint_path=lora.safetensors", "rank=4", init_from="lora.safetensors", adapters__lora__rank=4),
]

ROWS = {"MaxDiffusion": MAXDIFFUSION, "MindOne": MINDONE, "open-diffusion": OPEN_DIFFUSION, "Stable Cascade": CASCADE}
EVERY = [row for rows in ROWS.values() for row in rows]
SCRATCH = ["data.path=a.tar", "run_name=x"]


def loaded(row: Row) -> config.Loaded:
    given = overrides.split([f"--{row.name}", row.given.partition("=")[2], *row.beside]).overrides
    if row.recipe == "sd2_scratch":
        return config.load("sd2_scratch_stage1", [*SCRATCH, "model.unet={block_out_channels: [320]}", *given])
    return config.load(row.recipe, given)


@pytest.mark.parametrize("row", [row for row in EVERY if row.values], ids=lambda row: row.given)
def test_an_alias_is_our_setting(row):
    found = loaded(row)
    tree = short_forms.flat(found.config.model_dump(mode="json"))
    assert {path: trees.get(tree, path) for path in row.values} == row.values
    said = [line for line in found.notices if row.name in line]
    assert (len(said) == 1 and row.notice in said[0]) if row.notice else not said


@pytest.mark.parametrize("row", [row for row in EVERY if row.notice and not row.values], ids=lambda row: row.given)
def test_a_name_without_counterpart_is_one_line(row):
    found = loaded(row)
    assert [line for line in found.notices if row.name in line and row.notice in line] == list(found.notices)
    assert len(found.notices) == 1
    assert found.config == config.load(row.recipe).config


@pytest.mark.parametrize("row", [row for row in EVERY if row.refused], ids=lambda row: row.given)
def test_a_refused_name_says_what_to_use(row):
    with pytest.raises(ConfigError) as caught:
        loaded(row)
    assert row.refused in str(caught.value)
    assert row.name in str(caught.value)


@pytest.mark.parametrize("trainer", ROWS)
def test_no_name_of_the_table_is_forgotten(trainer):
    tested = {row.name for row in ROWS[trainer]}
    named = foreign_names.COMMAND_LINE[trainer]
    assert named <= tested, f"no row for {sorted(named - tested)}"
    assert foreign_names.CONVERTED[trainer] <= foreign_names.keys_of_fixtures(trainer)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("base14.yml", "sd14"),
        ("base15.yml", "sd15"),
        ("base_2_base.yml", "sd2_base"),
        ("base21.yml", "sd21"),
        ("base_xl.yml", "sdxl"),
        ("base_xl_lightning.yml", "sdxl_lightning"),
        ("sd_xl_base_finetune_910b.yaml", "sdxl"),
        ("sd_xl_base_finetune_910b_edm.yaml", "sdxl_edm"),
    ],
)
@pytest.mark.parametrize("folder", ["", "src/maxdiffusion/configs/", "configs/training/"])
def test_their_files_stand_for_our_recipes(theirs, ours, folder):
    found = config.load(folder + theirs)
    assert found.config == config.load(ours).config
    assert found.notices[0] == f"{folder}{theirs} is not a file here: the shipped recipe {ours} is used in its place"


def test_a_folder_of_mindones_is_read_by_its_tables(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "img_txt.csv").write_text("dir,text\nimages/0.jpg,a cat\n", encoding="utf-8")
    (tmp_path / "0.jpg").write_bytes(b"")
    data = config.load("sdxl", [f"data_path={tmp_path}"]).config.data.sources["images"]
    assert (data.source, data.image_column, data.caption_column) == ("csv", "dir", "text")
    (tmp_path / "img_txt.csv").write_text("url,text\nx,a cat\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="choose which to read"):
        config.load("sdxl", [f"data_path={tmp_path}"])


def test_a_path_to_a_data_set_of_the_hubs_library_takes_the_place_of_its_name(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}", encoding="utf-8")
    data = config.load("sdxl", [f"data_path={tmp_path}"]).config.data.sources["images"]
    assert (data.source, data.path, data.name) == ("huggingface", str(tmp_path), None)


def test_is_parallel_is_compared_with_the_launch(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"is_parallel=False, and 2 processes \(1 node x 2, by torchrun\) were started"
    ):
        config.load("sdxl", ["is_parallel=False"])
    assert "is_parallel=True has no effect: 2 processes" in config.load("sdxl", ["is_parallel=True"]).notices[0]
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="but not RANK: start with torchrun"):
        config.load("sdxl", ["is_parallel=True"])


@pytest.mark.parametrize(
    ("given", "nodes", "degrees"),
    [
        (["ici_data_parallelism=-1", "ici_fsdp_parallelism=1"], 1, {"data": 4, "fsdp": 1, "tensor": 1}),
        (["ici_data_parallelism=2", "ici_fsdp_parallelism=2"], 1, {"data": 2, "fsdp": 2, "tensor": 1}),
        ([], 2, {"data": 4, "fsdp": 1, "tensor": 1}),
        (["use_fsdp=True"], 2, {"data": 2, "fsdp": 2, "tensor": 1}),
        (["dcn_data_parallelism=1", "dcn_fsdp_parallelism=-1"], 2, {"data": 2, "fsdp": 2, "tensor": 1}),
    ],
)
def test_the_guides_examples_of_sharding(given, nodes, degrees):
    """On four devices, as MaxDiffusion's guide has them, and its -1 between nodes."""
    axes = "mesh_axes=['data', 'fsdp', 'tensor']"
    mesh = config.load("sdxl", [axes, "ici_tensor_parallelism=1", *given]).config.mesh
    found = mesh.resolved(4, nodes)
    assert {axis: found.degree(axis) for axis in ("data", "fsdp", "tensor")} == degrees


def test_a_mesh_that_does_not_fit_says_both_numbers():
    mesh = config.load("sdxl", ["ici_data_parallelism=1", "ici_fsdp_parallelism=3"]).config.mesh
    with pytest.raises(UserError, match=r"(?s)3.*4|4.*3"):
        mesh.resolved(4, 1)


def test_tpu_settings_of_the_environment_are_mentioned_by_doctor(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    (found,) = doctor._environment()
    assert "TPUs are not supported" in found.text


def test_their_download_script_is_a_verb():
    assert "[-o DIR]" in main.verbs()["fetch"].help
    assert "-m MODEL" in main.verbs()["fetch"].help


def test_config_names_the_recipe():
    for given in (["config=sd14"], ["--config", "sd14"], ["--config=sd14"], ["sd14"]):
        assert overrides.split(given).recipe == "sd14"


def test_everything_that_must_be_given_is_reported_at_once(tmp_path):
    path = tmp_path / "r.yaml"
    text = "extends: sd14\nrun_name: ???\ndata: {resolution: '???'}\ntraining: {duration: '???'}\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load(str(path))
    assert {problem.path for problem in caught.value.problems} == {"run_name", "data.resolution", "training.duration"}


def test_the_template_is_an_annotated_recipe(capsys):
    assert main.run(["recipes", "--template"]) == 0
    text = capsys.readouterr().out
    assert "run_name: ???" in text
    assert all(f"\n{section}:\n" in text for section in ("model", "objective", "data", "training", "optimizer"))


def test_no_path_of_ours_is_another_trainers_name():
    ours = {*Config.model_fields} | {f"{row.name}" for row in EVERY if row.name in row.values}
    assert {"run_name", "output_dir", "seed"} <= ours
