"""Advice when memory runs out, including the largest micro-batch that fits (measured)."""

from typing import Protocol

import torch

from daguerre.assembly.batch_sizes import BatchSizes, needs_whole_batch
from daguerre.assembly.parts import Components
from daguerre.config.config import Config
from daguerre.data.loading.loader import Loading
from daguerre.samplers.settings import SamplingSettings
from daguerre.training import device, oom
from daguerre.training.state import TrainState


class Names(Protocol):
    """Anything that lists checkpoints."""

    def names(self) -> list[str]:
        """Oldest first."""
        ...


def of_training(
    config: Config, checkpoints: Names, parts: Components, state: TrainState, loading: Loading, sizes: BatchSizes
) -> str:
    """The largest micro-batch that fits, found with samples of the failed update, and other settings that save memory.

    The state is not to be trained on or saved afterwards.
    """
    batch = device.on(parts.device, loading.first(state.slots))
    tried = oom.divisors(sizes.whole, len(batch.names))
    whole = needs_whole_batch(config, parts.objective, parts.net)
    if whole:
        tried = tried[-1:]
    with torch.compiler.set_stance("force_eager"):  # compiling each size would take minutes
        fitting = oom.largest_that_fits(
            tried, lambda size: oom.update_fits(state, batch.rows(0, size), parts.loss, parts.autocast)
        )
    if whole:
        first = f"{whole[0].upper()}{whole[1:]}, so the global batch cannot be split: make global_batch_size smaller."
    elif fitting is None:
        first = "Not even a micro-batch of one sample fits."
    elif fitting == sizes.micro:
        first = f"A micro-batch of {fitting} fits on its own, so something else is using the memory."
    else:
        first = (
            f"The largest micro-batch that fits is {fitting} (it was {len(batch.names)}): "
            f"training.per_device_batch_size={fitting} training.gradient_accumulation_steps={sizes.whole // fitting} "
            f"computes the same updates of {sizes.whole} samples."
        )
    return "\n".join([first, *_others(config, fitting is None), kept(checkpoints)])


def of_several(config: Config, checkpoints: Names) -> str:
    """Settings that save memory when several processes train together."""
    ways = ["a smaller training.per_device_batch_size (the global batch does not change)"]
    if config.mesh.ici_fsdp_parallelism == 1:
        ways.append(
            "mesh.ici_data_parallelism=1 mesh.ici_fsdp_parallelism=-1 shards weights and optimizer state over a node"
        )
    return "\n".join([f"{'; '.join(ways)}.", *_others(config, False), kept(checkpoints)])


def _others(config: Config, needed: bool) -> list[str]:
    """Other settings that save memory and are not set yet."""
    ways = []
    if not config.training.gradient_checkpointing:
        ways.append("training.gradient_checkpointing=true stores fewer activations")
    if config.training.weights_dtype == "float32":
        ways.append("training.weights_dtype=bfloat16 halves weights and gradients (in a new run)")
    if config.optimizer.name not in ("adafactor", "adamw_8bit"):
        ways.append("optimizer.name=adafactor or adamw_8bit uses less optimizer state (in a new run)")
    if needed:
        ways.append("a smaller data.resolution (in a new run)")
    return [f"Other ways: {'; '.join(ways)}."] if ways else []


def kept(checkpoints: Names) -> str:
    """The checkpoint that the run can resume from."""
    names = checkpoints.names()
    return f"The last checkpoint is {names[-1]}." if names else "No checkpoint was saved yet."


def of_generating(sampling: SamplingSettings) -> str:
    if sampling.batch_size > 1:
        return f"Generate fewer at once: sampling.batch_size is {sampling.batch_size}."
    return "Generate smaller images (sampling.height, sampling.width), or none while training: sampling.num_images=0."


def of_validation(checkpoints: Names) -> str:
    return (
        "Make training.per_device_batch_size smaller, or switch validation off: validation.every=null. "
        f"{kept(checkpoints)}"
    )


def of_saving(checkpoints: Names) -> str:
    return (
        "Make training.per_device_batch_size smaller: a save copies the state while training goes on. "
        f"{kept(checkpoints)}"
    )


def of_exporting(checkpoints: Names) -> str:
    return (
        "Switch the export off (checkpoint.export=false) and export later on a machine with more memory: `daguerre "
        f"convert`. {kept(checkpoints)}"
    )
