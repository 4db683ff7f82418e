#!/usr/bin/env python3
"""Records which names in kohya's layout other programs know, by their own code, for tests/models/test_lora_names.py.

    .venv/bin/pip install einops     # beside checkouts of the programs, which are named here
    .venv/bin/python tools/record_lora_names.py comfyui=DIR sd-scripts=DIR webui=FILE

ComfyUI's `comfy/lora.py` and sd-scripts' network are run on networks of the published sizes, without memory; of A1111's
webui its function that converts names (extensions-builtin/Lora/networks.py). Modules around them are replaced by empty
ones. Kept are, for each program and model, the number of layers whose names the program has for the same layer, SHA-256
of these names, and the names that it does not have. Recorded with pollockjj/ComfyUI@618b803d (SHA-256 of lora.py
bc8e0376, of utils.py dfd937c2), kohya-ss/sd-scripts@48d368fa (networks/lora.py 1c9150d5) and the function in
lllyasviel/stable-diffusion-webui-forge@09da7558 (a00a2c32), as A1111 has it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from daguerre.families.cascade import lora_names  # noqa: E402
from daguerre.families.pretrained import bases  # noqa: E402
from daguerre.families.stable_diffusion import lora_names as unet_names  # noqa: E402
from daguerre.models.lora_files import kohya  # noqa: E402
from daguerre.models.network import facts_of  # noqa: E402
from daguerre.models.weights import architectures  # noqa: E402

FILE = ROOT / "tests" / "models" / "recorded" / "lora_names.json"
MODELS = ("sd1", "sd21", "sdxl", "cascade_c", "cascade_b")
Layers = dict[tuple[str, str], str]
"""The name that is written of each layer (component, name)."""
DEPTHS = {  # of ComfyUI's model detection
    "sd1": ([2] * 4, [1, 2, 4, 4], [1] * 6 + [0, 0], [1] * 9 + [0] * 3, 1),
    "sdxl": ([2] * 3, [1, 2, 4], [0, 0, 2, 2, 10, 10], [0] * 3 + [2] * 3 + [10] * 3, 10),
}


def networks(model: str) -> dict[str, nn.Module]:
    """Of a published model, on the meta device."""
    return bases.networks(architectures.FOLDER / model)


def written(made: dict[str, nn.Module]) -> Layers:
    """All linear layers and convolutions of a model by the names that are written for them."""
    found: Layers = {}
    for component, network in made.items():
        own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        if (names := facts_of(network).names) is not None:
            of_names = names.kohya(component, made, own)
            found |= {(component, layer): name for name, layers in of_names.items() for layer in layers}
    return found


def plain(layer: str) -> str:
    """A layer of a text encoder with the level that transformers 5.6 and later leave out."""
    return layer if layer == "text_projection" or layer.startswith("text_model.") else f"text_model.{layer}"


def stub(name: str, **content: Any) -> None:
    """A module of another program with what its names need alone."""
    module = ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    above, _, last = name.rpartition(".")
    setattr(importlib.import_module(above), last, module)


def comfyui(folder: Path) -> Callable[[str, dict[str, nn.Module]], dict[str, tuple[str, str]]]:
    """Its key maps: (component, layer) by name."""
    sys.path.insert(0, str(folder))
    classes = ("StableCascade_C", "SD3", "AuraFlow", "PixArt", "HunyuanDiT", "Flux", "GenmoMochi", "HunyuanVideo")
    classes += ("HiDream", "ACEStep", "Omnigen2", "QwenImage", "Lumina2", "Kandinsky5")
    kinds = {name: type(name, (), {}) for name in classes}
    stub("comfy.model_management")
    stub("comfy.model_base", **kinds)
    stub("comfy.cli_args", args=MagicMock())
    stub("comfy.weight_adapter")
    theirs: Any = importlib.import_module("comfy.lora")

    def known(model: str, made: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
        keys: dict[str, tuple[str, str]] = {}
        for component, network in made.items():
            if not kohya.has_names(network) or component.startswith("text"):
                continue
            own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
            cascade = lora_names.is_one(network)
            spelt = {n: lora_names.path(network, n) for n in own} if cascade else unet_names.original_names(network)
            keys |= {f"diffusion_model.{spelt[layer]}.weight": (component, layer) for layer in own}
        kind = kinds["StableCascade_C"] if model == "cascade_c" else object
        config: dict[str, Any] = {}
        if model in ("sd1", "sd21", "sdxl"):
            names = ("num_res_blocks", "channel_mult", "transformer_depth", "transformer_depth_output")
            config = dict(
                zip((*names, "transformer_depth_middle"), DEPTHS["sdxl" if model == "sdxl" else "sd1"], strict=True)
            )
        unet = type("Model", (kind,), {})()  # type: ignore[misc]
        unet.state_dict = lambda: dict.fromkeys(keys)
        unet.model_config = SimpleNamespace(unet_config=config)
        found = {name: keys[key] for name, key in theirs.model_lora_keys_unet(unet, {}).items() if key in keys}
        letters = {
            "sd21": ["clip_h"],
            "sdxl": ["clip_l", "clip_g"],
            "cascade_c": ["clip_g"],
            "cascade_b": ["clip_g"],
        }.get(model, ["clip_l"])
        texts: dict[str, tuple[str, str]] = {}
        for letter, component in zip(letters, sorted(name for name in made if name.startswith("text")), strict=False):
            own = [name for name, module in made[component].named_modules() if isinstance(module, nn.Linear)]
            texts |= {f"{letter}.transformer.{plain(layer)}.weight": (component, layer) for layer in own}
        clip = SimpleNamespace(state_dict=lambda: dict.fromkeys(texts))
        return found | {name: texts[key] for name, key in theirs.model_lora_keys_clip(clip, {}).items() if key in texts}

    return known


def modules(model: str, made: dict[str, nn.Module]) -> tuple[list[nn.Module], nn.Module]:
    """The text encoders as transformers 4 has them, and sd-scripts' own UNet."""
    kinds = ("original_unet", "sdxl_original_unet")
    texts = []
    for component in sorted(name for name in made if name.startswith("text")):
        inner, outer = made[component], nn.Module()
        if not hasattr(inner, "text_model"):
            outer.text_model = inner
        texts.append(inner if hasattr(inner, "text_model") else outer)
    with torch.device("meta"):
        if model == "sdxl":
            return texts, importlib.import_module(f"library.{kinds[1]}").SdxlUNet2DConditionModel()
        v2 = model == "sd21"
        heads, width = ([5, 10, 20, 20], 1024) if v2 else (8, 768)
        unet = importlib.import_module(f"library.{kinds[0]}").UNet2DConditionModel(64, heads, width, v2, False)
        return texts, unet


def found_by(loras: list[Any], made: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """(component, layer) by name: the one whose written name it is, as these networks have modules and no map."""
    return {name: place for place, name in written(made).items() if name in {each.lora_name for each in loras}}


def sd_scripts(folder: Path) -> Callable[[str, dict[str, nn.Module]], dict[str, tuple[str, str]]]:
    """The modules that its network has for a file with all layers."""
    sys.path.insert(0, str(folder))
    stub("library.utils", setup_logging=lambda *given, **named: None)
    theirs: Any = importlib.import_module("networks.lora")

    def known(model: str, made: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
        texts, unet = modules(model, made)
        with torch.device("meta"):
            network = theirs.LoRANetwork(texts if len(texts) > 1 else texts[0], unet, lora_dim=1, alpha=1,
                                         conv_lora_dim=1, conv_alpha=1, is_sdxl=model == "sdxl")  # fmt: skip
        return found_by([*network.text_encoder_loras, *network.unet_loras], made)

    return known


def webui(file: Path) -> Callable[[str, dict[str, nn.Module]], dict[str, tuple[str, str]]]:
    """Its conversion of names, and the names of its modules: those of checkpoints, OpenCLIP's among them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = ("re_digits", "re_compiled", "suffix_conversion", "convert_diffusers_name_to_compvis")
    parts = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted)
    ]
    module = file.with_name("names_alone.py")
    module.write_text("import re\n" + "\n".join(map(ast.unparse, parts)), encoding="utf-8")
    sys.path.insert(0, str(file.parent))
    theirs: Any = importlib.import_module("names_alone")

    def known(model: str, made: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
        there: dict[str, tuple[str, str]] = {}
        for component, network in made.items():
            own = [name for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
            if component == "unet":
                originals = unet_names.original_names(network)
                there |= {f"diffusion_model.{originals[layer]}".replace(".", "_"): (component, layer) for layer in own}
            elif component.startswith("text"):
                start = "0_transformer_" if model == "sdxl" else "transformer_"
                open_clip = model == "sd21" or component.endswith("_2")
                start = ("1_model_" if model == "sdxl" else "model_") if open_clip else start
                for layer in own:
                    path = plain(layer).replace(".", "_")
                    if open_clip:
                        path = path.replace("text_model_encoder_layers", "transformer_resblocks").replace(
                            "self_attn", "attn"
                        )
                        path = path.replace("mlp_fc1", "mlp_c_fc").replace("mlp_fc2", "mlp_c_proj")
                        if path == "text_projection":
                            continue  # a bare parameter there
                    there[f"{start}{path}"] = component, layer
        found = {}
        for name in written(made).values():
            key = theirs.convert_diffusers_name_to_compvis(name, model == "sd21")
            tries = [
                key,
                name.replace("lora_unet", "diffusion_model"),
                name.replace("lora_te1_text_model", "0_transformer_text_model"),
            ]
            if hit := next((there[each] for each in tries if each in there), None):
                found[name] = hit
        return found

    return known


def main() -> None:
    """Writes what each program knows."""
    given = dict(each.split("=", 1) for each in sys.argv[1:])
    programs: dict[str, tuple[Any, tuple[str, ...]]] = {
        "ComfyUI": (comfyui(Path(given["comfyui"])), MODELS),
        "sd-scripts": (sd_scripts(Path(given["sd-scripts"])), MODELS[:3]),
        "webui": (webui(Path(given["webui"])), MODELS[:3]),
    }
    record: dict[str, Any] = {}
    for program, (known, models) in programs.items():
        for model in models:
            made = networks(model)
            layers, theirs = written(made), known(model, made)
            wrong = [name for place, name in layers.items() if name in theirs and theirs[name] != place]
            assert not wrong, f"{program} takes {wrong[:3]} for other layers"
            right = {name for name in layers.values() if name in theirs}
            record.setdefault(program, {})[model] = {
                "known": len(right),
                "sha256": hashlib.sha256("\n".join(sorted(right)).encode()).hexdigest(),
                "unknown": shortened(name for name in layers.values() if name not in theirs),
            }
            print(program, model, len(right), record[program][model]["unknown"])
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def shortened(names: Any) -> list[str]:
    """With N for the numbers of blocks."""
    return sorted({re.sub(r"_\d+(?=_)", "_N", name) for name in names})


if __name__ == "__main__":
    main()
