"""A real Chromium, driven by its DevTools protocol over a pipe: no driver, no package.

`--remote-debugging-pipe` speaks JSON ended by zero bytes on descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needed = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs chromium")
SECONDS = 300.0
"""Until what a page should show is missing: only a test that fails waits so long, on a busy machine others too."""


class Page:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def send(self, method: str, **params: Any) -> Any:
        return self.browser.send(method, params, self.session)

    def go(self, address: str) -> None:
        """Opens an address and waits until it is loaded."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < end, f"never true: {script}\n{self.browser.errors}"
            time.sleep(0.1)

    def size(self, width: int, height: int, dark: bool = False, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        found = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def key(self, name: str, shift: bool = False) -> None:
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Enter": 13, "Tab": 9}
        codes |= {" ": 32}
        text = {"text": "\r" if name == "Enter" else name} if name == "Enter" or len(name) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            key = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, 0), "modifiers": 8 * shift}
            self.send("Input.dispatchKeyEvent", type=kind, **key, **(text if kind == "keyDown" else {}))

    def tab_to(self, selector: str, back: bool = False) -> None:
        """Presses Tab, or Shift+Tab, until what has the focus fits."""
        for _ in range(90):
            if self.evaluate(f"document.activeElement.matches({selector!r})"):
                return
            self.key("Tab", shift=back)
        raise AssertionError(f"Tab never comes to {selector}")

    def press(self, selector: str) -> None:
        """Tab to something, and Enter."""
        self.tab_to(selector)
        self.key("Enter")

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.send("Input.insertText", text=text)

    def choose(self, files: list[Path]) -> None:
        """Presses Enter on the file input that has the focus, and answers the system's dialog, which must open."""
        self.send("Page.setInterceptFileChooserDialog", enabled=True)
        self.browser.dialogs.clear()
        self.key("Enter")
        end = time.monotonic() + SECONDS
        while not self.browser.dialogs:
            assert time.monotonic() < end, "no dialog for files opens"
            self.wait("true")
        paths = [str(each) for each in files]
        self.send("DOM.setFileInputFiles", backendNodeId=self.browser.dialogs.pop(), files=paths)

    def front(self) -> None:
        """Shows this tab, and hides the others."""
        self.send("Page.bringToFront")

    def close(self) -> None:
        self.browser.send("Target.closeTarget", {"targetId": self.target})

    def mouse(self, kind: str, x: float, y: float) -> None:
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)


class Browser:
    """The process; `errors` are what its pages complained about, `dialogs` the file inputs that opened one."""

    def __init__(self, profile: Path) -> None:
        read, self.to = os.pipe()
        self.of, write = os.pipe()
        os.set_inheritable(read, True)
        os.set_inheritable(write, True)
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
            *("--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        ]

        def descriptors() -> None:
            os.dup2(read, 3)
            os.dup2(write, 4)

        assert CHROMIUM, "no chromium is installed"
        self.process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4, read, write),
            preexec_fn=descriptors,
        )
        os.close(read)
        os.close(write)
        self.number, self.left, self.errors, self.dialogs = 0, b"", list[str](), list[int]()

    def send(self, method: str, params: dict[str, Any], session: str = "") -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self.number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.left:
            ready, _, _ = select.select([self.of], [], [], SECONDS)
            assert ready, "chromium does not answer"
            data = os.read(self.of, 1 << 20)
            assert data, "chromium has ended"
            self.left += data
        text, _, self.left = self.left.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        told, kind = event.get("params", {}), event.get("method")
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:500])
        elif kind == "Page.fileChooserOpened":
            self.dialogs.append(told["backendNodeId"])
        elif kind == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def page(self) -> Page:
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        return page

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.to)
        os.close(self.of)


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    found = Browser(profile)
    try:
        yield found
    finally:
        found.close()
