"""What MaxDiffusion's keys mean here: flat configs such as base14.yml, base21.yml or base_xl.yml.

What a key means on the command line as well is in the tables of `aliases`; here is what several keys mean together.
"""

from __future__ import annotations

from daguerre.config_import import base_models as models
from daguerre.config_import.defaults import unasked
from daguerre.config_import.reader import REQUIRED, Reading
from daguerre.errors import UserError

OWN = {
    "learning_rate": "optimizer.learning_rate",
    "scale_lr": "optimizer.scale_lr",
    "resolution": "data.resolution",
    "seed": "seed",
    "per_device_batch_size": "training.per_device_batch_size",
    "random_flip": "data.random_flip",
    "weights_dtype": "training.weights_dtype",
    "num_inference_steps": "sampling.num_inference_steps",
    "train_text_encoder": "model.train_text_encoder",
}
"""Keys that are names of our own settings."""
NOTICES = {
    "cache_dir": "the hub's own cache, HF_HOME",
    "num_train_epochs": "max_train_steps is the length of the run",
}
"""Keys that mean something else on the command line, where others' names and our own are alike."""
DREAMBOOTH = (
    *("instance_data_dir", "instance_prompt", "class_data_dir", "class_prompt"),
    *("num_class_images", "prior_loss_weight"),
)
RECORDS = ("tfrecord", "grain")


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    for key in ("run_name", "output_dir"):
        reading.carry(key, key, reading.get(key) or REQUIRED)
    _model(reading)
    for key, path in OWN.items():
        reading.carry(key, path)
    _one_dtype(reading)
    _data(reading)
    _guidance(reading)
    _clipping(reading)
    for key, text in NOTICES.items():
        reading.notice(key, text)
    reading.aliases()
    for key in [*reading.keys("ici_*"), *reading.keys("dcn_*")]:
        reading.carry(key, f"mesh.{key}")
    bf16, narrow = (reading.values.get(f"training.{name}") for name in ("mixed_precision", "weights_dtype"))
    without = [] if bf16 == "bf16" else ["training.frozen_precision"]
    without += ["training.stochastic_rounding"] if narrow in (None, "float32", REQUIRED) else []
    reading.assume(unasked("MaxDiffusion", *without))


def _model(reading: Reading) -> None:
    place = reading.get("pretrained_model_name_or_path", REQUIRED)
    found = models.base(place)
    reading.assume({"model.family": found.family})
    reading.carry("pretrained_model_name_or_path", "model.pretrained_model_name_or_path", why=found.doubt)
    given = models.PREDICTIONS.get(str(reading.get("diffusion_scheduler_config.prediction_type")))
    reading.assume({"objective.name": given or found.objective})


def _one_dtype(reading: Reading) -> None:
    """Up to July 2024 one key was the type of weights and activations."""
    computes = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}.get(str(reading.get("dtype")))
    if computes:
        narrow = {"training.weights_dtype": reading.get("dtype"), "training.mixed_precision": computes}
        reading.carry_all("dtype", narrow)


def _data(reading: Reading) -> None:
    if reading.get("instance_data_dir"):
        raise UserError(
            "a config of DreamBooth (instance_data_dir is given), which has recipes of its own: daguerre train "
            "sd15_dreambooth instance_data_dir=... (docs/dreambooth.md)"
        )
    for key in DREAMBOOTH:
        reading.notice(key, "no DreamBooth (instance_data_dir)")
    if str(reading.get("dataset_type")) in RECORDS:
        reading.alias("dataset_type")
        for key in ("dataset_name", "train_data_dir", "train_split", "dataset_config_name"):
            reading.notice(key, "of records that cannot be read")
        reading.assume({"data.source": "webdataset", "data.path": REQUIRED})
    elif not reading.get("dataset_name"):
        reading.carry_all("dataset_name", {"data.source": "huggingface", "data.name": REQUIRED})
    reading.alias("dataset_name")
    reading.assume({"data.source": "huggingface"})
    if reading.values["data.source"] == "huggingface":
        if not {"data.name", "data.path"} & reading.values.keys():
            reading.assume({"data.name": REQUIRED})
        for key in ("image_column", "caption_column"):
            reading.carry(key, f"data.{key}")
    for key in ("image_column", "caption_column"):
        reading.notice(key, f"no columns: data.source is {reading.values['data.source']}")


def _guidance(reading: Reading) -> None:
    if reading.get("do_classifier_free_guidance") is False:
        for key in ("guidance_scale", "negative_prompt", "guidance_rescale"):
            reading.notice(key, "no guidance")
    reading.carry("guidance_scale", "sampling.guidance_scale")
    reading.carry("negative_prompt", "sampling.negative_prompt")


def _clipping(reading: Reading) -> None:
    """Its trainer of Stable Diffusion clips by `max_grad_norm`, the one of SDXL only where the optimizer is to."""
    asked = reading.get("opt_enable_grad_global_norm_clipping") is True
    if reading.values["model.family"] == "sdxl" and not asked:
        reading.notice(
            "max_grad_norm", "its trainer of SDXL does not clip without opt_enable_grad_global_norm_clipping"
        )
