"""Configs of other trainers that train a ControlNet or new tokens, made from those of whole networks."""

from __future__ import annotations

import json
from typing import Any

import foreign_configs
import peer_configs


def mindone_controlnet(depth: str = "[1, 2, 10]") -> str:
    """A config for MindOne's train_controlnet.py; `depth` is that of the ControlNet's transformers."""
    text = foreign_configs.mindone().replace("is_trainable: True", "is_trainable: False")
    text = text.replace("gm.modules.diffusionmodules.openaimodel.UNetModel", "cldm.cldm.ControlnetUnetModel")
    unet = text[text.index("                adm_in_channels") : text.index("        conditioner_config")]
    stage = "".join(f"        {line}\n" for line in unet.splitlines() if "out_channels" not in line)
    own = "                guess_mode: False\n                strength: 0.8\n                sd_locked: True\n"
    start = "                control_stage_config:\n                    target: cldm.cldm.ControlNet\n"
    start += (
        f"                    params:\n                        hint_channels: 3\n{stage.replace('[1, 2, 10]', depth)}"
    )
    text = text.replace(unet, f"{own}{unet}{start}")
    drop = "Text2ImageControlNetDataset\n        params:\n            drop_text_prob: 0.5\n"
    text = text.replace("Text2ImageDataset\n        params:\n", drop)
    key = '                    key: ["control", "image"]\n'
    return text.replace("mappers.Rescaler", "mappers.RescalerControlNet").replace(
        "                    size: 1024\n", f"{key}                    size: 1024\n"
    )


def mindone_tokens() -> str:
    """A config for MindOne's train_textual_inversion.py, whose command names the token."""
    text = foreign_configs.mindone().replace("is_trainable: True", "is_trainable: False")
    return text.replace("dataset.Text2ImageDataset", "dataset.Text2ImageDatasetTextualInversion")


KOHYA = """\
pretrained_model_name_or_path = "base"
output_name = "mine"
output_dir = "out"
max_train_steps = 2
train_batch_size = 2
resolution = 16
train_data_dir = "images"
"""
KOHYA_CONTROLNET = f"""{KOHYA}conditioning_data_dir = "controls"
learning_rate = 2e-5
"""
KOHYA_TOKENS = f"""{KOHYA}token_string = "<toy>"
init_word = "toy car"
num_vectors_per_token = 2
use_object_template = true
learning_rate = 1e-3
"""
KOHYA_SETS = """
[[datasets]]
resolution = 16
[[datasets.subsets]]
image_dir = "images"
conditioning_data_dir = "controls"
[[datasets.subsets]]
image_dir = "others"
conditioning_data_dir = "others_controls"
num_repeats = 2
"""


def onetrainer(method: str, **more: Any) -> str:
    own = {"training_method": method, "base_model_name": "base", "embedding_learning_rate": 3e-4, **more}
    text = {"train": False, "train_embedding": True}
    own |= (
        {"text_encoder": text, "text_encoder_2": text | {"train_embedding": False}} if "text_encoder" not in own else {}
    )
    return json.dumps(peer_configs.ONETRAINER | own)


EMBEDDING = {
    "placeholder": "<toy>",
    "token_count": 2,
    "initial_embedding_text": "toy",
    "train": True,
    "stop_training_after_unit": "NEVER",
    "is_output_embedding": False,
    "model_name": "",
    "uuid": "1",
}


def simpletuner(**more: Any) -> str:
    return json.dumps(peer_configs.SIMPLETUNER | {"--controlnet": "true", "--model_type": "full", **more})


def backends(**more: Any) -> str:
    """The data sets of a ControlNet of SimpleTuner's."""
    images = {"id": "cats", "type": "local", "instance_data_dir": "images", "caption_strategy": "textfile"}
    images |= {"crop": True, "crop_aspect": "square", "crop_style": "center", "conditioning_data": "edges", **more}
    edges = {"id": "edges", "type": "local", "dataset_type": "conditioning", "instance_data_dir": "controls"}
    texts = {"id": "texts", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "cache"}
    return json.dumps([images, edges | {"conditioning_type": "controlnet"}, texts])


def ai_toolkit(part: str, data: str = "") -> str:
    """A job with a further part of the process, and further lines of its data set."""
    text = peer_configs.AI_TOOLKIT.replace("      device", f"      {part}\n      device", 1)
    return text.replace("          caption_ext", f"{data}          caption_ext", 1)
