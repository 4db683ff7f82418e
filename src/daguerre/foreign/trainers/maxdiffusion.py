"""MaxDiffusion's configs: what several keys mean together. Each by itself is in maxdiffusion.yaml."""

from daguerre.errors import UserError
from daguerre.foreign import base_models as models
from daguerre.foreign import peers
from daguerre.foreign.reader import REQUIRED, Reading, Tables

TABLES = Tables("maxdiffusion")


def convert(reading: Reading) -> None:
    _refuse_others(reading)
    for key in ("run_name", "output_dir"):
        reading.carry(key, key, reading.get(key) or REQUIRED)
    _model(reading)
    reading.take(TABLES["own"])
    _data(reading)
    reading.take(TABLES["no_guidance"] if reading.get("do_classifier_free_guidance") is False else {})
    reading.take(TABLES["guidance"])
    asked = reading.get("opt_enable_grad_global_norm_clipping") is True
    if reading.values["model.family"] == "sdxl" and not asked:
        reading.notice(
            "max_grad_norm", "its trainer of SDXL does not clip without opt_enable_grad_global_norm_clipping"
        )
    reading.take(TABLES["last"])
    reading.aliases()
    for key in [*reading.keys("ici_*"), *reading.keys("dcn_*")]:
        reading.carry(key, f"mesh.{key}")
    computes, narrow = (reading.values.get(f"training.{name}") for name in ("mixed_precision", "weights_dtype"))
    without = [] if computes == "bf16" else ["training.frozen_precision"]
    without += ["training.stochastic_rounding"] if narrow in (None, "float32", REQUIRED) else []
    reading.assume(TABLES["unasked"], *without)


def _refuse_others(reading: Reading) -> None:
    """UserError for a model that its trainers of Stable Diffusion and SDXL do not train."""
    place = reading.get("pretrained_model_name_or_path", REQUIRED)
    for key, what in TABLES["others"].items():
        if peers.asks(reading.get(key)):
            raise _other(what, key)
    if models.is_flow(models.base(place).family):
        raise _other("a model of flow matching", str(place))


def _other(what: str, sign: str) -> UserError:
    return UserError(
        f"MaxDiffusion's configs are read for Stable Diffusion and SDXL alone, and this one is of {what} ({sign}): no "
        "recipe was written. `daguerre recipes` lists the models that have a recipe",
        code="unsupported",
    )


def _model(reading: Reading) -> None:
    found = models.base(reading.get("pretrained_model_name_or_path", REQUIRED))
    reading.assume({"model.family": found.family})
    reading.carry("pretrained_model_name_or_path", "model.pretrained_model_name_or_path", why=found.doubt)
    given = models.PREDICTIONS.get(str(reading.get("diffusion_scheduler_config.prediction_type")))
    reading.assume({"objective.name": given or found.objective})


def _data(reading: Reading) -> None:
    if reading.get("instance_data_dir"):
        raise UserError(
            "a config of DreamBooth (instance_data_dir is given), which has recipes of its own: daguerre train "
            "sd15_dreambooth instance_data_dir=... (docs/dreambooth.md)",
            code="unsupported",
        )
    reading.take(TABLES["no_dreambooth"])
    if str(reading.get("dataset_type")) in ("tfrecord", "grain"):
        reading.take(TABLES["records"])
        reading.assume({"data.source": "webdataset", "data.path": REQUIRED})
    elif not reading.get("dataset_name"):
        reading.carry_all("dataset_name", {"data.source": "huggingface", "data.name": REQUIRED})
    reading.alias("dataset_name")
    reading.assume({"data.source": "huggingface"})
    source = reading.values["data.source"]
    if source == "huggingface" and not {"data.name", "data.path"} & reading.values.keys():
        reading.assume({"data.name": REQUIRED})
    for key in ("image_column", "caption_column"):
        if source == "huggingface":
            reading.carry(key, f"data.{key}")
        reading.notice(key, f"no columns: data.source is {source}")
