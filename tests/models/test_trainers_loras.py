"""Files of LoRAs as ai-toolkit and OneTrainer write them for transformers: each is read, and as strong as there.

Names, types and alphas are those of their code (ostris/ai-toolkit@27a03a91 toolkit/network_mixins.py and
toolkit/lora_special.py; Nerogar/OneTrainer@23df3832 modules/util/convert_lora_util.py, and de1437cb^ for OMI), which
wrote files of all layers of these tiny networks once: they were read as what they are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.models.lora_files.addition import merged
from daguerre.models.lora_files.read import read

FLUX, KLEIN, QWEN, Z_IMAGE, KREA = "flux", "flux2", "qwen_image", "z_image", "krea2"
Q, K, V = (f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v"))
T5, CLIP = "encoder.block.0.layer.0.SelfAttention.q", "encoder.layers.0.mlp.fc1"
DECODER = "model.language_model.layers.0.self_attn.q_proj"
OF_AI, OF_DOTS, OF_FLAT = ("lora_A", "lora_B", None), ("lora_A", "lora_B", 3.0), ("lora_down", "lora_up", 3.0)
"""Names of the factors, and alpha: ai-toolkit's beside transformers have none."""
NAMES = [
    # family, name in the file, factors, component, layers
    (FLUX, f"transformer.{Q}", OF_AI, "transformer", [Q]),
    (FLUX, f"lora_te1.text_model.{CLIP}", OF_AI, "text_encoder", [CLIP]),
    (Z_IMAGE, "diffusion_model.layers.0.attention.to_q", OF_AI, "transformer", ["layers.0.attention.to_q"]),
    (QWEN, f"diffusion_model.{Q}", OF_AI, "transformer", [Q]),
    (KLEIN, "diffusion_model.double_blocks.0.img_attn.qkv", OF_AI, "transformer", [Q, K, V]),
    (KREA, "diffusion_model.blocks.0.attn.wq", OF_AI, "transformer", [Q]),
    (FLUX, "lora_unet_double_blocks_0_img_attn_qkv", OF_FLAT, "transformer", [Q, K, V]),  # Kohya
    (FLUX, f"lora_transformer_{Q.replace('.', '_')}", OF_FLAT, "transformer", [Q]),  # Legacy
    (FLUX, f"lora_te2_{T5.replace('.', '_')}", OF_FLAT, "text_encoder_2", [T5]),  # both
    (FLUX, f"text_encoders.t5xxl.transformer.{T5}", OF_DOTS, "text_encoder_2", [T5]),  # Comfy
    (FLUX, "double_blocks.0.img_attn.qkv", OF_DOTS, "transformer", [Q, K, V]),  # Original
    (FLUX, "transformer.double_blocks.0.img_attn.qkv.1", OF_FLAT, "transformer", [K]),  # OMI, from here
    (FLUX, "transformer.single_blocks.0.linear1.3", OF_FLAT, "transformer", ["single_transformer_blocks.0.proj_mlp"]),
    (FLUX, "transformer.img_in.proj", OF_FLAT, "transformer", ["x_embedder"]),
    (FLUX, f"t5.{T5}", OF_FLAT, "text_encoder_2", [T5]),  # to here
    (KLEIN, "lora_unet_double_blocks_0_img_attn_qkv", OF_FLAT, "transformer", [Q, K, V]),
    (KLEIN, f"transformer.{Q}", OF_FLAT, "transformer", [Q]),  # Legacy and its backups
    (Z_IMAGE, "lora_unet_layers_0_attention_to_q", OF_FLAT, "transformer", ["layers.0.attention.to_q"]),
    (Z_IMAGE, "layers.0.attention.to_q", OF_DOTS, "transformer", ["layers.0.attention.to_q"]),
    (QWEN, f"lora_unet_{Q.replace('.', '_')}", OF_FLAT, "transformer", [Q]),
    (QWEN, f"lora_te_{DECODER.replace('.', '_')}", OF_FLAT, "text_encoder", [DECODER]),
    (QWEN, f"text_encoders.qwen25_7b.transformer.{DECODER}", OF_DOTS, "text_encoder", [DECODER]),
    (KREA, "lora_unet_blocks_0_attn_wq", OF_FLAT, "transformer", [Q]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, nn.Module]]:
    folder = tmp_path_factory.mktemp("models")
    return {name: dict(tiny_families.load(name, folder).components) for name in (FLUX, KLEIN, QWEN, Z_IMAGE, KREA)}


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def weight(networks: dict[str, Any], component: str, layer: str) -> Tensor:
    found: Tensor = networks[component].get_submodule(layer).weight.detach()
    return found


def check(path: Path, networks: dict[str, Any], component: str, layers: list[str], added: Tensor) -> None:
    """The weights with the file in it are those of the layers and what their program adds to all of them at once."""
    found = {each.layer: each for each in read(path, networks).pop(component)}
    assert found.keys() == {*layers}
    before = [weight(networks, component, layer) for layer in layers]
    after = [merged(old, [(found[layer], 0.5)], component) for old, layer in zip(before, layers, strict=True)]
    torch.testing.assert_close(torch.cat(after), torch.cat(before) + 0.5 * added)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "name", "factors", "component", "layers"), NAMES)
def test_a_lora_is_read_with_its_strength(family, name, factors, component, layers, dtype, models, tmp_path):
    networks = models[family]
    rows = sum(len(weight(networks, component, each)) for each in layers)
    columns = weight(networks, component, layers[0]).shape[1]
    (first, second, alpha), down, up = factors, drawn(2, columns).to(dtype), drawn(rows, 2).to(dtype)
    tensors = {f"{name}.{first}.weight": down, f"{name}.{second}.weight": up}
    if alpha is not None:
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    save_file(tensors, tmp_path / "x.safetensors", {"modelspec.hash_sha256": "0x0", "ot_branch": "master"})
    check(tmp_path / "x.safetensors", networks, component, layers, (alpha or 2.0) / 2 * up.float() @ down.float())


FUSED = "diffusion_model.double_blocks.0.img_attn.qkv"
"""A projection of klein that is three layers in diffusers; a LoKr has one product for all of it."""


def lokr(name: str, dtype: torch.dtype, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """ai-toolkit's of two whole matrices, and what it adds."""
    one, two = drawn(4, 4).to(dtype), drawn(rows // 4, columns // 4).to(dtype)
    alpha = torch.tensor(9999999999).to(dtype)
    return (
        {f"{name}.lokr_w1": one, f"{name}.lokr_w2": two, f"{name}.alpha": alpha},
        torch.kron(one.float(), two.float()),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "name", "layers"),
    [(FLUX, f"transformer.{Q}", [Q]), (FLUX, f"lycoris_{Q.replace('.', '_')}", [Q]), (KLEIN, FUSED, [Q, K, V])],
)
def test_a_lokr_is_read_whose_alpha_is_infinite_in_float16(family, name, layers, dtype, models, tmp_path):
    rows, columns = 64 * len(layers), 64
    tensors, added = lokr(name, dtype, rows, columns)
    assert math.isinf(float(tensors[f"{name}.alpha"])) == (dtype is torch.float16)
    save_file(tensors, tmp_path / "x.safetensors")
    check(tmp_path / "x.safetensors", models[family], "transformer", layers, added)


def test_lengths_of_the_rows_of_a_fused_lokr_are_read(models, tmp_path):
    """OneTrainer's LoKr with DoRA on outputs."""
    tensors, added = lokr(FUSED, torch.float32, 192, 64)
    lengths = drawn(192, 1).abs() + 0.5
    save_file({**tensors, f"{FUSED}.dora_scale": lengths}, tmp_path / "x.safetensors")
    whole = torch.cat([weight(models[KLEIN], "transformer", layer) for layer in (Q, K, V)])
    moved = whole + added
    wanted = lengths * moved / moved.norm(dim=1, keepdim=True)
    check(tmp_path / "x.safetensors", models[KLEIN], "transformer", [Q, K, V], wanted - whole)


def test_an_infinite_alpha_that_counts_is_refused(models, tmp_path):
    name = f"transformer.{Q}"
    low = {f"{name}.lokr_w2_a": drawn(16, 2), f"{name}.lokr_w2_b": drawn(2, 16)}
    save_file(lokr(name, torch.float16, 64, 64)[0] | low, tmp_path / "both.safetensors")
    with pytest.raises(UserError, match="one part alone can be what is added"):
        read(tmp_path / "both.safetensors", models[FLUX])
    alpha, one = torch.tensor(math.inf), drawn(4, 4)
    save_file({**low, f"{name}.lokr_w1": one, f"{name}.alpha": alpha}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="NaN or infinity in it"):
        read(tmp_path / "x.safetensors", models[FLUX])


@pytest.mark.parametrize("name", ["transformer_blocks.0.attn.norm_q", "txt_norm"])
def test_a_sum_to_a_norm_of_means_of_squares_is_read(name, models, tmp_path):
    """ai-toolkit's `all_layers`."""
    before = weight(models[QWEN], "transformer", name)
    save_file({f"diffusion_model.{name}.diff": drawn(len(before))}, tmp_path / "x.safetensors")
    check(tmp_path / "x.safetensors", models[QWEN], "transformer", [name], drawn(len(before)))


def test_a_lora_of_a_second_text_encoder_is_converted(tmp_path):
    """T5's beside FLUX, in OneTrainer's name for it; kohya's scripts count it as the third."""
    base, name = tiny_families.settings(FLUX, tmp_path)["pretrained_model_name_or_path"], T5.replace(".", "_")
    out, tensors = tmp_path / "out.safetensors", {}
    for factor, value in (("lora_down", drawn(2, 32)), ("lora_up", drawn(32, 2))):
        tensors[f"lora_te2_{name}.{factor}.weight"] = value
    save_file(tensors, tmp_path / "x.safetensors")
    given = [f"base={base}", f"out={out}", "format=kohya"]
    assert main.run(["convert", "lora", str(tmp_path / "x.safetensors"), *given]) == errors.DONE
    assert {each.partition(".")[0] for each in load_file(out)} == {f"lora_te3_{name}"}


def test_a_lokr_of_a_fused_projection_is_converted_and_merged(tmp_path):
    base, file = tiny_families.settings(KLEIN, tmp_path)["pretrained_model_name_or_path"], tmp_path / "x.safetensors"
    tensors, added = lokr(FUSED, torch.bfloat16, 192, 64)
    save_file(tensors, file)
    kohya, whole = tmp_path / "kohya.safetensors", tmp_path / "merged"
    assert main.run(["convert", "lora", str(file), "format=kohya", f"base={base}", f"out={kohya}"]) == errors.DONE
    assert {name.partition(".")[0] for name in load_file(kohya)} == {"lora_unet_double_blocks_0_img_attn_qkv"}
    given = f"use={{{kohya}: 0.5}}"
    assert main.run(["convert", "merge", base, given, f"out={whole}", "dtype=float32"]) == errors.DONE
    (first,) = (whole / "transformer").glob("*.safetensors")
    before, after = load_file(next((Path(base) / "transformer").glob("*.safetensors"))), load_file(first)
    changed = torch.cat([after[f"{each}.weight"] - before[f"{each}.weight"] for each in (Q, K, V)])
    torch.testing.assert_close(changed, 0.5 * added, rtol=1e-4, atol=1e-5)
    assert main.run(["convert", "lora", str(file), "format=peft", f"base={base}", f"out={tmp_path / 'p'}"]) == 2


def test_the_whole_matrices_of_ai_toolkits_fullrank_are_what_is_added(models, tmp_path):
    """Its first factor is a matrix of the weight's size, and its second none (toolkit/lora_special.py)."""
    networks = models[FLUX]
    added = drawn(*weight(networks, "transformer", Q).shape)
    save_file({f"transformer.{Q}.lora_A.weight": added}, tmp_path / "x.safetensors")
    check(tmp_path / "x.safetensors", networks, "transformer", [Q], added)
    second = torch.ones(len(weight(networks, "transformer", K)), 2)
    both = {f"transformer.{Q}.lora_A.weight": added, f"transformer.{K}.lora_B.weight": second}
    save_file(both, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match="parts are missing"):
        read(tmp_path / "y.safetensors", networks)
