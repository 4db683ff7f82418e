"""The contract of every family: settings, `load`, pure encoders, what is trained, and its place on several devices.

The networks should be tiny: each test loads them again.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from daguerre import plugins
from daguerre.adapters.adapter import attach
from daguerre.contracts import contract
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import DEFAULT
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.placement import describe_unknown, of_net, placement
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import FamilySettings
from daguerre.types import TOKENS, Batch, Prompt

SIDES_PX = (32, 64, 128, 256, 512)
TEXTS = ["a large red circle on a blue background", "", "a small green star"]
KEYS = np.array([[1, 0, 0], [2, 0, 0], [3, 1, 0]], dtype=np.int64)
MESHES: list[tuple[str, dict[str, int]]] = [
    (adapter, degrees)
    for adapter in ("full", "lora")
    for degrees in ({"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2})
]


def shape_of(family: Family) -> tuple[int, int, int]:
    """(3, H, W) of the smallest square images that the family takes."""
    for side in SIDES_PX:
        try:
            family.latent_shape((3, side, side))
        except UserError:
            continue
        return 3, side, side
    raise AssertionError(f"it takes no square images of {', '.join(map(str, SIDES_PX))} px")


def images(family: Family) -> torch.Tensor:
    """Three images, uint8."""
    numbers = np.random.default_rng(0).integers(0, 256, (3, *shape_of(family)), dtype=np.uint8)
    return torch.from_numpy(numbers)


def pictures(family: Family) -> dict[str, torch.Tensor]:
    """As many reference images of three samples as the family needs."""
    rule = family.references
    return {} if rule is None else dict.fromkeys(rule.names[: rule.least], images(family))


def batch(family: Family) -> Batch:
    """Three samples."""
    side = shape_of(family)[1]
    sizes = np.array([[side + 8, side + 16, 2, 1, side, side]] * 3, dtype=np.int32)
    draws = family.random_inputs(5, KEYS, shape_of(family))
    return Batch(KEYS, {"image": images(family), **pictures(family)}, TEXTS, torch.ones(3), TEXTS, sizes, draws)


def asked(family: Family, texts: Sequence[str]) -> list[Prompt]:
    """Prompts of these texts, with as many reference images as the family needs."""
    rule, pixels_HWC = family.prompt_references, np.full((64, 64, 3), 128, dtype=np.uint8)
    return [Prompt(text, images=dict.fromkeys(rule.names[: rule.least] if rule else (), pixels_HWC)) for text in texts]


def backward(family: Family) -> Any:
    """Gradients of a loss of what the net returns for a batch, which is returned, too."""
    x0, cond = family.encode(batch(family))
    y = family.net(x0, torch.tensor([1.0, 5.0, 9.0]), cond)
    getattr(y, "images_BCHW", y).square().mean().backward()
    return y


class FamilyContract(contract.SettingsContract):
    """A family's promises."""

    kind = "families"
    start = FamilySettings

    @pytest.fixture
    def family(self, plugin: Any, given: Any) -> Family:
        """The family with the settings of the check."""
        loaded: Family = plugin.load(plugin.Settings.model_validate(given), 1)
        return loaded

    def test_load_takes_settings_and_seed_and_gives_a_family(self, plugin: Any) -> None:
        assert list(inspect.signature(plugin.load).parameters) == ["settings", "seed"]
        assert get_type_hints(plugin.load)["return"] is Family

    def test_nothing_inherits_from_a_family(self, plugin: Any) -> None:
        assert [c for c in vars(plugin).values() if isinstance(c, type) and Family in c.__mro__[1:]] == []

    def test_its_weights_follow_from_the_seed(self, plugin: Any, given: Any, family: Family) -> None:
        torch.manual_seed(9)
        again = plugin.load(plugin.Settings.model_validate(given), 1)
        assert again.components.keys() == family.components.keys()
        for name, network in family.components.items():
            other = again.components[name].state_dict()
            assert all(torch.equal(value, other[key]) for key, value in network.state_dict().items()), name

    def test_without_memory_it_has_the_same_shapes(self, plugin: Any, given: Any, family: Family) -> None:
        """As `train --dry-run` and `plan` load it."""
        with torch.device("meta"):
            without = plugin.load(plugin.Settings.model_validate(given), 1)
        shapes = {name: value.shape for name, value in family.net.state_dict().items()}
        assert {name: value.shape for name, value in without.net.state_dict().items()} == shapes
        assert all(p.device.type == "meta" for p in without.net.parameters())

    def test_prompts_lie_between_two_or_are_refused(self, family: Family) -> None:
        """Features move on a straight line; what has no values in between must be the same in both prompts."""
        if not family.generates:
            pytest.skip("generates nothing")
        own = {name: rows[0].permute(1, 2, 0).numpy() for name, rows in pictures(family).items()}
        first, last, shape = TEXTS[0], TEXTS[2], shape_of(family)
        between = [Prompt(first, "blur", own, last, share) for share in (0.0, 0.25, 1.0)]
        ends = [Prompt(first, "blur", own), Prompt(last, "blur", own)]
        expected, null = family.encode_prompts(ends, shape, guided=True)
        if any(not rows.is_floating_point() and not torch.equal(rows[0], rows[1]) for rows in expected.values()):
            with pytest.raises(UserError, match="as many tokens"):
                family.encode_prompts(between, shape, guided=True)
            return
        found, found_null = family.encode_prompts(between, shape, guided=True)
        assert null is not None
        assert found_null is not None
        for name, rows in expected.items():
            middle = 0.75 * rows[0].double() + 0.25 * rows[1].double()
            line = torch.stack([rows[0].double(), middle, rows[1].double()])
            torch.testing.assert_close(found[name].double(), line, atol=1e-6, rtol=1e-6)  # rounds as the batch's size
            torch.testing.assert_close(found_null[name][:2], null[name], atol=1e-6, rtol=1e-6)

    def test_what_generates_says_how_it_is_guided_and_exported(self, family: Family) -> None:
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

    def test_the_net_holds_what_is_trained_and_nothing_else(self, family: Family) -> None:
        inside = {id(p) for p in family.net.parameters()}
        assert inside
        for name, network in family.components.items():
            assert all((id(p) in inside) == (name in family.trained) for p in network.parameters())
            assert family.networks[name].role
            if name not in family.trained:
                assert not any(p.requires_grad for p in network.parameters())
                assert not network.training
        assert {id(p) for p in family.unread}.isdisjoint(id(p) for p in family.net.parameters() if p.requires_grad)
        assert family.trained <= {name.partition(".")[0] for name in family.net.state_dict()}

    @torch.no_grad()
    def test_moments_are_a_function_of_the_image(self, family: Family) -> None:
        """Equal for equal images, at any place in a batch, with any random state: what a cache may keep."""
        pixels = images(family)
        torch.manual_seed(3)
        first = family.images.encode(pixels)
        torch.manual_seed(4)
        again = family.images.encode(pixels)
        assert first
        assert all(torch.equal(first[name], again[name]) for name in first)
        twice = family.images.encode(pixels[[1, 1, 1]])
        for name, rows in twice.items():
            assert torch.equal(rows[0], rows[1])
            torch.testing.assert_close(rows[2], first[name][1], rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def test_features_are_a_function_of_the_text(self, family: Family) -> None:
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
    def test_a_batch_is_encoded_by_the_two_pure_functions(self, family: Family) -> None:
        """encode = latents(moments, random inputs), and tokens or features with what else the net is given."""
        given = batch(family)
        x0, cond = family.encode(given)
        assert torch.equal(x0, family.images.latents(family.images.encode(images(family)), given.draws))
        assert x0.shape == (3, *family.latent_shape(shape_of(family)))
        if family.text is not None:
            tokens = {name.removeprefix(TOKENS): rows for name, rows in family.told(given).items() if TOKENS in name}
            read = tokens if family.trained_readers else family.text.features(tokens)
            assert all(torch.equal(cond[name], rows) for name, rows in read.items())
            assert (
                family.encode_prompts(asked(family, TEXTS), shape_of(family))[0].keys()
                >= family.text.features(tokens).keys()
            )

    def test_all_that_is_trained_gets_a_finite_gradient(self, family: Family) -> None:
        y = backward(family)
        grads = {name: p.grad for name, p in family.net.named_parameters() if p.requires_grad}
        assert [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()] == []
        if any(network.denoises for network in family.networks.values()):  # others may have more for their loss
            assert y.shape == (3, *family.latent_shape(shape_of(family)))
            assert [name for name, grad in grads.items() if grad is None] == []
        family.net.zero_grad()

    def test_components_are_trained_after_they_were_loaded(self, family: Family) -> None:
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
        backward(changed)
        assert all(p.grad is not None for p in changed.net.parameters() if p.requires_grad)
        changed.net.zero_grad()
        fixed = next((name for name, network in family.networks.items() if not network.trainable), "another")
        with pytest.raises(UserError, match=f"{fixed} cannot be trained in this family; there are: {able[0]}"):
            family.training([fixed])
        family.training(family.trained)

    @pytest.mark.parametrize(("adapter", "degrees"), MESHES)
    def test_every_mesh_can_be_planned(self, family: Family, adapter: str, degrees: dict[str, int]) -> None:
        """Each parameter, trained or frozen, has its place; a network without logical axes is named."""
        extensible = [network for network in family.networks.values() if network.spec.extensible]
        if adapter == "lora" and not extensible:
            pytest.skip("has no network to which a LoRA can be added")
        mesh = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1) | degrees)
        fresh = copy.deepcopy(family)
        of_lora = {"rank": 2} if all(network.facts.layers for network in extensible) else {"rank": 2, "targets": "all"}
        settings = plugins.find("adapters", adapter).Settings(**(of_lora if adapter == "lora" else {}))
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
