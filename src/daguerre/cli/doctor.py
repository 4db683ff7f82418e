"""Check the installation: packages, devices, what is missing.

usage: daguerre doctor [--json]

Lists versions, devices, memory and disk, and checks the shipped recipes and networks. For everything that is missing
or too old it prints the command that fixes it, and exits with 1. --json prints the same for programs (docs/json.md).
"""

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

from daguerre import __version__, errors, system
from daguerre.cli.parts import output
from daguerre.config import recipe
from daguerre.errors import UserError, install
from daguerre.formatting import beside

PACKAGE = Path(recipe.__file__).parent.parent
OLDEST_PYTHON = (3, 11)
LITTLE_DISK_GB = 5.0
LITTLE_MEMORY_GB = 3.0
GPU_FILES = ("/proc/driver/nvidia/version", "/dev/kfd")
"""Files of a GPU driver (NVIDIA, AMD): they show a GPU even to a torch that cannot use it."""
CHOOSE_BUILD = "choose a build on the install page of PyTorch's website, which shows the URL of its index"
SHIPPED = {
    "autoencoder": ("vae/config.json",),
    "emoji": ("text_encoder/config.json", "tokenizer"),
    "quickstart": ("vae/config.json", "text_encoder/config.json", "tokenizer"),
    "quickstart_cascade": tuple(f"{part}/config.json" for part in ("vqgan", "effnet", "previewer", "decoder")),
}
"""Networks in assets/, and the files that each must have."""

EXTRAS = {
    "datasets": "data sets of the hub by name, used by recipes of real models if you set no data",
    "bitsandbytes": "optimizer.name=adamw_8bit",
    "prodigyopt": "optimizer.name=prodigy",
    "schedulefree": "optimizer.name=schedule_free",
    "onnxruntime": "condition faces",
    "wandb": "logging.trackers=[tensorboard, wandb]",
}
"""Packages that only some settings need, and those settings."""

Mark = Literal["ok", "--", "!!"]
_STATUS = {"ok": "ok", "--": "note", "!!": "broken"}
"""Marks for programs."""


@dataclass(frozen=True)
class Finding:
    """One line: `ok`, `--` for what is worth knowing, `!!` for what has to be mended."""

    mark: Mark
    what: str
    text: str
    fix: str = ""
    """The command or the step that mends it."""

    def part(self, group: str) -> output.Finding:
        """For programs."""
        found = {"group": group, "status": _STATUS[self.mark], "what": self.what, "text": self.text}
        return output.Finding.model_validate(found | ({"fix": self.fix} if self.fix else {}))


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 if something has to be mended."""
    if arguments not in ([], [output.FLAG]):
        raise UserError(
            f"`daguerre doctor` takes no arguments but --json; you gave {' '.join(arguments)}", code="unused"
        )
    torch = import_module("torch") if find_spec("torch") else None
    groups = {
        "Software": [*_python(), *_packages(), *_extras()],
        "Devices": [*_devices(torch)],
        "Machine": [*_machine(), *_environment()],
        "Shipped with Daguerre": [*_recipes(), *_assets(PACKAGE / "assets")],
    }
    findings = [finding for group in groups.values() for finding in group]
    if arguments:
        every = [(title, finding) for title, group in groups.items() for finding in group]
        output.write(output.Findings(findings=[finding.part(title) for title, finding in every]))
        return _code(findings)
    width = max(len(finding.what) for finding in findings)
    for title, group in groups.items():
        labels = ((f"  {finding.mark}  {finding.what:<{width}}  ", finding.text) for finding in group)
        lines = [line for label, text in labels for line in beside(label, text, sys.stdout.isatty())]
        print("\n".join([title, *lines, ""]))
    return _conclude(findings)


def _code(findings: list[Finding]) -> int:
    return errors.FAILED if any(finding.mark == "!!" for finding in findings) else errors.DONE


def _conclude(findings: list[Finding]) -> int:
    fixes = [finding for finding in findings if finding.fix]
    for finding in fixes:
        print(f"{finding.what}: {finding.text}\n  -> {finding.fix}")
    print("" if fixes else "Nothing is missing. A first run: daguerre train quickstart")
    return _code(findings)


def _python() -> Iterator[Finding]:
    yield Finding("ok", "daguerre", f"{__version__} in {PACKAGE}")
    found, oldest = f"{platform.python_version()} ({sys.executable})", ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("ok", "python", found)
    else:
        fix = f"install Python {oldest} or newer, then: make PYTHON=/path/to/python3"
        yield Finding("!!", "python", f"{found}; {oldest} or newer is needed", fix)


def _packages() -> Iterator[Finding]:
    for requirement in map(Requirement, requires("daguerre") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found and requirement.specifier.contains(found, prereleases=True):
            yield Finding("ok", requirement.name, found)
        else:
            wanted = f"{found or 'not installed'}; {requirement.specifier} is needed"
            yield Finding("!!", requirement.name, wanted, install(f"{requirement.name}{requirement.specifier}"))


def _extras() -> Iterator[Finding]:
    for name, purpose in EXTRAS.items():
        found = _version(name)
        yield Finding("ok" if found else "--", name, found or f"not installed; for {purpose}: {install(name)}")


def _version(name: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices(torch: ModuleType | None) -> Iterator[Finding]:
    cores = system.cores()
    narrow = any(name in system.cpu_facts().split() for name in ("avx512_bf16", "amx_bf16"))
    faster = "; mixed_precision=bf16 is faster, as it multiplies bf16 itself" if narrow else ""
    yield Finding("ok", "cpu", f"{cores} cores; training computes in fp32 there (mixed_precision auto){faster}")
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
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"torch is built for {f'CUDA {cuda}' if cuda else f'ROCm {rocm}' if rocm else 'the CPU only'}"
    if any(Path(path).exists() for path in GPU_FILES):
        fix = f"{CHOOSE_BUILD}, then: make clean && make quickstart TORCH_INDEX=URL"
        yield Finding("!!", "gpu", f"a driver is installed, but torch sees no GPU; {build}", fix)
    else:
        yield Finding("--", "gpu", f"none; {build}. The quickstart needs none")


def _machine() -> Iterator[Finding]:
    memory_bytes = system.memory_bytes()
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
        yield Finding("--", "LIBTPU_INIT_ARGS", "is set but has no effect: TPUs are not supported")


def _recipes() -> Iterator[Finding]:
    if names := list(recipe.shipped()):
        yield Finding("ok", "recipes", f"{len(names)}, quickstart among them: `daguerre recipes` lists them")
    else:
        yield Finding("!!", "recipes", f"none in {recipe.FOLDER}", _reinstall())


def _assets(folder: Path) -> Iterator[Finding]:
    for name, parts in SHIPPED.items():
        size_mb = sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file()) / 1e6
        if absent := [part for part in parts if not (folder / name / part).exists()]:
            yield Finding("!!", f"networks {name}", f"{', '.join(absent)} missing in {folder / name}", _reinstall())
        else:
            yield Finding("ok", f"networks {name}", f"{size_mb:.1f} MB")


def _reinstall() -> str:
    checkout = PACKAGE.parent.parent
    if (checkout / "pyproject.toml").exists():
        return f"git -C {checkout} checkout -- {PACKAGE.relative_to(checkout)}"
    return install("--force-reinstall", "--no-deps", "/path/to/daguerre") + ", with the folder of a clone"


def _gb(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.1f} GB"
