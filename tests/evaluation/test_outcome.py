"""What came of an adapter: the formulas by hand and by simulation, the documents and pages, and a run of a LoRA."""

from __future__ import annotations

import itertools
import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_feature_networks
from adapter_runs import Place
from pydantic import ValidationError

from daguerre import errors
from daguerre.cli import main
from daguerre.cli.parts import output
from daguerre.evaluation.formulas import outcome
from daguerre.evaluation.formulas.outcome import Features
from daguerre.evaluation.outcome import prompts
from daguerre.evaluation.settings import CompareSettings
from daguerre.generation import generate
from daguerre.report import outcome as shown
from daguerre.report import page

WIDTH = 12


def rows(*vectors):
    return outcome.unit(np.array(vectors, dtype=np.float64), np.zeros(len(vectors[0])))


def test_numbers_by_hand():
    pictures = rows([1, 0, 0], [0, 1, 0], [0, 1, 1])  # the last two are cos 45 degrees apart
    same = np.array([[True, False, False], [False, True, True]])
    base = Features(rows([0, 0, 1], [0, 0, 1]), rows([1, 1, 1], [1, 1, 1]), rows([1, 0, 0], [0, 1, 0]))
    own = Features(rows([1, 0, 0], [0, 1, 0]), rows([0, 1, 0.1], [1, 1, 1]), rows([1, 0, 0], [1, 0, 0]))
    found, best = outcome.found(pictures, same, base, {"it": own}, scale=0.5)
    it = {name: (own.value, own.of_base) for name, own in found["it"].numbers.items()}
    half = 0.5**0.5
    assert it["likeness"] == pytest.approx(((1 + (1 + half) / 2) / 2, (0 + half / 2) / 2))
    near = 2 / 6**0.5  # of (1, 1, 1) to (0, 1, 1)
    # (0, 1, .1) is nearer to (0, 1, 0) than that is to (0, 1, 1); (1, 1, 1) is nearer to (0, 1, 1) than it to (0, 1, 0)
    assert it["nearest"] == pytest.approx(((1 / 1.01**0.5 + near) / 2, near))
    assert it["copies"] == (1.0, 1.0)
    assert it["drift"][0] == pytest.approx((0 + 0.5) / 2)
    assert it["balance"][0] == pytest.approx(2 * 1 * 0.5 / 1.5)  # the highest gain there is, and half is kept
    assert best == "it"
    assert found["it"].numbers["likeness"].interval is None, "two images"
    alone, _ = outcome.found(pictures[:1], same[:, :1] | True, base, {"it": own}, 0.5)
    assert alone["it"].numbers["copies"].value == 0, "one picture is near to no other"


def test_features_are_centred_and_unrelated_images_are_of_different_prompts():
    centred = outcome.unit(np.array([[3.0, 1.0], [1.0, 1.0]]), np.array([1.0, 1.0]))
    assert np.array_equal(centred, [[1, 0], [0, 0]])
    three = rows([1, 0], [1, 0], [0, 1])
    assert outcome.unrelated(three, ["a", "a", "b"]) == pytest.approx(0.5)
    assert outcome.unrelated(three, ["a", "b", "b"]) == pytest.approx(0.25)
    assert outcome.unrelated(three, ["a", "a", "a"]) == 0.5


def drawn(rng, count):
    """A base, and adapters that are the nearer to ten pictures the stronger they are, and drift the more."""
    pictures, own = PICTURES, np.arange(count) % 10
    noise = [rng.standard_normal((count, WIDTH)) for _ in range(4)]
    base = Features(*(outcome.unit(rows, np.zeros(WIDTH)) for rows in noise[:3]))
    each = {}
    for strength in (0.5, 1.0, 1.5):
        near = noise[0] + 3 * strength * pictures[own] + 0.3 * rng.standard_normal((count, WIDTH))
        moved = noise[2] + 0.5 * strength * rng.standard_normal((count, WIDTH))
        raw = near, noise[1] + strength * pictures[own], moved
        each[strength] = Features(*(outcome.unit(rows, np.zeros(WIDTH)) for rows in raw))
    same = np.zeros((count, 10), bool)
    same[np.arange(count), own] = True
    return same, base, each


PICTURES = outcome.unit(np.random.default_rng(1).standard_normal((10, WIDTH)), np.zeros(WIDTH))


def test_simulated_coverage_of_the_intervals():
    """Of 20 images, the fewest that have intervals: of the gain, the drift, and of what is behind the best balance."""
    rng, truth = np.random.default_rng(0), {}
    found, best = outcome.found(PICTURES, *drawn(rng, 20_000), 0.5)
    for key, one in found.items():
        gain = one.numbers["likeness"].value - one.numbers["likeness"].of_base
        nearer = one.numbers["nearest"].value - one.numbers["nearest"].of_base
        behind = found[best].numbers["balance"].value - one.numbers["balance"].value
        truth[key] = {"likeness": gain, "nearest": nearer, "drift": one.numbers["drift"].value, "behind": behind}
    held: dict[str, list[bool]] = {}
    for _ in range(150):
        found, own_best = outcome.found(PICTURES, *drawn(rng, 20), 0.5)
        for key, one in found.items():
            intervals = {name: own.interval for name, own in one.numbers.items() if name in truth[key]}
            if own_best == best and one.behind is not None:
                intervals["behind"] = one.behind
            for name, interval in intervals.items():
                held.setdefault(name, []).append(interval[0] <= truth[key][name] <= interval[1])
    shares = {name: np.mean(hits) for name, hits in held.items()}
    assert shares.keys() == {"likeness", "nearest", "drift", "behind"}
    assert all(0.9 <= share <= 0.99 for share in shares.values()), shares


def test_what_destroyed_the_base_is_never_the_best():
    """A mild adapter; one whose images of the base's prompts are those of other prompts, and one that draws mush, both
    like the pictures to the letter. The mild one is the best by its own gain, and alone nothing is."""
    rng, own = np.random.default_rng(2), np.arange(40) % 10
    same, base, each = drawn(rng, 40)
    scale = outcome.unrelated(base.base_ND, [str(i) for i in range(40)])
    mush = outcome.unit(rng.standard_normal((1, WIDTH)) + 0.1 * rng.standard_normal((40, WIDTH)), np.zeros(WIDTH))
    gone = {"others": np.roll(base.base_ND, 1, axis=0), "mush": mush}
    cells = {name: Features(PICTURES[own], PICTURES[own], rows) for name, rows in gone.items()}
    found, best = outcome.found(PICTURES, same, base, {"mild": each[0.5], **cells}, scale)
    assert {name: one.destroyed for name, one in found.items()} == {"mild": False, "others": True, "mush": True}
    assert best == "mild"
    alone, _ = outcome.found(PICTURES, same, base, {"mild": each[0.5]}, scale)
    assert found["mild"] == alone["mild"], "the gains of the others are no measure"
    assert [found[name].numbers["balance"].value for name in cells] == [0.0, 0.0]
    assert [found[name].behind for name in cells] == [None, None]
    assert outcome.found(PICTURES, same, base, {"base": base}, scale)[1] is None, "nothing was learnt"
    found, best = outcome.found(PICTURES, same, base, cells, scale)
    assert best is None
    assert all(one.destroyed for one in found.values())


def test_what_forgot_much_is_the_best_only_where_all_that_learnt_did():
    """The one that learnt most has the highest balance; half of the way to unrelated images is not kept."""
    _, base, _ = drawn(np.random.default_rng(3), 40)
    same, own = np.eye(10, dtype=bool)[np.arange(40) % 10], np.arange(40) % 10
    half = outcome.unit(base.base_ND + np.roll(base.base_ND, 1, axis=0), np.zeros(WIDTH))
    gentle = outcome.unit(base.base_ND + 0.1 * np.roll(base.base_ND, 1, axis=0), np.zeros(WIDTH))
    weak = outcome.unit(base.trained_ND + 0.4 * PICTURES[own], np.zeros(WIDTH))
    cells = {
        "strong": Features(PICTURES[own], PICTURES[own], half),
        "weak": Features(weak, base.new_ND, gentle),
    }
    found, best = outcome.found(PICTURES, same, base, cells, 0.5)
    balance = {name: one.numbers["balance"].value for name, one in found.items()}
    assert balance["strong"] > balance["weak"] > 0
    assert found["strong"].numbers["drift"].value > shown.MUCH * 0.5 > found["weak"].numbers["drift"].value
    assert best == "weak"
    assert outcome.found(PICTURES, same, base, {"strong": cells["strong"]}, 0.5)[1] == "strong"
    some = np.where((np.arange(40) % 7 == 0)[:, None], np.roll(base.base_ND, 1, axis=0), base.base_ND)
    scattered = {"scattered": Features(PICTURES[own], PICTURES[own], some)}
    found, best = outcome.found(PICTURES, same, base, cells | scattered, 0.5)
    drift = found["scattered"].numbers["drift"]
    assert drift.value < shown.MUCH * 0.5 < drift.interval[1], "it is not clear that it kept the base"
    assert found["scattered"].numbers["balance"].value > found["weak"].numbers["balance"].value
    assert best == "weak", "of which it is clear"
    assert outcome.found(PICTURES, same, base, scattered, 0.5)[1] == "scattered"


def test_a_page_names_what_destroyed_the_base():
    def cell(strength, drift, **more):
        numbers = {"drift": {"value": drift, "low": drift - 0.02, "high": drift + 0.02}}
        return {"step": 4, "strength": strength, "numbers": numbers, **more}

    mild, much = cell(0.5, 0.02), cell(0.7, 0.3, behind=[-0.1, 0.3])
    gone = cell(1.0, 0.49, destroyed=True)
    document = {"unrelated": 0.5, "cells": [mild, much, gone], "best": {"step": 4, "strength": 0.5}}
    first, kept, others, last, use = shown.lines(document)
    assert "checkpoint=step-00000004 format=adapters" in use
    assert "use='{ADAPTER: 0.5}'" in use
    assert first.endswith("strength 0.5. There:")
    assert others == "moved more than 20 % of the way: update 4, strength 0.7"
    near = cell(0.6, 0.03, behind=[-0.1, 0.3])
    document["cells"].append(near)
    assert "strength 0.5; not clearly behind: update 4, strength 0.6. There:" in shown.lines(document)[0]
    assert kept.startswith("it kept the base")
    assert last.startswith("destroyed the base, and not to be used: update 4, strength 1: images of")
    assert "update 4, strength 1, destroyed the base" in str(shown.section(document))
    none, last = shown.lines({"unrelated": 0.5, "cells": [mild, gone], "best": None})
    assert none == "no update and strength came nearer to the pictures of its captions and kept the base"
    assert last.startswith("destroyed the base")
    (line,) = shown.lines({"unrelated": 0.5, "cells": [gone, gone], "best": None})
    assert line.startswith("no update and strength is to be used: all destroyed the base: images of")
    (line,) = shown.lines({"unrelated": 0.5, "cells": [gone]})
    assert line.startswith("it destroyed the base: images of")
    assert "A lower rate" in line


def test_strengths_are_a_range_a_list_or_one():
    def of(value):
        return CompareSettings.model_validate({"strengths": value}).strengths

    assert of("0.4..1.2") == [0.4, 0.6, 0.8, 1.0, 1.2]
    assert of("0.5..1.5/3") == [0.5, 1.0, 1.5]
    assert of([1, 0.5, 1]) == [0.5, 1.0]
    assert of(0.8) == [0.8]
    assert of("1,0.5") == [0.5, 1.0]
    for odd in ("0..1", "a..b", "-1", "1,", "0,1", [], 0):
        with pytest.raises(ValidationError):
            of(odd)


RECIPE = """
run_name: lora
model: {family: KIND}
objective: {name: eps}
adapters: {style: {name: lora, rank: 4, alpha: 2.5}}
data: {source: folder, resolution: 16}
training: {duration: "2 steps", global_batch_size: 4}
optimizer: {learning_rate: 1e-2}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "1 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 1, prompts: [image 0, a cat]}
validation: {every: null, compared_images: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("outcome"), "sd", RECIPE)
    assert made.train("whole") == errors.DONE
    return made


def documents(run):
    return {path.parent.name: json.loads(path.read_text()) for path in run.glob("evaluations/compare-*/compare.json")}


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (0.02, 0.01, 0.03, "it kept the base: of the base's own prompts its images moved 4.0 % of the way"),
        (0.08, 0.06, 0.10, "it kept the base: of the base's own prompts its images moved 16.0 % of the way"),
        (0.08, 0.04, 0.12, "whether it kept the base is not clear: of the base's own prompts its images moved 16.0 %"),
        (0.4, 0.35, 0.45, "it forgot much: of the base's own prompts its images moved 80.0 % of the way"),
    ],
)
def test_what_was_forgotten_is_judged_by_its_interval(value, low, high, said):
    numbers = {"drift": {"value": value, "low": low, "high": high}}
    (line,) = shown.lines({"unrelated": 0.5, "cells": [{"step": 1, "strength": 1.0, "numbers": numbers}]})
    assert line.startswith(said)
    assert ("lower rate" in line) == ("kept the base:" not in line), "a way out where there may be something wrong"


@pytest.mark.parametrize(
    ("likeness", "nearest", "copies", "said"),
    [
        (0.1, 0.1, 0.0, "it learnt: "),
        (0.0, 0.1, 0.0, "it learnt what the pictures have in common, such as a style: "),
        (0.0, 0.1, 0.3, "whether it learnt is not clear: "),
        (0.0, 0.0, 0.0, "whether it learnt is not clear: "),
        (-0.1, 0.1, 0.0, "it went away from the pictures: "),
    ],
)
def test_a_style_is_learnt_where_new_prompts_come_nearer_without_copies(likeness, nearest, copies, said):
    gains = {"likeness": likeness, "nearest": nearest, "copies": copies}
    numbers = {
        name: {"value": 0.5 + gain, "base": 0.5, "low": gain - 0.05, "high": gain + 0.05}
        for name, gain in gains.items()
    }
    first, *_ = shown.lines({"cells": [{"step": 1, "strength": 1.0, "numbers": numbers}]})
    assert first.startswith(said)


def test_a_run_says_what_came_of_it_at_its_end(place, capsys):
    run = place.folder / "whole"
    (found,) = documents(run).values()
    (cell,) = found["cells"]
    assert (cell["step"], cell["strength"], found["images"], found["pictures"]) == (2, 1.0, 2, 13)
    assert found["prompts"]["new"]["origin"] == "held-out captions and sampling.prompts"
    assert found["prompts"]["base"]["origin"] == "general prompts"
    assert {name: "base" in own for name, own in cell["numbers"].items()} == {
        "likeness": True, "nearest": True, "copies": True, "drift": False,
    }  # fmt: skip
    assert 0 < cell["numbers"]["drift"]["value"] < 0.5
    text = (run / "report.html").read_text()
    assert "What came of it" in text
    assert "whether it learnt is not clear" in text, "two images have no interval"
    # Weights of the run are not moved by it: what is drawn again is equal to the bit.
    before = (run / "evaluations/compare-step-00000002/compare.json").read_bytes()
    assert place.train("whole") == errors.DONE
    assert (run / "evaluations/compare-step-00000002/compare.json").read_bytes() == before
    capsys.readouterr()
    assert place.train("none", "validation.compared_images=0", "training.duration=1 steps") == errors.DONE
    assert not documents(place.folder / "none")
    assert "without a table of results; validation.compared_images=20 gives one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (1, "stopped by SIGTERM and saved at step 1; run the same command to continue"),
        (2, "saved at step 2; all updates are made, and the same command makes what is left of 16 images"),
        (6, "saved at step 2; all updates are made, and the same command makes what is left of 16 images"),
    ],
)
def test_a_signal_ends_images_and_the_same_command_makes_them(place, capsys, monkeypatch, image, said):
    """A sample of the first save, of the last one, and an image of the comparison."""
    run, drawn, draw = place.folder / f"stopped-{image}", itertools.count(1), generate.generate_batch

    def signalled(*given):
        yield from draw(*given)
        if next(drawn) == image:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(generate, "generate_batch", signalled)
        assert place.train(run.name) == 128 + signal.SIGTERM
    assert said in capsys.readouterr().out
    assert place.train(run.name) == errors.DONE
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.png")}
    whole = place.folder / "whole"
    assert files == {str(path.relative_to(whole)): path.read_bytes() for path in whole.rglob("*.png")}
    assert documents(run).keys() == {"compare-step-00000002"}


def test_compare_draws_the_grid_and_goes_on(place, capsys):
    run = place.folder / "whole"
    given = ["compare", str(run), "num_images=2"]
    assert main.run([*given, "strengths=[0.5,1]"]) == errors.DONE, capsys.readouterr().err
    said = capsys.readouterr().out
    (name,) = (name for name in documents(run) if "step" not in name)
    found, folder = documents(run)[name], run / "evaluations" / name
    assert ("best balance of learning and keeping" in said) == (found["best"] is not None)
    assert ("no update and strength came nearer" in said) == (found["best"] is None)
    assert [(cell["step"], cell["strength"]) for cell in found["cells"]] == [(1, 0.5), (1, 1.0), (2, 0.5), (2, 1.0)]
    drifts = {(cell["step"], cell["strength"]): cell["numbers"]["drift"]["value"] for cell in found["cells"]}
    assert drifts[2, 0.5] < drifts[2, 1.0]
    text = (folder / "compare.html").read_text()
    assert text.count("<img") == 3 * 2 * 3, "three prompts, two updates, the base and two strengths"
    assert "http" not in text.replace("http-equiv", "")
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*.tar")}
    capsys.readouterr()
    assert main.run([*given, "strengths=[0.5,1,1.5]", "updates=[2]", "--json"]) == errors.DONE
    printed = output.printed.validate_json(capsys.readouterr().out)
    again = documents(run)[name]["cells"]
    assert printed.verb == "compare"
    assert [cell.model_dump(exclude_unset=True) for cell in printed.cells] == again
    assert [(cell["step"], cell["strength"]) for cell in again] == [(2, 0.5), (2, 1.0), (2, 1.5)]
    assert all(path.stat().st_mtime_ns == time for path, time in made.items()), "nothing is drawn twice"
    ended = documents(run)["compare-step-00000002"]["cells"][0]["numbers"]
    for number in ("likeness", "nearest", "copies", "drift"):  # the balance is one with the other strengths
        assert again[1]["numbers"][number]["value"] == pytest.approx(ended[number]["value"], abs=2e-3)
    for network, write in {"dinov2": tiny_feature_networks.dinov2, "clip": tiny_feature_networks.clip}.items():
        there = write(place.folder / network)
        assert main.run([*given, "updates=[2]", f"networks.{network}={there}"]) == errors.DONE
        assert documents(run)[name]["features"].startswith(network)
    assert all(path.stat().st_mtime_ns == time for path, time in made.items()), "images are looked at again"


def test_pictures_that_are_shown_again_count_once():
    images = np.stack([np.full((4, 4, 3), value, np.uint8) for value in (1, 2, 1, 3, 2)])
    source = SimpleNamespace(total=5, of=lambda ids: [images[i] for i in ids], texts=["a", "b", "c", "d", "e"])
    found = prompts.distinct(source)
    assert (found.total, found.texts, [own[0, 0, 0] for own in found.of(range(3))]) == (3, ["a", "b", "d"], [1, 2, 3])


def test_prompts_of_files_and_of_the_recipe(place):
    (place.folder / "new.txt").write_text("a dog\na bird\na hen\n")
    file = str(place.folder / "new.txt")
    found = prompts.lists(place.config(), 5, None, file, file)
    assert found.new.texts == ("a dog", "a bird", "a hen", "a dog", "a bird")
    assert found.base.texts == found.new.texts
    nothing_held_out = place.config("data.held_out_fraction=0")
    assert prompts.lists(nothing_held_out, 2).new == (("a cat", "a cat"), "sampling.prompts"), "image 0 is trained"
    with pytest.raises(errors.UserError, match="no new prompts"):
        prompts.lists(place.config("data.held_out_fraction=0", "sampling.prompts=[image 0]"), 2)


def test_what_cannot_be_compared_is_refused(place, capsys):
    run = str(place.folder / "whole")
    for given, words in {
        ("strengths=0",): "strengths",
        ("updates=[7]",): "updates: 7 is not saved; there are: 1, 2",
        ("source=other",): "source=other",
        ("networks.inception=x",): "inception",
        ("nonsense=1",): "nonsense",
    }.items():
        assert main.run(["compare", run, "num_images=2", *given]) == errors.REFUSED
        assert words in capsys.readouterr().err
    assert place.train("rotated", "adapters.style={name: lora, kind: boft, rank: 4}") == errors.DONE
    capsys.readouterr()
    assert main.run(["compare", str(place.folder / "rotated"), "strengths=0.5"]) == errors.REFUSED
    assert "has no strength but 0 and 1" in capsys.readouterr().err
    assert place.train("whole_net", "adapter.name=full") == errors.DONE
    assert not documents(place.folder / "whole_net")
    assert main.run(["compare", str(place.folder / "whole_net")]) == errors.REFUSED
    assert "nothing of this run can be:" in capsys.readouterr().err


def test_a_damaged_file_costs_its_part_of_the_page_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("run_name: mine\n")
    cell = '{"step": 1, "strength": 1, "numbers": {"drift": 3}}'
    texts = ['{"cells": [{"step": 1}], "time": "3"}', '{"cells": 3}', "[1]", "{", f'{{"time": "9", "cells": [{cell}]}}']
    for number, text in enumerate(texts):
        folder = tmp_path / "evaluations" / f"compare-{number}"
        folder.mkdir(parents=True)
        (folder / "compare.json").write_text(text)
        assert page.write(tmp_path).read_text()
    assert shown.lines({}) == []
