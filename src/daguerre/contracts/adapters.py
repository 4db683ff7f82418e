"""The contract of every adapter: settings, what is trained and kept, merging, and the export.

Each is attached to the quickstart's model, as it is before its training.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from daguerre import plugins
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.assembly.parts import Components, build
from daguerre.config import config as configs
from daguerre.contracts import contract
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import AdapterInputs

SHAPE = (3, 32, 32)
Build = Callable[[str], Components]


@torch.no_grad()
def change(parts: Components) -> None:
    """As an update would: everything that is trained moves."""
    generator = torch.Generator().manual_seed(1)
    for p in parts.net.parameters():
        if p.requires_grad:
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def prediction(parts: Components) -> torch.Tensor:
    """Of the net, for fixed latents, prompts and the images that the adapter reads."""
    assert parts.family.text is not None
    cond = parts.family.text.tokens(["a small red star", ""])
    generator, shape = torch.Generator().manual_seed(2), parts.family.latent_shape(SHAPE)
    x = torch.randn(2, *shape, generator=generator)
    keys = np.array([[7, 0, 0], [8, 0, 0]])
    images = {
        name: torch.randint(0, 256, (2, 4, *SHAPE[1:]), generator=generator, dtype=torch.uint8)
        for name in parts.attached.images
    }
    inputs = AdapterInputs(images, ["a small red star", ""], parts.attached.random_inputs(0, keys, shape))
    y: torch.Tensor = parts.net(x, torch.tensor([10.0, 500.0]), parts.attached.condition(inputs, cond))
    return y


class AdapterContract(contract.SettingsContract):
    """An adapter's promises."""

    kind = "adapters"
    start = AdapterSettings

    @pytest.fixture
    def base(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        """The settings of the model, whose pipeline is written once."""
        folder = tmp_path_factory.getbasetemp() / "adapters-base"
        config = configs.load("quickstart").config
        if not folder.exists():
            objective = plugins.find("objectives", config.objective.name).build(config.objective)
            made = plugins.find("families", config.model.family).load(config.model, 1)
            made.export(folder, objective, config.sampling)
        return {"family": config.model.family, "pretrained_model_name_or_path": str(folder)}

    @pytest.fixture
    def built(self, given: Mapping[str, Any], base: dict[str, str]) -> Build:
        """Makes the model with an adapter: the plug-in with the settings of the check, or `full`."""

        def make(name: str) -> Components:
            tree = {
                "run_name": "x",
                "model": base,
                "objective": {"name": "v"},
                "adapters": {"own": {"name": name, **(given if name != "full" else {})}},
                "data": {"source": "shapes", "resolution": 64},
                "training": {"duration": "1 steps", "global_batch_size": 1},
            }
            parts = build(configs.load("own", [], whole=tree).config, torch.device("cpu"))
            parts.net.eval()
            return parts

        return make

    def test_attach_has_the_arguments(self, plugin: Any) -> None:
        assert list(inspect.signature(plugin.attach).parameters) == ["settings", "model", "seed"]
        hints = get_type_hints(plugin.attach, vars(plugin) | {"Family": object})
        assert issubclass(hints["return"], Trainable)

    def test_what_is_trained_is_kept_and_gets_a_gradient(self, name: str, built: Build) -> None:
        parts = built(name)
        trained = {n for n, p in parts.net.named_parameters() if p.requires_grad}
        assert trained
        assert trained <= parts.attached.names <= parts.net.state_dict().keys()
        change(parts)
        prediction(parts).square().mean().backward()
        assert [n for n, p in parts.net.named_parameters() if n in trained and p.grad is None] == []

    def test_its_weights_follow_from_the_seed(self, name: str, built: Build) -> None:
        first, again = (built(name).net.state_dict() for _ in range(2))
        assert first.keys() == again.keys()
        assert all(torch.equal(value, again[n]) for n, value in first.items())

    @torch.no_grad()
    def test_merging_changes_nothing_and_leaves_networks_as_the_family_made_them(self, name: str, built: Build) -> None:
        parts, full = built(name), built("full")
        change(parts)
        wanted = prediction(parts)
        assert not torch.allclose(wanted, prediction(full))
        with parts.attached.merged():
            torch.testing.assert_close(prediction(parts), wanted, rtol=1e-3, atol=1e-4)
            networks = full.family.components
            assert {n: [*c.state_dict()] for n, c in parts.family.components.items()} == {
                n: [*c.state_dict()] for n, c in networks.items()
            }

    def test_its_strengths_lead_from_the_base_to_what_was_trained(self, name: str, built: Build) -> None:
        """Each gives another prediction; afterwards it is as before."""
        parts, untouched = built(name), built("full")
        change(parts)
        whole, strengths = prediction(parts), parts.attached.strengths
        assert not strengths or (strengths[0], strengths[-1]) == (0.0, 1.0)
        for strength in strengths:
            with parts.attached.at(strength):
                found = prediction(parts)
            assert torch.equal(found, whole) == (strength == 1)
            assert torch.equal(found, prediction(untouched)) == (strength == 0)
        assert torch.equal(prediction(parts), whole)

    def test_the_export_replaces_the_folder(self, name: str, built: Build, tmp_path: Path) -> None:
        parts = built(name)
        folder = tmp_path / "pipeline"
        folder.mkdir()
        (folder / "old").touch()
        parts.attached.export(folder, parts.objective, SamplingSettings())
        assert [path for path in folder.iterdir() if path.name != "old"]
        assert not (folder / "old").exists()
