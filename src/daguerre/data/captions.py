"""Captions of samples: fields, alternatives, tags, templates, prefix, and dropout to the empty string, which guidance
needs."""

import re
from collections.abc import Mapping
from itertools import accumulate, islice, product

import numpy as np

from daguerre import keys
from daguerre.data import alternatives
from daguerre.data.images.headers import Undecodable
from daguerre.data.settings import CaptionSettings, SourceSettings
from daguerre.types import Record
from daguerre.unicode import NO_TEXT, is_text

_BRACES = re.compile(r"(\{\{|\}\}|\{[^{}]+\})")
_JOINED = 4096
"""Most ways in which fields of several texts are joined; those beyond are never drawn."""


def choose(record: Record, settings: SourceSettings, seed: int, key: np.ndarray) -> str:
    """The record's caption; "" in a share `caption_dropout` of cases. Drawn by the seed and `key` alone, which is int64
    [3]: sample id, epoch, repeat. `Undecodable` if no caption field has a text that can be encoded."""
    rules = settings.captions
    caption = _from_fields(record, rules, seed, key) if rules.text is None else rules.text
    if not is_text(caption):
        raise Undecodable(NO_TEXT)
    if rules.wildcards:
        caption = _with_alternatives(caption, seed, key)
    if rules.reads_tags:
        caption = _of_tags(caption, rules, seed, key)
    caption = _ungrouped(caption, rules)
    if rules.templates:
        (drawn,) = _uniforms(seed, "caption template", key)
        caption = rules.templates[int(drawn * len(rules.templates))].replace("{}", caption)
    (drawn,) = _uniforms(seed, "caption dropout", key)
    return "" if drawn < settings.caption_dropout else rules.prefix + caption


def possible(texts: Mapping[str, str], settings: SourceSettings) -> list[str]:
    """Every caption that `choose` may give for a record of these caption fields, each once. `Undecodable` as there.
    Not for captions that are new each time, of which there is no end."""
    rules = settings.captions
    assert not rules.is_endless
    found = [text for text, _ in _candidates(texts, rules)] if rules.text is None else [rules.text]
    found = [_ungrouped(text, rules) for text in found if is_text(text)]
    if rules.templates:
        found = [template.replace("{}", text) for text in found for template in rules.templates]
    found = [rules.prefix + text for text in found if settings.caption_dropout < 1]
    return list(dict.fromkeys([*found, ""] if settings.caption_dropout else found))


def _candidates(texts: Mapping[str, str], rules: CaptionSettings) -> list[tuple[str, float]]:
    """The texts of the fields that there are, or all joined, with their weights. The texts of one field share its
    weight; of those that are joined, each may be paired with each of the other fields'."""
    weights = rules.weights or (1.0,) * len(rules.fields)
    held = [alternatives.chosen_of(texts, name, rules.lines) for name in rules.fields]
    there = [(own, weight) for own, weight in zip(held, weights, strict=True) if own and weight > 0]
    if not there:
        raise Undecodable(f"no caption in the field{'s' * (len(held) > 1)} {', '.join(rules.fields)}")
    if rules.join is None:
        return [(text, weight / len(own)) for own, weight in there for text in own]
    return [(rules.join.join(each), 1.0) for each in islice(product(*(own for own, _ in there)), _JOINED)]


def is_joined_of_lines(texts: Mapping[str, str], settings: SourceSettings) -> bool:
    """True where the lines of a caption are joined although nobody said so."""
    rules = settings.captions
    return rules.text is None and rules.lines is None and any(alternatives.has_lines(texts, n) for n in rules.used)


def _from_fields(record: Record, rules: CaptionSettings, seed: int, key: np.ndarray) -> str:
    """One of the texts, drawn by their weights."""
    there = _candidates(record.texts, rules)
    if len(there) == 1:
        return there[0][0]
    (drawn,) = _uniforms(seed, "caption field", key)
    ends = list(accumulate(weight for _, weight in there))
    return next((text for (text, _), end in zip(there, ends, strict=True) if drawn * ends[-1] < end), there[-1][0])


def _with_alternatives(caption: str, seed: int, key: np.ndarray) -> str:
    """The caption with one alternative of each `{a|b}`; `{{` and `}}` are braces."""
    parts = _BRACES.split(caption)
    draws = iter(_uniforms(seed, "caption alternatives", key, len(parts)))

    def drawn(part: str) -> str:
        if part in ("{{", "}}"):
            return part[0]
        options = part[1:-1].split("|")
        return options[int(next(draws) * len(options))]

    return "".join(drawn(part) if i % 2 else part for i, part in enumerate(parts))


def _of_tags(caption: str, rules: CaptionSettings, seed: int, key: np.ndarray) -> str:
    """The caption with its tags, but for the first `keep_tags`, in another order, or with some of them left out."""
    between = rules.tag_separator.strip() or rules.tag_separator
    tags = [tag.strip() for tag in caption.split(between)]
    tags = [tag for tag in tags if tag]
    kept, rest = tags[: rules.keep_tags], tags[rules.keep_tags :]
    order = [*range(len(rest))]
    if rules.shuffle_tags:
        words = keys.words(seed, "caption tags", *map(int, key), count=len(rest))
        order = np.argsort(words, kind="stable").tolist()
    if rules.tag_dropout:
        draws = _uniforms(seed, "tag dropout", key, len(rest))
        order = [i for i in order if draws[i] >= rules.tag_dropout]
    return rules.tag_separator.join([*kept, *(rest[i] for i in order)])


def _ungrouped(caption: str, rules: CaptionSettings) -> str:
    return caption if rules.tag_group is None else caption.replace(rules.tag_group, rules.tag_separator)


def _uniforms(seed: int, purpose: str, key: np.ndarray, count: int = 1) -> list[float]:
    return keys.uniforms(seed, purpose, *map(int, key), count=count).tolist()
