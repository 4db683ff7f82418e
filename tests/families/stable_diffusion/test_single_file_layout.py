"""Files of the wild: the published models are recognised by their shapes, everything else is refused by name."""

import json
import re

import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_models import write_sd, write_sdxl

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import compatibility, configs, keys, layout, load, save
from daguerre.families.stable_diffusion.single_file.configs import of_architecture, of_file, shapes
from daguerre.families.stable_diffusion.single_file.layout import LAYOUTS
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.weights import opening, original_names

V = {"v_pred": torch.empty(0)}
COSXL = {"edm_vpred.sigma_max": torch.tensor(123.456789), "edm_vpred.sigma_min": torch.tensor(0.0021)}
EDM = {"_class_name": "EDMEulerScheduler", "prediction_type": "v_prediction", "sigma_data": 1.0}
EPSILON = {"modelspec.prediction_type": "epsilon"}


def published(name):
    """A file of real size without its memory: tensors of the original layout on the meta device."""
    numbers = of_architecture(name, ("unet", "vae", "text_encoder", "text_encoder_2"))
    found = {}
    for component, config in numbers.configs.items():
        place, own = LAYOUTS[numbers.layout][component], shapes(component, config)
        for link in place.links(own):
            network = {n: torch.empty(own[n], device="meta") for n in link.names}
            later = original_names.packed(link, network, torch.float32)
            found[place.prefix + link.original] = torch.empty(later.shape, device="meta")
    return numbers, found


@pytest.mark.parametrize("name", configs.OF_LAYOUTS)
def test_published_models_are_recognised_by_names_and_shapes(name):
    numbers, found = published(name)
    marks = V if numbers.scheduler.get("prediction_type") == "v_prediction" else {}
    got, notices = of_file(found | marks, {} if marks else EPSILON)
    numbers.scheduler.setdefault("prediction_type", "epsilon")
    assert (got, notices) == (numbers, [])
    wrong = torch.empty((3, 3), device="meta")
    with pytest.raises(UserError, match=r"not the shapes of a known model.*proj_in.weight is"):
        of_file(found | {f"{layout.UNET}middle_block.1.proj_in.weight": wrong}, EPSILON)


@pytest.mark.parametrize("name", configs.OF_LAYOUTS)
def test_names_and_shapes_are_those_of_diffusers_own_converters(name):
    numbers, found = published(name)
    assert_alike(convert_ldm_unet_checkpoint(found, numbers.configs["unet"]), numbers, "unet")
    assert_alike(convert_ldm_vae_checkpoint(found, numbers.configs["vae"]), numbers, "vae")
    if numbers.layout != "sd2":
        assert_alike(convert_ldm_clip_checkpoint(found), numbers, "text_encoder")
    if numbers.layout != "sd1":
        component = "text_encoder" if numbers.layout == "sd2" else "text_encoder_2"
        with torch.device("meta"):
            kind = configs.KINDS[component]
            network = kind(kind.config_class(**numbers.configs[component]))
        prefix = LAYOUTS[numbers.layout][component].prefix
        assert_alike(convert_open_clip_checkpoint(network, found, prefix=prefix), numbers, component)


def assert_alike(converted, numbers, component):
    expected = shapes(component, numbers.configs[component])
    if component.startswith("text"):
        expected = {with_wrapper(name): shape for name, shape in expected.items()}
    assert {name: tuple(tensor.shape) for name, tensor in converted.items()} == expected


def test_2x_without_a_mark_is_told_apart_by_its_weights():
    numbers, found = published("sd21")
    norm = f"{layout.UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
    for scale, expected in ((0.2, "v_prediction"), (0.01, "epsilon")):
        weights = torch.linspace(-scale, scale, found[norm].numel())
        got, notices = of_file({**found, norm: weights}, {})
        assert got.scheduler["prediction_type"] == expected
        assert got.configs["unet"]["sample_size"] == (96 if expected == "v_prediction" else 64)
        assert "does not record whether it predicts the noise" in notices[0]
    got, notices = of_file(found, {}, "v_prediction")
    assert (got.scheduler["prediction_type"], notices) == ("v_prediction", [])
    assert numbers.scheduler["prediction_type"] == "v_prediction"


def test_a_unet_alone_is_converted_alone_and_says_so(tmp_path, monkeypatch):
    folder = write_sd(tmp_path / "p")
    config = json.loads((folder / "unet" / "config.json").read_text())
    own = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    alone = {link.original: own[link.names[0]] for link in keys.unet(own)}
    save_file(alone, tmp_path / "unet.safetensors")
    numbers = of_architecture("sd1", ("unet",))
    numbers.configs["unet"] = config  # as if the tiny one were published
    monkeypatch.setattr(configs, "of_architecture", lambda name, parts: numbers)
    (tmp_path / "made").mkdir()
    notices = load.convert(tmp_path / "unet.safetensors", tmp_path / "made")
    assert notices == [
        "it has no vae, text_encoder: set it as model.unet or model.vae together with a complete base model"
    ]
    found = load_file(tmp_path / "made" / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_playground_is_written_and_read_as_edm():
    numbers, found = published("sdxl")
    numbers.configs["vae"].update(
        scaling_factor=0.5,
        latents_mean=list(compatibility.PLAYGROUND_MEAN),
        latents_std=list(compatibility.PLAYGROUND_STD),
    )
    numbers.scheduler.clear()
    numbers.scheduler.update(_class_name="EDMDPMSolverMultistepScheduler", sigma_data=0.5, prediction_type="epsilon")
    assert compatibility.differences(numbers) == []
    got, _ = of_file(found | compatibility.marks(numbers), {})
    assert got.configs["vae"] == numbers.configs["vae"]
    assert got.scheduler["_class_name"] == "EDMDPMSolverMultistepScheduler"
    numbers.configs["vae"]["scaling_factor"] = 0.4
    assert "trained for EDM" in compatibility.differences(numbers)[0]


def test_what_readers_would_compute_otherwise_is_said():
    numbers, _ = published("sd1")
    assert compatibility.differences(numbers) == []
    numbers.configs["unet"]["attention_head_dim"] = [8, 8, 8, 8]
    assert compatibility.differences(numbers) == []
    numbers.configs["unet"]["norm_eps"] = 1e-6
    numbers.configs["text_encoder"]["hidden_act"] = "gelu"
    numbers.scheduler.update(beta_end=0.02, prediction_type="v_prediction")
    said = " ".join(compatibility.differences(numbers))
    for words in ("norm_eps is 1e-06", "hidden_act is gelu", "noise levels are not", "ModelSamplingDiscrete"):
        assert words in said
    numbers.scheduler.update(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert "trained with zero terminal SNR" in " ".join(compatibility.differences(numbers))
    numbers.scheduler["prediction_type"] = "flow_prediction"
    assert "the original layout cannot record" in " ".join(compatibility.differences(numbers))


def test_2x_that_comfyui_would_take_for_another_is_told():
    norm = "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias"
    for name, scale, told in (
        ("sd21", 0.3, ""),
        ("sd21", 0.0, "assumes epsilon"),
        ("sd2_base", 0.3, "assumes v_prediction"),
    ):
        said = compatibility.misread_prediction(published(name)[0], {norm: torch.linspace(-scale, scale, 320)})
        assert told in " ".join(said)
        assert bool(said) == bool(told)
    assert compatibility.misread_prediction(published("sd1")[0], {}) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny 1.x pipeline and its tensors in the original layout."""
    place = tmp_path_factory.mktemp("layout")
    folder = write_sd(place / "p")
    save.write(place / "a.safetensors", folder)
    return folder, place / "a.safetensors"


def metadata(file):
    with opening.opened(file) as opened:
        return opened.metadata()


def test_old_names_and_things_beside_the_networks(tiny, tmp_path):
    folder, file = tiny
    tensors = {re.sub("^(cond_stage_model.transformer.)text_model.", r"\1", n): t for n, t in load_file(file).items()}
    averaged = {layout.averaged_name(n): t + 1 for n, t in tensors.items() if n.startswith("model.diff")}
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    beside = {"betas": betas, "sqrt_alphas_cumprod": torch.ones(4), "first_stage_model.loss.a": torch.ones(1)}
    save_file(tensors | averaged | beside | {"a.stranger": torch.ones(2)}, tmp_path / "b.safetensors", metadata(file))
    (tmp_path / "raw").mkdir()
    notices = load.convert(tmp_path / "b.safetensors", tmp_path / "raw")
    assert "it also has averaged weights; the trained ones are used" in notices[0]
    assert "1 tensors belong to none of its networks and are ignored: a.stranger" in notices[1]
    (tmp_path / "ema").mkdir()
    load.convert(tmp_path / "b.safetensors", tmp_path / "ema", weights="ema")
    unet = "unet/diffusion_pytorch_model.safetensors"
    expected, raw, ema = (load_file(f / unet) for f in (folder, tmp_path / "raw", tmp_path / "ema"))
    assert all(torch.equal(raw[n], t) and torch.equal(ema[n], t + 1) for n, t in expected.items())
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no averaged weights"):
        load.convert(file, tmp_path / "none", weights="ema")


@pytest.mark.parametrize(
    ("component", "prefix", "kept"),
    [("unet", layout.UNET, ""), ("vae", layout.VAE, ""), ("vae", layout.VAE, "vae.")],
)
def test_one_network_out_of_any_file(tiny, tmp_path, component, prefix, kept):
    folder, file = tiny
    own = load_file(folder / component / "diffusion_pytorch_model.safetensors")
    alone = {kept + n.removeprefix(prefix): t for n, t in load_file(file).items() if n.startswith(prefix)}
    save_file(alone, tmp_path / "alone.safetensors")
    torch.save({"state_dict": alone}, tmp_path / "alone.ckpt")
    own_names = folder / component / "diffusion_pytorch_model.safetensors"
    for path in (file, tmp_path / "alone.safetensors", tmp_path / "alone.ckpt", own_names):
        found = load.network_tensors(path, component, own, pickled=path.suffix == ".ckpt")
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    with pytest.raises(UserError, match=f"has no text_encoder; it has: {component}"):
        load.network_tensors(tmp_path / "alone.safetensors", "text_encoder", own, pickled=False)
    with pytest.raises(UserError, match=r"model.pickled_weights=true"):
        load.network_tensors(tmp_path / "alone.ckpt", component, own, pickled=False)


def test_a_text_encoder_out_of_files_with_and_without_the_wrapper(tmp_path):
    folder = write_sdxl(tmp_path / "p")
    save.write(tmp_path / "a.safetensors", folder)
    for name in ("text_encoder", "text_encoder_2"):
        own = load_file(folder / name / "model.safetensors")
        save_file({with_wrapper(n): t for n, t in own.items()}, tmp_path / "wrapped.safetensors")
        save_file({n.removeprefix("text_model."): t for n, t in own.items()}, tmp_path / "bare.safetensors")
        for file in ("a", "wrapped", "bare"):
            found = load.network_tensors(tmp_path / f"{file}.safetensors", name, own, pickled=False)
            assert found.keys() == own.keys()
            assert all(torch.equal(found[n], t) for n, t in own.items())


def test_a_pickled_checkpoint_is_read_on_request_alone(tiny, tmp_path):
    folder, file = tiny
    torch.save({"state_dict": load_file(file), "global_step": 3}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"is pickled: set model.pickled_weights=true"):
        load.folder(tmp_path / "a.ckpt", pickled=False)
    with pytest.raises(UserError, match="not the shapes of a known model"):  # a pickle has no metadata
        load.folder(tmp_path / "a.ckpt", pickled=True)
    with refused("unsupported", None, "model_index.json", ".safetensors", ".ckpt"):
        load.folder(folder / "model_index.json", pickled=True)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"model.diffusion_model.input_blocks.0.0.weight": (320, 9, 3, 3)}, "an inpainting model"),
        ({"model.diffusion_model.input_blocks.0.0.weight": (320, 8, 3, 3)}, "InstructPix2Pix"),
        ({"model.diffusion_model.input_blocks.0.0.weight": (320, 5, 3, 3)}, "depth-to-image"),
        ({"conditioner.embedders.0.model.ln_final.bias": (4,)}, "the SDXL refiner"),
        ({"control_model.time_embed.0.weight": (4, 4)}, "a ControlNet"),
        ({"lora_unet_down_blocks_0.lora_up.weight": (4, 4)}, "LoRA weights"),
        ({"model.diffusion_model.joint_blocks.0.x": (4,)}, "Stable Diffusion 3"),
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (4,)}, "Flux"),
        ({"emb_params": (1, 768)}, "a textual-inversion embedding"),
        ({"a": (2,), "b": (2,)}, "is not in the original layout of Stable Diffusion; it has 2 tensors such as a, b"),
        ({"encoder.down.0.block.0.conv1.weight": (4, 4, 3, 3)}, "only an autoencoder, without its scaling"),
    ],
)
def test_everything_else_is_refused_by_name(names, words, tmp_path):
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=words):
        load.folder(tmp_path / "a.safetensors", pickled=False)


def test_damaged_and_incomplete_files_are_refused(tiny, tmp_path):
    _, file = tiny
    (tmp_path / "a.safetensors").write_bytes(file.read_bytes()[:1000])
    with refused("damaged", None, "a.safetensors"):
        load.folder(tmp_path / "a.safetensors", pickled=False)
    tensors = load_file(file)
    del tensors["first_stage_model.decoder.conv_in.weight"]
    save_file(tensors, tmp_path / "b.safetensors", metadata(file))
    with refused("damaged", None, "b.safetensors", "first_stage_model.decoder.conv_in.weight of its vae"):
        load.folder(tmp_path / "b.safetensors", pickled=False)
    save_file(load_file(file), tmp_path / "c.safetensors", {configs.METADATA: "{"})
    with refused("damaged", None, "c.safetensors", "daguerre.model", "Invalid JSON"):
        load.folder(tmp_path / "c.safetensors", pickled=False)


def test_a_unet_that_the_layout_has_no_place_for_is_refused():
    for name in ("class_embedding.weight", "mid_block.attentions.1.norm.weight", "down_blocks.0.resnets.0.x.weight"):
        with pytest.raises(UserError, match="has no place for"):
            keys.unet(["down_blocks.0.resnets.0.norm1.weight", name])
    with pytest.raises(UserError, match="has no place for"):
        keys.vae(["encoder.down_blocks.0.attentions.0.to_q.weight"])
    with pytest.raises(UserError, match="has no place for"):
        keys.open_clip(["text_model.encoder.layers.0.other.weight"])


def test_clips_own_words():
    tokenizer = tokenizers.clip("!")
    assert tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert (tokenizer.pad_token_id, tokenizer.model_max_length) == (0, 77)
    assert tokenizers.clip_padding(tokenizers.files(tokenizers.clip("!"))) == "!"
    assert tokenizers.clip_padding({}) is None


CONTRADICTIONS = {  # our header's scheduler, what was added, and what the refusal says
    "v": ({}, {"v_pred": 0.0}, {}, "the mark v_pred"),
    "zero": ({"prediction_type": "v_prediction"}, {"ztsnr": 0.0, "v_pred": 0.0}, {}, "the mark ztsnr"),
    "cosxl": ({}, {"edm_vpred.sigma_max": 120.0}, {}, "the mark edm_vpred.sigma_max"),
    "playground": ({}, {"edm_mean": 1.0, "edm_std": 1.0}, {}, "the mark edm_mean and the mark edm_std"),
    "levels": ({**EDM, "sigma_max": 120.0, "sigma_min": 0.002}, {"edm_vpred.sigma_max": 80.0}, {}, "of 80, which"),
    "no level": ({**EDM, "sigma_max": "120"}, {"edm_vpred.sigma_max": 120.0}, {}, "of 120, which"),
    "edm and v": ({**EDM, "sigma_max": 120.0, "sigma_min": 0.002}, {"v_pred": 0.0}, {}, "the mark v_pred"),
    "header": ({}, {}, {"modelspec.prediction_type": "v"}, "modelspec.prediction_type=v"),
    "other header": (
        {"prediction_type": "v_prediction"},
        {},
        {"modelspec.predict_key": "epsilon"},
        "predict_key=epsilon",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_marks_that_were_added_to_our_own_file_are_not_dropped(case, tmp_path):
    """Refused wherever the prediction of a file is read; `prediction_type` decides, where it can."""
    scheduler, added, header, said = CONTRADICTIONS[case]
    numbers, found = published("sdxl")
    numbers.scheduler.clear()
    numbers.scheduler.update(scheduler)
    metadata = {configs.METADATA: numbers.to_metadata(), **header}
    marks = {name: torch.full((1,), value) for name, value in added.items()}
    save_file(marks or {"x": torch.zeros(1)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(UserError, match=re.escape(said)):
        of_file(found | marks, metadata)
    with pytest.raises(UserError, match=re.escape(said)):
        load.scheduler(tmp_path / "a.safetensors")
    if "v_pred" in added and not scheduler.get("sigma_max"):
        chosen = of_file(found | marks, metadata, "v_prediction")[0].scheduler
        assert (chosen["prediction_type"], chosen.get("rescale_betas_zero_snr", False)) == (
            "v_prediction",
            case == "zero",
        )


def test_what_we_write_contradicts_nothing(tmp_path):
    for scheduler in (
        {},
        {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        configs.edm_scheduler(COSXL),
    ):
        numbers, found = published("sdxl")
        numbers.scheduler.clear()
        numbers.scheduler.update(scheduler)
        header = save._metadata(tmp_path / "a.safetensors", numbers)
        assert of_file(found | compatibility.marks(numbers), header)[0] == numbers
