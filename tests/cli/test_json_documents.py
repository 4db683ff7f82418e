"""`--json`: every document has the form that docs/output.schema.json says, and nothing else is on stdout."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from daguerre import __version__, errors
from daguerre.cli import main
from daguerre.cli.parts import output
from daguerre.config import recipe
from daguerre.evaluation import blocks, results

SCHEMA = Path(__file__).parents[2] / "docs" / "output.schema.json"


@pytest.fixture
def printed(capsys):
    """The document of a command, which has to have its form."""

    def found(*words: str, code: int = errors.DONE):
        assert main.run([*words, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        output.printed.validate_python(document)
        assert (document["daguerre"], document["verb"]) == (__version__, words[0])
        return document

    return found


def test_the_schema_in_the_docs_is_that_of_what_is_printed():
    """After a change: python -c 'from daguerre.cli.parts import output; print(output.schema())' writes it again."""
    assert SCHEMA.read_text(encoding="utf-8") == f"{output.schema()}\n"


def test_recipes(printed):
    every = printed("recipes")["recipes"]
    assert [each["name"] for each in every] == [*recipe.shipped()]
    cards = {each["name"]: each["cards"] for each in every}
    assert cards["anima"][0] == {"card_gb": 32, "settings": ""}
    (one,) = printed("recipes", "quickstart_lora")["recipes"]
    assert one["settings"]["model"]["family"]  # of what it extends
    assert one["settings"]["validation"]["every"] is None
    printed("recipes", "--cards", code=errors.REFUSED)


def test_doctor_says_as_much_as_to_people(printed, capsys):
    code = main.run(["doctor"])
    text = capsys.readouterr().out
    found = printed("doctor", code=code)["findings"]
    assert len(found) == sum(line.startswith(("  ok  ", "  --  ", "  !!  ")) for line in text.splitlines())
    assert all(f"{each['what']}" in text for each in found)
    assert ("broken" in {each["status"] for each in found}) == (code == errors.FAILED)


@pytest.mark.long
def test_plan(printed):
    """tests/memory has more of them."""
    document = printed("plan", "quickstart", "--all")
    assert sum(each["bytes_per_device"].get("frozen", 0) for each in document["parameters"]) > 0
    assert document["host"]["updates"]


def test_refusals(printed):
    error = printed("plan", "quickstart", "trainin=3", "sed=4", code=errors.REFUSED)["error"]
    assert [each["path"] for each in error["problems"]] == ["trainin", "sed"]
    assert printed("evaluate", "absent", "metrics=[psnr]", code=errors.REFUSED)["error"]["code"] in (
        "missing",
        "unknown",
    )
    error = printed("recipes", "https://user:geheim@host/a?sig=geheim", code=errors.REFUSED)["error"]
    assert "geheim" not in str(error)


def test_evaluations(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, value in (("a", 100), ("b", 110)):
        (tmp_path / folder).mkdir()
        for name in range(2):
            Image.new("RGB", (64, 64), (value, value, value)).save(tmp_path / folder / f"{name}.png")
    words = ["evaluate", "a", "metrics=[psnr]", "against=b", "crop_px=64"]
    (one,) = printed(*words)["evaluations"]
    ((name, table),) = one["tables"].items()
    assert (one["complete"], table["count"]) == (True, 2)
    assert table["rows"][0]["value"] == pytest.approx(20 * np.log10(255 / 10))
    written = json.loads((tmp_path / one["folder"] / results.NAME).read_text())["tables"][name]
    assert [row["value"] for row in written["rows"]] == [row["value"] for row in table["rows"]]
    printed(*words, "--follow", code=errors.REFUSED)


def test_comparisons(printed, tmp_path):
    values = np.random.default_rng(3).normal(20, 1, 30)
    for folder, more in (("a", 0), ("b", 2)):
        (tmp_path / folder).mkdir()
        blocks.save(tmp_path / folder / "psnr.npy", values + more)
        row = {"name": "psnr", "value": float(values.mean()) + more, "share": False, "better": "higher"}
        table = {"count": 30, "rows": [row], "made_with": {"settings": {"name": "psnr"}}, "places": {}}
        document = {"protocol": {"images": 30, "step": 1}, "tables": {"psnr": table}}
        (tmp_path / folder / results.NAME).write_text(json.dumps(document))
    found = printed("evaluate", str(tmp_path / "a"), str(tmp_path / "b"))
    (row,) = found["tables"]["psnr"]["rows"]
    assert (row["verdict"], row["b"] - row["a"], row["low"]) == ("B is better", pytest.approx(2), pytest.approx(2))
    assert (found["images"], found["not_compared"]) == (30, [])
