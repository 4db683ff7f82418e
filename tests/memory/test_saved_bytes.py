"""What a save copies to the host's memory is what `plan` counts."""

import pytest
import torch
from tiny_runs import TINY

from daguerre.assembly.parts import begin, build
from daguerre.checkpoint.async_save import HostMemory
from daguerre.config import config as configs
from daguerre.memory import estimate, static


@pytest.mark.parametrize("more", [[], ["ema.post_hoc=[0.05]", "training.weights_dtype=bfloat16"]])
def test_what_a_save_copies_is_counted(more):
    """Of the bytes of a state that is really there."""
    config = configs.load("quickstart", ["training.device=cpu", *TINY, *more]).config
    mesh = config.mesh.resolved(1, 1)
    target = estimate.of(config, mesh, None)
    counted = static.count(target.config, target.parts(), mesh).saved_bytes
    state = begin(config, build(config, trains=True))
    for p in state.parameters:
        p.grad = torch.zeros_like(p)
    state.move(0.0, torch.ones((), dtype=torch.bool), None)
    held = sum(tensor.nbytes for tensors in state.tensors().values() for tensor in tensors.values())
    memory = HostMemory()
    memory.copies({"all": {f"{file}.{name}": t for file, own in state.tensors().items() for name, t in own.items()}})
    assert counted == pytest.approx(held, rel=0.02)
    assert held <= memory.size_bytes < 2 * held + 2**20  # the last piece of memory may be half empty
