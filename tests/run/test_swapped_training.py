"""Blocks that wait in the host's memory while they are trained (training.swap_blocks with optimizer.in_backward)."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from adapter_runs import Place, assert_equal, updated
from measured_peak import measured
from quick_cases import chosen, long
from torch import nn

from daguerre import errors
from daguerre.assembly.parts import build, outline
from daguerre.cli import main
from daguerre.memory import peak, static
from daguerre.training.optimizers.in_backward import spent
from daguerre.training.performance.swapping import Swap
from daguerre.training.sharding import exchange
from daguerre.types import wait, waits

# Of torch, where it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

RECIPE = """
run_name: full
model: {family: KIND}
objective: {name: eps}
adapters: {every: {name: full}}
data: {source: folder, resolution: 16}
training: {duration: "4 steps", global_batch_size: 4}
optimizer: {learning_rate: 1e-3, in_backward: after_norm}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: [a dog]}
validation: {every: "2 steps", num_samples: 2, num_levels: 2}
"""
SWAP = "training.swap_blocks=5"
AT_ONCE = ["optimizer.in_backward=at_once", "training.max_grad_norm=null"]
KINDS = {
    "recomputed bf16": ["training.gradient_checkpointing=true", "training.mixed_precision=bf16"],
    "at once": AT_ONCE,
    "16 bits": ["training.weights_dtype=bfloat16", "training.gradient_checkpointing=true"],
    "16 bits at once": ["training.weights_dtype=bfloat16", *AT_ONCE],
    "channels last": ["training.channels_last=true"],
    "profiles": ["ema.post_hoc=[0.1]"],
    "lion": ["optimizer.name=lion"],
    "adafactor": ["optimizer.name=adafactor", "ema.enabled=false"],
    "muon": ["optimizer.name=muon"],
    "schedule_free": ["optimizer.name=schedule_free", "ema.enabled=false"],
    "activations": ["training.offload_activations=true"],
    "compiled": ["training.compile=blocks"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("swapped"), "sd", RECIPE)


@pytest.mark.parametrize(("kind", "updates"), [("recomputed bf16", 3), *long((kind, 20) for kind in KINDS)])
def test_losses_weights_moments_and_averages_are_equal(place, kind, updates):
    """On the device are at any time two blocks, and what the update of one parameter reads and writes."""
    given = place.config(*KINDS[kind])
    norm = given.training.max_grad_norm and 0.05
    whole, losses = updated(given, build(given, torch.device("cpu"), trains=True), updates, max_grad_norm=norm)
    given = place.config(*KINDS[kind], SWAP)
    parts = build(given, torch.device("cpu"), trains=True)
    state, found = updated(given, parts, updates, max_grad_norm=norm)
    assert found == losses
    own = state.tensors()
    assert own.keys() == whole.tensors().keys()
    for group, tensors in whole.tensors().items():
        assert_equal(own[group], tensors)
    (swap,) = parts.swaps.values()
    waiting = [p for p in state.parameters if waits(p)]
    states = [part.optimizer.state[p] for part in state.optimizer.parts for p in part.parameters if waits(p)]
    moments = [t for each in states for t in each.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert all(map(waits, moments))
    of_one = max(p.numel() for p in waiting) * 4 * 4
    assert swap.largest_bytes < swap.device.peak <= swap.largest_bytes + of_one
    held = sum(t.nbytes for t in (*waiting, *moments))
    assert swap.held_bytes == sum(p.nbytes for p in waiting)
    assert held <= swap.host.bytes <= held + sum(4 * p.numel() for p in waiting) + 2 * swap.held_bytes
    swap.drop()
    assert swap.device.bytes == 0, "nothing else refers to a copy"


@pytest.mark.parametrize(
    ("kind", "swapped"),
    chosen(product(KINDS, [True, False]), lambda kind, swapped: kind == "channels last" and swapped),
)
def test_a_state_that_was_saved_goes_on(place, kind, swapped):
    """What a checkpoint gives is put where it waits: moments, averages of each kind, counts."""
    place.assert_a_saved_state_goes_on(*KINDS[kind], *[SWAP] * swapped)


def test_the_plan_counts_what_is_on_the_device_and_what_is_on_the_host(place):
    """Moments and averages of what waits are the host's; a step takes what an allocator gives out in one."""
    mesh = place.config().mesh.resolved(1, 1)
    given = place.config(SWAP, "training.gradient_checkpointing=true")
    counted = {}
    for name, own in (("plain", place.config("training.gradient_checkpointing=true")), ("swapped", given)):
        parts = outline(own)
        count = static.count(own, parts, mesh)
        counted[name] = count, peak.SimulatedStep(own, parts, count, accumulates=False, on_gpu=False).peak(4)
    (plain, before), (count, step) = counted["plain"], counted["swapped"]
    (swap,) = build(given, torch.device("cpu"), trains=True).swaps.values()
    assert count.on_host == pytest.approx(4 * swap.held_bytes, rel=1e-3), "weights, two moments, averages"
    assert plain.whole - count.whole == count.on_host
    assert count.saved_bytes == plain.saved_bytes
    of_one = 16 * max(p.numel() for p in parts.net.parameters())
    assert before.passes < step.passes <= before.passes + swap.largest_bytes + of_one
    assert step.sent > 2 * swap.held_bytes
    # On a CPU both memories are one, and what waits counts, too; its memory comes in pieces.
    assert step.whole + count.on_host == pytest.approx(measured(given, 4, 1), rel=0.1)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_other_weights_may_take_their_place_between_the_passes():
    """Averages, with which a loss calls the student before its backward pass: copies of them are not taken for its own
    weights."""
    x, gradients = torch.randn(3, 16), []
    for waiting in (0, 4):
        torch.manual_seed(0)
        net = Blocks()
        blocks = [*net.blocks][:waiting]
        for block in blocks:
            for p in block.parameters():
                wait(p)
        Swap(net, blocks, torch.device("cpu"))
        own = dict(net.named_parameters())
        others = {name: torch.randn_like(p) for name, p in own.items()}
        for _ in range(2):  # the second time it is known which block comes next
            y = net(x)
            exchange(own, others)
            with torch.no_grad():
                target = net(x)
            exchange(own, others)
            found = {}
            with spent(own.values(), lambda p, found=found: found.update({id(p): p.grad.clone()})):
                (y - target).square().sum().backward()
        gradients.append([found[id(p)] for p in own.values()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.long
def test_a_run_validates_saves_goes_on_draws_exports_and_is_evaluated_as_without(place, capsys):
    assert place.train("plain") == errors.DONE
    assert place.train("swapped", SWAP, "training.duration=2 steps") == errors.DONE
    said = capsys.readouterr().out
    assert "5 blocks of unet wait in the host's memory" in said
    assert "and what their moments and averages take" in said
    assert place.train("swapped", "training.swap_blocks=60%") == errors.DONE
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("plain", group), place.tensors("swapped", group))
    for number in ("learning/loss", "learning/gradient_norm", "validation/loss"):
        assert place.numbers("plain", number) == place.numbers("swapped", number)
    found = {}
    for run, more in (("plain", SWAP), ("swapped", "training.swap_blocks=0")):
        folder = place.folder / run
        out = place.folder / f"of {run}"
        assert main.run(["generate", str(folder), "prompt=a dog", f"out={out}", more]) == errors.DONE
        exported = sorted((folder / "pipeline").rglob("*.safetensors"))
        images = sorted((folder / "samples").rglob("*.png"))
        assert exported
        assert images
        files = [out / "000.png", *exported, *images]
        found[run] = [(file.name, file.read_bytes()) for file in files]
        assert main.run(["evaluate", str(folder), "metrics=[validation_loss]", more]) == errors.DONE
    assert found["plain"] == found["swapped"]
