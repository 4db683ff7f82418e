"""Records the names that other trainers' code reads from their configs, with its usual values, as data of the tests.

    python tools/trainer_keys.py onetrainer FOLDER "OneTrainer 23df3832..." > tests/support/trainer_keys/onetrainer.json

FOLDER holds the trainer's source at that commit. Nothing of it is run: names are read from its syntax tree. A dotted
path leads to each name; `*` stands for a number in a list, or for a name that a user chooses. A value that is not
written there as a constant is recorded as null.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Keys = dict[str, Any]


def constant(node: ast.AST | None) -> Any:
    """The value of a literal, the last name of an enum's member, None for what is computed."""
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr.isupper() else None
    try:
        found = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return list(found) if isinstance(found, tuple) else found


def module(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of functions or methods of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in names:
            yield node


def option(call: ast.Call, name: str, place: int | None = None) -> ast.AST | None:
    """An argument of a call, by its name or its place."""
    named = {word.arg: word.value for word in call.keywords}
    return named.get(name, call.args[place] if place is not None and place < len(call.args) else None)


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """The classes of a file."""
    return {node.name: node for node in module(path).body if isinstance(node, ast.ClassDef)}


def below(prefix: str, keys: Mapping[str, Any]) -> Keys:
    """Names below a path."""
    return {f"{prefix}.{name}": value for name, value in keys.items()}


def gets(tree: ast.AST, *holders: str) -> Keys:
    """The names that `holder.get("name", default)`, `holder["name"]` and `"name" in holder` read."""
    found: Keys = {}
    for call in calls(tree, "get", "pop", "get_conf"):
        holder = getattr(call.func, "value", None)
        if getattr(holder, "id", getattr(holder, "attr", None)) in holders and call.args:
            name = constant(call.args[0])
            if isinstance(name, str):
                value = constant(option(call, "default", 1))
                found[name] = found.get(name) if value is None else value
    for node in ast.walk(tree):
        taken = isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in holders
        if taken and isinstance(name := constant(node.slice), str):
            found.setdefault(name, None)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            holder = node.comparators[0]
            if isinstance(holder, ast.Name) and holder.id in holders and isinstance(constant(node.left), str):
                found.setdefault(constant(node.left), None)
    return found


# OneTrainer: lists of (name, default, type, nullable), nested by the class of a default


def onetrainer(root: Path) -> Keys:
    """What TrainConfig holds, with the names that files of older versions have."""
    folder = root / "modules/util/config"
    found = {name: node for path in sorted(folder.glob("*.py")) for name, node in classes(path).items()}
    keys = _fields(found, "TrainConfig")
    for name in (node for node in found if node in ("TrainConfig", "ConceptConfig")):
        prefix = "concepts.*." if name == "ConceptConfig" else ""
        for part in found[name].body:
            if isinstance(part, ast.FunctionDef) and "migration" in part.name:
                for old in _migrated(part, keys):
                    keys.setdefault(prefix + old, None)
    return keys


def _fields(found: Mapping[str, ast.ClassDef], name: str) -> Keys:
    body = next(node for node in found[name].body if getattr(node, "name", "") == "default_values")
    keys: Keys = {"__version": None}
    made = {
        node.targets[0].id: node.value.func.value.id
        for node in ast.walk(body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_default(node.value)
    }
    own: dict[str, Keys] = {}
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            own.setdefault(target.value.id, {})[target.attr] = constant(node.value)
    for call in calls(body, "append"):
        field, value, kind = call.args[0].elts[:3]
        path, inner = constant(field), made.get(getattr(value, "id", ""), "")
        inner = value.func.value.id if _is_default(value) else inner
        held = next((n.id for n in ast.walk(kind) if isinstance(n, ast.Name) and n.id in found), "")
        if inner:
            keys |= below(path, _fields(found, inner) | own.get(path, {}))
        elif held:
            keys[path] = constant(value)
            keys |= below(f"{path}.*", _fields(found, held))
        else:
            keys[path] = constant(value)
    return keys


def _is_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "default_values"


def _migrated(function: ast.FunctionDef, today: Keys) -> Iterator[str]:
    """The names that a migration reads: those it compares a key with, and what has today a section for a prefix."""
    yield from gets(function, "migrated_data", "data")
    for node in ast.walk(function):
        compared = isinstance(node, ast.Compare) and getattr(node.left, "id", None) == "key"
        if compared and isinstance(name := constant(node.comparators[0]), str):
            yield name
    for call in calls(function, "removeprefix"):  # a flat name of what is in a section today
        prefix = constant(call.args[0])
        section = f"{prefix.rstrip('_')}."
        yield from (
            prefix + key.removeprefix(section) for key in [*today] if key.startswith(section) and "__" not in key
        )


# ai-toolkit: classes that read `kwargs.get("name", default)`, one for each section

SECTIONS = {
    "network": "NetworkConfig",
    "network.lorm": "LoRMConfig",
    "network.lorm.module_settings.*": "LormModuleSettingsConfig",
    "train": "TrainConfig",
    "train.ema_config": "EMAConfig",
    "train.validation_config": "ValidationConfig",
    "train.validation_config.validation_items.*": "ValidationItem",
    "model": "ModelConfig",
    "save": "SaveConfig",
    "sample": "SampleConfig",
    "sample.samples.*": "SampleItem",
    "first_sample": "SampleConfig",
    "first_sample.samples.*": "SampleItem",
    "logging": "LoggingConfig",
    "guidance": "GuidanceConfig",
    "datasets.*": "DatasetConfig",
    "embedding": "EmbeddingConfig",
    "decorator": "DecoratorConfig",
    "adapter": "AdapterConfig",
    "adapter.lora_config": "NetworkConfig",
}


def ai_toolkit(root: Path) -> Keys:
    """What a process of the trainer reads, and what the job around it does."""
    found = classes(root / "toolkit/config_modules.py")
    jobs = [root / "jobs" / f"{name}Job.py" for name in ("Base", "Train", "Extension")]
    keys = {"job": None, "config.process": None}
    for path in jobs:
        keys |= below("config", gets(module(path), "self"))
    process: Keys = {"type": None}
    for path in (root / "jobs/process").glob("Base*Train*Process.py"):
        process |= gets(module(path), "self")
    process |= gets(module(root / "extensions_built_in/sd_trainer/DiffusionTrainer.py"), "self")
    for place, name in SECTIONS.items():
        process |= below(place, gets(found[name], "kwargs"))
    special = module(root / "toolkit/lora_special.py")
    process |= below("network.network_kwargs", _parameters(special, "LoRASpecialNetwork"))
    return keys | below("config.process.*", process)


def _parameters(tree: ast.Module, name: str) -> Keys:
    """The parameters of a class's constructor and their defaults."""
    (made,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    (start,) = [node for node in made.body if getattr(node, "name", "") == "__init__"]
    names = [each.arg for each in start.args.args]
    values = [None] * (len(names) - len(start.args.defaults)) + [constant(node) for node in start.args.defaults]
    return {key: value for key, value in zip(names, values, strict=True) if key != "self"}


# sd-scripts: argparse, by the functions that a script's parser is made of; the data set's schema

OTHERS = ("flux", "sd3", "lumina", "anima", "hunyuan")
NOT_TRAINING = ("gen_img", "inference")


def kohya(root: Path) -> Keys:
    """Options of the scripts that train, and the keys of a data set's file; what only scripts of other families have
    is below `others`."""
    scripts = [p for p in sorted(root.glob("*.py")) if not any(word in p.name for word in NOT_TRAINING)]
    functions = {
        (path.stem, node.name): node
        for path in [*scripts, *sorted((root / "library").glob("*.py"))]
        for node in ast.walk(module(path))
        if isinstance(node, ast.FunctionDef)
    }
    keys: Keys = {}
    others: Keys = {}
    for path in scripts:
        found: Keys = {}
        if (path.stem, "setup_parser") in functions:
            _arguments(functions, path.stem, "setup_parser", found, set())
        (others if path.name.startswith(OTHERS) else keys).update(found)
    config = classes(root / "library/config_util.py")
    usual = {name: value for node in config.values() for name, value in _annotated(node)}
    tables = {
        node.targets[0].id: [constant(key.args[0] if isinstance(key, ast.Call) else key) for key in node.value.keys]
        for node in config["ConfigSanitizer"].body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    data = {
        f"datasets.*.{'subsets.*.' * ('SUBSET' in table)}{name}": usual.get(name)
        for table, names in tables.items()
        if "SCHEMA" in table and "ARGPARSE" not in table
        for name in names
    }
    upward = {name: usual.get(name) for table, names in tables.items() if "ASCENDABLE" in table for name in names}
    data |= below("datasets.*", upward) | below("general", upward)
    return keys | data | below("others", {name: value for name, value in others.items() if name not in keys})


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            value = constant(part.value)
            yield part.target.id, value[0] if isinstance(value, list) and len(value) == 1 else value


def _arguments(
    functions: Mapping[tuple[str, str], ast.AST], place: str, name: str, found: Keys, seen: set[Any]
) -> None:
    """Options of a function that adds them to a parser, and of the functions that it calls for more."""
    if (place, name) in seen:
        return
    seen.add((place, name))
    for call in (node for node in ast.walk(functions[place, name]) if isinstance(node, ast.Call)):
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if called == "add_argument":
            long = [constant(word) for word in call.args if str(constant(word)).startswith("--")]
            action = constant(option(call, "action"))
            usual = {"store_true": False, "store_false": True}.get(str(action), constant(option(call, "default")))
            dest = constant(option(call, "dest"))
            found[dest or long[0].removeprefix("--").replace("-", "_")] = usual
        holder = getattr(getattr(call.func, "value", None), "id", place)
        for key in ((holder, called), (place, called)):
            if key in functions and ("arg" in called or "parser" in called or "option" in called):
                _arguments(functions, *key, found, seen)


# musubi-tuner: argparse, as sd-scripts, of the programs for models of images; the data set's schema

PROGRAMS = ("zimage", "flux_2", "krea2", "qwen_image")


def musubi(root: Path) -> Keys:
    """Options of the programs that train models which are trained here, and the keys of a data set's file."""
    package = root / "src/musubi_tuner"
    paths = [package / "training/parser_common.py", *sorted(package.glob("*_train*.py"))]
    paths = [path for path in paths if path.stem.startswith(PROGRAMS) or path.stem == "parser_common"]
    paths += [package / "flux_2/flux2_utils.py", package / "qwen_image/qwen_image_utils.py"]
    functions = {
        (path.stem, node.name): node
        for path in paths
        for node in ast.walk(module(path))
        if isinstance(node, ast.FunctionDef)
    }
    keys: Keys = {}
    for place, name in functions:
        if "parser" in name or "_args" in name:
            _arguments(functions, place, name, keys, set())
    config = classes(package / "dataset/config_utils.py")
    usual = {name: value for node in config.values() for name, value in _annotated(node)}
    tables = {
        node.targets[0].id: [constant(key) for key in node.value.keys]
        for node in config["ConfigSanitizer"].body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    names = {name for table, names in tables.items() if "ARGPARSE" not in table for name in names}
    upward = {name: usual.get(name) for name in tables["DATASET_ASCENDABLE_SCHEMA"]}
    data = below("datasets.*", {name: usual.get(name) for name in names}) | below("general", upward)
    return {"program": None, **keys, **data}


# SimpleTuner: a registry of fields; the keys that its data backends read

NESTED = {
    "parquet.": ("parquet_config",),
    "caption_shuffle.": ("caption_shuffle", "shuffle_config"),
    "conditioning.*.": ("cond_cfg",),
}
"""Groups of a data set, and the variables of its code that hold them."""
INTERNAL = {
    *("text_embed_cache", "sampler", "vaecache", "data_backend", "train_dataset", "train_dataloader", "config"),
    *("bucket_report", "conditioning_image_embed_cache", "auto_generated", "distillation_cache", "grounding_data"),
    *("audio_samples", "text_backend", "frames_per_video"),
}
"""What its code keeps in the same dictionaries, and no file of a user holds."""


def simpletuner(root: Path) -> Keys:
    """The options of its registry; those that only families have which cannot be trained here are below `others`."""
    package = root / "simpletuner"
    sections = package / "simpletuner_sdk/server/services/field_registry/sections"
    families = package / "helpers/models/field_registry"
    keys = {name: value for path in sorted(sections.glob("*.py")) for name, value in _registered(module(path))}
    keys |= dict(_registered(module(families / "sdxl.py")))
    others = {name: value for path in sorted(families.glob("*.py")) for name, value in _registered(module(path))}
    data = _backend(package / "helpers")
    configuration = package / "helpers/configuration"
    keys |= {constant(call.args[0]): None for call in calls(module(configuration / "cli_utils.py"), "_legacy_handler")}
    (shell,) = [
        node.value for node in module(configuration / "env_file.py").body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "env_to_args_map"
    ]  # fmt: skip
    keys |= below("variables", {name: option.lstrip("-") for name, option in constant(shell).items()})
    return keys | below("others", {k: v for k, v in others.items() if k not in keys}) | below("data_backends.*", data)


def _registered(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for call in calls(tree, "ConfigField"):
        if constant(option(call, "webui_only")) is True:
            continue
        usual, given = constant(option(call, "default_value")), option(call, "arg_name")
        if isinstance(given, ast.JoinedStr) and len(given.values) > 2:  # of a loop: the text encoders
            texts = [
                "".join(
                    getattr(part, "value", "{}") if isinstance(part, ast.Constant) else "{}" for part in given.values
                ).format(number)
                for number in range(1, 5)
            ]
        else:
            texts = [str(constant(given) or ""), *(constant(option(call, "aliases")) or [])]
        for text in filter(None, texts):
            yield text.lstrip("-").replace("-", "_"), usual
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For) and isinstance(node.iter, ast.List)):
        for row in loop.iter.elts:
            for text in map(constant, getattr(row, "elts", [])):
                if isinstance(text, str) and text.startswith("--"):
                    yield text.lstrip("-"), None


def _backend(helpers: Path) -> Keys:
    found: Keys = {}
    paths = sorted(path for path in helpers.rglob("*.py") if not {"models", "webhooks"} & {*path.parts})
    for path in paths:
        tree = module(path)
        for name, value in gets(tree, "backend", "backend_dict", "data_backend_config").items():
            if name not in INTERNAL and not name.startswith("_"):
                found[name] = found.get(name) if value is None else value
        for prefix, holders in NESTED.items():
            found |= {prefix + name: value for name, value in gets(tree, *holders).items() if not name.startswith("_")}
    for node in ast.walk(module(helpers / "prompts.py")):
        if isinstance(node, ast.FunctionDef) and "shuffle" in node.name:
            found |= {f"caption_shuffle.{name}": value for name, value in gets(node, "config").items()}
    return found


TRAINERS = {
    "onetrainer": onetrainer,
    "ai_toolkit": ai_toolkit,
    "kohya": kohya,
    "musubi": musubi,
    "simpletuner": simpletuner,
}


def main() -> None:
    """Prints the record of one trainer."""
    name, folder, source = sys.argv[1:]
    keys = TRAINERS[name](Path(folder))
    print(json.dumps({"source": source, "keys": dict(sorted(keys.items()))}, indent=1))


if __name__ == "__main__":
    main()
