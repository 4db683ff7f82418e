"""A folder of pictures as people have them, and the client of a page that may change it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import served
from PIL import Image
from starlette.testclient import TestClient

from daguerre.serve.dataset.folders import identity

OWN = {"origin": served.HERE, "x-daguerre": "1"}
"""Headers of a change."""


def image(width: int = 64, height: int = 48, colour: str = "red", kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, kind)
    return stream.getvalue()


def write(folder: Path) -> Path:
    """Five pictures: three with a text, one in metadata.jsonl, one without a caption; and one that is broken."""
    (folder / "more").mkdir(parents=True)
    for i, (name, text) in enumerate({"a": "a cat, grass", "b": "a dog, grass, sun", "more/c": "a cat, snow"}.items()):
        (folder / f"{name}.png").write_bytes(image(64 + 16 * i, 48))
        (folder / f"{name}.txt").write_text(f"{text}\n")
    (folder / "d.jpg").write_bytes(image(kind="JPEG"))
    line = {"file_name": "d.jpg", "text": "a bird, grass", "seen": 3}
    (folder / "metadata.jsonl").write_text(f"{json.dumps(line)}\n")
    (folder / "e.webp").write_bytes(image(kind="WEBP"))
    (folder / "f.png").write_bytes(b"\x89PNG\r\n\x1a\n no")
    (folder / "f.txt").write_text("broken")
    (folder / "a.mask.png").write_bytes(image(64, 48))
    return folder


@contextmanager
def shown(folder: Path, **rules: Any) -> Iterator[Shown]:
    """The page of a folder, below a root of its own."""
    runs = folder.parent / "runs"
    runs.mkdir(exist_ok=True)
    with served.asked(runs, folder.parent, **rules) as client:
        yield Shown(client, f"/data/{identity(folder.resolve())}/")


class Shown:
    """A client, and the address of a folder."""

    def __init__(self, client: TestClient, address: str) -> None:
        self.client, self.address = client, address

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(self.address + path, params=query)

    def cards(self, **query: Any) -> dict[str, Any]:
        sent = self.get("shown", **query)
        assert sent.status_code == 200, sent.text
        return sent.json()

    def ids(self) -> dict[str, str]:
        """{name of a picture: its id}, also of those that were put away."""
        found = {}
        for show in ("all", "away"):
            for card in self.cards(show=show)["cards"].split("<article")[1:]:
                found[card.split('data-name="')[1].split('"')[0]] = card.split('value="')[1].split('"')[0]
        return found

    def post(self, path: str, document: Any) -> Any:
        return self.client.post(self.address + path, content=json.dumps(document), headers=OWN)

    def caption(self, id: str, was: str, text: str) -> Any:
        return self.post("edit", {"kind": "caption", "id": id, "was": was, "text": text})

    def many(self, change: dict[str, Any], **more: Any) -> Any:
        return self.post("edit", {"kind": "many", "change": change, **more})

    def put(self, name: str, data: bytes) -> Any:
        return self.client.put(f"{self.address}upload", params={"name": name}, content=data, headers=OWN)
