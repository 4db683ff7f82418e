"""SimpleTuner's configs: what several keys mean together. Each by itself is in simpletuner.yaml."""

import re
from typing import Any

from daguerre.config_import import base_models as models
from daguerre.config_import import peers
from daguerre.config_import.peers import Folder
from daguerre.config_import.reader import REQUIRED, Reading, tables

TRAINER = "SimpleTuner"
TABLES = tables("simpletuner")


def convert(reading: Reading) -> None:
    kind = str(reading.get("model_type", "full"))
    if kind not in ("full", "lora"):
        raise peers.not_there(f"model_type={kind}", TRAINER)
    if reading.get("control") is True:
        raise peers.not_there("control images in further channels of the network (control)", TRAINER)
    if reading.get("controlnet") is True and kind == "lora":
        raise peers.not_there("a LoRA of a ControlNet (controlnet with model_type=lora; full is supported)", TRAINER)
    if kind == "lora":
        _lora(reading)
    if reading.get("controlnet") is True:
        reading.take({key: row for key, row in TABLES["controlnet"].items() if peers.asks(reading.get(key))})
    _model(reading)
    reading.carry("tracker_run_name", "run_name")
    reading.assume({"run_name": REQUIRED, "output_dir": "simpletuner-results"})
    folders = _folders(reading)
    peers.lay(reading, folders)
    _datasets(reading, folders)
    _sizes(reading)
    _length(reading, folders)
    _learning(reading)
    size = re.fullmatch(r"(\d+)x(\d+)", str(reading.get("validation_resolution")))
    width, height = (int(size[1]), int(size[2])) if size else (reading.get("validation_resolution"),) * 2
    reading.carry_all("validation_resolution", {"sampling.width": width, "sampling.height": height})
    dropout = reading.get("caption_dropout_probability", 0.1)
    for place in [folder.place for folder in folders] or ["data"]:
        reading.assume_over({f"{place}.caption_dropout": dropout})
    reading.take(TABLES["last"])
    if str(reading.get("optimizer")) == "adamw_bf16":
        reading.notice("mixed_precision", "16-bit weights are used without conversion")
        reading.assume({"training.mixed_precision": "auto"})
    peers.carry_known(reading, [key for key in reading.rest if "." not in key])
    peers.finish(reading, TABLES)


def _lora(reading: Reading) -> None:
    """A LoRA of the UNet's attention, with the defaults of its command line."""
    if str(reading.get("lora_type", "standard")) != "standard":
        raise peers.not_there("LyCORIS by a config of its own", TRAINER)
    rank, alpha = reading.get("lora_rank", 16), reading.get("lora_alpha")
    values = {"name": "lora", "rank": rank, "alpha": alpha or None, "dropout": 0.1, "targets": "attention"}
    reading.assume({f"adapters.lora.{name}": value for name, value in values.items()})
    off = [key for key in TABLES["lora"] if "lora" in key and reading.get(key, "") is None]
    reading.note(off, "off there")
    reading.take(TABLES["lora"])


def _model(reading: Reading) -> None:
    family, families = str(reading.get("model_family") or ""), TABLES["families"]
    others = [name for name in TABLES["flags_of_others"] if reading.get(name) is True]
    if others or (family and family not in families):
        raise peers.not_there(f"a model of the family {family or others[0]}", TRAINER)
    base = models.base(reading.get("pretrained_model_name_or_path", REQUIRED))
    ours = families.get(family, base.family)
    reading.carry("model_family", "model.family", ours)
    for name in ("stable_diffusion_legacy", *TABLES["flags_of_others"]):
        reading.notice(name, "in model.family")
    reading.assume({"model.family": ours, "objective.name": base.objective})
    reading.assume({"model.pretrained_model_name_or_path": REQUIRED})


def _folders(reading: Reading) -> list[Folder]:
    """Local data sets of images; all others are refused, or hold no images."""
    found = []
    for prefix in reading.numbered("data_backends"):
        kind = str(reading.get(f"{prefix}.dataset_type", "image"))
        if kind != "image" or reading.get(f"{prefix}.disabled") is True:
            controls = kind == "conditioning" and reading.get("controlnet") is True
            reading.note([f"{prefix}.*"], "the control_dir of its images" if controls else "it has no training images")
        elif reading.get(f"{prefix}.type", "local") != "local":
            far = "data sets in stores are read as shards or tables: data.source=webdataset or parquet"
            reading.take({"*": {"refused": far}}, f"{prefix}.")
        else:
            found.append(_folder(reading, prefix))
    return found


def _folder(reading: Reading, prefix: str) -> Folder:
    strategy, prompt = reading.get(f"{prefix}.caption_strategy", "filename"), reading.get(f"{prefix}.instance_prompt")
    settings: dict[str, Any] = {"captions_from": "file_names"} if strategy == "filename" else {}
    if strategy == "instanceprompt" or reading.get(f"{prefix}.only_instance_prompt") is True:
        settings = {"captions.text": prompt or REQUIRED}
    if reading.get("controlnet") is True:
        settings |= _control_images(reading, prefix)
    repeats, share = reading.get(f"{prefix}.repeats", 0), reading.get(f"{prefix}.probability", 1)
    times = float(repeats + 1 if isinstance(repeats, int) else 1)
    times *= share if isinstance(share, int | float) and share else 1
    path = reading.get(f"{prefix}.instance_data_dir", REQUIRED)
    return Folder(prefix, path, times, name=str(reading.get(f"{prefix}.id") or ""), settings=settings)


def _control_images(reading: Reading, prefix: str) -> dict[str, Any]:
    """The folder of a data set's control images; or, where they are made from the images, the condition by which."""
    given = reading.get(f"{prefix}.conditioning_data")
    names = given if isinstance(given, list) else [given]
    sets = {reading.get(f"{place}.id"): place for place in _backends(reading)}
    if len(names) == 1 and names[0] in sets:
        reading.notice(f"{prefix}.conditioning_data", "the control_dir of its source")
        return {"control_dir": reading.get(f"{sets[names[0]]}.instance_data_dir", REQUIRED)}
    reading.refuse(f"{prefix}.conditioning_data", f"it must be the id of one data set of {', '.join(map(str, sets))}")
    if not reading.keys(f"{prefix}.conditioning.1.*"):
        reading.take(TABLES["conditions"], f"{prefix}.conditioning.0.")
    return {}


def _backends(reading: Reading) -> list[str]:
    """The data sets, whether they were read already or not."""
    return sorted({".".join(key.split(".")[:2]) for key in reading.whole if key.startswith("data_backends.")})


def _datasets(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        reading.take(TABLES["dataset"], f"{folder.key}.")
        if reading.get(f"{folder.key}.crop_aspect") == "preserve" or reading.get(f"{folder.key}.crop") is False:
            reading.take(TABLES["keeps_shape"], f"{folder.key}.")
        if reading.get(f"{folder.key}.prepend_instance_prompt") is True:
            prompt = reading.get(f"{folder.key}.instance_prompt")
            reading.carry(f"{folder.key}.prepend_instance_prompt", f"{folder.place}.captions.prefix", f"{prompt} ")
        known = [f"{folder.key}.{name}" for name in TABLES["of_a_dataset"]]
        reading.note(known, "in its source, its weight, or its cache; repeats=0 means once there")


def _sizes(reading: Reading) -> None:
    kind, size = str(reading.get("resolution_type", "pixel_area")), reading.get("resolution", 1024)
    if kind == "area" and isinstance(size, int | float):
        reading.carry("resolution", "data.resolution", round((size * 1e6) ** 0.5 / 64) * 64, "megapixels there")
    why = "the shorter side there, the root of the area here" if kind == "pixel" else ""
    if isinstance(size, int):
        reading.carry("resolution", "data.resolution", size, why)


def _length(reading: Reading, folders: list[Folder]) -> None:
    if peers.asks(reading.get("max_train_steps")):
        reading.notice("num_train_epochs", "max_train_steps sets the length of the run")
    elif peers.asks(reading.get("num_train_epochs")):
        batch, parts = reading.get("train_batch_size", 4), reading.get("gradient_accumulation_steps", 1)
        reading.notice("max_train_steps", "num_train_epochs sets the length of the run")
        peers.length(reading, "num_train_epochs", "training.duration", folders, (batch, parts))
    reading.assume({"training.duration": REQUIRED})


def _learning(reading: Reading) -> None:
    if str(reading.get("lr_scheduler")) == "constant":
        reading.notice("lr_warmup_steps", "lr_scheduler=constant has no warm-up")
    if str(reading.get("lr_scheduler")) == "polynomial":
        _polynomial(reading)
    if str(reading.get("grad_clip_method", "value")) == "value":
        reading.refuse(
            "max_grad_norm", "gradients are clipped by value there: give training.max_grad_norm for their norm"
        )
    reading.take(TABLES["learning"])
    if reading.get("offset_noise") is True:
        reading.take(TABLES["offset_noise"])
    if reading.get("use_ema") is not True:
        reading.take(TABLES["no_averages"])


def _polynomial(reading: Reading) -> None:
    """The rate at the end is a number there and a share of the peak here."""
    try:
        share = float(reading.get("lr_end", 4e-7)) / float(reading.get("learning_rate", 4e-7))
    except (TypeError, ValueError, ZeroDivisionError):
        return
    final = min(1.0, float(f"{share:.6g}"))
    reading.carry("lr_end", "lr_scheduler.final", final, "a share of the peak")
    reading.assume({"lr_scheduler.power": 0.8, "lr_scheduler.final": final})
