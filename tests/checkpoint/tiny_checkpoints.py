"""Small checkpoints that the tests of this folder save and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from whole_store import WholeStore

from daguerre.checkpoint.contents import Checkpoint


def content(number: int) -> dict[str, Any]:
    """What `WholeStore.save` takes; another number is another content."""
    return {
        "tensors": {
            "model": {"w": torch.full((3, 4), float(number)), "b": torch.arange(5) + number},
            "optimizer": {"step": torch.tensor(number)},
        },
        "documents": {"state": {"step": number, "loss": 0.1 * number}, "config": {"name": "ä"}},
        "files": {"tokenizer/vocab.json": b'{"a": 1}' * (number + 1)},
    }


def save(store: WholeStore, number: int, value: int | None = None) -> Path:
    """Save `step-NUMBER` with the content of `value` (its number unless given)."""
    return store.save(f"step-{number:08d}", **content(number if value is None else value))


def same(checkpoint: Checkpoint, value: int) -> bool:
    """Whether a loaded checkpoint has exactly the content of `value`."""
    expected = content(value)
    tensors = checkpoint.tensors
    return (
        checkpoint.documents == expected["documents"]
        and checkpoint.files == expected["files"]
        and {g: set(t) for g, t in tensors.items()} == {g: set(t) for g, t in expected["tensors"].items()}
        and all(torch.equal(tensors[g][k], t) for g, ts in expected["tensors"].items() for k, t in ts.items())
    )
