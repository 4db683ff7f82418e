"""Tensors beside weights: plain scales of 8-bit floats are multiplied out, others are refused, named or left out."""

import json
import shutil

import pytest
import tiny_cascade
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_sd, write_sdxl

from daguerre.cli.convert import export, extract, lora, model, resize, tokens
from daguerre.errors import UserError
from daguerre.families.cascade import files as cascade_files
from daguerre.families.stable_diffusion.single_file import layout, load, save
from daguerre.models.weights import beside, files, opening
from daguerre.models.weights import load as weights_load

UNET, QUERY = layout.UNET, "middle_block.1.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    """A tiny pipeline, and the tensors and the header of the file that it makes."""
    place = tmp_path_factory.mktemp("xl")
    folder = write_sdxl(place / "folder")
    save.write(place / "model.safetensors", folder)
    with opening.opened(place / "model.safetensors") as file:
        return folder, load_file(place / "model.safetensors"), file.metadata()


def written(tmp_path, xl, more, header=None):
    path = tmp_path / "model.safetensors"
    save_file({**xl[1], **more}, path, {**xl[2], **(header or {})})
    return path


def converted(tmp_path, xl, more, header=None, ignored=()):
    (tmp_path / "made").mkdir()
    notices = load.convert(written(tmp_path, xl, more, header), tmp_path / "made", ignored=ignored)
    return load_file(tmp_path / "made" / "unet" / "diffusion_pytorch_model.safetensors"), notices


def quantised(xl, dtype=torch.float8_e4m3fn, rows=False, scale="scale_weight"):
    """Matrices of the UNet as 8-bit floats with scales, and what they stand for, by their own names."""
    stored, meant = {}, {}
    for name, tensor in xl[1].items():
        if name.startswith(UNET) and name.endswith("attn1.to_q.weight"):
            largest = tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().max()
            factor = (largest / torch.finfo(dtype).max).float()
            stored |= {name: (tensor / factor).to(dtype), name.replace(".weight", f".{scale}"): factor}
            meant[name] = stored[name].float() * factor
    return stored, meant


FORM = {"format": "float8_e4m3fn"}


@pytest.mark.parametrize("form", ["scaled_fp8", "comfy_quant", "header", "rows", "e5m2"])
def test_scaled_8_bit_weights_are_what_they_stand_for(tmp_path, xl, form):
    dtype = torch.float8_e5m2 if form == "e5m2" else torch.float8_e4m3fn
    scale = "scale_weight" if form in ("scaled_fp8", "e5m2") else "weight_scale"
    stored, meant = quantised(xl, dtype, form == "rows", scale)
    layers = [name.removesuffix(".weight") for name in meant]
    header = {}
    if form == "scaled_fp8":
        stored |= {f"{UNET}scaled_fp8": torch.empty(2, dtype=dtype)}
        stored |= {f"{layer}.scale_input": torch.tensor(0.7) for layer in layers}
    if form == "comfy_quant":
        text = torch.tensor(list(json.dumps(FORM).encode()), dtype=torch.uint8)
        stored |= {f"{layer}.comfy_quant": text.clone() for layer in layers}
        stored |= {f"{layer}.input_scale": torch.tensor(0.7) for layer in layers}
    if form == "header":
        header = {beside.METADATA: json.dumps({"layers": dict.fromkeys(layers, FORM)})}
    found, notices = converted(tmp_path, xl, stored, header)
    expected = load_file(xl[0] / "unet" / "diffusion_pytorch_model.safetensors")
    assert notices == []
    assert len(meant) == 8
    own = {tuple(tensor.flatten()[:3].tolist()): tensor for tensor in meant.values()}
    for name, tensor in expected.items():
        if name.endswith("attn1.to_q.weight"):
            assert torch.equal(found[name], own[tuple(found[name].flatten()[:3].tolist())])
            assert torch.allclose(found[name], tensor, atol=float(tensor.abs().max()) / 8)
        else:
            assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({f"{UNET}{QUERY}.scale_weight": torch.tensor(3.0)}, r"next to weights.*ignore_tensors=\['\*.scale_weight'\]"),
        ({f"{UNET}{QUERY}.weight.absmax": torch.ones(4)}, r"next to weights.*ignore_tensors=\['\*.absmax'\]"),
        ({f"{UNET}{QUERY}.bias": torch.ones(4)}, "next to weights"),
        ({f"{layout.VAE}decoder.conv_in.weight_scale": torch.tensor(2.0)}, "next to weights"),
        (
            {"conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight_scale": torch.ones(3)},
            "next to weights",
        ),
        ({"flow_pred": torch.empty(0)}, r"has the mark flow_pred.*ignore_tensors=\['flow_pred'\]"),
        ({"rectified.shift": torch.tensor(3.0)}, "has the mark rectified.shift"),
        ({f"{UNET}is_flow": torch.tensor(1.0)}, "has the mark model.diffusion_model.is_flow"),
        ({f"{UNET}{QUERY}.weight": None}, r"has weights of int8 \(.*which are quantised"),
    ],
)
def test_what_changes_used_weights_is_refused(tmp_path, xl, more, said):
    more = {name: xl[1][name].to(torch.int8) if value is None else value for name, value in more.items()}
    with pytest.raises(UserError, match=said):
        converted(tmp_path, xl, more)


def test_a_scale_without_dims_meets_a_weight_of_one_row():
    weight = torch.tensor([[2.0, 3.0]]).to(torch.float8_e4m3fn)  # as Krea 2's joins its states
    found = beside.multiplied({"x.weight": weight, "x.weight_scale": torch.tensor(0.5)})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"x.weight": [[1.0, 1.5]]}


def test_forms_that_are_not_plain_are_refused(tmp_path, xl):
    stored, meant = quantised(xl, scale="weight_scale")
    turned = {name.removesuffix(".weight"): {**FORM, "convrot": True} for name in meant}
    with pytest.raises(UserError, match="next to weights"):
        converted(tmp_path, xl, stored, {beside.METADATA: json.dumps({"layers": turned})})
    blocks = {name: torch.ones(2, 2) if name.endswith("scale") else tensor for name, tensor in stored.items()}
    with pytest.raises(UserError, match="next to weights"):
        load.convert(written(tmp_path, xl, blocks), tmp_path / "made")


def test_strangers_and_what_other_layouts_leave_are_named(tmp_path, xl):
    sd = write_sd(tmp_path / "sd")
    save.write(tmp_path / "sd.safetensors", sd)
    old = {name: tensor for name, tensor in load_file(tmp_path / "sd.safetensors").items() if "cond_stage" in name}
    more = {"some.net.weight": torch.ones(3, 3), "some.net.scale": torch.tensor(1.0), "global_step": torch.tensor(3)}
    found, notices = converted(tmp_path, xl, {**old, **more})
    assert "tensors belong to none of its networks and are ignored: " in notices[-1]
    expected = load_file(xl[0] / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


MEANT = {f"{UNET}{QUERY}.scale_weight": torch.tensor(3.0), "flow_pred": torch.empty(0)}


def test_tensors_are_left_out_by_patterns(tmp_path, xl, monkeypatch, capsys):
    _, notices = converted(tmp_path, xl, MEANT, ignored=["*.scale_weight", "flow_*", "none*"])
    assert notices[:3] == [
        "ignore_tensors: 1 tensors fit '*.scale_weight'",
        "ignore_tensors: 1 tensors fit 'flow_*'",
        "ignore_tensors: 0 tensors fit 'none*'",
    ]
    path = written(tmp_path, xl, MEANT)
    with pytest.raises(UserError, match="ignore_tensors="):
        load.folder(path, pickled=False)
    out = ["ignore_tensors=[*.scale_weight, flow_pred]", f"out={tmp_path / 'out'}"]
    assert model.run([str(path), *out]) == 0
    with pytest.raises(UserError, match="there is nothing to extract"):
        extract.run([str(path), f"base={xl[0]}", "rank=1", out[0], f"out={tmp_path / 'x.safetensors'}"])


@pytest.mark.parametrize("verb", [lora, resize, tokens])
def test_a_base_of_an_adapter_is_read_without_them(verb, tmp_path, xl):
    weights = load_file(xl[0] / "unet" / "diffusion_pytorch_model.safetensors")
    layer = next(name.removesuffix(".weight") for name in weights if name.endswith("attn1.to_q.weight"))
    out, inside = weights[f"{layer}.weight"].shape
    factors = {f"unet.{layer}.lora_A.weight": torch.ones(1, inside), f"unet.{layer}.lora_B.weight": torch.ones(out, 1)}
    if verb is tokens:
        texts = (load_file(xl[0] / name / "model.safetensors") for name in ("text_encoder", "text_encoder_2"))
        widths = (next(t.shape[1] for key, t in own.items() if "token_embedding" in key) for own in texts)
        factors = {name: torch.ones(1, width) for name, width in zip(("clip_l", "clip_g"), widths, strict=True)}
    save_file(factors, tmp_path / "own.safetensors")
    ending, more = {
        tokens: ("", "name=<x>"),
        resize: (".safetensors", "rank=1"),
        lora: (".safetensors", "format=kohya"),
    }[verb]
    words, path = [str(tmp_path / "own.safetensors"), more], written(tmp_path, xl, MEANT)
    ignored, out = "ignore_tensors=[*.scale_weight, flow_pred]", f"out={tmp_path / f'x{ending}'}"
    with pytest.raises(UserError, match="ignore_tensors="):
        verb.run([*words, f"base={path}", out])
    assert verb.run([*words, f"base={path}", out, ignored]) == 0
    with pytest.raises(UserError, match="only a base is read by it"):
        verb.run([*words, f"out={tmp_path / f'y{ending}'}", ignored])


@pytest.fixture
def scaled_folder(tmp_path, xl):
    """A folder in diffusers' layout with a scale beside a weight."""
    folder = shutil.copytree(xl[0], tmp_path / "folder")
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    layer = next(name.removesuffix(".weight") for name in load_file(path) if name.endswith("attn1.to_q.weight"))
    save_file({**load_file(path), f"{layer}.weight_scale": torch.tensor(3.0)}, path)
    return folder


def test_folders_are_held_to_the_same(tmp_path, scaled_folder):
    from diffusers import UNet2DConditionModel

    with pytest.raises(UserError, match=r"next to weights.*ignore_tensors=\['\*.weight_scale'\]"):
        weights_load.load(UNet2DConditionModel, scaled_folder / "unet")
    weights_load.load(UNet2DConditionModel, scaled_folder / "unet", ignored=["*.weight_scale"])
    out = [f"out={tmp_path / 'x.safetensors'}"]
    for verb, arguments in (
        (export, ["format=single_file", *out]),
        (export, ["format=unet", *out]),
        (export, ["format=diffusers", "dtype=float16", f"out={tmp_path / 'x'}"]),
    ):
        with pytest.raises(UserError, match="next to weights"):
            verb.run([str(scaled_folder), *arguments])
    assert export.run([str(scaled_folder), "format=unet", "ignore_tensors=[*.weight_scale]", *out]) == 0
    assert not any("scale" in name for name in load_file(tmp_path / "x.safetensors"))
    config = files.read_json(scaled_folder / "unet" / "config.json")
    files.write_json(
        scaled_folder / "unet" / "config.json", {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    )
    with pytest.raises(UserError, match=r"quantised weights \(bitsandbytes\)"):
        weights_load.load(UNet2DConditionModel, scaled_folder / "unet")
    with pytest.raises(UserError, match=r"quantised weights \(bitsandbytes\)"):
        export.run([str(scaled_folder), "format=diffusers", "dtype=float16", f"out={tmp_path / 'y'}"])


SCALED = ("text_encoder", "text_encoder_2", "unet", "vae")


def of_few_bits(folder, form):
    """The only file of weights in the folder, with a scaled weight or one of whole numbers, in two shards if asked.
    "prefixed" puts before each name what a class around the network has, which transformers takes off."""
    (path,) = folder.glob("*.safetensors")
    own = load_file(path)
    layer = next(name.removesuffix(".weight") for name, t in own.items() if t.ndim == 2 and name.endswith(".weight"))
    if form == "int8":
        own[f"{layer}.weight"] = own[f"{layer}.weight"].to(torch.int8)
    else:
        own[f"{layer}.weight"] = own[f"{layer}.weight"].to(torch.float8_e4m3fn)
        own[f"{layer}.scale_weight"] = torch.tensor(3.0)
    if form == "prefixed":
        own = {f"text_model.{name}": tensor for name, tensor in own.items()}
    if form != "sharded":
        save_file(own, path, {"format": "pt"})
        return
    path.unlink()
    parts = {f"{path.stem}-0000{i + 1}-of-00002.safetensors": dict([*own.items()][i::2]) for i in range(2)}
    for name, part in parts.items():
        save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    files.write_json(folder / f"{path.stem}.safetensors.index.json", index)


@pytest.mark.parametrize("form", ["scaled", "sharded", "int8"])
@pytest.mark.parametrize("component", SCALED)
def test_no_network_of_a_folder_is_read_of_few_bits(component, form, tmp_path, xl):
    from daguerre.families import sdxl

    folder = shutil.copytree(xl[0], tmp_path / "folder")
    of_few_bits(folder / component, form)
    said = "weights of I8" if form == "int8" else "scale_weight"
    with pytest.raises(UserError, match=said):
        sdxl.load(sdxl.Settings(pretrained_model_name_or_path=str(folder)), 0)


def test_names_of_a_class_around_an_encoder_hide_no_scale(tmp_path, xl):
    from transformers import CLIPTextModel

    folder = shutil.copytree(xl[0] / "text_encoder", tmp_path / "encoder")
    of_few_bits(folder, "prefixed")
    with pytest.raises(UserError, match=r"text_model\..*scale_weight"):
        weights_load.load(CLIPTextModel, folder)


@pytest.mark.parametrize("form", ["scaled", "int8"])
def test_networks_that_measure_images_are_held_to_the_same(form, tmp_path):
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    from daguerre.evaluation.networks import transformers

    numbers = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    parts = CLIPTextConfig(**numbers, vocab_size=9), CLIPVisionConfig(**numbers, image_size=8, patch_size=4)
    of = {"text_config": parts[0].to_dict(), "vision_config": parts[1].to_dict(), "projection_dim": 8}
    CLIPModel(CLIPConfig(**of)).save_pretrained(tmp_path)
    transformers.load(tmp_path, "CLIPModel", ("clip",))
    of_few_bits(tmp_path, form)
    with pytest.raises(UserError, match="weights of I8" if form == "int8" else "scale_weight"):
        transformers.load(tmp_path, "CLIPModel", ("clip",))


def test_one_network_out_of_a_file_is_held_to_the_same(tmp_path, xl):
    names = list(load_file(xl[0] / "unet" / "diffusion_pytorch_model.safetensors"))
    for own in (xl[1], load_file(xl[0] / "unet" / "diffusion_pytorch_model.safetensors")):
        weight = next(
            name for name in own if "diffusion_model" in name or name in names if name.endswith("to_q.weight")
        )
        path = tmp_path / "one.safetensors"
        save_file({**own, weight.replace(".weight", ".scale_weight"): torch.tensor(2.0)}, path)
        with pytest.raises(UserError, match="next to weights"):
            load.network_tensors(path, "unet", names, pickled=False)
        found = load.network_tensors(path, "unet", names, pickled=False, ignored=["*.scale_weight"])
        assert found.keys() == set(names)


def test_other_kinds_of_files_are_refused_by_their_suffix(tmp_path):
    from daguerre.models.weights import resolve

    for name, said in (
        ("model.gguf", "GGUF holds weights of few bits"),
        ("model.zip", "ends with .safetensors or .sft"),
    ):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(UserError, match=said):
            resolve.locate(str(tmp_path / name), {})


def test_a_stage_of_cascade_is_held_to_the_same(tmp_path):
    tensors = load_file(tiny_cascade.PREVIEWER)
    layer = next(name.removesuffix(".weight") for name, own in tensors.items() if own.ndim == 4)
    path = tmp_path / "previewer.safetensors"
    save_file({**tensors, f"{layer}.scale_weight": torch.tensor(2.0)}, path)
    with pytest.raises(UserError, match=r"next to weights.*ignore_tensors=\['\*.scale_weight'\]"):
        cascade_files.read(path, "previewer")
    assert (
        cascade_files.read(path, "previewer", ["*.scale_weight"]).keys()
        == cascade_files.read(tiny_cascade.PREVIEWER, "previewer").keys()
    )


def test_whole_numbers_fill_no_network(tmp_path):
    network = torch.nn.Linear(2, 2)
    whole = {name: tensor.to(torch.int8) for name, tensor in network.state_dict().items()}
    with pytest.raises(UserError, match="has weights of int8"):
        weights_load.fill(network, whole, tmp_path / "x.safetensors")
