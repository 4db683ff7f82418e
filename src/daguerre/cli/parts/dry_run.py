"""`daguerre train --dry-run`: what would happen, by the recipe, networks, data and run; nothing is written.

It refuses what `train` refuses, as far as weights, other processes and object stores are not needed to know.
"""

from dataclasses import replace

from daguerre.assembly import assistant, caption_words, float8_layers, quantized_base
from daguerre.assembly.batch_sizes import BatchSizes, batch_sizes, check_uncut_batches, held
from daguerre.assembly.parts import outline
from daguerre.config.config import Config, Loaded
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import Loading
from daguerre.data.sources import huggingface
from daguerre.errors import Absent
from daguerre.formatting import columns, wrapped
from daguerre.memory import waiting
from daguerre.run import class_images, lengths, probe, reconstruction, resume, samples, schedule, summary, trackers
from daguerre.run.storage import RunStorage
from daguerre.training import device
from daguerre.training.optimizers import optimizer


def _cut(loaded: Loaded, config: Config, known: int | None) -> tuple[Config, BatchSizes, list[str]]:
    """The config with the blocks that wait, the cut of its batches where a global batch is `known`, and notices."""
    sizes = batch_sizes(config) if known is None else batch_sizes(config, known, held=held(loaded))
    here = device.choose_device(config.training.device)
    config, notices = waiting.fixed(config, config.mesh.resolved(1, 1), sizes, here)
    return config, sizes, [*notices, *sizes.notices]


def describe(loaded: Loaded, storage: RunStorage, full: bool) -> int:
    """Prints the description, with all settings if `full`; returns the exit code."""
    config = caption_words.fixed(loaded.config)
    start = resume.foresee_start(replace(loaded, config=config), storage)
    config, sizes, of_cut = _cut(loaded, config, start.global_batch_size)
    parts = outline(config)
    device.prepare(config.training, parts.device)  # for its UserErrors
    trained = {name: p for name, p in parts.net.named_parameters() if p.requires_grad}
    optimizer.build(config.optimizer, trained)  # for its UserErrors: patterns, libraries, devices
    samples.check(config, parts)
    trackers.check(config.logging)
    check_uncut_batches(config, sizes, parts.objective, parts.net)
    if start.checkpoint is None:
        class_images.check_prediction(config, parts)
    data = class_images.planned(config) if start.checkpoint is None else []
    dataset, notices = None, [*loaded.notices, *start.notices, *of_cut]
    try:
        with huggingface.from_cache_alone():
            if data:
                class_images.open_others(config)
            else:
                dataset = open_dataset(config.data, "train", parts.images, parts.columns)
    except Absent as error:
        data.append(str(error))
    if dataset is None:
        data = [part for line in data for part in wrapped(line, columns(118) - 2)]
        in_epochs = config.training.duration.unit == "epochs"
        total = None if in_epochs else schedule.pace_of(start, sizes, None).steps(config.training.duration)
    else:
        dataset.check_present(parts.images)
        dataset.plan(config.seed, sizes.whole)
        data = summary.describe_source(dataset, config, sizes.whole, parts.images)
        config, of_lengths = lengths.fixed(config, start.lengths, dataset.count, sizes.whole)
        pace = schedule.pace_of(start, sizes, dataset.count)
        config, changed = schedule.settled(config, start, sizes, pace)
        if start.checkpoint is not None:
            sized = sizes.whole, sizes.micro
            loading = Loading(dataset, config.loader, config.seed, *sized, parts.draws, parts.family.truncated)
            resume.restore_loading(loading, start, config)
        every = schedule.intervals(config, pace)
        total = every.total
        notices += [*of_lengths, *changed, *summary.describe_warmup(every)]
        notices += summary.describe_cut_captions(parts.family, dataset) + summary.describe_joined_captions(dataset)
        notices += reconstruction.foreseen(parts.family, dataset) if start.checkpoint is None else []
    notices += [*quantized_base.describe(parts.family.components), *float8_layers.describe(parts.net)]
    notices += [*assistant.notices(config, parts.family), *samples.prompt_notices(config)]
    notices += probe.foreseen(config, parts) * (start.checkpoint is None)
    print(summary.dry_run(config, parts, sizes, total, start, data, notices, full))
    return 0
