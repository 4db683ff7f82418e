"""Configs of other trainers as files: TOML, JSON, shell variables and YAML, read into one kind of tree."""

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from daguerre import documents, yaml_text
from daguerre.errors import UserError
from daguerre.foreign import signs
from daguerre.foreign.names.values import repeats_of
from daguerre.foreign.reader import Tables
from daguerre.regular import check_regular
from daguerre.trees import Tree

LAST_OF_TWINS = ("MaxDiffusion", "Stable Cascade")
"""Trainers whose reader of YAML takes the last of two keys of one name; the others refuse them."""
YAML = (".yml", ".yaml")
DATA_SETS = {
    "SimpleTuner": ({"id", "type"}, "the config.json or config.env that names it as data_backend_config"),
    "OneTrainer": ({"path", "text"}, "the config that names it as concept_file_name"),
}
"""Trainers that keep their data sets in a file by itself: keys of its members, and the config that belongs to it."""
_SUM = re.compile(r"\$\(\(\s*\$?\{?(\w+)\}?\s*([-+*/])\s*\$?\{?(\w+)\}?\s*\)\)")
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(.*)")


def read(path: Path) -> tuple[Tree, list[str]]:
    """The tree of a config file, with the files of data sets that it names, and the keys that it gives twice. UserError
    says what is wrong."""
    tree, twice = _yaml(path) if path.suffix in YAML else (_parsed(path), [])
    beside = BESIDE.get(signs.trainer(tree) or "")
    return tree if beside is None else beside(tree, path.parent), twice


def _yaml(path: Path) -> tuple[Tree, list[str]]:
    """The mapping in a YAML file of another trainer, and the keys that it gives twice.

    Of trainers whose reader takes the last, the last is taken here, too. UserError for a file that cannot be read."""
    try:
        return yaml_text.read(path), []
    except UserError as error:
        if "duplicate key" not in str(error):
            raise
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        twice = _without_first_twins(node)
        tree = yaml_text.parse(yaml.serialize(node, Dumper=yaml.SafeDumper, width=1 << 20), path)
        if signs.trainer(tree) not in LAST_OF_TWINS:
            raise
        return tree, twice


def _without_first_twins(node: yaml.Node | None, above: str = "") -> list[str]:
    """Takes out of a YAML document what a later key of the same name replaces; the names."""
    twice = []
    for inner in node.value if isinstance(node, yaml.SequenceNode) else ():
        twice += _without_first_twins(inner, above)
    if isinstance(node, yaml.MappingNode):
        last = {key.value: place for place, (key, _) in enumerate(node.value)}
        twice += [f"{above}{key.value}" for place, (key, _) in enumerate(node.value) if last[key.value] != place]
        node.value = [node.value[place] for place in sorted(last.values())]
        for key, inner in node.value:
            twice += _without_first_twins(inner, f"{above}{key.value}.")
    return list(dict.fromkeys(twice))


def _parsed(path: Path) -> Tree:
    if path.suffix not in signs.FORMATS and path.suffix != ".json":
        return yaml_text.read(path)
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8-sig")
        tree: Any = tomllib.loads(text) if path.suffix == ".toml" else None
        tree = documents.parse(text) if path.suffix == ".json" else tree
    except (OSError, ValueError) as error:  # both formats' errors are ValueErrors
        raise UserError(f"{path} cannot be read: {error}", code="damaged") from error
    tree = _variables(text) if tree is None else tree
    if why := yaml_text.excess(tree):
        raise UserError(f"{path}: {why}", code="damaged")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: {_what_a_list_is(tree)}", code="unsupported")
    return tree


def _what_a_list_is(document: Any) -> str:
    """Names the trainer whose data sets a list in a file holds, and what to give in its place."""
    rows = document if isinstance(document, list) else []
    keys: set[Any] = set().union(*(row for row in rows if isinstance(row, dict)))
    for trainer, (wanted, config) in DATA_SETS.items():
        if keys >= wanted:
            return (
                f"it lists data sets of {trainer} alone: give {config} to `daguerre convert config`, which reads both"
            )
    return f"a config is a mapping of keys to values, this is a {type(document).__name__}"


def _variables(text: str) -> Tree:
    """The options of a command that trains; else the variables that a shell script sets, as options, where `$NAME` of
    one set before is its value. Nothing is run."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := _VARIABLE.match(line):
            sums = _SUM.sub(lambda each: _computed(each, found), match[2])
            value = next(iter(words_of(sums, comments=True)), "")
            found[match[1]] = re.sub(r"\$\{?(\w+)\}?", lambda name: found.get(name[1], ""), value)
    if command := _command(text):
        return command
    extra = options(words_of(" ".join(value for name, value in found.items() if name.endswith("EXTRA_ARGS"))))
    names = Tables("simpletuner")["variables"]
    named = {names.get(name, name.lower()): value for name, value in found.items() if not name.endswith("EXTRA_ARGS")}
    return {name: plain(value) for name, value in named.items()} | extra


def _computed(match: re.Match[str], found: Mapping[str, str]) -> str:
    """The whole number of `$((MAX_NUM_STEPS / 10))`; a sum of other words stays as it is."""
    left, sign, right = (found.get(word, word) for word in match.groups())
    if not (left.isdecimal() and right.isdecimal() and len(left + right) < 20) or (sign == "/" and not int(right)):
        return match[0].replace(" ", "")
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign])


def words_of(text: str, *, comments: bool = False) -> list[str]:
    """The words of a line of a shell. UserError for quotes that are not closed."""
    try:
        return shlex.split(text, comments=comments)
    except ValueError as error:
        raise UserError(f"the line {text.strip()!r} cannot be read: {error}", code="damaged") from error


def _command(text: str) -> Tree:
    """The options of a command that runs a program which trains, such as `accelerate launch ... zimage_train_network.py
    --dit FILE`, and the program's name; {} without one."""
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        at = next((n for n, word in enumerate(words) if re.fullmatch(r".*\w+_train(_\w+)?\.py", word)), None)
        if at is not None:
            return {"program": Path(words[at]).stem, **options(words[at + 1 :])}
    return {}


def options(words: Sequence[str]) -> Tree:
    """The options of a piece of a command line. One without a word behind it is a switch, several are a list."""
    found: dict[str, list[Any]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [plain(value)] if equals else []
            last = name
        elif found:
            found[last].append(plain(word))
    return {name: True if not each else each if len(each) > 1 else each[0] for name, each in found.items()}


def plain(text: str) -> Any:
    """Text of a shell variable as a number, a switch, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _kohya(tree: Tree, folder: Path) -> Tree:
    """Sections taken away, as kohya's scripts do, and the data sets of a `dataset_config` or of its folders."""
    flat = {name: value for name, value in tree.items() if not isinstance(value, dict) or name == "general"}
    for name, value in tree.items():
        flat |= value if isinstance(value, dict) and name != "general" else {}
    return flat | _data_sets(flat, folder)


def _data_sets(flat: Tree, folder: Path) -> Tree:
    """The data sets that arguments of kohya's scripts name, in a file or by folders."""
    place = flat.get("dataset_config")
    if "datasets" in flat:
        return {}
    if isinstance(place, str) and place:
        found = _beside(place, folder)
        given = _parsed(found) if found else {}
        if given:
            return {name: given[name] for name in ("general", "datasets") if name in given}
    subsets = _subsets(flat)
    return {"datasets": [{"subsets": subsets}]} if subsets else {}


def _kohya_gui(tree: Tree, folder: Path) -> Tree:
    """With the data sets of its folders or its `dataset_config`; an empty name means no data set."""
    plain = tree.get("image_folder")  # of its tab for fine-tuning
    if isinstance(plain, str) and plain and not tree.get("dataset_config"):
        return tree | {"datasets": [{"subsets": [{"image_dir": plain}]}]}
    return tree | _data_sets({name: value for name, value in tree.items() if value != ""}, folder)


def _subsets(flat: Tree) -> list[Tree]:
    """The folders such as `10_sks dog` of `train_data_dir`, and of `reg_data_dir`, which are class images; a ControlNet
    is trained on the images of `train_data_dir` itself."""
    controls = flat.get("conditioning_data_dir")
    if controls and not flat.get("masked_loss") and flat.get("train_data_dir"):
        return [{"image_dir": flat["train_data_dir"], "conditioning_data_dir": controls}]
    found: list[Tree] = []
    for name in ("train_data_dir", "reg_data_dir"):
        place = flat.get(name)
        for path, (repeats, caption) in repeats_of(Path(place).expanduser()).items() if isinstance(place, str) else ():
            found.append({"image_dir": str(path), "num_repeats": repeats, "class_tokens": caption})
            found[-1] |= {"is_reg": True} if name == "reg_data_dir" else {}
        if not found:  # class images alone are no data set
            break
    return found


def _simpletuner(tree: Tree, folder: Path) -> Tree:
    """Options without their dashes, and the data sets of `data_backend_config`."""
    switches = {"true": True, "false": False}
    plain = {
        name.lstrip("-").replace("-", "_"): switches.get(value, value) if isinstance(value, str) else value
        for name, value in tree.items()
    }
    found = _beside(plain.get("data_backend_config"), folder)
    return plain | ({"data_backends": _list(found)} if found else {})


def _onetrainer(tree: Tree, folder: Path) -> Tree:
    """With the concepts and samples of the files that it names, where it holds none itself."""
    files = {"concepts": "concept_file_name", "samples": "sample_definition_file_name"}
    found = {name: _beside(tree.get(key), folder) for name, key in files.items() if not tree.get(name)}
    return tree | {name: _list(path) for name, path in found.items() if path}


def _beside(place: Any, folder: Path) -> Path | None:
    """The file at a path, from here or from the config's folder; None without one."""
    if not isinstance(place, str) or not place:
        return None
    path = Path(place).expanduser()
    return next((p for p in (path, folder / path, folder / path.name) if p.is_file()), None)


def _list(path: Path) -> list[Any]:
    """The list in a JSON file. UserError for anything else."""
    try:
        check_regular(path)
        found = documents.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", code="damaged") from error
    if why := yaml_text.excess(found):
        raise UserError(f"{path}: {why}", code="damaged")
    if not isinstance(found, list):
        raise UserError(f"{path}: expected a list, this is a {type(found).__name__}")
    return found


BESIDE = {
    "kohya's sd-scripts": _kohya,
    "musubi-tuner": _kohya,
    "kohya's GUI": _kohya_gui,
    "SimpleTuner": _simpletuner,
    "OneTrainer": _onetrainer,
}
"""Trainers whose configs name other files: (tree, folder of the config) to the tree with what these hold."""
