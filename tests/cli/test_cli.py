"""The command line: verbs, help, exit codes."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

import daguerre
from daguerre import errors, faults
from daguerre.cli import main
from daguerre.errors import UserError

ROOT = Path(__file__).parents[2]


class Raising:
    """A verb that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, arguments: list[str]) -> int:
        raise self.error


@pytest.fixture
def outcome(monkeypatch, capsys):
    """The exit code and the error output of a verb that raises."""

    def run(error):
        verb = Raising(error)
        monkeypatch.setattr(main, "import_module", lambda name: verb)
        code = main.run(["train", "x"])
        return code, capsys.readouterr().err

    return run


def test_the_docstring_of_a_verb_is_its_help():
    found = main.verbs()
    assert list(found)[:1] == ["train"]
    assert {"recipes", "doctor"} <= set(found)
    for name, verb in found.items():
        summary, text = verb.summary, verb.help
        assert "\n" not in summary, name
        assert len(summary) < 75, name
        assert text.startswith(f"usage: daguerre {name}"), name
        assert max(map(len, text.splitlines())) <= 120, name
        tree = ast.parse(verb.path.read_text(encoding="utf-8"))
        runs = any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)
        assert runs != verb.is_group, name


def test_help_says_all_verbs_and_exit_codes(capsys):
    assert main.run([]) == main.run(["--help"]) == main.run(["help"]) == 0
    text = capsys.readouterr().out
    for name, verb in main.verbs().items():
        assert f"{name} " in text
        assert verb.summary in text
    for code in errors.EXIT_CODES:
        assert f"{code}  " in text


def test_help_of_a_verb(capsys):
    assert main.run(["train", "--help"]) == main.run(["help", "train"]) == main.run(["train", "x", "-h"]) == 0
    text = capsys.readouterr().out
    assert text == (main.verbs()["train"].help + "\n") * 3
    assert "training.duration" in text


def test_version_is_the_packages(capsys):
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"daguerre {daguerre.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.get("version", daguerre.__version__) == daguerre.__version__


def test_an_unknown_verb(capsys):
    assert main.run(["trian", "x"]) == 2
    assert "Did you mean `daguerre train`?" in capsys.readouterr().err
    assert main.run(["quickstart"]) == 2
    assert "The verb comes first" in capsys.readouterr().err


def test_a_users_error_is_text_alone(outcome):
    assert outcome(UserError("do this")) == (2, "daguerre: do this\n")
    error = UserError("held")
    error.exit_code = errors.HELD
    assert outcome(error)[0] == 3


def test_only_errors_meant_for_users_are_told_as_theirs(outcome):
    """Ours raises what it likes: any other error, a ValueError of our own files too, is no user's fault."""
    for error in (AssertionError("ours"), KeyError("ours"), ValueError("ours"), json.JSONDecodeError("ours", "{", 0)):
        with pytest.raises(type(error)):
            outcome(error)


FAULTY = """
from types import SimpleNamespace
from daguerre.cli import main as cli; from daguerre import credentials
def fail(arguments):
    credentials.redact("https://me:hunter2pass@host/x.tar?sig=s1gnature")
    raise ValueError("https://me:hunter2pass@host/x.tar?sig=s1gnature and hunter2pass are not what was expected")
cli.import_module = lambda name: SimpleNamespace(run=fail)
cli.main()
"""


def test_a_fault_of_the_program_says_so_and_leaves_a_file_to_send(tmp_path):
    command = [sys.executable, "-c", FAULTY, "train", "data.path=https://you:0therpass@host/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    (file,) = tmp_path.iterdir()
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("daguerre: internal error: ValueError: https://***@host/x.tar?***")
    assert str(file) in second
    text = file.read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "line 6, in fail" in text
    assert "data.path=https://***@host/" in text
    for secret in ("hunter2", "s1gnature", "0therpass"):
        assert secret not in text + done.stderr


def test_a_fault_where_nothing_can_be_written_is_told_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    error = RuntimeError("ours")
    path = faults.recorded(error, tmp_path / "also absent")
    assert path is None
    if os.geteuid():  # root may write anywhere
        faults.tell(RuntimeError, error, None)
        assert "RuntimeError: ours" in capsys.readouterr().err.splitlines()[-1]


def test_a_fault_is_written_once(tmp_path):
    error = RuntimeError("ours")
    first = faults.recorded(error, tmp_path)
    assert first is not None
    assert faults.recorded(error, tmp_path / "other") == first
    assert list(tmp_path.iterdir()) == [first]


def test_the_machines_faults_name_the_file(outcome):
    assert outcome(OSError(28, "No space left on device", "/run/x")) == (
        1,
        "daguerre: No space left on device: /run/x. Free some space and run the same command again\n",
    )
    assert outcome(OSError(28, "No space left on device"))[1].startswith("daguerre: No space left on device. Free")
    assert outcome(OSError(13, "Permission denied", "/run/x")) == (1, "daguerre: Permission denied: /run/x\n")
    with pytest.raises(OSError, match="odd"):
        outcome(OSError("odd"))
    assert outcome(KeyboardInterrupt())[0] == 130


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "daguerre", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_a_wrong_recipe_in_a_real_process(tmp_path):
    (tmp_path / "r.yaml").write_text("run_name: x\ntrainng: {duration: 3 steps}\n", encoding="utf-8")
    done = shell("train", str(tmp_path / "r.yaml"), "--dry-run")
    assert done.returncode == 2
    assert "Did you mean training?" in done.stderr
    assert "must be given" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_pipe_is_quiet():
    words = [sys.executable, "-m", "daguerre", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_documentation_names_every_exit_code():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").rpartition("## Exit codes")[2]
    for code in errors.EXIT_CODES:
        assert str(code) in text
