"""The contract of every family, found by its file: settings, `load`, pure encoders, and what is trained."""

from __future__ import annotations

import ast
import copy
import inspect
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tiny_families
import torch
from quick_cases import quick_where
from tiny_families import NAMES
from tiny_models import TINY_UNET, write_sd

from daguerre import plugins
from daguerre.adapters.adapter import attach
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import DEFAULT
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.placement import describe_unknown, of_net, placement
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import FamilySettings
from daguerre.settings import documentation
from daguerre.types import TOKENS, Batch, Prompt

SHAPE = (3, 32, 32)
TEXTS = ["a large red circle on a blue background", "", "a small green star"]
KEYS = np.array([[1, 0, 0], [2, 0, 0], [3, 1, 0]], dtype=np.int64)


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Each family with tiny networks."""
    return tiny_families.load(request.param, tmp_path_factory.mktemp(request.param))


def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, *SHAPE), dtype=np.uint8))


def pictures(family: Family) -> dict[str, torch.Tensor]:
    """As many reference images of three samples as the family needs."""
    rule = family.references
    return {} if rule is None else dict.fromkeys(rule.names[: rule.least], images())


def batch(family: Family) -> Batch:
    sizes = np.array([[40, 48, 2, 1, 32, 32]] * 3, dtype=np.int32)
    draws = family.random_inputs(5, KEYS, SHAPE)
    return Batch(KEYS, {"image": images(), **pictures(family)}, TEXTS, torch.ones(3), TEXTS, sizes, draws)


@pytest.mark.parametrize("name", NAMES)
class TestPlugin:
    def test_settings_are_named_after_the_file_and_documented(self, name):
        settings = plugins.find("families", name).Settings
        assert issubclass(settings, FamilySettings)
        assert settings.model_fields["family"].default == name
        assert settings.model_fields.keys() - documentation(settings) == set()

    def test_load_takes_settings_and_seed_and_gives_a_family(self, name):
        module = plugins.find("families", name)
        assert list(inspect.signature(module.load).parameters) == ["settings", "seed"]
        assert get_type_hints(module.load)["return"] is Family

    def test_nothing_inherits_from_a_family(self, name):
        module = plugins.find("families", name)
        assert [c for c in vars(module).values() if isinstance(c, type) and Family in c.__mro__[1:]] == []


def test_prompts_lie_between_two_or_are_refused(family: Family):
    """Features move on a straight line; what has no values in between must be the same in both prompts."""
    if not family.generates:
        pytest.skip("generates nothing")
    own = {name: rows[0].permute(1, 2, 0).numpy() for name, rows in pictures(family).items()}
    first, last = TEXTS[0], TEXTS[2]
    asked = [Prompt(first, "blur", own, last, share) for share in (0.0, 0.25, 1.0)]
    ends = [Prompt(first, "blur", own), Prompt(last, "blur", own)]
    expected, null = family.encode_prompts(ends, SHAPE, guided=True)
    if any(not rows.is_floating_point() and not torch.equal(rows[0], rows[1]) for rows in expected.values()):
        with pytest.raises(UserError, match="as many tokens"):
            family.encode_prompts(asked, SHAPE, guided=True)
        return
    found, found_null = family.encode_prompts(asked, SHAPE, guided=True)
    assert null is not None
    assert found_null is not None
    for name, rows in expected.items():
        middle = 0.75 * rows[0].double() + 0.25 * rows[1].double()
        line = torch.stack([rows[0].double(), middle, rows[1].double()])
        torch.testing.assert_close(found[name].double(), line, atol=1e-6, rtol=1e-6)  # rounds as the batch's size does
        torch.testing.assert_close(found_null[name][:2], null[name], atol=1e-6, rtol=1e-6)


def test_what_generates_says_how_it_is_guided_and_exported(family: Family):
    """The class says it before anything is loaded; weights may take another guidance."""
    if not family.generates or family.pretrained is None:
        pytest.skip("generates nothing")
    settings = type(family.pretrained.settings)
    assert settings.guidance is not None
    assert family.guidance == settings.guidance
    assert isinstance(settings.schedulers, Schedulers)
    configs: dict[str, Any] = {name: family.components[name].config for name in settings.networks("denoiser")}
    # A pipeline that is opened by its folder has no recipe.
    assert settings.usual_of(configs)["data"]["resolution"] > 0


def test_the_net_holds_what_is_trained_and_nothing_else(family: Family):
    inside = {id(p) for p in family.net.parameters()}
    assert inside
    for name, network in family.components.items():
        assert all((id(p) in inside) == (name in family.trained) for p in network.parameters())
        assert family.networks[name].role
        if name not in family.trained:
            assert not any(p.requires_grad for p in network.parameters())
            assert not network.training
    assert {id(p) for p in family.unread}.isdisjoint(id(p) for p in family.net.parameters() if p.requires_grad)


@torch.no_grad()
def test_moments_are_a_function_of_the_image(family: Family):
    """Equal for equal images, at any place in a batch, with any random state: what a cache may keep."""
    torch.manual_seed(3)
    first = family.images.encode(images())
    torch.manual_seed(4)
    again = family.images.encode(images())
    assert first
    assert all(torch.equal(first[name], again[name]) for name in first)
    twice = family.images.encode(images()[[1, 1, 1]])
    for name, rows in twice.items():
        assert torch.equal(rows[0], rows[1])
        torch.testing.assert_close(rows[2], first[name][1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_features_are_a_function_of_the_text(family: Family):
    if family.text is None:
        pytest.skip("reads no captions")
    first, again = (family.text.features(family.text.tokens(TEXTS)) for _ in range(2))
    alone = family.text.features(family.text.tokens(TEXTS[2:]))
    assert first
    for name in first:
        assert torch.equal(first[name], again[name])
        if name.endswith("_mask"):
            continue  # of a batch: a text alone has no padding
        mask = first.get(f"{name}_mask")
        rows = first[name][2] if mask is None else first[name][2][mask[2]]
        torch.testing.assert_close(alone[name][0], rows, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_batch_is_encoded_by_the_two_pure_functions(family: Family):
    """encode = latents(moments, random inputs), and tokens or features beside what else the net is told."""
    given = batch(family)
    x0, cond = family.encode(given)
    assert torch.equal(x0, family.images.latents(family.images.encode(images()), given.draws))
    assert x0.shape == (3, *family.latent_shape(SHAPE))
    if family.text is not None:
        tokens = {name.removeprefix(TOKENS): rows for name, rows in family.told(given).items() if TOKENS in name}
        in_net = any(family.networks[name].role == "text_encoder" for name in family.trained)
        read = tokens if in_net else family.text.features(tokens)
        assert all(torch.equal(cond[name], rows) for name, rows in read.items())
        assert (
            family.encode_prompts(tiny_families.asked(family, TEXTS), SHAPE)[0].keys()
            >= family.text.features(tokens).keys()
        )


def test_components_are_trained_after_they_were_loaded(family: Family):
    able = [name for name, network in family.networks.items() if network.trainable]
    if not able:
        with pytest.raises(UserError, match="together"):
            family.training([])
        assert family.training(family.trained) is family
        return
    changed = family.training(able[-1:])
    assert {name.partition(".")[0] for name in changed.net.state_dict()} == {able[-1]}
    assert all(p.requires_grad == (name == able[-1]) for name in able for p in family.components[name].parameters()
               if not any(p is each for each in family.unread))  # fmt: skip
    given = batch(family)
    y = changed.net(changed.encode(given)[0], torch.tensor([1.0, 5.0, 9.0]), changed.encode(given)[1])
    getattr(y, "images_BCHW", y).square().mean().backward()
    assert all(p.grad is not None for p in changed.net.parameters() if p.requires_grad)
    fixed = next((name for name, network in family.networks.items() if not network.trainable), "another")
    with pytest.raises(UserError, match=f"{fixed} cannot be trained in this family; there are: {able[0]}"):
        family.training([fixed])
    family.training(family.trained)


def test_no_two_families_have_a_function_in_common():
    """What families share is a part of its own."""
    seen: dict[str, str] = {}
    for name in NAMES:
        tree = ast.parse(Path(str(plugins.find("families", name).__file__)).read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            body = function.body[1:] if ast.get_docstring(function) else function.body
            source = "\n".join(ast.unparse(line) for line in body)
            assert source not in seen, f"{name}.{function.name} is {seen[source]} again"
            seen[source] = f"{name}.{function.name}"


def test_numbers_without_a_place_train_the_same(tmp_path: Path):
    """A UNet of given numbers beside a pretrained text encoder that is trained later."""
    sd = plugins.find("families", "sd")
    made = sd.load(sd.Settings(pretrained_model_name_or_path=str(write_sd(tmp_path)), unet=TINY_UNET), 1)
    both = made.training(["unet", "text_encoder"])
    assert {name.partition(".")[0] for name in both.net.state_dict()} == {"unet", "text_encoder"}
    assert all(p.requires_grad for p in both.net.parameters())


@pytest.mark.parametrize(
    ("adapter", "degrees"),
    quick_where(
        lambda case: case == ("lora", {"fsdp": 2, "tensor": 2}),  # which places frozen and trained parameters
        product(["full", "lora"], [{"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}]),
    ),
)
def test_every_mesh_can_be_planned(family: Family, adapter, degrees):
    """Each parameter, trained or frozen, has its place; a network without logical axes is named."""
    if adapter == "lora" and not any(network.spec.extensible for network in family.networks.values()):
        pytest.skip("has no network to which a LoRA can be added")
    mesh = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1) | degrees)
    fresh = copy.deepcopy(family)
    settings = plugins.find("adapters", adapter).Settings(**({"rank": 2} if adapter == "lora" else {}))
    net = attach({"own": settings}, fresh, 0).net
    whole = of_net(net, fresh.networks, DEFAULT, mesh)
    assert [each.name for each in whole.placed] == [name for name, _ in net.named_parameters()]
    without = {name for name, network in fresh.networks.items() if not network.facts.axes}
    assert {name.partition(".")[0] for name in whole.patterns} & without <= {*whole.unknown}
    assert len(describe_unknown(whole.unknown, mesh)) == bool(whole.unknown)
    for name, network in fresh.networks.items():
        found = placement(network, DEFAULT, mesh)
        assert all(found.patterns.values()) == (name not in without)
        over_fsdp = [each.fsdp is not None for each in found.placed if each.shape]
        assert all(over_fsdp) == ("fsdp" in degrees)


def test_files_of_whole_models_have_one_reader():
    """models/weights/single_files.py asks the only one: a second layout needs a choice there, by what a file holds."""
    having = [name for name in NAMES if hasattr(plugins.find("families", name), "ORIGINAL_LAYOUT")]
    assert len(plugins.declared("families", "ORIGINAL_LAYOUT")) == 1, having
