"""The environment that a run was computed in: versions, hardware, the code's commit, the command.

No environment variables and no user names: the file is meant to be shown to others.
"""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import torch

from daguerre import __version__, system
from daguerre.credentials import scrub


def environment() -> dict[str, Any]:
    return {
        "command": [scrub(word) for word in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "code": _code(),
        "cpu": _cpu(),
        "memory_bytes": system.memory_bytes(),
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
    }


def _packages() -> dict[str, str]:
    """Versions of the project and of what it declares to need, extras where they are installed. Of a checkout that is
    used without being installed nothing declares what it needs: the two that decide about numbers."""
    found = {}
    try:
        needed = requires("daguerre") or []
    except PackageNotFoundError:
        needed = ["torch", "diffusers"]
    for requirement in needed:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found[name] = _version(name)
        except PackageNotFoundError:
            continue
    # torch with its build, which metadata of some wheels leave out; a checkout's metadata are of when it was installed.
    return found | {"daguerre": __version__, "torch": str(torch.__version__)}


@cache
def _version(name: str) -> str:
    """Of a package, which stays what it is while a process has it open. From the line that has it: the library takes
    each file apart as an e-mail, which for all of them takes as long as an update."""
    package = distribution(name)
    stated = re.search(r"^Version: *(\S+)$", package.read_text("METADATA") or "", re.MULTILINE)
    return stated[1] if stated else package.version


def _code() -> dict[str, Any] | None:
    """Commit of the checkout that this file belongs to; None for an installed copy or without git."""
    here = Path(__file__)
    tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
    commit = _git(here.parent, "rev-parse", "HEAD")
    if not tracked or not commit:
        return None
    return {"commit": commit, "modified": bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> dict[str, Any]:
    model = re.search(r"^model name\s*:\s*(.+)$", system.cpu_facts(), re.MULTILINE)
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def _gpus() -> list[dict[str, Any]]:
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]
