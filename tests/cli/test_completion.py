"""`daguerre completion`: what real shells complete with its scripts; it and helps import nothing slow."""

import ast
import shutil
import subprocess
import sys

import pytest

from daguerre import errors, plugins
from daguerre.cli import completion, main
from daguerre.config import config as configs
from daguerre.config import fields


@pytest.fixture
def script(tmp_path, capsys):
    def written(shell: str):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed here")
        assert main.run(["completion", shell]) == errors.DONE
        path = tmp_path / f"script.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return written


def said(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()


CASES = [
    (["tr"], {"train"}),
    (["data", "st"], {"stats"}),
    (["train", "quickstart_l"], {"quickstart_lcm", "quickstart_lora"}),
    (["train", "x", "training.dur"], {"training.duration="}),
    (["train", "x", "objective.name=d"], {"dpo"}),
]


@pytest.mark.parametrize(("words", "wanted"), CASES)
def test_bash(words, wanted, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    split = [part for word in words for part in (word.replace("=", " = ").split() or [word])]  # as bash takes words
    line = f"COMP_WORDS=(daguerre {' '.join(split)}) COMP_CWORD={len(split)}; _daguerre; echo ${{COMPREPLY[@]}}"
    assert {*said("bash", "-c", f"source {script('bash')}; {line}")} == wanted


@pytest.mark.parametrize(("words", "wanted"), CASES)
def test_fish(words, wanted, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {*said("fish", "-c", f"source {script('fish')}; complete -C 'daguerre {' '.join(words)}'")}
    assert {word.rpartition("name=")[2] for word in found} == wanted


@pytest.mark.parametrize(("words", "wanted"), CASES)
def test_zsh(words, wanted, script):
    """Without its line editor: all that the function would offer, which zsh then matches."""
    stand_ins = "compdef(){}; _files(){}; compset(){}; compadd(){ print -r -- $@ }"
    line = f"words=(daguerre {' '.join(words)}) CURRENT={len(words) + 1}; _daguerre"
    assert wanted <= {*said("zsh", "-fc", f"{stand_ins}; source {script('zsh')}; {line}")}


def test_keys_are_settings_and_all_of_fixed_sections_are_there(script, capsys):
    leaves = fields.leaves(configs.Config, configs.load("quickstart").config.model_dump(mode="json"))
    assert main.run(["completion", "bash"]) == errors.DONE
    text = capsys.readouterr().out
    sections = {path[: path.rfind(".")] for path in leaves if "." in path}
    named = {key for key, _ in completion._named()}
    assert [key for key in completion._keys() if key not in {*leaves, *sections, *named}] == []
    for section in ("training", "ema", "checkpoint", "sampling", "validation"):
        inner = [path for path in leaves if path.startswith(f"{section}.") and path.count(".") == 1]
        assert inner
        assert [path for path in inner if f"{path}=" not in text] == []
    assert [name for name in plugins.names("optimizers") if name not in text] == []


@pytest.mark.parametrize("words", [["completion", "bash"], ["--version"], ["--help"], ["train", "--help"]])
def test_quick_commands_import_nothing_slow(words):
    """Torch and pydantic take seconds; each of the others as long as all the rest of such a command together."""
    slow = {
        "torch",
        "pydantic",
        "numpy",
        "omegaconf",
        "rich",
        "yaml",
        "importlib.metadata",
        "inspect",
        "ast",
        "tempfile",
        "json",
    }
    code = (
        f"import sys; from daguerre.cli import main; main.run({words})\n"
        f"sys.exit(', '.join({slow} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_helps_are_the_docstrings():
    groups = ["", *(name for name, verb in main.verbs().items() if verb.is_group)]
    for verb in (verb for group in groups for verb in main.verbs(group).values()):
        docstring = ast.get_docstring(ast.parse(verb.path.read_text(encoding="utf-8")))
        summary, _, text = docstring.partition("\n\n")
        assert verb.summary == summary.removesuffix(".")
        assert verb.is_group or verb.help == text


def test_another_shell_is_refused(capsys):
    assert main.run(["completion", "tcsh"]) == errors.REFUSED
    assert "bash|zsh|fish" in capsys.readouterr().err
