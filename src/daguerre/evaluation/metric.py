"""The contract of metrics. A file of `evaluation/metrics` is a metric when it defines

    class Settings(MetricSettings)                                     # `name` narrowed to the file's name
    def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]

and returns tables by their names. One over all pairs of images may define `of_groups` besides, which gives its numbers
without some of the images more quickly than `evaluate` on the others would, up to a constant of the reference, as
comparisons take differences (`metrics/kid.py`). What a metric asks of
its `inputs` is made block by block of sample ids, kept, and shared by all metrics; numbers are then computed from whole
arrays, in the order of sample ids, by one process. So they do not depend on how many processes worked, or where one was
killed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError
from daguerre.evaluation.formulas.frechet import Moments
from daguerre.settings import Settings

Source = TypeVar("Source", bound=SourceSettings)


class Draw(Protocol):
    """Draws images of a metric's own prompts by the weights that are evaluated."""

    def __call__(self, texts: Sequence[str], references: Sequence[np.ndarray] = (), /) -> Iterable[np.ndarray]:
        """Images of prompts, in their order, each with its reference image [H, W, 3] uint8 where these are given.
        UserError for a model that reads no reference images."""


Redraw = Callable[[Sequence[str], Sequence[np.ndarray]], Iterable[np.ndarray]]
"""The same by a model that reads control images, which are computed from images [H, W, 3] uint8, one a prompt."""


class MetricSettings(Settings):
    """Base of the settings of metrics."""

    reads_texts: ClassVar[bool] = False
    """It needs the prompts or captions of the images."""
    own_samples: ClassVar[bool] = False
    """It measures samples of its own settings, not the images that the protocol names."""

    name: str


class Incomplete(Exception):
    """Blocks that belong to other processes are not there yet."""


class Reference(Protocol):
    """Statistics of the images that are compared with, for one feature network."""

    @property
    def count(self) -> int:
        """Images."""

    @property
    def about(self) -> dict[str, Any]:
        """The data that they are of, and digests, for the protocol."""

    def moments(self) -> Moments:
        """Mean and covariance of the features."""

    def features(self) -> np.ndarray:
        """[n, d] float32. UserError for statistics that hold moments alone."""


class FeatureNetwork(Protocol):
    """A network that gives each image a vector."""

    @property
    def label(self) -> str:
        """Network, first digits of its weights' digest, and resize policy: part of a metric's name."""

    @property
    def about(self) -> dict[str, Any]:
        """The same in full, for the protocol."""

    def compute(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """[n, d] float32 of images [H, W, 3] uint8, which may differ in size."""


class TextNetwork(FeatureNetwork, Protocol):
    """A network whose vectors of images can be compared with those of texts."""

    def compute_texts(self, texts: Sequence[str]) -> np.ndarray:
        """[n, d] float32."""


class Inputs(Protocol):
    """All that a metric may ask for. UserError where what is evaluated does not have it; Incomplete where other
    processes still work at it."""

    @property
    def source(self) -> SourceSettings | None:
        """Settings of the source that names the metric; None without one."""

    @property
    def draw(self) -> Draw:
        """Draws images of a metric's own prompts."""

    @property
    def redraw(self) -> Redraw | None:
        """In place of `draw` for a model that reads control images."""

    def network(self, name: str, **options: Any) -> Any:
        """The feature network of this name (a file of `evaluation/networks`), with the weights that the protocol
        names."""

    def features(self, network: FeatureNetwork) -> np.ndarray:
        """[n, d] float32 of the images of the protocol's prompts."""

    def text_features(self, network: TextNetwork) -> np.ndarray:
        """[n, d] float32 of these prompts."""

    def reference(self, network: FeatureNetwork) -> Reference:
        """Statistics of the images that are compared with."""

    def pairs(self, name: str, score: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
        """[n] float64: the score `name` of each image and the one that it is compared with."""

    def losses(self, quantiles: Sequence[float], num_samples: int) -> dict[str, np.ndarray]:
        """[n, quantiles] float64: loss of each held-out sample at each noise level, by `raw` weights and averaged ones
        (`ema`, where there are some)."""


@dataclass(frozen=True)
class DrawnInputs:
    """Inputs of a metric that a source names and that draws its own images: in the loop of a run."""

    source: SourceSettings | None
    draw: Draw
    redraw: Redraw | None = None

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"metrics that need {name.replace('_', ' ')} are not for the loop of a run: `daguerre evaluate RUN "
            "--follow` measures them while it trains",
            code="unsupported",
        )


def source_of(inputs: Inputs, kind: type[Source], metric: str) -> Source:
    """The settings of the source that a metric is made for. UserError, which begins with what the `metric` does, for a
    model that is trained on another."""
    if not isinstance(inputs.source, kind):
        raise UserError(f"{metric}, and this model is not trained on it: remove the metric", code="unused")
    return inputs.source
