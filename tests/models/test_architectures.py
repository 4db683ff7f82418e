"""The configs that ship without weights: networks built from them on the meta device have the published sizes."""

import json

import diffusers
import pytest
import torch
import transformers
from diffusers import (
    AnimaTextConditioner,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from quick_cases import quick_first
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
)

from daguerre.families.cascade import sizes as cascade_sizes
from daguerre.models.weights import architectures
from daguerre.models.weights import index as pipeline_index

UNET = {"sd1": 859_520_964, "sd2_base": 865_910_724, "sd21": 865_910_724, "sdxl": 2_567_463_684}
VAE = 83_653_863
CLIP_L, OPENCLIP_H, BIG_G = 123_060_480, 340_387_840, 694_659_840
TEXT = {"sd1": [CLIP_L], "sd2_base": [OPENCLIP_H], "sd21": [OPENCLIP_H], "sdxl": [CLIP_L, BIG_G]}
LATENT_SIDE = {"sd1": 64, "sd2_base": 64, "sd21": 96, "sdxl": 128}
PREDICTION = {"sd21": "v_prediction"}
CASCADE = {"cascade_c": {"prior": 3_589_103_632, "image_encoder": 303_966_208, "text_encoder": BIG_G}}
CASCADE |= {"cascade_b": {"decoder": 1_562_941_136, "vqgan": 18_406_894, "text_encoder": BIG_G}}


KREA = ("krea2", "krea2_turbo")
FLUX = {"flux1_dev": 11_901_408_320, "flux1_schnell": 11_891_178_560}
KLEIN = {"4b": [3_875_544_576, 4_022_468_096], "9b": [9_078_581_248, 8_190_735_360]}
KLEIN = {f"flux2_klein_{base}{size}": counts for size, counts in KLEIN.items() for base in ("base_", "")}
QWEN = {
    "qwen_image_21": [7_115_124_736, 337_740_404, 8_767_123_696],
    "qwen_image_21_turbo": [7_115_124_736, 337_740_404, 8_767_123_696],
    "qwen_image": [20_430_401_088, 126_892_531, 8_292_166_656],
    "qwen_image_edit_2511": [20_430_401_088, 126_892_531, 8_292_166_656],
    "qwen_image_edit_2509": [20_430_401_088, 126_892_531, 8_292_166_656],
}
FLUX3 = {"flux3_klein_base": 5_538_458_368, "flux3_klein": 5_538_458_368 + 3072 * (256 + 3072)}
"""The second one embeds a second time."""
OTHERS = ("z_image", "z_image_turbo", "anima", *KREA, *KLEIN, *QWEN, *FLUX3)
T5_XXL, FLUX_VAE = 4_762_310_656, 83_819_683


def numbers(name, component):
    file = "scheduler_config.json" if component == "scheduler" else "config.json"
    return json.loads((architectures.FOLDER / name / component / file).read_text(encoding="utf-8"))


def text_encoder(name, component):
    config = numbers(name, component)
    kind = {"CLIPTextModel": CLIPTextModel, "CLIPTextModelWithProjection": CLIPTextModelWithProjection}
    return kind[config["architectures"][0]](CLIPTextConfig(**config))


def size(net):
    return sum(parameter.numel() for parameter in net.parameters())


def test_the_tables_and_the_folders_agree():
    folders = [folder.name for folder in architectures.FOLDER.iterdir() if folder.is_dir()]
    assert sorted(architectures.names()) == sorted(folders) == sorted([*UNET, *CASCADE, *FLUX, *OTHERS])
    ids = [hub_id for own in architectures.HUB_IDS.values() for hub_id in own]
    assert len(ids) == len({hub_id.lower() for hub_id in ids})


@pytest.mark.parametrize("name", quick_first(sorted(UNET)))
def test_networks_have_the_published_sizes(name):
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(numbers(name, "unet"))
        vae = AutoencoderKL.from_config(numbers(name, "vae"))
        texts = [text_encoder(name, part) for part in ("text_encoder", "text_encoder_2")[: len(TEXT[name])]]
    assert size(unet) == UNET[name]
    assert size(vae) == VAE
    assert [size(text) for text in texts] == TEXT[name]
    assert unet.config.sample_size == LATENT_SIDE[name]
    assert sum(text.config.hidden_size for text in texts) == unet.config.cross_attention_dim


@pytest.mark.parametrize("name", CASCADE)
def test_networks_of_stable_cascade_have_the_published_sizes(name):
    kinds = {"image_encoder": (CLIPVisionConfig, CLIPVisionModelWithProjection), "vqgan": (None, PaellaVQModel)}
    kinds |= {"text_encoder": (CLIPTextConfig, CLIPTextModelWithProjection)}
    for component, count in CASCADE[name].items():
        config, kind = kinds.get(component, (None, StableCascadeUNet))
        said = numbers(name, component)
        with torch.device("meta"):
            assert size(kind(config(**said)) if config else kind.from_config(said)) == count
    sizes_of = cascade_sizes.STAGE_C["3.6B"] if name == "cascade_c" else cascade_sizes.STAGE_B["3B"]
    own = numbers(name, next(iter(CASCADE[name])))
    assert {key: own[key] for key in sizes_of} == sizes_of
    assert numbers(name, "scheduler") == {"_class_name": "DDPMWuerstchenScheduler", "s": 0.008, "scaler": 1.0}


@pytest.mark.long  # of the quick tests, the contract of families loads one of it
@pytest.mark.parametrize("name", FLUX)
def test_networks_of_flux_have_the_published_sizes(name):
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(numbers(name, "transformer"))
        vae = AutoencoderKL.from_config(numbers(name, "vae"))
        t5 = T5EncoderModel(T5Config(**numbers(name, "text_encoder_2")))
    found = [size(transformer), size(vae), size(text_encoder(name, "text_encoder")), size(t5)]
    assert found == [FLUX[name], FLUX_VAE, CLIP_L, T5_XXL]


def test_networks_of_z_image_have_the_published_sizes():
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel.from_config(numbers("z_image", "transformer"))
        qwen = Qwen3ForCausalLM(Qwen3Config(**numbers("z_image", "text_encoder")))
    assert [size(transformer), size(qwen)] == [6_154_908_736, 4_022_468_096]
    assert numbers("z_image", "vae") == numbers("flux1_dev", "vae")
    for part in ("transformer", "text_encoder", "vae"):
        assert numbers("z_image_turbo", part) == numbers("z_image", part)


def test_networks_of_anima_have_the_published_sizes():
    with torch.device("meta"):
        transformer = CosmosTransformer3DModel.from_config(numbers("anima", "transformer"))
        conditioner = AnimaTextConditioner.from_config(numbers("anima", "text_conditioner"))
        qwen = Qwen3Model(Qwen3Config(**numbers("anima", "text_encoder")))
        vae = AutoencoderKLQwenImage.from_config(numbers("anima", "vae"))
    found = [size(network) for network in (transformer, conditioner, qwen, vae)]
    assert found == [1_956_405_248, 134_663_680, 596_049_920, 126_892_531]


@pytest.mark.parametrize("name", quick_first(KREA))
def test_networks_of_krea_2_have_the_published_sizes(name):
    with torch.device("meta"):
        transformer = Krea2Transformer2DModel.from_config(numbers(name, "transformer"))
        qwen = Qwen3VLModel(Qwen3VLConfig(**numbers(name, "text_encoder")))
        vae = AutoencoderKLQwenImage.from_config(numbers(name, "vae"))
    assert [size(transformer), size(qwen), size(vae)] == [12_820_073_036, 4_437_815_808, 126_892_531]
    index = json.loads((architectures.FOLDER / name / "model_index.json").read_text(encoding="utf-8"))
    assert index["is_distilled"] == (name == "krea2_turbo")


@pytest.mark.parametrize("name", quick_first(KLEIN))
def test_networks_of_klein_have_the_published_sizes(name):
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel.from_config(numbers(name, "transformer"))
        vae = AutoencoderKLFlux2.from_config(numbers(name, "vae"))
        qwen = Qwen3ForCausalLM(Qwen3Config(**numbers(name, "text_encoder")))
    assert [size(transformer), size(qwen)] == KLEIN[name]
    assert size(vae) == 84_046_115
    assert transformer.config.joint_attention_dim == 3 * qwen.config.hidden_size
    index = json.loads((architectures.FOLDER / name / "model_index.json").read_text(encoding="utf-8"))
    assert index["is_distilled"] == ("base" not in name)


@pytest.mark.parametrize("name", quick_first(FLUX3))
def test_networks_of_flux_3_have_the_sizes_of_diffusers_defaults(name):
    """No file of it has been seen: its numbers are the defaults of the class."""
    with torch.device("meta"):
        transformer = Flux3Transformer2DModel.from_config(numbers(name, "transformer"))
        qwen = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**numbers(name, "text_encoder")))
    assert [size(transformer), size(qwen)] == [FLUX3[name], 4_437_815_808]
    assert transformer.config.joint_attention_dim == 8 * qwen.config.text_config.hidden_size
    assert numbers(name, "vae") == numbers("flux2_klein_base_4b", "vae")
    index = json.loads((architectures.FOLDER / name / "modular_model_index.json").read_text(encoding="utf-8"))
    assert ("Distilled" in index["_class_name"]) == transformer.config.flow_map == (name == "flux3_klein")


@pytest.mark.parametrize("name", quick_first(QWEN))
def test_networks_of_qwen_image_have_the_published_sizes(name):
    index = json.loads((architectures.FOLDER / name / "model_index.json").read_text(encoding="utf-8"))
    kinds = {part: getattr(diffusers, index[part][1]) for part in ("transformer", "vae")}
    encoder = getattr(transformers, index["text_encoder"][1])
    with torch.device("meta"):
        networks = [kind.from_config(numbers(name, part)) for part, kind in kinds.items()]
        networks.append(encoder(encoder.config_class(**numbers(name, "text_encoder"))))
    assert [size(network) for network in networks] == QWEN[name]


@pytest.mark.parametrize("name", [*sorted(UNET), *CASCADE, *FLUX, *OTHERS])
def test_the_index_names_the_networks_that_are_there(name):
    index = json.loads(pipeline_index.find(architectures.FOLDER / name).read_text(encoding="utf-8"))
    folders = {path.name for path in (architectures.FOLDER / name).iterdir() if path.is_dir()}
    components = {part for part, value in index.items() if isinstance(value, list) and isinstance(value[0], str)}
    assert components - {"tokenizer", "tokenizer_2", "t5_tokenizer", "processor", "feature_extractor"} == folders
    for part in folders - {"scheduler"}:
        config = numbers(name, part)
        assert index[part][1] == config.get("_class_name", config.get("architectures", [None])[0])
    assert index["scheduler"][1] == numbers(name, "scheduler")["_class_name"]


def test_schedulers_say_what_the_models_predict():
    for name in UNET:
        config = numbers(name, "scheduler")
        assert config.get("prediction_type", "epsilon") == PREDICTION.get(name, "epsilon")
        assert (config["beta_schedule"], config["beta_start"], config["beta_end"]) == ("scaled_linear", 0.00085, 0.012)
        assert config["steps_offset"] == 1
    assert numbers("sdxl", "vae")["scaling_factor"] == 0.13025
    assert numbers("sdxl", "vae")["force_upcast"] is True


def test_what_was_taken_down_is_kept_elsewhere():
    for gone, there in architectures.MOVED.items():
        assert architectures.find(gone) == architectures.find(there) is not None
        assert architectures.moved(gone.upper()) == there
        assert architectures.moved(there) is None


def test_what_is_found():
    assert architectures.find("stabilityai/stable-diffusion-xl-base-1.0") == architectures.FOLDER / "sdxl"
    assert architectures.find("compvis/Stable-Diffusion-v1-4") == architectures.FOLDER / "sd1"
    assert architectures.find("sdxl") == architectures.FOLDER / "sdxl"
    assert architectures.find("someone/else") is None
    assert architectures.find("..") is None
