"""All pages of docs/: each command in them means something, links lead somewhere, and the site has every page."""

import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from quick_cases import chosen

from daguerre import __version__
from daguerre.cli import main
from daguerre.config import config, overrides, recipe

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
OF_RECIPES = ("train", "plan", "bench", "cache", "probe")
"""Verbs that take a recipe."""
OF_SETTINGS = ("train", "cache", "probe")
"""Those of them that take settings alone."""
OWN = {"mine", "sketch", "my_recipe"}
"""Recipes of a reader's own."""
OF_PLUG_INS = ("extending.md", "plugins.md")
"""The pages whose recipes name plug-ins that the reader writes."""


def commands():
    """(page, command line) of every code block."""
    for name, text in TEXTS.items():
        fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        indented = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
        for block in [*fenced, *indented]:
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if "daguerre " in line else []
                for is_end, command in groupby(words, lambda word: word in ("&&", "|", ">", "&")):
                    if not is_end and (own := [*command])[0] == "daguerre":
                        yield name, shlex.join([own[0], *(own[3:] if own[1:2] == ["--plugins"] else own[1:])])


EVERY = sorted({*commands()})


def is_for_a_shipped_recipe(words):
    return words[1] in OF_SETTINGS and len(words) > 2 and words[2] in recipe.shipped()


CONFIGS = [
    (page, line) for page, line in EVERY if page not in OF_PLUG_INS and is_for_a_shipped_recipe(shlex.split(line))
]


@pytest.mark.parametrize("page", TEXTS)
def test_the_verbs_of_commands_exist(page):
    for line in (line for where, line in EVERY if where == page):
        words = shlex.split(line)
        assert words[1] in {*main.verbs(), "VERB"}, line
        if "VERB" not in words and "--help" not in words:
            verb, _ = main._verb(words[1:])
            assert not verb.is_group, line
        is_name = words[1] in OF_RECIPES and words[2:] and re.fullmatch(r"[a-z_0-9]+", words[2])
        if is_name and words[2] not in ("verify", "purge"):
            assert words[2] in {*recipe.shipped(), *OWN}, f"{line}: no such recipe"


@pytest.mark.parametrize(("page", "line"), chosen(CONFIGS, lambda page, line: CONFIGS.index((page, line)) % 12 == 0))
def test_settings_in_commands_are_settings(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = overrides.split([word for word in shlex.split(line)[2:] if word != "--dry-run"])
    assert config.load(given.recipe, given.overrides)


def anchors(text):
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        path = folder / place if place else folder / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"


@pytest.mark.parametrize("page", TEXTS)
def test_rows_of_a_table_have_the_cells_of_its_head(page):
    """A row with a bar that is not escaped, or behind an empty line, is drawn as text or loses its end."""
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = table.splitlines()
        assert re.fullmatch(r"[|\- :]+", "".join(rows[:1])), f"{page}: no head above {head}"
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", head)), f"{page}: {row}"


def test_pages_that_messages_name_are_there_with_their_entry():
    named = {
        place
        for path in (ROOT / "src").rglob("*.py")
        for place in re.findall(r"docs/([a-z-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    }
    assert not [place for place in named if place[0] not in TEXTS]
    assert not [(page, entry) for page, entry in named if entry and entry not in anchors(TEXTS[page])]
    entries = {entry for page, entry in named if page == "trouble.md"}
    assert entries >= {
        "nan",
        "grey-images",
        "out-of-memory",
        "the-trigger-word",
        "cut-captions",
        "no-effect-in-comfyui",
    }


def test_the_site_has_every_page():
    listed = re.findall(r"^([a-z-]+)$", TEXTS["index.md"], re.MULTILINE)
    assert sorted(f"{name}.md" for name in listed) == sorted(TEXTS.keys() - {"README.md", "index.md"})


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in (
        "daguerre.data.source.Source",
        "daguerre.models.family.Family",
        "daguerre.objectives.objective.Objective",
    ):
        assert f'id="{name}"' in api, name


def test_the_citation_names_this_version():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {__version__}" in lines
