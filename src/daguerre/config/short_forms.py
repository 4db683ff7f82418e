"""Short forms of the command line, in which the only source, adapter or tracker has no name; recipes have mappings.

    data.path=DIR                           data.sources.NAME.path; NAME is `images` where there is no source yet
    data.source=csv                         the same, in place of several; `mix`: in place of the one without a name
    adapter.rank=8                          adapters.NAME.rank, of the only one that learns no new tokens
    adapter=lora, adapter.name=lora         adapters.lora.name, in place of adapters of other kinds
    adapter.placeholder_token="<toy>"       adapters.tokens.placeholder_token, with a LoRA, or in place of `full`
    train_text_encoder=true                 adapters.full.train: one component more (or less) in the list
    trackers=[wandb], tensorboard=false     logging.trackers.NAME: these and no others; one of them
    condition=canny                         adapters.NAME.condition.name

A file may say such a thing, too: `layer` reads it as if it were given on the command line.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from daguerre import plugins, trees, yaml_text
from daguerre.config import fields
from daguerre.config.errors import Problem
from daguerre.config.fields import Leaf, Section
from daguerre.config.overrides import Pair
from daguerre.data.settings import NAMELESS, DataSettings
from daguerre.settings import Plugin, Settings
from daguerre.trees import Tree

MAPPINGS = {"adapters": "name", "data.sources": "source", "logging.trackers": "name"}
"""Settings that map names of the recipe's own to sections of plug-ins, and the key that says of which."""
FULL, TOKENS, LORA = "full", "tokens", "lora"
SWITCH = re.compile(r"(?:model\.)?train_(unet|transformer|text_encoder(?:_\d)?)")
"""Settings by which one component is trained, or not."""
_OF_TOKENS = ("placeholder_token", "initializer_token", "num_vectors", "tokens", "existing")
"""Settings of the adapter `tokens` that have other trainers' names."""
_SHARED = (*DataSettings.model_fields,)
_SOURCES, _TRACKERS = "data.sources", "logging.trackers"
_OF_TRACKERS = {name: f"logging.{name}" for name in ("trackers", "tensorboard")}


def members(tree: Tree, mapping: str) -> dict[str, Any]:
    """The members of a mapping by name, null for one that is taken out; the adapter `full` where no other is named."""
    found = trees.get(tree, mapping)
    named = (
        {name: own for name, own in found.items() if isinstance(own, dict | None)} if isinstance(found, dict) else {}
    )
    return named or ({FULL: {"name": FULL}} if mapping == "adapters" else {})


def only(tree: Tree) -> str | None:
    """The name of the only source; `images` before the first, None where there are several."""
    there = [name for name, own in members(tree, _SOURCES).items() if own is not None]
    return None if len(there) > 1 else there[0] if there else NAMELESS


def layer(base: Tree, over: Tree, problems: list[Problem]) -> Tree:
    """A layer over `base` without short forms."""
    given: list[Pair] = []
    for section in ("data", "logging", "model"):
        if isinstance(inner := over.get(section), dict):
            short = {key: value for key, value in inner.items() if _is_short(f"{section}.{key}", value)}
            given += [(f"{section}.{key}", f"{section}.{key}", value) for key, value in short.items()]
            over = {**over, section: {key: value for key, value in inner.items() if key not in short}}
    if (flat := over.get("adapter")) is not None:
        given += _spread(("adapter", "adapter", flat))
    over = {name: value for name, value in over.items() if name != "adapter"}
    given += [(path, path, own) for name, own in members(over, _SOURCES).items() if (path := f"{_SOURCES}.{name}")]
    for _, path, value in long(given, trees.merge(base, over), problems):
        over = trees.merge(over, trees.nested(path, value))
    return over


def _is_short(path: str, value: Any) -> bool:
    """True for a setting of a file that stands there in short form."""
    section, _, name = path.partition(".")
    flat = section == "data" and name not in _SHARED
    switch = section == "model" and SWITCH.fullmatch(name) and isinstance(value, bool)
    return bool(
        flat
        or switch
        or path == "logging.tensorboard"
        or (path == _TRACKERS and not (value and isinstance(value, dict)))
    )


def long(given: Sequence[Pair], tree: Tree, problems: list[Problem]) -> list[Pair]:
    """Settings by paths of the mappings, for a recipe whose values are `tree`; those that say what is there first."""
    pairs = _of_adapters([pair for each in given for pair in _spread(each)], tree, problems)
    return _of_trackers(_of_sources(pairs, tree), tree, problems)


def _spread(pair: Pair) -> list[Pair]:
    """`adapter=lora` is its name, and `adapter={name: lora, rank: 8}` one setting each."""
    label, path, value = pair
    if path != "adapter":
        return [pair]
    group = yaml_text.value(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
    inner = group if isinstance(group, dict) else {"name": group}
    return [(label, f"adapter.{key}", own) for key, own in inner.items()]


def _of_adapters(given: Sequence[Pair], tree: Tree, problems: list[Problem]) -> list[Pair]:
    there = {name: {"name": name, **own} for name, own in members(tree, "adapters").items() if isinstance(own, dict)}
    first, rest = list[Pair](), list[Pair]()

    def choose(label: str, name: str, kind: Any, others: Sequence[str]) -> None:
        first.extend((label, f"adapters.{other}", None) for other in others)
        first.append((label, f"adapters.{name}.name", kind))
        for other in others:
            del there[other]
        there[name] = {**there.get(name, {}), "name": kind}

    def of_kind(kind: Any) -> list[str]:
        return [name for name, own in there.items() if own["name"] == kind]

    for label, _, kind in (pair for pair in given if pair[1] == "adapter.name"):
        same = of_kind(kind)
        target = same[0] if len(same) == 1 else kind if plugins.exists("adapters", kind) else "adapter"
        choose(label, target, kind, [name for name in there if name != target])
    words = [pair for pair in given if pair[1] in {f"adapter.{name}" for name in _OF_TOKENS}]
    if words and not of_kind(TOKENS):
        choose(words[0][0], TOKENS, TOKENS, of_kind(FULL))
    main = [name for name in there if name not in of_kind(TOKENS)] or [*there] or ["adapter"]
    switches = [pair for pair in given if SWITCH.fullmatch(pair[1])]
    for pair in (pair for pair in given if pair not in switches and pair[1] != "adapter.name"):
        label, path, value = pair
        if pair not in words and path.startswith("adapter.") and len(main) > 1:
            text = f"there are several adapters: write adapters.NAME, with NAME one of {', '.join(there)}"
            problems.append(Problem(label, text, value))
        else:
            target = of_kind(TOKENS)[0] if pair in words else main[0]
            rest.append((label, re.sub(r"^adapter\.", f"adapters.{target}.", path), value))
    family = next((value for _, path, value in reversed(given) if path == "model.family"), None)
    rest += _trained(switches, there, family or trees.get(tree, "model.family"), problems)
    return [*first, *rest]


def _trained(
    switches: Sequence[Pair], there: Mapping[str, Mapping[str, Any]], family: Any, problems: list[Problem]
) -> list[Pair]:
    """The list `train` of the adapter `full` for `train_unet` and the like."""
    if not switches:
        return []  # before the family is imported
    known = plugins.exists("families", family)
    able = plugins.find("families", family).Settings.trainable() if known else ()
    full = next((name for name, own in there.items() if own["name"] == FULL), None)
    given = there.get(full or "", {}).get("train")
    if not isinstance(given, list | tuple | None):
        return []  # refused for its type
    before = train = list(able[:1] if given is None else given)
    found: list[Pair] = []
    for label, path, value in switches:
        component, on = SWITCH.sub(r"\1", path), str(value).lower()
        if on not in ("true", "false"):
            problems.append(Problem(label, "allowed: true or false", value))
        elif full is None:
            lora = next((name for name, own in there.items() if own["name"] == LORA), None)
            way = "RANK extends it to" if on == "true" else "null keeps it off"
            hint = (
                f": adapters.{lora}.ranks.{component}={way} the {component}" if lora else ", which trains no component"
            )
            text = f"belongs to the adapter `full`, but the recipe has {', '.join(there)}{hint}"
            problems.append(Problem(label, text, value))
        else:
            keeps = on == "true" or component not in able  # what cannot be trained is left for the check to refuse
            train = [name for name in train if name != component] + [component] * keeps
            train = sorted(train, key=lambda name: (name not in able[:1], name))
            found = [(label, f"adapters.{full}.name", FULL), (label, f"adapters.{full}.train", train)]
    return found if train != before else []


def _of_sources(given: Sequence[Pair], tree: Tree) -> list[Pair]:
    there, named = members(tree, _SOURCES), list[str]()
    for name, key, value in ((*_member(path), value) for _, path, value in given if path.startswith(f"{_SOURCES}.")):
        there[name] = there.get(name) or {} if key or value not in (None, "null") else None
        named.append(name)
    label, kind = next(((label, value) for label, path, value in reversed(given) if path == "data.source"), ("", None))
    out: list[str] = []
    if kind == "mix":  # as several sources were once called: the one without a name is none of them
        out = [name for name in there if name == NAMELESS and name not in named]
        given = [pair for pair in given if pair[1:] != ("data.source", kind)]
    elif kind is not None and only(trees.nested(_SOURCES, there)) is None:
        out = [name for name in there if name != NAMELESS]
    target = only(trees.nested(_SOURCES, {name: own for name, own in there.items() if name not in out}))
    pairs = [(each, path if target is None else of_only(path, target), value) for each, path, value in given]
    return [*((label, f"{_SOURCES}.{name}", None) for name in out), *pairs]


def _of_trackers(given: Sequence[Pair], tree: Tree, problems: list[Problem]) -> list[Pair]:
    first, rest = list[Pair](), list[Pair]()
    for label, short, value in given:
        path, switch = _OF_TRACKERS.get(short, short), str(value).lower()
        whole = yaml_text.value(value) if isinstance(value, str) and path == _TRACKERS else value
        if path == "logging.tensorboard" and switch in ("true", "false"):
            first.append((label, f"{_TRACKERS}.tensorboard", {"name": "tensorboard"} if switch == "true" else None))
        elif path == "logging.tensorboard":
            problems.append(Problem(label, "allowed: true or false", value))
        elif path == _TRACKERS and (not whole or isinstance(whole, str | list)):
            listed = [whole] if isinstance(whole, str) else whole or []
            out = [name for name in members(tree, path) if name not in listed]
            first += [(label, path, {}), *((label, f"{path}.{name}", None) for name in out)]
            first += [(label, f"{path}.{name}", {"name": name}) for name in listed]
        else:
            rest.append((label, path, value))
    return [*first, *rest]


def _member(path: str) -> tuple[str, str]:
    """The name of a member and the setting of it, empty for the member itself, of a path in `data.sources`."""
    name, _, key = path.removeprefix(f"{_SOURCES}.").partition(".")
    return name, key


def of_only(path: str, name: str) -> str:
    """The path of a setting in the mapping, where `name` is the only source."""
    section, _, rest = path.partition(".")
    inside = section == "data" and rest and rest.partition(".")[0] not in _SHARED
    return f"{_SOURCES}.{name}.{rest}" if inside else path


def short(text: str, tree: Tree) -> str:
    """A text in which the settings of the only source are written flat, unless it has a name of its own."""
    return re.sub(rf"\bdata\.sources\.{NAMELESS}(?![\w-])", "data", text) if only(tree) == NAMELESS else text


def flat(tree: Tree) -> Tree:
    """A tree in which the settings of the only source stand in `data`, too."""
    own: Tree | None = members(tree, _SOURCES).get(only(tree) or "")
    return trees.merge({"data": own}, tree) if own else tree


def with_long_references(value: Any, name: str) -> Any:
    """A tree whose `${data.path}` and the like refer into the mapping, where `name` is the only source."""
    if isinstance(value, dict):
        return {key: with_long_references(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_long_references(inner, name) for inner in value]
    if isinstance(value, str) and "${data." in value:
        return re.sub(r"\$\{(data\.[\w.]+)\}", lambda match: f"${{{of_only(match[1], name)}}}", value)
    return value


def may_be_added(path: str, tree: Tree) -> bool:
    """True unless a path names another source than the only one, which has no name of its own."""
    there = members(tree, _SOURCES)
    return not path.startswith(f"{_SOURCES}.") or _member(path)[0] in there or there.get(NAMELESS) is None


def without_nameless(base: Tree, over: Tree) -> Tree:
    """A layer that takes out the source of `base` that has no name where it gives others with names of their own."""
    given = members(over, _SOURCES)
    if members(base, _SOURCES).get(NAMELESS) is None or NAMELESS in given or not any(given.values()):
        return over
    return trees.merge(over, trees.nested(f"{_SOURCES}.{NAMELESS}", None))


def named(over: Tree, base: Tree) -> Tree:
    """A layer over `base` in which members of mappings that are called as a plug-in are of that plug-in."""
    for mapping, key in MAPPINGS.items():
        given = trees.get(over, mapping)
        for name, own in given.items() if isinstance(given, dict) else ():
            whole = f"{mapping}.{name}"
            is_new = isinstance(own, dict) and key not in own and trees.get(base, f"{whole}.{key}") is trees.ABSENT
            if is_new and plugins.exists(mapping.rpartition(".")[2], name):
                over = trees.merge(over, trees.nested(f"{whole}.{key}", name))
    return over


# Sections of a plug-in that a recipe may do without, such as the condition of an adapter


def without_words(root: type[Settings], base: Tree, over: Tree) -> Tree:
    """A layer over `base` whose sections hold mappings, also where it gives the name of a plug-in alone."""
    for path, plugin in fields.optional_plugins(root, trees.merge(base, over)).items():
        if isinstance(name := trees.get(over, path), str):
            over = trees.merge(over, trees.nested(path, {plugin.key: name}))
    return over


def with_sections(root: type[Settings], tree: Tree, given: Sequence[Pair]) -> list[Pair]:
    """Overrides with whole paths of what is in such sections, names of plug-ins first; a word in the place of a section
    is one."""
    optional = fields.optional_plugins(root, tree)
    ends = [path.rpartition(".")[2] for path in optional]
    by_end = {end: path for end, path in zip(ends, optional, strict=True) if ends.count(end) == 1}
    found: list[Pair] = []
    for label, path, value in given:
        head, dot, rest = path.partition(".")
        path = f"{by_end.get(head, head)}{dot}{rest}"
        if path in optional and value != "null":
            written = isinstance(value, str) and value.lstrip().startswith("{")
            group = yaml_text.value(value) if written else value
            inner = trees.paths(group) if isinstance(group, dict) else [(optional[path].key, value)]
            found += [(label, f"{path}.{key}", own) for key, own in inner]
        else:
            found.append((label, path, value))
    return sorted(found, key=lambda pair: not _names(optional, pair[1]))


def begun(root: type[Settings], tree: Tree, path: str) -> tuple[dict[str, Leaf], dict[str, Section]]:
    """The settings and sections of a tree in which the section is there that a setting of this path begins."""
    leaves, sections = fields.leaves_and_sections(root, tree)
    section, _, key = path.rpartition(".")
    mapping = next((each for each in MAPPINGS if section.startswith(f"{each}.")), "")
    member = ".".join(path.split(".")[: mapping.count(".") + 2])
    there = leaves.get(section) or sections.get(section)
    plugin = fields.optional_plugin(there) if there else None
    if plugin is None or plugin.key != key:
        section = member if mapping else ""
    if not section:  # most settings begin none: what looks for them is a large part of reading a command line
        return leaves, sections
    return fields.leaves_and_sections(root, named(trees.merge(trees.nested(section, {}), tree), {}))


def _names(optional: Mapping[str, Plugin], path: str) -> bool:
    section, _, key = path.rpartition(".")
    return section in optional and optional[section].key == key
