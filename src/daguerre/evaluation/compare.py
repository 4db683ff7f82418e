"""Compares two evaluations of one protocol, with confidence intervals by the jackknife over samples.

Only equal numbers of images are compared: most metrics change with it. Both saw the same prompts and seeds, and the
same samples are left out of both, so that what they share does not blur the difference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from glob import escape
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from daguerre import documents, plugins
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.errors import UserError
from daguerre.evaluation import blocks, losses, reference, results
from daguerre.evaluation.formulas import jackknife
from daguerre.evaluation.reference import Statistics
from daguerre.evaluation.result import Row
from daguerre.remote import local_copy
from daguerre.report import comparison
from daguerre.report.comparison import Compared
from daguerre.tracking.progress import Counter

_SHARED = (
    "prompts_sha256",
    "against_sha256",
    "seed",
    "guidance_scale",
    "sampler",
    "num_inference_steps",
    "height",
    "width",
    "crop_px",
)
"""Entries of a protocol that two evaluations must share."""


@dataclass(frozen=True)
class Evaluation:
    """A result that was written."""

    folder: Path
    document: Mapping[str, Any]

    @property
    def protocol(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.document["protocol"]
        return found

    @property
    def tables(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.document["tables"]
        return found

    @property
    def step(self) -> int:
        return int(self.protocol.get("step", 0))

    @property
    def images(self) -> int:
        """Images that were measured, or that an autoencoder made again."""
        return int(self.protocol.get("images", self.protocol.get("reconstructions", 0)))


@dataclass(frozen=True)
class Difference:
    """One number of two evaluations."""

    table: str
    row: Row
    """Of the first."""
    other: float
    interval: tuple[float, float] | None
    """Of `other` - `row.value`, at 95 %; None where no interval holds what it claims."""
    warning: str = ""
    """Why the numbers may mislead, if they may."""

    def document(self) -> dict[str, Any]:
        """For programs."""
        row = self.row
        found = {"name": row.name, "a": row.value, "b": self.other, "share": row.share, "better": row.better}
        found |= dict(zip(("low", "high"), self.interval or (), strict=False))
        return found | {"verdict": self.shown().verdict}

    def shown(self) -> Compared:
        """For people."""
        factor, unit, digits = (100.0, " %", 4) if self.row.share else (1.0, "", 6)
        a, b = factor * self.row.value, factor * self.other
        first, second, difference = f"{a:.{digits}g}{unit}", f"{b:.{digits}g}{unit}", f"{b - a:+.4g}"
        if self.interval is None:
            return Compared(self.row.name, first, second, difference, "no interval", None, None)
        low, high = (factor * value for value in self.interval)
        sign = {"higher": 1, "lower": -1}.get(self.row.better, 0)
        verdict = "no clear difference"
        if sign and (low > 0 or high < 0):
            verdict = "B is better" if sign * (b - a) > 0 else "A is better"
            verdict = "differ, and too few images to say which is better" if self.warning else verdict
        difference += f" ({low:+.4g} to {high:+.4g})"
        return Compared(self.row.name, first, second, difference, verdict, low, high)


class Comparison(NamedTuple):
    """Two evaluations and their differences."""

    a: Evaluation
    b: Evaluation
    tables: dict[str, list[Difference]]
    left: list[str]
    """Tables that both have, measured in two ways."""


def run(first: str, second: str, out: str | None = None) -> Comparison:
    """Prints the comparison of two runs, or of two folders of results, and writes it as a page if `out` names one.
    UserError where they cannot be compared."""
    a, b = _chosen(_found(first), _found(second), (first, second))
    every: dict[str, list[Difference]] = {}
    what = f"{a.images:,} images each"
    note = "in brackets: 95 % intervals of the difference, by leaving out samples"
    print(f"A: {a.folder}\nB: {b.folder}\n{what}; {note}")
    tables: dict[str, list[Compared]] = {}
    warnings: dict[str, str] = {}
    for found in differences(a, b):
        if found.table not in tables:
            print(found.table)
        every.setdefault(found.table, []).append(found)
        one = found.shown()
        tables.setdefault(found.table, []).append(one)
        print(f"  {one.name:22}A {one.first}, B {one.second}, B - A {one.difference}: {one.verdict}")
        if found.warning and found.table not in warnings:
            warnings[found.table] = found.warning
            print(f"  warning: {found.warning}")
    if left := [name for name in a.tables if name in b.tables and name not in tables]:
        print(f"not compared, as the settings, the reference or the numbers of images differ: {', '.join(left)}")
    if not tables:
        raise UserError("no metric was measured in the same way for both (networks, digests, reference)", code="empty")
    if out is not None:
        names = (str(a.folder), str(b.folder))
        page = comparison.render(names, what, tables, warnings, note)
        write_bytes_atomically(Path(out).expanduser(), page.encode())
        print(f"page: {out}")
    return Comparison(a, b, every, left)


def differences(a: Evaluation, b: Evaluation) -> Iterator[Difference]:
    """Each number of the tables that both have, measured with the same settings, networks and reference."""
    for table, document in a.tables.items():
        other = b.tables.get(table)
        if other is None or any(document[each] != other[each] for each in ("count", "made_with")):
            continue
        others = {row["name"]: row["value"] for row in other["rows"]}
        rows = [Row(**each) for each in document["rows"] if each["name"] in others]
        intervals = _intervals(a, b, table, {row.name: (row.value, others[row.name]) for row in rows})
        for row in rows:
            yield Difference(table, row, others[row.name], intervals.get(row.name), document.get("warning", ""))


def _intervals(
    a: Evaluation, b: Evaluation, table: str, values: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """The interval of each difference of a table that has one."""
    count = a.tables[table]["count"]
    if count < jackknife.FEWEST:
        return {}
    group_N = jackknife.groups(count)
    try:
        one, two = (_of_groups(each, table, group_N) for each in (a, b))
        with Counter(f"intervals of {table}", jackknife.EVALUATIONS, unit="times") as counter:

            def difference(kept_G: np.ndarray) -> dict[str, float]:
                first, second = one(kept_G), two(kept_G)
                counter.add(1)
                return {name: second[name] - first[name] for name in first}

            widths = jackknife.half_widths(difference)
    except _Gone:
        return {}
    except _NoSamples:
        return {name: jackknife.share_interval(*pair, count) for name, pair in values.items()}
    return {
        name: (pair[1] - pair[0] - widths[name], pair[1] - pair[0] + widths[name])
        for name, pair in values.items()
        if name in widths
    }


def _of_groups(one: Evaluation, table: str, group_N: np.ndarray) -> jackknife.Statistic:
    """The numbers of a table by the samples of some groups."""
    own = one.tables[table]["made_with"]["settings"]
    metric = plugins.find("metrics", own["name"])
    try:
        settings = metric.Settings.model_validate(own)
    except ValidationError as error:
        raise UserError(
            f"{one.folder / results.NAME}: this version has no such settings of {own['name']} "
            f"({documents.first_fault(error)}): repeat the evaluation that wrote it",
            code="changed",
        ) from error
    if hasattr(metric, "of_groups"):
        found: jackknife.Statistic = metric.of_groups(settings, StoredInputs(one, table, slice(None)), group_N)
        return found

    def at(kept_G: np.ndarray) -> Mapping[str, float]:
        rows = np.flatnonzero(kept_G[group_N])
        values: dict[str, float] = metric.evaluate(settings, StoredInputs(one, table, rows))[table].values()
        return values

    return at


class _NoSamples(Exception):
    """A metric keeps no numbers by sample."""


class _Gone(Exception):
    """Numbers by sample were kept, and their file is gone."""


@dataclass(frozen=True)
class StoredNetwork:
    """A network whose features were kept."""

    label: str
    about: Mapping[str, Any]

    def distance(self, first: np.ndarray, second: np.ndarray) -> float:
        """Never asked for: the distances of pairs were kept."""
        raise AssertionError


@dataclass(frozen=True)
class StoredInputs:
    """Inputs of the metric of a table from the arrays of an evaluation, at some samples."""

    one: Evaluation
    table: str
    rows: np.ndarray | slice
    redraw: None = None

    @property
    def source(self) -> Any:
        """Metrics of a source draw their own images, of which no numbers are kept."""
        raise _NoSamples

    def network(self, name: str, **options: Any) -> StoredNetwork:
        """The network of the table, whose name ends in the network's."""
        return StoredNetwork(self.table.partition("-")[2], {})

    def features(self, network: StoredNetwork) -> np.ndarray:
        return self._array(f"features-{network.label}")

    def text_features(self, network: StoredNetwork) -> np.ndarray:
        return self._array(f"texts-{network.label}")

    def reference(self, network: StoredNetwork) -> Statistics:
        body = self.one.tables[self.table]
        return _reference(body["places"]["reference"], network.label, body["made_with"]["reference"]["sha256"])

    def pairs(self, name: str, score: Any) -> np.ndarray:
        return self._array(name)

    def losses(self, quantiles: Sequence[float], num_samples: int) -> dict[str, np.ndarray]:
        weights = self.table.partition("-")[2]
        return {weights: self._array(losses.array_name(weights, quantiles, num_samples))}

    @property
    def draw(self) -> Any:
        raise _NoSamples

    def _array(self, name: str) -> np.ndarray:
        path, count = self.one.folder / f"{name}.npy", self.one.tables[self.table]["count"]
        if len(whole := _array(path)) != count:
            raise UserError(
                f"{path} has {len(whole):,} samples, and {results.NAME} in its folder says {count:,}: delete both, and "
                "evaluate again",
                code="damaged",
            )
        found: np.ndarray = whole[self.rows]
        return found


@lru_cache(maxsize=4)
def _array(path: Path) -> np.ndarray:
    try:
        return blocks.read(path)
    except FileNotFoundError:
        raise _Gone from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): delete it, and repeat the evaluation that wrote it", code="damaged"
        ) from error


@cache
def _reference(place: str, label: str, digest: str) -> Statistics:
    """The reference that a table was measured with. UserError where it is another one now."""
    found = reference.of_file(place, label)
    if found.about["sha256"] != digest:
        raise UserError(
            f"{place} is not the reference any more that this was measured with ({digest[:12]}): put that one there, "
            "or evaluate both again",
            code="changed",
            setting="reference",
        )
    return found


def _found(name: str) -> list[Evaluation]:
    """The evaluations of a run or of a folder of images, or the one in a folder. UserError without any."""
    folder = local_copy.located(name)
    found = _results([folder, *sorted((folder / "evaluations").glob("*/")), *sorted(folder.glob("*/"))])
    if not found:  # of images, the newest first
        there = _results(results.OF_FOLDERS.glob(f"{escape(folder.name)}-*/"))
        found = [
            one for one in there if Path(one.protocol.get("folder", "")).expanduser().resolve() == folder.resolve()
        ]
        found.sort(key=lambda one: str(one.document.get("time")), reverse=True)
    if not found:
        raise UserError(f"{name} has no evaluation yet: `daguerre evaluate {name} metrics=[...]` first", code="missing")
    return found


def _results(folders: Iterable[Path]) -> list[Evaluation]:
    return [Evaluation(folder, results.read(folder)) for folder in folders if (folder / results.NAME).is_file()]


def _chosen(
    first: Sequence[Evaluation], second: Sequence[Evaluation], names: tuple[str, str]
) -> tuple[Evaluation, Evaluation]:
    """The newest pair of one protocol. UserError without a pair, or where the numbers of images differ."""
    pairs = [
        (a, b) for a, b in product(first, second)
        if all(a.protocol.get(name) == b.protocol.get(name) for name in _SHARED if name != "prompts_sha256")
        and a.folder != b.folder
    ]  # fmt: skip
    equal = [pair for pair in pairs if pair[0].images == pair[1].images]
    if not equal and pairs:
        a, b = pairs[-1]
        raise UserError(
            f"{names[0]} was measured on {a.images:,} images and {names[1]} on {b.images:,}: "
            "most metrics change with the number, so only equal numbers are compared; evaluate with one num_images",
            code="conflict",
            setting="num_images",
        )
    same = [p for p in equal if p[0].protocol.get("prompts_sha256") == p[1].protocol.get("prompts_sha256")]
    if not same:
        raise UserError(
            f"{' and '.join(names)} have no evaluations of one protocol (prompts, seed, sampler, steps, guidance, "
            "size, images to compare with)",
            code="conflict",
        )
    return max(same, key=lambda pair: (pair[0].step + pair[1].step, pair[0].step))
