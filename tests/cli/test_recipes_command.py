"""`daguerre recipes`: list, print, template, schema."""

import json

import pytest

from daguerre import plugins
from daguerre.cli import recipes
from daguerre.config import config as configs
from daguerre.config import fields, merge, recipe
from daguerre.config.config import Config
from daguerre.config.fields import Leaf
from daguerre.config.short_forms import MAPPINGS


def test_the_list_names_every_recipe_with_the_head_of_its_file(capsys):
    assert recipes.run([]) == 0
    text = capsys.readouterr().out
    for name, path in recipe.shipped().items():
        assert name in text
        assert recipes.header(path)[0] in text


def test_a_recipe_is_printed_as_it_is(capsys):
    for name, path in recipe.shipped().items():
        assert recipes.run([name]) == 0
        assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_header_ends_at_the_first_empty_comment(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("# One line.\n# Two.\n#\n# Later.\nrun_name: x\n")
    assert recipes.header(path) == ["One line.", "Two."]


def test_a_filled_in_template_is_a_config_of_defaults(tmp_path, capsys):
    assert recipes.run(["--template", "data=shapes", "objective=flow"]) == 0
    text = capsys.readouterr().out
    assert "# learning_rate: 0.0001" in text
    assert text.count("???") == 3
    filled = text.replace("duration: ???", "duration: 3 steps").replace("???", "x")
    (tmp_path / "r.yaml").write_text(filled, encoding="utf-8")
    config = configs.load(str(tmp_path / "r.yaml"), ["global_batch_size=2"]).config
    plain = "run_name: x\nmodel: {family: sd, pretrained_model_name_or_path: x}\nobjective: {name: flow}\n"
    plain += "data: {source: shapes}\ntraining: {duration: 3 steps, global_batch_size: 2}\n"
    (tmp_path / "plain.yaml").write_text(plain, encoding="utf-8")
    assert config == configs.load(str(tmp_path / "plain.yaml")).config


def test_the_template_shows_every_setting(capsys):
    recipes.run(["--template", "data=shapes"])
    lines = [line.strip().removeprefix("# ") for line in capsys.readouterr().out.splitlines()]
    tree = {"model": {"family": "sd"}, "data": {"source": "shapes"}, "objective": {"name": "v"}}
    for leaf in merge.known(Config, tree).values():
        assert any(line.startswith(f"{leaf.path.rpartition('.')[2]}:") for line in lines), leaf.path


def test_the_schema_documents_every_setting_of_every_plugin(capsys):
    assert recipes.run(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "required" not in schema
    assert "extends" in schema["properties"]
    for section, plugin in fields.plugin_sections(Config).items():
        alternatives = [resolved(schema, item) for item in schema["properties"][section]["anyOf"]]
        assert [item["properties"][plugin.key]["const"] for item in alternatives] == list(plugins.names(plugin.kind))
        for item in alternatives:
            for name, field in item["properties"].items():
                assert "description" in field or "$ref" in field, (section, name)
    for mapping, key in MAPPINGS.items():
        members = [resolved(schema, item) for item in find(schema, mapping)["additionalProperties"]["anyOf"]][:-1]
        kinds = [item["properties"][key]["const"] for item in members]
        assert kinds == list(plugins.names(mapping.rpartition(".")[2]))
    for leaf in fields.walk(Config):
        if isinstance(leaf, Leaf) and leaf.path.partition(".")[0] not in {*fields.plugin_sections(Config), "data"}:
            assert find(schema, leaf.path)["description"]


def resolved(schema: dict, item: dict) -> dict:
    return schema["$defs"][item["$ref"].rpartition("/")[2]] if "$ref" in item else item


def find(schema: dict, path: str) -> dict:
    item = schema
    for name in path.split("."):
        item = resolved(schema, item)["properties"][name]
    return item


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nothing"], "no recipe 'nothing'"),
        (["--template", "objective=flw"], "Did you mean 'flow'"),
        (["--template", "sampler=x"], "takes model=NAME"),
        (["--template", "--schema"], "at a time"),
        (["quickstart", "seed=1"], "only --template"),
        (["--shema"], "needs a value"),
    ],
)
def test_requests_that_make_no_sense(arguments, word):
    with pytest.raises(ValueError, match=word):
        recipes.run(arguments)
