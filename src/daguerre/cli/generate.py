"""`daguerre generate`: draws pictures from prompts, one or a hundred thousand, and goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from daguerre.build.parts import Parts
from daguerre.checkpoint.signals import StopSignals
from daguerre.cli import generate_options
from daguerre.cli.generate_options import Arguments
from daguerre.config import recipe
from daguerre.errors import UserError
from daguerre.formatting import duration_text
from daguerre.generation import contact_sheet, generate, load, output_dir, ranks
from daguerre.generation import prompts as generation_prompts
from daguerre.generation.generate import Drawn, Stopped, Wanted
from daguerre.generation.image_files import Encoding
from daguerre.generation.jobs import FileWork, ShardWork, Work
from daguerre.generation.load import Loading
from daguerre.generation.output_dir import Folder
from daguerre.generation.ranks import Part
from daguerre.generation.requests import PictureList, Survey
from daguerre.run import known_words
from daguerre.samplers.settings import SamplingSettings
from daguerre.tracking.progress import Counter
from daguerre.training import device
from daguerre.training.precision import dtypes

SUMMARY = "draw pictures from prompts: with a run, a base model or a pipeline"
HELP = """\
usage: daguerre generate RUN prompt="..." [key=value ...]

Draws pictures with the newest checkpoint of a run, by its averaged weights if it keeps them. RUN is a run folder; a
recipe stands for the run that `daguerre train` makes of it (output_dir= and run_name= as there), or, with base=true,
for its pretrained networks as they are; a folder in diffusers' layout is a pipeline. The same command again goes on
where it was stopped: what is there and whole is kept.

  daguerre generate runs/quickstart prompt="a small green star on a white background" num_images=4 seed=7
  daguerre generate runs/quickstart prompts_file=prompts.csv out=pictures sampler=dpmpp_2m num_inference_steps=20
  daguerre generate sd15 base=true prompt="a photo of a red car" guidance_scale=7.5
  daguerre generate sdxl_lightning prompts_file=list.jsonl format=webdataset out=shards

  prompt=TEXT            what to draw
  prompts_file=FILE      text with one prompt a line, or .csv, .tsv, .jsonl with the columns prompt, negative_prompt,
                         seed, num_images, guidance_scale, height, width, file_name; others are kept in the JSON.
                         Without prompts, those of the recipe are drawn
  negative_prompt=TEXT   what to lead away from
  num_images=N           pictures of each prompt (1)
  seed=N                 picture i of all starts from the noise of seed + i alone, whatever draws it
  height=PX width=PX     size (data.resolution)
  sampler, num_inference_steps, guidance_scale, guidance_rescale, eta, s_churn, s_tmin, s_tmax, s_noise,
  timestep_spacing, shift, batch_size
                         as the run's recipe has them in `sampling`

  out=FOLDER, -o FOLDER  default: RUN/generated/PROMPT
  format=png             or jpeg, webp, or webdataset: tar shards with an index, for data.source=webdataset
  quality=N              of jpeg (95) and webp (90)
  shard_samples=N shard_image=jpeg     pictures of a shard (1000), and what they are
  shard=I/N              draws part I of N; under torchrun or srun each process draws its own part
  contact_sheet=false    leaves out contact-sheet.html

  base=true              the recipe's pretrained networks as they are, without a run
  weights=ema            or raw: which weights of the checkpoint
  resume_from_checkpoint=NAME    another checkpoint than the newest, such as step-00001000
  training.device=cpu            where to compute; training.mixed_precision, training.attention as in training

Writes 000.png, 001.png ... and a JSON beside each, which says how it was made. docs/generate.md says more.
"""


@dataclass(frozen=True)
class Job:
    """A list of pictures, and what draws it."""

    arguments: Arguments
    loading: Loading
    part: Part
    pictures: PictureList
    survey: Survey
    asked: dict[str, Any]
    folder: Folder


def run(arguments: list[str]) -> int:
    """Draws what the command line asks for; 0, the code of a signal, or a UserError."""
    job = prepare(arguments)
    began = job.folder.goes_on(job.asked)
    parts = None if began else ready(job)
    if not began:
        job.folder.begin(job.asked)
    with job.folder.held(job.part):
        work = work_of(job)
        left = work.left(began)
        if work.kept:
            print(f"{work.kept:,} of {work.share:,} pictures are there and are whole: kept")
        if left:
            code = draw(job, work, parts or ready(job))
            if code:
                return code
        return conclude(job, work, left)


def prepare(arguments: list[str]) -> Job:
    """All that can be known, and refused, before any weight is read."""
    asked_for = generate_options.read(arguments)
    for notice in asked_for.notices:
        print(notice)
    part = ranks.part(asked_for.options.shard)
    if part.said:
        print(part.said)
    config = asked_for.config
    captioned = asked_for.options.format == "webdataset"
    listed = PictureList(prompts(asked_for), config.sampling, config.data.resolution, generate.KEYS, captioned)
    survey = listed.survey()
    if not survey.pictures:
        raise UserError("num_images=0: there is nothing to draw")
    loading = load.choose(asked_for.model, config, asked_for.options.weights)
    asked = record(asked_for, listed, survey, loading)
    folder = output_dir.place(asked_for.options.out, asked_for.model.home, listed.prompts.name, asked)
    return Job(asked_for, loading, part, listed, survey, asked, folder)


def prompts(arguments: Arguments) -> generation_prompts.Prompts:
    """The prompts of the command line, of the file that it names, or of the recipe."""
    sampling = arguments.config.sampling
    if arguments.options.prompt is not None:
        return generation_prompts.inline([arguments.options.prompt])
    if sampling.prompts_file is not None:
        return generation_prompts.of_file(sampling.prompts_file)
    if not sampling.prompts:
        raise UserError('what shall be drawn? Give prompt="..." or prompts_file=FILE (one prompt a line)')
    return generation_prompts.inline(sampling.prompts)


def record(arguments: Arguments, listed: PictureList, survey: Survey, loading: Loading) -> dict[str, Any]:
    """What decides the pictures of the list: they are gone on with only where it is the same."""
    sampling, options, training = arguments.config.sampling, arguments.options, arguments.config.training
    names = ("seed", "num_images", "negative_prompt", "sampler", "num_inference_steps", "eta", "guidance_scale")
    height, width = sampling.size_px(listed.resolution)
    encoding = Encoding(options.image, options.quality)
    shards = {"shard_samples": options.shard_samples, "shard_image": options.image}
    return {
        **dict(recipe.paths(loading.made_with)),
        "prompts": listed.prompts.name,
        "prompts_sha256": listed.prompts.digest,
        "pictures": survey.pictures,
        **{name: getattr(sampling, name) for name in (*names, "guidance_rescale", "timestep_spacing")},
        **sampling.churn,
        **({} if sampling.shift is None else {"shift": sampling.shift}),
        "height": height,
        "width": width,
        "precision": str(dtypes.choose(training, device.choose_device(training.device))),
        "matmul_precision": training.matmul_precision,
        "format": options.format,
        **(shards if options.format == "webdataset" else {}),
        "quality": encoding.used_quality,
    }


def ready(job: Job) -> Parts:
    """The networks, if they can draw pictures of all the sizes that are asked for."""
    ranks.use_own_gpu(job.part)
    print(f"drawing with {job.loading.said}")
    prompts = (row.prompt for row in job.pictures.prompts.rows())
    for line in known_words.told(job.arguments.config, chain(prompts, [job.arguments.config.sampling.negative_prompt])):
        print(line)
    parts = job.loading.parts()
    family, _ = generate.drawing(parts)
    for height, width in job.survey.sizes_px:
        family.latent_shape((3, height, width))
    return parts


def work_of(job: Job) -> Work:
    """Files or shards, and which of them are this process's."""
    options = job.arguments.options
    encoding = Encoding(options.image, options.quality)
    kind = ShardWork if options.format == "webdataset" else FileWork
    return kind(job.folder.path, job.pictures, job.survey.pictures, job.part, encoding, job.asked)


def draw(job: Job, work: Work, parts: Parts) -> int:
    """Draws what is left of this part; 0, or the exit code of a signal."""
    sampling = job.arguments.config.sampling
    total = work.share - work.kept
    sizes = ", ".join(f"{height}x{width}" for height, width in list(job.survey.sizes_px)[:4])
    sizes += ", ..." if len(job.survey.sizes_px) > 4 else ""
    print(f"drawing {total:,} picture{'s' * (total != 1)} of {sizes} px (height x width) into {job.folder.path}")
    cut = Cut()
    with StopSignals() as stop, Counter("drawing", total, unit="pictures") as counter:

        def drawn(wanted: Iterable[Wanted]) -> Iterator[Drawn]:
            for one in generate.draw_all(parts, sampling, wanted, lambda: stop.requested):
                cut.look(one)
                counter.add(1)
                yield one

        began = time.monotonic()
        counter.add(0)  # the first batch takes a while: the line is there before it
        with suppress(Stopped):
            work.draw(drawn, partial(describe, parts, sampling, job.loading.made_with))
        done, seconds = counter.done, time.monotonic() - began
    cut.say()
    if stop.requested:
        assert stop.signal is not None
        print(f"stopped by {stop.signal.name}: {work.saved(done)}; the same command goes on from there")
        return stop.exit_code
    print(f"drawn: {done:,} picture{'s' * (done != 1)} in {duration_text(seconds)}")
    return 0


def describe(parts: Parts, sampling: SamplingSettings, made_with: dict[str, Any], one: Wanted) -> dict[str, Any]:
    """The JSON of a picture: columns of its file, how it was made, and with what."""
    return {**one.about, **generate.about(parts, sampling, one), **made_with}


def conclude(job: Job, work: Work, left: int) -> int:
    """Says where the pictures are, and whether those of other parts are there, too."""
    missing = work.missing()
    if missing:
        print(f"{missing:,} of the list's {work.total:,} pictures are for other parts to draw, and not there yet")
        return 0
    print(work.where())
    wanted = job.arguments.options.contact_sheet and work.total > 1
    if wanted and (left or not (job.folder.path / contact_sheet.NAME).exists()):
        print(f"to look at: {contact_sheet.write(job.folder.path, work.examples(), work.total, made_with(job))}")
    return 0


def made_with(job: Job) -> str:
    """The model and the settings that all pictures have in common, for the contact sheet."""
    sampling = job.arguments.config.sampling
    steps = f"{sampling.sampler}, {sampling.num_inference_steps} step{'s' * (sampling.num_inference_steps != 1)}"
    guided = f"guidance {sampling.guidance_scale:g}" if sampling.guided else "no guidance"
    return f"Drawn with {job.loading.said}: {steps}, {guided}."


class Cut:
    """Counts prompts that are longer than the family reads."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}

    def look(self, drawn: Drawn) -> None:
        """Notes one picture."""
        if drawn.cut is not None:
            self.numbers.setdefault(drawn.cut, []).append(drawn.wanted.number)

    def say(self) -> None:
        """One line for each thing that was done."""
        for how, numbers in self.numbers.items():
            shown = ", ".join(str(number) for number in numbers[:5]) + ", ..." * (len(numbers) > 5)
            many = f"{len(numbers):,} prompts are" if len(numbers) > 1 else "one prompt is"
            print(f"{many} longer than is read, and {how}: picture {shown}")
