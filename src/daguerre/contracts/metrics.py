"""The contract of every metric: tables of finite numbers, which follow from what the metric asks for alone.

Inputs are made up: features, scores, losses and images are random numbers, of which a metric cannot tell where they are
from. A metric of a source gets that source with its usual settings.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from daguerre import plugins
from daguerre.contracts import contract
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError
from daguerre.evaluation.formulas import frechet
from daguerre.evaluation.metric import Incomplete, MetricSettings
from daguerre.evaluation.result import Result

COUNT, WIDTH, SIDE_PX = 40, 8, 64


def fixed(array: np.ndarray) -> np.ndarray:
    """The array, which nobody may write into: metrics share what they are given."""
    array.setflags(write=False)
    return array


class Statistics:
    """Of images that are compared with."""

    count = 4 * COUNT // 5
    about: Mapping[str, Any] = {"sha256": "0" * 64}

    def features(self) -> np.ndarray:
        return fixed(np.random.default_rng(1).normal(0.1, 1, (self.count, WIDTH)).astype(np.float32))

    def moments(self) -> frechet.Moments:
        return frechet.moments(self.features())


class Network:
    """A network of any kind."""

    label = "made-up"
    about: Mapping[str, Any] = {"network": "made-up", "digest": "0" * 64}

    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        return np.array([np.resize(image.astype(np.float32), WIDTH) for image in images])

    def distance(self, first: np.ndarray, second: np.ndarray) -> float:
        return float(np.abs(first.astype(float) - second).mean())


@dataclass(frozen=True)
class Inputs:
    """All that a metric may ask for, of the images `rows`; `asked` are the names of what it did, in order."""

    source: SourceSettings | None
    rows: np.ndarray = field(default_factory=lambda: np.arange(COUNT))
    complete: bool = True
    redraw: None = None
    asked: list[str] = field(default_factory=list)

    def network(self, name: str, **options: Any) -> Network:
        self.asked.append("network")
        return Network()

    def reference(self, network: Network) -> Statistics:
        self.asked.append("reference")
        return Statistics()

    def features(self, network: Network) -> np.ndarray:
        return self._made("features", lambda rng: rng.normal(0, 1, (COUNT, WIDTH)).astype(np.float32))

    def text_features(self, network: Network) -> np.ndarray:
        return self._made("text_features", lambda rng: rng.normal(0, 1, (COUNT, WIDTH)).astype(np.float32))

    def pairs(self, name: str, score: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
        images = np.random.default_rng(3).integers(0, 256, (2, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
        assert np.isfinite(score(*map(fixed, images)))
        return self._made("pairs", lambda rng: rng.uniform(0, 1, COUNT))

    def losses(self, quantiles: Sequence[float], num_samples: int) -> dict[str, np.ndarray]:
        made = self._made("losses", lambda rng: rng.uniform(0, 1, (COUNT, len(quantiles))))
        return {"raw": made, "ema": made}

    def draw(self, texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> Iterator[np.ndarray]:
        self._made("draw", lambda rng: rng.uniform(0, 1, COUNT))
        for number in range(len(texts)):
            yield np.random.default_rng(number).integers(0, 256, (SIDE_PX, SIDE_PX, 3), dtype=np.uint8)

    def _made(self, what: str, make: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
        self.asked.append(what)
        if not self.complete:
            raise Incomplete
        return fixed(make(np.random.default_rng(2))[self.rows])


@cache
def sources() -> Mapping[str, SourceSettings]:
    """By the metric that they name, the settings of the sources that work without any being given."""
    found: dict[str, SourceSettings] = {}
    for name in plugins.names("sources"):
        module = plugins.find("sources", name)
        with suppress(UserError, ValueError):  # it needs settings, such as a path
            settings = module.Settings()
            if metric := module.open_source(settings, "held_out").metric:
                found.setdefault(metric, settings)
    return found


class MetricContract(contract.SettingsContract):
    """A metric's promises."""

    kind = "metrics"
    start = MetricSettings

    @pytest.fixture
    def source(self, plugin: Any, name: str) -> SourceSettings | None:
        """Settings of the source that it is made for."""
        return sources().get(name) if plugin.Settings.own_samples else None

    @pytest.fixture
    def evaluated(self, plugin: Any, given: Any) -> Callable[[Inputs], dict[str, Result]]:
        """Its tables for some inputs."""
        return lambda inputs: plugin.evaluate(plugin.Settings(**given), inputs)

    def test_its_function_has_the_arguments(self, plugin: Any) -> None:
        assert list(inspect.signature(plugin.evaluate).parameters) == ["settings", "inputs"]

    def test_tables_have_rows_of_finite_numbers(self, evaluated: Any, source: Any) -> None:
        tables = evaluated(Inputs(source))
        assert tables
        for name, result in tables.items():
            assert isinstance(result, Result)
            assert name
            assert result.count >= 1
            rows = [row.name for row in result.rows]
            assert rows
            assert len({*rows}) == len(rows)
            for row in result.rows:
                assert np.isfinite(row.value), row
                assert not row.share or 0 <= row.value <= 1, f"{row}: give numbers that are no shares by `number`"
            document = result.document()
            assert json.loads(json.dumps(document)) == document
            assert result.table(name)

    def test_numbers_follow_from_the_inputs_and_leave_them(self, evaluated: Any, source: Any) -> None:
        np.random.seed(0)
        first = evaluated(Inputs(source))
        np.random.seed(1)
        assert evaluated(Inputs(source)) == first

    def test_what_is_missing_is_said_before_work(self, evaluated: Any, source: Any) -> None:
        """Networks and the reference are asked for before anything is computed of images."""
        inputs = Inputs(source)
        evaluated(inputs)
        assert inputs.asked, "it measures nothing"
        first = next((i for i, name in enumerate(inputs.asked) if name not in ("network", "reference")), 0)
        assert not {"network", "reference"} & {*inputs.asked[first:]}

    def test_it_waits_for_other_processes(self, evaluated: Any, source: Any) -> None:
        with pytest.raises(Incomplete):
            evaluated(Inputs(source, complete=False))

    def test_tables_of_a_network_end_in_its_label(self, evaluated: Any, source: Any) -> None:
        """So numbers of two networks have two names, and two evaluations can be compared by what was kept."""
        inputs = Inputs(source)
        tables = evaluated(inputs)
        assert "network" not in inputs.asked or all(name.endswith(f"-{Network.label}") for name in tables)

    def test_some_of_the_images_have_the_same_tables(self, evaluated: Any, source: Any) -> None:
        """As `daguerre evaluate A B` leaves out images for its intervals."""
        whole, part = evaluated(Inputs(source)), evaluated(Inputs(source, np.arange(0, COUNT, 2)))
        assert {name: [*part[name].values()] for name in part} == {name: [*whole[name].values()] for name in whole}

    def test_its_quicker_form_has_the_same_differences(self, plugin: Any, given: Any, evaluated: Any) -> None:
        if not hasattr(plugin, "of_groups"):
            pytest.skip("has none")
        group_N = np.arange(COUNT) % 5
        value = plugin.of_groups(plugin.Settings(**given), Inputs(None), group_N)
        differences: dict[str, list[float]] = {}
        for left_out in (0, 3):
            kept = np.arange(5) != left_out
            (table,) = evaluated(Inputs(None, np.flatnonzero(kept[group_N]))).values()
            for name, number in value(kept).items():
                differences.setdefault(name, []).append(number - table.values()[name])
        assert differences
        assert all(first == pytest.approx(second, abs=1e-6) for first, second in differences.values())
