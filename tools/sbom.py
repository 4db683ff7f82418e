"""Writes the software bill of materials (SBOM) of Daguerre, as CycloneDX JSON: `python tools/sbom.py FILE`.

cyclonedx-py lists what is installed beside this Python, with licences and the graph of dependencies. That is the
development environment, so each component gets a scope here: "required" (what the wheel asks for), "optional" (what
its extras for users add) or "excluded" (tools of tests, of documentation and of releases). Files that are vendored in
the package, which no installer knows, are added with their licences.
"""

import json
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from daguerre import __version__

ROOT = Path(__file__).parents[1]
OF_DEVELOPERS = ("dev", "docs")
"""Extras that no user installs."""


def environment():
    """The bill of this Python's environment, as cyclonedx-py writes it."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    written = subprocess.run(
        [*command, "--output-reproducible", "--no-validate", "-o", "-", sys.executable],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(written)


def needs(requirements):
    """{package: what it needs} of the packages that requirements lead to, by their markers and the extras asked for.

    Packages that are not installed here are left out. cyclonedx-py's own graph has every extra of every package.
    """
    waiting, seen, graph = [Requirement(text) for text in requirements], set(), {}
    while waiting:
        one = waiting.pop()
        for extra in {"", *one.extras} - {extra for name, extra in seen if name == one.name}:
            seen.add((one.name, extra))
            with suppress(PackageNotFoundError):
                below = [Requirement(text) for text in distribution(one.name).requires or ()]
                below = [each for each in below if each.marker is None or each.marker.evaluate({"extra": extra})]
                graph.setdefault(canonicalize_name(one.name), set()).update(
                    canonicalize_name(each.name) for each in below
                )
                waiting += below
    return graph


def vendored():
    """A component for each licence that lies in the package beside the file of others that it is of."""
    for path in sorted((ROOT / "src" / "daguerre").rglob("*.LICENSE")):
        text = {"license": {"name": path.name, "text": {"content": path.read_text(encoding="utf-8")}}}
        where = path.parent.relative_to(ROOT / "src").as_posix()
        yield {
            "type": "file",
            "bom-ref": f"{where}/{path.stem}",
            "name": path.stem,
            "description": f"vendored in {where}/",
            "scope": "required",
            "licenses": [text],
        }


def bill_of_materials():
    """The bill, with scopes, vendored files and Daguerre's version, and without the place of the clone."""
    bill, project = environment(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bill["metadata"]["component"]["version"] = __version__
    # cyclonedx-py drops Daguerre as a component of itself, but only once: a clone may have it by an .egg-info, too.
    bill["components"] = [each for each in bill["components"] if each["name"] != project["name"]]
    bill["dependencies"] = [row for row in bill["dependencies"] if row["ref"].partition("==")[0] != project["name"]]
    extras = project["optional-dependencies"].items()
    required = needs(project["dependencies"])
    optional = needs([text for name, texts in extras if name not in OF_DEVELOPERS for text in texts])
    graph = needs([text for _, texts in extras for text in texts]) | optional | required
    names = {each["bom-ref"]: canonicalize_name(each["name"]) for each in bill["components"]}
    for each in bill["components"]:
        name = names[each["bom-ref"]]
        each["scope"] = "required" if name in required else "optional" if name in optional else "excluded"
    for row in bill["dependencies"]:
        below = graph.get(names.get(row["ref"]), required | optional)
        row["dependsOn"] = [each for each in row.get("dependsOn", []) if names[each] in below]
    bill["components"] += vendored()
    return bill


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill_of_materials(), indent=1) + "\n", encoding="utf-8")
    print(out)
