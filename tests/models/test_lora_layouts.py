"""Names that programs have for one LoRA: each file is the same addition; other kinds are refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import save_file
from test_lora_files import networks, opened
from tiny_cascade import write_prior
from tiny_models import tiny_sd_folder, write_sdxl
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.families.pretrained import bases
from daguerre.families.stable_diffusion import lora_names as unet_names
from daguerre.models.lora_files.read import read

Networks = dict[str, nn.Module]
LAYERS = {
    "sd": {
        "unet": ["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", "mid_block.resnets.0.conv1", "conv_in"],
        "text_encoder": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.0.mlp.fc1"],
    },
    "sdxl": {
        "unet": ["mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0", "add_embedding.linear_1", "conv_out"],
        "text_encoder": ["encoder.layers.0.self_attn.q_proj"],
        "text_encoder_2": ["encoder.layers.0.self_attn.q_proj", "text_projection"],
    },
    "cascade": {
        "prior": ["down_blocks.0.2.attention.to_q", "down_blocks.0.2.attention.to_out.0", "clip_txt_mapper"],
        "text_encoder": ["encoder.layers.0.mlp.fc2"],
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Networks]:
    folder = tmp_path_factory.mktemp("models")
    sdxl = StableDiffusionXLPipeline.from_pretrained(write_sdxl(folder / "sdxl"))
    return {
        "sd": networks(opened(tiny_sd_folder(folder / "sd"))),
        "sdxl": networks(sdxl),
        "cascade": bases.networks(write_prior(folder / "prior")),
    }


def text(layer: str) -> str:
    """As files have it: transformers left a level out."""
    return layer if layer == "text_projection" else f"text_model.{layer.removeprefix('text_model.')}"


def own(network: nn.Module, layer: str) -> str:
    """As this version of transformers has it."""
    return layer if layer in dict(network.named_modules()) else f"text_model.{layer}"


def originals(network: nn.Module, layer: str) -> str:
    return unet_names.original_names(network)[layer]


def omi(component: str, layer: str, made: Networks) -> str:
    """OneTrainer's, until 2025."""
    letters = {"text_encoder": "clip_g" if "prior" in made else "clip_l", "text_encoder_2": "clip_g"}
    if component in letters:
        return f"{letters[component]}.{text(layer)}"
    return f"unet.{_stability(layer) if component == 'prior' else originals(made[component], layer)}"


def _stability(layer: str) -> str:
    numbers = {
        "to_q": "attn.in_proj.0",
        "to_k": "attn.in_proj.1",
        "to_v": "attn.in_proj.2",
        "to_out.0": "attn.out_proj",
    }
    stem, mark, last = layer.rpartition("attention.")
    return f"{stem}{mark}{numbers[last]}" if mark else layer


def comfy(component: str, layer: str, made: Networks) -> str:
    """ComfyUI's generic names, OneTrainer's format Comfy."""
    if component.startswith("text"):
        letter = "clip_g" if component.endswith("_2") or "prior" in made else "clip_l"
        return f"text_encoders.{letter}.transformer.{text(layer)}"
    return f"diffusion_model.{layer if component == 'prior' else originals(made[component], layer)}"


def inside(component: str, layer: str, made: Networks) -> str:
    """peft's level behind the component's."""
    return f"{component}.base_model.model.{text(layer) if component.startswith('text') else layer}"


def flat(component: str, layer: str, made: Networks) -> str:
    """OneTrainer's Legacy and Kohya of Cascade, and ComfyUI's names."""
    number = {"text_encoder": 1, "text_encoder_2": 2}
    if component in number:
        return f"lora_te{number[component]}_{text(layer).replace('.', '_')}"
    return f"lora_unet_{_stability(layer).replace('.', '_')}"


LAYOUTS = {function.__name__: function for function in (omi, comfy, inside, flat)}
ENDS = {"flat": ("lora_down.weight", "lora_up.weight"), "omi": ("lora_down.weight", "lora_up.weight")}
PLACES = [(model, layout) for model in LAYERS for layout in LAYOUTS]


def factors(network: nn.Module, layer: str) -> tuple[Tensor, Tensor]:
    weight = network.get_submodule(layer).weight
    generator = torch.Generator().manual_seed(len(layer))
    down = torch.randn(2, *weight.shape[1:], generator=generator)
    return down, torch.randn(weight.shape[0], 2, *(1 for _ in weight.shape[2:]), generator=generator)


def check(
    made: Networks,
    layers: dict[str, list[str]],
    spelt: Callable[[str, str, Networks], str],
    ends: tuple[str, str],
    to: Path,
) -> None:
    tensors, wanted = {}, {}
    for component, given in layers.items():
        for layer in given:
            place = own(made[component], layer)
            wanted[component, place] = factors(made[component], place)
            for end, value in zip(ends, wanted[component, place], strict=True):
                tensors[f"{spelt(component, layer, made)}.{end}"] = value
    save_file(tensors, to / "x.safetensors")
    found = {
        (component, each.layer): each for component, all_ in read(to / "x.safetensors", made).items() for each in all_
    }
    assert found.keys() == wanted.keys()
    for place, (down, up) in wanted.items():
        torch.testing.assert_close(found[place].factors["lora_A.weight"], down, rtol=0, atol=0)
        torch.testing.assert_close(found[place].factors["lora_B.weight"], up, rtol=0, atol=0)


@pytest.mark.parametrize(("model", "layout"), PLACES)
def test_layouts_of_whole_models(model, layout, models, tmp_path):
    ends = ENDS.get(layout, ("lora_A.weight", "lora_B.weight"))
    check(models[model], LAYERS[model], LAYOUTS[layout], ends, tmp_path)


@pytest.mark.parametrize("model", ["sd", "sdxl"])
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("base_model.model.{0}", ("lora_A.weight", "lora_B.weight")),
        ("{0}", ("lora_A.weight", "lora_B.weight")),
        ("{0}", ("lora_A.style.weight", "lora_B.style.weight")),
        ("module.{0}", ("lora_A.default.weight", "lora_B.default.weight")),
        ("unet.unet.{0}", ("lora.down.weight", "lora.up.weight")),
        ("{1}", ("lora_A.weight", "lora_B.weight")),
        ("model.diffusion_model.{1}", ("lora_A.weight", "lora_B.weight")),
        ("lycoris_{2}", ("lora_down.weight", "lora_up.weight")),
    ],
)
def test_layouts_of_a_unet_alone(name, ends, model, models, tmp_path):
    """peft's without a component, bare ones of OneTrainer and trainers, and with levels of wrappers."""

    def spelt(component: str, layer: str, made: Networks) -> str:
        return name.format(layer, originals(made[component], layer), layer.replace(".", "_"))

    check(models[model], {"unet": LAYERS[model]["unet"]}, spelt, ends, tmp_path)


@pytest.mark.parametrize("start", ["", "unet."])
def test_diffusers_before_015(start, models, tmp_path):
    """Attention's processors, without the component's name before 0.15; later those of text encoders beside them."""
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    names = {f"{start}{layer}.processor.{part}_lora": ("unet", f"{layer}.{whole}")
             for part, whole in (("to_q", "to_q"), ("to_out", "to_out.0"))}  # fmt: skip
    if start:
        name = "encoder.layers.0.self_attn"
        names[f"text_encoder.text_model.{name}.to_out_lora"] = ("text_encoder", f"{name}.out_proj")
    made, tensors, wanted = models["sd"], {}, set()
    for name, (component, place) in names.items():
        wanted.add((component, own(made[component], place)))
        down, up = factors(made[component], own(made[component], place))
        tensors |= {f"{name}.down.weight": down, f"{name}.up.weight": up}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors", made)
    assert {(component, each.layer) for component, all_ in found.items() for each in all_} == wanted


def test_names_that_could_mean_two_layers_are_refused(models, tmp_path):
    """Bare names of a text encoder, of a model with two."""
    down, up = factors(models["sdxl"]["text_encoder"], own(models["sdxl"]["text_encoder"], "encoder.layers.0.mlp.fc1"))
    name = "text_model.encoder.layers.0.mlp.fc1"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"this one has no text_model\.encoder"):
        read(tmp_path / "x.safetensors", models["sdxl"])


def test_earlier_files_of_this_program(models, tmp_path):
    """Which had a level in the name of a text projection that no program has."""
    made = models["sdxl"]
    down, up = factors(made["text_encoder_2"], "text_projection")
    stem = "lora_te2_text_model_text_projection"
    save_file({f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}, tmp_path / "x.safetensors")
    ((one,),) = read(tmp_path / "x.safetensors", made).values()
    assert one.layer == "text_projection"


STRANGERS = {
    "a GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "alpha"),
    "an .IA.": ("weight", "on_input"),
    "an OFT or a BOFT": ("oft_blocks", "alpha"),
    "an OFT": ("oft_R.weight",),
    "a BOFT": ("boft_R", "boft_s"),
    "a VeRA": ("vera_lambda_b", "vera_lambda_d"),
    "an AdaLoRA": ("lora_A", "lora_B", "lora_E"),
    "an adapter of peft": ("hra_u",),
    "a patch of ComfyUI": ("set_weight",),
    "a file of scaled numbers": ("lora_up.weight", "lora_down.weight", "lora_up.scale_weight"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_other_kinds_are_refused_by_their_name(kind, models, tmp_path):
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file({f"{stem}.{end}": torch.ones(32, 32) for end in STRANGERS[kind]}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=rf"x.safetensors is {kind}.*not supported.* Merge it .*convert extract"):
        read(tmp_path / "x.safetensors", models["sd"])


def test_a_controlnet_lllite_is_none(models, tmp_path):
    save_file({"lllite_unet_input_blocks_4_1_attn1_to_q.down.0.weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is a ControlNet-LLLite"):
        read(tmp_path / "x.safetensors", models["sdxl"])
