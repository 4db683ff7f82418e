"""Descriptions of a run: the lines before it starts, and `train --dry-run`."""

import os
from collections.abc import Sequence

import torch
import yaml

from daguerre import devices
from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.assembly.parts import Components
from daguerre.conditions.condition import NO_IMAGES, Images
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.data import skipped
from daguerre.data.alternatives import SEVERAL_LINES
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.data.plan.buckets import buckets
from daguerre.formatting import columns, counted, scaled, titled, wrapped
from daguerre.models.components import ComponentLoader
from daguerre.models.family import Family
from daguerre.models.settings import PretrainedSettings
from daguerre.models.weights import resolve
from daguerre.objectives.objective import Objective
from daguerre.run import resume
from daguerre.run.schedule import Intervals, peak_learning_rate
from daguerre.training.precision import quantized
from daguerre.trees import paths
from daguerre.types import Batch

_PAGE_COLUMNS = 116
"""Columns of a dry run that no terminal makes narrower."""
_CAPTIONS = 200
"""Captions that are looked at before a run starts."""
_LETTERS = 60
"""Letters of a caption that is shown."""


def _columns() -> int:
    """Columns of a line below its title, which stands two further in."""
    return columns(_PAGE_COLUMNS) - 3


def format_count(count: float) -> str:
    """A count in short form: 3.1 M, 845 k, 12."""
    return scaled(count, {" B": 1e9, " M": 1e6, " k": 1e3})


def parameter_counts(parts: Components) -> dict[str, int]:
    """Parameters of all networks: `trained` and `frozen`."""
    # Tied parameters count once.
    every = {id(p): p for part in [*parts.family.components.values(), parts.net] for p in part.parameters()}
    trained = sum(p.numel() for p in parts.net.parameters() if p.requires_grad)
    few_bits = sum(map(quantized.numbers, parts.family.components.values()))
    return {"trained": trained, "frozen": sum(p.numel() for p in every.values()) + few_bits - trained}


def describe_device(device: torch.device) -> str:
    if device.type != "cpu":
        return devices.name(device)
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)} of a CPU with {os.cpu_count()} cores"


def headline(config: Config, parts: Components, sizes: BatchSizes, steps: int | None, length: str = "") -> list[str]:
    """Length of the training; then model, objective, data and device."""
    trained = format_count(parameter_counts(parts)["trained"])
    samples = f"{config.training.duration} in updates of {counted(sizes.whole, 'sample')}"
    if steps is not None:
        each, all_of_them = counted(sizes.whole, "sample"), counted(steps * sizes.whole, "sample")
        samples = f"{counted(steps, 'update')} of {each} = {all_of_them}"
    return [
        f"{config.run_name}: {samples}{length and ', '}{length}",
        f"{config.model.family} with {trained} trained parameters, objective {config.objective.name}, on "
        f"{config.data.kinds} at {config.data.resolution} px; {describe_device(parts.device)}, {parts.precision}",
        *describe_levels(config, parts.objective),
    ]


def describe_levels(config: Config, objective: Objective) -> list[str]:
    """The shift of the noise levels for each size that is trained on, if it follows the size."""
    schedule = None if objective.diffusion is None else objective.diffusion.settings.schedule
    if schedule is None or schedule.resolution_shift.name == "none":
        return []
    shifts = {str(bucket): schedule.at(bucket.area_px).shift for bucket in buckets(config.data)}
    listed = ", ".join(f"{size} {shift:.4g}" for size, shift in shifts.items())
    return wrapped(f"shift of the noise levels: {listed}", _columns())


def describe_first_pass(batch: Batch) -> str:
    """The line ahead of the passes before the first update, which take minutes on a CPU where images are large."""
    _, height, width = batch.pixel_shape
    samples = counted(len(batch.names), "sample")
    text = f"first pass, which tells how long the run takes: {samples} of {width}x{height} px"
    sizes = [f"{pixels.shape[3]}x{pixels.shape[2]} px" for pixels in batch.references]
    if batch.has_references:  # cached ones have no size in pixels
        text += ", with " + (f"reference images of {', '.join(sizes)} each" if sizes else "reference images")
    return text


def describe_learning_rate(config: Config, sizes: BatchSizes) -> list[str]:
    """The peak learning rate with `scale_lr`."""
    if not config.optimizer.scale_lr:
        return []
    rate, peak = config.optimizer.learning_rate, peak_learning_rate(config, sizes)
    return [f"learning rate {rate:g} x {sizes.whole} samples = {peak:g} (scale_lr)"]


def describe_warmup(every: Intervals) -> list[str]:
    """A notice if the warm-up is longer than the run, which only the data or the batch may tell."""
    if every.warmup <= every.total or not every.total:
        return []
    return [
        f"the warm-up takes {every.warmup:,} updates and the run has {every.total:,}: the learning rate never "
        f"reaches its peak. A shorter warm-up: lr_scheduler.warmup='{-(-every.total // 10)} steps'"
    ]


def describe_data(
    dataset: Dataset, held_out: Dataset, batch_size: int, validates: bool, scores: bool, images: Images, instead: str
) -> list[str]:
    """Extent of the data, samples that are left out, and measurements that it does not allow, with what is possible
    `instead` of scores."""
    lines = []
    if dataset.size is not None:
        lines.append(f"data: {extent(dataset)}, {held_out.size or 0:,} held out")
    found = skipped.merged(dataset.report(), dataset.notes(batch_size, images))
    if found:
        lines.append(f"found in the data:\n{skipped.table(found)}")
    if held_out.size == 0 and validates:
        lines.append("nothing is held out, so there is no validation loss (docs/trouble.md#the-loss-does-not-fall)")
    if dataset.measured is None and scores:
        lacks = "generated images of this data set cannot be scored, so the run ends without a table of results"
        lines.append(lacks + instead)
    return lines


def describe_cut_captions(family: Family, dataset: Dataset) -> list[str]:
    """A line where the text encoder does not read all of some of the first captions: before training, while something
    can be done about it. Data elsewhere are not read for this."""
    # Of data elsewhere, reading captions would download files before anybody has seen the plan.
    if family.text is None or any(member.remote for member in dataset.members):
        return []
    captions = loader.fixed_captions(dataset, _CAPTIONS)
    if not (cut := family.truncated(captions)):
        return []
    first = next(iter(cut))
    in_windows = hasattr(family.pretrained and family.pretrained.settings, "long_prompts")
    way = "Shorten them" + (", or read them in several windows (model.long_prompts=true)" if in_windows else "")
    return [
        f"{len(cut):,} of the first {len(captions):,} captions are not read to their end, such as one that is "
        f"{cut[first]}: {captions[first][:_LETTERS]!r} ... {way} (docs/trouble.md#cut-captions)"
    ]


def describe_joined_captions(dataset: Dataset) -> list[str]:
    """A line where the lines of some of the first captions are joined unasked. Training counts them as it reads them;
    data elsewhere are not read for this."""
    if any(member.remote for member in dataset.members):
        return []
    joined = loader.have_joined_captions(dataset, _CAPTIONS)
    return [f"{sum(joined):,} of the first {len(joined):,} samples have a {SEVERAL_LINES}"] if any(joined) else []


def extent(dataset: Dataset) -> str:
    if dataset.size is None:
        return "endless"
    if dataset.count is None:
        return f"{dataset.size:,} samples of {len(dataset.members)} sources"
    repeated = "" if dataset.count == dataset.size else f", {dataset.count:,} with repeats"
    return f"{counted(dataset.size, 'sample')} an epoch{repeated}"


def describe_source(dataset: Dataset, config: Config, batch_size: int, images: Images = NO_IMAGES) -> list[str]:
    """Extent of the data, its buckets, and samples that are left out."""
    left_out = skipped.merged(dataset.report(), dataset.notes(batch_size, images)).items()
    shapes = [f"buckets: {', '.join(map(str, dataset.buckets))}"] if len(dataset.buckets) > 1 else []
    return [
        f"{config.data.kinds}: {extent(dataset)}",
        *shapes,
        *(f"{e['count']:,} {'noted' if e.get('kept') else 'left out'}: {reason}" for reason, e in left_out),
    ]


def describe_files(config: Config) -> list[str]:
    """Places of the files of pretrained networks: whether each is on this machine, and its files."""
    if not isinstance(config.model, PretrainedSettings):
        return []
    found = list[list[str]]()
    for wanted in ComponentLoader(config.model, config.seed).wanted():
        folder = resolve.here(wanted.place, wanted.options)
        files = [f"{part}/{names[0]}".lstrip("/") for part, each in wanted.needed.items() for names in each]
        files = [name.replace("tokenizer_config.json", "*") for name in files]
        absent = files if folder is None else resolve.missing_files(folder, wanted.needed)
        here = "on this machine" if not absent else "incomplete"
        where = "will be downloaded from the hub" if folder is None else here
        lines = wrapped(f"{wanted.place}: {where}" + (f": {', '.join(absent or files)}" if files else ""), _columns())
        if folder is None:
            lines.append(f"  for a machine without a network: daguerre fetch {wanted.place} -o DIR")
        if lines not in found:  # several networks of one file
            found.append(lines)
    return [line for lines in found for line in lines]


def describe_settings(config: Config, full: bool) -> dict[str, list[str]]:
    """The recipe as YAML under a title: all of it if `full`, else the settings that differ from the defaults."""
    whole = configs.dump(config)
    if full:
        return {"Settings": whole.splitlines()}
    differing = configs.differing(config)
    count, every = (sum(1 for _ in paths(tree)) for tree in (differing, config.model_dump(mode="json")))
    text = yaml.dump(differing, sort_keys=False, allow_unicode=True, default_flow_style=None, width=_columns() - 4)
    return {f"Settings ({count} that differ from the defaults; --full shows all {every})": text.splitlines()}


def describe_networks(parts: Components) -> list[str]:
    """Each network with its class, its parameters, and those that are trained."""
    trained = {id(p) for p in parts.net.parameters() if p.requires_grad}
    lines = []
    known = {id(p) for part in parts.family.components.values() for p in part.parameters()}
    beside = {name: part for name, part in parts.net.named_children() if not known & {id(p) for p in part.parameters()}}
    for name, part in {**parts.family.components, **beside}.items():
        count = sum(p.numel() for p in part.parameters()) + quantized.numbers(part)
        trained_count = sum(p.numel() for p in part.parameters() if id(p) in trained)
        lines.append(f"{name:14} {type(part).__name__:28} {count:>14,} parameters, {trained_count:>14,} trained")
    return lines


def describe_plan(
    config: Config, parts: Components, sizes: BatchSizes, total_steps: int | None, start: resume.StartPoint
) -> list[str]:
    """Length, batches and start point of the training."""
    if total_steps == 0:
        return ["no updates: this recipe is for `daguerre generate`"]
    cut = f"{sizes.accumulation} x {sizes.micro}" if sizes.accumulation > 1 else f"{sizes.micro} at once"
    return [
        *headline(config, parts, sizes, total_steps),
        f"a global batch of {sizes.whole} samples is computed as {cut}",
        *resume.describe_start(config, start),
    ]


def dry_run(
    config: Config,
    parts: Components,
    sizes: BatchSizes,
    total_steps: int | None,
    start: resume.StartPoint,
    data: Sequence[str],
    notices: Sequence[str],
    full: bool = False,
) -> str:
    """The text of a dry run, with all settings if `full`. `total_steps` is None if it depends on data not here."""
    sections = {
        **describe_settings(config, full),
        "Networks": describe_networks(parts),
        "Files": describe_files(config),
        "Data": data,
        "Plan": describe_plan(config, parts, sizes, total_steps, start),
        "Notes": [
            line
            for note in [*notices, *parts.family.compatibility_warnings(parts.objective)]
            for line in wrapped(note, _columns())
        ],
    }
    return "\n".join([*titled(sections)[1:], "", "Nothing was trained and nothing was written (--dry-run)."])
