"""The ways of writing which adapters a recipe attaches: all of them become the mapping `adapters`.

    adapters: {style: {name: lora, rank: 8}}     the mapping; an adapter that is called as its kind needs no `name`
    adapter: {name: lora, rank: 8}               a mapping of one, called `lora`; `adapter.rank=8` sets its rank
    adapter.placeholder_token: <toy>             of the adapter `tokens`, beside a LoRA and in place of `full`
    model.train_text_encoder: true               of the adapter `full`: one component more (or less) in its list `train`

`null` in the place of an adapter's settings takes it out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from daguerre import plugins
from daguerre.config import overrides, recipe
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree

FULL, TOKENS, _LORA = "full", "tokens", "lora"
_OF_TOKENS = ("placeholder_token", "initializer_token", "num_vectors", "tokens", "existing")
"""Settings of the adapter `tokens` that have other trainers' names."""
_FLAT, MAPPING = "adapter", "adapters"
_STORED = re.compile(r"^data\.(?:.*\.)?control_(?:column|dir)(?:\.(\w+))?$")
"""Settings of a data source that say where a control image is, and its name."""
SWITCH = re.compile(r"(?:model\.)?train_(unet|text_encoder(?:_\d)?)")
"""Settings by which one component is trained, or not."""


def members(tree: Tree) -> dict[str, dict[str, Any]]:
    """The adapters of a tree by their names; `full` alone where it says nothing."""
    found = tree.get("adapters")
    named = {name: dict(own) for name, own in found.items() if isinstance(own, Mapping)} if _is(found) else {}
    return named or {FULL: {"name": FULL}}


def trains(adapters: Any, component: str) -> bool:
    """True if a mapping of adapters names a component among what it trains, or adds to."""
    every = members({"adapters": adapters}).values()
    whole = any(component in (own.get("train") or ()) for own in every if own.get("name") == FULL)
    return whole or any((own.get("ranks") or {}).get(component) for own in every)


def mapped(base: Tree, over: Tree) -> Tree:
    """A layer over `base`, which holds the mapping: now it holds it, too."""
    return _with_names(_from_switches(base, _from_flat(base, over)))


def with_stored_images(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`over` without the condition of an adapter of `base` where it says where the control image is stored that this
    adapter reads; each is one notice."""
    found = [(path, _STORED.search(path)) for path, value in recipe.paths(over) if value is not None]
    stored = {match[1] or "control": path for path, match in found if match}
    for name, own in members(base).items() if stored else ():
        setting, image = f"{MAPPING}.{name}", own.get("image", "control")
        is_open = recipe.get(over, setting) is not None and recipe.get(over, f"{setting}.condition") is recipe.ABSENT
        if image in stored and own.get("condition") and is_open:
            over = recipe.merge(over, overrides.nested(f"{setting}.condition", None))
            notices.append(
                f"{stored[image]} says where control images are stored, so the recipe's {setting}.condition dropped out"
            )
    return over


def strength_notices(base: Tree, over: Tree) -> list[str]:
    """A line for each LoRA of `base` to which `over` gives another rank and no alpha, where the recipe has one: in
    diffusers' scripts `rank` is alpha, too."""
    lines: list[str] = []
    for name, own in members(base).items():
        setting = f"{MAPPING}.{name}"
        new, alpha = recipe.get(over, setting), own.get("alpha")
        if alpha is None or not isinstance(new, Mapping) or "rank" not in new or "alpha" in new:
            continue
        if _kind(name, {**own, **new}) != _LORA:
            continue
        usual = plugins.find("adapters", _LORA).Settings.model_fields["rank"].default
        if new["rank"] != (rank := own.get("rank", usual)):
            lines.append(
                f"{setting}.rank={new['rank']} keeps the recipe's alpha {alpha}, which was for rank {rank}: additions "
                f"have another strength. {setting}.alpha=null multiplies them by 1, as diffusers' scripts do"
            )
    return lines


def pairs(given: Sequence[Pair], tree: Tree) -> tuple[list[Pair], list[Pair]]:
    """Overrides with paths of the mapping, those that choose adapters first; and (override, why, text) of those that
    cannot be."""
    there, first, rest, wrong = members(tree), list[Pair](), list[Pair](), list[Pair]()
    given = [pair for each in given for pair in _spread(each)]
    others = [pair for pair in given if pair[1] != f"{_FLAT}.name"]
    for label, _, kind in (pair for pair in given if pair not in others):
        target = _target(there, kind)
        first += [(label, f"adapters.{name}", "null") for name in there if name != target]
        first.append((label, f"adapters.{target}.name", kind))
        there = {target: {**there.get(target, {}), "name": kind}}
    others = _of_tokens(others, there, first)
    switches = [pair for pair in others if SWITCH.fullmatch(pair[1])]
    main = [name for name, own in there.items() if _kind(name, own) != TOKENS] or [*there]
    for label, path, text in (pair for pair in others if pair not in switches):
        own = path.removeprefix(f"{_FLAT}.")
        if own == path:
            rest.append((label, path, text))
        elif len(main) > 1:
            wrong.append(
                (label, f"there are several adapters: write adapters.NAME, with NAME one of {', '.join(there)}", text)
            )
        else:
            rest.append((label, f"adapters.{main[0]}.{own}", text))
    families = [value for _, path, value in given if path == "model.family"]
    family = families[-1] if families else recipe.get(tree, "model.family")
    before = {name: _train(own, family) for name, own in there.items() if _kind(name, own) == FULL}
    for label, path, text in switches:
        if why := _switch(path, text, there, family):
            wrong.append((label, why, text))
    for name, train in before.items():
        if (now := _train(there[name], family)) != train:
            label = switches[-1][0]
            first.append((label, f"adapters.{name}.name", FULL))
            rest.append((label, f"adapters.{name}.train", json.dumps(now)))
    return [*first, *rest], wrong


def _of_tokens(given: Sequence[Pair], there: dict[str, dict[str, Any]], first: list[Pair]) -> list[Pair]:
    """The overrides, with those of new tokens for the adapter that learns them. Where there is none it is put into
    `there` and `first`, in place of `full`."""
    asked = [pair for pair in given if pair[1] in {f"{_FLAT}.{name}" for name in _OF_TOKENS}]
    target = next((name for name, own in there.items() if _kind(name, own) == TOKENS), None)
    if asked and target is None:
        target, label = TOKENS, asked[0][0]
        for name in [name for name, own in there.items() if _kind(name, own) == FULL]:
            first.append((label, f"adapters.{name}", "null"))
            del there[name]
        first.append((label, f"adapters.{target}.name", TOKENS))
        there[target] = {"name": TOKENS}
    return [
        (pair[0], f"adapters.{target}.{pair[1].removeprefix(f'{_FLAT}.')}", pair[2]) if pair in asked else pair
        for pair in given
    ]


def _is(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _kind(name: str, own: Mapping[str, Any]) -> Any:
    return own.get("name", name)


def _train(own: Mapping[str, Any], family: Any) -> list[str]:
    """The components that an adapter `full` trains."""
    train = own.get("train")
    return list(_able(family)[:1] if train is None else train)


def _able(family: Any) -> tuple[str, ...]:
    """The components that adapters of a family can train, the usual one first; () for names that are refused later."""
    known = family in plugins.names("families")
    return plugins.find("families", family).Settings.trainable() if known else ()


def _spread(pair: Pair) -> list[Pair]:
    """`adapter=lora` is its name, and `adapter={name: lora, rank: 8}` one override each."""
    label, path, text = pair
    if path != _FLAT:
        return [pair]
    value = overrides.yaml_value(text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        return [(label, f"{_FLAT}.name", text)]
    return [(label, f"{_FLAT}.{key}", v if isinstance(v, str) else json.dumps(v)) for key, v in value.items()]


def _target(there: Mapping[str, Mapping[str, Any]], kind: Any) -> str:
    """The adapter that the flat form means: the only one of its kind (or the only one), else a new one called by it."""
    same = [name for name, own in there.items() if kind is None or _kind(name, own) == kind]
    if len(same) == 1:
        return same[0]
    return str(kind) if kind in plugins.names("adapters") else _FLAT


def _from_flat(base: Tree, over: Tree) -> Tree:
    """A flat `adapter` as a mapping of one, which takes the place of adapters of other kinds."""
    flat = over.get(_FLAT)
    if _FLAT not in over or not (flat is None or _is(flat)):
        return over
    over = recipe.without(over, _FLAT)
    if not flat:  # all of its keys are comments
        return over
    there = members(recipe.merge(base, over))
    target = _target(there, flat.get("name"))
    others = dict.fromkeys(name for name in there if name != target) if "name" in flat else {}
    own = {"name": _kind(target, there.get(target, {})), **flat}
    return recipe.merge(over, {"adapters": {**others, target: own}})


def _with_names(over: Tree) -> Tree:
    """Adapters that are called as their kind, with its name."""
    given = over.get("adapters")
    if not _is(given):
        return over
    kinds = plugins.names("adapters")
    named = {
        name: {"name": name, **own} if _is(own) and "name" not in own and name in kinds else own
        for name, own in given.items()
    }
    return {**over, "adapters": named}


def _from_switches(base: Tree, over: Tree) -> Tree:
    """`model.train_unet` and the like as members of `train` of the adapter `full`."""
    model = over.get("model")
    found = {n: v for n, v in model.items() if SWITCH.fullmatch(str(n)) and isinstance(v, bool)} if _is(model) else {}
    merged = recipe.merge(base, over)
    there, family = members(merged), recipe.get(merged, "model.family")
    full = next((name for name, own in there.items() if _kind(name, own) == FULL), None)
    if not found or full is None:
        return over
    train = before = _train(there[full], family)
    for name, on in found.items():
        over = recipe.without(over, f"model.{name}")
        train = _switched(train, name, on, family)
    odd = any(_not_trainable(_component(name), family) for name in found)
    if train == before and not odd:  # what is odd is left to the check of adapters
        return over
    return recipe.merge(over, {"adapters": {full: {"name": FULL, "train": train}}})


def _switch(path: str, text: str, there: dict[str, dict[str, Any]], family: Any) -> str:
    """Puts an override of `train_unet` and the like into `there`; why it cannot be, "" where it can."""
    component = _component(path)
    if text.lower() not in ("true", "false"):
        return "allowed: true or false"
    if why := _not_trainable(component, family):
        return why
    full = next((name for name, own in there.items() if _kind(name, own) == FULL), None)
    if full is None:
        lora = next((name for name, own in there.items() if _kind(name, own) == _LORA), None)
        way = "RANK extends it to" if text.lower() == "true" else "null keeps it off"
        return f"belongs to the adapter `full`, but the recipe has {', '.join(there)}" + (
            f": adapters.{lora}.ranks.{component}={way} the {component}" if lora else ", which trains no component"
        )
    there[full]["train"] = _switched(_train(there[full], family), path, text.lower() == "true", family)
    return ""


def _not_trainable(component: str, family: Any) -> str:
    """The reason why a family cannot train a component, "" if it can."""
    if family not in plugins.names("families"):
        return ""  # which is refused elsewhere
    components = plugins.find("families", family).Settings.components
    able = [name for name, spec in components.items() if spec.trainable]
    there = f"there are {', '.join(able)}" if able else "it always trains all of its networks"
    return "" if component in able else f"{component} is not a component that model.family={family} can train; {there}"


def _component(switch: str) -> str:
    match = SWITCH.fullmatch(switch)
    assert match is not None
    return match[1]


def _switched(train: Sequence[str], switch: str, on: bool, family: Any) -> list[str]:
    component = _component(switch)
    every = sorted({*train, component}, key=lambda each: (each not in _able(family)[:1], each))
    return every if on else [each for each in train if each != component]
