"""What kohya's TOML means here: a config_file of sd-scripts, with its dataset_config, or a dataset_config alone."""

from __future__ import annotations

from typing import Any

from daguerre.config_import import base_models as models
from daguerre.config_import import peers
from daguerre.config_import.peers import Folder
from daguerre.config_import.reader import REQUIRED, Reading

TRAINER = "kohya's sd-scripts"
UNASKED: dict[str, Any] = peers.UNASKED | {
    # The defaults of its options, where ours differ; pictures are made smaller by areas.
    "training.duration": "1600 steps",
    "training.per_device_batch_size": 1,
    "training.mixed_precision": "no",
    "optimizer.learning_rate": 2e-6,
    "data.interpolation": "area",
}
OTHERS = {
    "network_module": "LoRA",
    "network_dim": "LoRA",
    "token_string": "new tokens (textual inversion)",
}
"""Keys of what its other scripts train."""
OF_A_SUBSET = {
    "caption_dropout_rate": "caption_dropout",
    "shuffle_caption": "captions.shuffle_tags",
}
WITH_SHUFFLING = {"keep_tokens": "captions.keep_tags", "caption_separator": "captions.tag_separator"}
OF_ALL = {"flip_aug": "data.random_flip", "resize_interpolation": "data.interpolation"}
NO_MATTER = {
    "class_tokens": "the caption of its source, where its pictures have none of their own",
    "is_reg": "class pictures, drawn as often as all others together",
    "num_repeats": "in data.weights, or data.repeats",
}


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    for key, what in OTHERS.items():
        if peers.asks(reading.get(key)):
            raise peers.not_there(what, TRAINER)
    _masks(reading)
    for key in ("output_name", "output_dir"):
        reading.assume({{"output_name": "run_name"}.get(key, key): REQUIRED})
    _model(reading)
    folders = _folders(reading)
    peers.lay(reading, folders)
    _sources(reading, folders)
    _datasets(reading)
    _schedule(reading)
    for key, path in {"max_train_epochs": "training.duration", "save_every_n_epochs": "checkpoint.every"}.items():
        sizes = (_batch(reading), reading.get("gradient_accumulation_steps"))
        peers.length(reading, key, path, folders, sizes) if peers.asks(reading.get(key)) else None
    for key in reading.keys("cache_*"):
        reading.notice(key, "latents and texts are computed as they are needed")
    if peers.asks(reading.get("max_train_epochs")):
        reading.notice("max_train_steps", "max_train_epochs is the length of the run, as there")
    for key in ("train_data_dir", "reg_data_dir"):
        if folders:
            reading.notice(key, "its folders are the sources")
    reading.carry("train_data_dir", "data.path")
    for key in ("dataset_config", "config_file"):
        reading.notice(key, "the data sets of that file are read with this one")
    peers.carry_known(reading, list(reading.rest))
    reading.assume(UNASKED)


def _masks(reading: Reading) -> None:
    """A folder of conditioning images holds the masks of a masked loss, else what ControlNet is trained on."""
    for key in reading.keys("*conditioning_data_dir"):
        if not peers.asks(reading.get(key)):
            reading.notice(key, "no folder is named")
        elif reading.get("masked_loss") is not True:
            raise peers.not_there("ControlNet", TRAINER)
    if "datasets" not in {key.partition(".")[0] for key in reading.whole}:
        reading.carry("conditioning_data_dir", "data.mask_dir")


def _model(reading: Reading) -> None:
    place = reading.get("pretrained_model_name_or_path", REQUIRED)
    found = models.base(place)
    v = reading.get("v_parameterization") is True or (reading.get("v2") is True and "768" in str(place))
    reading.assume({"model.family": found.family, "model.pretrained_model_name_or_path": place})
    reading.carry("pretrained_model_name_or_path", "model.pretrained_model_name_or_path", why=found.doubt)
    if reading.get("v_parameterization") is False:
        reading.notice("v_parameterization", "the base's own")
    reading.assume({"objective.name": "v" if v else found.objective})
    _text_encoders(reading, found.family)


def _text_encoders(reading: Reading, family: str) -> None:
    skip = reading.get("clip_skip")
    if isinstance(skip, int) and family == "sd":
        values = {"model.text_encoder_layer": -skip, "model.text_encoder_final_norm": True}
        reading.carry_all("clip_skip", values, "counted from 1 there")
    reading.notice("clip_skip", "SDXL reads the layer before the last, as there")
    names = ("train_text_encoder", "train_text_encoder_2") if family == "sdxl" else ("train_text_encoder",)
    trained = reading.get("train_text_encoder") is True
    reading.carry_all("train_text_encoder", {f"model.{name}": trained for name in names})
    rates = {"learning_rate_te": "text_encoder.*", "learning_rate_te1": "text_encoder.*"}
    rates |= {"learning_rate_te2": "text_encoder_2.*"} if family == "sdxl" else {}
    given = {rates[key]: reading.get(key) for key in rates if peers.asks(reading.get(key))}
    for key in rates:
        if trained and given:
            reading.carry(key, "optimizer.learning_rates", given)
        reading.notice(key, "no text encoder is trained")


def _folders(reading: Reading) -> list[Folder]:
    """The subsets of all data sets; those of metadata files are refused."""
    prefixes = {key.rpartition(".")[0] for key in reading.keys("datasets.*.subsets.*.*")}
    found = []
    for prefix in sorted(prefixes, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        path = reading.get(f"{prefix}.image_dir")
        if path is None or f"{prefix}.metadata_file" in reading.rest:
            reading.refuse(
                f"{prefix}.metadata_file", "captions are read from files beside the pictures or metadata.jsonl"
            )
            continue
        repeats = _inherited(reading, prefix, "num_repeats", reading.get("dataset_repeats", 1))
        caption = _inherited(reading, prefix, "class_tokens")
        regular = reading.get(f"{prefix}.is_reg") is True
        found.append(Folder(prefix, path, float(repeats or 1), caption, regular))
    return found


def _inherited(reading: Reading, prefix: str, name: str, default: Any = None) -> Any:
    """A setting of a subset, or that of its data set, of [general], or of the config."""
    above = (prefix, prefix.partition(".subsets")[0], "general", "")
    places = [f"{place}.{name}".lstrip(".") for place in above]
    return next((reading.get(place) for place in places if place in reading.whole), default)


def _sources(reading: Reading, folders: list[Folder]) -> None:
    """The settings of each subset; what it inherits is written for it, too."""
    weight = reading.get("prior_loss_weight", 1.0)
    for folder in folders:
        inherited = dict(OF_A_SUBSET)
        shuffled = _inherited(reading, folder.key, "shuffle_caption") is True
        inherited |= WITH_SHUFFLING if shuffled else {}
        for name, path in inherited.items():
            value = _inherited(reading, folder.key, name)
            if value is not None:
                reading.assume_over({f"{folder.place}.{path}": value})
        reading.carry(f"{folder.key}.conditioning_data_dir", f"{folder.place}.mask_dir")
        prefix = _inherited(reading, folder.key, "caption_prefix")
        if prefix:
            reading.assume_over({f"{folder.place}.captions.prefix": f"{prefix} "})
        if folder.regular and weight != 1 and len(folders) > 1:
            reading.assume_over({f"{folder.place}.loss_weight": weight})
    if folders:
        reading.notice("prior_loss_weight", "the loss_weight of class pictures")


def _datasets(reading: Reading) -> None:
    """What data sets and [general] say: for all sources alike where there is one setting."""
    for name in (*OF_A_SUBSET, *WITH_SHUFFLING, "caption_prefix"):
        for key in _everywhere(reading, name):
            reading.notice(
                key, "in the captions of its sources" if _shuffles(reading, name) else "no effect: no shuffling"
            )
    for name, text in NO_MATTER.items():
        for key in _everywhere(reading, name):
            reading.notice(key, text)
    for name, path in OF_ALL.items():
        for key in _everywhere(reading, name):
            reading.carry(key, path)
    for key in reading.keys("*image_dir"):
        reading.notice(key, "the path of its source")
    for key in _everywhere(reading, "random_crop"):
        reading.carry(key, "data.crop", "random" if reading.get(key) else "center")
    for name in ("batch_size", "train_batch_size"):
        for key in _everywhere(reading, name):
            reading.carry(key, "training.per_device_batch_size")
    for key in _everywhere(reading, "validation_split"):
        reading.carry(key, "data.held_out_fraction") if "datasets" not in key else reading.refuse(key)
    _extensions(reading)
    _sizes(reading)


def _shuffles(reading: Reading, name: str) -> bool:
    return name not in WITH_SHUFFLING or any(
        reading.get(key) is True for key in reading.whole if "shuffle_caption" in key
    )


def _everywhere(reading: Reading, name: str) -> list[str]:
    """Where a key stands that is still to be read: in a subset, in a data set, in [general], in the config."""
    return [key for key in reading.rest if key == name or key.endswith(f".{name}")]


def _extensions(reading: Reading) -> None:
    for key in _everywhere(reading, "caption_extension"):
        if f".{str(reading.get(key)).lstrip('.')}" == ".txt":
            reading.notice(key, "cat.txt is the caption of cat.jpg")
        reading.refuse(key, "captions are read from .txt files: rename them")


def _sizes(reading: Reading) -> None:
    """Resolution and buckets: sides between two bounds there, an area and a longest aspect ratio here."""
    sizes = [_side(reading.get(key)) for key in _everywhere(reading, "resolution")]
    for key in _everywhere(reading, "resolution"):
        if sizes[0] and _side(reading.get(key)) == sizes[0]:
            reading.carry(key, "data.resolution", sizes[0])
        reading.refuse(key, "data sets of several sizes are not there; data.buckets.resolutions sorts by size")
    reading.assume({"data.resolution": REQUIRED})
    on = any(reading.get(key) is True for key in _everywhere(reading, "enable_bucket"))
    bounds = [_first(reading, name, default) for name, default in (("min_bucket_reso", 256), ("max_bucket_reso", 1024))]
    low, high = (bound if isinstance(bound, int) and bound > 0 else 256 for bound in bounds)
    area = (sizes[0] or 512) ** 2 if sizes else 512**2
    aspect = max(1.0, round(min(high, area / low) / low, 4))
    for key in _everywhere(reading, "enable_bucket"):
        values = {"data.buckets.aspects": "auto", "data.buckets.max_aspect": aspect}
        reading.carry_all(key, values if on else {"data.buckets.aspects": "square"})
    for key in _everywhere(reading, "bucket_reso_steps"):
        if on:
            reading.carry(key, "data.buckets.step")
        reading.notice(key, "no buckets")
    for name in ("min_bucket_reso", "max_bucket_reso"):
        for key in _everywhere(reading, name):
            reading.notice(key, "in data.buckets.max_aspect" if on else "no buckets")
    for key in _everywhere(reading, "bucket_no_upscale"):
        if reading.get(key) is False or not on:
            reading.notice(key, "smaller pictures are enlarged to their bucket" if on else "no buckets")
        reading.refuse(key, "smaller pictures are enlarged to their bucket; none is trained at its own size")


def _first(reading: Reading, name: str, default: Any) -> Any:
    return next((reading.get(key) for key in _everywhere(reading, name)), default)


def _side(value: Any) -> int | None:
    """The side of the square of a resolution: 512, "512,512", [512, 512]; of another shape the root of its area."""
    parts = value if isinstance(value, list) else str(value).replace("x", ",").split(",")
    try:
        sides = [int(part) for part in parts]
    except (TypeError, ValueError):
        return None
    return round((sides[0] * sides[-1]) ** 0.5) if len(sides) in (1, 2) and min(sides) > 0 else None


def _batch(reading: Reading) -> Any:
    keys = [key for key in reading.whole if key.rpartition(".")[2] in ("batch_size", "train_batch_size")]
    return next((reading.get(key) for key in keys), 1)


def _schedule(reading: Reading) -> None:
    steps, warmup = reading.get("max_train_steps", 1600), reading.get("lr_warmup_steps")
    if str(reading.get("lr_scheduler")) == "constant":
        reading.notice("lr_warmup_steps", "lr_scheduler=constant has no warm-up")
    for key, path in {"lr_warmup_steps": "lr_scheduler.warmup", "lr_decay_steps": "lr_scheduler.decay"}.items():
        share = reading.get(key)
        if isinstance(share, float) and 0 < share < 1 and isinstance(steps, int):
            if peers.asks(reading.get("max_train_epochs")):
                reading.refuse(key, "a share of a run whose length is given in epochs: give lr_scheduler.warmup")
            reading.carry(key, path, f"{int(share * steps)} steps", f"a share of {steps} updates")
    if warmup in (None, 0, 0.0):
        reading.carry("lr_warmup_steps", "lr_scheduler.warmup", "0 steps")
