"""Plug-ins from outside of the package: installed packages and folders, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from daguerre import plugins
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import fields
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError
from daguerre.run import resume

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
GIVEN = ["objective.name=difference", "adapter.condition=posterize"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield
    for cache in (plugins._outside, plugins._checked):
        cache.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("daguerre_example", "daguerre.outside"))]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Path:
    """A folder in which the example is installed, as pip writes it."""
    given = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site"
    package = folder / "daguerre_example"
    package.mkdir(parents=True)
    for path in (EXAMPLE / "src" / "daguerre_example").glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    info = folder / f"daguerre_example-{given['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {given['name']}\nVersion: {given['version']}\n")
    points = [
        line
        for group, own in given["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in own.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(str(folder))
    plugins._outside.cache_clear()
    return folder


def in_folder(folder: Path, kind: str = "objectives", name: str = "difference", more: str = "") -> Path:
    """A folder of plug-ins with the example's objective."""
    path = folder / kind / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    code = (EXAMPLE / "src" / "daguerre_example" / "difference.py").read_text()
    path.write_text(code.replace('Literal["difference"] = "difference"', f'Literal["{name}"] = "{name}"') + more)
    return folder


def named(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, str(folder))


def test_the_example_has_the_files_of_the_page():
    text = (ROOT / "docs" / "extending.md").read_text()
    blocks = {
        path.rpartition("/")[2]: code for path, code in re.findall(r"```python\n# src/(\S+)\n(.*?)```", text, re.S)
    }
    for name in ("difference.py", "posterize.py"):
        assert (EXAMPLE / "src" / "daguerre_example" / name).read_text() == blocks[name]


def test_a_package_is_found_checked_described_and_recorded(site):
    with pytest.raises(ConfigError, match="Did you mean 'posterize'"):
        configs.load("quickstart_controlnet", ["adapter.condition=posteriz"])
    configs.check_soon("quickstart_controlnet", GIVEN)
    with pytest.raises(ConfigError, match=r"Did you mean adapters\.controlnet\.condition\.levels"):
        configs.check_soon("quickstart_controlnet", [*GIVEN, "adapter.condition.level=3"])
    assert "daguerre_example.posterize" not in sys.modules, "names are checked without importing"
    loaded = configs.load("quickstart_controlnet", [*GIVEN, "adapter.condition.levels=3"]).config
    for kind, name in (("objectives", "difference"), ("conditions", "posterize")):
        record = loaded.plugins[kind][name]
        assert (record["package"], record["version"]) == ("daguerre-example", "0.1.0")
        assert re.fullmatch("[0-9a-f]{64}", str(record["digest"]))
    with pytest.raises(ConfigError, match="levels"):
        configs.load("quickstart_controlnet", [*GIVEN, "adapter.condition.levels=1"])
    leaves = fields.leaves(configs.Config, loaded.model_dump(mode="json"))
    assert leaves["adapters.controlnet.condition.levels"].doc == "Levels of each colour."
    assert configs.load("quickstart", [], yaml.safe_load(configs.dump(loaded))).config == loaded


def test_a_run_is_not_continued_with_other_code_unless_it_may(tmp_path, monkeypatch):
    named(in_folder(tmp_path / "plugins"), monkeypatch)
    given = ["objective.name=difference", "output_dir=" + str(tmp_path)]
    old = configs.load("quickstart", given)
    assert old.config.plugins["objectives"]["difference"]["package"] is None
    folder = RunFolder(tmp_path / "x")
    folder.path.mkdir()
    folder.config.write_text(configs.dump(old.config))
    assert resume.check_same_recipe(old.config, configs.load("quickstart", given).config, folder) == []
    in_folder(tmp_path / "plugins", more="# another line\n")
    again = configs.load(str(folder.path))
    assert again.notices[0].startswith("the plug-in difference of objectives is not the one that this was made with")
    recorded = old.config.model_copy(update={"plugins": again.recorded})
    with pytest.raises(UserError, match=r"plugins\.objectives\.difference\.digest: the run has"):
        resume.check_same_recipe(recorded, again.config, folder)
    may = again.config.model_copy(update={"allow_change": ["plugins"]})
    assert [change.path for change in resume.check_same_recipe(recorded, may, folder)] == [
        "plugins.objectives.difference.digest"
    ]


def test_a_tracker_and_a_sampler_of_elsewhere_may_come_go_and_change(tmp_path, monkeypatch):
    sampler = tmp_path / "plugins" / "samplers" / "mine.py"
    sampler.parent.mkdir(parents=True)
    sampler.write_bytes((ROOT / "src/daguerre/samplers/euler.py").read_bytes())
    named(tmp_path / "plugins", monkeypatch)
    plain = configs.load("quickstart").config
    first = configs.load("quickstart", ["sampling.sampler=mine"]).config
    sampler.write_text(sampler.read_text() + "# another line\n")
    second = configs.load("quickstart", ["sampling.sampler=mine"]).config
    assert first.plugins != second.plugins
    for old, new in ((plain, first), (first, second), (second, plain)):
        assert resume.check_same_recipe(old, new, RunFolder(tmp_path)) == []


def test_the_digest_is_of_all_files_that_a_plug_in_imports_and_of_no_other(tmp_path, monkeypatch):
    folder = in_folder(tmp_path, more="from daguerre.outside import _tables\n")
    (folder / "_tables.py").write_text("X = 1\n")
    in_folder(tmp_path, name="another")
    named(folder, monkeypatch)

    def digest() -> str:
        return plugins.digest(plugins.outside("objectives")["difference"])

    first = digest()
    in_folder(tmp_path, name="another", more="# changed\n")
    assert digest() == first
    (folder / "_tables.py").write_text("X = 2\n")
    assert digest() != first


def test_what_a_folder_may_not_hold(tmp_path, monkeypatch, capsys):
    def said(*words: str) -> str:
        assert main.run([*words]) == 2
        return capsys.readouterr().err

    assert "is not there" in said("--plugins", str(tmp_path / "none"), "recipes")
    assert "--plugins stands before the verb" in said("train", "quickstart", f"--plugins={tmp_path}")
    in_folder(tmp_path / "a", kind="objective")
    assert "did you mean objectives/?" in said(f"--plugins={tmp_path / 'a'}", "recipes")
    monkeypatch.setenv(plugins.VARIABLE, "")
    in_folder(tmp_path / "b", name="eps")
    assert "there is a plug-in 'eps' of objectives already" in said(f"--plugins={tmp_path / 'b'}", "recipes")
    monkeypatch.setenv(plugins.VARIABLE, "")
    in_folder(tmp_path / "c", more="import nothing_of_this_name\n")
    asked = [f"--plugins={tmp_path / 'c'}", "train", "quickstart", "objective.name=difference", "--dry-run"]
    assert "cannot be imported: No module named 'nothing_of_this_name'" in said(*asked)
    monkeypatch.setenv(plugins.VARIABLE, "")
    in_folder(tmp_path / "d", name="cut", more="def broken(:\n")
    asked = [f"--plugins={tmp_path / 'd'}", "train", "quickstart", "objective.name=cut", "--dry-run"]
    assert "cut.py cannot be read as Python: invalid syntax (cut.py, line " in said(*asked)


def test_settings_of_another_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "conditions").mkdir()
    shutil.copy(EXAMPLE / "src" / "daguerre_example" / "posterize.py", tmp_path / "conditions" / "moved.py")
    named(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"""has name='posterize' in its Settings: write name: Literal\["moved"\]"""):
        plugins.find("conditions", "moved")


def test_two_packages_with_one_name_and_one_that_names_no_module_are_refused(site, tmp_path, monkeypatch):
    named(in_folder(tmp_path / "plugins"), monkeypatch)
    with pytest.raises(UserError, match=r"daguerre-example 0\.1\.0: there is a plug-in 'difference' of objectives"):
        plugins.names("objectives")
    points = next(site.glob("*.dist-info")) / "entry_points.txt"
    points.write_text("[daguerre.samplers]\nmine = daguerre_example.nothing\n")
    plugins._outside.cache_clear()
    with pytest.raises(UserError, match="which is no module of an installed package"):
        plugins.names("samplers")


def test_an_installed_plug_in_with_a_name_of_ours_is_refused_where_that_name_is_used(site):
    points = next(site.glob("*.dist-info")) / "entry_points.txt"
    points.write_text("[daguerre.objectives]\neps = daguerre_example.difference\n")
    plugins._outside.cache_clear()
    plugins._may_be_installed.cache_clear()
    with pytest.raises(UserError, match=r"daguerre-example 0\.1\.0: there is a plug-in 'eps' of objectives already"):
        plugins.find("objectives", "eps")


def test_a_recipe_names_no_code(tmp_path, monkeypatch):
    """Its record of plug-ins is compared and never followed, and settings of a command line hold none."""
    with pytest.raises(ConfigError, match="is written by a run"):
        configs.load("quickstart", ["plugins.objectives.difference.package=daguerre_example"])
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(
        "extends: quickstart\nobjective: {name: difference}\n"
        "plugins: {objectives: {difference: {package: x, digest: y}}}\n"
    )
    in_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="these plug-ins are not here: difference of objectives"):
        configs.load(str(recipe))


@pytest.mark.long
def test_a_run_trains_with_them_in_worker_processes_too(tmp_path):
    folder = in_folder(tmp_path / "plugins")
    text = (ROOT / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"```python\n# src/daguerre/data/sources/stripes.py\n(.*?)```", text, re.DOTALL)
    (folder / "sources").mkdir()
    (folder / "sources" / "stripes.py").write_text(code)
    words = ["--plugins", str(folder), "train", "quickstart", "run_name=x", "objective.name=difference"]
    words += ["data.source=stripes", "data.resolution=16", "training.duration=3 steps", "training.global_batch_size=2"]
    words += ["training.per_device_batch_size=2", "lr_scheduler.warmup=1 step", "validation.num_samples=2"]
    words += ["sampling.num_images=1", "sampling.num_inference_steps=2", "loader.num_workers=2"]
    done = subprocess.run(
        [sys.executable, "-m", "daguerre", *words], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = yaml.safe_load((tmp_path / "runs" / "x" / "config.yaml").read_text())["plugins"]
    assert {kind: [*own] for kind, own in record.items()} == {"objectives": ["difference"], "sources": ["stripes"]}
    assert "diffusers has no scheduler for the objective difference" in done.stdout
