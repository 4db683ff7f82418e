"""The contract of families, over all files of families/, and what holds of them together."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_families
from quick_cases import quick_where
from tiny_families import NAMES
from tiny_models import TINY_UNET, write_sd

from daguerre import plugins
from daguerre.contracts.families import MESHES, FamilyContract
from daguerre.models.family import Family


class Loaded(NamedTuple):
    """A family with tiny networks, and what it was loaded from."""

    name: str
    given: dict[str, Any]
    family: Family


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Each family, once for all tests."""
    module = plugins.find("families", request.param)
    given = tiny_families.settings(request.param, tmp_path_factory.mktemp(request.param))
    return Loaded(request.param, given, module.load(module.Settings.model_validate(given), 1))


class TestFamily(FamilyContract):
    """The contract, over all files of families/."""

    @pytest.fixture
    def name(self, loaded: Loaded) -> str:
        return loaded.name

    @pytest.fixture
    def given(self, loaded: Loaded) -> dict[str, Any]:
        return loaded.given

    @pytest.fixture
    def family(self, loaded: Loaded) -> Family:
        return loaded.family

    # The quick case places frozen and trained parameters.
    @pytest.mark.parametrize(
        ("adapter", "degrees"), quick_where(lambda case: case == ("lora", {"fsdp": 2, "tensor": 2}), MESHES)
    )
    def test_every_mesh_can_be_planned(self, family: Family, adapter: str, degrees: dict[str, int]) -> None:
        super().test_every_mesh_can_be_planned(family, adapter, degrees)


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


def test_files_of_whole_models_have_one_reader():
    """models/weights/single_files.py asks the only one: a second layout needs a choice there, by what a file holds."""
    having = [name for name in NAMES if hasattr(plugins.find("families", name), "ORIGINAL_LAYOUT")]
    assert len(plugins.declared("families", "ORIGINAL_LAYOUT")) == 1, having
