#!/usr/bin/env python3
"""Makes .venv and installs Daguerre into it from constraints.txt. Runs on any Python 3, needs nothing installed.

python3 tools/make_venv.py            # used by `make`; TORCH_INDEX=URL takes torch from another index
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
DONE = VENV / "installed"
OLDEST = (3, 11)
NEEDED_GB = 4
NEEDED_WITH_CUDA_GB = 9


def say(text):
    print("[set-up] " + text, flush=True)


def stop(text):
    print("[set-up] " + text, file=sys.stderr)
    raise SystemExit(2)


def find_python():
    """The first Python >= 3.11 among the usual names; stops with what was found if there is none."""
    found = []
    for name in (sys.executable, "python3.13", "python3.12", "python3.11", "python3"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        ask = [path, "-c", "import sys; print(*sys.version_info[:3])"]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.returncode != 0:
            continue
        version = tuple(int(part) for part in answer.stdout.split())
        if OLDEST <= version[:2]:
            return path, version
        found.append("{} is {}".format(path, ".".join(map(str, version))))
    stop(
        "Daguerre needs Python 3.11 or newer; found: {}. Install one (python.org, your distribution, pyenv, conda) "
        "and run again with PYTHON=/path/to/python3.".format("; ".join(found) or "none")
    )


def check_disk():
    free_gb = shutil.disk_usage(str(ROOT)).free / 1e9
    if free_gb < NEEDED_GB:
        stop(
            "about {} GB are needed for .venv, {:.1f} GB are free under {}. Free some space and run again.".format(
                NEEDED_GB, free_gb, ROOT
            )
        )
    if free_gb < NEEDED_WITH_CUDA_GB and sys.platform == "linux" and not os.environ.get("TORCH_INDEX"):
        say(
            "{:.1f} GB are free: enough for a CPU build of torch, perhaps too little for one with CUDA "
            "({} GB); TORCH_INDEX=... chooses the build".format(free_gb, NEEDED_WITH_CUDA_GB)
        )


def torch_version():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    stop("constraints.txt does not pin torch")


def pip(*arguments):
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if subprocess.run(command + list(arguments)).returncode != 0:
        stop("pip failed (its words are above). Mend that and run the same command again: it goes on from here.")


def main():
    python, version = find_python()
    check_disk()
    if not (VENV / "bin" / "python").exists():
        say("making .venv with Python {} ({})".format(".".join(map(str, version)), python))
        subprocess.run([python, "-m", "venv", str(VENV)], check=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    index = os.environ.get("TORCH_INDEX")
    torch = torch_version()
    say("installing {}{}".format(torch, " from " + index if index else ""))
    pip(torch, *(["--index-url", index] if index else constraints))
    say("installing Daguerre and what it builds on (constraints.txt)")
    pip("-e", str(ROOT) + "[dev]", *constraints)
    DONE.write_text("{}\n".format(torch))
    say("done")


if __name__ == "__main__":
    main()
