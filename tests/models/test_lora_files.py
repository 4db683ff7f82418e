"""Files of LoRAs that this and other programs write: read in full with their strength, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import foreign_loras
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from peft import LoHaConfig, LoKrConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_sd_folder, write_sdxl
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files import forms
from daguerre.models.lora_files.read import find, read

RANK, ALPHA = 4, 6.0
ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd_folder(tmp_path_factory.mktemp("sd"))


def opened(base: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(base, local_files_only=True)


def networks(pipe: StableDiffusionPipeline) -> dict[str, nn.Module]:
    return {name: getattr(pipe, name) for name in ("unet", *ENCODERS, "vae") if hasattr(pipe, name)}


@pytest.fixture(scope="module")
def plain(base: Path) -> dict[str, nn.Module]:
    return networks(opened(base))


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    folder = write_sdxl(tmp_path_factory.mktemp("sdxl") / "sdxl")
    return networks(StableDiffusionXLPipeline.from_pretrained(folder))


@pytest.fixture(scope="module")
def theirs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by diffusers and peft themselves: with alpha in the header, without header, and in older names."""
    folder = tmp_path_factory.mktemp("files")
    pipe, targets = opened(base), {"unet": ["to_q", "to_v", "conv1"], "text_encoder": ["q_proj", "fc1"]}
    foreign_loras.add(pipe, targets, 0, r=RANK, lora_alpha=ALPHA)
    whole, tensors = foreign_loras.save(pipe, folder / "whole", [*targets]), foreign_loras.tensors(pipe, [*targets])
    save_file(tensors, folder / "bare.safetensors")
    older = {
        key.replace(".lora_A.weight", f"{ending}.down.weight").replace(".lora_B.weight", f"{ending}.up.weight"): value
        for key, value in tensors.items()
        for ending in [".lora" if key.startswith("unet.") else ".lora_linear_layer"]
    }
    save_file(older, folder / "older.safetensors")
    return {"whole": whole, "bare": folder / "bare.safetensors", "older": folder / "older.safetensors"}


@pytest.mark.parametrize("name", ["whole", "bare", "older"])
def test_diffusers_files_are_applied_as_diffusers_applies_them(name, theirs, base, plain):
    """Without a header alpha is the rank."""
    pipe = opened(base)
    pipe.load_lora_weights(theirs[name].parent, weight_name=theirs[name].name)
    pipe.fuse_lora()
    counted = 0
    for component, additions in read(theirs[name], plain).items():
        for each in additions:
            before = plain[component].get_submodule(each.layer).weight.detach()
            expected = getattr(pipe, component).get_submodule(each.layer).base_layer.weight.detach()
            found = each.weight(before)
            assert each.scale == (ALPHA / RANK if name == "whole" else 1)
            assert (found - expected).abs().max() <= 1e-6 * (expected - before).abs().max() + 1e-7
            counted += 1
    assert counted == len(load_file(theirs[name])) / 2


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_every_form_holds_what_it_was_given(form, theirs, plain, tmp_path):
    """`forms.write` compares; here with the first file, and of peft's folders peft's own reading counts, too."""
    given = read(theirs["whole"], plain)
    place = tmp_path / ("folder" if form == "peft" else "x.safetensors")
    forms.write(form, place, plain, given)
    found = read(place, plain)
    assert {name: len(own) for name, own in found.items()} == {name: len(own) for name, own in given.items()}
    for component, own in given.items():
        by_layer = {each.layer: each for each in found[component]}
        assert all(each.agrees(by_layer[each.layer]) for each in own)


PEFTS = {
    "loha": LoHaConfig(r=2, alpha=5, target_modules=["to_q"], init_weights=False),
    "lokr": LoKrConfig(r=2, alpha=5, target_modules=["to_q"], init_weights=False),
    "lokr of whole matrices": LoKrConfig(
        r=32, alpha=80, rank_pattern={"attn1.to_q": 16}, target_modules=["to_q", "to_k"], init_weights=False
    ),
}


@pytest.mark.parametrize("kind", PEFTS)
def test_a_folder_of_pefts_own(kind, base, plain, tmp_path):
    """Of `save_pretrained`: the config's alpha counts, and its rank where the factors show none."""
    network = get_peft_model(opened(base).unet, PEFTS[kind])
    network.save_pretrained(tmp_path / "unet")
    (found,) = read(tmp_path, plain).values()
    assert {each.scale for each in found} == ({2.5, 5} if "whole" in kind else {2.5})
    assert all((each.rank is None) == ("whole" in kind) for each in found)
    merged = network.merge_and_unload()
    for each in found:
        expected, before = (m.get_submodule(each.layer).weight.detach() for m in (merged, plain["unet"]))
        assert (each.weight(before) - expected).abs().max() <= 1e-6 * (expected - before).abs().max() + 1e-7


RECORDED = Path(__file__).parent / "recorded"


LYCORIS = {"locon": 20, "loha": 20, "lokr": 20, **dict.fromkeys(("locon_tucker_dora_in", "loha_tucker_dora_out"), 6)}
"""Files that it wrote, and how many modules each has at least."""


@pytest.mark.parametrize("algorithm", [*LYCORIS, "lokr_tucker_dora_out"])
def test_files_of_lycoris_are_applied_as_lycoris_does(algorithm, plain, tmp_path):
    """Files that lycoris-lora 4.1.3 wrote, and its changes of the weights times a vector: tools/record_lycoris.py."""
    tensors = load_file(RECORDED / f"lycoris_{algorithm}.safetensors")
    seen = {name.removeprefix("seen."): tensors.pop(name) for name in [*tensors] if name.startswith("seen.")}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read(tmp_path / "x.safetensors", plain)
    assert sum(map(len, found.values())) == len(seen) > LYCORIS.get(algorithm, 6)
    for component, own in found.items():
        prefix = "lora_unet_" if component == "unet" else "lora_te_"
        for each in own:
            before = plain[component].get_submodule(each.layer).weight.detach()
            change = (each.weight(before) - before).flatten(1).double()
            expected = seen[prefix + each.layer.replace(".", "_").removeprefix("text_model_")]
            theirs = change @ torch.arange(change.shape[1], dtype=torch.float64).sin()
            assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max(), each.layer


Tensors = dict[str, Tensor]
TO_Q = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
KOHYA = f"lora_{TO_Q.replace('.', '_')}"


def first(tensors: Tensors, ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def kohyas(tensors: Tensors, alpha: object = None) -> Tensors:
    """One module in kohya's names."""
    down, up = (tensors[f"{TO_Q}.lora_{part}.weight"] for part in "AB")
    found = {f"{KOHYA}.lora_down.weight": down, f"{KOHYA}.lora_up.weight": up}
    return found if alpha is None else {**found, f"{KOHYA}.alpha": torch.tensor(alpha)}


def loha(tensors: Tensors, *without: str) -> Tensors:
    down, up = (tensors[f"{TO_Q}.lora_{part}.weight"] for part in "AB")
    parts = {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up.clone(), "hada_w2_b": down.clone()}
    return {f"{KOHYA}.{name}": value for name, value in parts.items() if name not in without}


def with_value(tensors: Tensors, ending: str, value: float) -> Tensors:
    tensors[first(tensors, ending)].view(-1)[0] = value
    return tensors


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): value for name, value in tensors.items()}


def without(tensors: Tensors, ending: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name != first(tensors, ending)}


ONE = torch.ones(1)
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "NaN": (lambda t: with_value(t, "lora_A.weight", float("nan")), "has NaN or infinity in it"),
    "infinity": (lambda t: with_value(t, "lora_B.weight", float("inf")), "has NaN or infinity in it"),
    "a factor is missing": (lambda t: without(t, "lora_B.weight"), "parts are missing"),
    "an alpha alone": (lambda t: {f"{KOHYA}.alpha": ONE}, "has only an alpha: parts are missing"),
    "a factor of LoHa is missing": (lambda t: loha(t, "hada_w2_a"), "hada_w2_b: parts are missing"),
    "another width": (
        lambda t: {**t, first(t, "lora_A.weight"): torch.zeros(RANK, 7)},
        r"was made for another model: text_encoder\..* is \(64, 48\) here",
    ),
    "factors of other ranks": (
        lambda t: {**t, first(t, "lora_A.weight"): torch.zeros(RANK + 1, 48)},
        "was made for another model",
    ),
    "a layer that is not there": (lambda t: renamed(t, ".to_q.", ".to_qq."), r"the nearest are unet\."),
    "DoRA of unknown axis": (
        lambda t: {**kohyas(t), f"{KOHYA}.dora_scale": torch.ones(4)},
        "does not say whether outputs or inputs are scaled",
    ),
    "a whole weight of another": (lambda t: {f"{KOHYA}.diff": ONE}, r"diff is \[1\], where \[32, 32\] goes with"),
    "a whole weight and a LoRA": (
        lambda t: {**kohyas(t), f"{KOHYA}.diff": torch.ones(32, 32)},
        "of which one part alone can be",
    ),
    "a bias that is not there": (
        lambda t: {**t, f"{TO_Q}.lora_B.bias": ONE},
        "changes the bias of .*, which that layer does not have here",
    ),
    "BOFT": (lambda t: {f"{TO_Q}.boft_R": ONE}, "a BOFT"),
    "a tensor that is no LoRA's": (lambda t: {**t, "unet.conv_in.bias": ONE}, "is no part of a LoRA"),
    "alpha 0": (lambda t: kohyas(t, 0.0), "takes for the rank and others for no addition"),
    "alpha NaN": (lambda t: kohyas(t, float("nan")), "has NaN or infinity in it"),
    "two alphas": (lambda t: kohyas(t, [1.0, 2.0]), "is no number"),
    "one layer in two spellings": (lambda t: {**t, **kohyas(t)}, f"twice: .*{re.escape(TO_Q)}"),
    "an embedding": (lambda t: {"emb_params": torch.ones(2, 48)}, "an embedding"),
    "an embedding of diffusers": (lambda t: {"<cat>": torch.ones(2, 48)}, "an embedding"),
    "a ControlNet": (lambda t: {"control_model.time_embed.0.weight": ONE}, "a ControlNet, not a LoRA"),
    "a Control-LoRA": (lambda t: {"lora_controlnet": ONE}, "a Control-LoRA"),
    "Custom Diffusion": (
        lambda t: {f"{TO_Q[5:-5]}.processor.to_k_custom_diffusion.weight": ONE},
        "weights of Custom Diffusion",
    ),
    "an IP-Adapter": (lambda t: {"image_proj.proj.weight": ONE, "ip_adapter.1.to_k_ip.weight": ONE}, "an IP-Adapter"),
    "a hypernetwork": (lambda t: {"768.0.linear.0.weight": ONE}, "a hypernetwork"),
    "a full rank of ai-toolkit with an alpha": (
        lambda t: {f"{KOHYA}.lora_down.weight": torch.ones(32, 32), f"{KOHYA}.alpha": torch.tensor(4.0)},
        "ai-toolkit's type fullrank with an alpha .* `daguerre convert extract MERGED",
    ),
    "a whole model": (lambda t: {"model.diffusion_model.out.2.weight": ONE}, "a whole model, not a LoRA"),
    "Flux": (lambda t: {"lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": ONE}, "a LoRA for Flux"),
    "Flux of diffusers": (lambda t: {"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": ONE}, "for Flux"),
    "Stable Cascade": (lambda t: {"lora_prior_unet_down_blocks_0.lora_up.weight": ONE}, "for Stable Cascade"),
    "a second encoder": (lambda t: renamed(t, "text_encoder.", "text_encoder_2."), "has no text_encoder_2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_applied_in_full_is_refused(name, theirs, plain, tmp_path):
    change, said = WRONG[name]
    made = {key: value.clone() for key, value in change(load_file(theirs["bare"])).items()}
    save_file(made, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=said):
        read(tmp_path / "x.safetensors", plain)


def test_files_that_are_none(theirs, plain, tmp_path):
    whole = theirs["bare"].read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "short.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_bytes((4).to_bytes(8, "little") + b"word")
    (tmp_path / "x.pt").write_bytes(whole)
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "none.safetensors")
    for name, file, content in (("whole", "model_index.json", "{}"), ("control", "config.json", '"ControlNetModel"')):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    for name, said in (
        ("cut.safetensors", "cannot be read"),
        ("short.safetensors", "cannot be read"),
        ("text.safetensors", "cannot be read"),
        ("x.pt", "can run code"),
        ("empty", "holds no LoRA: give a .safetensors file"),
        ("whole", "holds no LoRA: it is a whole model, and `daguerre convert extract`"),
        ("control", "holds no LoRA: it is a ControlNet, .* as controlnets="),
        ("there-is-none", "no such file"),
        ("none.safetensors", "no additions"),
    ):
        with pytest.raises(UserError, match=said):
            read(tmp_path / name, plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "in its header cannot be read: Expecting property name"),
        ("[1]", "in its header is not a JSON object"),
        ("3", "in its header is not a JSON object"),
        ('{"unet.alpha_pattern": {"(": 1}}', "has alpha_pattern='.': it must be a regular expression .missing"),
        ('{"unet.alpha_pattern": 3}', "has alpha_pattern=3: it must be a mapping of layers' names to numbers"),
        ('{"unet.rank_pattern": []}', "has rank_pattern=..: it must be a mapping"),
        (
            '{"unet.lora_alpha": "much"}',
            "x.safetensors: peft's config of unet has lora_alpha='much': it must be a number",
        ),
        ('{"unet.lora_alpha": null}', "has lora_alpha=None: it must be a number other than 0"),
        ('{"unet.r": {}}', "has r={}: it must be a number above 0"),
    ],
)
def test_a_header_that_is_none(text, said, theirs, plain, tmp_path):
    save_file(load_file(theirs["bare"]), tmp_path / "x.safetensors", {"lora_adapter_metadata": text})
    with pytest.raises(UserError, match=said):
        read(tmp_path / "x.safetensors", plain)


@pytest.mark.parametrize("architecture", ["", "stable-diffusion-v1"])
def test_a_file_for_another_family_is_refused(architecture, theirs, sdxl, tmp_path):
    """With the model that its header names."""
    header = {"modelspec.architecture": f"{architecture}/lora"} if architecture else None
    save_file(load_file(theirs["bare"]), tmp_path / "x.safetensors", header)
    said = f"another model \\({architecture}\\)" if architecture else "another model: this one has no"
    with pytest.raises(UserError, match=said):
        read(tmp_path / "x.safetensors", sdxl)


def test_a_file_of_sdxl_is_refused_by_sd(sdxl, plain, tmp_path):
    names = [
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
        "lora_te2_text_model_encoder_layers_0_mlp_fc1",
    ]
    for name in names:
        save_file({f"{name}.lora_{way}.weight": torch.ones(1) for way in ("down", "up")}, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match="was made for another model"):
            read(tmp_path / "x.safetensors", plain)


def test_patterns_of_the_header_are_followed(plain, theirs, tmp_path):
    """As peft writes them: the first pattern that ends a layer's name counts."""
    tensors = load_file(theirs["bare"])
    numbers = {"unet.r": RANK, "unet.lora_alpha": 2.0, "unet.alpha_pattern": {"attn2.to_q": 8.0}}
    save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps(numbers)})
    found = read(tmp_path / "x.safetensors", plain)
    for each in found["unet"]:
        assert each.scale == (8 if each.layer.endswith("attn2.to_q") else 2) / RANK
    assert {each.scale for each in found["text_encoder"]} == {1.0}


def test_names_that_comfyui_knows(plain, theirs, tmp_path):
    """Of one layer of the UNet: each is the same addition."""
    tensors, found = load_file(theirs["bare"]), []
    original = "input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    flat, flat_original = TO_Q.removeprefix("unet.").replace(".", "_"), original.replace(".", "_")
    older = TO_Q.replace(".to_q", ".processor.to_q")
    spelt = [f"lora_unet_{flat}", f"lycoris_{flat}", f"lora_unet_{flat_original}", f"diffusion_model.{original}", TO_Q]
    for name in (*spelt, f"{older}_lora"):
        ends = (".down.weight", ".up.weight") if name.endswith("_lora") else (".lora_down.weight", ".lora_up.weight")
        factors = [tensors[f"{TO_Q}.lora_{part}.weight"] for part in "AB"]
        save_file({f"{name}{end}": v for end, v in zip(ends, factors, strict=True)}, tmp_path / "x.safetensors")
        ((one,),) = read(tmp_path / "x.safetensors", plain).values()
        found.append(one)
    assert all(each.agrees(found[0]) for each in found)


def test_the_file_of_a_run_is_found(tmp_path):
    """In adapter/, in pipeline/ of older versions, and by name where there are several."""
    old = tmp_path / "pipeline" / "pytorch_lora_weights.safetensors"
    old.parent.mkdir()
    old.touch()
    assert find(tmp_path) == old
    for name in ("one", "two"):
        (tmp_path / "adapter" / name).mkdir(parents=True)
        (tmp_path / "adapter" / name / "kohya.safetensors").touch()
    assert find(tmp_path / "adapter" / "one") == tmp_path / "adapter" / "one" / "kohya.safetensors"
    with pytest.raises(UserError, match=r"several LoRAs: give one of .*adapter/one, .*adapter/two"):
        find(tmp_path)
    (tmp_path / "adapter" / "kohya.safetensors").touch()
    (tmp_path / "adapter" / "two" / "kohya.safetensors").unlink()
    (tmp_path / "adapter" / "one" / "kohya.safetensors").unlink()
    assert find(tmp_path) == tmp_path / "adapter" / "kohya.safetensors"


def test_the_file_of_a_run_is_found_beside_the_folders_of_its_components(tmp_path):
    """Runs of loha and lokr have both, those of boft the folders alone."""
    for name in ("unet", "text_encoder"):
        (tmp_path / "adapter" / name).mkdir(parents=True)
        (tmp_path / "adapter" / name / "adapter_model.safetensors").touch()
    assert find(tmp_path) == tmp_path / "adapter"
    assert find(tmp_path / "adapter" / "unet") == tmp_path / "adapter" / "unet"
    (tmp_path / "adapter" / "kohya.safetensors").touch()
    assert find(tmp_path) == tmp_path / "adapter" / "kohya.safetensors"
    for name in ("one", "two"):
        (tmp_path / "other" / "adapter" / name / "unet").mkdir(parents=True)
        (tmp_path / "other" / "adapter" / name / "unet" / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match=r"several LoRAs: give one of .*adapter/one, .*adapter/two"):
        find(tmp_path / "other")
