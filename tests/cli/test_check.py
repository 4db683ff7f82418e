"""`daguerre check`: a plug-in keeps the contract of its kind, or the command says what it breaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daguerre import errors
from daguerre.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin" / "src" / "daguerre_example"


def checked(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "daguerre", "--plugins", str(folder), "check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of plug-ins with the example's condition, as it is and with a fault."""
    (tmp_path / "conditions").mkdir()
    code = (EXAMPLE / "posterize.py").read_text()
    (tmp_path / "conditions" / "posterize.py").write_text(code)
    wrong = code.replace("posterize", "broken").replace("return (", "return np.random.default_rng().permutation(")
    (tmp_path / "conditions" / "broken.py").write_text(wrong)
    return tmp_path


def test_a_condition_keeps_its_contract_and_a_broken_one_does_not(folder):
    whole = checked(folder, "posterize", "levels=3")
    assert (whole.returncode, "passed" in whole.stdout) == (errors.DONE, True), whole.stdout + whole.stderr
    broken = checked(folder, "broken")
    assert broken.returncode == errors.FAILED
    assert "test_it_is_a_pure_function_of_image_and_draw" in broken.stdout
    refused = checked(folder, "posterize", "levels=1")
    assert refused.returncode == errors.FAILED
    assert "greater than or equal to 2" in refused.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", ["difference", "sources.shapes", "euler", "lion", "wd14"])
def test_kinds(name, folder):
    (folder / "objectives").mkdir()
    (folder / "objectives" / "difference.py").write_bytes((EXAMPLE / "difference.py").read_bytes())
    done = checked(folder, name)
    assert done.returncode == errors.DONE, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.v", "objective is no kind of plug-ins; there are families, objectives"),
        ("ddmi", "there is no plug-in ddmi; did you mean ddim?"),
        ("lcm", "choose one of objectives.lcm, samplers.lcm"),
        ("sources.nothing", "there is no 'nothing' in sources"),
    ],
)
def test_a_name_that_is_none(word, said, capsys):
    assert main.run(["check", word]) == errors.REFUSED
    assert said in capsys.readouterr().err
