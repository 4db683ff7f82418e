#!/usr/bin/env python3
"""Makes the pictures of docs/serve.md and README by the pages themselves, in Chromium.

python tools/serve_pictures.py FOLDER --live RUN --data DIR

FOLDER holds runs, and DIR, a folder of pictures, in it. RUN is shown as it stands in its status, which says
`running`: its lock is held meanwhile, as by the training that has written it. For the queue a small training is started
by the page, two wait, and one is killed. Pictures of the phone are 360 px wide. Written are docs/images/serve-*.png and
docs/images/pictures.png.
"""

import argparse
import base64
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent.parent
sys.path.append(str(HERE / "tests" / "support"))
import browser  # noqa: E402

from daguerre.checkpoint.run_dir import RunFolder  # noqa: E402
from daguerre.queue.queue import Queue  # noqa: E402
from daguerre.serve.catalog import identity  # noqa: E402
from daguerre.serve.dataset.folders import identity as pictures_identity  # noqa: E402

PORT = 8835
ADDRESS = f"http://127.0.0.1:{PORT}/"
CURVES = "document.querySelectorAll('.u-over').length > 3"
WIDE, PHONE = 1180, 360


@contextmanager
def served(folder: Path, queue: Path) -> Iterator[None]:
    """The page, which starts what its queue has."""
    words = ["serve", str(folder), "--control", "--port", str(PORT), "--queue", str(queue)]
    process = subprocess.Popen([sys.executable, "-m", "daguerre", *words], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while b"Ctrl-C" not in process.stdout.readline():
            assert process.poll() is None
        yield
    finally:
        process.terminate()
        process.wait(60)


def taken(page: browser.Page, top: int = 0) -> Image.Image:
    """A picture of the window, with the page scrolled to `top`."""
    page.evaluate(f"scrollTo(0, {top})")
    time.sleep(1)  # images fade in
    found = page.send("Page.captureScreenshot", format="png")
    return Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")


def kept(picture: Image.Image, name: str) -> None:
    """As small as 255 colours make it."""
    picture.quantize(255, dither=Image.Dither.NONE).save(HERE / "docs" / "images" / name, optimize=True)


def beside(*pictures: Image.Image) -> Image.Image:
    """Pictures of a phone next to each other."""
    whole = Image.new("RGB", (sum(each.width + 20 for each in pictures) - 20, pictures[0].height), "#8a8a8a")
    for number, each in enumerate(pictures):
        whole.paste(each, (number * (PHONE + 20), 0))
    return whole


def shown(page: browser.Page, address: str, ready: str, height: int, wide: bool = True, dark: bool = False) -> None:
    """Opens a page in a window of that height: larger pictures would lose where rows of images are scrolled to."""
    page.size(WIDE if wide else PHONE, height, dark=dark, mobile=not wide)
    page.go(ADDRESS + address)
    page.wait(ready)


def queued(queue: Queue, folder: Path, name: str, *more: str) -> str:
    words = ["quickstart", "output_dir=.", f"run_name={name}", *more]
    return queue.add(words, str(folder / name), folder / name, folder)


def fill_queue(page: browser.Page, queue: Queue, folder: Path) -> None:
    """A training that is killed, one that trains, one that waits and one that is held back."""
    few = "training.global_batch_size=2"
    killed = queued(queue, folder, "first-try", few)
    queued(queue, folder, "second-try", few, "optimizer.learning_rate=5e-4")
    queued(queue, folder, "longer", "training.duration=3k steps", "logging.every=50 steps")
    queue.pause(queued(queue, folder, "larger", "training.global_batch_size=32"))
    shown(page, "queue/", f"document.querySelector('#running #entry-{killed} .done')", 1140)
    os.kill(queue.document(killed, "begun")["training"], signal.SIGKILL)
    page.wait(f"document.querySelector('#ended #entry-{killed}') && document.querySelector('#running .done')")
    time.sleep(5)  # some updates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("--live", "--data"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    browser.SECONDS = 1800.0
    folder, live = given.folder.resolve(), RunFolder(given.folder.resolve() / given.live)
    run = identity(live.path, folder)
    pictures = f"data/{pictures_identity(folder / given.data)}/"
    # The browser first: it takes descriptors 3 and 4, and a child closes those of locks.
    with tempfile.TemporaryDirectory() as place, browser.opened(Path(place) / "profile") as chromium, live.hold():
        status = live.read_status() or {}
        live.write_status("running", step=status["step"], samples=status["samples"], total_steps=status["total_steps"])
        queue = Queue(Path(place) / "queue")
        with served(folder, queue.path):
            page = chromium.page()
            ready = f"{CURVES} && !document.querySelector('#control').hidden"
            shown(page, f"run/{run}/", ready, 1500)
            whole = taken(page)
            kept(whole, "serve-run.png")
            kept(whole.crop((0, 0, WIDE, 1290)).resize((826, 903), Image.Resampling.LANCZOS), "serve-small.png")
            top = page.evaluate("document.querySelector('#curves').getBoundingClientRect().top + scrollY")
            kept(taken(page, top - 10).crop((0, 0, WIDE, 1000)), "serve-curves.png")
            shown(page, pictures, "document.querySelectorAll('#cards img').length > 4", 1190)
            kept(taken(page), "pictures.png")
            shown(page, "queue/new?recipe=quickstart", "document.querySelectorAll('.setting').length > 200", 900)
            page.evaluate("document.querySelector('#yaml').value = 'training:\\n  duration: 5k steps\\n'")
            page.evaluate("document.querySelector('#yaml').dispatchEvent(new Event('input'))")
            page.wait("document.querySelector('.setting.given')")
            kept(taken(page), "serve-new.png")
            fill_queue(page, queue, folder)
            kept(taken(page), "serve-queue.png")
            trains = "document.querySelector('.runs .state.running')"
            shown(page, "", trains, 720)
            kept(taken(page), "serve-list.png")
            shown(page, "", trains, 1000, wide=False)
            phone = [taken(page)]
            shown(page, f"run/{run}/", ready, 1000, wide=False, dark=True)
            phone += [taken(page)]
            top = page.evaluate("document.querySelector('#images').getBoundingClientRect().top + scrollY")
            kept(beside(*phone, taken(page, top - 10)), "serve-phone.png")
            queue.pause_all(True)
            for entry in queue.entries():
                if entry.state == "running":
                    queue.kill(entry)


if __name__ == "__main__":
    main()
