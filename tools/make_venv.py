#!/usr/bin/env python3
"""Makes .venv and installs Daguerre into it from constraints.txt. Runs on any Python 3, needs nothing installed.

python3 tools/make_venv.py            # used by `make`; TORCH_INDEX=URL takes torch from another index
python3 tools/make_venv.py --dev      # what tests need as well
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST = (3, 11)
NEEDED_GB = 3
NEEDED_WITH_CUDA_GB = 8
GPU_FILES = ("/proc/driver/nvidia/version", "/dev/kfd")
PCI_DEVICES = Path("/sys/bus/pci/devices")
HOW_TO_CHOOSE = (
    "`make quickstart TORCH_INDEX=URL` takes another build: choose pip and CPU on the install page of PyTorch's "
    "website, and URL is what it shows after --index-url"
)


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
            "({} GB). {}.".format(free_gb, NEEDED_WITH_CUDA_GB, HOW_TO_CHOOSE)
        )


def make_venv():
    """Makes .venv unless it is there with pip in it; a Python without venv or pip is named with what mends it."""
    in_it = VENV / "bin" / "python"
    if in_it.exists() and subprocess.run([str(in_it), "-c", "import pip"], capture_output=True).returncode == 0:
        return
    python, version = find_python()
    say("making .venv with Python {} ({})".format(".".join(map(str, version)), python))
    if subprocess.run([python, "-m", "venv", str(VENV)]).returncode != 0:
        stop(
            "this Python could not make .venv (its words are above); Debian and Ubuntu keep what it lacks in a "
            "package of its own: sudo apt install python{}.{}-venv. Then run the same command again.".format(*version)
        )


def has_gpu():
    """True where a driver of NVIDIA or AMD is, or a graphics card of NVIDIA is on the bus, with a driver or not."""
    if shutil.which("nvidia-smi") or any(os.path.exists(path) for path in GPU_FILES):
        return True
    return any(
        (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith("0x03")
        for device in PCI_DEVICES.glob("*")
    )


def torch_version():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.strip()
    stop("constraints.txt does not pin torch")


def choose_torch():
    """The pinned torch; as a CPU build where there is no GPU, no TORCH_INDEX, and pip finds one where it looks.

    Builds for the CPU are told by their local version, +cpu. Elsewhere than on Linux every build is one.
    """
    pinned = torch_version()
    if sys.platform != "linux" or has_gpu() or os.environ.get("TORCH_INDEX"):
        return pinned
    say("no GPU is to be seen: asking pip for a CPU build of torch")
    if pip("--dry-run", "--no-deps", "--ignore-installed", pinned + "+cpu", quiet=True):
        return pinned + "+cpu"
    say(
        "pip finds none where it looks. The default build brings CUDA on most machines: about 3 GB to download, 5 GB "
        "on disk, instead of 0.2 and 0.8. Ctrl-C stops; {}.".format(HOW_TO_CHOOSE)
    )
    return pinned


def pip(*arguments, quiet=False):
    """True if `pip install` did what it was asked to; unless it is asked quietly its progress is shown."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    return subprocess.run(command + list(arguments), capture_output=quiet).returncode == 0


def install(what, *arguments):
    say("installing " + what)
    if not pip(*arguments):
        stop("pip failed (its words are above). Mend that and run the same command again: it goes on from here.")


def main(arguments):
    extra = "dev" if "--dev" in arguments else "datasets"
    check_disk()
    make_venv()
    constraints = ["-c", str(ROOT / "constraints.txt")]
    if extra != "dev":
        index, torch = os.environ.get("TORCH_INDEX"), choose_torch()
        from_index = ["--index-url", index] if index else constraints
        install("{} (step 1 of 2)".format(torch + (" from " + index if index else "")), torch, *from_index)
    what = "what the tests need" if extra == "dev" else "Daguerre and what it builds on (step 2 of 2)"
    install(what + "; the end of it takes a minute in silence", "-e", "{}[{}]".format(ROOT, extra), *constraints)
    if extra == "dev":
        # Tests use its script alone, axe.min.js: the driver of browsers that it asks for has 50 MB, and nothing to do.
        install("axe-core for the tests of the live page", "--no-deps", "axe-playwright-python", *constraints)
    (VENV / ("installed-dev" if extra == "dev" else "installed")).touch()
    say("done. To have the command `daguerre` in this shell: source {}".format(VENV / "bin" / "activate"))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        stop("stopped. The same command goes on from here.")
