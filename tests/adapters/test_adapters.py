"""The contract of every adapter, found by its file: settings, what is trained and kept, merging, and the export."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from tiny_models import write_sd

from daguerre import plugins
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.assembly.parts import Components, build
from daguerre.config import config as configs
from daguerre.settings import documentation
from daguerre.types import Batch

NAMES = plugins.names("adapters")
NEEDED: dict[str, dict[str, object]] = {"tokens": {"placeholder_token": "<new>", "existing": ["^d$", "d</w>"]}}
"""Settings of adapters that do not work without, by name."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_sd(folder)
    return folder


def built(base: Path, name: str) -> Components:
    """A tiny Stable Diffusion with the adapter."""
    tree = {
        "run_name": "x",
        "model": {"family": "sd", "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": {"own": {"name": name, **NEEDED.get(name, {})}},
        "data": {"source": "folder", "path": str(base), "resolution": 16},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    parts = build(configs.load("own", [], whole=tree).config, torch.device("cpu"))
    parts.net.eval()
    return parts


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
    cond = parts.family.text.tokens(["a red dog", ""])
    generator, shape = torch.Generator().manual_seed(2), parts.family.latent_shape((3, 16, 16))
    x = torch.randn(2, *shape, generator=generator)
    keys, sizes = np.array([[7, 0, 0], [8, 0, 0]]), np.zeros((2, 6), dtype=np.int32)
    images = {
        name: torch.randint(0, 256, (2, 4, 16, 16), generator=generator, dtype=torch.uint8)
        for name in parts.attached.images
    }
    draws = parts.attached.random_inputs(0, keys, shape)
    batch = Batch(keys, images, ["a red dog", ""], torch.ones(2), ["", ""], sizes, draws)
    return parts.net(x, torch.tensor([10.0, 500.0]), parts.attached.condition(batch, cond))


@pytest.mark.parametrize("name", NAMES)
class TestAdapter:
    def test_settings_are_named_after_the_file_and_documented(self, name):
        module = plugins.find("adapters", name)
        assert issubclass(module.Settings, AdapterSettings)
        assert module.Settings.model_fields["name"].default == name
        assert module.Settings.model_fields.keys() - documentation(module.Settings) == set()
        assert list(inspect.signature(module.attach).parameters) == ["settings", "model", "seed"]
        assert issubclass(get_type_hints(module.attach, vars(module) | {"Family": object})["return"], Trainable)

    def test_what_is_trained_is_kept_and_gets_a_gradient(self, name, base):
        parts = built(base, name)
        trained = {n for n, p in parts.net.named_parameters() if p.requires_grad}
        assert trained
        assert trained <= parts.attached.names <= parts.net.state_dict().keys()
        change(parts)
        prediction(parts).square().mean().backward()
        assert [n for n, p in parts.net.named_parameters() if n in trained and p.grad is None] == []

    def test_its_weights_follow_from_the_seed(self, name, base):
        first, again = (built(base, name).net.state_dict() for _ in range(2))
        assert first.keys() == again.keys()
        assert all(torch.equal(value, again[n]) for n, value in first.items())

    @torch.no_grad()
    def test_merging_changes_nothing_and_leaves_networks_as_the_family_made_them(self, name, base):
        parts, full = built(base, name), built(base, "full")
        change(parts)
        wanted = prediction(parts)
        assert not torch.allclose(wanted, prediction(full))
        with parts.attached.merged():
            torch.testing.assert_close(prediction(parts), wanted, rtol=1e-3, atol=1e-4)
            networks = full.family.components
            assert {n: [*c.state_dict()] for n, c in parts.family.components.items()} == {
                n: [*c.state_dict()] for n, c in networks.items()
            }

    def test_its_strengths_lead_from_the_base_to_what_was_trained(self, name, base):
        """Each gives another prediction; afterwards it is as before."""
        parts, untouched = built(base, name), built(base, "full")
        change(parts)
        whole, strengths = prediction(parts), parts.attached.strengths
        assert not strengths or (strengths[0], strengths[-1]) == (0.0, 1.0)
        for strength in strengths:
            with parts.attached.at(strength):
                found = prediction(parts)
            assert torch.equal(found, whole) == (strength == 1)
            assert torch.equal(found, prediction(untouched)) == (strength == 0)
        assert torch.equal(prediction(parts), whole)

    def test_the_export_replaces_the_folder(self, name, base, tmp_path):
        parts = built(base, name)
        folder = tmp_path / "pipeline"
        folder.mkdir()
        (folder / "old").touch()
        parts.attached.export(folder, parts.objective, configs.load("quickstart", []).config.sampling)
        assert [path for path in folder.iterdir() if path.name != "old"]
        assert not (folder / "old").exists()
