"""ai-toolkit's configs: what several keys mean together. Each by itself is in ai_toolkit.yaml."""

from collections.abc import Sequence
from typing import Any

from daguerre import plugins
from daguerre.foreign import base_models as models
from daguerre.foreign import flows, loss_weights, peers
from daguerre.foreign.names import lora
from daguerre.foreign.names.values import NOT_PAGED, OPTIMIZERS
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading, Tables

TRAINER, ROOT = "ai-toolkit", "config.process.0."
TABLES = Tables("ai_toolkit")
PLACES = ("[name]", "[trigger]")
"""What stands in captions and prompts for the word that is trained."""
ONE_STREAM, TWO = ("transformer.transformer_blocks.*",), "transformer.single_transformer_blocks.*"
BLOCKS = {"flux": (*ONE_STREAM, TWO), "flux2": (*ONE_STREAM, TWO), "z_image": ("transformer.layers.*",)}
"""Layers of its LoRA, of transformers with blocks of other names than `transformer_blocks`."""


def convert(reading: Reading) -> None:
    _check_kind(reading)
    _embedding(reading)
    _controlnet(reading)
    reading.carry("config.name", "run_name", reading.get("config.name") or REQUIRED)
    reading.assume({"run_name": REQUIRED, "output_dir": "output"})
    family = _model(reading)
    folders = _folders(reading)
    peers.lay(reading, folders)
    _datasets(reading, folders)
    if models.is_flow(family):
        _flow(reading, family)
    given = {key: row for key, row in TABLES["process"].items() if reading.get(f"{ROOT}{key}") is not None}
    if reading.get(f"{ROOT}train.ema_config.use_ema") is True:
        given["train.ema_config.ema_decay"] = "ema.decay"
    reading.take(given, ROOT)
    _training(reading)
    reading.take(TABLES["before"], ROOT)
    reading.take(TABLES["otherwise"])
    reading.note(["meta.*"], "words on the file, which training does not read")
    for key in reading.keys("config.process.*"):
        if not key.startswith(ROOT):
            reading.refuse(key, "one process alone makes a recipe")
    peers.finish(reading, TABLES)
    if models.is_flow(family):
        flows.finish(reading)


def _check_kind(reading: Reading) -> None:
    """Refuses what no family here is, and what else it trains."""
    kind = reading.get(f"{ROOT}type")
    if kind not in (*TABLES["kinds"], None):
        raise peers.not_there(f"by a process of type {kind}", TRAINER)
    for name, what in TABLES["others"].items():
        if any(peers.asks(reading.get(key)) for key in reading.keys(f"{ROOT}{name}*")):
            raise peers.not_there(what, TRAINER)
    adapter = reading.get(f"{ROOT}adapter.type", "t2i") if reading.keys(f"{ROOT}adapter.*") else None
    if adapter is not None and (adapter != "control_net" or reading.get(f"{ROOT}adapter.train") is not True):
        trained = " that is not trained" if adapter == "control_net" else ""
        raise peers.not_there(f"beside an adapter of type {adapter}{trained}", TRAINER)
    kinds = [key.rpartition(".is_")[2] for key in reading.keys(f"{ROOT}model.is_*") if reading.get(key) is True]
    others = [kind for kind in kinds if kind not in ("xl", "v2", "v_pred", "flux")]
    arch = str(reading.get(f"{ROOT}model.arch") or "")
    if other := TABLES["other_models"].get(arch.partition(":")[0]):
        raise peers.not_there(other, TRAINER)
    if others or arch.partition(":")[0] not in ("", "sd1", "sd15", "sd2", "sdxl", *TABLES["families"]):
        raise peers.not_there(f"a model of type {others[0] if others else arch}", TRAINER)
    if reading.get(f"{ROOT}model.quantize") is True:
        reading.carry(f"{ROOT}model.quantize", "training.base_precision", "float8", "its qfloat8")


def _embedding(reading: Reading) -> None:
    """A new token."""
    if reading.keys(f"{ROOT}embedding.*"):
        reading.note([f"{ROOT}train.train_unet", f"{ROOT}train.train_text_encoder"], "frozen")
        values = {"placeholder_token": "custom_embedding", "num_vectors": 4, "initializer_token": "*"}
        reading.assume({"adapters.tokens.name": "tokens"} | {f"adapters.tokens.{k}": v for k, v in values.items()})
        reading.take(TABLES["embedding"], f"{ROOT}embedding.")


def _controlnet(reading: Reading) -> None:
    """A ControlNet that is trained further; its control images are next to each data set."""
    if reading.get(f"{ROOT}adapter.type") == "control_net":
        reading.note([f"{ROOT}train.train_unet", f"{ROOT}train.train_text_encoder"], "frozen")
        reading.take(TABLES["controlnet"], f"{ROOT}adapter.")


def _model(reading: Reading) -> str:
    """The model and what of it is trained. The family."""
    base = models.base(reading.get(f"{ROOT}model.name_or_path", REQUIRED))
    arch = str(reading.get(f"{ROOT}model.arch") or "").partition(":")[0]
    arch = "flux" if reading.get(f"{ROOT}model.is_flux") is True else arch
    xl = reading.get(f"{ROOT}model.is_xl") is True or arch == "sdxl"
    family = "sdxl" if xl else TABLES["families"].get(arch, base.family)
    v = reading.get(f"{ROOT}model.is_v_pred") is True
    objective = "flow" if models.is_flow(family) else "v" if v else base.objective
    reading.assume({"model.family": family, "objective.name": objective})
    reading.assume({"model.pretrained_model_name_or_path": REQUIRED})
    reading.carry(f"{ROOT}model.name_or_path", "model.pretrained_model_name_or_path")
    reading.take(TABLES["model"], ROOT)
    trained = reading.get(f"{ROOT}train.train_text_encoder") is True
    encoders, net = peers.encoders(family), peers.denoiser(family)
    if reading.keys(f"{ROOT}network.*"):
        _network(reading, encoders if trained else (), family)
    reading.carry(f"{ROOT}train.train_unet", f"model.train_{net}")
    reading.carry_all(f"{ROOT}train.train_text_encoder", {f"model.train_{name}": trained for name in encoders})
    rates = {"unet_lr": f"{net}.*"} | ({"text_encoder_lr": "text_encoder*"} if trained else {})
    given = {pattern: rate for name, pattern in rates.items() if (rate := reading.get(f"{ROOT}train.{name}"))}
    one = str(reading.get(f"{ROOT}train.optimizer")).lower().startswith("prodigy")
    for name in rates:
        if one and reading.get(f"{ROOT}train.{name}") != reading.get(f"{ROOT}train.lr", 1e-6):
            reading.refuse(f"{ROOT}train.{name}", peers.ONE_RATE)
        elif not one:
            reading.carry(f"{ROOT}train.{name}", "optimizer.learning_rates", given)
    reading.notice(f"{ROOT}train.text_encoder_lr", "no text encoder is trained")
    return family


def _flow(reading: Reading, family: str) -> None:
    """Reads how times are drawn, what is cached, and the scale of guidance in the family's own notation."""
    law = str(reading.get(f"{ROOT}train.timestep_type", "sigmoid"))
    values: dict[str, Any] = flows.times("logit_normal" if law in ("sigmoid", "lognorm_blend") else "uniform")
    values |= flows.own_shift(reading) | TABLES["shifts"].get(family, {}) if law in ("shift", "flux_shift") else {}
    if law in TABLES["laws"]:
        reading.refuse(f"{ROOT}train.timestep_type", TABLES["laws"][law])
    reading.carry_all(f"{ROOT}train.timestep_type", values)
    reading.assume(values)
    key = f"{ROOT}sample.guidance_scale"
    flows.negative(reading, family, f"{ROOT}sample.neg", reading.get(key, 7))
    reading.carry(key, "sampling.guidance_scale", flows.guided(family, reading.get(key)))
    latents = [f"{ROOT}datasets.*.{name}" for name in ("cache_latents", "cache_latents_to_disk")]
    texts = [f"{ROOT}train.cache_text_embeddings", f"{ROOT}datasets.*.cache_text_embeddings"]
    flows.cached(reading, latents, texts)
    reading.take(TABLES["flow"], ROOT)
    flows.precision(reading, f"{ROOT}train.dtype")


def _network(reading: Reading, encoders: Sequence[str], family: str) -> None:
    """The LoRA: of kohya's layers, with convolutions if they have a rank of their own; of all layers of a transformer's
    blocks, which have none."""
    given = {name: reading.get(f"{ROOT}network.{name}") for name in ("type", "linear", "rank", "conv", "conv_alpha")}
    kind, rank = str(given["type"] or "lora").lower(), given["linear"] or given["rank"] or 4
    net = peers.denoiser(family)
    has_conv = given["conv"] and not models.is_flow(family)
    conv = {"conv_dim": given["conv"], "conv_alpha": given["conv_alpha"] or given["conv"]} if has_conv else {}
    if kind not in ("lora", "locon", "dora"):
        raise peers.not_there(f"a network of type {kind}", TRAINER)
    alpha = reading.get(f"{ROOT}network.linear_alpha") or reading.get(f"{ROOT}network.alpha") or 1.0
    found = lora.kohya("networks.lora", [f"{name}={value}" for name, value in conv.items()], rank, alpha)
    found |= {"adapter.kind": "dora"} if kind == "dora" else {}
    found |= {"adapter.targets": [*BLOCKS.get(family, ONE_STREAM)]} if models.is_flow(family) else {}
    lora.reach(found, encoders, rank)
    if reading.get(f"{ROOT}train.train_unet") is False:
        found[f"adapter.ranks.{net}"] = None
    ours = {path.replace("adapter.", "adapters.lora."): value for path, value in found.items()}
    reading.assume_over({"adapters.lora.name": "lora", **ours})
    reading.take({k: row for k, row in TABLES["network"].items() if "," in k or reading.get(f"{ROOT}{k}")}, ROOT)


def _folders(reading: Reading) -> list[Folder]:
    found = []
    for prefix in reading.numbered(f"{ROOT}datasets") or [f"{ROOT}datasets.0"]:
        path = reading.get(f"{prefix}.folder_path", reading.get(f"{prefix}.dataset_path", REQUIRED))
        caption = reading.get(f"{prefix}.default_caption") or ""
        repeats = reading.get(f"{prefix}.num_repeats", 1)
        found.append(Folder(prefix, path, peers.number(repeats), caption, reading.get(f"{prefix}.is_reg") is True))
        _with_word(found[-1], reading.values.get("adapters.tokens.placeholder_token"), True)
        word = reading.get(f"{prefix}.trigger_word") or reading.get(f"{ROOT}trigger_word")
        _with_word(found[-1], word, False)
    return found


def _with_word(folder: Folder, token: str | None, new: bool) -> None:
    """Puts a new token, or a word that is to mean the subject, into the captions of a folder, but for class images:
    before all, unless none of them lacks it."""
    if not token or folder.regular:
        return
    folder.caption = folder.caption and _named(folder.caption, token)
    if (folder.count or new) and not folder.captioned and token in (folder.caption or token):
        folder.caption = folder.caption or token
    elif folder.lacks(token):
        folder.settings["captions.prefix"] = f"{token} "
        folder.guesses.append(f"{token!r} is put before all captions, whether they have it or not")


def _datasets(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        paths = dict(TABLES["dataset"])
        if "adapters.controlnet.name" in reading.values:
            paths["control_path"] = "control_dir"
        if reading.get(f"{folder.key}.shuffle_tokens") is True:
            paths["keep_tokens"] = "captions.keep_tags"
        if len(folders) > 1:
            paths["loss_multiplier"] = "loss_weight"
        if number := folder.number_with(PLACES):
            reading.assume_over({f"{folder.place}.path": folder.path})
            reading.refuse(
                f"{folder.key}.folder_path",
                f"{number} of its caption files say {' or '.join(PLACES)}, which is the trigger word there and stays "
                "as it is here: write the word into them",
            )
        reading.take({name: f"{folder.place}.{path}" for name, path in paths.items()}, f"{folder.key}.")
        _references(reading, folder)
        crop = reading.get(f"{folder.key}.random_crop")
        reading.carry(f"{folder.key}.random_crop", "data.crop", "random" if crop else "center")
        _shape(reading, folder.key)
        reading.take(TABLES["all_datasets"], f"{folder.key}.")
    reading.assume({"data.resolution": 512})


def _references(reading: Reading, folder: Folder) -> None:
    """The folders of reference images of a data set, of a family that reads some."""
    rule = models.references(str(reading.values["model.family"]))
    given = reading.get(f"{folder.key}.control_path")
    places = [place for place in (given if isinstance(given, list) else [given]) if peers.asks(place)]
    numbered = [f"{folder.key}.control_path_{number}" for number in (1, 2, 3)]
    places += [reading.get(key) for key in numbered if peers.asks(reading.get(key))]
    if rule is None or not places:
        return
    most = max(len(places), reading.values.get("model.references", 0))
    for key in (f"{folder.key}.control_path", *numbered):
        if peers.asks(reading.get(key)):
            reading.carry_all(key, {f"{folder.place}.reference_dir": peers.by_reference(places)})
    reading.assume_over({"model.references": most})


def _shape(reading: Reading, prefix: str) -> None:
    """Sizes and buckets, which are one for all sources here."""
    given = reading.get(f"{prefix}.resolution")
    sizes = given if isinstance(given, list) else [given]
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    if whole:
        several = (
            "the largest one is used; training on each image at several sizes is not supported"
            if len(whole) > 1
            else ""
        )
        reading.carry(f"{prefix}.resolution", "data.resolution", max(whole), several)
    on = reading.get(f"{prefix}.buckets", True) is not False
    reading.carry(f"{prefix}.buckets", "data.buckets.aspects", "auto" if on else "square")
    if on and reading.get(f"{prefix}.bucket_tolerance"):
        reading.carry(f"{prefix}.bucket_tolerance", "data.buckets.step")
    reading.notice(f"{prefix}.bucket_tolerance", "no buckets")


def _training(reading: Reading) -> None:
    loss_weights.ai_toolkit(reading, f"{ROOT}train.")
    for key, path in TABLES["steps"].items():
        if key == "train.steps" or peers.asks(reading.get(f"{ROOT}{key}")):
            reading.carry(f"{ROOT}{key}", path, f"{reading.get(f'{ROOT}{key}')} steps")
    name = str(reading.get(f"{ROOT}train.optimizer", "adamw")).lower().replace("_", "")
    if name in OPTIMIZERS:
        why = NOT_PAGED if name.startswith("paged") else ""
        reading.carry(f"{ROOT}train.optimizer", "optimizer.name", OPTIMIZERS[name], why)
        reading.assume({"optimizer.epsilon": 1e-6} if name in TABLES["with_epsilon"] else {})
    for own, part in {"adapter_lr": "adapter.train", "embedding_lr": "embedding.trigger"}.items():
        if reading.get(f"{ROOT}{part}") and peers.asks(reading.get(f"{ROOT}train.{own}")):
            reading.carry(f"{ROOT}train.{own}", "optimizer.learning_rate")
    _prompts(reading)
    if isinstance(reading.get(f"{ROOT}sample.neg"), str):
        reading.carry(f"{ROOT}sample.neg", "sampling.negative_prompt")
    if plugins.exists("samplers", reading.get(f"{ROOT}sample.sampler")):
        reading.carry(f"{ROOT}sample.sampler", "sampling.sampler")


def _prompts(reading: Reading) -> None:
    """Prompts of the images that a run makes: the word that is trained in its place, and options behind them."""
    word = str(reading.get(f"{ROOT}trigger_word") or reading.values.get("adapters.tokens.placeholder_token") or "")
    single = reading.keys(f"{ROOT}sample.samples.*.prompt")
    given = reading.get(f"{ROOT}sample.prompts")
    texts = [reading.get(key) for key in single] or (given if isinstance(given, list) else [given] if given else [])
    if not texts:
        return
    values, why = peers.prompts([_named(str(text), word) for text in texts])
    if single:
        reading.assume_over(values)
    else:
        reading.carry_all(f"{ROOT}sample.prompts", values, why)
    for key in single:
        reading.notice(key, f"one of sampling.prompts ({why})" if why else "one of sampling.prompts")


def _named(text: str, word: str) -> str:
    """A text with the word in the places that stand for it."""
    for place in PLACES:
        text = text.replace(place, word)
    return text
