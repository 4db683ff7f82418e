"""`daguerre doctor`: what is installed, what the machine has, what is missing and the command that mends it.

Looks and reports; changes nothing. Works where a part, even torch, is not installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.requirements import Requirement

from daguerre import __version__, errors
from daguerre.config import recipe
from daguerre.errors import UserError, install

SUMMARY = "what is installed, which devices there are, what is missing"
HELP = """\
usage: daguerre doctor

Lists versions, devices, memory and disk, and whether the shipped recipes and networks are in place. For all that is
missing or too old it prints the command that mends it, and exits with 1.
"""

PACKAGE = Path(recipe.__file__).parent.parent
OLDEST_PYTHON = (3, 11)
LITTLE_DISK_GB = 5.0
LITTLE_MEMORY_GB = 3.0
GPU_FILES = ("/proc/driver/nvidia/version", "/dev/kfd")
"""Files that a GPU's driver makes (NVIDIA, AMD), by which a GPU is known even to a torch that cannot use it."""
CHOOSE_BUILD = "choose a build on the install page of PyTorch's website, which shows the URL of its index"
SHIPPED = {
    "quickstart": ("vae/config.json", "text_encoder/config.json", "tokenizer"),
}
"""Networks in assets/, and what has to be there of each."""

EXTRAS = {
    "datasets": "data sets of the hub by name, which recipes of real models take if they are given no other",
    "bitsandbytes": "optimizer.name=adamw_8bit",
    "prodigyopt": "optimizer.name=prodigy",
    "schedulefree": "optimizer.name=schedule_free",
}
"""Packages that only some settings need, and which."""

Mark = Literal["ok", "--", "!!"]


@dataclass(frozen=True)
class Finding:
    """One line: `ok`, `--` for what is worth knowing, `!!` for what has to be mended."""

    mark: Mark
    what: str
    text: str
    fix: str = ""
    """The command or the step that mends it."""


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 if something has to be mended."""
    if arguments:
        raise UserError(f"`daguerre doctor` takes no arguments, got {' '.join(arguments)}")
    torch = import_module("torch") if find_spec("torch") else None
    groups = {
        "Software": [*_python(), *_packages(), *_extras()],
        "Devices": list(_devices(torch)),
        "Machine": [*_machine(), *_environment()],
        "Shipped with Daguerre": [*_recipes(), *_assets(PACKAGE / "assets")],
    }
    findings = [finding for group in groups.values() for finding in group]
    width = max(len(finding.what) for finding in findings)
    for title, group in groups.items():
        print(f"{title}")
        for finding in group:
            print(f"  {finding.mark}  {finding.what:<{width}}  {finding.text}")
        print()
    return _conclude(findings)


def _conclude(findings: list[Finding]) -> int:
    fixes = [finding for finding in findings if finding.fix]
    for finding in fixes:
        print(f"{finding.what}: {finding.text}\n  -> {finding.fix}")
    broken = any(finding.mark == "!!" for finding in findings)
    print("" if fixes else "Nothing is missing. A first run: daguerre train quickstart")
    return errors.FAILED if broken else errors.DONE


def _python() -> Iterator[Finding]:
    yield Finding("ok", "daguerre", f"{__version__} in {PACKAGE}")
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("ok", "python", found)
    else:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        fix = f"install Python {oldest} or newer, then: make PYTHON=/path/to/python3"
        yield Finding("!!", "python", f"{found}; {oldest} or newer is needed", fix)


def _packages() -> Iterator[Finding]:
    for text in requires("daguerre") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = install(f"{requirement.name}{requirement.specifier}")
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Finding("!!", requirement.name, f"not installed; {requirement.specifier} is needed", fix)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding("ok", requirement.name, found)
        else:
            yield Finding("!!", requirement.name, f"{found}; {requirement.specifier} is needed", fix)


def _extras() -> Iterator[Finding]:
    for text in requires("daguerre") or []:
        requirement = Requirement(text)
        if requirement.name not in EXTRAS:
            continue
        try:
            yield Finding("ok", requirement.name, version(requirement.name))
        except PackageNotFoundError:
            wanted = f"not installed; for {EXTRAS[requirement.name]}: {install(requirement.name)}"
            yield Finding("--", requirement.name, wanted)


def _devices(torch: ModuleType | None) -> Iterator[Finding]:
    yield Finding("ok", "cpu", f"{_cores()} cores; training computes in fp32 there (mixed_precision auto)")
    if torch is None:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if bf16 else "no bf16: set mixed_precision=fp16 or no"
        yield Finding("ok" if bf16 else "--", f"cuda:{index}", f"{gpu.name}, {_gb(gpu.total_memory)}, {precision}")
    if count:
        return
    driver = any(Path(path).exists() for path in GPU_FILES)
    build = f"torch is built for {_build(torch)}"
    if driver:
        fix = f"{CHOOSE_BUILD}, then: make clean && make quickstart TORCH_INDEX=URL"
        yield Finding("!!", "gpu", f"there is a driver, but torch sees no GPU; {build}", fix)
    else:
        yield Finding("--", "gpu", f"none; {build}. The quickstart needs none")


def _build(torch: ModuleType) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU only"


def _machine() -> Iterator[Finding]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    little = memory_bytes < LITTLE_MEMORY_GB * 1e9
    advice = f"; the quickstart wants {LITTLE_MEMORY_GB:g} GB" if little else ""
    yield Finding("--" if little else "ok", "memory", _gb(memory_bytes) + advice)
    here = Path.cwd()
    free_bytes = shutil.disk_usage(here).free
    text = f"{_gb(free_bytes)} free under {here}"
    if free_bytes < LITTLE_DISK_GB * 1e9:
        yield Finding("--", "disk", text, "free some space, or write elsewhere: output_dir=/another/disk")
    else:
        yield Finding("ok", "disk", text)
    if not os.access(here, os.W_OK):
        yield Finding("!!", "folder", f"{here} cannot be written to", "write elsewhere: output_dir=/another/folder")


def _environment() -> Iterator[Finding]:
    if "LIBTPU_INIT_ARGS" in os.environ:
        yield Finding("--", "LIBTPU_INIT_ARGS", "is set, and has no effect: there is no TPU engine here")


def _recipes() -> Iterator[Finding]:
    names = list(recipe.shipped())
    if names:
        yield Finding("ok", "recipes", f"{', '.join(names)}")
    else:
        yield Finding("!!", "recipes", f"none in {recipe.FOLDER}", _reinstall())


def _assets(folder: Path) -> Iterator[Finding]:
    for name, parts in SHIPPED.items():
        absent = [part for part in parts if not (folder / name / part).exists()]
        files = [path for path in (folder / name).rglob("*") if path.is_file()]
        size_mb = sum(path.stat().st_size for path in files) / 1e6
        if absent:
            yield Finding("!!", f"networks {name}", f"{', '.join(absent)} missing in {folder / name}", _reinstall())
        else:
            yield Finding("ok", f"networks {name}", f"{size_mb:.1f} MB")


def _reinstall() -> str:
    checkout = PACKAGE.parent.parent
    if (checkout / "pyproject.toml").exists():
        return f"git -C {checkout} checkout -- {PACKAGE.relative_to(checkout)}"
    return install("--force-reinstall", "--no-deps", "/path/to/daguerre") + ", with the folder of a clone"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gb(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.1f} GB"
