"""The contract of every family to which a LoRA can be added, found by its file: what is written, in each layout, is
read back as the same addition, and facts name the layers that can be one product."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_families
import torch
from quick_cases import quick_where
from safetensors.torch import save_file
from torch import Tensor

from daguerre import plugins
from daguerre.adapters import lora
from daguerre.adapters.adapter import attach
from daguerre.contracts.families import asked
from daguerre.errors import UserError
from daguerre.families.pretrained import bases, catalogue
from daguerre.models.export.about import UNKNOWN
from daguerre.models.family import Family
from daguerre.models.lora_files import kohya
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE, merged
from daguerre.models.lora_files.read import read
from daguerre.models.network import facts_of
from daguerre.models.weights import architectures
from daguerre.objectives import eps
from daguerre.samplers.settings import SamplingSettings

SIZE = (3, 64, 64)


def extensible(name: str) -> bool:
    settings: Any = plugins.find("families", name).Settings
    return any(spec.role == "denoiser" and spec.extensible for spec in settings.components.values())


NAMES = [name for name in catalogue.pretrained() if extensible(name)]


@torch.no_grad()
def prediction(family: Family, net: torch.nn.Module) -> Tensor:
    cond, _ = family.encode_prompts(asked(family, ["a red dog", "a"]), SIZE)
    x = torch.randn(2, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(2))
    y: Tensor = net.eval()(x, torch.tensor([0.3, 0.7]), {**cond, "guidance": torch.tensor([1.0, 3.5])})
    return y


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    """Each family by its name, with tiny networks; tests take a copy of it."""
    return request.param, tiny_families.load(request.param, tmp_path_factory.mktemp(request.param))


def test_each_file_is_read_back_as_the_same_addition(loaded: tuple[str, Family], tmp_path: Path):
    name, family = loaded[0], copy.deepcopy(loaded[1])
    # peft cannot add to a convolution of several groups and merge
    grouped = any(getattr(layer, "groups", 1) > 1 for net in family.components.values() for layer in net.modules())
    settings = lora.Settings(rank=2, alpha=3.0, targets="attention" if grouped else "all")
    family = family.training(settings.reaches(family.trainable))
    parts = attach({"lora": settings}, family, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in parts.net.named_parameters():
            if "lora_B" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    (trainable,) = parts.trainables.values()
    assert isinstance(trainable, lora.LoRA)
    adapter = tmp_path / "adapter"
    lines = trainable.export(adapter, eps.build(eps.Settings()), SamplingSettings(), UNKNOWN)
    kind = getattr(diffusers, plugins.find("families", name).Settings.pipeline_class, None)
    loads = hasattr(kind, "load_lora_weights")
    assert ("pipe.load_lora_weights(" in (adapter / "README.md").read_text()) == loads
    assert any("reads no LoRA: `daguerre convert export RUN format=diffusers" in line for line in lines) != loads
    expected = prediction(family, parts.net)
    named = all(family.networks[component].facts.names is not None for component in trainable.networks)
    files = {DIFFUSERS_FILE, KOHYA_FILE} if named else {DIFFUSERS_FILE}
    assert {path.name for path in adapter.glob("*.safetensors")} == files
    plain = prediction(loaded[1], loaded[1].net)
    assert (plain - expected).abs().max() > 1e-2, "it changes something"
    for file in files:
        fresh = copy.deepcopy(loaded[1])
        with torch.no_grad():
            for component, additions in read(adapter / file, fresh.components).items():
                for each in additions:
                    weight = fresh.components[component].get_parameter(each.name)
                    weight.copy_(merged(weight, [(each, 1.0)], component))
        torch.testing.assert_close(prediction(fresh, fresh.net), expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(tiny_families.load("flux", tmp_path_factory.mktemp("flux")).components)


@torch.no_grad()
def with_lora(family: Family, targets: str, **given: Any) -> tuple[Family, torch.nn.Module, float]:
    """A copy with a LoRA of the denoiser that changes something; its net, and what pure noise is called."""
    family = copy.deepcopy(family).training(family.trainable[:1])
    assert family.pretrained is not None
    scale = getattr(family.pretrained.settings, "time_scale", 1.0)
    clock = "timestep" if scale == 1000 else "flow_time"
    diffusion = eps.build(eps.Settings()).with_noise_conditioning(clock, scale)
    attached = attach({"lora": lora.Settings(rank=2, targets=targets, **given)}, family, 0)
    attached.follow(diffusion)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in attached.net.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    assert diffusion.noise_conditioning.last == scale
    return family, attached.net, scale


@torch.no_grad()
def at_times(family: Family, net: torch.nn.Module, times: list[float]) -> Tensor:
    """Of a batch with a sample for each time, of equal texts; a time of one batch is that of any other."""
    cond, _ = family.encode_prompts(asked(family, ["a red dog"] * len(times)), SIZE)
    x = torch.randn(1, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(2))
    given = {**cond, "guidance": torch.ones(len(times))}
    y: Tensor = net.eval()(x.expand(len(times), -1, -1, -1), torch.tensor(times), given)
    return y


def test_ranks_act_by_the_time_that_the_denoiser_is_called_with(loaded: tuple[str, Family]):
    """T-LoRA: of two ranks both on clean samples, and the first alone near pure noise."""
    family, net, last = with_lora(loaded[1], "attention+ff", tlora_min_rank=1)
    found = at_times(family, net, [0.0, 0.9 * last])
    whole, full, _ = with_lora(loaded[1], "attention+ff")
    expected = at_times(whole, full, [0.0, 0.9 * last])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert (found[1] - expected[1]).abs().max() > 2e-3
    for name, parameter in full.named_parameters():
        if "lora_B" in name:
            parameter.data[:, 1:] = 0
    torch.testing.assert_close(found[1], at_times(whole, full, [0.0, 0.9 * last])[1], rtol=1e-4, atol=1e-5)


def test_each_sample_has_the_ranks_of_its_own_time_whatever_layers_make_of_rows(loaded: tuple[str, Family]):
    grouped = any(getattr(layer, "groups", 1) > 1 for net in loaded[1].components.values() for layer in net.modules())
    family, net, last = with_lora(loaded[1], "attention+ff" if grouped else "all", tlora_min_rank=1)
    times = [0.0, 0.9 * last, 0.2 * last]
    alone = torch.cat([at_times(family, net, [time]) for time in times])
    torch.testing.assert_close(at_times(family, net, times), alone, rtol=1e-3, atol=1e-4)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).abs() + 0.5


EXCHANGED = "norm_out.linear", "lora_unet_final_layer_adaLN_modulation_1"
"""A layer of FLUX.1 whose halves of outputs are the other way round in the authors' layout, and its name there."""
LOW = {"lora_down.weight": drawn(2, 64), "lora_up.weight": drawn(128, 2)}
KINDS = {
    "lora": LOW,
    "dora over outputs": {**LOW, "dora_scale": drawn(128, 1)},
    "dora over inputs": {**LOW, "dora_scale": drawn(1, 64)},
    "lokr": {"lokr_w1": drawn(4, 2), "lokr_w2": drawn(32, 32)},
    "lokr of two factors": {"lokr_w1_a": drawn(4, 2), "lokr_w1_b": drawn(2, 2), "lokr_w2": drawn(32, 32)},
    "loha": {
        f"hada_{half}_{end}": drawn(*size) for half in ("w1", "w2") for end, size in (("a", (128, 2)), ("b", (2, 64)))
    },
    "sum": {"diff": drawn(128, 64)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_for_a_layer_whose_halves_are_exchanged(kind: str, flux: dict[str, Any], tmp_path: Path):
    layer, name = EXCHANGED
    weight = flux["transformer"].get_parameter(f"{layer}.weight").detach()

    def added(stem: str, around: Tensor) -> Tensor:
        save_file({f"{stem}.{factor}": value for factor, value in KINDS[kind].items()}, tmp_path / "x.safetensors")
        (addition,) = read(tmp_path / "x.safetensors", flux)["transformer"]
        return merged(around, [(addition, 1.0)], "transformer") - around

    theirs = torch.cat(weight.chunk(2)[::-1])
    expected = torch.cat(added(f"transformer.{layer}", theirs).chunk(2)[::-1])
    found = added(name, weight)
    torch.testing.assert_close(found, expected)
    if "dora_scale" not in KINDS[kind]:  # which has no form in kohya's layout
        kohya.write(tmp_path / "y.safetensors", flux, read(tmp_path / "x.safetensors", flux))
        (again,) = read(tmp_path / "y.safetensors", flux)["transformer"]
        torch.testing.assert_close(
            merged(weight, [(again, 1.0)], "transformer") - weight, expected, rtol=1e-4, atol=1e-5
        )


def refused(tensors: dict[str, Tensor], networks: dict[str, Any], place: Path) -> str:
    save_file(tensors, place / "x.safetensors")
    with pytest.raises(UserError) as refusal:
        read(place / "x.safetensors", networks)
    return str(refusal.value)


def test_what_cannot_be_put_in_order_or_cut_is_refused(flux: dict[str, Any], tmp_path: Path):
    odd = {f"{EXCHANGED[1]}.lokr_w1": drawn(1, 2), f"{EXCHANGED[1]}.lokr_w2": drawn(128, 32)}
    way = "`daguerre convert extract MERGED base=BASE"
    assert "(LyCORIS' LoKr) cannot be cut in two. Merge it into a model with that program" in (
        said := refused(odd, flux, tmp_path)
    )
    assert way in said
    fused = "lora_unet_double_blocks_0_img_attn_qkv"
    found = refused({f"{fused}.dora_scale": torch.tensor(1.0)}, flux, tmp_path)
    assert "of a projection that is 3 layers here" in found
    assert "LyCORIS with wd_on_output=False and OneTrainer without lora_decompose_output_axis write such files" in found
    assert way in found


def test_one_layer_that_is_unknown_is_named_in_a_file_for_this_model(flux: dict[str, Any], tmp_path: Path):
    other = "transformer.transformer_blocks.99.attn.to_q"
    tensors = {
        f"{stem}.{factor}": value.clone()
        for stem in (f"transformer.{EXCHANGED[0]}", other)
        for factor, value in LOW.items()
    }
    found = refused(tensors, flux, tmp_path)
    assert f"this one has no {other} (1 of the file's modules are unknown" in found
    assert "is no part of a LoRA" in refused({".lora_down.weight": drawn(2, 64)}, flux, tmp_path)


def test_facts_name_the_layers_that_read_one_input(loaded: tuple[str, Family]):
    """With a LoRA they are one product: layers of one module and one shape, in the order in which they are called."""
    family = copy.deepcopy(loaded[1])
    networks = [network for network in family.networks.values() if network.trainable]
    calls: dict[Any, Any] = {}  # the inputs are kept, so that no other tensor gets their place in memory

    def keep(layer: Any, inputs: Any) -> None:
        calls.setdefault(layer, (parents[layer], id(inputs[0]), layer.weight.shape, inputs))

    parents = {
        layer: parent
        for network in networks
        for parent in network.module.modules()
        for layer in parent.children()
        if isinstance(layer, torch.nn.Linear)
    }
    for layer in parents:
        layer.register_forward_pre_hook(keep)
    prediction(family, family.net)
    together: dict[Any, list[Any]] = {}
    for layer, (*alike, _) in calls.items():
        together.setdefault(tuple(alike), []).append(layer)
    called = [group for network in networks for group in network.readers if calls.keys() >= {*group}]
    declared = [group for group in called if len({layer.weight.shape for layer in group}) == 1]
    assert {tuple(group) for group in declared} == {tuple(group) for group in together.values() if len(group) > 1}


QUICK = {"sd1", "cascade_c", "flux1_dev", "anima"}
"""Small networks of every family have written files of LoRAs above."""


@pytest.mark.parametrize("name", quick_where(QUICK.__contains__, architectures.names()))
def test_files_of_loras_are_converted_for_every_published_model(name: str):
    """By its numbers alone: its denoiser is built without memory, and other programs have names for its layers."""
    found = bases.networks(architectures.FOLDER / name)
    denoisers = [network for component, network in found.items() if not component.startswith("text_encoder")]
    assert {facts_of(network).names is not None for network in denoisers} == {True}
