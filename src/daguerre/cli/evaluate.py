"""Measure a run, a pipeline or a folder of images: FID, CLIP score and more.

usage: daguerre evaluate RUN|PIPELINE|FOLDER [key=value ...]
       daguerre evaluate RUN --follow [follow=all] [key=value ...]
       daguerre evaluate A B
       either with --json: prints the numbers for programs (docs/json.md), and all else on standard error

Generates images of a list of prompts, measures them, and writes the numbers with the protocol that they belong to into
RUN/evaluations. Of a folder, its images are measured. The same command again goes on where it was stopped, and measures
what was not measured before. Nothing is downloaded: say where the weights of the feature networks are.

  daguerre evaluate runs/quickstart metrics=[shapes,validation_loss]
  daguerre reference quickstart num_images=1000 networks.inception=random out=reference.safetensors
  daguerre evaluate runs/quickstart metrics=[fid,kid,precision_recall] networks.inception=random \\
      reference=reference.safetensors num_images=1000
  daguerre evaluate sd15 base=true protocol=coco30k networks.inception=PATH networks.clip=PATH \\
      prompts_file=captions.csv reference=coco.safetensors
  daguerre evaluate images metrics=[psnr,ssim,lpips] against=originals networks.lpips=PATH

  metrics=[fid,kid]        also precision_recall, clip_score, cmmd, fd_dinov2, psnr, ssim, lpips, validation_loss,
                           shapes and shape_edits; metrics.fid.resize=torch changes a setting of one
  networks.NAME=PATH       weights of inception, clip, dinov2 or lpips; networks.NAME.digest=SHA256 refuses others
  reference=FILE           statistics that `daguerre reference` wrote
  against=FOLDER           images to compare with one by one, by name
  num_images=1000          images that are generated or read
  prompts_file=FILE        prompts, one image each (a run's held-out captions)
  guidance_scales=[1,3,5]  a sweep; the report draws FID against CLIP score
  crop_px=256 sample_seed=0    of a folder: middle squares of this side; draws images by a seed
  weights=ema              or raw
  sampler, num_inference_steps, guidance_scale, seed ...    as in `generate`
  protocol=coco30k         a shipped protocol or a YAML file of these settings
  ledger=true              of a run: which trained pictures have a high or a low loss for their noise
  --follow                 measures the checkpoints of a run as they come, in this process; follow=all takes every one
  keep_images=false        removes the images when they are measured
  shard=I/N                part I of N; under torchrun or srun each process its own part
  out=FOLDER               default: RUN/evaluations; of A B: a page to write, such as out=comparison.html

docs/evaluate.md says more.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from daguerre.checkpoint.signals import StopSignals
from daguerre.cli.options import evaluate_options
from daguerre.cli.options.evaluate_options import Arguments, Options
from daguerre.cli.parts import out_file, output
from daguerre.config import options, recipe
from daguerre.data.dataset import open_dataset
from daguerre.errors import UserError
from daguerre.evaluation import compare, follow, ledger, results
from daguerre.evaluation.evaluate import FolderEvaluation, ModelEvaluation
from daguerre.evaluation.images import SourceImages
from daguerre.evaluation.result import Result
from daguerre.evaluation.settings import EvaluationSettings
from daguerre.generation import generate, jobs, load
from daguerre.generation.jobs import TaskShard
from daguerre.generation.load import Model
from daguerre.models.weights import index
from daguerre.remote import local_copy
from daguerre.run import trackers

Keep = Callable[[output.Evaluation], None]
_OF_FOLDERS = ("against", "crop_px", "sample_seed")
_OF_MODELS = ("base", "guidance_scales", "keep_images", "prompts_file", "weights")


def run(arguments: list[str]) -> int:
    """Measures what the command line asks for. Returns 0 or the code of a signal; UserError."""
    asked = evaluate_options.read(arguments)
    if len(asked.words) == 2:
        asked.refuse({*Options.model_fields} - {"out"}, "a comparison of results that are there")
        if asked.rest:
            raise UserError(f"{asked.rest[0]} has no effect on a comparison: remove it", code="conflict")
        with output.for_people(asked.json):
            page = str(out_file.place(asked.options.out)) if asked.options.out else None
            compared = compare.run(*asked.words, out=page)
        if asked.json:
            output.write(_comparison(compared))
        return 0
    if len(asked.words) != 1:
        raise UserError("give one run, pipeline or folder of images; or two runs to compare", code="missing")
    if asked.options.follow is None:
        asked.refuse(["every_seconds", "patience_seconds"], "an evaluation without --follow")
    if asked.json and (asked.options.follow is not None or asked.options.ledger):
        what = (
            "ledger, which writes ledger.json" if asked.options.ledger else "--follow, which goes on: read result.json"
        )
        raise UserError(f"--json has no effect on {what} in the folder of its evaluation", code="conflict")
    part = jobs.task_shard(asked.options.shard)
    jobs.use_own_gpu(part)
    found: list[output.Evaluation] = []
    with output.for_people(asked.json), StopSignals() as stop:
        try:
            code = _evaluate(asked, part, lambda: stop.requested, found.append)
        except generate.Stopped:
            assert stop.signal is not None
            print(f"stopped by {stop.signal.name}: finished blocks are kept; the same command continues from there")
            code = stop.exit_code
    if asked.json:
        output.write(output.Evaluations(evaluations=found))
    return code


def _evaluate(asked: Arguments, part: TaskShard, stop: Callable[[], bool], keep: Keep) -> int:
    (word,) = asked.words
    if asked.options.follow is not None:
        follow.wait_for_run(word, asked.options.patience_seconds, asked.options.every_seconds, stop)
    folder = local_copy.located(word)
    if folder.is_dir() and not (folder / "config.yaml").is_file() and index.find(folder) is None:
        return _of_folder(asked, word, part, keep)
    asked.refuse(_OF_FOLDERS, "a model, whose images are generated for prompts")
    model = load.find(word, [], asked.options.base, asked.rest)
    root = Path(asked.options.out).expanduser() if asked.options.out else evaluate_options.root_of(model)
    policy, every_seconds = asked.options.follow, asked.options.every_seconds
    if asked.options.ledger:
        return _ledger(asked, model, root)
    if policy is not None:
        with follow.holding(model, root, policy, every_seconds) as followed:
            jobs_of = evaluations(asked, model, root, part, stop)
            follow.follow(jobs_of, followed, policy, every_seconds, asked.options.patience_seconds)
    else:
        several = evaluations(asked, model, root, part, stop)
        for one in several:
            found = one.run()
            if len(several) > 1:
                print(f"guidance {one.config.sampling.guidance_scale:g}")
            show(found, one.folder.path)
            scale = one.config.sampling.guidance_scale
            keep(_evaluation(found, one.folder.path, {"guidance_scale": scale} if len(several) > 1 else {}))
            follow.refresh_page(one)
    if model.run is not None and model.trained is not None and local_copy.origin(model.run.path) is None:
        trackers.send_late(model.trained, model.run, print)
    return 0


def _ledger(asked: Arguments, model: Model, root: Path) -> int:
    """Measures the loss of each trained picture."""
    asked.refuse({*Options.model_fields} - {"ledger", "out"}, "a ledger, which measures losses alone")
    one = ModelEvaluation(model, evaluate_options.config_of(model, asked.rest), _settings(asked), root)
    folder, found = one.ledger()
    print("\n".join(ledger.lines(found)))
    print(f"written to {folder / 'ledger.csv'}")
    follow.refresh_page(one)
    return 0


def evaluations(
    asked: Arguments, model: Model, root: Path, part: TaskShard, stop: Callable[[], bool]
) -> list[ModelEvaluation]:
    """The evaluation of a model, with results in `root`; of a sweep one for each guidance scale."""
    settings = _settings(asked)
    scales = settings.guidance_scales
    more = [[]] if scales is None else [[f"sampling.guidance_scale={scale}"] for scale in scales]
    configs = [evaluate_options.config_of(model, [*asked.rest, *each]) for each in more]
    return [ModelEvaluation(model, own, settings, root, part, stop).with_metrics() for own in configs]


def _settings(asked: Arguments) -> EvaluationSettings:
    own = {name: getattr(asked.options, name) for name in EvaluationSettings.model_fields}
    given = asked.options.model_fields_set & own.keys()  # without it all defaults would count as given
    return EvaluationSettings.model_construct(given, **own)


def _of_folder(asked: Arguments, word: str, part: TaskShard, keep: Keep) -> int:
    asked.refuse(_OF_MODELS, "a folder of images, which are measured as they are")
    settings, options_ = _settings(asked), asked.options
    if not settings.metrics:
        raise UserError("no metric given: metrics=[fid] or others", code="missing", setting="metrics")
    reads_texts = any(own.reads_texts for own in settings.metrics.values())
    images = source_images([word], asked.rest, settings, reads_texts, None)
    against = source_images([settings.against], (), settings, False, None) if settings.against else None
    root = Path(options_.out).expanduser() if options_.out else results.OF_FOLDERS
    one = FolderEvaluation(word, images, settings, root, part=part, against=against)
    show(found := one.run(), one.folder.path)
    keep(_evaluation(found, one.folder.path, {}))
    return 0


def source_images(
    words: Sequence[str], given: Sequence[str], settings: EvaluationSettings, reads_texts: bool, split: str | None
) -> SourceImages:
    """The images of paths, or of a recipe's `split` (`held_out` or `train`; None takes those that are held out).
    UserError where there are none."""
    is_recipe = len(words) == 1 and (words[0] in recipe.shipped() or words[0].endswith((".yaml", ".yml")))
    is_recipe = is_recipe or (len(words) == 1 and (Path(words[0]) / "config.yaml").is_file())
    if split is not None and (not is_recipe or split not in ("held_out", "train")):
        raise UserError(
            f"split={split}: allowed are held_out and train, of a recipe or run; of paths all images are read",
            code="unsupported",
            setting="split",
        )
    plain = [] if is_recipe else ["data.held_out_fraction=0"]
    plain += [] if reads_texts or is_recipe else ["data.captions.text=an image"]
    read = options.from_recipe(words[0], given) if is_recipe else options.from_paths(words, [*plain, *given])
    dataset = open_dataset(read[0].data, "held_out" if is_recipe and split != "train" else "train")
    return SourceImages(dataset, settings.num_images, settings.crop_px, settings.sample_seed)


def _evaluation(found: dict[str, Result] | None, folder: Path, more: Mapping[str, float]) -> output.Evaluation:
    """An evaluation, for programs."""
    tables = {name: result.document() for name, result in (found or {}).items()}
    return output.Evaluation.model_validate(
        {"folder": str(folder), "complete": found is not None, "tables": tables, **more}
    )


def _comparison(compared: compare.Comparison) -> output.Comparison:
    """A comparison, for programs."""
    tables = {}
    for name, differences in compared.tables.items():
        warning = differences[0].warning
        rows = [output.ComparedRow.model_validate(each.document()) for each in differences]
        tables[name] = output.ComparedTable(rows=rows, **({"warning": warning} if warning else {}))
    a, b = str(compared.a.folder), str(compared.b.folder)
    return output.Comparison(a=a, b=b, images=compared.a.images, tables=tables, not_compared=compared.left)


def show(found: dict[str, Result] | None, folder: Path) -> None:
    """Prints the tables, and where they are."""
    if found is None:
        print(f"{folder}: other parts still have images to make; the process that finishes last writes the result")
        return
    for name, result in found.items():
        print("\n".join(result.table(name)))
    print(f"written to {folder / 'result.json'}")
