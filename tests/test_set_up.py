"""The set-up of a clone: which torch is taken, what is installed for which target, and what a person is told to do."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from daguerre import errors

ROOT = Path(__file__).parents[1]
PINNED = "torch==2.13.0"


@pytest.fixture
def make_venv(tmp_path, monkeypatch):
    """tools/make_venv.py on a Linux machine without a GPU, for a clone in an empty folder."""
    spec = spec_from_file_location("make_venv", ROOT / "tools" / "make_venv.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "constraints.txt").write_text(f"numpy==2.4.6\n{PINNED}\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "GPU_FILES", ())
    monkeypatch.setattr(module, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return module


@pytest.fixture
def wheels(make_venv, tmp_path, monkeypatch):
    """Puts empty builds of torch where pip looks; it looks nowhere else, and is that of the tests' Python."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.setenv(name, "/dev/null" if name == "PIP_CONFIG_FILE" else "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    (make_venv.VENV / "bin").mkdir(parents=True)
    python = make_venv.VENV / "bin" / "python"
    # Not a link, from where Python would not know its own environment: Debian's has no pip outside of one.
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)

    def put(*versions):
        for version in versions:
            inside = f"torch-{version}.dist-info"
            with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
                wheel.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{inside}/RECORD", "")

    return put


def test_without_a_gpu_the_cpu_build_is_taken_where_pip_finds_one(make_venv, wheels):
    wheels("2.13.0", "2.13.0+cpu", "2.13.0+cu130")
    assert make_venv.choose_torch() == f"{PINNED}+cpu"


def test_without_a_cpu_build_the_size_and_the_way_to_one_are_told_before(make_venv, wheels, capsys):
    wheels("2.13.0", "2.12.0+cpu", "2.13.0+cu130")
    assert make_venv.choose_torch() == PINNED
    told = capsys.readouterr().out
    for words in ("3 GB to download", "TORCH_INDEX=URL", "install page of PyTorch", "CPU", "Ctrl-C"):
        assert words in told


@pytest.mark.parametrize("why", ["driver", "nvidia-smi", "card", "index", "macOS"])
def test_pip_is_not_asked_where_the_default_build_is_wanted(make_venv, monkeypatch, tmp_path, why):
    def asked(*arguments, quiet=False):
        raise AssertionError("pip was asked for a CPU build")

    monkeypatch.setattr(make_venv, "pip", asked)
    if why == "driver":
        monkeypatch.setattr(make_venv, "GPU_FILES", (str(tmp_path),))
    if why == "nvidia-smi":
        monkeypatch.setattr(make_venv.shutil, "which", lambda name: f"/usr/bin/{name}")
    if why == "card":
        card(tmp_path, "0x10de", "0x030200")
    if why == "index":
        monkeypatch.setenv("TORCH_INDEX", "file:///some/index")
    if why == "macOS":
        monkeypatch.setattr(make_venv.sys, "platform", "darwin")
    assert make_venv.choose_torch() == PINNED


def card(folder, vendor, kind):
    """A device on the bus as Linux shows it."""
    device = folder / "pci" / f"{vendor}-{kind}"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_what_else_is_on_the_bus_is_no_gpu(make_venv, tmp_path):
    card(tmp_path, "0x8086", "0x030000")  # graphics of Intel
    card(tmp_path, "0x10de", "0x0c0330")  # a USB port of NVIDIA
    assert not make_venv.has_gpu()
    card(tmp_path, "0x10de", "0x030000")
    assert make_venv.has_gpu()


@pytest.fixture
def ran(make_venv, monkeypatch):
    """The commands that the set-up runs, in place of running them, with what they capture."""
    commands = []

    def run(command, capture_output=False, **more):
        commands.append((command, capture_output))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(make_venv.subprocess, "run", run)
    (make_venv.VENV / "bin").mkdir(parents=True)
    (make_venv.VENV / "bin" / "python").touch()
    return commands


def test_tools_of_tests_are_installed_for_tests_alone(make_venv, ran, capsys):
    make_venv.main([])
    assert [command[-3] for command, _ in ran if "-e" in command] == [f"{make_venv.ROOT}[datasets]"]
    assert sorted(path.name for path in make_venv.VENV.glob("installed*")) == ["installed"]
    ran.clear()
    make_venv.main(["--dev"])
    added = [f"{make_venv.ROOT}[dev]", "axe-playwright-python"]
    assert [command[-3] for command, _ in ran if "pip" in command] == added, "torch stays"
    assert sorted(path.name for path in make_venv.VENV.glob("installed*")) == ["installed", "installed-dev"]


def test_progress_is_shown_and_the_end_says_how_daguerre_is_called(make_venv, ran, capsys):
    make_venv.main([])
    installs = [(command, captured) for command, captured in ran if "install" in command and "--dry-run" not in command]
    assert len(installs) == 2
    for command, captured in installs:
        assert not captured
        assert not {"-q", "--quiet"} & set(command)
    assert f"source {make_venv.VENV}/bin/activate" in capsys.readouterr().out.splitlines()[-1]


def test_a_python_that_cannot_make_an_environment_is_named_with_what_it_lacks(make_venv, monkeypatch, capsys):
    monkeypatch.setattr(make_venv, "find_python", lambda: ("/usr/bin/python3", (3, 12, 3)))
    monkeypatch.setattr(make_venv.subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit):
        make_venv.make_venv()
    assert "apt install python3.12-venv" in capsys.readouterr().err


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder with the files of a clone that it reads."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/make_venv.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    # `make test` hands its own level and switches on: a make of its own, as a user's is, has none.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return lambda *words: subprocess.run(["make", *words], cwd=tmp_path, env=outside, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("target", "set_up", "last"),
    [
        ("quickstart", [""], "For the command `daguerre` in this shell: source .venv/bin/activate"),
        ("check", ["", "--dev"], ".venv/bin/mypy"),
    ],
)
def test_what_make_does_in_a_fresh_clone(make, target, set_up, last):
    shown = make("-n", target).stdout
    assert [words.strip() for words in re.findall(r"make_venv\.py(.*)", shown)] == set_up
    assert last in shown.splitlines()[-1]


@pytest.mark.parametrize("failing", ["", "ruff", "mypy", "python"])
def test_make_test_fails_with_each_of_its_parts(make, tmp_path, failing):
    """mypy runs beside the tests."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for made in ("installed", "installed-dev"):
        (tmp_path / ".venv" / made).touch()
    for name in ("ruff", "mypy", "python"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\necho said by {name}\nexit {int(name == failing)}\n")
        program.chmod(0o755)
    done = make("test")
    assert (done.returncode == 0) == (failing == ""), done.stderr
    assert ("said by mypy" in done.stdout) == ("said by python" in done.stdout) == (failing != "ruff")


def test_what_a_training_leaves_in_the_clone_changes_no_check(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.json", "__pycache__")
    )
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "runs").mkdir()  # as `make quickstart` does; benchmarks/runs.py is a module of that name
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", str(tmp_path / "benchmarks")]
    subprocess.run(ruff, cwd=tmp_path, check=True)


def test_an_error_names_the_command_that_installs_what_is_missing(monkeypatch, tmp_path):
    constraints = ROOT / "constraints.txt"
    assert errors.install("torch>=2") == f"{sys.executable} -m pip install -c {constraints} 'torch>=2'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "daguerre" / "errors.py"))
    monkeypatch.setattr(errors.sys, "executable", "/my env/bin/python")
    assert errors.install("torch") == "'/my env/bin/python' -m pip install torch", "outside of a clone"


def test_nothing_is_said_to_be_published():
    """`pip install daguerre` finds nothing; in a clone `pip install -e '.[...]'` works, or the packages' own names."""
    texts = [path for kind in ("*.md", "*.py", "*.yaml") for path in ROOT.glob(f"[!.]*/**/{kind}")]
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *texts]:
        if path != Path(__file__):
            assert not re.search(r"daguerre\[|pip install '?daguerre", path.read_text(encoding="utf-8")), path


def test_every_pin_is_for_the_oldest_python_too():
    """Of a pin that is for a later Python pip finds no version, and an old pip looks for one for hours."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    installed = [(each.metadata["Name"], each.version, each.metadata["Requires-Python"]) for each in distributions()]
    asked = {name: SpecifierSet(python) for name, version, python in installed if python and pins.get(name) == version}
    assert len(asked) > 50
    assert {name: str(python) for name, python in asked.items() if "3.11.0" not in python} == {}
