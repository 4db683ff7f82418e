import gc
import sys
from types import ModuleType

import pytest

from daguerre import plugins
from daguerre.cli import main
from daguerre.errors import UserError


@pytest.fixture
def frozen(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    return calls


def test_nothing_is_collected_while_a_verb_is_imported(monkeypatch):
    seen, load = [], main.import_module
    monkeypatch.setattr(main, "import_module", lambda name: (seen.append(gc.isenabled()), load(name))[1])
    assert main.run(["recipes"]) == 0
    assert seen == [False]
    assert gc.isenabled()


def test_the_collector_is_as_it_was_before_and_few_modules_are_looked_at(frozen):
    with pytest.raises(UserError), plugins.uncollected():
        raise UserError("no such module", code="missing")
    assert gc.isenabled()
    gc.disable()
    try:
        with plugins.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not frozen


def test_what_many_modules_have_made_is_looked_at_no_more(monkeypatch, frozen):
    with plugins.uncollected():
        for i in range(plugins._MANY + 1):
            monkeypatch.setitem(sys.modules, f"none_of_ours_{i}", ModuleType("none"))
    assert frozen == [1]
