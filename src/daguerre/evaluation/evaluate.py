"""Measures a model or a folder of images: each protocol in a folder of its own, resumed where it was stopped."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from daguerre import plugins, trees
from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import to_json
from daguerre.checkpoint.store import Checkpoint
from daguerre.config.config import Config
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading import loader
from daguerre.errors import UserError
from daguerre.evaluation import images, ledger, losses, results
from daguerre.evaluation.images import GeneratedImages, SourceImages
from daguerre.evaluation.inputs import MeasuredInputs
from daguerre.evaluation.metric import Incomplete
from daguerre.evaluation.reconstructions import Reconstructions
from daguerre.evaluation.result import Result
from daguerre.evaluation.settings import EvaluationSettings
from daguerre.generation import generate, load, prompts
from daguerre.generation.generate import ImageRequest
from daguerre.generation.jobs import WHOLE, TaskShard
from daguerre.generation.load import Loading, Model
from daguerre.generation.output_dir import Folder
from daguerre.generation.requests import RequestList
from daguerre.training import device
from daguerre.training.precision import dtypes

_SAMPLING = ("seed", "negative_prompt", "sampler", "num_inference_steps", "eta", "guidance_scale", "guidance_rescale")


@dataclass(frozen=True)
class ModelEvaluation:
    """A model, how its images are sampled, and what is measured."""

    model: Model
    config: Config
    settings: EvaluationSettings
    root: Path
    """Folder of the results, a folder for each checkpoint and protocol below it."""
    part: TaskShard = WHOLE
    stop: Callable[[], bool] = lambda: False
    checkpoint: Checkpoint | None = None
    """Of a run; None takes the one that the config names."""

    @cached_property
    def loading(self) -> Loading:
        """The weights that are evaluated."""
        return self._loading(self.settings.weights)

    @cached_property
    def requests(self) -> RequestList:
        """The images of the protocol's prompts."""
        size_px = generate.image_size(self.config, "sample")
        return images.request_list(self._prompts, self.config, size_px, self.settings.num_images)

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """Everything that decides the images: results of one folder share it."""
        provenance = dict(trees.paths(self.loading.provenance))
        if self.reconstructs:
            drawn = self._sampled if self.config.model.reconstructs else {}
            return {**provenance, "reconstructions": self._reconstructions.total, **drawn, **self._precision}
        survey = self.requests.survey()
        height, width = self.requests.size_px
        return {
            **provenance,
            "prompts": self.requests.prompts.name,
            "prompts_sha256": self.requests.prompts.digest,
            "images": survey.images,
            **self._sampled,
            "height": height,
            "width": width,
            **self._precision,
        }

    @property
    def reconstructs(self) -> bool:
        """True for the run of an autoencoder or of Stage B, whose images are held-out ones made again."""
        trained = self.config.objective.reconstructs or self.config.model.reconstructs
        return self.model.run is not None and trained

    @property
    def _sampled(self) -> dict[str, Any]:
        sampling = self.config.sampling
        shift = {} if sampling.shift is None else {"shift": sampling.shift}
        names = (*_SAMPLING, "timestep_spacing", "batch_size")
        return {**{name: getattr(sampling, name) for name in names}, **sampling.churn, **shift}

    @property
    def _precision(self) -> dict[str, str]:
        training = self.config.training
        return {"precision": str(dtypes.choose(training, device.choose_device(training.device)))}

    @property
    def folder(self) -> Folder:
        """Named after the checkpoint and a digest of the protocol."""
        name = self.checkpoint.name if self.checkpoint else self.loading.provenance.get("checkpoint", "images")
        return Folder(self.root / f"{name}-{digest_of(self.protocol)}")

    def run(self) -> dict[str, Result] | None:
        """Measures; None if other processes still have a part of it to do. generate.Stopped for a signal, Held if
        another process works at it."""
        folder = self.folder
        if not folder.continues(self.protocol):
            folder.begin(self.protocol)
        with folder.locked(self.part):
            found = measure(self.settings, self._inputs())
            if found is not None:
                _record(folder.path, self.protocol, self.settings, found)
        return found

    def _inputs(self) -> MeasuredInputs:
        where = device.choose_device(self.config.training.device)
        losing = self._losses if self.model.run else None
        if self.reconstructs:
            again = self._reconstructions
            return MeasuredInputs(self.settings, self.folder.path, self.part, where, again, losing=losing)
        own, source = self._generated(self.requests), self._measured
        return MeasuredInputs(
            self.settings, self.folder.path, self.part, where, own, source=source, drawing=self._draw, losing=losing
        )

    def _generated(self, requests: Iterable[ImageRequest]) -> GeneratedImages:
        folder = self.folder.path / "images" / images.digest_of_requests(requests)[:8]
        sampling, provenance = self.config.sampling, self.loading.provenance
        return GeneratedImages(folder, requests, sampling, self.part, lambda: self._parts, provenance, self.stop)

    def _draw(self, texts: Sequence[str], references: Sequence[np.ndarray] = (), /) -> Iterable[np.ndarray]:
        """Images of a metric's own prompts."""
        return self._generated(images.of_metric(self.config, texts, references)).all()

    def ledger(self) -> tuple[Path, dict[str, Any]]:
        """The loss of each trained picture, and the folder where it was written. UserError for what is no run."""
        if self.model.run is None:
            raise UserError("ledger needs a run: its weights and what it was trained on", code="unsupported")
        step = self._loading(None).provenance["step"]
        found = ledger.measured(self._with_loss, self._trained, step)
        if not found["pictures"]:
            raise UserError("ledger: no picture of the run's data can be decoded", code="empty")
        folder = self.root / f"ledger-step-{step:08d}"
        ledger.write(folder, found)
        return folder, found

    def _trained(self, parts: Components) -> Dataset:
        return open_datasets(self.config.data, ["train"], parts.images, parts.columns)[0]

    @property
    def _with_loss(self) -> dict[str, Callable[[], Components]]:
        """Functions that load the networks with their loss, by the weights that there are."""
        weights = ["raw", *(["ema"] if self._checkpoint_has_averages else [])]
        return {name: load for name in weights if (load := self._loading(name).with_loss) is not None}

    def _losses(self, quantiles: Sequence[float], num_samples: int) -> dict[str, np.ndarray]:
        return losses.kept(
            self.folder.path,
            self.part,
            self._with_loss,
            lambda parts: self._opened(parts.images, parts.columns),
            quantiles,
            num_samples,
        )

    @cached_property
    def _parts(self) -> Components:
        print(f"evaluating {self.loading.description}")
        return self.loading.parts()

    def _loading(self, weights: str | None) -> Loading:
        if self.checkpoint is not None and self.model.run is not None:
            return load.of_checkpoint(self.checkpoint, self.model.run, self.config, weights)
        return load.choose(self.model, self.config, weights)

    @property
    def _checkpoint_has_averages(self) -> bool:
        return self._loading(None).provenance["weights"] == "ema"

    @cached_property
    def _prompts(self) -> prompts.Prompts:
        if self.settings.prompts_file is not None:
            return prompts.of_file(self.settings.prompts_file)
        if self.model.run is None:
            raise UserError(
                "no prompts given: pass prompts_file=FILE (one prompt a line; num_images takes the first of them)",
                code="missing",
                setting="prompts_file",
            )
        found = loader.fixed_captions(self._held_out, self.settings.num_images)
        return images.of_texts("held-out captions", found)

    @cached_property
    def _reconstructions(self) -> Reconstructions:
        sampling = self.config.sampling
        return Reconstructions(self._held_out, self.settings.num_images, lambda: self._parts, sampling, self.stop)

    @cached_property
    def _held_out(self) -> Dataset:
        return self._opened({})

    def _opened(self, wanted: Mapping[str, Any], columns: Sequence[str] = ()) -> Dataset:
        """The held-out samples, with these further images and numbers of their metadata."""
        (held_out,) = open_datasets(self.config.data, ["held_out"], wanted, columns)
        if held_out.size == 0:
            lack, setting = "captions to evaluate with: give prompts_file=FILE", "prompts_file"
            if self.reconstructs:
                setting = "data.held_out_fraction"
                lack = f"images to make again: a run with {setting} above 0 has some"
            raise UserError(f"this run holds out no samples, so there are no {lack}", code="missing", setting=setting)
        return held_out

    @property
    def _measured(self) -> Any:
        """Settings of the source that names a metric; None without such a source."""
        if self.model.run is None:
            return None
        found = self._held_out.measured
        return None if found is None else found.settings

    def with_metrics(self) -> "ModelEvaluation":
        """Adds the metric of the run's source where no metric is asked for. UserError if the source names none."""
        if self.settings.metrics:
            return self
        if self.reconstructs:
            both = {name: plugins.find("metrics", name).Settings() for name in ("psnr", "ssim")}
            return replace(self, settings=self.settings.model_copy(update={"metrics": both}))
        member = self._held_out.measured if self.model.run is not None else None
        if member is None or member.source.metric is None:
            raise UserError(
                f"no metric given: metrics=[...] takes some of {', '.join(plugins.names('metrics'))}",
                code="missing",
                setting="metrics",
            )
        name = member.source.metric
        own = {name: plugins.find("metrics", name).Settings()}
        return replace(self, settings=self.settings.model_copy(update={"metrics": own}))


@dataclass(frozen=True)
class FolderEvaluation:
    """A folder of images, and what is measured."""

    name: str
    images: SourceImages
    settings: EvaluationSettings
    root: Path
    device: str = "auto"
    part: TaskShard = WHOLE
    against: SourceImages | None = None

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """The images that are measured, by digest."""
        found = {"folder": self.name, "images": self.images.total, "images_sha256": self.images.digest}
        found |= {"crop_px": self.settings.crop_px} if self.settings.crop_px else {}
        return found | ({"against_sha256": self.against.digest} if self.against else {})

    @property
    def folder(self) -> Folder:
        return Folder(self.root / f"{Path(self.name).name or 'images'}-{digest_of(self.protocol)}")

    def run(self) -> dict[str, Result] | None:
        """Measures; None if other processes still have a part of it to do."""
        folder = self.folder
        if not folder.continues(self.protocol):
            folder.begin(self.protocol)
        with folder.locked(self.part):
            where = device.choose_device(self.device)
            inputs = MeasuredInputs(self.settings, folder.path, self.part, where, self.images, against=self.against)
            found = measure(self.settings, inputs)
            if found is not None:
                _record(folder.path, self.protocol, self.settings, found)
        return found


def measure(settings: EvaluationSettings, inputs: MeasuredInputs) -> dict[str, Result] | None:
    """The tables of all metrics; None if some wait for blocks of other processes. What is missing is refused first."""
    own_samples = settings.metrics and all(own.own_samples for own in settings.metrics.values())
    if own_samples and "num_images" in settings.model_fields_set:
        raise UserError(
            f"num_images={settings.num_images} has no effect: the samples of {' and '.join(settings.metrics)} are "
            "those that the recipe names: remove it",
            code="unused",
            setting="num_images",
        )
    for name, own in settings.metrics.items():
        try:
            plugins.find("metrics", name).evaluate(own, replace(inputs, checking=True))
        except Incomplete:
            continue
    found: dict[str, Result] = {}
    waits = False
    for name, own in settings.metrics.items():
        try:
            tables = plugins.find("metrics", name).evaluate(own, inputs)
        except Incomplete:
            waits = True
            continue
        own_settings = {"settings": own.model_dump(mode="json")}
        asked = None if own.own_samples or inputs.images.total >= settings.num_images else settings.num_images
        found |= {
            table: replace(one, made_with={**one.made_with, **own_settings}, asked=asked)
            for table, one in tables.items()
        }
    for table, one in found.items():
        if odd := [row.name for row in one.rows if not math.isfinite(row.value)]:
            raise UserError(
                f"{table}: {', '.join(odd)} is not a finite number: the weights that were measured have diverged or "
                "are damaged, or a network's are; evaluate another checkpoint",
                code="damaged",
            )
    return None if waits else found


def _record(folder: Path, protocol: dict[str, Any], settings: EvaluationSettings, found: dict[str, Result]) -> None:
    """Writes the result, then removes the images that are not kept."""
    results.write(folder, protocol, settings, found)
    if not settings.keep_images:
        shutil.rmtree(folder / "images", ignore_errors=True)


def digest_of(protocol: dict[str, Any]) -> str:
    """Eight digits that tell protocols apart."""
    return sha256(to_json(protocol)).hexdigest()[:8]
