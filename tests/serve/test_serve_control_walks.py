"""Walks through the page of a run that is asked for something, in a real Chromium: by keys alone where that is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import fake_run
import pytest
import served
from browser import Browser, Page

from daguerre.checkpoint import actions
from daguerre.checkpoint.actions import PAUSED, RELEASED, Inbox
from daguerre.checkpoint.run_dir import RunFolder, State, lock_holder

pytestmark = [browser.needed, pytest.mark.long]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(actions, "LOOK_SECONDS", 0.05)
    run = fake_run.write_run(tmp_path / "mine", steps=200, saves=3, state="running")
    with (run / "config.yaml").open("a") as config:
        config.write("sampling:\n  prompts: [a red star, a blue ring]\n")
    return tmp_path


@contextmanager
def trained(run: Path) -> Iterator[list[dict[str, Any]]]:
    """A process that holds a run and answers as a training does; what was asked of it, in order."""
    asked: list[dict[str, Any]] = []
    over = threading.Event()

    def work() -> None:
        with RunFolder(run).hold():
            holder = lock_holder(run)
            assert holder is not None
            inbox = Inbox(RunFolder(run), holder, asked.append)  # type: ignore[arg-type]
            while not over.is_set():
                for one in inbox.take():
                    asked.append(one.action.model_dump(include={"kind", "values"}))
                    if one.action.kind == "sample":
                        fake_run.write_samples(run, 200, 1.0, run / "samples" / "asked" / one.ident)
                    states: dict[str, tuple[State, str]] = {
                        "pause": ("running", PAUSED),
                        "continue": ("running", ""),
                        "release": ("saved", RELEASED),
                    }
                    if one.action.kind in states:
                        state, reason = states[one.action.kind]
                        RunFolder(run).write_status(state, step=200, samples=6400, total_steps=3000, reason=reason)
                    inbox.answer(one, True, f"{one.action.kind} is done", 200)
                    if one.action.kind == "release":
                        return
                time.sleep(0.02)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join(10)


def opened(page: Page, here: str, folder: Path) -> None:
    page.go(here + served.address(folder, "mine").lstrip("/"))
    page.wait("document.querySelector('#control:not([hidden])') && document.querySelectorAll('.u-over').length >= 6")


def test_with_keys_alone_a_run_is_sampled_paused_continued_and_released(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    chromium.errors.clear()
    page.size(1280, 900)
    with served.running(folder, control=True) as here, trained(folder / "mine") as asked:
        opened(page, here, folder)
        page.evaluate("window.confirm = () => true")
        page.press("[data-action=sample]")
        page.wait("document.activeElement.id === 'sample-prompts'")
        page.type("a green star\n\na yellow ring ")
        page.tab_to("#sample-seed")
        page.type("7")
        page.tab_to("#sample-strength")
        page.type("0.5")
        page.press("#form-sample [type=submit]")
        page.wait("document.querySelector('#answer').textContent === 'Sample now: sample is done'")
        page.wait("document.querySelector('#asked img')")
        page.evaluate("document.querySelector('#asked img').scrollIntoView()")  # it is loaded when it is looked at
        page.wait("document.querySelector('#asked img').naturalWidth > 0")
        page.press("[data-action=pause]")
        page.wait("document.querySelector('[data-action=pause]').hidden")
        page.wait("document.querySelector('.state.paused') && document.title.startsWith('Paused')")
        page.wait("document.querySelector('.notice.paused').textContent.includes('daguerre control RUN continue')")
        page.press("[data-action=continue]")
        page.wait("document.querySelector('[data-action=continue]').hidden && document.querySelector('.state.running')")
        page.press("[data-action=release]")
        page.wait("document.querySelector('.state.released') && document.querySelector('#control').hidden")
        page.close()
    values = {"prompts": ["a green star", "a yellow ring"], "seed": 7, "strength": 0.5}
    assert asked[0] == {"kind": "sample", "values": values}
    assert [one["kind"] for one in asked[1:]] == ["pause", "continue", "release"]
    assert [error for error in chromium.errors if "ERR_CONNECTION" not in error] == []


def test_prompts_are_changed_while_it_trains_on_a_phone(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    page.size(360, 740, dark=True, mobile=True)
    with served.running(folder, control=True) as here, trained(folder / "mine") as asked:
        opened(page, here, folder)
        page.evaluate("document.querySelector('[data-action=change]').click()")
        box = "document.querySelector('#change-prompts')"
        page.wait("document.querySelector('#form-change').open")
        assert page.evaluate(f"{box}.value") == "a red star\na blue ring"
        assert page.evaluate("document.querySelector('#form-change').scrollWidth") <= 360
        page.evaluate(f"{box}.value = 'a red star\\na pink square'")
        page.evaluate("document.querySelector('#change-guidance_scale').value = '3.5'")
        page.evaluate("document.querySelector('#form-change [type=submit]').click()")
        page.wait("document.querySelector('#answer').textContent === 'Change prompts: change is done'")
        page.close()
    values = {"prompts": ["a red star", "a pink square"], "guidance_scale": 3.5}
    assert asked == [{"kind": "change", "values": values}]


def test_what_is_wrong_is_said_and_nothing_is_asked(folder: Path, chromium: Browser) -> None:
    page = chromium.page()
    with served.running(folder, control=True) as here, trained(folder / "mine") as asked:
        opened(page, here, folder)
        page.evaluate("document.querySelector('[data-action=sample]').click()")
        page.evaluate("document.querySelector('#sample-prompts').value = 'x\\n'.repeat(17)")
        page.evaluate("document.querySelector('#form-sample [type=submit]').click()")
        page.wait("document.querySelector('#answer').textContent.includes('at most 16')")
        page.close()
    assert asked == []
