"""Walks of people in a real Chromium: keys alone, a login, a reload, many tabs, a server and a run that are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import browser
import fake_run
import pytest
import served
from browser import Browser, Page

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.serve.queueing.schema import Schema
from daguerre.tracking.sinks import MetricsFile

pytestmark = [browser.needed, pytest.mark.long]
TOKEN = "a-token-of-many-letters"
HOLD = (
    "import sys, time; from pathlib import Path; from daguerre.checkpoint.run_dir import RunFolder\n"
    "with RunFolder(Path(sys.argv[1])).hold():\n    print(flush=True); time.sleep(600)"
)
CURVES = "document.querySelectorAll('.u-over').length >= 6"
NOT_LOST = "document.querySelector('.lost-line').hidden"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    chromium.errors.clear()
    found = chromium.page()
    found.size(1280, 900)
    yield found
    found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "runs" / "one", steps=200, saves=4)
    fake_run.write_run(tmp_path / "runs" / "two", steps=200, saves=2)
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The form of a new run is made, which takes ten seconds and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        Schema().document()
        yield


def on_run(page: Page, here: str, folder: Path, name: str) -> None:
    page.go(here + served.address(folder, name).lstrip("/"))
    page.wait(CURVES)


def test_runs_are_compared_by_keys_and_by_the_slider(folder: Path, page: Page) -> None:
    with served.running(folder) as here:
        page.go(here)
        for name in ("one", "two"):
            page.tab_to(f"#run-{served.address(folder, name).split('/')[2]} .pick")
            page.key(" ")
            page.evaluate("document.activeElement.blur()")
        page.press("#compare")
        page.wait("location.pathname.endsWith('/compare') && document.querySelectorAll('.frame img').length === 2")
        at = "document.querySelector('#at-text').textContent"
        assert page.evaluate(at) == "200"
        page.tab_to("#at")
        page.key("ArrowLeft")
        page.wait(f"{at} === '150'")
        frames = "[...document.querySelectorAll('.frame')].map((one) => one.dataset.step).sort().join('|')"
        assert page.evaluate(frames) == "|update 100", "of a run without a save there, the one before"
        page.evaluate("document.activeElement.blur()")
        page.key("ArrowLeft")
        page.wait(f"{at} === '100' && {frames} === '|'")
        box = page.evaluate("document.querySelector('#at').getBoundingClientRect().toJSON()")
        y = box["y"] + box["height"] / 2
        page.mouse("mousePressed", box["x"] + box["width"] / 2, y)
        page.mouse("mouseMoved", box["x"] + box["width"] - 3, y)
        page.mouse("mouseReleased", box["x"] + box["width"] - 3, y)
        page.wait(f"{at} === '200'")
    assert page.browser.errors == []


def test_with_keys_alone_a_run_is_renamed_noted_put_away_and_found_again(folder: Path, page: Page) -> None:
    with served.running(folder, control=True) as here:
        on_run(page, here, folder, "two")
        page.press("#edit")
        page.wait("document.activeElement.id === 'own-name'")
        page.evaluate("document.activeElement.select()")
        page.type("second try")
        page.tab_to("#own-note")
        page.type("too bright\n& <b>pale</b>")
        page.tab_to("#notes [name=archived]")
        page.key(" ")
        page.press("#notes [type=submit]")
        page.wait("document.querySelector('h1').textContent.startsWith('second try')")
        page.wait("document.querySelector('.own-note').textContent === 'too bright\\n& <b>pale</b>'")
        page.go(here)
        rows = "[...document.querySelectorAll('.runs article')].filter((one) => !one.hidden).length"
        page.wait(f"{rows} === 1")
        page.tab_to("#archived")
        page.key(" ")
        page.wait(f"{rows} === 2")
        page.tab_to("#filter")
        page.type("bright")
        page.wait(
            f"{rows} === 1 && document.querySelector('.runs article:not([hidden]) h2').textContent.includes('second')"
        )
    assert json.loads((folder / "two" / "page.json").read_text())["archived"] is True


def test_with_keys_alone_a_chart_is_read_zoomed_and_whole_again(folder: Path, page: Page) -> None:
    with served.running(folder) as here:
        on_run(page, here, folder, "one")
        whole = page.evaluate("daguerreCharts.shownRange()")
        page.tab_to(".plot")
        page.key("ArrowRight")
        tip = "document.querySelector('.plot .tip')"
        page.wait(f"!{tip}.hidden && {tip}.textContent.startsWith('updates 1')")
        page.key("+")
        page.key("+")
        page.wait("!document.querySelector('#whole').hidden")
        zoomed = page.evaluate("daguerreCharts.shownRange()")
        assert all(each == zoomed[0] for each in zoomed)
        assert (zoomed[0][1] - zoomed[0][0]) == pytest.approx((whole[0][1] - whole[0][0]) / 4)
        page.key("-")
        page.wait(
            "JSON.stringify(daguerreCharts.shownRange()) !== " + json.dumps(json.dumps(zoomed, separators=(",", ":")))
        )
        page.key("0")
        page.wait("document.querySelector('#whole').hidden")
        assert page.evaluate("daguerreCharts.shownRange()") == whole
        page.key("Tab")
        assert page.evaluate(f"{tip}.hidden")
    assert page.browser.errors == []


def test_a_reload_keeps_what_was_set_and_what_was_written(folder: Path, page: Page, form: None) -> None:
    with served.running(folder, control=True) as here:
        on_run(page, here, folder, "one")
        page.evaluate("document.querySelector('#smooth').value = '75'")
        page.evaluate("document.querySelector('#smooth').dispatchEvent(new Event('input'))")
        page.evaluate("document.querySelector('#log-axis').click()")
        page.evaluate("document.querySelector('#over').value = 'samples'")
        page.evaluate("document.querySelector('#over').dispatchEvent(new Event('change'))")
        page.send("Page.reload")
        page.wait(f"document.querySelector('#over')?.value === 'samples' && {CURVES}")
        assert page.evaluate("document.querySelector('#smooth').value") == "75"
        assert not page.evaluate("document.querySelector('#log-axis').checked")
        assert page.evaluate("daguerreCharts.shownRange()[0][1]") > 6000, "samples"
        page.evaluate("localStorage.clear()")
        page.go(f"{here}queue/new?recipe=quickstart")
        page.wait("document.querySelectorAll('.setting').length > 200")
        page.evaluate("document.querySelector('#yaml').value = 'run_name: half_done'")
        page.evaluate("document.querySelector('#yaml').dispatchEvent(new Event('input'))")
        page.wait("document.querySelector('#command').textContent.includes('half_done')")
        page.send("Page.reload")
        page.wait("document.querySelector('#command')?.textContent.includes('half_done')")
        assert page.evaluate("document.getElementById('set-run_name').value") == "half_done"
        page.go(f"{here}queue/new?recipe=quickstart")
        page.wait("document.querySelector('#command').textContent.includes('quickstart')")
        assert page.evaluate("document.querySelector('#yaml').value") == "", "a new visit is a new run"


def test_the_token_opens_the_page_and_all_that_belongs_to_it(folder: Path, page: Page) -> None:
    with served.running(folder, token=TOKEN) as here:
        page.go(here + served.address(folder, "one").lstrip("/"))
        page.wait("location.pathname.endsWith('/login')")
        for given, then in (
            ("wrong", "document.querySelector('[role=alert]')"),
            (TOKEN, "document.querySelector('#runs')"),
        ):
            page.tab_to("#token")
            page.type(given)
            page.key("Enter")
            page.wait(then)
        assert TOKEN not in page.evaluate("location.href")
        assert page.evaluate("document.cookie") == "", "no script sees it"
        page.wait("document.querySelector('.runs img').naturalWidth > 0")
        on_run(page, here, folder, "one")
        with RunFolder(folder / "one").hold():
            fake_run.write_status(folder / "one", "running", 200)
            page.wait("document.querySelector('.state.running')")
        page.send("Page.reload")
        page.wait(CURVES)
        page.evaluate("fetch('report').then((answer) => { window.reportIs = answer.status; })")
        page.wait("window.reportIs === 200")
    assert [error for error in page.browser.errors if "403" not in error and "ERR_CONNECTION" not in error] == []


def test_eight_tabs_of_one_browser_are_all_followed(folder: Path, chromium: Browser) -> None:
    """A browser has six connections for a server: tabs that nobody sees must not hold them."""
    tabs = [chromium.page() for _ in range(8)]
    hide = "Object.defineProperty(document, 'hidden', {value: VALUE, configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    with served.running(folder) as here:
        for number, tab in enumerate(tabs):
            if number % 2:
                on_run(tab, here, folder, "one")
            else:
                tab.go(here)
                tab.wait("document.querySelector('.runs article')")
            if number < 7:
                tab.evaluate(hide.replace("VALUE", "true"))
        with RunFolder(folder / "one").hold():
            fake_run.write_status(folder / "one", "running", 200)
            tabs[7].wait("document.querySelector('.state.running')")
            tabs[5].wait("document.title.includes('6 % · one')")  # hidden, it asks from time to time
            tabs[0].evaluate(hide.replace("VALUE", "false"))
            tabs[0].wait("document.querySelector('.runs .state.running')")
        for tab in tabs:
            tab.close()


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`daguerre serve --control`, which a test may kill."""
    words = ["serve", str(folder), "--control", "--port", str(port), "--queue", str(served.queue_of(folder).path)]
    process = subprocess.Popen([sys.executable, "-m", "daguerre", *words], stdout=subprocess.DEVNULL)
    opener, deadline = build_opener(ProxyHandler({})), time.monotonic() + 90
    while True:
        try:
            opener.open(f"http://127.0.0.1:{port}/", timeout=30).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_is_killed_loses_nothing_and_the_page_goes_on(
    folder: Path, page: Page, chromium: Browser
) -> None:
    queue = served.queue_of(folder)
    ident = queue.add(["next", "x=1"], str(folder / "next"), folder / "next", folder)
    queue.pause(ident)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here, of_queue = f"http://127.0.0.1:{port}/", chromium.page()
    with server(folder, port) as process:
        of_queue.go(f"{here}queue/")
        of_queue.wait(f"document.querySelector('#entry-{ident} .state.paused')")
        on_run(page, here, folder, "one")
        page.evaluate("document.querySelector('#edit').click()")
        page.evaluate("document.querySelector('#own-note').value = 'kept'")
        page.evaluate("document.querySelector('#notes form').requestSubmit()")
        page.wait("document.querySelector('.own-note')?.textContent === 'kept'")
        page.go(here)
        page.wait("document.querySelectorAll('.runs article').length === 2")
        os.kill(process.pid, signal.SIGKILL)
        for tab in (page, of_queue):
            tab.wait(f"!({NOT_LOST})")
        fake_run.write_run(folder / "three", steps=20, saves=1)
        (folder / "two").rename(folder.parent / "away")
        with server(folder, port):
            page.front()
            page.wait(NOT_LOST)
            names = "[...document.querySelectorAll('.runs h2 a')].map((one) => one.textContent).sort().join(' ')"
            page.wait(f"{names} === 'one three'")
            assert page.evaluate("document.querySelector('.runs .own-note').textContent") == "kept"
            of_queue.front()
            of_queue.wait(NOT_LOST)
            of_queue.evaluate(f"document.querySelector('#entry-{ident} [data-do=remove]').focus()")
            of_queue.evaluate("window.confirm = () => true")
            of_queue.key("Enter")
            of_queue.wait(f"!document.querySelector('#entry-{ident}')")
    of_queue.close()
    assert queue.entries() == []
    assert not (folder / "next").exists(), "what is held back was not begun"


def test_a_run_that_is_killed_says_so_and_one_that_failed_says_why(folder: Path, page: Page) -> None:
    fake_run.write_status(folder / "one", "running", 200)
    with served.running(folder) as here:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / "one")], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        on_run(page, here, folder, "one")
        page.wait("document.querySelector('.state.running')")
        file = MetricsFile(folder / "one" / "metrics" / "metrics.jsonl")
        file.write(210, 6720, {"learning/loss": 0.5})
        file.close()
        page.wait("document.querySelector('[data-part=head]').textContent.includes('210')")
        process.kill()
        process.communicate()
        page.wait("document.querySelector('.state.interrupted') && document.title.startsWith('Interrupted')")
        assert page.evaluate("document.querySelector('.notice').textContent")
        fake_run.write_status(folder / "two", "failed", 200, "out of memory on <b>GPU 0</b>")
        on_run(page, here, folder, "two")
        page.wait("document.querySelector('.notice.failed')?.textContent.includes('out of memory on <b>GPU 0</b>')")
        page.go(here)
        page.wait("document.querySelector('.runs .reason')?.textContent.includes('out of memory')")
    assert [error for error in page.browser.errors if "ERR_CONNECTION" not in error] == []


@contextmanager
def behind(here: str, prefix: bytes) -> Iterator[str]:
    """The address of a proxy that takes a sub-path off, and has nothing elsewhere."""
    port = int(here.rstrip("/").rpartition(":")[2])

    def pipe(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    class Passed(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := self.request.recv(1 << 16)):
                    return
                head += data
            if b" " + prefix not in head.partition(b"\r\n")[0]:
                self.request.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            head = head.replace(prefix, b"/", 1).replace(b"Connection: keep-alive", b"Connection: close", 1)
            with socket.create_connection(("127.0.0.1", port)) as inner:
                inner.sendall(head)
                threading.Thread(target=pipe, args=(self.request, inner), daemon=True).start()
                pipe(inner, self.request)

    class Proxy(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Proxy(("127.0.0.1", 0), Passed) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}{prefix.decode()}"
        proxy.shutdown()
        thread.join()


def test_behind_a_proxy_at_a_sub_path_the_page_lives_and_changes(folder: Path, page: Page) -> None:
    names = frozenset({"127.0.0.1"})  # as `--allow-host` gives it: the port of the proxy is another
    with served.running(folder, control=True, hosts=names) as inner, behind(inner, b"/lab/daguerre/") as here:
        page.go(here)
        page.evaluate("[...document.querySelectorAll('.runs h2 a')].find((one) => one.textContent === 'one').click()")
        page.wait(CURVES)
        page.wait("document.querySelector('.strip img').naturalWidth > 0")
        with RunFolder(folder / "one").hold():
            fake_run.write_status(folder / "one", "running", 200)
            page.wait("document.querySelector('.state.running')")
        page.evaluate("document.querySelector('#edit').click()")
        page.evaluate("document.querySelector('#own-name').value = 'behind a proxy'")
        page.evaluate("document.querySelector('#notes form').requestSubmit()")
        page.wait("document.querySelector('h1').textContent.startsWith('behind a proxy')")
        page.press(".bar-top [href='../../queue/']")
        page.wait("document.title.startsWith('0 training, 0 waiting')")
        assert page.evaluate("location.pathname") == "/lab/daguerre/queue/"
    assert [error for error in page.browser.errors if "ERR_CONNECTION" not in error] == []


def test_with_keys_alone_a_run_is_begun(folder: Path, page: Page, form: None) -> None:
    with served.running(folder, control=True) as here:
        page.go(here)
        page.press("[href='queue/new']")
        page.wait("document.querySelectorAll('.setting').length > 200")
        page.tab_to("#search")
        page.type("run_name")
        page.tab_to("#set-run_name")
        page.type("by keys")
        page.key("Tab")
        page.wait("document.querySelector('#yaml').value.includes('by keys')")
        page.press("#add")
        page.wait("document.querySelector('#waiting article')")
    (entry,) = served.queue_of(folder).entries()
    assert (entry.entry.place, entry.state) == (str(folder / "by keys"), "waiting")
