"""The loss ledger: each trained picture against the others at its noise level."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import served
import tiny_runs
from PIL import Image

from daguerre import errors
from daguerre.cli import main
from daguerre.evaluation import ledger, losses
from daguerre.report import page

LOSSES = {
    "raw": np.array([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 5.0, 4.0], [2.0, 5.0, 1.0, 4.0]]),
    "ema": np.array([[0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 3.0], [0.0, 0.0, 3.0, 0.0]]),
}


def measured(monkeypatch, size=3):
    names = [losses.Seen(name, f"a {name}") for name in ("cat", "dog", "hen")]
    monkeypatch.setattr(losses, "each_sample", lambda parts, dataset, quantiles, count: (names, LOSSES[parts]))
    by = {weights: lambda weights=weights: weights for weights in LOSSES}
    return ledger.measured(by, lambda parts: SimpleNamespace(size=size), 120)


def test_losses_are_shown_minus_the_mean_at_their_noise(monkeypatch, tmp_path):
    found = measured(monkeypatch)
    assert found["means"] == {"raw": [2.0, 3.0, 3.0, 4.0], "ema": [1.0, 0.0, 1.0, 1.0]}
    assert [one["name"] for one in found["pictures"]] == ["dog", "hen", "cat"]  # by the averaged weights
    assert [one["score"] for one in found["pictures"]] == [0.75, 0.0, -0.75]
    dog = found["pictures"][0]
    assert dog["raw"] == [1.0, -1.0, 2.0, 0.0]
    assert dog["ema"] == [2.0, 0.0, -1.0, 2.0]
    assert sum(one["score"] for one in found["pictures"]) == 0
    table, document = ledger.write(tmp_path / "ledger-step-00000120", found)
    assert json.loads(document.read_text()) == found
    rows = [*csv.reader(table.read_text().splitlines())]
    assert rows[0][:3] == ["name", "score", "raw_0.2"]
    assert rows[1] == ["dog", "0.75", "1", "-1", "2", "0", "2", "0", "-1", "2", "a dog"]
    many = {**found, "pictures": [*found["pictures"]] * 1000}
    (_, document) = ledger.write(tmp_path / "many", many)
    assert json.loads(document.read_text())["pictures"] == [*many["pictures"][:100], *many["pictures"][-100:]]
    assert any("+0.7500  dog" in line for line in ledger.lines(found))


def test_an_endless_source_is_refused(monkeypatch):
    with pytest.raises(errors.UserError, match="endless"):
        measured(monkeypatch, None)


def test_the_report_shows_both_ends_and_bears_what_is_damaged(monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("run_name: mine\n")
    ledger.write(tmp_path / "evaluations" / "ledger-step-00000120", measured(monkeypatch))
    for name, text in {"a": "[1]", "b": '{"step": 999, "pictures": [1]}', "c": "{"}.items():
        folder = tmp_path / "evaluations" / f"ledger-{name}"
        folder.mkdir()
        (folder / ledger.NAME).write_text(text)
    text = page.write(tmp_path).read_text()
    assert "Loss ledger" in text
    assert "step 120" in text
    assert text.index("a dog") < text.index("a cat")
    assert "mean of all 3 " in text
    with served.asked(tmp_path.parent) as client:  # the live page, too
        text = client.get(served.address(tmp_path.parent, tmp_path.name)).text
    assert text.index("Loss ledger") < text.index("a dog") < text.index("a cat")


@pytest.mark.long
def test_of_a_run(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(8):
        Image.new("RGB", (64, 64), (number * 20, 90, 200)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    given = ["data.source=folder", f"data.path={folder}", "data.resolution=64", "data.held_out_fraction=0",
             "validation.every=null", "checkpoint.export=false", "sampling.num_images=0"]  # fmt: skip
    words = tiny_runs.arguments(tmp_path, *given, "training.duration=3 steps")
    words = [word for word in words if "validation.num" not in word and "checked_prompts" not in word]
    assert main.run(words) == errors.DONE, capsys.readouterr().err
    run = str(tmp_path / "tiny")
    assert main.run(["evaluate", run, "ledger=true", "metrics=[fid]"]) == errors.REFUSED
    assert main.run(["evaluate", run, "ledger=true"]) == errors.DONE, capsys.readouterr().err
    (first,) = (tmp_path / "tiny" / "evaluations").glob("ledger-*/ledger.json")
    before = first.read_bytes()
    found = json.loads(before)
    assert {one["name"] for one in found["pictures"]} == {f"{number}.png" for number in range(8)}
    for weights, means in found["means"].items():
        assert len(means) == 4
        assert np.allclose(np.mean([one[weights] for one in found["pictures"]], axis=0), 0, atol=1e-9)
    assert main.run(["evaluate", run, "ledger=true"]) == errors.DONE
    assert first.read_bytes() == before
