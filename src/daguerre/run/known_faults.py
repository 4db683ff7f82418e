"""Faults of earlier versions that have changed what runs learnt: a run that is continued says so.

A checkpoint says which version wrote it, and the first one that this version saves ends the message. Whoever mends such
a fault adds an entry here and a line to CHANGELOG.md, and raises `daguerre.__version__` if the fault was in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Documents = Mapping[str, Any]
"""Documents of a checkpoint by name: `code`, `config` (settings without effect are left out), `state`, `loading`."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the runs that it concerns."""

    versions: frozenset[str]
    """Versions of this program that had it."""
    concerns: Callable[[Documents], bool]
    """True for a run whose numbers it may have changed."""
    sentence: str
    """What the run learnt, and what to do about it."""


def _changed_batch(run: Documents) -> bool:
    batch = run["config"]["training"].get("global_batch_size")  # null: as the devices have it, and never changed
    return bool(batch) and run["state"]["slots"] != run["state"]["step"] * batch


def _counts_samples(config: Mapping[str, Any]) -> bool:
    lengths = [config["training"]["duration"], config.get("lr_scheduler", {}).get("warmup")]
    lengths += [config.get(section, {}).get("every") for section in ("checkpoint", "validation")]
    return any("sample" in str(length) or "epoch" in str(length) for length in lengths)


FAULTS: tuple[Fault, ...] = (
    Fault(
        frozenset({"0.1.0"}),
        lambda run: run["config"]["model"]["family"] == "autoencoder",
        "if this run was stopped and continued before, the moments of its 3x3 convolutions were mixed up each time, so "
        "that it learnt a little worse for some thousand updates. Go on if its reconstructions are good enough, or "
        "train it again under another run_name",
    ),
    Fault(
        frozenset({"0.1.0"}),
        lambda run: _changed_batch(run) and _counts_samples(run["config"]),
        "its global batch was changed on the way, and lengths in samples and epochs (duration, warm-up, decay, "
        "intervals) were counted as if the new one had been there from the start. Now they are counted in what was "
        "trained on: give the training.duration that you mean",
    ),
)


def notices(documents: Documents) -> list[str]:
    """A line for each fault that concerns a run, by the documents of the checkpoint that it is continued from."""
    version = documents.get("code", {}).get("version")
    found = [fault for fault in FAULTS if version in fault.versions and fault.concerns(documents)]
    return [f"a fault of version {version} that is mended now: {fault.sentence}" for fault in found]
