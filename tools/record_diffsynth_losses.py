#!/usr/bin/env python3
"""Computes losses of Anima and FLUX.3 klein with DiffSynth-Studio's own networks, schedulers and loss on our inputs,
and records them for tests/parity/test_diffsynth_losses.py. Run once, in the environment of the tests with einops:

    pip download --no-deps diffsynth==2.1.12 -d /tmp && python -m zipfile -e /tmp/diffsynth-2.1.12-*.whl /tmp/diffsynth
    python tools/record_diffsynth_losses.py /tmp/diffsynth

Modules for other models, and torchvision, are stood in for. The constructors of DiffSynth's networks have the sizes of
the published models written in, so theirs are put together here of its blocks; all that computes is its own. Its
weight of a noise level is divided out, and recorded beside. SHA-256 of what was recorded with torch 2.13.0 and
diffusers 0.42.1 on x86, one thread:

    diffsynth_losses.json  528c81746cba9b236c5b49b549f9e7b12e0618fea895abef49e57371d9ea6286
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "parity"), str(ROOT / "src")]

import diffsynth_losses as own  # noqa: E402
import pytest  # noqa: E402
import tiny_texts  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

from daguerre.families.flux3 import NAMES  # noqa: E402
from daguerre.models.parts.anima_networks import CONDITIONER_NAMES, TRANSFORMER_NAMES  # noqa: E402
from daguerre.models.weights import original_files  # noqa: E402

OTHERS = ("core.device", "core.device.npu_compatible_device", "utils", "utils.lora", "utils.lora.merge")
OTHERS += ("models.z_image_text_encoder", "models.wan_video_vae", "models.flux2_vae", "models.krea2_text_encoder")


def opened(folder: Path) -> None:
    """Makes DiffSynth's modules importable one by one: its packages import all models."""
    for name in ("torchvision", "torchvision.transforms"):
        sys.modules[name] = MagicMock()
    for name in ("", "core", "diffusion", "models", "pipelines"):
        package: Any = ModuleType(f"diffsynth.{name}".rstrip("."))
        package.__path__ = [str(folder / "diffsynth" / name)]
        sys.modules[package.__name__] = package
    for name in OTHERS:
        sys.modules[f"diffsynth.{name}"] = MagicMock()
    core: Any = sys.modules["diffsynth.core"]
    core.ModelConfig = MagicMock()
    core.gradient_checkpoint_forward = import_module("diffsynth.core.gradient").gradient_checkpoint_forward
    base: Any = ModuleType("diffsynth.diffusion.base_pipeline")
    base.BasePipeline = base.PipelineUnit = base.ControlNetInput = type("Base", (), {"__init__": lambda *_, **__: None})
    sys.modules[base.__name__] = base
    diffusion: Any = sys.modules["diffsynth.diffusion"]
    diffusion.FlowMatchScheduler = import_module("diffsynth.diffusion.flow_match").FlowMatchScheduler


def original(weights: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Weights by the names of their authors."""
    with TemporaryDirectory() as place:
        path = Path(place) / "original.safetensors"
        original_files.write(path, {name: value.contiguous() for name, value in weights.items()}, names.links)
        return dict(load_file(path))


def anima(family: Any) -> nn.Module:
    """Its network with the weights of ours."""
    models = import_module("diffsynth.models.anima_dit")
    config, text = (family.components[name].config for name in ("transformer", "text_conditioner"))
    net = models.AnimaDiT.__new__(models.AnimaDiT)
    models.MiniTrainDIT.__init__(
        net, max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=config.num_attention_heads * config.attention_head_dim,
        num_blocks=config.num_layers, num_heads=config.num_attention_heads, mlp_ratio=config.mlp_ratio,
        crossattn_emb_channels=config.text_embed_dim, pos_emb_cls="rope3d", pos_emb_learnable=True, min_fps=1,
        max_fps=30, use_adaln_lora=True, adaln_lora_dim=config.adaln_lora_dim, rope_h_extrapolation_ratio=4.0,
        rope_w_extrapolation_ratio=4.0, rope_enable_fps_modulation=False, dtype=torch.float32, operations=nn,
    )  # fmt: skip
    net.llm_adapter = models.LLMAdapter(
        text.source_dim, text.target_dim, text.model_dim, text.num_layers, text.num_attention_heads, operations=nn
    )
    net.llm_adapter.embed = nn.Embedding(text.target_vocab_size, text.target_dim)
    found = original(family.components["transformer"].state_dict(), TRANSFORMER_NAMES)
    found |= original(family.components["text_conditioner"].state_dict(), CONDITIONER_NAMES)
    missing, unknown = net.load_state_dict({name.removeprefix("net."): value for name, value in found.items()}, False)
    assert not unknown, unknown
    assert all("seq" in name or "freq" in name for name in missing), missing
    return net


def flux3(family: Any, patch: pytest.MonkeyPatch) -> nn.Module:
    """Its network with the weights of ours."""
    models = import_module("diffsynth.models.flux3_dit")
    config = family.components["transformer"].config
    width, heads = config.num_attention_heads * config.attention_head_dim, config.num_attention_heads
    patch.setattr(models, "IN_CHANNELS", {"image": 16, "image_cond": 16, "text": config.joint_attention_dim})
    net = models.Flux3DiT.__new__(models.Flux3DiT)
    nn.Module.__init__(net)
    net.flow_map = False
    net.emb_in = nn.ModuleDict({mode: nn.Linear(16, width, bias=False) for mode in ("image", "image_cond")})
    net.txt_in = nn.Linear(config.joint_attention_dim, width, bias=False)
    net.time_in = models.MLPEmbedder(256, width)
    streams = ("image", "image_cond", "txt")
    net.early_stream_modulations = nn.ModuleDict({each: models.ModeModulation(width) for each in streams})
    net.single_stream_modulations = nn.ModuleDict({each: models.ModeModulation(width) for each in streams})
    blocks = lambda count: nn.ModuleList([models.Block(width, heads, 3.0) for _ in range(count)])  # noqa: E731
    net.content_mode_blocks = nn.ModuleDict({mode: blocks(5) for mode in ("image", "image_cond")})
    net.txt_mode_blocks, net.single_blocks = blocks(5), blocks(config.num_single_layers)
    net.final_layer = nn.ModuleDict({"image": models.LastLayer(width, 16)})
    net.load_state_dict(original(family.components["transformer"].state_dict(), NAMES))
    return net


def anima_inputs(case: own.Case, row: int) -> dict[str, Any]:
    """Latents, and hidden states and tokens of a caption, without padding."""
    tokens = case.family.text.tokens([own.CAPTIONS[row]])
    ids = tiny_texts.qwen_tokenizer()([own.CAPTIONS[row]], return_tensors="pt").input_ids
    states = case.family.components["text_encoder"](input_ids=ids).last_hidden_state
    t5 = tokens["t5_ids"][:, : int(tokens["t5_lengths"])]
    return {"input_latents": case.x0_BCHW[row : row + 1], "prompt_emb": states, "t5xxl_ids": t5}


def flux3_inputs(case: own.Case, row: int) -> dict[str, Any]:
    """Tokens of the image, and all that is packed with them by its pipeline's own units."""
    pipelines = import_module("diffsynth.pipelines.flux3_image")
    features = case.family.text.features(case.family.text.tokens([own.CAPTIONS[row]]))["text"][0]
    prompt_ids = torch.zeros(len(features), 4)
    prompt_ids[:, 3] = torch.arange(len(features))
    rows = lambda z: z[row].flatten(1).mT  # noqa: E731
    place = lambda z: pipelines.Flux3Unit_ImageIDs.latent_ids(*z.shape[2:], "cpu")  # noqa: E731
    given: dict[str, Any] = {"reference_tokens": None, "reference_ids": None}
    for number, latents in enumerate(case.references):
        ids = place(latents)
        ids[:, 3] = -(number + 1)
        given = {"reference_tokens": rows(latents), "reference_ids": ids}
    pipe = SimpleNamespace(torch_dtype=torch.float32)
    more = {"latents": rows(case.x0_BCHW), "image_ids": place(case.x0_BCHW), **given}
    unit = pipelines.Flux3Unit_PackedBuilder()
    return {"input_latents": rows(case.x0_BCHW), **unit.process(pipe, features, prompt_ids, **more)}


def theirs(name: str, case: own.Case, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Losses, weights of the levels, and the gradient's norm by DiffSynth's code."""
    loss_of = import_module("diffsynth.diffusion.loss").FlowMatchSFTLoss
    scheduler = import_module("diffsynth.diffusion.flow_match").FlowMatchScheduler(
        {"anima": "Z-Image", "flux3": "FLUX.3"}[name]
    )
    scheduler.set_timesteps(1000, training=True)
    net = anima(case.family) if name == "anima" else flux3(case.family, patch)
    pipelines = import_module(f"diffsynth.pipelines.{name}_image")
    pipe = SimpleNamespace(
        scheduler=scheduler, torch_dtype=torch.float32, device="cpu", in_iteration_models=("dit",), dit=net,
        model_fn=getattr(pipelines, f"model_fn_{name}"),
    )  # fmt: skip
    losses, weights = [], []
    for row, place in enumerate(own.PLACES):
        given = anima_inputs(case, row) if name == "anima" else flux3_inputs(case, row)
        noise = case.noise_BCHW[row : row + 1] if name == "anima" else case.noise_BCHW[row].flatten(1).mT
        with pytest.MonkeyPatch.context() as drawn:
            drawn.setattr(torch, "randint", lambda *_, place=place: torch.tensor([place]))
            drawn.setattr(torch, "randn_like", lambda _, noise=noise: noise)
            weights.append(float(scheduler.training_weight(scheduler.timesteps[place])))
            losses.append(loss_of(pipe, **given).squeeze() / weights[-1])
    torch.stack(losses).sum().backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None and "llm_adapter" not in name}
    norm = torch.stack([grad.square().sum() for grad in found.values()]).sum().sqrt()
    return {"losses": [float(loss.detach()) for loss in losses], "weights": weights, "gradient": float(norm)}


def main() -> None:
    """Records all cases."""
    torch.set_num_threads(1)
    opened(Path(sys.argv[1]))
    found = {}
    for title, (name, references) in own.CASES.items():
        with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            case = own.ours(name, references, Path(place))
            found[title] = {"inputs": case.digest, **theirs(name, case, patch)}
            apart = max(abs(a / b - 1) for a, b in zip(case.losses, found[title]["losses"], strict=True))
            print(title, "losses apart", apart, "gradients", case.gradient / found[title]["gradient"] - 1, flush=True)
    own.RECORDED.write_text(json.dumps(found) + "\n")
    print(own.RECORDED.name, hashlib.sha256(own.RECORDED.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
