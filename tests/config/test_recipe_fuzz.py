"""Recipes and overrides that nobody would write: whatever they hold, the answer is a config or a UserError."""

import string
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daguerre.config import config
from daguerre.errors import UserError

DIGITS = "9" * 5000
ODD = {
    "seed: !!int 1e5": "line 2: '1e5' is not of the kind 'int'",
    "seed: !!float x": "line 2: 'x' is not of the kind 'float'",
    "seed: !!bool maybe": "line 2: 'maybe' is not of the kind 'bool'",
    "seed: !!timestamp x": "line 2: 'x' is not of the kind 'timestamp'",
    f"seed: {DIGITS}": "line 2: '99999",
    f"model: {{x: {DIGITS}}}": "line 2: '99999",
    f"seed: 0x{'f' * 6000}": "a number of more than 1024 bits",
    f"seed: 1:{':'.join(['59'] * 3000)}": "a number of more than 1024 bits",
    f"seed: {'[' * 3000}{']' * 3000}": "nested too deeply",
    f"seed: {'[' * 100}{']' * 100}": "nested too deeply",
    f"seed: {'{a: ' * 2000}{'}' * 2000}": "nested too deeply",
    "adapter.name: ???": "adapter.name",
    "a.b.c: [???]": "a.b.c",
    "adapter:\n  name: ???": "adapter.name\n      must be given",
    "extends: ???": "there is no recipe '???'",
}


def refusal(text, tmp_path, *given):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with suppress(UserError):
        config.peek(str(path), given)
    with pytest.raises(UserError) as caught:
        config.load(str(path), given)
    return str(caught.value)


@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:20])
def test_an_odd_value_is_refused_by_name(tmp_path, text):
    head = "" if text.startswith("extends") else "extends: quickstart\n"
    assert ODD[text] in refusal(head + text + "\n", tmp_path)


@pytest.mark.parametrize(
    "value", ["!!int 1e5", "!!timestamp x", DIGITS, "0x" + "f" * 6000, "[" * 3000 + "]" * 3000, "???", "!!set {a}"]
)
@pytest.mark.parametrize("key", ["seed", "adapter.name", "model.unet", "sampling.prompts", "no.such"])
def test_an_odd_override_is_an_error_of_the_user_or_fine(key, value):
    with suppress(UserError):
        config.load("quickstart", [f"{key}={value}"])


KEYS = st.sampled_from(
    ["extends", "seed", "adapter", "adapter.name", "name", "data", "source", "sources", "path", "model", "unet", "a.b",
     "family", "objective", "training", "duration", "sampling", "prompts", "optimizer", "${seed}", "", "<<",
     "1", "null"]
)  # fmt: skip
PLAIN = st.sampled_from(
    ["???", "${seed}", "${a.b}", "${", "!!int x", "!!float 1e", "!!bool 1", "!!timestamp 2001-99-99", "!!binary x!",
     ".nan", "-.inf", "1e999", "0o8", "1_0", "2001-01-01", "mix", "shapes", "folder", "sd", "*a", "&a 1", "!x",
     "'", "null", "~", "true", "quickstart", "3 steps", "https://a:b@c/d?e", "pipe:x", "[1, {2: 3}]", "? 1"]
) | st.text(string.printable, max_size=12)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: f"[{', '.join(found)}]")
        | st.dictionaries(KEYS, inner, max_size=3).map(
            lambda found: "{" + ", ".join(f"{key}: {value}" for key, value in found.items()) + "}"
        )
    ),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.dictionaries(KEYS, VALUES, max_size=3), st.dictionaries(KEYS, VALUES, max_size=2))
def test_no_recipe_is_a_traceback(tmp_path_factory, tree, over):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in tree.items()), encoding="utf-8")
    given = [f"{key}={value}" for key, value in over.items()]
    for name, words in ((str(path), []), ("quickstart", given)):
        with suppress(UserError):
            config.load(name, words)
        with suppress(UserError):
            config.peek(name, words)
