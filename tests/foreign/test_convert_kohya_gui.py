"""The JSON of kohya's GUI: a LoRA stays a LoRA, every field of every tab is told, and as the GUI passes it on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import recipe_values
from test_convert_config import said

from daguerre.cli import main
from daguerre.foreign import signs
from daguerre.foreign.reader import UNKNOWN

RECORDED = Path(__file__).parents[1] / "support/trainer_keys/kohya_gui.json"
KEYS = json.loads(RECORDED.read_text(encoding="utf-8"))["keys"]
LORA: dict[str, Any] = {
    "LoRA_type": "Standard", "network_dim": 32, "network_alpha": 16, "pretrained_model_name_or_path": "m.safetensors",
    "train_data_dir": "sets", "max_resolution": "512,512", "epoch": 10, "train_batch_size": 2, "learning_rate": 1e-4,
    "unet_lr": 1e-4, "text_encoder_lr": 1e-4, "output_name": "x", "output_dir": "o", "sdxl": False, "lr_warmup": 0,
    "optimizer": "AdamW", "lr_scheduler": "constant", "max_train_steps": 0,
}  # fmt: skip
TUNED = {key: value for key, value in LORA.items() if key not in ("LoRA_type", "network_dim", "network_alpha")}
TABS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dreambooth": TUNED,
    "finetune": TUNED | {"image_folder": "sets/10_sks dog", "sdxl_checkbox": False, "create_caption": True},
    "textual_inversion": TUNED | {"token_string": "sks", "init_word": "dog", "num_vectors_per_token": 2},
}


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Converts fields: our values by path, {field: (kind, text)}; the exit code is 0 unless another is given."""
    monkeypatch.chdir(tmp_path)
    for name, count in {"sets/10_sks dog": 3, "classes/1_dog": 5}.items():
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").write_bytes(b"")

    def run(fields: dict[str, Any], code: int = 0) -> tuple[dict[str, Any], Any]:
        Path("gui.json").write_text(json.dumps(fields), encoding="utf-8")
        Path("ours.yaml").unlink(missing_ok=True)
        found = main.run(["convert", "config", "gui.json", "out=ours.yaml", "--all"])
        output = capsys.readouterr()
        assert found == code, output.out + output.err
        if code:
            return {}, output.err
        return recipe_values.values(Path("ours.yaml")), said(output.out)

    return run


@pytest.mark.parametrize("tab", TABS)
def test_every_field_of_every_tab_is_told(convert, tab):
    empty = dict.fromkeys(KEYS[tab], "")
    assert signs.trainer(empty) == "kohya's GUI"
    _, lines = convert(empty | TABS[tab])
    assert {key for key in lines if not key.startswith("datasets.")} >= {*KEYS[tab], *TABS[tab]}
    assert not {key: text for key, (kind, text) in lines.items() if kind == "refused"}
    assert UNKNOWN not in {text for _, text in lines.values()}


def test_a_lora_stays_one(convert):
    values, lines = convert(LORA)
    expected = {
        "adapters.lora.name": "lora",
        "adapters.lora.kind": "lora",
        "adapters.lora.rank": 32,
        "adapters.lora.alpha": 16,
        "adapters.lora.targets": "attention+ff",
        "adapters.lora.ranks.text_encoder": 32,
        "data.resolution": 512,
        "data.repeats": 10,
        "data.captions.text": "sks dog",
        "training.duration": "10 epochs",
        "training.per_device_batch_size": 2,
        "optimizer.learning_rate": 1e-4,
        "model.family": "sd",
    }
    assert {path: values.get(path) for path in expected} == expected
    assert not [path for path in values if path.startswith("optimizer.learning_rates")]
    assert lines["LoRA_type"][0] == lines["network_dim"][0] == lines["epoch"][0] == "carried"
    sdxl, _ = convert(LORA | {"sdxl": True, "text_encoder_lr": 0})
    assert sdxl["model.family"] == "sdxl"
    assert "adapters.lora.ranks.text_encoder" not in sdxl
    only_text, _ = convert(LORA | {"unet_lr": 0})
    assert only_text["adapters.lora.ranks.unet"] is None


def test_lengths_are_those_that_the_gui_counts(convert):
    values, _ = convert(LORA | {"lr_scheduler": "cosine", "lr_warmup": 10})
    assert values["lr_scheduler.warmup"] == "15 steps"  # of 3 x 10 images x 10 epochs / 2
    values, _ = convert(LORA | {"lr_scheduler": "cosine", "lr_warmup": "10", "max_train_steps": "1600"})
    assert (values["training.duration"], values["lr_scheduler.warmup"]) == ("1600 steps", "160 steps")
    values, lines = convert(LORA | {"lr_scheduler": "cosine", "lr_warmup": 10, "lr_warmup_steps": 7})
    assert (values["lr_scheduler.warmup"], lines["lr_warmup"][0]) == ("7 steps", "notice")
    values, _ = convert(LORA | {"reg_data_dir": "classes", "prior_loss_weight": 0.5})
    assert values["training.duration"] == "300 steps"  # class images double it
    assert values["data.sources.1_dog.loss_weight"] == 0.5
    values, _ = convert(TABS["finetune"] | {"flip_aug": True, "max_train_steps": 101})
    assert values["training.duration"] == "51 steps"  # its tab for fine-tuning halves them


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"LoRA_type": "Kohya LoCon", "conv_dim": 8, "conv_alpha": 4}, {"targets": "attention+ff+conv"}),
        ({"LoRA_type": "Kohya LoCon", "conv_dim": 0, "conv_alpha": 1}, {"kind": "lora", "targets": "attention+ff"}),
        ({"LoRA_type": "LyCORIS/LoCon", "LyCORIS_preset": "full", "conv_dim": 0}, {"targets": "attention+ff+conv"}),
        ({"LoRA_type": "LyCORIS/LoHa", "LyCORIS_preset": "attn-mlp"}, {"kind": "loha", "targets": "attention+ff"}),
        ({"LoRA_type": "LyCORIS/LoKr", "factor": -1, "network_alpha": 32}, {"kind": "lokr"}),
        ({"LoRA_type": "LyCORIS/LoCon", "LyCORIS_preset": "full", "dora_wd": True}, {"kind": "dora"}),
        ({"LoRA_type": "LoRA-FA"}, {"kind": "lora", "lora_fa": True}),
    ],
)
def test_kinds_of_networks(convert, fields, expected):
    values, lines = convert(LORA | fields)
    assert {name: values.get(f"adapters.lora.{name}") for name in expected} == expected
    assert not [key for key, (kind, _) in lines.items() if kind == "refused"]


@pytest.mark.parametrize(
    ("rank", "theirs", "alpha", "lost"),
    [(100_000, 1, 100_000, set()), (8, 1, 1, {"network_alpha"}), (8, 8, 8, set())],
)
def test_a_lokr_of_whole_matrices_is_multiplied_by_1_as_in_lycoris(convert, rank, theirs, alpha, lost):
    lokr = {"LoRA_type": "LyCORIS/LoKr", "LyCORIS_preset": "full", "network_dim": rank, "network_alpha": theirs}
    values, lines = convert(LORA | lokr | {"conv_dim": 100_000, "conv_alpha": 2})
    assert values["adapters.lora.alpha"] == alpha
    assert values.get("adapters.lora.alpha_pattern.conv[12]", alpha) == 100_000
    assert {key for key, (kind, _) in lines.items() if kind == "refused"} == lost


def test_what_no_network_here_has_is_lost_by_its_field(convert):
    lycoris = {"LoRA_type": "LyCORIS/LoKr", "LyCORIS_preset": "full", "network_alpha": 32}
    _, lines = convert(LORA | lycoris | {"factor": 8, "rank_dropout": 0.1, "module_dropout": 0.0, "train_norm": True})
    lost = {key for key, (kind, _) in lines.items() if kind == "refused"}
    assert lost == {"factor", "rank_dropout", "train_norm"}
    _, lines = convert(LORA | lycoris | {"dora_wd": True})  # a LoKr of rows of one length, not a DoRA
    assert lines["dora_wd"][0] == "refused"
    _, lines = convert(LORA | {"lr_scheduler": "constant", "lr_warmup": 10, "train_data_dir": "elsewhere"})
    assert lines["lr_warmup"][0] == "notice"
    for name in ("LyCORIS/iA3", "LyCORIS/BOFT", "LyCORIS/Native Fine-Tuning", "Kohya DyLoRA"):
        assert name in convert(LORA | {"LoRA_type": name}, code=2)[1]
    assert "Flux.1" in convert(LORA | {"flux1_checkbox": True}, code=2)[1]


def test_values_without_effect_do_not_stop_it(convert):
    idle = {
        "lr_scheduler_power": 1, "lr_scheduler_num_cycles": 3, "prior_loss_weight": 0.5, "vae": "",
        "huber_c": 0.1, "huber_schedule": "snr", "loss_type": "l2", "multires_noise_discount": 0.3, "reg_data_dir": "",
        "noise_offset": 0, "noise_offset_random_strength": True, "adaptive_noise_scale": 0.1, "optimizer_args": "",
        "sample_prompts": "",
        "optimizer": "Prodigy", "learning_rate": 1, "unet_lr": 1, "text_encoder_lr": 1, "max_train_epochs": "",
    }  # fmt: skip
    values, lines = convert(LORA | idle)
    assert {key: lines[key] for key in idle if lines[key][0] == "refused"} == {}
    assert (values["optimizer.name"], values["optimizer.learning_rate"]) == ("prodigy", 1)
    values, lines = convert(LORA | idle | {"text_encoder_lr": 0.5})
    assert lines["text_encoder_lr"][0] == "refused"
    assert convert(LORA | {"optimizer": "Adafactor"})[0].get("optimizer.weight_decay_exclude") is None
    values, lines = convert(LORA | {"optimizer": "DAdaptAdam", "learning_rate": 1, "unet_lr": 1, "text_encoder_lr": 1})
    assert values["optimizer.learning_rate"] == "???"
    assert lines["optimizer"][0] == "refused"


def test_prompts_are_lines_with_options(convert):
    text = "# mine\na dog --w 768 --h 512 --n blurry --l 7.5 --d 1\n\na cat --w 768 --h 512 --n blurry --l 7.5 --d 2\n"
    values, lines = convert(LORA | {"sample_prompts": text, "sample_every_n_epochs": 1, "sample_sampler": "euler_a"})
    assert values["sampling.prompts"] == ["a dog", "a cat"]
    assert (values["sampling.width"], values["sampling.height"], values["sampling.guidance_scale"]) == (768, 512, 7.5)
    assert values["sampling.negative_prompt"] == "blurry"
    assert values["sampling.sampler"] == "euler_ancestral"
    assert "--d" in lines["sample_prompts"][1]
    assert lines["sample_every_n_epochs"][0] == "notice"  # the GUI saves at each epoch
    _, lines = convert(LORA | {"sample_prompts": text, "sample_every_n_steps": 5})
    assert lines["sample_every_n_steps"][0] == "refused"
    values, _ = convert(LORA | {"sample_prompts": text, "sample_every_n_epochs": 0})
    assert "sampling.prompts" not in values


def test_other_tabs(convert):
    values, _ = convert(TUNED)
    assert values["adapters.full.train"] == ["unet", "text_encoder"]  # train_db.py does, unless it is told not to
    values, _ = convert(TUNED | {"stop_text_encoder_training": -1})
    assert "adapters.full.train" not in values
    values, _ = convert(TUNED | {"sdxl": True, "learning_rate_te1": 0, "learning_rate_te2": 2e-6})
    assert values["adapters.full.train"] == ["unet", "text_encoder_2"]
    assert values["optimizer.learning_rates.text_encoder_2.*"] == 2e-6
    values, _ = convert(TABS["textual_inversion"] | {"template": "style template"})
    assert values["adapters.tokens.num_vectors"] == 2
    assert values["data.captions.templates"] == "style"
    values, lines = convert(TABS["finetune"] | {"max_grad_norm": 0.5, "create_caption": False})
    assert values["data.path"] == "sets/10_sks dog"
    assert (lines["max_grad_norm"][0], lines["create_caption"][0]) == ("notice", "refused")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("lr_warmup", [1], "lr_warmup is .1., and must be one value"),
        ("text_encoder_lr", [1e-4, 1e-5], "text_encoder_lr is .*, and must be one value"),
        ("epoch", "1e400", "1e400 is no finite number"),
        ("unet_lr", "nan", "nan is no finite number"),
        ("sdxl", "yes", 'sdxl is "yes", and must be true or false'),
        ("flip_aug", "yes", 'flip_aug is "yes", and must be true or false'),
        ("epoch", -3, "max_train_epochs is -3, and must be above 0"),
        ("stop_text_encoder_training", "-3", ""),
    ],
)
def test_values_of_another_kind_are_told(convert, field, value, said):
    found = convert(LORA | {field: value}, 2 if said else 0)
    if said:
        assert re.search(said, " ".join(found[1].split()))
