"""Layers of settings: a recipe over the one it extends, overrides over the recipe.

What a lower layer set and a choice made in a higher one leaves without effect (the keys of another plug-in, of another
noise schedule) is dropped here with a notice. Within one layer such a pair is an error, found by the check.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

from daguerre import plugins
from daguerre.config import adapter_forms, overrides, plugin_forms, recipe, source_forms, tracker_forms
from daguerre.config import fields as config_fields
from daguerre.config.aliases import lookup
from daguerre.config.aliases.relative import RELATIVE, Look, look_in
from daguerre.config.aliases.values import Meaning
from daguerre.config.errors import Problem, group, shown, unknown
from daguerre.config.fields import Leaf
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree
from daguerre.errors import UserError
from daguerre.settings import Duration, Plugin, Settings
from daguerre.training.settings import largest_divisor

MAPPINGS = {"adapters": "name", "data.sources": "source", "logging.trackers": "name"}
"""Settings that map names of the recipe's own to sections of plug-ins, and the key that says of which."""
_INSTANCE = "data.sources.instance."
_OF_THE_BASE = ("output_dir", "seed", "model", "objective", "adapter", "adapters", "logging", "mesh", "distributed")
_OF_ADDITIONS = (
    *("optimizer.learning_rate", "optimizer.learning_rates", "optimizer.learning_rate_factors"),
    *("training.weights_dtype", "training.frozen_precision", "training.base_precision"),
    "training.per_device_batch_size",
)
"""Settings that it takes, too, from a recipe that trains no whole component: the learning rate of full training would
teach a LoRA nothing."""
_OF_A_RUN = "config.yaml"
_CLASS_FOLDER = (
    "${{output_dir}}/class_images/{name}/${{data.sources.class.captions.text}}/${{data.sources.class.generate.count}}"
)


def of_recipe(name: str, given: Sequence[str], notices: list[str]) -> list[recipe.Layer]:
    """The layers of a recipe, the outermost base first.

    Where overrides name an instance set and the recipe has none, it says the base alone, and DreamBooth's recipe of its
    family all else.
    """
    own = recipe.layers(name)
    tree: Tree = {}
    for layer in own:
        tree = recipe.merge(tree, layer.tree)
    asked = None if own[-1].path.name == _OF_A_RUN else _dreambooth_by(tree, given)
    if asked is None:
        return own
    family = recipe.get(tree, "model.family")
    for template in (path for shipped, path in recipe.shipped().items() if shipped.endswith("_dreambooth")):
        below = recipe.layers(template.stem)
        if recipe.get(below[-1].tree, "model.family") == family:
            ours, theirs = "the model, the objective", "class images, learning rate, duration and batch"
            if _trains_no_whole(tree):
                ours = "the model, the objective, the adapters, their learning rate"
                theirs = "class images, duration and batch"
            notices.append(
                f"{asked}: this is DreamBooth, so the recipe {template.stem} is used with {ours} and the resolution of "
                f"{name}; {theirs} are {template.stem}'s"
            )
            return [*below, recipe.Layer(own[-1].path, _as_base(tree, own[-1].path.stem))]
    return own


def _dreambooth_by(tree: Tree, given: Sequence[str]) -> str | None:
    """The override that asks for DreamBooth on a recipe that is none; None where nothing does."""
    has_sets = recipe.get(tree, _INSTANCE.rstrip(".")) is not recipe.ABSENT
    trains = str(recipe.get(tree, "training.duration")).split()[:1] != ["0"]
    if has_sets or not trains:
        return None
    asked = None
    for override in given:
        with suppress(UserError):  # told where the override is read
            key, text = overrides.pair(override)
            paths = [path for path, _ in lookup.translate(key, text).values]
            if {"source", "data.source"} & {*paths}:
                return None
            asked = asked or next((key for path in paths if path.startswith(_INSTANCE)), None)
    return None if asked is None or _denoises_anew(tree) else asked


def _denoises_anew(tree: Tree) -> bool:
    """True if the recipe's denoiser starts from random weights."""
    family = recipe.get(tree, "model.family")
    if family not in plugins.names("families"):
        return False
    names = plugins.find("families", family).Settings.networks("denoiser")
    return any(isinstance(recipe.get(tree, f"model.{name}"), dict | None) for name in names)


def _as_base(tree: Tree, name: str) -> Tree:
    """The settings that DreamBooth takes from the recipe of a base."""
    sources = {"class": {"path": _CLASS_FOLDER.format(name=name)}}
    taken: Tree = {
        **{key: tree[key] for key in _OF_THE_BASE if key in tree},
        "run_name": f"{tree['run_name']}_dreambooth" if tree.get("run_name", "???") != "???" else "???",
        "description": f"{name}, DreamBooth",
        "data": {"sources": sources},
    }
    for path in ("data.resolution", *(_OF_ADDITIONS if _trains_no_whole(tree) else ())):
        if (value := recipe.get(tree, path)) is not recipe.ABSENT:
            taken = recipe.merge(taken, overrides.nested(path, value))
    return taken


def _trains_no_whole(tree: Tree) -> bool:
    """True of a recipe without the adapter `full`."""
    adapters = adapter_forms.members(adapter_forms.mapped({}, tree)).items()
    return all(own.get("name", name) != adapter_forms.FULL for name, own in adapters)


def from_overrides(
    root: type[Settings], tree: Tree, given: Sequence[str], notices: list[str]
) -> tuple[Tree, list[Problem]]:
    """The values that `key=value` overrides set on a recipe's tree, and what is wrong with them.

    Names of plug-ins are set first, wherever they stand: they decide which settings the others can mean.
    """
    problems: list[Problem] = []
    raw: dict[str, str] = {}
    meanings: list[tuple[str, Meaning]] = []

    def read(key: str, text: str, look: Look | None = None) -> Meaning:
        try:
            meaning = lookup.translate(key, text, look)
        except UserError as error:
            problems.append(Problem(key, str(error), text))
            return Meaning()
        notices.extend(meaning.notices)
        return meaning

    for override in given:
        try:
            key, text = overrides.pair(override)
        except UserError as error:
            problems.append(Problem(override, str(error)))
            continue
        raw[key] = text
        meanings.append((key, read(key, text)))
    pairs = [pair for key, meaning in meanings for pair in _pairs(key, meaning)]
    pairs += _implied(pairs, meanings, problems)
    pairs = _without_idle_names(pairs, list(raw.items()), notices)
    values: Tree = {}

    def put(pairs: Sequence[Pair]) -> None:
        below = recipe.merge(tree, values)
        ours, wrong = adapter_forms.pairs(pairs, below)
        problems.extend(Problem(label, why, text) for label, why, text in wrong)
        ours = tracker_forms.pairs(source_forms.paths(ours, below), below)
        out = [pair for pair in ours if pair[1].rpartition(".")[0] in MAPPINGS]
        named = [pair for pair in ours if pair not in out and _names_plugin(root, pair[1])]
        for pair in [*out, *named]:
            problems.extend(_set(root, values, tree, pair, notices))
        rest = [pair for pair in ours if pair not in out and pair not in named]
        for pair in plugin_forms.pairs(root, recipe.merge(tree, values), rest):
            problems.extend(_set(root, values, tree, pair, notices))

    put(pairs)
    look = look_in(raw, source_forms.flat(recipe.merge(tree, values)))
    put([pair for key in raw if key in RELATIVE for pair in _pairs(key, read(key, raw[key], look))])
    return plugin_forms.mapped(root, tree, values), problems


def _names_plugin(root: type[Settings], path: str) -> bool:
    section, _, key = path.rpartition(".")
    plugin = config_fields.plugin_sections(root, overrides.nested(section, {}) if section else {}).get(section)
    return plugin is not None and plugin.key == key


def _pairs(key: str, meaning: Meaning) -> list[Pair]:
    return [(key if key == path else f"{key} ({path})", path, value) for path, value in meaning.values]


def _implied(pairs: Sequence[Pair], meanings: Sequence[tuple[str, Meaning]], problems: list[Problem]) -> list[Pair]:
    """Overrides that follow from other trainers' names, for settings that none sets."""
    given = {path for _, path, _ in pairs}
    found = []
    for key, path, find in ((key, *implied) for key, meaning in meanings for implied in meaning.implied):
        if path in given or path.rpartition(".")[2] in given:  # as a whole path, or by the setting's own name
            continue
        try:
            text = find()
        except UserError as error:
            problems.append(Problem(key, str(error)))
            break
        if text is not None:
            found.append((f"{key} ({path})", path, text))
    return found


def _without_idle_names(
    pairs: Sequence[Pair], names_given: Sequence[tuple[str, str]], notices: list[str]
) -> list[Pair]:
    """The overrides without names of other trainers that have no effect beside the rest; each is one notice."""
    kept, given = [], [*((path, value) for _, path, value in pairs), *names_given]
    for key, path, value in pairs:
        said = lookup.idle_beside(key.partition(" ")[0], given)
        if said is None:
            kept.append((key, path, value))
        else:
            notices.append(said)
    return kept


def _set(root: type[Settings], values: Tree, tree: Tree, item: Pair, notices: list[str]) -> list[Problem]:
    """Put one override into `values`, or say why it cannot be."""
    key, path, text = item
    below = recipe.merge(tree, values)
    if text != "null" and not source_forms.may_stand_beside(path, below):
        why = "this recipe has one source without a name: add data.source=mix to train on named sources instead"
        return [_with_recipes(Problem(key, why, text), path)]
    begun = plugin_forms.begun(root, below, path)
    leaves, sections = config_fields.leaves(root, begun), config_fields.sections(root, begun)
    try:
        found = overrides.find(path, leaves, [*sections])
    except UserError as error:
        return [Problem(key, str(error), text)]
    if found is None:
        if _of_no_plugin(root, below, path):
            return []  # the check refuses the plug-in's name; what its keys would be, nobody knows
        optional = [name for name, leaf in leaves.items() if config_fields.plugin_of(leaf.field)]
        if above := next((name for name in optional if path.startswith(f"{name}.")), ""):
            return [Problem(key, f"{above} is null: choose one, {above}={config_fields.allowed(leaves[above])}", text)]
        return [_with_recipes(unknown(key, text, leaves, [*sections]), path)]
    target, inside = found
    section = sections.get(target)
    taken_out = section is not None and (section.named or section.optional) and text == "null"
    if target in sections and not taken_out and not text.lstrip().startswith("{"):
        return [group(key, text, leaves, target)]
    full = ".".join([target, *inside])
    leaf = None if inside else leaves.get(target)
    text = lookup.value(source_forms.short(full, below), text)
    value = overrides.yaml_value(text) if leaf is None else overrides.typed(text, leaf.field.annotation)
    before = recipe.get(values, full)
    merged = isinstance(before, dict) and isinstance(value, dict)  # both hold
    if before is not recipe.ABSENT and before != value and not merged:
        notices.append(f"{full} is given twice: {shown(value)} is used, {shown(before)} is ignored")
    values.update(recipe.merge(values, overrides.nested(full, value)))
    return []


def _with_recipes(problem: Problem, path: str) -> Problem:
    """Names of DreamBooth's sets mean something on recipes that have both."""
    if not path.startswith("data.sources."):
        return problem
    recipes = [name for name in recipe.shipped() if name.endswith("dreambooth")]
    return replace(problem, text=f"{problem.text}; the sets `instance` and `class` are in {' and '.join(recipes)}")


def _of_no_plugin(root: type[Settings], tree: Tree, path: str) -> bool:
    """True if a path lies in a section that names a plug-in which does not exist."""
    for section, plugin in config_fields.plugin_sections(root, tree).items():
        name = recipe.get(tree, f"{section}.{plugin.key}")
        if path.startswith(f"{section}.") and name is not recipe.ABSENT and name not in plugins.names(plugin.kind):
            return True
    return False


def lay_over(root: type[Settings], base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`over` on `base`, without what `base` set for choices that `over` changes; each drop is one notice."""
    for section in config_fields.sections(root, recipe.merge(base, over)):
        if recipe.get(over, section) is None:  # all of its keys are comments
            over = recipe.without(over, section)
    over = tracker_forms.mapped(base, source_forms.mapped(base, adapter_forms.mapped(base, over)))
    over = adapter_forms.with_stored_images(base, over, notices)
    notices += adapter_forms.strength_notices(base, over)
    over = plugin_forms.mapped(root, base, over)
    over = source_forms.without_nameless(base, over)
    base, over = _without_taken_out(base, over, notices)
    unused_before = dict(_unused(root, base))
    base = _without_old_plugins(root, base, over, notices)
    base = _without_newly_unused(root, base, over, unused_before, notices)
    base = _without_third_batch_size(base, over, notices)
    base = _fitting_warmup(base, over, notices)
    base = _with_micro_batch_that_divides(base, over, notices)
    return recipe.merge(base, over)


def _without_taken_out(base: Tree, over: Tree, notices: list[str]) -> tuple[Tree, Tree]:
    """Both without the members of mappings that `over` takes out."""
    for path in _taken_out(over):
        own = recipe.get(base, path)
        if own is recipe.ABSENT:
            continue
        base = recipe.without(base, path)
        key = MAPPINGS[path.rpartition(".")[0]]
        dropped = [f"{path}.{field}" for field in own if field != key] if isinstance(own, dict) else []
        if dropped:
            notices.append(f"{path} is removed, and with it the recipe's {', '.join(dropped)}")
    return base, kept(over)


def _taken_out(tree: Tree) -> list[str]:
    """The paths of members of mappings that are null."""
    found = {path: recipe.get(tree, path) for path in MAPPINGS}
    every = [
        (f"{path}.{name}", own)
        for path, there in found.items()
        if isinstance(there, dict)
        for name, own in there.items()
    ]
    return [path for path, own in every if own is None]


def kept(tree: Tree) -> Tree:
    """A tree without members of mappings that are null."""
    for path in _taken_out(tree):
        tree = recipe.without(tree, path)
    return tree


def finished(tree: Tree) -> Tree:
    """A tree with a source, whatever it may be."""
    data = tree.get("data", {})
    return {**tree, "data": {"sources": {source_forms.NAMELESS: {}}, **data}} if isinstance(data, dict) else tree


def known(root: type[Settings], tree: Tree) -> dict[str, Leaf]:
    """Every setting of a tree, written in any way, by its shortest path."""
    tree = finished(tracker_forms.mapped({}, source_forms.mapped({}, adapter_forms.mapped({}, tree))))
    return {source_forms.short(path, tree): leaf for path, leaf in config_fields.leaves(root, tree).items()}


def _without_old_plugins(root: type[Settings], base: Tree, over: Tree, notices: list[str]) -> Tree:
    for section, plugin in config_fields.plugin_sections(root, recipe.merge(base, over)).items():
        old, new = recipe.get(base, section), recipe.get(over, section)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            continue
        before, after = old.get(plugin.key, plugin.default), new.get(plugin.key)
        if before == after or not all(name in plugins.names(plugin.kind) for name in (before, after)):
            continue
        kept = _shared(plugin, old, str(before), str(after))
        dropped = [name for name in old if name not in kept and name != plugin.key]
        for name in dropped:
            base = recipe.without(base, f"{section}.{name}")
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
    """`base` without the batch size that follows from the two others, where `over` gives one of them anew."""
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
    given = ", ".join(f"training.{name}" for name in (_ACCUMULATION, _PART, _WHOLE) if name in above)
    notices.append(f"{given} is given: the recipe's training.{old[0]} dropped out")
    return recipe.without(base, f"training.{old[0]}")


def _fitting_warmup(base: Tree, over: Tree, notices: list[str]) -> Tree:
    """`base` with the warm-up and the decay of its learning rate shortened, where `over` makes the run too short for
    them: they keep their share of the run, a tenth where the run's length was unknown."""
    whole = recipe.merge(base, over)
    duration, before = (_updates(tree, "training.duration", whole) for tree in (whole, base))
    lengths = {name: _updates(whole, f"lr_scheduler.{name}", whole) for name in ("warmup", "decay")}
    if duration in (None, before) or duration >= sum(length or 0 for length in lengths.values()):
        return base
    for name, length in lengths.items():
        path = f"lr_scheduler.{name}"
        if not length or recipe.get(over, path) is not recipe.ABSENT:
            continue
        share = Fraction(length, before) if before and before >= length else Fraction(1, 10)
        value = f"{ceil(share * duration)} steps"
        notices.append(
            f"training.duration is {shown(recipe.get(whole, 'training.duration'))}, too short for the recipe's {path} "
            f"of {shown(recipe.get(base, path))}: it is {shown(value)} here"
        )
        base = recipe.merge(base, overrides.nested(path, value))
    return base


def _updates(tree: Tree, path: str, whole: Tree) -> int | None:
    """The updates of a duration in steps or samples; None where that is not known yet, or none is there."""
    value, batch = recipe.get(tree, path), recipe.get(whole, f"training.{_WHOLE}")
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
    return recipe.merge(base, {"training": {_PART: smaller}})


def _without_newly_unused(
    root: type[Settings], base: Tree, over: Tree, unused_before: Mapping[str, str], notices: list[str]
) -> Tree:
    """`base` without what had an effect in it and has none under `over` (`Settings.unused`)."""
    dropped: dict[str, list[str]] = {}
    while True:  # a setting that drops out can leave others without effect
        found = [
            (path, why)
            for path, why in _unused(root, recipe.merge(base, over))
            if path not in unused_before and recipe.get(over, path) is recipe.ABSENT
        ]
        if not found:
            break
        for path, why in found:
            if recipe.get(base, path) is not recipe.ABSENT:  # not inside one that dropped out
                base = recipe.without(base, path)
                dropped.setdefault(why, []).append(path)
    notices += [f"the recipe's {', '.join(paths)} dropped out: {why}" for why, paths in dropped.items()]
    return base


def _unused(root: type[Settings], tree: Tree) -> Iterator[tuple[str, str]]:
    """(setting, why) for what a tree gives although `Settings.unused` says that it has no effect."""
    for path, section in config_fields.sections(root, tree).items():
        given = recipe.get(tree, path)
        if isinstance(given, dict):
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
