"""Recipe files: how they are found and read, and what is refused in them."""

import re
from pathlib import Path

import pytest
from quick_cases import chosen
from twins import left_to_users

from daguerre import trees, yaml_text
from daguerre.config import config as configs
from daguerre.config import merge, recipe, short_forms
from daguerre.errors import UserError


def write(folder: Path, text: str, name: str = "r.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: 1\na: 2", "line 2: .*duplicate key a"),
        ("a: [1", "line 2: not valid YAML"),
        ("a: {b: ???}", 'write "\\?\\?\\?" in quotes'),
        ("- 1", "a mapping of keys to values, this is a list"),
        ("1: 2", "the key 1 is a number, not text"),
        ("a: {true: 2}", "not text"),
        ("a: !!python/object/apply:os.system [ls]", "tag"),
        ("a: ${b", "no viable alternative"),
        ("extends: 3", "extends takes one"),
        ("extends: nowhere.yaml", "no recipe 'nowhere.yaml'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, word):
    with pytest.raises(UserError, match=word):
        recipe.layers(write(tmp_path, text))


def test_an_alias_bomb_is_refused(tmp_path):
    rows = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    rows += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(UserError, match="limit"):
        recipe.layers(write(tmp_path, "\n".join(rows)))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"r\.yaml is no text in UTF-8, as a recipe is: give a \.yaml file"):
        recipe.layers(str(tmp_path / "r.yaml"))


def test_extends_in_a_circle(tmp_path):
    write(tmp_path, "extends: b.yaml", "a.yaml")
    write(tmp_path, "extends: a.yaml", "b.yaml")
    with pytest.raises(UserError, match=re.escape("circle") + ".*a.yaml -> .*b.yaml -> .*a.yaml"):
        recipe.layers(str(tmp_path / "a.yaml"))


def test_extends_is_looked_up_beside_the_file_or_among_the_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "seed: 1", "base.yaml")
    name = write(tmp_path, "extends: sub/base.yaml\nrun_name: x")
    assert [layer.tree for layer in recipe.layers(name)] == [{"seed": 1}, {"run_name": "x"}]
    for shipped, path in recipe.shipped().items():
        assert recipe.layers(write(tmp_path, f"extends: {shipped}"))[-2].path == path


def test_a_recipe_that_is_not_there(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="without a config"):
        recipe.locate(str(tmp_path / "run"))
    with pytest.raises(UserError, match="Did you mean quickstart"):
        recipe.locate("quickstrat")
    with pytest.raises(UserError, match="no recipe given"):
        recipe.locate("")


def test_resolvers_of_the_environment_are_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "abc123")
    for text in ("${oc.env:SECRET_OF_MINE}", "${oc.decode:1}", "${oc.select:a}"):
        with pytest.raises(UserError, match="own paths only") as caught:
            yaml_text.resolve({"a": text}, {}, "r.yaml")
        assert "abc123" not in str(caught.value)


def test_what_is_missing_is_listed_once_and_taken_out():
    tree, missing = yaml_text.resolve({"a": "???", "b": "x ${a}", "c": {"d": "???", "e": 1}}, {}, "r.yaml")
    assert missing == ["a", "c.d"]
    assert tree == {"c": {"e": 1}}


SHIPPED = [*recipe.shipped()]
"""Of the quick tests, memory/test_plan_batches.py loads them all."""


@pytest.mark.parametrize("name", chosen(SHIPPED, lambda name: name in SHIPPED[::3]))
def test_every_shipped_recipe_loads_and_is_dumped_and_read_back(tmp_path, name):
    loaded = configs.load(name, left_to_users(name))
    assert loaded.notices == ()
    assert configs.load(write(tmp_path, configs.dump(loaded.config))).config == loaded.config


@pytest.mark.parametrize("name", recipe.shipped())
def test_a_shipped_recipe_has_no_short_forms_and_drops_only_what_has_no_effect_from_another(name):
    notices: list[str] = []
    tree: trees.Tree = {}
    for layer in recipe.layers(name):
        assert short_forms.layer({}, layer.tree, []) == layer.tree
        tree = merge.lay_over(configs.Config, tree, layer.tree, notices, [])
    assert all("dropped out" in notice for notice in notices)


@pytest.mark.parametrize("name", [name for name in recipe.shipped() if name.endswith("_lora")])
def test_a_recipe_of_a_lora_draws_what_its_data_show(name):
    """Its pictures are mostly the user's: a prompt is one of their captions, or made of one that the recipe gives."""
    tree: trees.Tree = {}
    for layer in recipe.layers(name):
        tree = trees.merge(tree, layer.tree)
    prompts = trees.get(tree, "sampling.prompts")
    assert prompts in (trees.ABSENT, None) or all("${data.sources." in prompt for prompt in prompts)


@pytest.mark.parametrize("none", ["trackers: null", "trackers: []", "trackers: {}", "tensorboard: false"])
def test_a_config_without_trackers_is_read_back_without_any(tmp_path, none):
    loaded = configs.load(write(tmp_path, f"extends: quickstart\nlogging: {{{none}}}\n"))
    assert loaded.config.logging.trackers == {}
    assert configs.load(write(tmp_path, configs.dump(loaded.config))).config == loaded.config


@pytest.mark.parametrize("given", ["[wandb]", "[]", "[tensorboard, wandb]"])
def test_the_config_of_a_run_has_its_trackers_and_no_others(tmp_path, given):
    loaded = configs.load("quickstart", [f"logging.trackers={given}"])
    (tmp_path / "config.yaml").write_text(configs.dump(loaded.config))
    assert configs.load(str(tmp_path)).config == loaded.config


FLAT = """
extends: sd15
data: {source: folder, path: dogs, captions: {text: "a dog in ${data.path}"}, resolution: 96}
adapter: {name: lora, rank: 3}
logging: {trackers: [wandb]}
"""
MAPPINGS = """
extends: sd15
data:
  resolution: 96
  sources: {images: {source: folder, path: dogs, captions: {text: "a dog in ${data.sources.images.path}"}}}
adapters: {full: null, lora: {rank: 3}}
logging: {trackers: {tensorboard: null, wandb: {}}}
"""


def test_a_file_in_short_forms_is_read_as_a_command_line_is(tmp_path):
    flat, mappings = (configs.load(write(tmp_path, text)).config for text in (FLAT, MAPPINGS))
    given = ["data.source=folder", "data.path=dogs", "data.captions.text=a dog in dogs", "data.resolution=96"]
    line = configs.load("sd15", [*given, "adapter=lora", "adapter.rank=3", "trackers=[wandb]"]).config
    assert flat == mappings == line
    assert flat.data.sources["images"].captions.text == "a dog in dogs"


def test_a_short_form_that_cannot_be_is_refused_in_a_file_as_on_a_command_line(tmp_path):
    text = "extends: sd15\nadapters: {full: null, a: {name: lora}, b: {name: lora}}\n"
    for more, said in (
        ("adapter: {rank: 8}", "write adapters.NAME, with NAME one of a, b"),
        ("model: {train_unet: true}", "belongs to the adapter `full`, but the recipe has a, b"),
    ):
        with pytest.raises(UserError, match=said):
            configs.load(write(tmp_path, text + more))


def test_a_file_that_takes_all_adapters_out_is_refused_in_words(tmp_path):
    text = "extends: sd15\nadapters: {full: null}\ndata: {source: folder, path: dogs}\nadapter: {rank: 3}\n"
    with pytest.raises(UserError, match=r"adapters\.adapter\.name"):
        configs.load(write(tmp_path, text))


SMALL = [
    name
    for name, path in recipe.shipped().items()
    if "images:\n      source: shapes\n" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", SMALL)
def test_small_recipes_keep_their_size_on_other_data(name, tmp_path):
    """The built-in images have one size whatever a recipe says; a folder that replaces them has 512 px by default."""
    given = ["data.source=folder", f"data.path={tmp_path}"]
    assert configs.load(name, given).config.data.resolution == 64
