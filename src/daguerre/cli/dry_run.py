"""`daguerre train --dry-run`: what would happen, from the recipe, the networks and the data; nothing is written."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from daguerre.build.parts import batch_sizes, outline
from daguerre.config.config import Config
from daguerre.data.dataset import open_dataset
from daguerre.data.sources import huggingface
from daguerre.errors import Absent
from daguerre.run import class_images, samples, summary
from daguerre.run.intervals import intervals
from daguerre.run.storage import Home
from daguerre.training import device
from daguerre.training.optimizers import optimizer


def describe(config: Config, home: Home, notices: Sequence[str], full: bool) -> int:
    """Prints it, with all settings if `full`; the exit code."""
    parts = outline(config)
    device.prepare(config.training, parts.device)  # for what it refuses
    trained = {name: p for name, p in parts.net.named_parameters() if p.requires_grad}
    optimizer.build(config.optimizer, trained)  # for what it refuses: patterns, libraries, devices
    samples.check(config, parts)
    sizes = batch_sizes(config)
    class_images.refuse_other_predictions(config, parts)
    data = class_images.told(config)
    dataset, said = None, list(notices)
    try:
        with huggingface.from_cache_alone():
            if data:
                class_images.open_others(config)
            else:
                dataset = open_dataset(config.data, "train")
    except Absent as error:
        data.append(str(error))
    if dataset is None:
        data = [
            part for line in data for part in textwrap.wrap(line, 116, break_on_hyphens=False, break_long_words=False)
        ]
        in_steps = config.training.duration.unit != "epochs"
        total = config.training.duration.steps(sizes.whole, None) if in_steps else None
    else:
        dataset.refuse_without(parts.images)
        dataset.plan(config.seed, sizes.whole)
        data = summary.about_source(dataset, config, sizes.whole, parts.images)
        every = intervals(config, sizes, dataset.count)
        total = every.total
        said += summary.about_warmup(every)
    said += samples.strange_words(config)
    print(summary.dry_run(config, parts, sizes, total, data, said, full))
    return 0
