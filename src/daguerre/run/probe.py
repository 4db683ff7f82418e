"""Tells what pretrained weights predict, by their errors on images whose noise is known.

Each kind (noise, velocity, speed, EDM's F) says how a noisy sample x = a x0 + s eps is given to the network, and how x0
is solved for from its output. Of the kind that weights were trained as, this x0 is near the true one. The unit of its
squared error is that of the best linear denoiser, V sigma^2 / (V + sigma^2) for a channel of variance V and sigma =
s/a (Wiener): at every level and of every kind, 1 means that nothing more than the spread of the data is known. An
output of zeros has an error of 1 or more, and so has a network with random weights.

Shape letters: B samples, C channels, h and w height and width, L levels, I images.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from daguerre import plugins
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.distributed.process_group import Processes
from daguerre.errors import UserError
from daguerre.models.frozen import in_evaluation
from daguerre.models.settings import FamilySettings, ProbedSettings
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.noise import noise
from daguerre.objectives.objective import Net
from daguerre.objectives.settings import NoiseSettings
from daguerre.objectives.wrapper import WrapperSettings
from daguerre.training import device
from daguerre.training.precision.dtypes import Autocast
from daguerre.types import IMAGE, Batch, Cond

IMAGES = 16
"""Images that are looked at."""
LEVELS = (0.3, 1.0, 3.0)
"""Noise levels sigma = s/a: where a denoiser that knows images is far better than a linear one."""
KNOWS = 0.8
"""Error from which on weights are taken for trained ones, below the 1 of those that only know the spread."""
APART = 1.25
"""Ratio of the errors of two kinds from which on they count as different kinds,"""
DEVIATIONS = 4.0
"""by so many standard errors of its logarithm over the images, so that chance does not decide it."""
TOO_FEW = f"it takes two images at least, among the first {IMAGES} of the data"
"""The reason where nothing can be said."""
_SEED = 0


class Sample(NamedTuple):
    """Clean samples [B, C, h, w] float32, noise of their shape, and their conditioning."""

    x0_BChw: Tensor
    eps_BChw: Tensor
    cond: Cond


@dataclass(frozen=True)
class Fit:
    """The errors of one kind."""

    kind: str
    settings: str
    """Settings that train it, as on a command line."""
    loss: float
    """Mean squared error of the prediction itself, over levels and images: the loss with which training would begin."""
    error_LI: Tensor
    """Squared error of x0 in units of that of the best linear denoiser, float64."""

    @property
    def error(self) -> float:
        """The mean error of the images, and of the levels the geometric mean."""
        return float(self.error_LI.mean(1).log().mean().exp())

    def beyond(self, other: "Fit") -> tuple[float, float]:
        """The factor by which this error is above another kind's, image by image, and the least that it may be."""
        log_I = (self.error_LI.log() - other.error_LI.log()).mean(0)
        deviation = float(log_I.std()) / math.sqrt(len(log_I)) if len(log_I) > 1 else math.inf
        return math.exp(float(log_I.mean())), math.exp(float(log_I.mean()) - DEVIATIONS * deviation)

    def is_worse(self, other: "Fit") -> bool:
        """True if this kind is plainly not that of the weights, and the other may be."""
        _, least = self.beyond(other)
        return least > APART


@dataclass(frozen=True)
class Fits:
    """The errors of all kinds, the best first."""

    each: Sequence[Fit]
    own: Fit
    """That of the recipe."""

    @property
    def images(self) -> int:
        """The images that were looked at."""
        return self.each[0].error_LI.shape[1]

    @property
    def kind(self) -> Fit | None:
        """The kind that the weights are; None where it is not clear."""
        best, *others = self.each
        return best if best.error < KNOWS and all(other.is_worse(best) for other in others) else None

    @property
    def is_other(self) -> bool:
        """True if the weights plainly are of another kind than the recipe's."""
        best = self.each[0]
        return best.error < KNOWS and self.own.is_worse(best)

    def lines(self) -> list[str]:
        """A table."""
        width = max(len(fit.kind) for fit in self.each)
        rows = [f"{fit.kind:<{width}}  {fit.loss:8.4g}  {fit.error:8.4g}" for fit in self.each]
        return [f"{'':<{width}}  {'loss':>8}  {'error':>8}", *rows]

    def verdict(self) -> str:
        """A sentence that says which kind it is, and by what margin, or that this is not clear."""
        best, *others = self.each
        if best.error >= KNOWS:
            return (
                f"cannot tell: no kind has an error below {KNOWS:g}; weights that are random, or of another kind, or "
                "that know no such images, have 1 and more"
            )
        near = min(others, key=lambda other: other.beyond(best)[1])
        factor, least = near.beyond(best)
        margin = (
            f"the error of {near.kind} is {factor:.3g} times as large, over {self.images} images at least {least:.3g}"
        )
        if self.kind is None:
            return f"cannot tell: {best.kind} fits best, and {margin}: too little, as {APART:g} is asked"
        return f"they predict {best.kind}: {margin}"


def foreseen(config: Config, parts: Components) -> list[str]:
    """A line that says what a run will look at, for a look at it without weights."""
    if not _is_open(config, parts):
        return []
    return _off(config) or [
        f"before its first update `train` looks at what the weights predict, by {IMAGES} images, as no file says it; "
        "model.probe=false leaves that out"
    ]


def check(config: Config, parts: Components, dataset: Dataset, processes: Processes) -> list[str]:
    """A line on what the weights of a new run predict, where no file says it. UserError where that plainly is another
    kind than the objective's. All processes call it, as the network may be split over them."""
    if not _is_open(config, parts):
        return []
    if off := _off(config):
        return off
    with processes.watch.doing("looking at what the weights predict"):
        found = of_dataset(config, parts, dataset)
    return processes.agreement.run_on_rank0(lambda: [_judged(config, found)])


def of_dataset(config: Config, parts: Components, dataset: Dataset) -> Fits | None:
    """The errors of the kinds on the first samples of a data set, as training draws them; None where not two of them
    can be read."""
    diffusion = parts.objective.diffusion
    assert diffusion is not None, "asked of what denoises alone"
    # One by one, as they may have several sizes, and a device whatever memory.
    made = loader.fixed_batches(
        dataset, IMAGES, lambda _: 1, images=parts.images, columns=parts.columns, seed=config.seed
    )
    with torch.no_grad(), in_evaluation(parts.net):
        samples = list(_samples(parts, made))
        if sum(len(sample.x0_BChw) for sample in samples) < 2:
            return None
        return fits(parts.net, kinds(config.model, diffusion), samples, parts.autocast)


def _is_open(config: Config, parts: Components) -> bool:
    """True if no file says what the weights that a run starts from predict."""
    model, pretrained = config.model, parts.family.pretrained
    if not isinstance(model, ProbedSettings) or pretrained is None or parts.objective.diffusion is None:
        return False
    return not (config.init_from is not None or model.denoises_anew or pretrained.says_prediction)


def _off(config: Config) -> list[str]:
    if getattr(config.model, "probe", True):
        return []
    return [
        f"model.probe is off: nobody looks whether the weights predict what objective.name={config.objective.name} "
        "trains, and no file says it"
    ]


def _judged(config: Config, found: Fits | None) -> str:
    """A line about weights that may be of the objective's kind. UserError for others."""
    if found is None:  # training needs no more than one image
        return f"no file says what the weights predict, and nobody looks: {TOO_FEW}"
    best, own = found.each[0], found.own
    # What the network predicts is said of the objective, or of the one inside it.
    place = "objective.diffusion" if isinstance(config.objective, WrapperSettings) else "objective"
    if not found.is_other:
        return f"no file says what the weights predict; by {found.images} images, {found.verdict()}"
    raise UserError(
        f"the weights predict {best.kind}, and this recipe trains {own.kind}: by {found.images} images, the error of a "
        f"denoised image is {best.error:.3g} as {best.kind} and {own.error:.3g} as {own.kind}, where 1 is that of a "
        f"denoiser which only scales; the loss is {best.loss:.3g} as {best.kind}, and would begin at {own.loss:.3g}. "
        f"Set {best.settings.replace('objective', place)} (docs/trouble.md#grey-images), or model.probe=false to teach "
        "them another objective",
        code="conflict",
        setting=f"{place}.name",
    )


def kinds(model: FamilySettings, own: Diffusion) -> dict[str, Diffusion]:
    """The objectives that the family's weights may be of, by name, the recipe's `own` first; {} where there is only one
    kind."""
    if not isinstance(model, ProbedSettings):
        return {}
    usual: dict[str, Diffusion] = {}
    for name, section in model.kinds.items():
        module = plugins.find("objectives", section["name"])
        made: Diffusion = module.build(module.Settings.model_validate(section))
        usual[name] = made.with_noise_conditioning("auto", model.time_scale)
    same = [name for name, each in usual.items() if _target(each) == _target(own)]
    others = {name: each for name, each in usual.items() if name not in same}
    return {same[0] if same else f"{own.settings.name} of the recipe": own, **others}


def _target(objective: Diffusion) -> tuple[float, ...]:
    """Numbers to compare kinds by: coefficients of the target at equal signal and noise, and the kind of path."""
    half = torch.tensor(0.5, dtype=torch.float64)
    p, q = objective.target(half, half)
    return round(float(p), 9), round(float(q), 9), float(objective.settings.schedule.name == "edm")


def fits(net: Net, kinds: Mapping[str, Diffusion], samples: Sequence[Sample], autocast: Autocast = nullcontext) -> Fits:
    """The errors of the kinds, the recipe's first, on samples. Every device of a mesh calls this with the same ones."""
    rows_CN = torch.cat([sample.x0_BChw.double().movedim(1, 0).flatten(1) for sample in samples], 1)
    variance_C = rows_CN.var(1).clamp(min=1e-6).cpu()
    each = [[_at_level(net, kinds, sigma, sample, variance_C, autocast) for sigma in LEVELS] for sample in samples]
    found = []
    for name, objective in kinds.items():
        loss_LI, error_LI = (
            torch.cat([torch.stack([level[name][part] for level in levels]) for levels in each], 1) for part in (0, 1)
        )
        found.append(Fit(name, _as_given(objective), float(loss_LI.mean()), error_LI))
    return Fits(sorted(found, key=lambda fit: fit.error), found[0])


def _samples(parts: Components, batches: Iterable[Batch]) -> Iterator[Sample]:
    """The samples of batches of the host that can be read."""
    for batch in batches:
        example = parts.example(device.on(parts.device, replace(batch, draws=parts.draws(batch, 0.5))))
        x0_BChw = example.clean[IMAGE].float()
        eps_BChw = noise(NoiseSettings(), _SEED, batch.keys, tuple(x0_BChw.shape[1:])).to(x0_BChw)
        if bool(batch.valid_B.all()):
            yield Sample(x0_BChw, eps_BChw, example.cond[IMAGE])


def _at_level(
    net: Net, kinds: Mapping[str, Diffusion], sigma: float, sample: Sample, variance_C: Tensor, autocast: Autocast
) -> dict[str, tuple[Tensor, Tensor]]:
    """Loss and error [B] of each kind at a noise level. Kinds whose network sees the same share a pass."""
    x0_BChw, eps_BChw, cond = sample
    outputs: dict[tuple[float, ...], Tensor] = {}
    found = {}
    for name, objective in kinds.items():
        own = objective.at(tuple(x0_BChw.shape[1:]))
        t, a, s = own.level(sigma)
        level = {key: float(value) for key, value in own.level_at(torch.tensor([t], dtype=torch.float64)).items()}
        seen = tuple(round(number, 6) for number in (level["c_in"] * a, level["c_in"] * s, level["c_noise"]))
        if seen not in outputs:
            x_BChw = level["c_in"] * (a * x0_BChw + s * eps_BChw)
            with autocast():
                outputs[seen] = net(
                    x_BChw, torch.full((len(x_BChw),), level["c_noise"]).to(x_BChw.device), cond
                ).float()
        wrong_BChw = outputs[seen] - (level["p"] * x0_BChw + level["q"] * eps_BChw)
        loss_B = wrong_BChw.square().mean((1, 2, 3)).cpu().double()
        ratio = (s / a) ** 2
        linear = float((variance_C * ratio / (variance_C + ratio)).mean())
        found[name] = loss_B, loss_B * (s / (a * level["q"] - s * level["p"])) ** 2 / linear
    return found


def _as_given(objective: Diffusion) -> str:
    """The settings of an objective that say what is predicted."""
    own = objective.settings.model_dump(mode="json", exclude_defaults=True, exclude={"schedule", "times"})
    return " ".join(f"objective.{name}={value}" for name, value in {"name": objective.settings.name, **own}.items())
