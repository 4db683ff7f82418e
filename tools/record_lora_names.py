#!/usr/bin/env python3
"""Records which names in kohya's layout other programs know, by their own code, for tests/models/test_lora_names.py.

    .venv/bin/pip install einops     # beside checkouts of the programs, which are named here
    .venv/bin/python tools/record_lora_names.py comfyui=DIR [sd-scripts=DIR] [webui=FILE]

ComfyUI's `comfy/lora.py` and sd-scripts' network are run on networks of the published sizes, without memory; of
transformers with a table of names ComfyUI's own network is built; of A1111's webui its function that converts names
(extensions-builtin/Lora/networks.py) is run. Modules around them are replaced by empty ones. Kept are, for each program
and model, the number of layers whose names the program has for the same layer, SHA-256 of these names, and the names
that it does not have. Recorded with pollockjj/ComfyUI@618b803d (SHA-256 of lora.py bc8e0376, of utils.py dfd937c2),
kohya-ss/sd-scripts@48d368fa (networks/lora.py 1c9150d5) and the function in
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
UNETS = ("sd1", "sd21", "sdxl")
MODELS = (*UNETS, "cascade_c", "cascade_b")
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # model: class of ComfyUI's models, module and class of its network, and its numbers as its model detection has them
    "flux1_dev": ("Flux", "flux.model.Flux", {
        "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768, "context_in_dim": 4096,
        "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
    }),
    "flux2_klein_4b": ("Flux", "flux.model.Flux", {
        "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None, "context_in_dim": 7680,
        "hidden_size": 3072, "mlp_ratio": 3.0, "num_heads": 24, "depth": 5, "depth_single_blocks": 20,
        "axes_dim": [32, 32, 32, 32], "theta": 2000, "qkv_bias": False, "guidance_embed": False, "txt_ids_dims": [3],
        "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
    }),
    "z_image": ("Lumina2", "lumina.model.NextDiT", {
        "patch_size": 2, "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30,
        "n_kv_heads": 30, "qk_norm": True, "cap_feat_dim": 2560, "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512], "z_image_modulation": True, "ffn_dim_multiplier": 8 / 3, "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    }),
    "qwen_image": ("QwenImage", "qwen_image.model.QwenImageTransformer2DModel", {"num_layers": 60}),
}  # fmt: skip
LETTERS = {
    "sd21": ["clip_h"],
    "sdxl": ["clip_l", "clip_g"],
    "cascade_c": ["clip_g"],
    "cascade_b": ["clip_g"],
    "flux1_dev": ["clip_l", "t5xxl"],
}
"""Its names of text encoders; clip_l alone where there are none."""
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
    management = MagicMock()
    for name in ("xformers", "sage_attention", "flash_attention", "pytorch_attention"):  # whose packages are not here
        getattr(management, f"{name}_enabled").return_value = False
    sys.modules["comfy.model_management"] = importlib.import_module("comfy").model_management = management
    stub("comfy.ops", disable_weight_init=nn, manual_cast=nn, cast_to=None, cast_to_input=None)
    stub("comfy.model_base", **kinds)
    stub("comfy.cli_args", args=MagicMock())
    stub("comfy.weight_adapter")
    theirs: Any = importlib.import_module("comfy.lora")

    def known(model: str, made: dict[str, nn.Module]) -> dict[str, tuple[str, str]]:
        if model in TRANSFORMERS:
            return of_transformer(model, made, kinds, theirs)
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
        return found | of_texts(model, made, theirs)

    return known


def of_texts(model: str, made: dict[str, nn.Module], theirs: Any) -> dict[str, tuple[str, str]]:
    """(component, layer) by name, of text encoders."""
    letters = LETTERS.get(model, ["clip_l"])
    texts: dict[str, tuple[str, str]] = {}
    for letter, component in zip(letters, sorted(name for name in made if name.startswith("text")), strict=False):
        own = [name for name, module in made[component].named_modules() if isinstance(module, nn.Linear)]
        spelt = {layer: plain(layer) if letter.startswith("clip") else layer for layer in own}
        texts |= {f"{letter}.transformer.{name}.weight": (component, layer) for layer, name in spelt.items()}
    clip = SimpleNamespace(state_dict=lambda: dict.fromkeys(texts))
    return {name: texts[key] for name, key in theirs.model_lora_keys_clip(clip, {}).items() if key in texts}


def of_transformer(
    model: str, made: dict[str, nn.Module], kinds: dict[str, type], theirs: Any
) -> dict[str, tuple[str, str]]:
    """(component, layer) by name: a name of its own network's, of a weight with all rows of what is written so."""
    kind, place, config = TRANSFORMERS[model]
    module, _, network = place.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), network)
    net = build(**config, image_model=None, dtype=None, device="meta", operations=nn)
    state = {f"diffusion_model.{name}": weight for name, weight in net.state_dict().items()}
    unet = type("Model", (kinds[kind],), {})()
    unet.state_dict = lambda: state
    unet.model_config = SimpleNamespace(unet_config=config)
    known, layers = theirs.model_lora_keys_unet(unet, {}), written(made)
    rows: dict[str, int] = {}
    for (component, layer), name in layers.items():
        rows[name] = rows.get(name, 0) + len(made[component].get_submodule(layer).weight)
    right = {n: layer for layer, n in layers.items() if n in known and len(state[known[n]]) == rows[n]}
    return right | of_texts(model, made, theirs)


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
        "ComfyUI": (comfyui(Path(given["comfyui"])), (*MODELS, *TRANSFORMERS)),
        "sd-scripts": (sd_scripts(Path(given["sd-scripts"])) if "sd-scripts" in given else None, UNETS),
        "webui": (webui(Path(given["webui"])) if "webui" in given else None, UNETS),
    }
    programs = {name: each for name, each in programs.items() if each[0] is not None}
    record: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))  # of programs that are not given
    for program, (known, models) in programs.items():
        for model in models:
            made = networks(model)
            layers, theirs = written(made), known(model, made)
            places: dict[str, set[tuple[str, str]]] = {}
            for place, name in layers.items():
                places.setdefault(name, set()).add(place)
            wrong = [name for name, own in places.items() if name in theirs and theirs[name] not in own]
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
