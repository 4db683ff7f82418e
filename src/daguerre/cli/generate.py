"""Generate images from prompts: with a run, a base model or a pipeline.

usage: daguerre generate RUN prompt="..." [key=value ...]

Generates images with the newest checkpoint of a run, by its averaged weights if it keeps them. RUN is a run folder; a
recipe stands for the run that `daguerre train` makes of it (same output_dir= and run_name=), or, with base=true,
for its pretrained networks as they are; a folder in diffusers' layout, or OWNER/NAME of the hub, is a pipeline. The
same command again goes on where it was stopped: complete images are kept.

  daguerre generate runs/quickstart prompt="a small green star on a white background" num_images=4 seed=7
  daguerre generate runs/quickstart prompts_file=prompts.csv out=images sampler=dpmpp_2m num_inference_steps=20
  daguerre generate sd15 base=true prompt="a photo of a red car" guidance_scale=7.5
  daguerre generate sd15 base=true prompt="a red car in the snow" image=car.jpg strength=0.6
  daguerre generate sdxl_lightning prompts_file=list.jsonl format=webdataset out=shards

  prompt=TEXT            what to generate
  prompts_file=FILE      text with one prompt a line, or .csv, .tsv, .jsonl with the columns prompt, negative_prompt,
                         seed, num_images, guidance_scale, height, width, file_name, interpolate_to, image, mask,
                         strength; others are kept in the JSON.
                         Without prompts, those of the recipe are taken
  negative_prompt=TEXT   what the image should not show
  num_images=N           images of each prompt (1)
  interpolate_to=TEXT    another prompt, to which the images go in equal steps, all from one noise
  seed=N                 image i of all starts from the noise of seed + i alone, in any batch and shard
  height=PX width=PX     size (that of the image; without one data.resolution)
  sampler, num_inference_steps, guidance_scale, guidance_rescale, eta, s_churn, s_tmin, s_tmax, s_noise,
  timestep_spacing, shift, batch_size
                         as the run's recipe has them in `sampling`

  image=FILE             what the image starts from (image to image); or a folder: each of its images makes one
  strength=S             share of the steps that run, above 0 to 1: how much changes (0.8; with a mask 1)
  mask=FILE              inpainting: white is painted again, black stays as it is (keep_unmasked=false: in the latent
                         alone)

  reference=PICTURE      what the prompt speaks of ("make it red"), for models that read reference images; several as
                         [A.png,B.png], or a folder: each of its images makes one; as columns reference, reference_2,
                         reference_3, reference_4, reference_5, reference_6, reference_7, reference_8, reference_9 and
                         reference_10
  image_prompt=PHOTO     its CLIP embedding says what is generated, for models that read one (Stable Cascade)
  control=FILE           what a ControlNet reads (edges ...), also a folder or a list; control_2, control_3 and
                         control_4 for further ones
  control_from=PHOTO condition=canny   computes it of a photo; without condition as in the run's training
  controlnets='{PLACE: 0.7}'           adds ControlNets (runs, diffusers' folders, single files) with their strengths
  controlnet_conditioning_scale, control_guidance_start, control_guidance_end, guess_mode    as in diffusers

  out=FOLDER, -o FOLDER  default: RUN/generated/PROMPT
  format=png             or jpeg, webp, or webdataset: tar shards with an index, for data.source=webdataset
  quality=N              of jpeg (95) and webp (90)
  shard_samples=N shard_image=jpeg     images of a shard (1000), and what they are
  shard=I/N              generates part I of N; under torchrun or srun each process its own part
  contact_sheet=false    leaves out contact-sheet.html

  base=true              the recipe's pretrained networks as they are, without a run
  use='{FILE: 0.8}'      LoRAs (diffusers, peft, kohya; or folders of runs) with their strengths, and new tokens
  weights=ema            or raw: which weights of the checkpoint
  resume_from_checkpoint=NAME    another checkpoint than the newest, such as step-00001000
  training.device=cpu            where to compute; training.mixed_precision, training.attention, training.base_precision
                                 and training.swap_blocks as in training

Writes 000.png, 001.png ... and a JSON next to each, with all its settings. docs/generate.md says more.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from daguerre import trees
from daguerre.assembly.parts import Components
from daguerre.checkpoint.signals import StopSignals
from daguerre.cli.options import generate_options
from daguerre.cli.options.generate_options import Arguments
from daguerre.errors import UserError
from daguerre.evaluation.formulas import pairs
from daguerre.formatting import counted, format_duration
from daguerre.generation import (
    contact_sheet,
    controlnets,
    generate,
    images,
    jobs,
    load,
    output_dir,
    prompt_syntax,
    used,
)
from daguerre.generation import prompts as generation_prompts
from daguerre.generation.generate import GeneratedImage, ImageRequest
from daguerre.generation.image_files import Encoding, FileOutput
from daguerre.generation.image_shards import ShardOutput
from daguerre.generation.load import Loading
from daguerre.generation.output_dir import Folder
from daguerre.generation.requests import RequestList, Survey
from daguerre.run import known_words
from daguerre.samplers.guidance import CLASSIFIER_FREE
from daguerre.tracking.progress import Counter
from daguerre.training import device
from daguerre.training.precision import dtypes
from daguerre.types import IMAGE, MASK, REFERENCES


@dataclass(frozen=True)
class Job:
    """A list of images, and what generates it."""

    arguments: Arguments
    loading: Loading
    part: jobs.TaskShard
    requests: RequestList
    survey: Survey
    parameters: dict[str, Any]
    folder: Folder

    @cached_property
    def output(self) -> FileOutput | ShardOutput:
        options = self.arguments.options
        kind = ShardOutput if options.format == "webdataset" else FileOutput
        encoding = Encoding(options.encoding, options.quality)
        return kind(self.folder.path, self.requests, self.survey.images, self.part, self.parameters, encoding=encoding)


def run(arguments: list[str]) -> int:
    """Generates what the command line asks for. Returns 0 or the code of a signal; UserError."""
    job = prepare(arguments)
    began = job.folder.continues(job.parameters)
    parts = None if began else ready(job)
    if not began:
        job.folder.begin(job.parameters)
    with job.folder.locked(job.part):
        output = job.output
        if began:
            output.find_existing()
        if output.kept:
            print(f"{output.kept:,} of {output.share:,} images already exist and are complete: kept")
        left = output.share - output.kept
        if left and (code := write_images(job, parts or ready(job), left)):
            return code
        return conclude(job, left)


def prepare(arguments: list[str]) -> Job:
    """Everything that can be known, and refused, before any weight is read."""
    asked_for = generate_options.read(arguments)
    for notice in asked_for.notices:
        print(notice)
    part = jobs.task_shard(asked_for.options.shard)
    if part.notice:
        print(part.notice)
    requests = requests_of(asked_for, prompts(asked_for))
    survey = requests.survey()
    for notice in survey.notices:
        print(notice)
    if not survey.images:
        raise UserError("num_images=0: there is nothing to generate", code="empty", setting="sampling.num_images")
    loading = chosen(asked_for)
    parameters = record(asked_for, requests, survey, loading)
    folder = output_dir.place(asked_for.options.out, asked_for.model.home, requests.prompts.name, parameters)
    return Job(asked_for, loading, part, requests, survey, parameters, folder)


def requests_of(asked_for: Arguments, asked: generation_prompts.Prompts) -> RequestList:
    """The images of these prompts, as the command line has them. UserError for files that cannot be read."""
    config, options = asked_for.config, asked_for.options
    return RequestList(
        _with_images(asked, options), config.sampling, generate.image_size(config, "sample"), taken=generate.KEYS,
        captioned=options.format == "webdataset", strength=options.strength, keep_unmasked=options.keep_unmasked,
        guidance=config.model.guidance or CLASSIFIER_FREE, references=config.model.reference_rule,
        reconstructs=config.model.reconstructs,
    )  # fmt: skip


def chosen(asked_for: Arguments) -> Loading:
    """The weights that the command line names, with the LoRAs and ControlNets that it adds."""
    found = load.choose(asked_for.model, asked_for.config, asked_for.options.weights)
    return controlnets.added(used.added(found, asked_for.options.use), asked_for.options.controlnets)


def _with_images(asked: generation_prompts.Prompts, options: generate_options.Options) -> generation_prompts.Prompts:
    """The prompts with the images that the command line gives to them."""
    names = [name for name in generation_prompts.IMAGES if name in generate_options.Options.model_fields]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if isinstance(several := given.get(REFERENCES[0]), list):  # all of them belong to each request
        if len(several) > len(REFERENCES):
            raise UserError(
                f"reference has {len(several)} images, and a prompt has at most {len(REFERENCES)}", setting="reference"
            )
        given |= dict(zip(REFERENCES, several, strict=False))
    return images.with_images(asked, [images.given(name, value) for name, value in given.items()])


def prompts(arguments: Arguments) -> generation_prompts.Prompts:
    """The prompts of the command line, of the file that it names, or of the recipe."""
    sampling = arguments.config.sampling
    toward = arguments.options.interpolate_to
    if arguments.options.prompt is not None:
        return generation_prompts.inline([arguments.options.prompt], toward)
    if toward is not None:
        raise UserError(
            "interpolate_to is where the images of one prompt go: give prompt=TEXT with it (a list of prompts has it "
            "as a column)",
            code="conflict",
            setting="interpolate_to",
        )
    if sampling.prompts_file is not None:
        return generation_prompts.of_file(sampling.prompts_file)
    if not sampling.prompts and arguments.config.model.reconstructs and arguments.options.image is not None:
        return generation_prompts.inline([""])
    if not sampling.prompts:
        raise UserError(
            'no prompt given: pass prompt="..." or prompts_file=FILE (one prompt a line)',
            code="missing",
            setting="sampling.prompts",
        )
    return generation_prompts.inline(sampling.prompts)


def record(arguments: Arguments, requests: RequestList, survey: Survey, loading: Loading) -> dict[str, Any]:
    """Everything that decides the images of the list: it is gone on with only if all of this is the same."""
    sampling, options, training = arguments.config.sampling, arguments.options, arguments.config.training
    names = ("seed", "num_images", "negative_prompt", "sampler", "num_inference_steps", "eta", "guidance_scale")
    height, width = requests.size_px
    shards = {"shard_samples": options.shard_samples, "shard_image": options.encoding}
    return {
        **dict(trees.paths(loading.provenance)),
        "prompts": requests.prompts.name,
        "prompts_sha256": requests.prompts.digest,
        "images": survey.images,
        **{name: getattr(sampling, name) for name in (*names, "guidance_rescale", "timestep_spacing")},
        **sampling.churn,
        **({} if sampling.shift is None else {"shift": sampling.shift}),
        **steered(options),
        **({"height": height, "width": width} if not survey.inputs else _of_inputs(requests, survey)),
        "precision": str(dtypes.choose(training, device.choose_device(training.device))),
        "matmul_precision": training.matmul_precision,
        "format": options.format,
        **(shards if options.format == "webdataset" else {}),
        "quality": Encoding(options.encoding, options.quality).used_quality,
    }


def steered(options: generate_options.Options) -> dict[str, Any]:
    """The options of ControlNets that the command gives, by name."""
    names = (*controlnets.OPTIONS, "condition")
    return {name: getattr(options, name) for name in names if name in options.model_fields_set}


def _of_inputs(requests: RequestList, survey: Survey) -> dict[str, Any]:
    """Everything that decides images that start from others; a size of None is that of each image."""
    found = {"height": requests.sampling.height, "width": requests.sampling.width, "strength": requests.strength}
    masked = {"keep_unmasked": requests.keep_unmasked} if MASK in survey.inputs else {}
    return {**found, **masked, "images_sha256": survey.inputs_sha256}


def ready(job: Job) -> Components:
    """The networks. UserError if they cannot generate images of all the sizes that are asked for."""
    jobs.use_own_gpu(job.part)
    print(f"generating with {job.loading.description}")
    lines = prompt_syntax.notices(job.requests.texts())
    if not job.arguments.options.use:  # what is used may teach words
        lines += known_words.notices(job.arguments.config, job.requests.texts())
    for line in lines:
        print(line)
    parts = job.loading.parts()
    for line in used.unprompted(parts, job.requests.texts()):
        print(line)
    family, _ = generate.generative(parts, job.survey.inputs)
    for height, width in job.survey.sizes_px:
        family.generated.latent_shape((3, height, width))
    steering_of(job.arguments, job.survey, parts)  # for its UserErrors
    return parts


def steering_of(asked_for: Arguments, survey: Survey, parts: Components) -> controlnets.Steering:
    """The ControlNets as the command asks for them."""
    options, inputs = asked_for.options, survey.inputs
    return controlnets.steering(parts, steered(options), list(options.controlnets.values()), options.condition, inputs)


def write_images(job: Job, parts: Components, total: int) -> int:
    """Generates what is left of this part. Returns 0, or the exit code of a signal."""
    sampling = job.arguments.config.sampling
    sizes = ", ".join(f"{height}x{width}" for height, width in list(job.survey.sizes_px)[:4])
    sizes += ", ..." if len(job.survey.sizes_px) > 4 else ""
    print(f"generating {counted(total, 'image')} of {sizes} px (height x width) into {job.folder.path}")
    truncated: dict[tuple[str, str], list[int]] = {}

    steering = steering_of(job.arguments, job.survey, parts)
    measured: dict[int, dict[str, float]] = {}

    def describe(request: ImageRequest) -> dict[str, Any]:
        made = {**generate.image_metadata(parts, sampling, request), **steering.metadata}
        return {**request.metadata, **made, **measured.get(request.number, {}), **job.loading.provenance}

    with StopSignals() as stop, Counter("generating", total, unit="images") as counter:

        def generated(requests: Iterable[ImageRequest]) -> Iterator[GeneratedImage]:
            for image in generate.generate(parts, sampling, requests, lambda: stop.requested, steering):
                generate.check_finite(image)
                for cut in image.truncated.items():
                    truncated.setdefault(cut, []).append(image.request.number)
                if IMAGE in image.request.images and image.request.strength is None:
                    measured[image.request.number] = likeness(image)
                counter.add(1)
                yield image

        counter.add(0)  # the first batch takes a while: the line is there before it
        with suppress(generate.Stopped):
            job.output.write(generated, describe)
        done, seconds = counter.done, counter.seconds
    for (name, how), numbers in truncated.items():
        shown = ", ".join(str(number) for number in numbers[:5]) + ", ..." * (len(numbers) > 5)
        noun = name.replace("_", " ")
        many = f"{len(numbers):,} {noun}s are" if len(numbers) > 1 else f"one {noun} is"
        print(f"{many} too long, and {how}: image {shown}")
    if measured:
        psnr, ssim = (fmean(one[name] for one in measured.values()) for name in ("psnr", "ssim"))
        over = "" if len(measured) == 1 else f" on average over {len(measured):,} images"
        print(f"reconstruction: PSNR {psnr:.2f} dB, SSIM {ssim:.3f}{over}")
    if stop.requested:
        assert stop.signal is not None
        print(f"stopped by {stop.signal.name}: {job.output.saved(done)}; the same command continues from there")
        return stop.exit_code
    print(f"generated: {counted(done, 'image')} in {format_duration(seconds)}")
    return 0


def likeness(image: GeneratedImage) -> dict[str, float]:
    """`psnr` and `ssim` of an image and the one that it was made again of."""
    size_px = image.request.size_px
    told_HWC = images.pixels({IMAGE: image.request.images[IMAGE]}, size_px, size_px)[IMAGE]
    return {"psnr": pairs.psnr(image.pixels_HWC, told_HWC), "ssim": pairs.ssim(image.pixels_HWC, told_HWC)}


def conclude(job: Job, left: int) -> int:
    """Prints where the images are, or how many are for other parts; writes the contact sheet of a whole list."""
    output = job.output
    if missing := output.missing():
        print(f"{missing:,} of the list's {output.total:,} images belong to other parts and do not exist yet")
        return 0
    print(output.where())
    wanted = job.arguments.options.contact_sheet and output.total > 1
    if wanted and (left or not (job.folder.path / contact_sheet.NAME).exists()):
        sampling = job.arguments.config.sampling
        steps = f"{sampling.sampler}, {sampling.num_inference_steps} step{'s' * (sampling.num_inference_steps != 1)}"
        guidance = job.requests.guidance.described(sampling.guidance_scale)
        provenance = f"Generated with {job.loading.description}: {steps}, {guidance}."
        print(f"contact sheet: {contact_sheet.write(job.folder.path, output.examples(), output.total, provenance)}")
    return 0
