"""Layers of settings: a recipe over the one that it extends, a command line over the recipe.

What a lower layer set and a choice made in a higher one leaves without effect (the keys of another plug-in, of another
noise schedule) is dropped here with a notice. Within one layer such a pair is an error, found by the check.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from math import ceil
from typing import Any

from daguerre import plugins, trees
from daguerre.config import fields as config_fields
from daguerre.config import short_forms
from daguerre.config.errors import Problem
from daguerre.config.fields import Leaf
from daguerre.config.short_forms import LORA, MAPPINGS, members
from daguerre.formatting import counted, shown
from daguerre.settings import Duration, Plugin, Settings
from daguerre.training.settings import largest_divisor
from daguerre.trees import Tree

_STORED = re.compile(r"^data\.(?:.*\.)?control_(?:column|dir)(?:\.(\w+))?$")
"""Settings of a data source that say where a control image is, and its name."""


def lay_over(root: type[Settings], base: Tree, over: Tree, notices: list[str], problems: list[Problem]) -> Tree:
    """`over` on `base`, without what `base` set for choices that `over` changes; each drop is one notice. `problems`
    gets what cannot be of its short forms."""
    for section in config_fields.sections(root, trees.merge(base, over)):
        if trees.get(over, section) is None:  # all of its keys are comments
            over = trees.without(over, section)
    over = short_forms.named(short_forms.layer(base, over, problems), base)
    over = _with_stored_images(base, over, notices)
    notices += _strength_notices(base, over)
    over = short_forms.without_words(root, base, over)
    over = short_forms.without_nameless(base, over)
    base, over = _without_taken_out(base, over, notices)
    unused_before = dict(_unused(root, base))
    base = _without_old_plugins(root, base, over, notices)
    base = _without_newly_unused(root, base, over, unused_before, notices)
    base = _without_third_batch_size(base, over, notices)
    base = _fitting_warmup(base, over, notices)
    base = _with_micro_batch_that_divides(base, over, notices)
    return trees.merge(base, over)


def _without_taken_out(base: Tree, over: Tree, notices: list[str]) -> tuple[Tree, Tree]:
    """Both without the members of mappings that `over` takes out."""
    for path in _taken_out(over):
        own = trees.get(base, path)
        if own is trees.ABSENT:
            continue
        base = trees.without(base, path)
        key = MAPPINGS[path.rpartition(".")[0]]
        dropped = [f"{path}.{field}" for field in own if field != key] if isinstance(own, dict) else []
        if dropped:
            notices.append(f"{path} is removed, and with it the recipe's {', '.join(dropped)}")
    return base, kept(over)


def _taken_out(tree: Tree) -> list[str]:
    """The paths of members of mappings that are null."""
    there = {path: found for path in MAPPINGS if isinstance(found := trees.get(tree, path), dict)}
    return [f"{path}.{name}" for path, found in there.items() for name, own in found.items() if own is None]


def kept(tree: Tree) -> Tree:
    """A tree without members of mappings that are null."""
    for path in _taken_out(tree):
        tree = trees.without(tree, path)
    return tree


def finished(tree: Tree) -> Tree:
    """A tree with a source, whatever it may be."""
    data = tree.get("data", {})
    return {**tree, "data": {"sources": {short_forms.NAMELESS: {}}, **data}} if isinstance(data, dict) else tree


def known(root: type[Settings], tree: Tree) -> dict[str, Leaf]:
    """Every setting of a tree, written in any way, by its shortest path."""
    tree = finished(short_forms.named(short_forms.layer({}, tree, []), {}))
    return {short_forms.short(path, tree): leaf for path, leaf in config_fields.leaves(root, tree).items()}


def _with_stored_images(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`over` without the condition of an adapter of `base` where it says where the control image is stored that this
    adapter reads; each is one notice."""
    found = [(path, _STORED.search(path)) for path, value in trees.paths(over) if value is not None]
    stored = {match[1] or "control": path for path, match in found if match}
    for name, own in members(base, "adapters").items() if stored else ():
        setting, image = f"adapters.{name}", own.get("image", "control")
        is_open = trees.get(over, setting) is not None and trees.get(over, f"{setting}.condition") is trees.ABSENT
        if image in stored and own.get("condition") and is_open:
            over = trees.merge(over, trees.nested(f"{setting}.condition", None))
            notices.append(
                f"{stored[image]} says where control images are stored, so the recipe's {setting}.condition dropped out"
            )
    return over


def _strength_notices(base: Tree, over: Tree) -> list[str]:
    """A line for each LoRA of `base` to which `over` gives another rank and no alpha, where the recipe has one: in
    diffusers' scripts `rank` is alpha, too."""
    lines: list[str] = []
    for name, own in members(base, "adapters").items():
        setting = f"adapters.{name}"
        new, alpha = trees.get(over, setting), own.get("alpha")
        if alpha is None or not isinstance(new, Mapping) or "rank" not in new or "alpha" in new:
            continue
        if (own | new).get("name") != LORA:
            continue
        usual = plugins.find("adapters", LORA).Settings.model_fields["rank"].default
        if new["rank"] != (rank := own.get("rank", usual)):
            lines.append(
                f"{setting}.rank={new['rank']} keeps the recipe's alpha {alpha}, which was for rank {rank}: additions "
                f"have another strength. {setting}.alpha=null multiplies them by 1, as diffusers' scripts do"
            )
    return lines


def _without_old_plugins(root: type[Settings], base: Tree, over: Tree, notices: list[str]) -> Tree:
    for section, plugin in config_fields.plugin_sections(root, trees.merge(base, over)).items():
        old, new = trees.get(base, section), trees.get(over, section)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            continue
        before, after = old.get(plugin.key, plugin.default), new.get(plugin.key)
        if before == after or not all(plugins.exists(plugin.kind, name) for name in (before, after)):
            continue
        kept = _shared(plugin, old, str(before), str(after))
        dropped = [name for name in old if name not in kept and name != plugin.key]
        for name in dropped:
            base = trees.without(base, f"{section}.{name}")
        if dropped:
            listed = ", ".join(f"{section}.{name}" for name in dropped)
            notices.append(f"{section}.{plugin.key} is {after} instead of {before}: the recipe's {listed} dropped out")
    return base


def _shared(plugin: Plugin, old: Tree, before: str, after: str) -> Tree:
    """The values that mean the same to both plug-ins: settings of every plug-in of the kind, or equal in both.

    A field that the base leaves without a default and a plug-in gives one is the plug-in's own.
    """
    first, second = plugin.settings_class(before), plugin.settings_class(after)
    every = {
        name
        for name, field in plugin.base.model_fields.items()
        if name != plugin.key and field.is_required() == first.model_fields[name].is_required()
    }
    return {name: value for name, value in old.items() if name in every or _same(first, second, name)}


def _same(first: type[Settings], second: type[Settings], name: str) -> bool:
    fields = [cls.model_fields.get(name) for cls in (first, second)]
    return all(fields) and len({repr(field.default) for field in fields if field}) == 1


_ACCUMULATION, _PART, _WHOLE = "gradient_accumulation_steps", "per_device_batch_size", "global_batch_size"


def _without_third_batch_size(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`base` without the batch size that follows from the two others, where `over` sets one of them."""
    below, above = base.get("training"), over.get("training")
    if not isinstance(below, dict) or not isinstance(above, dict):
        return base
    both = below | above
    sizes = [size for name in (_WHOLE, _PART, _ACCUMULATION) if isinstance(size := both.get(name), int)]
    if len(sizes) < 3 or sizes[0] == sizes[1] * sizes[2]:
        return base
    old = [name for name in (_ACCUMULATION, _PART, _WHOLE) if name in below and name not in above]
    if not old or len(old) == 3 or (old[0] == _ACCUMULATION and sizes[2] == 1):
        return base
    given = " and ".join(f"training.{name}" for name in (_ACCUMULATION, _PART, _WHOLE) if name in above)
    are = "are" if " and " in given else "is"
    notices.append(f"{given} {are} given: the recipe's training.{old[0]} dropped out")
    return trees.without(base, f"training.{old[0]}")


def _fitting_warmup(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`base` with the warm-up and the decay of its learning rate shortened, where `over` makes the run too short for
    them: they keep their share of the run, a tenth where the run's length was unknown."""
    whole = trees.merge(base, over)
    duration, before = (_updates(tree, "training.duration", whole) for tree in (whole, base))
    lengths = {name: _updates(whole, f"lr_scheduler.{name}", whole) for name in ("warmup", "decay")}
    if duration in (None, before) or duration >= sum(length or 0 for length in lengths.values()):
        return base
    for name, length in lengths.items():
        path = f"lr_scheduler.{name}"
        if not length or trees.get(over, path) is not trees.ABSENT:
            continue
        share = Fraction(length, before) if before and before >= length else Fraction(1, 10)
        shorter = ceil(share * duration)
        notices.append(
            f"training.duration is {shown(trees.get(whole, 'training.duration'))}, too short for the recipe's {path} "
            f"of {shown(trees.get(base, path))}: it takes {counted(shorter, 'update')} here"
        )
        base = trees.merge(base, trees.nested(path, f"{shorter} steps"))
    return base


def _updates(tree: Tree, path: str, whole: Tree) -> int | None:
    """The updates of a duration in steps or samples; None where that is not known yet, or none is there."""
    value, batch = trees.get(tree, path), trees.get(whole, f"training.{_WHOLE}")
    try:
        return Duration(value).steps(batch, None)
    except (TypeError, ValueError):  # no text, no duration, epochs, samples of an unknown batch
        return None


def _with_micro_batch_that_divides(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`base` with a smaller micro-batch, where `over` gives a global batch that its own does not divide: nothing that
    is learnt depends on it."""
    below, above = base.get("training"), over.get("training")
    if not isinstance(below, dict) or not isinstance(above, dict):
        return base
    whole, part = above.get(_WHOLE), None if _PART in above else below.get(_PART)
    if not (isinstance(whole, int) and isinstance(part, int) and whole > 0 and part > 0 and whole % part):
        return base
    smaller = largest_divisor(whole, part)
    notices.append(
        f"training.{_PART} is {smaller} in place of the recipe's {part}, which does not divide the global batch of "
        f"{whole}"
    )
    return trees.merge(base, {"training": {_PART: smaller}})


def _without_newly_unused(
    root: type[Settings], base: Tree, over: Tree, unused_before: Mapping[str, str], notices: list[str]
) -> Tree:
    """`base` without what had an effect in it and has none under `over` (`Settings.unused`)."""
    dropped: dict[str, list[str]] = {}
    while True:  # a setting that drops out can leave others without effect
        found = [
            (path, why)
            for path, why in _unused(root, trees.merge(base, over))
            if path not in unused_before and trees.get(over, path) is trees.ABSENT
        ]
        if not found:
            break
        for path, why in found:
            if trees.get(base, path) is not trees.ABSENT:  # not inside one that dropped out
                base = trees.without(base, path)
                dropped.setdefault(why, []).append(path)
    notices += [f"the recipe's {', '.join(paths)} dropped out: {why}" for why, paths in dropped.items()]
    return base


def _unused(root: type[Settings], tree: Tree) -> Iterator[tuple[str, str]]:
    """(setting, why) for what a tree gives although `Settings.unused` says that it has no effect."""
    for path, section in config_fields.sections(root, tree).items():
        given = trees.get(tree, path)
        # Most sections have nothing to say of this, and what looks at them is a large part of reading a recipe.
        says = section.cls.unused is not Settings.unused or section.cls.unused_when
        if isinstance(given, dict) and says:
            with suppress(AttributeError, TypeError, ValueError):  # values of a wrong kind: the check says so
                unused = _unchecked(section.cls, given).unused()
                yield from ((f"{path}.{name}", why) for name, why in unused.items() if name in given)


def _unchecked(cls: type[Settings], given: Tree) -> Settings:
    """The settings object of values that nobody has checked yet, for `Settings.unused` to look at."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = cls.model_fields.get(name)
        inner = config_fields.section_class(field, value) if field else None
        if inner and isinstance(value, dict):
            values[name] = _unchecked(inner, value)
        elif field and (members := config_fields.inside(field, value)):
            values[name] = {key: _unchecked(own, value[key]) for key, own in members.items()}
        else:
            values[name] = value
    return cls.model_construct(**values)
