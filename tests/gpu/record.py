"""Writes kernels.json anew: the launches of each recipe's update as they are. Run it after a change that is meant to
have fewer of them, or that says what it needs more for: python tests/gpu/record.py [NAME ...]"""

import json
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PATHS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
    "pythonpath"
]
sys.path += [str(ROOT / path) for path in PATHS]

from test_one_update import HERE, LAUNCHES, QUICK, TRAINED, built, updates  # noqa: E402


def main() -> None:
    """Of these recipes, or of all. What fails is said, and keeps its number."""
    launches, library = dict(LAUNCHES), built()
    with TemporaryDirectory() as folder:
        for name in sys.argv[1:] or sorted({*QUICK, *TRAINED}):
            result = updates(library, Path(folder), [name])[name]
            if "error" in result:
                print(f"{name}: {result['error']}", flush=True)
                continue
            launches[name] = sum(result["kernels"].values())
            seen = {key: result[key] for key in ("waits", "validation_waits", "misplaced") if result[key]}
            print(f"{name}: {LAUNCHES.get(name)} -> {launches[name]} {seen or ''}", flush=True)
            (HERE / "kernels.json").write_text(json.dumps(launches, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
