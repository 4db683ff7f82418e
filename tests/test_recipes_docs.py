"""docs/recipes.md: its tables are what the headers say, and what these say of cards is what `plan` computes."""

import shlex
from pathlib import Path

import pytest
from twins import Twins, left_to_users, tree

from daguerre import errors
from daguerre.cli import main
from daguerre.config import cards, config, recipe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
OPTIONS = [
    (name, option)
    for name, path in recipe.shipped().items()
    if tree(name)["training"]["duration"] != "0 steps"
    for option in cards.options(path)
]
MANY = [(name, many) for name, path in recipe.shipped().items() if (many := cards.over_several(path))]
FIRST = ("illustrious", "sd15_lora")
"""Of recipes without further settings, those that are planned; tests/test_plan_docs.py holds the memory of all."""


def test_the_page_has_the_tables_with_every_recipe_and_readme_leads_to_it(capsys):
    assert main.run(["recipes", "--cards"]) == errors.DONE
    assert PAGE.endswith(capsys.readouterr().out)
    assert [name for name in recipe.shipped() if f"| `{name}` |" not in PAGE] == []
    assert "(docs/recipes.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_header_is_read(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "# A recipe.\n#\n# Hardware: one GPU of 80 GB; of 24 GB (25.8e9 bytes) with a.b=1 c=no; of 16 GB with\n"
        "#           these and d=x,\n#           as people say\n"
        "# Devices:  8 of 24 GB with e=1 f=2\n# Memory:   1 x 2 = 51 GB\nrun_name: x\n",
        encoding="utf-8",
    )
    assert cards.options(path) == [(80, ""), (24, "a.b=1 c=no"), (16, "a.b=1 c=no d=x")]
    assert cards.over_several(path) == (24, "e=1 f=2")
    path.write_text("# Hardware: two CPU cores\n# Time: 1 min\nrun_name: x\n", encoding="utf-8")
    assert cards.options(path) == []
    assert cards.over_several(path) is None


@pytest.mark.parametrize(("name", "option"), [*(each for each in OPTIONS if each[1].settings), *MANY])
def test_settings_for_a_card_are_settings_of_the_recipe(name, option):
    given = ["run_name=x", *left_to_users(name), *shlex.split(option.settings)]
    assert config.load(name, given).config.run_name == "x"


@pytest.mark.long
@pytest.mark.parametrize(("name", "option"), [each for each in OPTIONS if each[1].settings or each[0] in FIRST])
def test_a_recipe_has_room_on_the_card(name, option, tmp_path, capsys):
    places = [f"{path}={value}" for path, value in Twins(tmp_path).conditions(tree(name)).items()]
    card = [f"card={option.card_gb}GiB", "training.device=cuda"]
    assert main.run(["plan", name, *card, *places, *shlex.split(option.settings)]) == errors.DONE, capsys.readouterr()


@pytest.mark.long
@pytest.mark.parametrize(("name", "option"), MANY)
def test_a_recipe_has_room_on_each_of_eight_cards(name, option, capsys):
    given = [f"devices={cards.EIGHT}", f"card={option.card_gb}GiB", "training.device=cuda"]
    assert main.run(["plan", name, *given, *shlex.split(option.settings)]) == errors.DONE, capsys.readouterr()
