"""What is built for people without the clone: sdist and wheel hold every file; the wheel trains in an empty folder."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from installed import ROOT, dependencies, environment

from daguerre import __version__

PACKAGE = ROOT / "src" / "daguerre"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RECORDER = """
import os, sys

_log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def _record(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and not isinstance(arguments[0], (int, type(None))):
        os.write(_log, os.fsencode(os.path.abspath(arguments[0])) + b"\\n")

sys.addaudithook(_record)
"""


def in_tree():
    """The files of the package, as the wheel names them."""
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_every_file_that_is_no_module_is_declared_as_data():
    """Without a build; `test_sdist_and_wheel_hold_every_file` looks into what setuptools makes of it."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["daguerre"]
    declared = {path.relative_to(ROOT / "src").as_posix() for one in patterns for path in PACKAGE.glob(one)}
    assert {name for name in in_tree() if not name.endswith(".py")} <= declared
    for pattern in patterns:
        assert any(path.is_file() for path in PACKAGE.glob(pattern)), pattern


def test_every_licence_of_what_is_vendored_is_declared():
    """By its name beside the files, `NAME.LICENSE`; a minified script is never our own."""
    declared = {path for pattern in PROJECT["project"]["license-files"] for path in ROOT.glob(pattern)}
    assert declared == {ROOT / "LICENSE", *PACKAGE.rglob("*.LICENSE")}
    for script in PACKAGE.rglob("*.min.js"):
        assert script.with_name(script.name.replace(".min.js", ".LICENSE")) in declared


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """sdist and wheel, as `make package` builds them: the wheel from the sdist, so that this holds what it takes."""
    pytest.importorskip("build", reason="build is not installed (make .venv/installed-dev)")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_sdist_and_wheel_hold_every_file(built):
    stem = f"daguerre-{__version__}"
    with zipfile.ZipFile(built / f"{stem}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if not name.startswith(f"{stem}.dist-info/")} == in_tree()
    licences = {path.relative_to(ROOT).as_posix() for path in (ROOT / "LICENSE", *PACKAGE.rglob("*.LICENSE"))}
    assert {f"{stem}.dist-info/licenses/{name}" for name in licences} <= names
    with tarfile.open(built / f"{stem}.tar.gz") as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in in_tree()} <= inside
    assert inside >= licences | {"constraints.txt", "CHANGELOG.md", "README.md", "pyproject.toml"}
    assert not [name for name in inside if name.startswith("tests/")], "without what they import they do not run"


@pytest.mark.long
def test_the_wheel_trains_in_an_empty_folder_and_reads_nothing_of_the_clone(built, tmp_path):
    """The first 20 updates of the quickstart, with every file that Python opens written down by an audit hook."""
    venv, work, log = tmp_path / "venv", tmp_path / "work", tmp_path / "opened.txt"
    work.mkdir()

    def run(*command):
        done = subprocess.run(
            [*map(str, command)], cwd=work, env=environment(work), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python, site = venv / "bin" / "python", next(venv.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{dependencies(tmp_path / 'dependencies')}\n")
    wheel = next(built.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site / "recorder.py").write_text(RECORDER.format(log=str(log)))
    (site / "recorder.pth").write_text("import recorder\n")

    found = run(python, "-c", "import daguerre, sys; print(daguerre.__file__, *sys.path, sep='\\n')").splitlines()
    assert found[0] == str(site / "daguerre" / "__init__.py")
    assert not [path for path in found if path and Path(path).resolve().is_relative_to(ROOT / "src")]
    fewer = ["training.duration=20 steps", "lr_scheduler.warmup=5 steps", "data.checked_prompts=4"]
    run(venv / "bin" / "daguerre", "train", "quickstart", *fewer, "validation.num_samples=4")
    run(venv / "bin" / "daguerre", "report", "runs/quickstart")
    metrics = (work / "runs" / "quickstart" / "metrics" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"step": 20' in metrics
    assert (work / "runs" / "quickstart" / "pipeline" / "model_index.json").is_file()

    opened = {Path(line) for line in log.read_text(encoding="utf-8").splitlines()}
    assert {site / "daguerre" / name for name in ("recipes/quickstart.yaml", "report/page.html")} <= opened
    ours = [path for path in opened if path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix)]
    assert not ours, "files of the clone were opened"


@pytest.mark.long
def test_the_bill_of_materials_is_valid_and_tells_what_users_get_from_what_developers_do(tmp_path):
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed (make .venv/installed-dev)")
    schemas = pytest.importorskip("cyclonedx.schema").SchemaVersion
    validation = pytest.importorskip("cyclonedx.validation.json").JsonStrictValidator
    out = tmp_path / "dist" / "daguerre.cdx.json"
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    text = out.read_text(encoding="utf-8")
    bill = json.loads(text)
    schema = next(each for each in schemas if each.to_version() == bill["specVersion"])
    assert validation(schema).validate_str(text) is None
    assert str(ROOT) not in text
    assert bill["metadata"]["component"]["version"] == __version__
    scopes = {each["name"].lower(): each["scope"] for each in bill["components"]}
    asked = {re.match(r"[\w-]+", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert {name for name in asked if scopes[name] != "required"} == set()
    assert {path.stem for path in PACKAGE.rglob("*.LICENSE")} <= {name for name in scopes if scopes[name] == "required"}
    assert (scopes["datasets"], scopes["pytest"], scopes["furo"]) == ("optional", "excluded", "excluded")
