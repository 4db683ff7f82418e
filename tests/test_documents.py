"""JSON of files that are damaged or forged: ValueError or a form that is not known, and never another error."""

import json
from pathlib import Path

import pytest
import torch

from daguerre import documents
from daguerre.errors import UserError
from daguerre.families.cascade.controlnets import files as controlnets
from daguerre.families.stable_diffusion.single_file import configs
from daguerre.foreign import converters, files
from daguerre.foreign.names.values import listed
from daguerre.models.weights import beside
from daguerre.models.weights import files as weight_files

PUBLIC = Path(__file__).parent / "support" / "public_configs"
ODD = ["1" + "0" * 400, "1" * 5000, "[" * 5000, "x", "", '"\\ud800', "{" * 900]


@pytest.mark.parametrize("text", [*ODD, b"\xff", '{"a": [-1' + "0" * 320 + "]}"])
def test_what_is_no_json_that_can_be_used_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        documents.parse(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[]", "a list"), ("1", "a number"), ("null", "null"), ("true", "true"), ('"x"', "a text"), ("1.5", "a number")],
)
def test_another_form_than_an_object_is_named_in_words(tmp_path, text, kind):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"^it holds {kind}, not a JSON object$"):
        documents.read_object(tmp_path / "a.json")


def test_numbers_that_fit_are_read():
    assert documents.parse("[1, -2, 1e3, 123456789012345678901234567890]") == [
        1,
        -2,
        1e3,
        123456789012345678901234567890,
    ]


@pytest.mark.parametrize("text", [*ODD, "null", "[]", "5", '{"format": []}', '{"format": {}}'])
def test_forms_of_scaled_weights_that_cannot_be_read_are_not_known(text):
    """In the header and next to the weight: the scale stays, and the weight is refused by its name later."""
    weight = {"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    for header in (f'{{"layers": {{"a": {text}}}}}', text, f'{{"layers": {text}}}'):
        beside.multiplied(dict(weight), {beside.METADATA: header})
    mark = torch.tensor(list(text.encode()), dtype=torch.uint8)
    assert "a.weight_scale" in beside.multiplied({**weight, "a.comfy_quant": mark}, {})


@pytest.mark.parametrize("text", ODD)
def test_blocks_in_a_header_that_cannot_be_read_are_the_usual_ones(text, tmp_path):
    assert controlnets._named(tmp_path / "a", {controlnets._BLOCKS: text}, 4, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("nested", ['{"a": ' * 200 + "1" + "}" * 200, '{"b": ' + "[" * 200 + "]" * 200 + "}"])
def test_configs_of_other_trainers_are_not_nested_deeper_than_recipes(nested, tmp_path):
    (tmp_path / "config.json").write_text(nested)
    with pytest.raises(UserError, match="nested too deeply: at most 50 levels"):
        files.read(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(f"[{nested}]")
    with pytest.raises(UserError, match="nested too deeply: at most 50 levels"):
        files._list(tmp_path / "config.json")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "1e400", "nan"])
def test_numbers_of_other_trainers_are_finite(value):
    public = json.loads((PUBLIC / "simpletuner_anima.json").read_text(encoding="utf-8"))
    with pytest.raises(UserError, match="finite number"):
        converters.converted("SimpleTuner", public["tree"] | {"resolution": value}, "a")


@pytest.mark.parametrize("config", [{"num_hidden_layers": 10**200}, {"x": {"layers_per_block": [2, 1e9]}}])
def test_counts_of_layers_without_an_end_are_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="more layers than any network has"):
        weight_files.read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="more layers"):
        configs.outline("text_encoder", config)
    documents.check_counts({"num_hidden_layers": 80, "vocab_size": 300_000, "layers": [1, "x", None, [3]]})


def test_a_list_of_words_without_its_quotes_is_read():
    assert listed("[conv_dim=4, conv_alpha=1]") == ["conv_dim=4", "conv_alpha=1"]
