"""docker/Dockerfile: linted, pinned, not root; its commands run in a fresh environment, as tests have no engine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed import ROOT, dependencies, environment

from daguerre.cli import main

FILE = ROOT / "docker" / "Dockerfile"
ALLOWED = ROOT / "docker" / "Dockerfile.dockerignore"


def instructions():
    """(word, argument) of each instruction, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def test_the_linter_has_no_word():
    linter = shutil.which("hadolint", path=Path(sys.executable).parent)
    if linter is None:
        pytest.skip("hadolint is not installed (make .venv/installed-dev)")
    done = subprocess.run([linter, "--no-color", FILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_base_is_pinned_and_no_command_of_the_image_runs_as_root():
    words = [word for word, _ in instructions()]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-\w+@sha256:[0-9a-f]{64}", dict(instructions()[:1])["ARG"])
    assert {argument.split()[0] for word, argument in instructions() if word == "FROM"} == {"${BASE}"}
    last = dict(instructions())  # of an instruction that comes twice the last one counts, as for the engine
    assert last["USER"] == "${USER_ID}"
    assert int(next(argument for _, argument in instructions() if argument.startswith("USER_ID=")).split("=")[1]) > 0
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    assert json.loads(last["ENTRYPOINT"]) == ["daguerre"]
    assert json.loads(last["CMD"])[0] in main.verbs()


def context(folder):
    """What the engine is given of the clone: what the file of ignored names lets through."""
    lines = [line for line in ALLOWED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    left_out = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    folder.mkdir()
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": left_out} if (ROOT / name).is_dir() else {}))
    return folder


@pytest.mark.long
def test_its_commands_install_what_it_starts(tmp_path):
    """All RUN lines but the one that makes a user, without a network: what pip would load is linked into the venv."""
    clone, variables = context(tmp_path / "clone"), environment(tmp_path)
    variables |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}", "PIP_NO_INDEX": "1"}
    variables["PIP_NO_BUILD_ISOLATION"] = "0"  # pip's way to say "none": setuptools is the one of this Python

    def inside(text):
        return re.sub(r"(?<![\w.$])/(?=(?:opt|build|data)\b)", f"{tmp_path}/", text)

    def run(command):
        done = subprocess.run(
            ["sh", "-ec", command], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    left_out = []
    for word, argument in instructions():
        if word == "RUN" and "useradd" in argument:
            left_out.append(argument)
        elif word == "RUN":
            run(inside(argument))
            for site in tmp_path.glob("opt/daguerre/lib/python*/site-packages"):
                if not (site / "dependencies.pth").exists():  # before the old setuptools that venv of 3.11 brings
                    linked = str(dependencies(tmp_path / "dependencies"))
                    (site / "dependencies.pth").write_text(f"import sys; sys.path.insert(1, {linked!r})\n")
        elif word == "COPY":
            *stage, source, target = argument.split()
            origin = Path(inside(source)) if stage else clone / source
            copy = shutil.copytree if origin.is_dir() else shutil.copy
            copy(origin, inside(target), **({"dirs_exist_ok": True} if origin.is_dir() else {}))
        elif word in ("ENV", "ARG"):
            for name, value in (pair.split("=", 1) for pair in argument.split()):
                variables[name] = inside(value).replace("$PATH", variables["PATH"])
        elif word == "WORKDIR":
            Path(inside(argument)).mkdir(exist_ok=True)
    assert len(left_out) == 1
    assert run("command -v daguerre").strip() == str(tmp_path / "opt" / "daguerre" / "bin" / "daguerre")
    last = dict(instructions())
    shown = run(" ".join([*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]))
    assert "torch" in shown
    where = run("python -c 'import daguerre; print(daguerre.__file__)'").strip()
    assert Path(where).is_relative_to(tmp_path / "opt" / "daguerre" / "lib")
