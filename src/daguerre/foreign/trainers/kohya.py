"""kohya's configs: what several keys mean together. Each by itself is in kohya.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from daguerre.foreign import base_models as models
from daguerre.foreign import flows, kohya_blocks, kohya_saves, loss_weights, peers
from daguerre.foreign.names import lora
from daguerre.foreign.names.values import number, repeats_of
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading, Tables, generic

TRAINER = "kohya's sd-scripts"
TABLES = Tables("kohya")
PLACES = ("", "general.", "datasets.*.", "datasets.*.subsets.*.")
"""Where a setting of a subset may stand: in the config, in [general], in a data set, in the subset."""
_OF_TAGS = ("shuffle_caption", "caption_tag_dropout_rate")
"""Settings by which captions are taken apart into tags."""
RATE = "optimizer.learning_rate"
_PATTERNS = {"lr_weight": "optimizer.learning_rate_factors", "dims": "rank_pattern", "alphas": "alpha_pattern"}
"""What takes patterns of names in place of arguments of a network by block, by their endings."""
OTHERS_RATE = "a factor of the rate that D-Adaptation finds: give a rate for another optimizer"


def convert(reading: Reading, family: str = "") -> None:
    """Reads the arguments of a program of sd-scripts; `family` where the program, and not the base, says which."""
    peers.check_switches(reading, TABLES["switches"])
    family = family or _of_program(reading) or _of_parts(reading)
    parts = TABLES["parts"].get(family, {})
    for key, what in TABLES["others"].items():
        if key not in parts and peers.asks(reading.get(key)):
            raise peers.not_there(what, TRAINER)
    reading.assume({"run_name": REQUIRED, "output_dir": REQUIRED})
    _model(reading, family)
    if models.is_flow(family := str(reading.values["model.family"])):
        _flow(reading, family)
    else:
        loss_weights.kohya(reading)
    of_texts = [f"cache_text_encoder_outputs{end}" for end in ("", "_to_disk")]
    flows.cached(reading, ["cache_latents", "cache_latents_to_disk"], of_texts)
    pictures = _conditions(reading)
    _tokens(reading)
    folders = _folders(reading)
    peers.lay(reading, folders)
    if not folders:
        _unread_folders(reading)
    _sources(reading, folders, pictures)
    shadowed(reading, _subsets(reading), {"batch_size": "train_batch_size"})
    _datasets(reading)
    sizes = (reading.values.get("training.per_device_batch_size", 1), reading.get("gradient_accumulation_steps"))
    schedule(reading, folders, sizes)
    optimizer(reading)
    _without_effect(reading)
    kohya_saves.lengths(reading, folders, sizes)
    reading.take(TABLES["last"])
    if peers.asks(reading.get("max_train_epochs")):
        reading.notice("max_train_steps", "max_train_epochs sets the length of the run")
    for key in ("train_data_dir", "reg_data_dir") if folders else ():
        if repeats_of(Path(str(reading.get(key))).expanduser()) or key == "train_data_dir":
            reading.within(key, "path of its source: a folder in it")
    reading.carry("train_data_dir", "data.path")
    for key in ("dataset_config", "config_file"):
        if key == "dataset_config" and not any(name.startswith("datasets.") for name in reading.whole):
            reading.refuse(key, peers.NO_FILE)
        reading.notice(key, "the data sets of that file are read with this one")
    peers.sample_prompts(reading)
    peers.carry_known(reading, [*peers.OWN, *TABLES["alias"]])
    reading.take(TABLES["otherwise"])
    peers.finish(reading, TABLES)
    if models.is_flow(family):
        flows.finish(reading)
    chosen = reading.values.get("optimizer.name")
    reading.assume({"optimizer.weight_decay": TABLES["decays"][chosen]} if chosen in TABLES["decays"] else {})


def _of_program(reading: Reading) -> str:
    """The family that the program of a command trains, where its name says one; empty for others."""
    # lora-scripts, a window around sd-scripts, says `sdxl-lora` in place of the program
    name = str(reading.get("program") or reading.get("model_train_type") or "").replace("-", "_")
    reading.note(["program", "model_train_type"], "it says which model is trained")
    if name.startswith(("sd3_", "lumina_", "hunyuan_", "chroma_")):
        raise peers.not_there(f"by {name} a model of another family", TRAINER)
    return next((family for family in ("sdxl", *TABLES["parts"]) if name.startswith(f"{family}_")), "")


def _of_parts(reading: Reading) -> str:
    """The family of flow matching whose network, or whose parts in files of their own, a config names; empty for
    others."""
    of_network = TABLES["of_network"].get(str(reading.get("network_module")), "")
    asked = {key for key in TABLES["others"] if peers.asks(reading.get(key))}
    named = next((name for name, parts in TABLES["parts"].items() if asked and asked <= {*parts}), "")
    return of_network or str(named)


def _flow(reading: Reading, family: str) -> None:
    """A model whose parts are files of their own: their places and how times are drawn."""
    usual = TABLES["flow_usual"][family] if family in TABLES["flow_usual"] else TABLES["flow_usual"]["anima"]
    for key, path in TABLES["parts"].get(family, {}).items():
        if peers.asks(reading.get(key)):
            reading.carry(key, path)
    kind = reading.get("model_prediction_type", "sigma_scaled")
    if family == "flux":
        if kind != "raw":
            key = "model_prediction_type" if "model_prediction_type" in reading.rest else "network_module"
            reading.refuse(key, f"the network's output is changed before the loss there ({kind}): raw is as here")
        flows.embedded(reading, family, "guidance_scale")
        reading.assume({"model.training_guidance": 3.5})
    flows.sd_scripts(reading, *usual)
    flows.precision(reading, "mixed_precision")
    reading.take(TABLES["flow"])


def _conditions(reading: Reading) -> str:
    """Says what a folder of conditioning images is of: the masks of a masked loss, else the control images of a
    ControlNet, which is then trained. The setting of a source for it."""
    places = reading.keys("*conditioning_data_dir")
    for key in places:
        if not peers.asks(reading.get(key)):
            reading.notice(key, "no folder is given")
    if any(reading.get(key) is True for key in reading.keys("*alpha_mask")):
        reading.assume({"objective.mask.outside_weight": 0})
    masked = reading.get("masked_loss") is True
    if not masked and reading.keys("*conditioning_data_dir") and peers.asks(reading.get("network_module")):
        raise peers.not_there("a network beside control images (conditioning_data_dir without masked_loss)", TRAINER)
    if not masked and (reading.keys("*conditioning_data_dir") or peers.asks(reading.get("control_net_lr"))):
        reading.assume({"adapters.controlnet.name": "controlnet"})
        if reading.values["model.family"] == "sdxl":
            reading.assume({"optimizer.learning_rate": 1e-4})
        reading.take({key: row for key, row in TABLES["controlnet"].items() if peers.asks(reading.get(key))})
        if peers.asks(reading.get("control_net_lr")):
            reading.notice("learning_rate", "control_net_lr is the rate of the ControlNet")
    name = "mask_dir" if masked else "control_dir"
    if "datasets" in {key.partition(".")[0] for key in reading.whole}:
        reading.notice("conditioning_data_dir", "the data sets name their own")
    reading.carry("conditioning_data_dir", f"data.{name}")
    return name


def _tokens(reading: Reading) -> None:
    """A new token, which starts from words or from a file of it."""
    token = reading.get("token_string")
    if not peers.asks(token):
        return
    vectors = reading.get("num_vectors_per_token", 1)
    reading.assume({"adapters.tokens.name": "tokens"})
    if peers.asks(reading.get("weights")):
        own = {"init_file": reading.get("weights"), "vectors": vectors}
        reading.carry_all("weights", {"adapters.tokens.tokens": {token: own}})
        reading.note(["token_string", "init_word", "num_vectors_per_token"], "in adapters.tokens.tokens")
    reading.assume({"adapters.tokens.num_vectors": vectors} if "token_string" in reading.rest else {})
    reading.take({key: row for key, row in TABLES["tokens"].items() if peers.asks(reading.get(key))})


def _model(reading: Reading, family: str) -> None:
    place = reading.get("pretrained_model_name_or_path", REQUIRED)
    if family and models.is_flow(family) and models.base(place).family != family:  # a file of its transformer alone
        reading.carry("pretrained_model_name_or_path", f"model.{peers.denoiser(family)}")
        place = models.of_family(family)
    found = models.base(place)
    v = reading.get("v_parameterization") is True or (reading.get("v2") is True and "768" in str(place))
    found = replace(found, family=family or found.family, objective="v" if v else found.objective)
    reading.assume({"model.family": found.family, "model.pretrained_model_name_or_path": place})
    reading.carry("pretrained_model_name_or_path", "model.pretrained_model_name_or_path", why=found.doubt)
    net = peers.denoiser(found.family)
    if reading.get("v_parameterization") is False:
        reading.notice("v_parameterization", "the base's own")
    reading.assume({"objective.name": found.objective})
    if peers.asks(reading.get("network_module")):
        network(reading, found.family, net)
    reading.take(TABLES["no_network"])
    _text_encoders(reading, found.family)
    kohya_blocks.rates(reading, found.family, _finds_rate(reading))


def network(reading: Reading, family: str, net: str) -> None:
    """The LoRA, and the rates of its parts; it is added to text encoders, too, unless they are left out."""
    rank, alpha = (reading.get(key, usual) for key, usual in (("network_dim", lora.KOHYA_RANK), ("network_alpha", 1)))
    rank = peers.number(rank, lora.KOHYA_RANK)
    alpha = peers.number(alpha, rank)
    words, module = peers.words(reading.get("network_args")), str(reading.get("network_module"))
    words, by_block = kohya_blocks.parted(words, module, "" if _finds_rate(reading) else family)
    words = _without_lost(reading, words)
    found = lora.kohya(module, words, int(rank), alpha)
    kohya_blocks.lay(reading, found, family, by_block)
    encoders = lora.encoders(module, peers.encoders(family))
    encoders = () if reading.get("network_train_unet_only") is True else encoders
    lora.reach(found, encoders, int(rank))
    if not _unet_is_trained(reading):
        found[f"adapter.ranks.{net}"] = None
    ours = {path.replace("adapter.", "adapters.lora."): value for path, value in found.items()}
    apart = lora.parted(words).get(lora.FUSED.get(module, ""), "").lower() == "true"
    why = "query, key and value share the first factor there" if module in lora.FUSED and not apart else ""
    reading.carry_all("network_module", {"adapters.lora.name": "lora", **ours}, why)
    kind = found["adapter.kind"]
    peers.no_dropout(reading, "network_dropout", kind)
    _rates(reading, encoders, net)
    if not peers.asks(reading.get("network_alpha")):
        reading.notice("network_alpha", "the rank")
    elif found["adapter.alpha"] != alpha:
        reading.notice("network_alpha", "LyCORIS multiplies a LoKr of two whole matrices by 1, whatever it is")
    elif lost := lora.doubt(kind, int(rank), alpha):
        reading.refuse("network_alpha", lost)
    reading.take({key: row for key, row in TABLES["network"].items() if peers.asks(reading.get(key)) or "," in key})


def _without_lost(reading: Reading, words: Sequence[str]) -> list[str]:
    """The arguments of a network that can be carried; the others are listed as lost."""
    lost = lora.lost(lora.parted(words))
    serves = {ours for ending, ours in _PATTERNS.items() if any(name.endswith(f"_{ending}") for name in lost)}
    if lost:
        hint = f"; {' and '.join(sorted(serves))} of the recipe takes names by patterns" if serves else ""
        said = ", ".join(f"{name}={value}" for name, value in lost.items())
        reading.refuse("network_args", f"not supported: {said}; the others are carried over{hint}")
    return [word for word in words if word.partition("=")[0].strip() not in lost]


def _rates(reading: Reading, encoders: Sequence[str], net: str) -> None:
    """Learning rates of the denoiser and of text encoders: one for all, or one each."""
    texts, usual = reading.get("text_encoder_lr"), reading.get("learning_rate", TABLES["unasked"][RATE])
    each = texts if isinstance(texts, list) else [texts] * len(encoders)
    rates = {f"{name}.*": rate for name, rate in zip(encoders, each, strict=False)}
    rates |= {f"{net}.*": reading.get("unet_lr")}
    rates = {pattern: rate for pattern, rate in rates.items() if pattern != f"{net}.*" or _unet_is_trained(reading)}
    given = {pattern: number("a learning rate", str(rate)) for pattern, rate in rates.items() if peers.asks(rate)}
    alike = {number("a learning rate", str(given.get(pattern, usual))) for pattern in rates}
    one = bool(given) and len(alike) == 1 and (len(rates) > 1 or _finds_rate(reading))
    for key in ("unet_lr", "text_encoder_lr"):
        if _optimizer_of(reading).startswith("dadapt") and peers.asks(reading.get(key)):
            reading.refuse(key, OTHERS_RATE)
        elif one:
            reading.carry(key, RATE, next(iter(alike)), "the rate of all that is trained")
        elif given and _finds_rate(reading):
            reading.refuse(key, peers.ONE_RATE)
        elif given and (key == "unet_lr" or encoders):
            reading.carry(key, "optimizer.learning_rates", given)
        reading.notice(key, "no text encoder is trained" if key != "unet_lr" else "learning_rate is the UNet's")
    if one and {number("learning_rate", str(usual))} != alike:
        reading.notice("learning_rate", "unet_lr and text_encoder_lr are the rates of all that is trained")


def _finds_rate(reading: Reading) -> bool:
    """True with an optimizer that has one rate for all, which it finds."""
    return _optimizer_of(reading).startswith(("prodigy", "dadapt"))


def _optimizer_of(reading: Reading) -> str:
    return str(reading.get("optimizer_type", "")).lower()


def _unet_is_trained(reading: Reading) -> bool:
    return reading.get("network_train_text_encoder_only") is not True


def optimizer(reading: Reading) -> None:
    """Names whose meaning an optimizer changes that finds its rate itself."""
    name = _optimizer_of(reading)
    args = " ".join(peers.words(reading.get("optimizer_args"))).replace(" ", "").lower()
    if name.startswith("dadapt"):
        reading.refuse("learning_rate", OTHERS_RATE)
        reading.refuse("optimizer_args", "of D-Adaptation, which is not supported")
        reading.assume({RATE: REQUIRED})
    if name == "adafactor" and "relative_step=false" not in args:
        why = "its own rate of relative_step is not supported: optimizer.learning_rate is the rate"
        reading.carry("optimizer_type", "optimizer.name", "adafactor", why)


def _without_effect(reading: Reading) -> None:
    """Names that nothing reads with the values of others."""
    for names, other in TABLES["of_others"].items():
        if not peers.asks(reading.get(other)):
            reading.note(names.split(", "), f"no effect without {other}")
    peers.huber(reading)
    for name in ("sample_prompts", "vae", "lr_scheduler_args", "optimizer_args", "reg_data_dir", "dataset_config"):
        if not peers.asks(reading.get(name)):
            reading.notice(name, "nothing is given")


def _text_encoders(reading: Reading, family: str) -> None:
    skip = int(peers.number(reading.get("clip_skip"), 0))
    if skip and family == "sd":
        values = {"model.text_encoder_layer": -skip, "model.text_encoder_final_norm": True}
        reading.carry_all("clip_skip", values, "counted from 1 there")
    reading.notice("clip_skip", "SDXL always reads the layer before the last")
    trained = reading.get("train_text_encoder") is True
    rates = {"learning_rate_te": "text_encoder.*", "learning_rate_te1": "text_encoder.*"}
    rates |= {"learning_rate_te2": "text_encoder_2.*"} if family == "sdxl" else {}
    frozen = {rates[key].removesuffix(".*") for key in rates if reading.get(key) == 0}  # a rate of 0 freezes there
    on = {f"model.train_{name}": trained and name not in frozen for name in peers.encoders(family)}
    reading.carry_all("train_text_encoder", on)
    given = {rates[key]: reading.get(key) for key in rates if peers.asks(reading.get(key))}
    for key in rates:
        alike = reading.get(key) == reading.get("learning_rate")
        if trained and rates[key] in given and _finds_rate(reading):
            reading.notice(key, "learning_rate is the same") if alike else reading.refuse(key, peers.ONE_RATE)
        elif trained and rates[key] in given:
            reading.carry(key, "optimizer.learning_rates", given)
        reading.notice(key, "this text encoder is not trained")


def _folders(reading: Reading) -> list[Folder]:
    """The subsets of all data sets; those of metadata files are refused."""
    found = []
    for prefix in _subsets(reading):
        path = reading.get(f"{prefix}.image_dir")
        if path is None or f"{prefix}.metadata_file" in reading.rest:
            reading.refuse(
                f"{prefix}.metadata_file", "captions are read from files beside the images or metadata.jsonl"
            )
            continue
        repeats = _inherited(reading, prefix, "num_repeats", reading.get("dataset_repeats", 1))
        caption = _inherited(reading, prefix, "class_tokens") or ""
        regular = reading.get(f"{prefix}.is_reg") is True
        settings = _of_captions(reading, prefix)
        found.append(Folder(prefix, path, peers.number(repeats), caption, regular, settings=settings))
    return found


def _subsets(reading: Reading) -> list[str]:
    """The subsets of all data sets, such as `datasets.0.subsets.1`, in their order."""
    keys = (key for key in reading.whole if fnmatchcase(key, "datasets.*.subsets.*.*"))
    prefixes = {".".join(key.split(".")[:4]) for key in keys}
    return sorted(prefixes, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])


def _unread_folders(reading: Reading) -> None:
    """Carries the path of a `train_data_dir` that is not on this machine, and lists what its folders' names say as
    lost. Images of folders inside it are read, so that it is not flat."""
    place = reading.get("train_data_dir")
    if not peers.asks(place):
        return
    captions = {name: value for name, value in _of_captions(reading, "").items() if name != "recursive"}
    reading.assume({f"data.{name}": value for name, value in captions.items()})
    if not Path(str(place)).expanduser().is_dir():
        reading.assume_over({"data.path": place})
        reading.refuse(
            "train_data_dir",
            "its folders, such as `10_a dog`, are not on this machine: data.path is the whole of it. Their repeats "
            "and captions are lost, and folders inside them are read here; convert the config where they are, or "
            "write them as data.sources",
        )


def _of_captions(reading: Reading, prefix: str) -> dict[str, Any]:
    """The settings by which a subset is read as there: flat, the first line of a file of one ending, or with wildcards
    any line."""
    usual = reading.get("caption_extention") or ".caption"  # the older name of the option
    extension, settings = _inherited(reading, prefix, "caption_extension") or usual, {"recursive": False}
    if any(reading.get(f"use_{name}_template") is True for name in ("object", "style")):
        return settings
    ending = f".{str(extension).lstrip('.')}"
    lines = "drawn" if _inherited(reading, prefix, "enable_wildcard") is True else "first"
    return {**settings, "captions.lines": lines, "caption_extension": ending}


def _inherited(reading: Reading, prefix: str, name: str, default: Any = None) -> Any:
    """A setting of a subset, or that of its data set, of [general], or of the config."""
    return next((reading.get(place) for place in _places(prefix, name) if place in reading.whole), default)


def _places(prefix: str, name: str) -> list[str]:
    """The places where a setting of a subset, or of a data set, may stand; the first one counts."""
    above = (prefix, prefix.partition(".subsets")[0], "general", "")
    return [f"{place}.{name}".lstrip(".") for place in above]


def shadowed(reading: Reading, prefixes: Sequence[str], of_config: Mapping[str, str]) -> None:
    """Notes settings above data sets that none of these (`prefixes`) reads, as each has one nearer by, and refuses one
    that only some of them read. `of_config` are names that the config itself has for a setting."""
    for name in TABLES["nearest"] if prefixes else ():
        counts, every = dict[str, None](), set[str]()
        for prefix in prefixes:
            places = [*_places(prefix, name), *([of_config[name]] if name in of_config else [])]
            there = [place for place in places if place in reading.whole]
            counts |= dict.fromkeys(there[:1])
            every |= {*there}
        for key in every - counts.keys():
            reading.notice(key, "every data set has its own")
        for key in [*counts][1:] if name != "resolution" else ():
            first = next(iter(counts))
            if generic(key) != generic(first) and reading.get(key) != reading.get(first):
                reading.refuse(key, f"{name} is one for all data sets, and {first} makes it {reading.get(first)}")


def _sources(reading: Reading, folders: list[Folder], pictures: str) -> None:
    """The settings of each subset; what it inherits is written for it, too. `pictures` is the setting for its folder of
    conditioning images."""
    weight = reading.get("prior_loss_weight", 1.0)
    sentences = [name for name in ("object", "style") if reading.get(f"use_{name}_template") is True]
    for place in [folder.place for folder in folders] or ["data"]:
        if sentences:
            text = {"text": reading.get("token_string", REQUIRED), "templates": sentences[0]}
            reading.assume_over({f"{place}.captions.{name}": value for name, value in text.items()})
    reading.note(["use_object_template", "use_style_template"], "in the captions of its sources")
    for folder in folders or [Folder("", REQUIRED)]:
        inherited = dict(TABLES["subset"])
        if any(peers.asks(_inherited(reading, folder.key, name)) for name in _OF_TAGS):
            inherited |= TABLES["with_tags"]
        for name, path in inherited.items():
            value = _inherited(reading, folder.key, name)
            if value not in (None, ""):
                reading.assume_over({f"{folder.place}.{path}": value})
        reading.carry(f"{folder.key}.conditioning_data_dir", f"{folder.place}.{pictures}")
        prefix = _inherited(reading, folder.key, "caption_prefix")
        if prefix:
            reading.assume_over({f"{folder.place}.captions.prefix": f"{prefix} "})
        if folder.regular and weight != 1 and len(folders) > 1:
            reading.assume_over({f"{folder.place}.loss_weight": weight})
    regular = len(folders) > 1 and any(folder.regular for folder in folders)
    reading.notice("prior_loss_weight", "the loss_weight of class images" if regular else "no effect: no class images")


def _datasets(reading: Reading) -> None:
    """Data sets and [general]: for all sources where there is one setting."""
    reads_tags = any(peers.asks(reading.get(key)) for key in reading.whole if key.rpartition(".")[2] in _OF_TAGS)
    for name, path in {**TABLES["subset"], **TABLES["with_tags"], "caption_prefix": "captions.prefix"}.items():
        for key in everywhere(reading, name):
            if name in TABLES["with_tags"] and not reads_tags:
                reading.notice(key, "no effect: tags are left as they are")
            reading.within(key, f"{path} of its source")
    _take_everywhere(reading, TABLES["everywhere"])
    for key in everywhere(reading, "validation_split"):
        reading.carry(key, "data.held_out_fraction") if "datasets" not in key else None
    _sizes(reading)


def _take_everywhere(reading: Reading, table: dict[str, Any]) -> None:
    for names, row in table.items():
        reading.take({", ".join(place + name for name in names.split(", ") for place in PLACES): row})


def everywhere(reading: Reading, name: str, places: Sequence[str] = PLACES) -> list[str]:
    """Places of a key that is still to be read: in a subset, in a data set, in [general], in the config."""
    return [key for key in reading.rest if generic(key) in {place + name for place in places}]


def _sizes(reading: Reading) -> None:
    """Resolution and buckets: sides between two bounds there, an area and a longest aspect ratio here."""
    sizes = [side(reading.get(key)) for key in everywhere(reading, "resolution")]
    for key in everywhere(reading, "resolution"):
        if sizes[0] and side(reading.get(key)) == sizes[0]:
            reading.carry(key, "data.resolution", sizes[0])
        reading.refuse(key, "data sets of several sizes are not supported; data.buckets.resolutions sorts by size")
    reading.assume({"data.resolution": REQUIRED})
    on = any(reading.get(key) is True for key in everywhere(reading, "enable_bucket"))
    usual = {"min_bucket_reso": 256, "max_bucket_reso": 1024}
    low, high = (max(1, peers.number(first(reading, name, None), default)) for name, default in usual.items())
    area = (sizes[0] or 512) ** 2 if sizes else 512**2
    aspect = max(1.0, round(min(high, area / low) / low, 4))
    for key in everywhere(reading, "enable_bucket") if on else ():
        reading.carry_all(key, {"data.buckets.aspects": "auto", "data.buckets.max_aspect": aspect})
    _take_everywhere(reading, TABLES["buckets" if on else "no_buckets"])


def first(reading: Reading, name: str, default: Any, places: Sequence[str] = PLACES) -> Any:
    """The first value of a key that is still to be read."""
    return next((reading.get(key) for key in everywhere(reading, name, places)), default)


def side(value: Any) -> int | None:
    """The side of the square of a resolution: 512, "512,512", [512, 512]; of another shape the root of its area."""
    parts = value if isinstance(value, list) else str(value).replace("x", ",").split(",")
    try:
        sides = [int(part) for part in parts]
    except (TypeError, ValueError):
        return None
    return round((sides[0] * sides[-1]) ** 0.5) if len(sides) in (1, 2) and min(sides) > 0 else None


def schedule(reading: Reading, folders: Sequence[Folder], sizes: tuple[Any, Any]) -> None:
    """Lengths of the schedule, which may be shares of the run; names that its kind does not read."""
    kind, epochs = str(reading.get("lr_scheduler", "constant")), reading.get("max_train_epochs")
    steps = reading.get("max_train_steps", 1600)
    for key, kinds in TABLES["of_schedules"].items():
        if kind not in kinds:
            reading.notice(key, f"no effect with lr_scheduler={kind}")
    if kind == "constant":
        reading.notice("lr_warmup_steps", "lr_scheduler=constant has no warm-up")
    for key, path in {"lr_warmup_steps": "lr_scheduler.warmup", "lr_decay_steps": "lr_scheduler.decay"}.items():
        share = peers.share(reading.get(key))
        if not isinstance(share, float) or not 0 < share <= 1 or key not in reading.rest:
            continue
        if peers.asks(epochs):
            length = peers.updates_of(folders, epochs * share, *sizes) if isinstance(epochs, int | float) else None
            why = f"a share of {epochs} epochs of these folders, on one device"
            reading.carry(key, path, length, why) if length else reading.refuse(key, f"a share of {epochs} epochs, "
                f"whose images cannot be counted from here: set {path}")  # fmt: skip
        elif isinstance(steps, int):
            reading.carry(key, path, f"{int(share * steps)} steps", f"a share of {steps} updates")
    if reading.get("lr_warmup_steps") in (None, 0, 0.0):
        reading.carry("lr_warmup_steps", "lr_scheduler.warmup", "0 steps")
