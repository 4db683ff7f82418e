"""LoRAs of the base: the network that is trained is the base with them, and a run knows them by their weights."""

import json

import pytest
import tiny_families
import torch
from safetensors.torch import save_file

from daguerre import errors, plugins
from daguerre.assembly import base_digests, parts
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.errors import UserError


def factors(network, component, seed):
    """A LoRA of rank 2 on every linear layer of attention, alpha 1, in diffusers' names."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for layer, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and ("attn" in layer or component == "text_encoder"):
            out, columns = module.weight.shape
            found[f"{component}.{layer}.lora_A.weight"] = torch.randn(2, columns, generator=draw)
            found[f"{component}.{layer}.lora_B.weight"] = torch.randn(out, 2, generator=draw)
    return found


@pytest.fixture
def recipe(tmp_path):
    sections = {
        "run_name": "run",
        "output_dir": str(tmp_path),
        "model": tiny_families.settings("dit", tmp_path / "model"),
        "objective": {"name": "flow"},
        "adapter": {"name": "lora", "rank": 2},
        "data": {"source": "shapes", "resolution": 64, "checked_prompts": 2},
        "training": {"duration": "2 steps", "global_batch_size": 2, "device": "cpu"},
        "ema": {"enabled": False},
        "validation": {"every": None},
        "checkpoint": {"every": "1 steps"},
        "sampling": {"num_images": 0, "num_inference_steps": 2, "sampler": "euler", "guidance_scale": 0},
        "logging": {"every": "1 steps", "tensorboard": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(sections))
    return path


def untouched(path):
    """The family without an adapter."""
    config = configs.load(str(path), []).config
    return plugins.find("families", "dit").load(config.model, config.seed)


def loaded(path, *given):
    config = configs.load(str(path), given).config
    return config, *parts.load(config)


def test_the_denoiser_is_the_base_with_the_sum_of_its_loras(recipe, tmp_path, capsys):
    plain = untouched(recipe)
    own = [factors(plain.components["transformer"], "transformer", seed) for seed in (0, 1)]
    places = [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    for tensors, place in zip(own, places, strict=True):
        save_file(tensors, place)
    given = "model.loras=" + json.dumps([{"path": places[0], "strength": 0.5}, {"path": places[1]}])
    config, family, attached = loaded(recipe, given)
    changed = 0
    base = {name.replace(".base_layer", ""): p for name, p in plain.components["transformer"].named_parameters()}
    for name, p in family.components["transformer"].named_parameters():
        name = name.replace(".base_layer", "")
        if "lora_" in name:
            continue
        layer = f"transformer.{name.removesuffix('.weight')}"
        expected = base[name].clone()
        for tensors, strength in zip(own, (0.5, 1.0), strict=True):
            if f"{layer}.lora_A.weight" in tensors:
                expected += strength * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
                changed += 1
        torch.testing.assert_close(p.detach(), expected.detach())
    assert changed == sum(len(tensors) for tensors in own) // 2
    assert base_digests.of(config, family, attached) != base_digests.of(*loaded(recipe))
    # A run goes on from its own recipe, and not on the base without them.
    assert main.run(["train", str(recipe), given, "training.duration=1 steps"]) == errors.DONE
    assert main.run(["train", str(tmp_path / "run"), "training.duration=2 steps"]) == errors.DONE
    capsys.readouterr()
    other = [
        "train",
        str(tmp_path / "run"),
        "training.duration=3 steps",
        "model.loras=[]",
        "allow_change=[model.loras]",
    ]
    assert main.run(other) == errors.REFUSED
    assert "was trained on another transformer" in capsys.readouterr().err


def test_a_lora_of_a_text_encoder_is_refused_with_the_way_out(recipe, tmp_path):
    plain = untouched(recipe)
    save_file(factors(plain.components["text_encoder"], "text_encoder", 0), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"adds to text_encoder.*daguerre convert merge"):
        loaded(recipe, f"model.loras=[{{path: {tmp_path / 'a.safetensors'}}}]")
