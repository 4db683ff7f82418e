"""OneTrainer's configs: what several keys mean together. Each by itself is in onetrainer.yaml."""

from typing import Any

from daguerre.foreign import base_models as models
from daguerre.foreign import flows, loss_weights, peers
from daguerre.foreign.names.values import OPTIMIZERS
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading, Tables

TRAINER = "OneTrainer"
TABLES = Tables("onetrainer")
_RESTARTS = "COSINE_WITH_HARD_RESTARTS"
LAYERS = {
    "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*": [
        "transformer.layers.*.attention.*",
        "transformer.layers.*.feed_forward.*",
    ]
}
"""Regular expressions of its presets that name layers, as patterns."""


def convert(reading: Reading) -> None:
    method, kind = str(reading.get("training_method", "FINE_TUNE")), str(reading.get("model_type", ""))
    if method not in ("FINE_TUNE", "LORA", "EMBEDDING"):
        raise peers.not_there(TABLES["methods"].get(method, method), TRAINER)
    family = TABLES["families"].get(kind.removeprefix("STABLE_DIFFUSION_"), "" if kind else "sd")
    if not family:
        raise peers.not_there(f"a model of type {kind}", TRAINER)
    reading.carry("model_type", "model.family", family)
    net = peers.denoiser(family)
    _place(reading)
    if method == "LORA":
        _lora(reading, family)
    _embeddings(reading, family, method)
    reading.notice("training_method", "the whole network is trained")
    _model(reading, family)
    folders = _folders(reading)
    if peers.asks(reading.get("concept_file_name")) and not any(key.startswith("concepts.") for key in reading.whole):
        reading.refuse("concept_file_name", peers.NO_FILE)
    if peers.asks(reading.get("sample_definition_file_name")) and not reading.keys("samples.*"):
        reading.notice("sample_definition_file_name", "not on this machine: prompts are captions of the data")
    peers.lay(reading, folders)
    _concepts(reading, folders)
    if models.is_flow(family):
        _flow(reading, family)
    _precision(reading, net)
    _cosine(reading)
    reading.take(_of(net, TABLES["same"]))
    _times(reading)
    _learning(reading)
    _masks(reading)
    _sizes(reading)
    sizes = (reading.get("batch_size"), reading.get("gradient_accumulation_steps"))
    if peers.asks(reading.get("epochs")):
        peers.length(reading, "epochs", "training.duration", folders, sizes)
    _saves_and_samples(reading, folders, sizes)
    reading.take(TABLES["last"])
    reading.take(_of(net, TABLES["otherwise"]))
    reading.note(["optimizer_defaults.*"], "its window's memory of other optimizers, which training does not read")
    peers.finish(reading, TABLES)
    if models.is_flow(family):
        flows.finish(reading)


def _of(net: str, table: dict[str, Any]) -> dict[str, Any]:
    """A table for a model whose denoiser is a network of this name, where the table says UNet."""
    named = {"model.train_unet": f"model.train_{net}"}
    return {
        names.replace("unet.", f"{net}."): named.get(row, row) if isinstance(row, str) else row
        for names, row in table.items()
    }


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
    objective = "flow" if models.is_flow(family) else objective
    for key, name in {"force_v_prediction": "v", "force_epsilon_prediction": "eps"}.items():
        if reading.get(key) is True:
            reading.carry(key, "objective.name", name)
        reading.notice(key, "the base's own")
    reading.assume({"objective.name": objective})
    reading.carry("rescale_noise_scheduler_to_zero_terminal_snr", "objective.schedule.zero_terminal_snr")
    if peers.asks(reading.get("vae.model_name")):
        reading.carry("vae.model_name", "model.vae")
    reading.notice("vae.model_name", "the base's own")
    _trained(reading, family)


def _lora(reading: Reading, family: str) -> None:
    """A LoRA of the networks that are trained. The filter of layers is the UNet's alone, and counts parts of names."""
    kind = {"LORA": "lora", "LOHA": "loha"}.get(str(reading.get("peft_type", "LORA")))
    if kind is None:
        raise peers.not_there(f"a LoRA of type {reading.get('peft_type')}", TRAINER)
    if reading.get("lora_decompose") is True:
        kind = "dora"
        axis = "lora_decompose_output_axis"
        if reading.get(axis) is not True:
            why = "lengths are those of columns there, of rows (the output's axis) here"
            reading.refuse(axis if axis in reading.rest else "lora_decompose", why)
    net, layers = peers.denoiser(family), str(reading.get("layer_filter") or "")
    parts = [f"{net}.*{part.strip()}*" for part in layers.split(",") if part.strip()]
    if parts and reading.get("layer_filter_regex") is True:
        if layers not in LAYERS:
            raise peers.not_there("layers that are named by a regular expression", TRAINER)
        parts = LAYERS[layers]
    rank = reading.get("lora_rank", 16)
    ranks = {name: rank for name in peers.encoders(family) if reading.get(f"{name}.train", True) is True}
    targets = parts + [f"{name}.*" for name in ranks] if parts else "all"
    ranks |= {} if reading.get(f"{net}.train", True) is True else {net: None}
    values = {"name": "lora", "kind": kind, "rank": rank, "alpha": 1.0, "targets": targets}
    values |= {f"ranks.{name}": own for name, own in ranks.items()}
    reading.carry_all("training_method", {f"adapters.lora.{name}": value for name, value in values.items()})
    peers.no_dropout(reading, "dropout_probability", kind)
    reading.take(_of(net, TABLES["lora"]))


def _embeddings(reading: Reading, family: str, method: str) -> None:
    """New tokens: that of the method EMBEDDING, and additional ones with a LoRA or a whole UNet."""
    encoders, net = peers.encoders(family), peers.denoiser(family)
    places = [*(["embedding"] if method == "EMBEDDING" else []), *reading.numbered("additional_embeddings")]
    tokens = dict(token for place in places if (token := _token(reading, place)))
    if not tokens and method != "EMBEDDING":
        return
    values: dict[str, Any] = {"adapters.tokens.name": "tokens", "adapters.tokens.tokens": tokens}
    learning = [name for name in encoders if reading.get(f"{name}.train_embedding", True)]
    if 0 < len(learning) < len(encoders):
        values["adapters.tokens.text_encoders"] = learning
    if method == "FINE_TUNE":
        if any(reading.get(f"{name}.train", True) for name in encoders):
            raise peers.not_there("a whole text encoder and embeddings of it", TRAINER)
        values |= {"adapters.full.name": "full", "adapters.full.train": [net]}
    reading.assume_over(values)
    reading.notice("training_method", "adapters" if method == "FINE_TUNE" else "adapters.tokens")
    reading.note([f"{name}.train" for name in (net, *encoders)], "what is trained is in adapters")
    if reading.get("preserve_embedding_norm") is True:
        reading.refuse("preserve_embedding_norm", "vectors are not scaled after an update (docs/tokens.md)")
    if peers.asks(reading.get("embedding_learning_rate")):
        rates = {"*.rows": reading.get("embedding_learning_rate")}
        reading.carry("embedding_learning_rate", "optimizer.learning_rates", rates)
    reading.take(TABLES["embeddings"])


def _token(reading: Reading, place: str) -> tuple[str, dict[str, Any]] | None:
    """Name and settings of a new token; None for one that cannot be trained here."""
    output = reading.get(f"{place}.is_output_embedding") is True
    if output or reading.get(f"{place}.train") is False:
        why = "embeddings of an encoder's output are not supported" if output else "every new token is trained"
        reading.take({"*": {"refused": why}}, f"{place}.")
        return None
    file, text = reading.get(f"{place}.model_name"), reading.get(f"{place}.initial_embedding_text", "*")
    given = {"vectors": reading.get(f"{place}.token_count", 1)}
    given |= {"init_file": file} if peers.asks(file) else {"init": text}
    name = str(reading.get(f"{place}.placeholder", "<embedding>"))
    reading.note([f"{place}.initial_embedding_text"], "where it starts; of a short text the tokens come again, * there")
    if str(reading.get(f"{place}.stop_training_after_unit", "NEVER")) != "NEVER":
        reading.refuse(f"{place}.stop_training_after_unit", "a new token is trained to the end of the run")
    reading.note([f"{place}.{key}" for key in TABLES["token"]], f"the new token {name}")
    return name, {key: value for key, value in given.items() if value is not None}


def _trained(reading: Reading, family: str) -> None:
    """Networks that are trained, and their learning rates."""
    encoders, net = peers.encoders(family), peers.denoiser(family)
    rates: dict[str, Any] = dict(reading.values.get("optimizer.learning_rates", {}))
    adapts = any(path.startswith("adapters.") for path in reading.values)
    for name in encoders:
        trained = reading.get(f"{name}.train", True) and (not adapts or "adapters.lora.name" in reading.values)
        reading.carry(f"{name}.train", f"model.train_{name}")
        if not adapts:
            reading.assume({f"model.train_{name}": True})
        if "*.rows" in rates and trained and peers.asks(reading.get(f"{name}.learning_rate")):
            why = "its pattern fits the embeddings, too: set optimizer.learning_rates by narrower ones"
            reading.refuse(f"{name}.learning_rate", why)
        elif trained and peers.asks(reading.get(f"{name}.learning_rate")):
            rates[f"{name}.*"] = reading.get(f"{name}.learning_rate")
        _layer(reading, name, family)
    if peers.asks(reading.get(f"{net}.learning_rate")):
        rates[f"{net}.*"] = reading.get(f"{net}.learning_rate")
    for name in (*encoders, net):
        if f"{name}.*" in rates and reading.get("optimizer.optimizer") == "PRODIGY":
            reading.refuse(f"{name}.learning_rate", peers.ONE_RATE)
        elif f"{name}.*" in rates:
            reading.carry(f"{name}.learning_rate", "optimizer.learning_rates", rates)
        reading.notice(f"{name}.learning_rate", "that of all")
    if "text_encoder_2" not in encoders:
        rest = [key for key in reading.rest if key.startswith("text_encoder_2")]
        reading.note(rest, "this model has no second text encoder")
    for name in (*encoders, net):
        _end(reading, name, net)
        if name != net and peers.asks(reading.get(f"{name}.dropout_probability")):
            reading.refuse(f"{name}.dropout_probability", "data.caption_dropout drops a caption for all encoders alike")


def _end(reading: Reading, name: str, net: str) -> None:
    """A network that is trained for a part of the run alone."""
    usual = ("NEVER", 0) if name == net else ("EPOCH", 30)
    keys = [f"{name}.stop_training_after_unit", f"{name}.stop_training_after"]
    unit, end = (reading.get(key, value) for key, value in zip(keys, usual, strict=True))
    within = str(unit) == "EPOCH" and peers.number(reading.get("epochs"), 100) <= peers.number(end)
    if not reading.get(f"{name}.train", True) or str(unit) == "NEVER" or within:
        reading.note(keys, "it is trained to the end of the run, or not at all")
    for key in keys:
        reading.refuse(key, f"a trained network is trained to the end: model.train_{name}=false does not train it")


def _layer(reading: Reading, name: str, family: str) -> None:
    """Layers that are left out are counted from the family's own last one."""
    key, skip = f"{name}_layer_skip", reading.get(f"{name}_layer_skip")
    if skip and models.is_flow(family):
        reading.refuse(key, "the hidden states that such a model reads of its text encoder are its own")
    elif skip and isinstance(skip, int):
        ending = "_2" if name.endswith("_2") else ""
        reading.carry(key, f"model.text_encoder_layer{ending}", -(2 if family == "sdxl" else 1) - skip)
    reading.notice(key, "the family's own layer")


def _folders(reading: Reading) -> list[Folder]:
    found = []
    for prefix in reading.numbered("concepts"):
        kind = reading.get(f"{prefix}.type", "STANDARD")
        validates = reading.get(f"{prefix}.validation_concept") is True or kind == "VALIDATION"
        if reading.get(f"{prefix}.enabled", True) is False or validates:
            reading.note([f"{prefix}.*"], "this concept is not trained on")
            continue
        if kind not in ("STANDARD", None):
            reading.refuse(f"{prefix}.type", "images whose predictions by the base are learnt: its images are left out")
            reading.note([f"{prefix}.*"], "this concept is left out")
            continue
        repeats = reading.get(f"{prefix}.balancing", reading.get(f"{prefix}.repeats", 1))
        named = reading.get(f"{prefix}.text.prompt_source") == "filename"
        folder = Folder(prefix, reading.get(f"{prefix}.path", REQUIRED), peers.number(repeats))
        if reading.get(f"{prefix}.balancing_strategy", "REPEATS") == "SAMPLES":
            folder.repeats = folder.repeats / folder.count if folder.count else 1
            if not folder.count:
                why = "its images cannot be counted from here: set data.weights, or data.repeats"
                reading.refuse(f"{prefix}.balancing_strategy", why)
        folder.name = str(reading.get(f"{prefix}.name") or "")
        folder.settings = {"captions_from": "file_names"} if named else {"captions.lines": "drawn"}
        if reading.get(f"{prefix}.include_subdirectories") is not True:
            folder.settings["recursive"] = False
        found.append(folder)
    return found


def _drops_tags(reading: Reading, prefix: str) -> bool:
    """True where each tag is drawn, with no list of special ones: the one of its ways that is here."""
    names = ("enable", "mode", "special_tags_mode")
    is_on, mode, special = (reading.get(f"{prefix}.text.tag_dropout_{name}") for name in names)
    return is_on is True and mode == "RANDOM" and special in (None, "NONE")


def _concepts(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        paths = dict(TABLES["concept"])
        paths |= TABLES["among_others"] if len(folders) > 1 else {}
        drops = _drops_tags(reading, folder.key)
        if drops:
            paths |= TABLES["with_tag_dropout"]
            reading.note([f"{folder.key}.text.tag_dropout_{name}" for name in ("enable", "mode")], "in tag_dropout")
        if drops or reading.get(f"{folder.key}.text.enable_tag_shuffling") is True:
            paths |= TABLES["with_shuffling"]
        reading.take({name: f"{folder.place}.{path}" for name, path in paths.items()}, f"{folder.key}.")
        reading.take(TABLES["all_concepts"], f"{folder.key}.")


def _flow(reading: Reading, family: str) -> None:
    """The law of times, whose numbers stand under the names of another law, and the shift; parts of the base."""
    if str(reading.get("timestep_distribution", "UNIFORM")) == "LOGIT_NORMAL":
        mean, std = (peers.number(reading.get(key), 0) for key in ("noising_bias", "noising_weight"))
        reading.carry_all("timestep_distribution", flows.times("logit_normal", mean, std + 1))
    elif reading.get("timestep_distribution", "UNIFORM") == "UNIFORM":
        reading.carry_all("timestep_distribution", flows.times("uniform"))
        reading.assume(flows.times("uniform"))
    by_size = reading.get("dynamic_timestep_shifting") is True
    moved = flows.own_shift(reading, True) if by_size else flows.shift(peers.number(reading.get("timestep_shift"), 1))
    reading.carry_all("dynamic_timestep_shifting" if by_size else "timestep_shift", moved)
    reading.assume(moved)
    reading.note(["timestep_shift", "dynamic_timestep_shifting"], f"in {flows.SCHEDULE}")
    scale = reading.get("samples.0.cfg_scale")
    flows.negative(reading, family, "samples.0.negative_prompt", scale)
    reading.carry("samples.0.cfg_scale", "sampling.guidance_scale", flows.guided(family, scale))
    if peers.asks(reading.get("transformer.model_name")):
        reading.carry(
            "transformer.model_name", "model.transformer", models.on_hub(reading.get("transformer.model_name"))
        )
    if reading.get("latent_caching", True) is True:
        reading.carry("latent_caching", "cache.path", "auto")
        reading.assume({"cache.path": "auto"})
    reading.take(TABLES["flow"])
    flows.precision(reading, "train_dtype")
    flows.embedded(reading, family, "transformer.guidance_scale")


def _precision(reading: Reading, net: str) -> None:
    key = f"{net}.weight_dtype"
    weights = TABLES["weights"].get(str(reading.get(key, "FLOAT_32")))
    computes = TABLES["computes"].get(str(reading.get("train_dtype", "FLOAT_16")))
    if weights:
        reading.carry(key, "training.weights_dtype", weights)
    if form := TABLES["forms"].get(str(reading.get(key))):
        reading.carry(key, "training.base_precision", form)
    if weights in (None, "float32") and computes:
        reading.carry("train_dtype", "training.mixed_precision", computes)
        reading.assume({"training.mixed_precision": computes})
    if weights not in (None, "float32"):
        reading.notice("train_dtype", "16-bit weights are used without conversion")


def _times(reading: Reading) -> None:
    """Before version 4 of the file a weight alone chose how times are drawn, which timestep_distribution does today."""
    version = reading.get("__version")
    is_old = "timestep_distribution" not in reading.whole and not (isinstance(version, int) and version >= 4)
    if is_old and peers.asks(reading.get("noising_weight")):
        for key in ("noising_weight", "noising_bias"):
            reading.refuse(key, "in files of this version times are drawn from a sigmoid of this weight and bias")
    reading.note(["noising_weight", "noising_bias"], "of another timestep_distribution")


def _learning(reading: Reading) -> None:
    warmup, parts = reading.get("learning_rate_warmup_steps", 200), reading.get("gradient_accumulation_steps", 1)
    if isinstance(warmup, int | float) and (warmup > 1 or warmup == 0) and isinstance(parts, int) and parts > 0:
        why = "batches there, updates here" if parts > 1 else ""
        reading.carry("learning_rate_warmup_steps", "lr_scheduler.warmup", f"{int(warmup / parts)} steps", why)
    reading.refuse("learning_rate_warmup_steps", "a share of the run: give lr_scheduler.warmup")
    if reading.get("learning_rate_scheduler") in ("LINEAR", _RESTARTS):
        reading.carry("learning_rate_min_factor", "lr_scheduler.final")
    if reading.get("learning_rate_scheduler") == _RESTARTS:
        reading.alias("learning_rate_cycles", "lr_num_cycles")
    name = str(reading.get("optimizer.optimizer", "ADAMW"))
    ours = OPTIMIZERS.get(name.lower().replace("_", ""))
    if ours is not None:
        reading.carry("optimizer.optimizer", "optimizer.name", ours)
        _numbers(reading, ours)
    known = ", ".join(sorted(set(OPTIMIZERS.values())))
    reading.refuse("optimizer.optimizer", f"the optimizer {name} is not available: {known}")
    loss_weights.onetrainer(reading)
    if reading.values.get("ema.enabled"):
        reading.carry("ema_decay", "ema.decay")
        reading.expect("ema_update_step_interval", 1, "the average is updated in every update")


def _cosine(reading: Reading) -> None:
    """Its COSINE, which is a quarter of a turn, where that of all others is a half."""
    if reading.get("learning_rate_scheduler") != "COSINE":
        return
    final = (1 + peers.number(reading.get("learning_rate_min_factor"), 0)) / 2
    reading.assume_over({"lr_scheduler.name": "cosine", "lr_scheduler.final": final})
    reading.refuse(
        "learning_rate_scheduler",
        f"COSINE ends at {final:g} of the peak there: lr_scheduler.final={final:g} is set, and the run differs: "
        f"half-way it has {final + (1 - final) * 0.707:.2f} of the peak there, {(1 + final) / 2:.2f} here",
    )
    reading.notice("learning_rate_min_factor", "in lr_scheduler.final")


def _numbers(reading: Reading, optimizer: str) -> None:
    """The optimizer's own numbers; those that are null are its usual ones, in both."""
    for name, row in TABLES["optimizer"].items():
        value = reading.get(f"optimizer.{name}")
        if value is not None and str(value) != "inf" and (row["of"] == "all" or optimizer in row["of"]):
            reading.carry(f"optimizer.{name}", row["to"])
    if optimizer == "prodigy" and reading.get("optimizer.decouple") is False:
        reading.refuse("optimizer.decouple", "Prodigy's weights decay by themselves here, as in AdamW")
    if reading.get(f"{peers.denoiser(reading.values['model.family'])}.weight_dtype") == "BFLOAT_16":
        reading.carry("optimizer.stochastic_rounding", "training.stochastic_rounding")


def _masks(reading: Reading) -> None:
    if reading.get("masked_training") is True:
        weights = {"outside_weight": ("unmasked_weight", 0.1), "normalise": ("normalize_masked_area_loss", False)}
        mask = {f"objective.mask.{ours}": reading.get(*theirs) for ours, theirs in weights.items()}
        reading.carry_all("masked_training", mask)
        reading.take(TABLES["masks"])
    reading.take(TABLES["no_masks"])


def _sizes(reading: Reading) -> None:
    first, _, others = str(reading.get("resolution", "")).partition(",")
    if first.strip().isdigit() and not others:
        reading.carry("resolution", "data.resolution", int(first))
    reading.refuse(
        "resolution", "training on each image at several sizes is not supported; data.buckets.resolutions sorts by size"
    )
    reading.assume({"data.resolution": int(first) if first.strip().isdigit() else REQUIRED})


def _saves_and_samples(reading: Reading, folders: list[Folder], sizes: tuple[Any, Any]) -> None:
    unit = TABLES["units"].get(str(reading.get("save_every_unit", reading.get("save_after_unit"))))
    for key in ("save_every", "save_after"):
        if unit and peers.asks(reading.get(key)):
            if unit == "steps":
                reading.carry(key, "checkpoint.every", f"{int(reading.get(key))} steps")
            peers.length(reading, key, "checkpoint.every", folders, sizes)
    off = [prefix for prefix in reading.numbered("samples") if reading.get(f"{prefix}.enabled") is False]
    reading.note([f"{prefix}.*" for prefix in off], "this sample is switched off")
    prompts = [str(reading.get(key)) for key in reading.keys("samples.*.prompt")]
    if prompts:
        reading.assume_over({"sampling.prompts": prompts})
    for prefix in reading.numbered("samples")[:1]:
        reading.take(TABLES["first_sample"], f"{prefix}.")
    reading.take(TABLES["samples"])
