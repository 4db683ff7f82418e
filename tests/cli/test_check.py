"""`daguerre check`: a plug-in keeps the contract of its kind, or the command says what it breaks. The plug-ins are
those of docs/extending.md, as a folder of plug-ins, and each with a fault."""

import re
from itertools import product
from pathlib import Path

import pytest
from quick_cases import quick_where

from daguerre import errors, plugins
from daguerre.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCK = re.compile(r"```python\n# src/daguerre/(\S+)\n(.*?)```", re.DOTALL)
FAULTS = {
    "objectives": ("-torch.ones_like(a), torch.ones_like(a)", "-torch.ones_like(a) / (s - s), torch.ones_like(a)"),
    "sources": ("2 * number + (", "number + ("),
    "families": ('pretrained.seeded(lambda: UNet2DModel(**numbers), seed, "model.channels")', "UNet2DModel(**numbers)"),
    "adapters": ("return self.model.export(folder, objective, sampling)", "return []"),
    "conditions": ("return (", "return np.random.default_rng().permutation("),
    "samplers": ("x = moved if", "x = 0.9 * moved if"),
    "metrics": ("found.mean()", "found.mean() / 0"),
    "trackers": ("line[\"samples\"]", "line[\"sample\"]"),
    "captioners": ("for mean in means]", "for mean in reversed(means)]"),
    "optimizers": ('"restored"', '"itself"'),
}  # fmt: skip
"""What makes each wrong."""
BREAKS = {
    "objectives": "test_loss_and_gradient_are_finite_at_every_level",
    "sources": "test_ids_are_unlike_each_other",
    "families": "test_its_weights_follow_from_the_seed",
    "adapters": "test_the_export_replaces_the_folder",
    "conditions": "test_it_is_a_pure_function_of_image_and_draw",
    "samplers": "test_a_denoiser_that_knows_the_image_gets_it",
    "metrics": "test_tables_have_rows_of_finite_numbers",
    "trackers": "test_it_goes_on_with_a_run_that_was_killed",
    "captioners": "test_captions_follow_their_pictures",
    "optimizers": "test_an_update_that_is_empty_or_not_finite_moves_no_weight_and_no_moment",
}
"""The test that says so."""
GIVEN = {"families": ["channels=[8,16]"], "conditions": ["levels=3"], "optimizers": ["learning_rate=0.003"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of plug-ins, of each kind a right one and a wrong one; the name of the right one of each kind."""
    root, names = tmp_path_factory.mktemp("plugins"), {}
    for file, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        kind = next(kind for kind, own in plugins.FOLDERS.items() if own == str(Path(file).parent))
        name = names[kind] = Path(file).stem
        (root / kind).mkdir()
        (root / kind / f"{name}.py").write_text(code)
        right, wrong = FAULTS[kind]
        assert right in code
        changed = code.replace(right, wrong).replace(f'"{name}"', f'"wrong_{name}"')
        (root / kind / f"wrong_{name}.py").write_text(changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plugins.VARIABLE, str(root))
        patch.delenv("PYTEST_ADDOPTS", raising=False)  # is for these tests, not for those that they start
        yield names


# The others take seconds; their contracts are kept by Daguerre's own plug-ins in quick tests.
QUICK = {"samplers", "metrics", "conditions", "trackers", "captioners"}


@pytest.mark.parametrize(
    ("kind", "right"),
    quick_where(lambda case: case[0] in QUICK or case == ("families", False), product(plugins.FOLDERS, (True, False))),
)
def test_a_plug_in_keeps_its_contract_or_is_told_what_it_breaks(kind, right, folder, capfd):
    name = f"{kind}.{'' if right else 'wrong_'}{folder[kind]}"
    code = main.run(["check", name, *GIVEN.get(kind, [])])
    said = capfd.readouterr().out
    assert code == (errors.DONE if right else errors.FAILED), said
    assert (BREAKS[kind] in said) is not right, said


def test_settings_are_checked(folder, capfd):
    assert main.run(["check", "posterize", "levels=1"]) == errors.FAILED
    assert "greater than or equal to 2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.v", "objective is no kind of plug-ins; there are families, objectives"),
        ("ddmi", "there is no plug-in ddmi; did you mean ddim?"),
        ("lcm", "choose one of objectives.lcm, samplers.lcm"),
        ("sources.nothing", "there is no 'nothing' in sources"),
    ],
)
def test_a_name_that_is_none(word, said, capsys):
    assert main.run(["check", word]) == errors.REFUSED
    assert said in capsys.readouterr().err
