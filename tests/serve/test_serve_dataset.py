"""The pages about pictures: what training would read, captions that change, pictures that are put away and sent."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urljoin, urlsplit

import fake_run
import numpy as np
import photos
import pytest
import served
from photos import OWN
from PIL import Image

from daguerre.checkpoint import atomic
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.data.folder import scan
from daguerre.data.folder.captions import Rules
from daguerre.data.plan.selection import select
from daguerre.data.sources.folder import Settings, open_source
from daguerre.errors import UserError
from daguerre.formatting import percent
from daguerre.serve import pictures
from daguerre.serve.dataset import jobs, uploads
from daguerre.serve.dataset.captions import Tag

RECIPE = "# A LoRA of the images in x, from the recipe sdxl_lora; written by\n#   `daguerre init`.\nrun_name: x\n"
RULES = Rules(("jpeg", "png", "webp"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photos.write(tmp_path / "photos")


def trained(folder: Path) -> dict[str, str]:
    """{path: caption} as a training reads the folder."""
    return {one.path: one.texts["text"] for one in scan.scan(folder, RULES, {}).samples}


def reader(folder: Path, name: str, state: str, **data: object) -> None:
    """A run of a folder's neighbour that reads the folder."""
    run = fake_run.write_run(folder.parent / "runs" / name, steps=20, saves=0, state=state)
    source = {"source": "folder", "path": str(folder), **data.pop("source", {})}
    (run / "config.yaml").write_text(json.dumps({"run_name": name, "data": {**data, "sources": {"images": source}}}))


def test_a_folder_is_shown_as_training_reads_it(folder: Path) -> None:
    with photos.shown(folder) as page:
        listed = page.client.get("/data/").text
        assert "photos" in listed
        assert "2 pictures in folders" not in listed
        whole = page.get("").text
        assert "Undo" not in whole, "without --control"
        assert "Drop pictures" not in whole
        found = page.cards(resolution=256, shapes="square")
        assert "6 pictures, 4 can be trained on, 2 cannot." in found["facts"]
        assert "image without a caption" in found["facts"]
        assert "broken image" in found["cards"]
        assert "64 x 48 → 256 x 256" in found["cards"]
        assert found["cards"].count("<span>mask</span>") == 1
        assert len(found["ids"]) == 6
        ids = page.ids()
        assert {*ids} == {"a.png", "b.png", "d.jpg", "e.webp", "f.png", "more/c.png"}
        assert page.cards(q="GRASS cat")["ids"] == [ids["a.png"]]
        assert page.cards(show="bare")["ids"] == [ids["e.webp"], ids["f.png"]]
        assert page.cards(show="images")["ids"] == [ids["a.png"]]
        assert page.get(f"picture/{ids['a.png']}").content == (folder / "a.png").read_bytes()
        assert page.get(f"picture/{ids['a.png']}/small").headers["content-type"] == "image/webp"
        assert page.get(f"picture/{ids['a.png']}/beside/0").content == (folder / "a.mask.png").read_bytes()
        assert page.get(f"picture/{ids['a.png']}/beside/1").status_code == 404
        assert page.get(f"picture/{ids['f.png']}/small").status_code == 422
        assert page.get(f"caption/{ids['d.jpg']}").json()["text"] == "a bird, grass"


def test_a_run_says_how_its_folder_is_read(folder: Path) -> None:
    reader(folder, "wide", "stopped", resolution=64, buckets={"aspects": ["2/1"], "step": 16, "upscale": False})
    reader(folder, "named", "finished", source={"captions_from": "file_names", "filters": "width > 70"})
    reader(folder.parent / "photos2", "elsewhere", "stopped")
    with photos.shown(folder, control=True) as page:
        whole = page.get("").text
        assert whole.index("wide") < whole.index("named")
        assert "elsewhere" not in whole
        ids = {run: served.address(folder.parent / "runs", run).split("/")[2] for run in ("wide", "named")}
        wide = page.cards(**{"as": ids["wide"]})
        assert "96 x 48 → 80 x 48" in wide["cards"]
        assert "smaller than its bucket" in wide["cards"]
        named = page.cards(**{"as": ids["named"]})
        assert ">a</p>" in named["cards"]
        assert "6 pictures, 2 can be trained on, 4 cannot." in named["facts"]
        assert named["cards"].count(">filter: width &gt; 70</p>") == 3
        assert named["cards"].count("→ 512 x 512</p>") == 2, "what is left out has no bucket"
        picture = page.ids()["a.png"]
        answer = page.get(f"caption/{picture}", **{"as": ids["named"]}).json()
        assert "names of files" in answer["refused"]
        assert page.cards().keys() == wide.keys()
        assert page.get("shown", **{"as": "0" * 12}).status_code == 404


def test_filters_of_a_run_leave_out_what_its_training_leaves_out(folder: Path) -> None:
    chosen = "seen >= 3 and aspect > 1.2"
    reader(folder, "chosen", "stopped", source={"filters": chosen})
    settings = Settings(path=str(folder), filters=chosen, cache_dir=str(folder.parent / "index"))
    selection = select(open_source(settings, "train").index, settings, ["train"])[0]
    with photos.shown(folder) as page:
        id = served.address(folder.parent / "runs", "chosen").split("/")[2]
        found = page.cards(**{"as": id})
        assert "6 pictures, 1 can be trained on, 5 cannot." in found["facts"]
        counts = {why: entry["count"] for why, entry in selection.left_out.items() if not entry.get("kept")}
        assert counts == {"filter: no seen": 3}
        assert "<td>filter: no seen</td><td>left out</td><td>3</td>" in found["facts"]
        assert found["cards"].count(">filter: no seen</p>") == 3
        assert f"<code>aspect &gt; 1.2</code></td><td>4 ({percent(4, 4)})" in found["facts"]
        assert page.cards(show="bare", **{"as": id})["count"] == "5 pictures"


def test_a_caption_is_written_where_training_reads_it(folder: Path) -> None:
    reader(folder, "half", "stopped")
    reader(folder, "done", "finished")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with photos.shown(folder, control=True) as page:
        ids = page.ids()
        sent = page.caption(ids["a.png"], "a cat, grass", "  a tiger\r\nin grass ")
        assert sent.json() == {"changed": 1, "text": "a tiger\nin grass", "runs": ["half"]}
        assert page.caption(ids["d.jpg"], "a bird, grass", 'a "bird"').status_code == 200
        assert page.caption(ids["e.webp"], "", "a fish").status_code == 200
        assert json.loads((folder / "metadata.jsonl").read_text()) == {
            "file_name": "d.jpg", "text": 'a "bird"', "seen": 3
        }  # fmt: skip
        stale = page.caption(ids["b.png"], "a dog", "a wolf")
        assert stale.status_code == 422
        assert "it is now: a dog, grass, sun" in stale.text
        assert page.caption(ids["b.png"], "a dog, grass, sun", " ").status_code == 422
        assert page.caption("0" * 16, "", "x").status_code == 404
        (folder / "b.txt").write_bytes(b"\xff")
        assert "cannot be read" in page.caption(ids["b.png"], "", "x").text
        (folder / "b.txt").write_text("a dog, grass, sun\n")
        now = trained(folder)
        assert (now["a.png"], now["d.jpg"], now["e.webp"]) == ("a tiger\nin grass", 'a "bird"', "a fish")
        undone = [page.post("edit", {"kind": "undo"}).json()["changed"] for _ in range(3)]
        assert undone == [1, 1, 1]
        assert page.post("edit", {"kind": "undo"}).status_code == 404
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert (folder / ".daguerre" / "trash" / "e.txt").read_text() == "a fish\n", "nothing is deleted"


def test_a_caption_in_a_field_of_json_is_written_there(folder: Path) -> None:
    (folder / "e.json").write_text(json.dumps({"blip": "a fish", "score": 1}))
    reader(folder, "blipped", "stopped", source={"captions": {"fields": ["blip"]}})
    id = served.address(folder.parent / "runs", "blipped").split("/")[2]
    with photos.shown(folder, control=True) as page:
        change = {"kind": "caption", "id": page.ids()["e.webp"], "was": "a fish", "text": "a shark"}
        sent = page.client.post(f"{page.address}edit", params={"as": id}, content=json.dumps(change), headers=OWN)
        assert sent.status_code == 200, sent.text
        assert json.loads((folder / "e.json").read_text()) == {"blip": "a shark", "score": 1}
        undone = page.post("edit", {"kind": "undo"}).json()
        assert (undone["changed"], undone["stayed"]) == (1, []), "however the folder is read by now"
    assert json.loads((folder / "e.json").read_text()) == {"blip": "a fish", "score": 1}
    assert not (folder / "e.txt").exists()


@pytest.mark.parametrize(
    ("change", "text", "after"),
    [
        ({"kind": "add", "tag": "x"}, "a, b", "a, b, x"),
        ({"kind": "add", "tag": " x ", "to": "first"}, "", "x"),
        ({"kind": "add", "tag": "B"}, "a , b", "a , b"),
        ({"kind": "remove", "tag": "b"}, "a,b ,c", "a, c"),
        ({"kind": "remove", "tag": "x"}, "a,b ,c", "a,b ,c"),
        ({"kind": "move", "tag": "c", "to": "first"}, "a, b, c", "c, a, b"),
        ({"kind": "move", "tag": "c", "to": "up"}, "a, b, c", "a, c, b"),
        ({"kind": "move", "tag": "a", "to": "down"}, "a, b, c", "b, a, c"),
        ({"kind": "move", "tag": "c", "to": "down"}, "a, b, c", "a, b, c"),
        ({"kind": "move", "tag": "a", "to": "up"}, "a, b", "a, b"),
        ({"kind": "move", "tag": "a", "to": "last"}, "a, b\nb, a, c", "b, a\nb, c, a"),
    ],
)
def test_tags_go_up_and_down(change: dict[str, str], text: str, after: str) -> None:
    assert Tag(**change).applied(text) == after


def test_many_captions_change_at_once_and_back(folder: Path) -> None:
    before = trained(folder)
    replace = {"kind": "replace", "find": "GRASS", "by": r"\1 meadow", "any_case": True}
    with photos.shown(folder, control=True) as page:
        tried = page.many(replace, try_only=True).json()
        assert (tried["changed"], tried["kept"]) == (3, 3)
        assert tried["examples"][0] == ["a.png", "a cat, grass", r"a cat, \1 meadow"]
        assert trained(folder) == before
        assert page.many(replace).json()["changed"] == 3
        assert trained(folder)["b.png"] == r"a dog, \1 meadow, sun"
        ids = page.ids()
        some = [ids["a.png"], ids["more/c.png"]]
        assert page.many({"kind": "move", "tag": "a cat", "to": "last"}, ids=some).json()["changed"] == 2
        assert trained(folder)["more/c.png"] == "snow, a cat"
        (folder / "a.txt").write_text("by hand\n")
        assert "Undo" in page.get("").text
        assert page.cards()["undo"] == "2 captions"
        undone = page.post("edit", {"kind": "undo"}).json()
        assert (undone["changed"], undone["stayed"]) == (1, ["a.txt"])
        (folder / "a.txt").write_text("a cat, \\1 meadow\n")
        assert page.post("edit", {"kind": "undo"}).json()["changed"] == 3
        assert trained(folder) == before
        empty = page.many({"kind": "replace", "find": "a cat, snow"})
        assert "1 caption would have no text left (more/c.png)" in empty.text
        for wrong in ({"kind": "replace", "find": ""}, {"kind": "add", "tag": "a, b"}, {"kind": "eval", "tag": "x"}):
            assert page.many(wrong).status_code == 422
    assert trained(folder) == before


def test_a_kill_between_two_files_can_be_undone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, written = trained(folder), list[Path]()

    def cut_off(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) > 2:  # the journal, and a caption
            raise ProcessLookupError  # for a kill, which ends a test as well
        write_bytes_atomically(path, data)

    with photos.shown(folder, control=True) as page:
        monkeypatch.setattr("daguerre.serve.dataset.captions.write_bytes_atomically", cut_off)
        with pytest.raises(ProcessLookupError):
            page.many({"kind": "add", "tag": "x"})
        monkeypatch.undo()
        assert trained(folder) != before
    with photos.shown(folder, control=True) as page:
        undone = page.post("edit", {"kind": "undo"}).json()
        assert (undone["changed"], undone["stayed"]) == (1, [])
    assert trained(folder) == before


def test_what_is_left_out_is_not_trained_on_and_comes_back(folder: Path) -> None:
    (folder / "b.control.png").write_bytes(photos.image())
    (folder / "b").mkdir()
    (folder / "b" / "other.png").write_bytes(photos.image())
    (folder / "b" / "other.txt").write_text("another")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with photos.shown(folder, control=True) as page:
        ids = page.ids()
        some = [ids["b.png"], ids["d.jpg"], ids["more/c.png"]]
        assert page.post("move", {"ids": some, "to": "left_out"}).json()["moved"] == 3
        assert {*trained(folder)} == {"a.png", "b/other.png"}
        assert scan.scan(folder, RULES, {}).skipped.keys() <= {
            "image without a caption", "broken image", scan.LEFTOVER, scan.LONE_TEXT
        }  # fmt: skip
        assert (folder / ".daguerre" / "left_out" / "b.control.png").exists()
        assert (folder / "more" / ".daguerre" / "left_out" / "c.txt").exists()
        away = page.cards(show="away")
        assert away["cards"].count("<article") == 3
        assert away["ids"] == []
        gone = page.ids()
        assert page.get(f"picture/{gone['b.png']}/small").status_code == 200
        assert "restore it first" in page.get(f"caption/{gone['b.png']}").json()["refused"]
        assert page.post("move", {"ids": [gone["b.png"]], "to": "trash"}).json()["moved"] == 1
        (folder / "b.png").write_bytes(photos.image(colour="blue"))
        taken = page.post("move", {"ids": [page.ids()["b.png"]], "to": "back"})
        assert taken.status_code in (200, 422)
        (folder / "b.png").unlink(missing_ok=True)
        back = [id for name, id in page.ids().items() if name in ("b.png", "d.jpg", "more/c.png")]
        assert page.post("move", {"ids": back, "to": "back"}).json()["moved"] == 3
    now = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {name: data for name, data in now.items() if ".daguerre" not in name} == files
    assert not any(name.endswith((".png", ".jpg", ".txt")) for name in now.keys() - files.keys())


@pytest.mark.parametrize("to", ["trash", "back"])
def test_a_full_disk_moves_no_picture(folder: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Where a file of lines cannot be written without theirs: a line would name a picture that is not there."""
    before = trained(folder)
    with photos.shown(folder, control=True) as page:
        moved = {"ids": [page.ids()[name] for name in ("a.png", "d.jpg")], "to": "trash"}
        if to == "back":
            assert page.post("move", moved).json()["moved"] == 2
            before = trained(folder)
            moved = {"ids": [page.ids()[name] for name in ("a.png", "d.jpg")], "to": "back"}
        place = folder if to == "trash" else folder / ".daguerre" / "trash"

        def full(path: Path, mode: str) -> object:
            if path == place / ".metadata.jsonl.tmp":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return open(path, mode)

        with monkeypatch.context() as patched:
            patched.setattr(atomic, "open", full, raising=False)
            refused = page.post("move", moved)
        assert (refused.status_code, refused.text) == (507, "No space left on device. Free some space and try again\n")
        assert trained(folder) == before
        assert page.post("move", moved).json()["moved"] == 2
    assert {*trained(folder)} ^ {*before} == {"a.png", "d.jpg"}
    lines = [
        path.read_text() for path in (folder / "metadata.jsonl", folder / ".daguerre" / "trash" / "metadata.jsonl")
    ]
    assert ["d.jpg" in text for text in lines] == [to == "back", to == "trash"]


def test_a_name_that_is_taken_is_not_overwritten(folder: Path) -> None:
    with photos.shown(folder, control=True) as page:
        page.post("move", {"ids": [page.ids()["a.png"]], "to": "trash"})
        away = page.cards(show="away")["cards"].split('value="')[1].split('"')[0]
        (folder / "a.png").write_bytes(photos.image(colour="blue"))
        refused = page.post("move", {"ids": [away], "to": "back"})
        assert refused.status_code == 422
        assert "there is another a.png" in refused.text
    assert (folder / "a.png").read_bytes() == photos.image(colour="blue")


def test_a_caption_that_two_pictures_share_stays_with_both(folder: Path) -> None:
    (folder / "a.jpg").write_bytes(photos.image(kind="JPEG"))
    with photos.shown(folder, control=True) as page:
        page.post("move", {"ids": [page.ids()["a.png"]], "to": "left_out"})
        assert trained(folder)["a.jpg"] == "a cat, grass"
        page.post("move", {"ids": [page.ids()["a.png"]], "to": "back"})
    assert trained(folder)["a.png"] == trained(folder)["a.jpg"] == "a cat, grass"


def test_pictures_are_sent_into_a_new_folder(folder: Path) -> None:
    with photos.shown(folder, control=True) as page:
        made = page.client.post("/data/new", content=json.dumps({"root": 1, "name": "my dog"}), headers=OWN)
        again = page.client.post("/data/new", content=json.dumps({"root": 1, "name": "my dog"}), headers=OWN)
        assert again.status_code == 422
        own = photos.Shown(page.client, f"/data/{made.json()['id']}/")
        assert own.get("").status_code == 200
        assert own.put("one.png", photos.image()).json() == {"name": "one.png", "known": False}
        assert own.put("one.png", photos.image()).json() == {"name": "one.png", "known": True}
        assert own.put("one.png", photos.image(colour="blue")).json()["name"] == "one-2.png"
        assert own.put("two.png", photos.image(kind="JPEG")).json()["name"] == "two.jpg", (
            "as it is, not as it is called"
        )
        assert own.put("one.txt", b"a dog").status_code == 200
        assert own.put("one.txt", b"a cat").status_code == 422
        found = own.cards()
        assert "3 pictures, 1 can be trained on" in found["facts"]
    home = folder.parent / "my dog"
    assert {path.name for path in home.iterdir()} == {"one.png", "one-2.png", "two.jpg", "one.txt"}
    assert (home / "one.png").read_bytes() == photos.image()


def test_a_recipe_is_made_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import sys; open(sys.argv[4], 'x').write({RECIPE!r}); print(sys.argv[1:]); print('2 of 5')"

    def instead(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program, *command[3:]], **more)

    # For this module alone: other pages start commands, too.
    named = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=instead, **named))
    with photos.shown(folder, control=True) as page:
        assert page.get("job").json() is None
        assert page.post("job", {"kind": "init", "name": "../mine", "base": "sdxl_lora"}).status_code == 200
        end = time.monotonic() + 60
        while (state := page.get("job").json())["running"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (state["done"], state["recipe"], state["share"]) == (True, RECIPE, [2, 5])
        form = page.client.get(urljoin(page.address, state["start"]))
        assert form.status_code == 200
        assert str(folder) in form.text
        assert parse_qs(urlsplit(state["start"]).query)["set"][-1] == "run_name=mine"
        (folder.parent / "runs" / "mine").mkdir()  # pictures of that name: a run has another one
        again = parse_qs(urlsplit(page.get("job").json()["start"]).query)["set"][-1]
        assert again == "run_name=mine_run"
        assert (
            str(["init", str(folder), "-o", str(folder.parent / "runs" / "mine.yaml"), "base=sdxl_lora"])
            in state["text"]
        )
        wrong: list[dict[str, str]] = [{"kind": "init", "name": "x", "base": "/etc"}, {"kind": "rm"}]
        places = ("/etc", "../..", "no/such/place", str(folder.parent.parent), "--help", "https://example.com/x")
        wrong += [{"kind": "caption", "by": "os"}, *({"kind": "caption", "by": "blip", "path": one} for one in places)]
        for message in wrong:
            assert page.post("job", message).status_code in (404, 422), message


@pytest.mark.parametrize("place", ["", "OWNER/blip", "FOLDER"])
def test_captions_are_written_by_a_network_of_the_page_or_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    asked: list[list[str]] = []

    def instead(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        asked.append(command[3:])
        return subprocess.Popen([sys.executable, "-c", ""], **more)

    named = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=instead, **named))
    path = str(folder) if place == "FOLDER" else place
    with photos.shown(folder, control=True) as page:
        assert page.post("job", {"kind": "caption", "by": "blip", "path": path}).status_code == 200
        while page.get("job").json()["running"]:
            time.sleep(0.05)
    assert asked == [["caption", str(folder), "with=blip", "write=txt", *([f"path={path}"] if path else [])]]


def test_a_transparent_picture_is_shown_on_white_as_it_is_trained_on(tmp_path: Path) -> None:
    pixels = np.full((8, 8, 4), (200, 30, 30, 0), dtype=np.uint8)
    pixels[:, :4, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "half.png")
    data, _ = pictures.small(tmp_path / "half.png")
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert shown[0, 0].tolist() == [200, 30, 30]
    assert shown[0, 7].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a.png", "a.png"),
        ("../../etc/cron.d/x.png", "x.png"),
        (r"C:\photos\Ärger 1.jpg", "Ärger 1.jpg"),
        ("a\u202egnp.exe.png", "a_gnp.exe.png"),
        ("$(rm -rf ~);`x`=[y]{z}.png", "_(rm -rf _)__x___y__z_.png"),
        ("x" * 400 + ".jpeg", "x" * 145 + ".jpeg"),
        ("--help.png", "help.png"),
        (".hidden", "hidden"),
        ("\ud800.png", "_.png"),
    ],
)
def test_names_are_made_safe(given: str, name: str) -> None:
    assert uploads.safe_name(given) == name


@pytest.mark.parametrize("given", ["", "..", "/", "a/", "thumbs.db", "." * 300])
def test_names_of_which_nothing_is_left_are_refused(given: str) -> None:
    with pytest.raises(UserError, match="no name of a file"):
        uploads.safe_name(given)


def test_the_folder_of_what_is_put_away_is_not_told_as_one_of_other_programs(tmp_path: Path) -> None:
    for name in (".daguerre/trash/a.png", ".DS_Store"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "b.png").write_bytes(photos.image())
    (tmp_path / "b.txt").write_text("a boat")
    (told,) = scan.scan(tmp_path, Rules(("png",)), {}).skipped.values()
    assert told["examples"] == [".DS_Store"]
