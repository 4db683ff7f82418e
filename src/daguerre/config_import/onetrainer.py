"""What OneTrainer's JSON means here: a config as its window saves it, or a preset, with its concepts and samples."""

from __future__ import annotations

from typing import Any

from daguerre.config.aliases.values import OPTIMIZERS
from daguerre.config_import import base_models as models
from daguerre.config_import import peers
from daguerre.config_import.peers import Folder
from daguerre.config_import.reader import REQUIRED, Reading

TRAINER = "OneTrainer"
UNASKED: dict[str, Any] = peers.UNASKED | {
    "training.duration": "100 epochs",
    "training.per_device_batch_size": 1,
    "training.gradient_checkpointing": True,
    "optimizer.learning_rate": 3e-6,
    "lr_scheduler.warmup": "200 steps",
    "data.buckets.aspects": "auto",
}
METHODS = {"LORA": "LoRA", "EMBEDDING": "new tokens (textual inversion)", "FINE_TUNE_VAE": "the autoencoder of a base"}
FAMILIES = dict.fromkeys(("15", "20", "20_BASE", "21", "21_BASE"), "sd") | {"XL_10_BASE": "sdxl"}
"""What follows on STABLE_DIFFUSION_, and the family."""
DTYPES = {"FLOAT_32": "no", "TFLOAT_32": "no", "BFLOAT_16": "bf16", "FLOAT_16": "fp16"}
WEIGHTS = {"FLOAT_32": "float32", "BFLOAT_16": "bfloat16", "FLOAT_16": "float16"}
UNITS = {"STEP": "steps", "EPOCH": "epochs"}
VALUES: dict[str, tuple[str, dict[Any, Any]]] = {
    # key: (our setting, theirs to ours)
    "learning_rate_scheduler": (
        "lr_scheduler.name",
        {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"},
    ),
    "attention_mechanism": ("training.attention", {"SDP": "auto", "FLASH": "flash", "CUDNN": "cudnn"}),
    "ema": ("ema.enabled", {"OFF": False, "GPU": True, "CPU": True}),
    "aspect_ratio_bucketing": ("data.buckets.aspects", {True: "auto", False: "square"}),
    "compile": ("training.compile", {True: "blocks", False: False}),
}
SAME = {
    "base_model_name": "model.pretrained_model_name_or_path",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "training.per_device_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "clip_grad_norm": "training.max_grad_norm",
    "offset_noise_weight": "objective.noise.offset",
    "perturbation_noise_weight": "objective.noise.input_perturbation",
    "tensorboard": "logging.tensorboard",
    "dataloader_threads": "loader.num_workers",
    "caching_threads": "loader.num_workers",
    "unet.train": "model.train_unet",
    "unet.gradient_checkpointing": "training.gradient_checkpointing",
}
IN_OPTIMIZER = {name: f"optimizer.{name}" for name in ("beta1", "beta2", "weight_decay", "d0", "d_coef", "growth_rate")}
IN_OPTIMIZER |= {"eps": "optimizer.epsilon"}
NO_PART = (
    *("prior.*", "transformer.*", "unconditional_transformer.*", "effnet_encoder.*", "decoder*", "text_encoder_3*"),
    *("text_encoder_4*", "quantization.*", "lora_*", "peft_type", "oft_*", "lokr_*", "embedding*", "dora_*"),
    *(
        "additional_embeddings*",
        "bundle_*",
        "optimizer_defaults.*",
        "vae.*",
        "frames",
        "text_encoder_2_sequence_length",
    ),
    *("text_encoder_sequence_length", "vb_loss_strength"),
)
"""Settings of parts that such a model or method does not have, or of what is switched off elsewhere."""
NO_MATTER = (
    *("__version", "config_version", "debug_*", "cache_dir", "tensorboard_*", "workspace_dir", "validat*"),
    *("continue_last_backup", "prevent_overwrites", "include_train_config", "output_*", "async_*", "layer_*"),
    *("concept_file_name", "sample_*", "samples_to_tensorboard", "non_ema_sampling", "cloud.*", "secrets.*"),
    *("backup_*", "save_*", "rolling_*", "*_caching", "clear_cache_before_training", "prefetch_next_batch"),
    *("train_device", "temp_device", "multi_gpu", "device_indexes", "gradient_reduce*", "fused_gradient_reduce"),
    *("enable_*", "fallback_train_dtype", "gradient_checkpointing", "*.gradient_checkpointing", "*.offload_fraction"),
    *("*.activation_offloading", "*.weight_dtype", "*.dropout_probability", "*.train_embedding", "*.attention_mask"),
    *("*.guidance_scale", "*.include", "*.model_name", "*.stop_training_after*", "scheduler_params", "preserve_*"),
    *("loss_weight_strength", "huber_delta", "noising_*", "timestep_shift", "learning_rate_cycles", "cep_gamma"),
    *("learning_rate_min_factor", "ema_*", "optimizer.*", "weight_dtype", "dropout_probability", "lora*", "*.seed"),
)
"""Settings of the machine, of the window, or of what other keys have switched off."""
EXPECTED: dict[str, tuple[Any, str]] = {
    "mse_strength": (1.0, "the loss is the squared error"),
    "mae_strength": (0.0, "the loss is the squared error"),
    "log_cosh_strength": (0.0, "the loss is the squared error"),
    "huber_strength": (0.0, "the loss is the squared error"),
    "timestep_distribution": ("UNIFORM", "times are drawn alike"),
    "min_noising_strength": (0.0, "times are drawn from the whole schedule"),
    "max_noising_strength": (1.0, "times are drawn from the whole schedule"),
    "loss_scaler": ("NONE", "the loss is not scaled by the batch"),
    "learning_rate_scaler": ("NONE", "the rate is not scaled by the batch"),
}


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    method, kind = str(reading.get("training_method", "FINE_TUNE")), str(reading.get("model_type", ""))
    if method != "FINE_TUNE":
        raise peers.not_there(METHODS.get(method, method), TRAINER)
    family = FAMILIES.get(kind.removeprefix("STABLE_DIFFUSION_"), "" if kind else "sd")
    if not family:
        raise peers.not_there(f"a model of type {kind}", TRAINER)
    reading.notice("training_method", "the whole network is trained")
    reading.carry("model_type", "model.family", family)
    _place(reading)
    _model(reading, family)
    folders = _folders(reading)
    peers.lay(reading, folders)
    _concepts(reading, folders)
    for key, path in SAME.items():
        reading.carry(key, path)
    for key, (path, values) in VALUES.items():
        if reading.get(key) in values:
            reading.carry(key, path, values[reading.get(key)])
    _precision(reading)
    _learning(reading)
    _masks(reading)
    _sizes(reading)
    sizes = (reading.get("batch_size"), reading.get("gradient_accumulation_steps"))
    if peers.asks(reading.get("epochs")):
        peers.length(reading, "epochs", "training.duration", folders, sizes)
    _saves_and_samples(reading, folders, sizes)
    for key, (value, what) in EXPECTED.items():
        reading.expect(key, value, what)
    for pattern in NO_PART:
        for key in reading.keys(pattern):
            reading.notice(key, "no part of this model or method")
    peers.finish(reading, NO_MATTER, UNASKED)


def _place(reading: Reading) -> None:
    """The workspace is the run's folder."""
    folder, _, name = str(reading.get("workspace_dir") or "").replace("\\", "/").rstrip("/").rpartition("/")
    values = {"run_name": name or REQUIRED, "output_dir": folder or "runs"}
    reading.carry_all("workspace_dir", values)
    reading.assume({"run_name": REQUIRED, "output_dir": "runs"})


def _model(reading: Reading, family: str) -> None:
    base = models.base(reading.get("base_model_name", REQUIRED))
    reading.assume({"model.family": family, "model.pretrained_model_name_or_path": REQUIRED})
    objective = (
        base.objective if base.known else "v" if str(reading.get("model_type")).endswith(("_20", "_21")) else "eps"
    )
    for key, name in {"force_v_prediction": "v", "force_epsilon_prediction": "eps"}.items():
        if reading.get(key) is True:
            reading.carry(key, "objective.name", name)
        reading.notice(key, "the base's own")
    reading.assume({"objective.name": objective})
    reading.carry("rescale_noise_scheduler_to_zero_terminal_snr", "objective.schedule.zero_terminal_snr")
    if peers.asks(reading.get("vae.model_name")):
        reading.carry("vae.model_name", "model.vae")
    encoders = ("text_encoder", "text_encoder_2") if family == "sdxl" else ("text_encoder",)
    rates: dict[str, Any] = {}
    for name in encoders:
        reading.carry(f"{name}.train", f"model.train_{name}")
        reading.assume({f"model.train_{name}": True})
        if reading.values[f"model.train_{name}"] and peers.asks(reading.get(f"{name}.learning_rate")):
            rates[f"{name}.*"] = reading.get(f"{name}.learning_rate")
        _layer(reading, name, family)
    if peers.asks(reading.get("unet.learning_rate")):
        rates["unet.*"] = reading.get("unet.learning_rate")
    for name in (*encoders, "unet"):
        if f"{name}.*" in rates:
            reading.carry(f"{name}.learning_rate", "optimizer.learning_rates", rates)
        reading.notice(f"{name}.learning_rate", "that of all")
    for key in reading.keys("text_encoder_2*") if family == "sd" else ():
        reading.notice(key, "no part of this model or method")
    for name in (*encoders, "unet"):
        unit = reading.get(f"{name}.stop_training_after_unit", "NEVER" if name == "unet" else "EPOCH")
        if unit != "NEVER" and reading.values.get(f"model.train_{name}"):
            for key in reading.keys(f"{name}.stop_training_after*"):
                reading.refuse(key, f"what is trained learns to the end: model.train_{name}=false leaves it as it is")
        if peers.asks(reading.get(f"{name}.dropout_probability")):
            reading.refuse(f"{name}.dropout_probability", "data.caption_dropout drops a caption for all encoders alike")


def _layer(reading: Reading, name: str, family: str) -> None:
    """Layers that are left out are counted from the family's own last one."""
    key, skip = f"{name}_layer_skip", reading.get(f"{name}_layer_skip")
    if skip and isinstance(skip, int):
        ending = "_2" if name.endswith("_2") else ""
        reading.carry(key, f"model.text_encoder_layer{ending}", -(2 if family == "sdxl" else 1) - skip)
    reading.notice(key, "the family's own layer")


def _folders(reading: Reading) -> list[Folder]:
    numbers = sorted({int(key.split(".")[1]) for key in reading.keys("concepts.*.*")})
    found = []
    for prefix in (f"concepts.{number}" for number in numbers):
        if reading.get(f"{prefix}.enabled", True) is False or reading.get(f"{prefix}.validation_concept") is True:
            for key in reading.keys(f"{prefix}.*"):
                reading.notice(key, "this concept is not trained on")
            continue
        repeats = reading.get(f"{prefix}.balancing", reading.get(f"{prefix}.repeats", 1))
        settings = {"captions_from": "file_names"} if reading.get(f"{prefix}.text.prompt_source") == "filename" else {}
        found.append(
            Folder(
                prefix,
                reading.get(f"{prefix}.path", REQUIRED),
                float(repeats or 1),
                name=str(reading.get(f"{prefix}.name") or ""),
                settings=settings,
            )
        )
    return found


def _concepts(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        shuffled = reading.get(f"{folder.key}.text.enable_tag_shuffling") is True
        paths = {"path": "path"} | ({"loss_weight": "loss_weight"} if len(folders) > 1 else {})
        if shuffled:
            paths |= {
                "text.enable_tag_shuffling": "captions.shuffle_tags",
                "text.tag_delimiter": "captions.tag_separator",
            }
            paths |= {"text.keep_tags_count": "captions.keep_tags"}
        for name, path in paths.items():
            reading.carry(f"{folder.key}.{name}", f"{folder.place}.{path}")
        reading.carry(f"{folder.key}.image.enable_random_flip", "data.random_flip")
        jitter = reading.get(f"{folder.key}.image.enable_crop_jitter")
        reading.carry(f"{folder.key}.image.enable_crop_jitter", "data.crop", "random" if jitter else "center")
        for name in ("balancing", "repeats", "balancing_strategy"):
            reading.notice(f"{folder.key}.{name}", "in data.weights, or data.repeats")
        source = f"{folder.key}.text.prompt_source"
        if reading.get(source) in ("sample", "filename", None):
            reading.notice(source, "text files beside the pictures, or their names")
        reading.refuse(source, "one text file for all pictures: data.captions.templates takes several sentences")
        for name in (
            "name",
            "enabled",
            "validation_concept",
            "include_subdirectories",
            "*_variations",
            "seed",
            "__version",
        ):
            for key in reading.keys(f"{folder.key}.{name}"):
                reading.notice(key, "every picture has its own noise, crop and caption each time")
        for key in [*reading.keys(f"{folder.key}.text.*"), *reading.keys(f"{folder.key}.image.*")]:
            switch = key.rpartition(".")[2]
            if not peers.asks(reading.get(key)) or not switch.startswith(
                ("enable_", "tag_dropout_enable", "caps_randomize_enable")
            ):
                reading.notice(key, "off there, or part of what is off")


def _precision(reading: Reading) -> None:
    weights = WEIGHTS.get(str(reading.get("unet.weight_dtype", "FLOAT_32")))
    computes = DTYPES.get(str(reading.get("train_dtype", "FLOAT_16")))
    if weights:
        reading.carry("unet.weight_dtype", "training.weights_dtype", weights)
    if weights in (None, "float32") and computes:
        reading.carry("train_dtype", "training.mixed_precision", computes)
        reading.assume({"training.mixed_precision": computes})
    if weights not in (None, "float32"):
        reading.notice("train_dtype", "weights of 16 bits are computed with as they are")


def _learning(reading: Reading) -> None:
    warmup, parts = reading.get("learning_rate_warmup_steps", 200), reading.get("gradient_accumulation_steps", 1)
    if isinstance(warmup, int | float) and (warmup > 1 or warmup == 0) and isinstance(parts, int) and parts > 0:
        why = "batches there, updates here" if parts > 1 else ""
        reading.carry("learning_rate_warmup_steps", "lr_scheduler.warmup", f"{int(warmup / parts)} steps", why)
    reading.refuse("learning_rate_warmup_steps", "a share of the run: give lr_scheduler.warmup")
    if reading.get("learning_rate_scheduler") in ("LINEAR", "COSINE"):
        reading.carry("learning_rate_min_factor", "lr_scheduler.final")
    name = str(reading.get("optimizer.optimizer", "ADAMW"))
    plain = name.lower().replace("_", "")
    if plain in OPTIMIZERS:
        reading.carry("optimizer.optimizer", "optimizer.name", OPTIMIZERS[plain])
    reading.refuse(
        "optimizer.optimizer", f"the optimizer {name} is not there: {', '.join(sorted(set(OPTIMIZERS.values())))}"
    )
    for key, path in IN_OPTIMIZER.items():
        if reading.get(f"optimizer.{key}") is not None and plain in OPTIMIZERS:
            reading.carry(f"optimizer.{key}", path)
    strength = reading.get("loss_weight_strength", 5.0)
    laws = {
        "CONSTANT": {"objective.weighting.name": "none"},
        "DEBIASED_ESTIMATION": {"objective.weighting.name": "debiased"},
    }
    laws |= {"MIN_SNR_GAMMA": {"objective.weighting.name": "min_snr", "objective.weighting.snr_gamma": strength}}
    laws |= {"P2": {"objective.weighting.name": "p2", "objective.weighting.p2_gamma": strength}}
    if str(reading.get("loss_weight_fn")) in laws:
        reading.carry_all("loss_weight_fn", laws[str(reading.get("loss_weight_fn"))])
        reading.notice("loss_weight_strength", "in objective.weighting, where it has an effect")
    if reading.values.get("ema.enabled"):
        reading.carry("ema_decay", "ema.decay")
        reading.expect("ema_update_step_interval", 1, "averages move with every update")


def _masks(reading: Reading) -> None:
    """Masks are read from the same files: `cat-masklabel.png` beside `cat.jpg`."""
    weights = {"unmasked_weight": ("outside_weight", 0.1), "normalize_masked_area_loss": ("normalise", False)}
    others = {"unmasked_probability": "masks count each time", "masked_prior_preservation_weight": "no prior is learnt"}
    if reading.get("masked_training") is True:
        mask = {f"objective.mask.{ours}": reading.get(key, usual) for key, (ours, usual) in weights.items()}
        reading.carry_all("masked_training", mask)
        for key in weights:
            reading.notice(key, "in objective.mask")
        for key, what in others.items():
            reading.expect(key, 0.0, what)
    for key in ("masked_training", *weights, *others):
        reading.notice(key, "no masks")


def _sizes(reading: Reading) -> None:
    first, _, others = str(reading.get("resolution", "")).partition(",")
    if first.strip().isdigit() and not others:
        reading.carry("resolution", "data.resolution", int(first))
    reading.refuse("resolution", "each picture at several sizes is not there; data.buckets.resolutions sorts by size")
    reading.assume({"data.resolution": int(first) if first.strip().isdigit() else REQUIRED})


def _saves_and_samples(reading: Reading, folders: list[Folder], sizes: tuple[Any, Any]) -> None:
    unit = UNITS.get(str(reading.get("save_every_unit", reading.get("save_after_unit"))))
    for key in ("save_every", "save_after"):
        if unit and peers.asks(reading.get(key)):
            if unit == "steps":
                reading.carry(key, "checkpoint.every", f"{int(reading.get(key))} steps")
            peers.length(reading, key, "checkpoint.every", folders, sizes)
    prompts = [reading.get(key) for key in reading.keys("samples.*.prompt")]
    if prompts:
        reading.assume_over({"sampling.prompts": [str(prompt) for prompt in prompts]})
    for key in reading.keys("samples.*.prompt"):
        reading.notice(key, "one of sampling.prompts")
    shared = {"cfg_scale": "guidance_scale", "diffusion_steps": "num_inference_steps", "seed": "seed"}
    shared |= {"width": "width", "height": "height", "negative_prompt": "negative_prompt"}
    for name, ours in shared.items():
        reading.carry(f"samples.0.{name}", f"sampling.{ours}")
    for key in reading.keys("samples.*"):
        reading.notice(key, "all pictures are drawn as the first one")
