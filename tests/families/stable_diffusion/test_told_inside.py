"""What a single file says of its training beside the weights: tables of noise levels, the scale of latents, headers;
and text encoders in other programs' names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file, save_file
from test_single_file_layout import V, published
from tiny_models import write_sdxl

from daguerre.errors import UserError
from daguerre.families.sd import Settings
from daguerre.families.stable_diffusion.single_file import configs, levels, load, save, text_names, yaml_beside
from daguerre.families.stable_diffusion.single_file.configs import of_file
from daguerre.models.parts.text.names import with_wrapper

USUAL = {"beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}


def table(**numbers: Any) -> torch.Tensor:
    """alphas_cumprod as diffusers computes them."""
    return DDIMScheduler(beta_schedule="scaled_linear", **{**USUAL, **numbers}).alphas_cumprod


@pytest.mark.parametrize("form", ["alphas_cumprod", "betas", "denoiser.sigmas"])
@pytest.mark.parametrize(
    "numbers",
    [{}, {"beta_end": 0.02}, {"beta_start": 0.0015, "beta_end": 0.0195}, {"num_train_timesteps": 500}],
)
def test_tables_are_read_in_every_form(form: str, numbers: dict[str, Any]):
    given = table(**numbers)
    before = torch.cat([torch.ones(1), given[:-1]])
    made = {
        "alphas_cumprod": given,
        "betas": 1 - given / before,
        "denoiser.sigmas": ((1 - given) / given).sqrt().flip(0),
    }
    assert levels.told({form: made[form], "x.weight": torch.ones(1)}) == pytest.approx({**USUAL, **numbers}, rel=1e-3)
    if not numbers:
        assert levels.told({form: made[form].half()}) == USUAL or form == "betas"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zero_terminal_snr_is_told_by_the_last_level(dtype: torch.dtype):
    given = table(rescale_betas_zero_snr=True).to(dtype)
    assert levels.told({"alphas_cumprod": given}) == {**USUAL, "rescale_betas_zero_snr": True}
    _, found = published("sdxl")
    got, notices = of_file(found | V | {"alphas_cumprod": given}, {})
    assert (got.scheduler["rescale_betas_zero_snr"], got.scheduler["timestep_spacing"]) == (True, "trailing")
    assert notices == ["its tables of noise levels are those of zero terminal SNR"]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"alphas_cumprod": torch.linspace(0.999, 0.01, 1000)}, "no scaled-linear betas"),
        ({"betas": torch.linspace(0.0001, 0.02, 1000)}, "no scaled-linear betas"),
        ({"alphas_cumprod": torch.full((1000,), float("nan"))}, "no noise levels"),
        ({"betas": torch.full((4,), 2.0)}, "no noise levels"),
        ({"alphas_cumprod": torch.ones(())}, "no table of noise levels"),
        ({"alphas_cumprod": torch.ones(9, dtype=torch.int64)}, "no table of noise levels"),
        ({"alphas_cumprod": torch.ones(1000)}, "no scaled-linear betas"),
        ({"alphas_cumprod": table(), "betas": table(beta_end=0.02).diff()}, "no noise levels"),
        ({"alphas_cumprod": table(), "denoiser.sigmas": (1 / table(beta_end=0.02) - 1).sqrt()}, "different noise"),
        ({"alphas_cumprod": table(beta_end=0.02).half()}, "no scaled-linear betas"),
    ],
)
def test_tables_that_are_no_such_betas_are_refused(tensors: dict[str, torch.Tensor], words: str):
    with pytest.raises(UserError, match=words):
        levels.told(tensors)


def test_other_levels_are_used_and_said_wherever_a_file_is_read(tmp_path):
    _, found = published("sd1")
    other = {"alphas_cumprod": table(beta_end=0.02)}
    got, notices = of_file(found | other, {}, None, {"beta_end": 0.015})
    assert got.scheduler["beta_end"] == 0.02
    assert notices == ["its tables of noise levels say beta_end 0.02"]
    save_file(other, tmp_path / "a.safetensors")
    assert load.scheduler(tmp_path / "a.safetensors")["beta_end"] == 0.02
    numbers, found = published("sdxl")
    metadata = {configs.METADATA: numbers.to_metadata()}
    assert of_file(found | {"alphas_cumprod": table()}, metadata)[0] == numbers
    with pytest.raises(UserError, match=r"tables of noise levels with beta_end 0\.02, which was added later"):
        of_file(found | other, metadata)


@pytest.mark.parametrize(
    ("said", "prediction"),
    [
        ("v", "v_prediction"),
        ("EPSILON", "epsilon"),
        ("sample", "sample"),
        ("x0", "sample"),
        ("flow", "flow_prediction"),
    ],
)
@pytest.mark.parametrize("key", ["modelspec.prediction_type", "modelspec.predict_key"])
def test_every_prediction_that_a_header_names_is_read(key: str, said: str, prediction: str, tmp_path):
    _, found = published("sdxl")
    got, notices = of_file(found, {key: said})
    assert got.scheduler["prediction_type"] == prediction
    assert bool(notices) == (said == "flow")
    wanted = {"v_prediction": "v", "epsilon": "eps", "sample": "x0", "flow_prediction": "flow"}[prediction]
    assert Settings.schedulers.objective_of(got.scheduler)["name"] == wanted
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors", {key: said})
    told = load.scheduler(tmp_path / "a.safetensors")
    assert Settings.schedulers.objective_of(told)["name"] == wanted


def test_headers_that_say_something_else_are_refused_or_said():
    _, found = published("sdxl")
    with pytest.raises(UserError, match=r"modelspec\.prediction_type=score; known are epsilon"):
        of_file(found, {"modelspec.prediction_type": "score"})
    with pytest.raises(UserError, match=r"prediction_type=v and modelspec\.predict_key=epsilon"):
        of_file(found, {"modelspec.prediction_type": "v", "modelspec.predict_key": "epsilon"})
    assert (
        of_file(found, {"modelspec.prediction_type": "score"}, "epsilon")[0].scheduler["prediction_type"] == "epsilon"
    )
    got, notices = of_file(found | V, {"modelspec.prediction_type": "epsilon"})
    assert got.scheduler["prediction_type"] == "v_prediction"
    assert notices == ["its mark v_pred says v_prediction and its header epsilon: the mark counts"]
    assert load.configs.told(["ztsnr"], {}, {}) == {"rescale_betas_zero_snr": True}


@pytest.mark.parametrize(
    ("name", "said", "told"),
    [
        ("sd1", "1", ""),
        ("sd1", "2", "clip skip 2 (modelspec.encoder_layer), and captions are read so with model.text_encoder_layer=-2 "
                     "model.text_encoder_final_norm=true"),
        ("sd1", "last", "modelspec.encoder_layer=last, which is no layer of its text encoder: it is ignored"),
        ("sd2_base", "2", ""),
        ("sd2_base", "3", "model.text_encoder_layer=-2 "),
        ("sd2_base", "1", "is no layer of its text encoder"),
        ("sdxl", "1", ""),
    ],
)  # fmt: skip
def test_a_header_that_names_another_layer_of_the_text_encoder_is_said(name: str, said: str, told: str):
    """kohya's scripts write --clip_skip there; SDXL they read by the layer before the last, whatever it says."""
    _, notices = of_file(published(name)[1], {"modelspec.encoder_layer": said, "modelspec.prediction_type": "epsilon"})
    assert [told in each for each in notices] == [True] * bool(told)


@pytest.mark.parametrize(
    ("scheduler", "named"),
    [
        ({}, "epsilon"),
        ({"prediction_type": "v_prediction"}, "v"),
        ({"prediction_type": "sample"}, None),
        (configs.FLOW, None),
        ({"_class_name": "EDMEulerScheduler", "prediction_type": "v_prediction"}, None),
    ],
)
def test_what_we_write_names_a_prediction_only_where_modelspec_has_a_name(scheduler, named, tmp_path):
    numbers, found = published("sdxl")
    numbers.scheduler.clear()
    numbers.scheduler.update(scheduler)
    header = save._metadata(tmp_path / "a.safetensors", numbers)
    assert header.get("modelspec.prediction_type") == named
    assert of_file(found, header)[0] == numbers


def test_a_scale_of_latents_is_used(tmp_path, capsys):
    folder = write_sdxl(tmp_path / "sdxl")
    save.write(tmp_path / "a.safetensors", folder)
    tensors = load_file(tmp_path / "a.safetensors") | {"scale_factor": torch.tensor(0.5)}
    with load.opened(tmp_path / "a.safetensors") as file:
        save_file(tensors, tmp_path / "b.safetensors", file.metadata())
    made = load.folder(tmp_path / "b.safetensors", pickled=False)
    assert (made / "vae" / "config.json").read_text().count('"scaling_factor": 0.5') == 1
    assert "latents are multiplied by 0.5 for it" in capsys.readouterr().err
    with pytest.raises(UserError, match="scale_factor is no scale"):
        levels.scale({"scale_factor": torch.ones(2)})


def yaml(tmp_path, text: str):
    (tmp_path / "m.yaml").write_text(f"model:\n  target: sgm.models.diffusion.DiffusionEngine\n  params: {text}\n")
    return tmp_path / "m.safetensors"


def test_levels_and_scale_of_a_yaml(tmp_path):
    place = yaml(tmp_path, "{scale_factor: 0.13025}")
    assert (yaml_beside.scale(place), yaml_beside.told(place)) == (0.13025, {})
    own = "{denoiser_config: {params: {discretization_config: {target: a.KIND, params: {linear_end: 0.02}}}}}"
    assert yaml_beside.told(yaml(tmp_path, own.replace("KIND", "LegacyDDPMDiscretization"))) == {"beta_end": 0.02}
    with pytest.raises(UserError, match="the noise levels EDMDiscretization"):
        yaml_beside.told(yaml(tmp_path, own.replace("KIND", "EDMDiscretization")))
    with pytest.raises(UserError, match="the noise levels cosine"):
        yaml_beside.told(yaml(tmp_path, "{beta_schedule: cosine}"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.transformer."),
        ("conditioner.embedders.0.transformer.", "conditioner.embedders.1."),
        ("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.transformer."),
        ("text_encoder.", "text_encoder_2."),
        ("clip_l.transformer.", "clip_g.transformer."),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_text_encoders_in_the_names_of_transformers(first: str, second: str, wrapped: bool, tmp_path):
    folder = write_sdxl(tmp_path / "sdxl")
    save.write(tmp_path / "a.safetensors", folder)
    whole = load_file(tmp_path / "a.safetensors")
    theirs = {name: value for name, value in whole.items() if not name.startswith("conditioner.")}
    own = {n: load_file(folder / n / "model.safetensors") for n in ("text_encoder", "text_encoder_2")}
    for component, prefix in zip(own, (first, second), strict=True):
        for name, value in own[component].items():
            spelt = with_wrapper(name) if wrapped else name.removeprefix("text_model.")
            theirs[f"{prefix}{spelt}"] = value
    found = text_names.original(load.layout.normalized(theirs))
    wanted = {name for name in whole if not name.endswith("position_ids")}
    assert {name for name in found if not name.endswith("position_ids")} == wanted
    assert all(torch.equal(found[name], whole[name]) for name in wanted)
    assert text_names.original(whole).keys() == whole.keys()


def test_openclips_encoder_of_2x_is_told_from_openais_by_its_width():
    names = {"text_model.embeddings.token_embedding.weight": (9, 1024), "text_model.final_layer_norm.bias": (1024,)}
    given = {f"cond_stage_model.transformer.{name}": torch.ones(shape) for name, shape in names.items()}
    assert {*text_names.original(given)} == {
        "cond_stage_model.model.token_embedding.weight",
        "cond_stage_model.model.ln_final.bias",
    }
    narrow = {name: value[..., :768] for name, value in given.items()}
    assert text_names.original(narrow) == narrow
