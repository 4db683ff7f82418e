"""The page stands alone, is sound HTML, lets no text of the run become markup, and says the numbers of the files."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import fake_run
import numpy as np
import pytest
from PIL import Image

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.report import page
from daguerre.report.html import element, when
from daguerre.tracking.sinks import MetricsFile, read_metrics

HOSTILE = "<script>alert(1)</script><img src=http://evil.example/x onerror='alert(2)'>\"&amp;</title>"
VOID = {"meta", "img", "br", "line", "path", "circle", "rect"}
LINKS = {"src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"}


class Page(HTMLParser):
    """Parses a page strictly: tags balance, nothing points outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)

    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


def sound(folder: Path) -> Page:
    """The parsed page of a run folder, after the checks that every page must pass."""
    text = page.render(folder)
    parsed = Page(text)
    assert len(text) < 3_000_000
    for tag, attributes in parsed.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form"}
        assert not [name for name in attributes if name.startswith("on")]
        for name in LINKS & set(attributes):
            assert attributes[name].startswith("data:image/"), (tag, name)
        assert "url(" not in (attributes.get("style") or "")
    assert "@import" not in text
    assert "url(" not in text
    policies = [a["content"] for t, a in parsed.tags if t == "meta" and a.get("http-equiv")]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policies[0].split("script-src", 1)[1]
    return parsed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_run.write_run(tmp_path / "quickstart", steps=500, saves=3)


def test_a_finished_run_tells_its_story(folder: Path) -> None:
    parsed = sound(folder)
    words = parsed.words()
    assert "quickstart Finished" in words
    assert "A text-to-image model from scratch" in words
    assert "was trained on shapes with v-prediction: 16,000 samples in 500 updates" in words
    assert "2 cores of Example CPU @ 2.40GHz" in words
    assert "3.71M + 1.2M frozen" in words
    assert "background 99.5 % 95.0 % 98.0 % aim reached" in words
    assert "size 75.5 % 80.0 % 90.0 % below must" in words
    assert "200 images, step 3,000" in words
    assert "not an image left out 3 holiday/notes.txt holiday/a.jpg" in words
    assert "loss or gradient not finite update skipped 2" in words
    assert "a small green star on a white background seed 1" in words
    assert "model: family: sd" in words
    assert "packages.torch 2.13.0" in words
    assert parsed.count("svg") == 7
    assert parsed.count("img") == 12


def test_a_run_that_reads_a_cache_says_so(folder: Path) -> None:
    path = folder / "environment.json"
    told = {"place": "s3://bucket/cache", "images": "images-0123", "texts": "texts-4567"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cache": told}))
    words = sound(folder).words()
    assert "was trained on shapes (images and captions from a cache) with v-prediction" in words
    assert "cache.place s3://bucket/cache" in words


def test_the_numbers_are_those_of_the_metrics(folder: Path) -> None:
    lines = read_metrics(folder / "metrics" / "metrics.jsonl")
    parsed = sound(folder)
    documents = [json.loads(text) for text in parsed.scripts if text.startswith("{")]
    by_name = {series["name"]: series for document in documents for series in document["series"]}
    for name, metric in {"rate": "learning/current_learning_rate", "samples/s": "perf/samples_per_second"}.items():
        pairs = [(line["step"], line[metric]) for line in lines if metric in line]
        assert by_name[name]["xs"] == [step for step, _ in pairs]
        assert by_name[name]["ys"] == pytest.approx([value for _, value in pairs], rel=1e-5)
    levels = [line for line in lines if "validation/loss" in line]
    assert by_name["cleanest"]["ys"] == pytest.approx([v["validation/loss_level_0"] for v in levels], rel=1e-5)
    assert by_name["noisiest"]["ys"] == pytest.approx([v["validation/loss_level_7"] for v in levels], rel=1e-5)
    assert f"Validation loss {levels[-1]['validation/loss']:.4g}" in parsed.words()
    seconds = sum(10 * line["perf/step_time_seconds"] for line in lines if "perf/step_time_seconds" in line)
    assert f"Training time {seconds:.0f} s" in parsed.words()


def test_nothing_but_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_name: fresh\n", encoding="utf-8")
    words = sound(tmp_path).words()
    assert "fresh State unknown" in words
    assert "no update yet" in words
    for none in ("No numbers yet", "No images yet", "Nothing was evaluated yet", "Nothing is known yet"):
        assert none in words


def test_a_run_that_draws_nothing_has_no_place_for_images(tmp_path: Path) -> None:
    """An autoencoder: its samples have no noise, so one curve of the loss is all there is."""
    (tmp_path / "config.yaml").write_text("run_name: fresh\nsampling: {num_images: 0}\n", encoding="utf-8")
    file = MetricsFile(tmp_path / "metrics" / "metrics.jsonl")
    for step in (10, 20):
        file.write(step, 32 * step, {"learning/loss": 0.5, "learning/loss_quartile_0": 0.5})
    file.close()
    words = sound(tmp_path).words()
    assert "images yet" not in words
    assert "noise quartile" not in words


def test_one_line_of_metrics_is_a_dot(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics" / "metrics.jsonl")
    file.write(10, 320, {"learning/loss": 0.5, "learning/nonfinite_steps": 0, "learning/current_learning_rate": 0.0})
    file.close()
    parsed = sound(tmp_path)
    assert parsed.count("svg") == 2
    assert parsed.count("circle") == 3
    assert "Every update was finite." in parsed.words()


@pytest.mark.parametrize(("speed", "shown"), [(0.523, "0.52"), (9.871, "9.87"), (1234.6, "1,235")])
def test_a_slow_run_has_a_speed(speed: float, shown: str, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics" / "metrics.jsonl")
    file.write(10, 320, {"perf/samples_per_second": speed})
    file.close()
    assert f"Speed {shown} samples/s, median" in sound(tmp_path).words()


def test_thousands_of_lines_keep_the_page_small_and_the_spike(tmp_path: Path) -> None:
    dice = random.Random(1)
    file = MetricsFile(tmp_path / "metrics" / "metrics.jsonl")
    for step in range(1, 6001):
        file.write(step, step, {"learning/loss": 77.0 if step == 4321 else 1 + dice.random()})
    file.close()
    parsed = sound(tmp_path)
    [document] = [json.loads(text) for text in parsed.scripts if text.startswith("{")]
    raw = document["series"][0]
    assert 300 <= len(raw["xs"]) <= 400
    assert dict(zip(raw["xs"], raw["ys"], strict=True))[4321] == 77.0
    assert (raw["xs"][0], raw["xs"][-1]) == (1, 6000)


def test_non_finite_numbers_draw_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics" / "metrics.jsonl")
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 0.5], 1):
        file.write(step, step, {"learning/loss": loss, "learning/gradient_norm": float("nan")})
    file.close()
    parsed = sound(tmp_path)
    assert parsed.count("svg") == 1
    assert not [a for _, a in parsed.tags if "nan" in (a.get("d") or "") or "inf" in (a.get("d") or "")]
    assert "learning/gradient_norm nan 4" in parsed.words()


@pytest.mark.parametrize(
    ("state", "held", "said"),
    [
        ("failed", False, "Failed"),
        ("saved", False, "Saved, not finished"),
        ("running", False, "Interrupted"),
        ("running", True, "Training now"),
        ("saved", True, "Training now"),  # by a process that holds the folder no more
    ],
)
def test_states(folder: Path, state: str, held: bool, said: str) -> None:
    fake_run.write_status(folder, state, 500, reason="5 updates in a row were not finite" if state == "failed" else "")
    if held:
        with RunFolder(folder).hold():
            words = sound(folder).words()
    else:
        words = sound(folder).words()
    assert f"quickstart {said}" in words
    assert ("5 updates in a row were not finite" in words) is (state == "failed")
    assert ("to continue from the last save" in words) is (said == "Interrupted")
    assert "500 of 3,000" in words


def test_what_a_process_says_last_counts_while_it_still_holds_the_folder(folder: Path) -> None:
    """It makes the report before it ends."""
    with RunFolder(folder).hold() as held:
        held.write_status("finished", step=500, samples=4000, total_steps=500)
        assert "quickstart Finished" in sound(folder).words()


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=1)
    (folder / "config.yaml").write_text(json.dumps({"run_name": HOSTILE, "description": HOSTILE}), encoding="utf-8")
    fake_run.write_status(folder, HOSTILE, 20, reason=HOSTILE)
    fake_run.document(folder, "data.json", {"skipped": {HOSTILE: {"count": 1, "examples": [HOSTILE]}}})
    fake_run.document(folder, "environment.json", {HOSTILE: HOSTILE, "cpu": {"model": HOSTILE}})
    fake_run.document(folder, "evaluation.json", {HOSTILE: {"rows": [{"name": HOSTILE, "value": 0.5}]}})
    listing = folder / "samples" / "step-00000020" / "samples.json"
    entries = [
        entry | {"prompt": HOSTILE, "seed": HOSTILE, "sampler": HOSTILE} for entry in json.loads(listing.read_text())
    ]
    listing.write_text(json.dumps(entries), encoding="utf-8")
    file = MetricsFile(folder / "metrics" / "metrics.jsonl")
    file.write(30, 960, {f"evaluation/m/{HOSTILE}": 0.5})
    file.write(40, 960, {f"evaluation/m/{HOSTILE}": 0.6, f"validation/loss_level_{HOSTILE}": 1.0})
    file.close()
    parsed = sound(folder)
    assert parsed.words().count("<script>alert(1)</script>") >= 9
    assert not [s for s in parsed.scripts if "alert" in s and not s.startswith("{")]
    assert len([s for s in parsed.scripts if not s.startswith("{")]) == 1


def test_a_sweep_is_drawn_from_one_guidance_scale_to_the_next_for_each_protocol(tmp_path: Path) -> None:
    """A CLIP score that falls again does not change the order, and each number of images has its own line."""
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=1)
    for images in (100, 200):
        for scale, score, fid in ((1.5, 20.0, 9.0), (3.0, 30.0, 5.0), (8.0, 25.0, 7.0)):
            place = folder / "evaluations" / f"step-00000020-{images}-{scale}"
            place.mkdir(parents=True)
            values = {"fid-x": fid + images, "clip_score-x": score, HOSTILE: 1.0}
            tables = {
                name: {"count": images, "rows": [{"name": "value", "value": value, "share": False}]}
                for name, value in values.items()
            }
            protocol = {"step": 20, "images": images, "guidance_scale": scale, "sampler": HOSTILE}
            fake_run.document(place, "result.json", {"protocol": protocol, "tables": tables})
    parsed = sound(folder)
    assert "fid-x over CLIP score labels: guidance scale" in parsed.words()
    (chart,) = (json.loads(script) for script in parsed.scripts if '"over":"CLIP score"' in script)
    assert [one["xs"] for one in chart["series"]] == [[20, 25, 30]] * 2, "in order for the pointer"
    assert {tuple(one["ys"]) for one in chart["series"]} == {(109, 107, 105), (209, 207, 205)}
    assert all(name in parsed.words() for name in ("100-images-guidance-1.5-", "200-images-guidance-8-"))
    label = "fid-x over CLIP score: curve over CLIP score"
    at = next(i for i, (tag, own) in enumerate(parsed.tags) if tag == "svg" and own["aria-label"] == label)
    lines = [own["d"] or "" for tag, own in parsed.tags[at:] if tag == "path"][:2]
    assert len(lines) == 2
    for line in lines:
        xs = [float(pair.split()[0]) for pair in line[1:].split("L")]
        assert xs[0] < xs[2] < xs[1], "from 1.5 to 3 to 8"
    assert " 1.5 3 8 1.5 3 8 " in parsed.words()


def test_must_and_aim_are_explained_where_there_are_any(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=1)
    explained = "Must is the least that a run of this recipe has to reach"
    said = Page(page.write(folder).read_text(encoding="utf-8")).words()
    assert explained in said
    assert "Aim is what a good run reaches" in said
    row = {"name": "right", "value": 0.5}
    fake_run.document(folder, "evaluation.json", {"mine": {"rows": [{**row, "must": 0.4}]}})
    written = page.write(folder).read_text(encoding="utf-8")
    said = Page(written).words()
    assert explained in said
    assert "must reached" in said
    assert "Aim" not in said
    assert '<td class="good">must reached' in written, "there is nothing more to reach"
    fake_run.document(folder, "evaluation.json", {"mine": {"rows": [row]}})
    assert explained not in Page(page.write(folder).read_text(encoding="utf-8")).words()


@pytest.mark.parametrize("gpus", [True, 3, "x", {"a": 1}, [None]])
def test_gpus_that_are_no_list_are_none(tmp_path: Path, gpus: object) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=0)
    fake_run.document(folder, "environment.json", {"gpus": gpus})
    assert sound(folder).count("svg") == 6


@pytest.mark.parametrize("name", ["status.json", "environment.json", "data.json", "evaluation.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"", b"[1, 2", b"\xff\xfe\x00", b"[]", b"3"])
def test_a_damaged_file_costs_its_own_part(tmp_path: Path, name: str, content: bytes) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=0)
    (folder / name).write_bytes(content)
    parsed = sound(folder)
    assert parsed.count("svg") == 6
    if name != "config.yaml" or content in (b"[1, 2", b"\xff\xfe\x00"):
        assert name in parsed.words()


def test_a_torn_last_line_and_a_damaged_one(folder: Path) -> None:
    path = folder / "metrics" / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + b'{"step": 510, "sam')
    assert "Not everything" not in sound(folder).words()
    path.write_bytes(b"garbage\n" + content)
    words = sound(folder).words()
    assert "metrics.jsonl: cannot be read" in words
    assert "16,000 samples" in words


@pytest.mark.parametrize("seed", [[], {"a": 1}, "x"])
def test_a_seed_that_is_no_number_is_none(tmp_path: Path, seed: object) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=0)
    place = folder / "samples" / "step-00000020"
    place.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(place / "000.png")
    (place / "samples.json").write_text(json.dumps([{"file": "000.png", "prompt": "a cat", "seed": seed}]))
    assert "a cat" in sound(folder).words()


def test_images_that_are_missing_broken_or_elsewhere(folder: Path) -> None:
    newest = folder / "samples" / "step-00000500"
    (newest / "000.png").unlink()
    (newest / "001.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (newest / "002.png").write_bytes(b"GIF89a")
    secret = folder.parent / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    listing = newest / "samples.json"
    entries = [*json.loads(listing.read_text()), {"file": "../../../secret.png", "prompt": "a secret"}, 7]
    listing.write_text(json.dumps(entries), encoding="utf-8")
    parsed = sound(folder)
    assert parsed.words().count("cannot be read") == 3
    assert "a secret" not in parsed.words()
    assert "an entry names no image of its folder" in parsed.words()


@pytest.mark.long
def test_large_images_are_made_small(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "run", steps=20, saves=0)
    noise = np.random.default_rng(0)
    for step in range(1, 12):
        place = folder / "samples" / f"step-{step:08d}"
        place.mkdir(parents=True)
        entries = []
        for i in range(14):
            if i == 0 or step > 9:
                Image.fromarray(noise.integers(0, 256, (512, 512, 3), dtype=np.uint8)).save(place / f"{i}.jpg")
            entries.append({"file": f"{i}.jpg", "prompt": f"prompt {i}", "seed": i})
        (place / "samples.json").write_text(json.dumps(entries), encoding="utf-8")
    parsed = sound(folder)
    words = parsed.words()
    assert "2 more prompts are in the folder samples" in words
    assert words.count("step 11 ") == 12
    assert "pixels" not in [a.get("class") for t, a in parsed.tags if t == "img"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="is not a run folder"):
            page.render(folder)


def test_times_are_told_in_utc() -> None:
    assert when("2026-11-21T03:05:00+02:00") == "21 November 2026, 01:05 UTC"
    assert when("yesterday") == ""
    assert when(None) == ""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_it_and_reports_no_error(folder: Path, tmp_path: Path) -> None:
    path = page.write(folder)
    image = tmp_path / "page.png"
    options = f"""--headless --no-sandbox --disable-gpu --disable-background-networking --enable-logging=stderr
        --window-size=1280,2400 --user-data-dir={tmp_path / "profile"} --screenshot={image}""".split()
    command = ["chromium", *options, "--host-resolver-rules=MAP * ~NOTFOUND", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    with Image.open(image) as drawn:
        assert len(drawn.convert("RGB").getcolors(1 << 24) or []) > 1000


def test_what_is_no_text_is_escaped_so_that_the_page_can_be_written():
    page = element("p", "\ud83d cat", title="\udcff")
    assert page.encode() == b'<p title="\\udcff">\\ud83d cat</p>'
