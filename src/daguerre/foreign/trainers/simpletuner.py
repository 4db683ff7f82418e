"""SimpleTuner's configs: what several keys mean together. Each by itself is in simpletuner.yaml."""

import re
from typing import Any

from daguerre.foreign import base_models as models
from daguerre.foreign import flows, peers
from daguerre.foreign.names.values import NOT_PAGED
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading, Tables

TRAINER = "SimpleTuner"
TABLES = Tables("simpletuner")
HUB = "huggingface"
"""The type of data sets by their names on the hub."""
OF_ALL_CAPTIONS = ("caption_strategy", "only_instance_prompt", "prepend_instance_prompt")
"""Settings of captions for all data sets, which count where none of them can be read, too."""


def convert(reading: Reading) -> None:
    for key in [key for key, value in reading.rest.items() if value is None and "." not in key]:
        reading.notice(key, "null is as if it was not given")
        del reading.whole[key]
    kind = str(reading.get("model_type", "full"))
    if kind not in ("full", "lora"):
        raise peers.not_there(f"model_type={kind}", TRAINER)
    if reading.get("control") is True:
        raise peers.not_there("control images in further channels of the network (control)", TRAINER)
    if reading.get("controlnet") is True and kind == "lora":
        raise peers.not_there("a LoRA of a ControlNet (controlnet with model_type=lora; full is supported)", TRAINER)
    family = _model(reading)
    if kind == "lora":
        _lora(reading, family)
    if reading.get("controlnet") is True:
        reading.take({key: row for key, row in TABLES["controlnet"].items() if peers.asks(reading.get(key))})
    _text_encoders(reading, kind, family)
    reading.carry("tracker_run_name", "run_name")
    reading.assume({"run_name": REQUIRED, "output_dir": "simpletuner-results"})
    folders = _folders(reading)
    peers.lay(reading, folders)
    if not folders and any(peers.asks(reading.get(key)) for key in OF_ALL_CAPTIONS):
        reading.assume({f"data.{name}": value for name, value in _captions(reading, "data_backends.none").items()})
    _datasets(reading, folders)
    _sizes(reading, folders)
    _length(reading, folders)
    _optimizer(reading)
    _learning(reading)
    _noise(reading)
    if models.is_flow(family):
        _flow(reading, family)
    first, *others = str(reading.get("validation_resolution")).split(",")
    size = re.fullmatch(r"(\d+)x(\d+)", first)
    width, height = (int(size[1]), int(size[2])) if size else (reading.get("validation_resolution"),) * 2
    why = "the first of several sizes" if size and others else ""
    reading.carry_all("validation_resolution", {"sampling.width": width, "sampling.height": height}, why)
    dropout = reading.get("caption_dropout_probability", 0.1)
    for place in [folder.place for folder in folders] or ["data"]:
        reading.assume_over({f"{place}.caption_dropout": dropout})
    if peers.asks(reading.get("data_backend_config")) and not _backends(reading):
        reading.refuse("data_backend_config", peers.NO_FILE)
    reading.take(TABLES["last"])
    peers.huber(reading)
    peers.carry_known(reading, [*peers.OWN, *TABLES["alias"]])
    peers.finish(reading, TABLES)
    if models.is_flow(family):
        reading.assume({"cache.path": "auto"})
        flows.finish(reading)


def _lora(reading: Reading, family: str) -> None:
    """A LoRA of attention's layers, with the defaults of its command line."""
    if str(reading.get("lora_type", "standard")) != "standard":
        its = "LyCORIS by a config of its own (its algo is adapter.kind here, of tlora adapter.tlora_min_rank)"
        raise peers.not_there(its, TRAINER)
    rank, alpha = reading.get("lora_rank", 16), reading.get("lora_alpha")
    values = {"name": "lora", "rank": rank, "alpha": alpha or None, "dropout": 0.1}
    values["targets"] = TABLES["targets"].get(family, "attention")
    if reading.get("train_text_encoder") is True:
        values |= {f"ranks.{name}": rank for name in peers.encoders(family)}
    reading.assume({f"adapters.lora.{name}": value for name, value in values.items()})
    if reading.get("use_dora") is True and str(reading.get("lora_init_type")) in TABLES["not_of_dora"]:
        reading.refuse("lora_init_type", "a DoRA starts by default, gaussian or orthogonal here")
    reading.take(TABLES["lora"])


def _model(reading: Reading) -> str:
    """The base, by its place or by the name of a flavour. The family."""
    family, families = str(reading.get("model_family") or ""), TABLES["families"]
    others = [name for name in TABLES["flags_of_others"] if reading.get(name) is True]
    if others or (family and family not in families):
        raise peers.not_there(f"a model of the family {family or others[0]}", TRAINER)
    place, flavour = reading.get("pretrained_model_name_or_path"), reading.get("model_flavour")
    flavours = TABLES["flavours"].get(family, {})
    if other := TABLES["other_flavours"].get(str(flavour)):
        raise peers.not_there(other, TRAINER)
    if not peers.asks(place) and str(flavour) in flavours:
        reading.carry("model_flavour", "model.pretrained_model_name_or_path", flavours[str(flavour)])
    reading.notice("model_flavour", "pretrained_model_name_or_path is the base") if peers.asks(place) else None
    reading.refuse("model_flavour", f"the base is none of {', '.join(flavours)}: give pretrained_model_name_or_path")
    flavour = flavour if peers.asks(flavour) else TABLES["usual_flavours"].get(family)
    place = place if peers.asks(place) else flavours.get(str(flavour), REQUIRED)
    base = models.base(place)
    ours = families.get(family, base.family)
    ours = base.family if base.known and models.is_flow(ours) and models.is_flow(base.family) else ours
    reading.carry("model_family", "model.family", ours)
    for name in ("stable_diffusion_legacy", *TABLES["flags_of_others"]):
        reading.notice(name, "in model.family")
    later = family == "sd2x"
    objective = "flow" if models.is_flow(ours) else "v" if later else base.objective
    reading.assume({"model.family": ours, "objective.name": objective})
    reading.assume({"objective.schedule.zero_terminal_snr": True} if later else {})
    reading.assume({"model.pretrained_model_name_or_path": place})
    net = peers.denoiser(ours)
    own, folder = (reading.get(f"pretrained_{net}_{name}") for name in ("model_name_or_path", "subfolder"))
    folder = net if folder is None else folder
    if peers.asks(own):
        path = own if str(own).endswith(".safetensors") or not folder else f"{own}/{folder}"
        reading.carry(f"pretrained_{net}_model_name_or_path", f"model.{net}", path)
    reading.notice(f"pretrained_{net}_model_name_or_path", "the base's own")
    reading.notice(f"pretrained_{net}_subfolder", f"in model.{net}, where that is given")
    return str(ours)


def _flow(reading: Reading, family: str) -> None:
    """The law of times: the sigmoid of a normal number, or even times, and a static shift or that of the size."""
    given = peers.number(reading.get("flow_schedule_shift", 3.0), 0)
    auto, forced = reading.get("flow_schedule_auto_shift") is True, TABLES["forced_shifts"].get(family)
    std = peers.number(reading.get("flow_sigmoid_scale"), 1)
    uniform = reading.get("flow_use_uniform_schedule") is True
    law = flows.times("uniform") if uniform else flows.times("logit_normal", std=std)
    moved = flows.shift(forced or given) if forced or given > 0 else {}
    if auto and not moved:
        moved = flows.own_shift(reading, dynamic=True)
        if family in TABLES["other_tokens"]:
            reading.refuse("flow_schedule_auto_shift", "it counts a quarter of the tokens; the base's own shift is set")
    key = "flow_schedule_auto_shift" if auto and given <= 0 and not forced else "flow_schedule_shift"
    if moved:
        reading.carry_all(key, moved, "one shift for this model there" if forced else "")
    reading.carry_all("flow_use_uniform_schedule" if uniform else "flow_sigmoid_scale", law)
    reading.assume(law | moved)
    reading.note(["flow_sigmoid_scale", "flow_use_uniform_schedule"], f"in {flows.TIMES}")
    if reading.get("disable_assistant_lora") is True:
        reading.notice("assistant_lora_path", "disable_assistant_lora leaves it out")
    elif peers.asks(reading.get("assistant_lora_path")):
        reading.take(TABLES["assistant"])
    reading.take(TABLES["flow"])
    flows.precision(reading, "mixed_precision")
    scale = peers.number(reading.get("validation_guidance"), 1.0)
    flows.negative(reading, family, "validation_negative_prompt", scale + 1 - flows.guided(family, 1))


def _text_encoders(reading: Reading, kind: str, family: str) -> None:
    names, trained = peers.encoders(family), reading.get("train_text_encoder") is True
    if kind == "lora":
        reading.notice("train_text_encoder", "in the LoRA's ranks")
    elif reading.get("controlnet") is not True:
        reading.carry_all("train_text_encoder", {f"model.train_{name}": trained for name in names})
    if trained and peers.asks(rate := reading.get("text_encoder_lr")):
        reading.carry("text_encoder_lr", "optimizer.learning_rates", {f"{name}.*": float(rate) for name in names})
    reading.notice("text_encoder_lr", "no text encoder is trained, or at the rate of all")
    reading.notice("train_text_encoder", "a ControlNet is trained alone")


def _folders(reading: Reading) -> list[Folder]:
    """Local data sets of images; all others are refused, or hold no images."""
    found = []
    named = (reading.get(f"{place}.conditioning_data") for place in _backends(reading))
    used = [name for given in named if given is not None for name in _listed(given)]
    for prefix in reading.numbered("data_backends"):
        kind = str(reading.get(f"{prefix}.dataset_type", "image"))
        off = reading.get(f"{prefix}.disabled") is True or reading.get(f"{prefix}.disable") is True
        if off or kind in TABLES["without_images"]:
            reading.note([f"{prefix}.*"], "it is switched off" if off else f"no images: dataset_type={kind}")
        elif reading.get(f"{prefix}.id") in used:
            reading.note([f"{prefix}.*"], "the pictures of the images of another data set")
        elif kind != "image" or reading.get(f"{prefix}.type", "local") not in ("local", HUB):
            reading.take({"*": {"refused": TABLES["far"].get(kind, TABLES["far"]["image"])}}, f"{prefix}.")
        else:
            found.append(_folder(reading, prefix))
    return found


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _said(reading: Reading, prefix: str, name: str, default: Any = None) -> Any:
    """A setting of a data set, or that of all."""
    return reading.get(f"{prefix}.{name}", reading.get(name, default))


def _captions(reading: Reading, prefix: str) -> dict[str, Any]:
    """The settings of the captions of a data set."""
    far = reading.get(f"{prefix}.type") == HUB
    strategy = _said(reading, prefix, "caption_strategy", HUB if far else "filename")
    prompt = _said(reading, prefix, "instance_prompt")
    settings: dict[str, Any] = {"captions_from": "file_names"} if strategy == "filename" else {}
    if strategy == "instanceprompt" or _said(reading, prefix, "only_instance_prompt") is True:
        settings = {"captions.text": prompt or REQUIRED}
    elif _said(reading, prefix, "prepend_instance_prompt") is True:
        settings["captions.prefix"] = f"{prompt} "
    if strategy == "textfile" and "captions.text" not in settings:
        whole = reading.get(f"{prefix}.disable_multiline_split") is True
        settings["captions.lines"] = "joined" if whole else "drawn"
    return settings


def _folder(reading: Reading, prefix: str) -> Folder:
    settings = _captions(reading, prefix)
    settings |= _pictures(reading, prefix)
    if reading.get(f"{prefix}.caption_shuffle.enable") is True:
        settings["captions.shuffle_tags"] = True
        settings["captions.keep_tags"] = reading.get(f"{prefix}.caption_shuffle.position_start", 0)
    repeats, share = reading.get(f"{prefix}.repeats", 0), reading.get(f"{prefix}.probability", 1)
    times = float(repeats + 1 if isinstance(repeats, int) else 1)
    times *= share if isinstance(share, int | float) and share else 1
    key, setting = "instance_data_dir", "path"
    if reading.get(f"{prefix}.type") == HUB:
        key, setting, settings = "dataset_name", "name", _of_hub(reading, prefix) | settings
    path, name = reading.get(f"{prefix}.{key}", REQUIRED), str(reading.get(f"{prefix}.id") or "")
    return Folder(prefix, path, times, name=name, setting=setting, settings=settings)


def _of_hub(reading: Reading, prefix: str) -> dict[str, Any]:
    """The source of a data set by its name on the hub."""
    found: dict[str, Any] = {"source": HUB, "image_column": _column(reading, prefix)}
    found |= {name: reading.get(f"{prefix}.{key}") for key, name in TABLES["names_of_hub"].items()}
    captions = reading.get(f"{prefix}.huggingface.caption_column", reading.get(f"{prefix}.caption_column"))
    if isinstance(captions, str) and "." not in captions:
        found["caption_column"] = captions
    return {name: value for name, value in found.items() if value is not None}


def _column(reading: Reading, prefix: str) -> Any:
    """The column of the images of a data set on the hub."""
    usual = reading.get(f"{prefix}.image_column") or "image"
    return reading.get(f"{prefix}.huggingface.image_column", usual)


def _pictures(reading: Reading, prefix: str) -> dict[str, Any]:
    """The folder of a data set's control images or masks; or, where control images are made, the condition by which."""
    given, controls = reading.get(f"{prefix}.conditioning_data"), reading.get("controlnet") is True
    names = _listed(given)
    sets = {str(reading.get(f"{place}.id")): place for place in _backends(reading)}
    family = str(reading.values["model.family"])
    if models.references(family) is not None and not controls:
        places = [sets[str(name)] for name in names if str(name) in sets]
        if places and {reading.get(f"{place}.conditioning_type") for place in places} <= {*TABLES["references"]}:
            return _references(reading, prefix, places)
        reading.take(TABLES["computed_references"], f"{prefix}.")
    if len(names) == 1 and str(names[0]) in sets:
        place = sets[str(names[0])]
        kind = reading.get(f"{place}.conditioning_type", "controlnet")
        ours = TABLES["pictures"].get(kind) if controls or kind == "mask" else None
        if ours is not None:
            reading.within(f"{prefix}.conditioning_data", f"{ours} of its source")
            if ours == "mask_dir":
                reading.assume_over({"objective.mask.outside_weight": 0, "objective.mask.normalise": False})
            return {ours: reading.get(f"{place}.instance_data_dir", REQUIRED)}
    if peers.asks(given):
        reading.refuse(
            f"{prefix}.conditioning_data", "it must be the id of one data set, of masks or of control images"
        )
    reading.notice(f"{prefix}.conditioning_data", "none is given")
    if controls and not reading.keys(f"{prefix}.conditioning.1.*"):
        reading.take(TABLES["conditions"], f"{prefix}.conditioning.0.")
    return {}


def _references(reading: Reading, prefix: str, places: list[str]) -> dict[str, Any]:
    """The reference images of a data set, in the order in which it names their data sets: folders, or columns."""
    key, far = f"{prefix}.conditioning_data", reading.get(f"{prefix}.type") == HUB
    place_of = ("type", "dataset_name") if far else ("type",)
    usual = {"type": "local"}
    if any(
        reading.get(f"{place}.{name}", usual.get(name)) != reading.get(f"{prefix}.{name}", usual.get(name))
        for place in places
        for name in place_of
    ):
        reading.refuse(key, "images and reference images are in folders both, or columns of one data set: move them")
        return {}
    found = [
        _column(reading, place) if far else reading.get(f"{place}.instance_data_dir", REQUIRED) for place in places
    ]
    setting = "reference_column" if far else "reference_dir"
    kinds = {TABLES["references"][reading.get(f"{place}.conditioning_type")] for place in places} - {""}
    drawn = len(found) > 1 and reading.get("conditioning_multidataset_sampling") != "combined"
    kinds |= {TABLES["drawn_references"]} if drawn else set()
    reading.within(key, "; ".join([f"{setting} of its source", *sorted(kinds)]))
    reading.note([f"{prefix}.conditioning_image_embeds"], "cache.path keeps what the text encoder makes of them")
    reading.assume_over({"model.references": max(len(found), reading.values.get("model.references", 0))})
    return {setting: peers.by_reference(found)}


def _backends(reading: Reading) -> list[str]:
    """The data sets, whether they were read already or not."""
    return sorted({".".join(key.split(".")[:2]) for key in reading.whole if key.startswith("data_backends.")})


def _datasets(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        place = f"{folder.key}."
        if reading.get(f"{place}crop") is True:
            reading.assume({"data.crop": "random"})
            square = reading.get(f"{place}crop_aspect", "square") == "square"
            reading.assume({"data.buckets.aspects": "square"} if square else {})
            reading.take(TABLES["cropped"], place)
        else:
            reading.take(TABLES["not_cropped"], place)
        if reading.get(f"{place}type") == HUB:
            paths = {key: f"{folder.place}.{name}" for key, name in TABLES["names_of_hub"].items()}
            reading.take(paths | TABLES["of_hub"], place)
            # Each is named after a column of the data set, which no table can list.
            limits = f"{place}huggingface.filter_func.quality_thresholds."
            named = [key.removeprefix(place) for key in reading.rest if key.startswith(limits)]
            reading.take(dict.fromkeys(named, TABLES["filtered"]), place)
        if peers.is_usual(reading.get(f"{place}train_batch_size"), reading.get("train_batch_size", 4)):
            reading.notice(f"{place}train_batch_size", "that of all")
        reading.take(TABLES["of_a_dataset"], place)
    reading.take(TABLES["of_all_datasets"])


def _sizes(reading: Reading, folders: list[Folder]) -> None:
    """One size for all data sets: a number of pixels, of the shorter side, or of megapixels."""
    places = [folder.key for folder in folders] or ["data_backends.none"]
    sizes = {place: _size(_said(reading, place, "resolution", 1024), _kind(reading, place)) for place in places}
    first = next(iter(sizes.values()))
    reading.assume({"data.resolution": first or REQUIRED})
    why = TABLES["units"].get(_kind(reading, places[0]), "")
    for place, size in sizes.items():
        if size == first and size is not None:
            reading.carry(f"{place}.resolution", "data.resolution", size, why)
        reading.refuse(f"{place}.resolution", "data sets of several sizes: data.buckets.resolutions sorts by size")
        reading.notice(f"{place}.resolution_type", "in data.resolution")
    if first is not None and f"{places[0]}.resolution" not in reading.whole:
        reading.carry("resolution", "data.resolution", first, why)
    reading.notice("resolution", "each data set gives its own")
    reading.notice("resolution_type", "in data.resolution")


def _kind(reading: Reading, place: str) -> str:
    return str(_said(reading, place, "resolution_type", "pixel_area"))


def _size(given: Any, kind: str) -> int | None:
    if not (size := peers.number(given, 0)):
        return None
    return round((size * 1e6) ** 0.5 / 64) * 64 if kind == "area" else int(size)


def _length(reading: Reading, folders: list[Folder]) -> None:
    if peers.asks(reading.get("max_train_steps")):
        reading.notice("num_train_epochs", "max_train_steps sets the length of the run")
    elif peers.asks(reading.get("num_train_epochs")):
        batch, parts = reading.get("train_batch_size", 4), reading.get("gradient_accumulation_steps", 1)
        reading.notice("max_train_steps", "num_train_epochs sets the length of the run")
        peers.length(reading, "num_train_epochs", "training.duration", folders, (batch, parts))
    reading.assume({"training.duration": REQUIRED})


def _optimizer(reading: Reading) -> None:
    """The optimizer with the numbers that it has there, which `optimizer_config` changes."""
    given = reading.get("optimizer", "adamw_bf16")
    own = TABLES["optimizers"].get(str(given).removesuffix("-paged"))
    if own is not None:
        why = NOT_PAGED if str(given).endswith("-paged") else ""
        reading.carry_all("optimizer", own, why) if "optimizer" in reading.rest else reading.assume(own)
    if str(given) == "adamw_bf16":
        reading.notice("mixed_precision", "16-bit weights are used without conversion")
        reading.assume({"training.mixed_precision": "auto"})
    elif str(given) in TABLES["other_optimizers"]:
        reading.refuse("optimizer", TABLES["other_optimizers"][str(given)])
    if peers.asks(pairs := reading.get("optimizer_config")):
        reading.alias("optimizer_config", "optimizer_args", str(pairs).split(","))
    reading.notice("optimizer_config", "the optimizer's usual numbers")


def _learning(reading: Reading) -> None:
    if str(reading.get("lr_scheduler")) == "constant" and not peers.is_usual(reading.get("lr_warmup_steps"), 0):
        reading.alias("lr_scheduler", value="constant_with_warmup")  # as there
    if str(reading.get("lr_scheduler")) == "polynomial":
        _polynomial(reading)
    if str(reading.get("lr_scheduler")) == "cosine_with_restarts":
        reading.refuse(
            "lr_scheduler", "each fall is as long as lr_warmup_steps there: give lr_scheduler.name and num_cycles"
        )
    if str(reading.get("grad_clip_method", "value")) == "value":
        reading.refuse(
            "max_grad_norm", "gradients are clipped by value there: give training.max_grad_norm for their norm"
        )
    if str(reading.get("lr_scheduler")) != "polynomial":
        reading.note(["lr_end", "lr_power"], "lr_scheduler=polynomial alone reads it")
    if reading.get("lr_scale") is not True:
        reading.notice("lr_scale_sqrt", "the rate is not scaled (lr_scale)")
    reading.take(TABLES["learning"])
    if reading.get("use_ema") is True:
        reading.assume({"ema.decay": 0.995})
    else:
        reading.take(TABLES["no_averages"])


def _noise(reading: Reading) -> None:
    """Offset noise, which is in a share of the batches there; a bias of timesteps."""
    share = reading.get("noise_offset_probability", 0.25)
    if reading.get("offset_noise") is True:
        reading.take(TABLES["offset_noise"])
        reading.assume({"objective.noise.offset": 0.1})
        if peers.is_usual(share, 1.0):
            reading.notice("noise_offset_probability", "offset noise is in every batch")
        else:
            key = "noise_offset_probability" if "noise_offset_probability" in reading.rest else "offset_noise"
            reading.refuse(key, f"offset noise is in every batch here, in a share of {share} of them there")
        reading.notice("offset_noise", "in objective.noise.offset")
    if peers.is_usual(reading.get("timestep_bias_strategy"), [None, "none"]):
        reading.note([f"timestep_bias_{name}" for name in TABLES["bias"]], "timesteps are not biased")
    peers.carry_known(reading, ["timestep_bias_strategy", *(f"timestep_bias_{name}" for name in TABLES["bias"])])


def _polynomial(reading: Reading) -> None:
    """The rate at the end is a number there and a share of the peak here."""
    try:
        share = float(reading.get("lr_end", 4e-7)) / float(reading.get("learning_rate", 4e-7))
    except (TypeError, ValueError, ZeroDivisionError):
        return
    final = min(1.0, float(f"{share:.6g}"))
    reading.carry("lr_end", "lr_scheduler.final", final, "a share of the peak")
    reading.assume({"lr_scheduler.power": 0.8, "lr_scheduler.final": final})
    reading.alias("lr_power")
