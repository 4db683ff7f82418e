"""Blocks that wait in the host's memory (training.swap_blocks): numbers, bytes, files, the plan, refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import forked_runs
import pytest
import torch
from adapter_runs import MESHES, Place, assert_equal, updated
from quick_cases import long

from daguerre import errors
from daguerre.assembly import swapped
from daguerre.assembly.parts import Components, build, outline
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.memory import estimate, peak, static, waiting
from daguerre.training.performance import offloading, peak_rates
from daguerre.types import waits

# Of torch, where it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

RECIPE = """
run_name: lora
model: {family: KIND}
objective: {name: eps}
adapters: {style: {name: lora, rank: 4, ranks: {text_encoder: 2}}}
data: {source: folder, resolution: 16}
training: {duration: "4 steps", global_batch_size: 4}
optimizer: {learning_rate: 1e-2}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 1, num_inference_steps: 2, prompts: [a dog]}
validation: {every: "2 steps", num_samples: 2, num_levels: 2}
"""
SWAP, OFFLOAD = "training.swap_blocks=5", "training.offload_activations=true"
KINDS = {
    "lora": [],
    "int8": ["training.base_precision=int8"],
    "recomputed": ["training.gradient_checkpointing=true"],
    "recomputed int8 bf16": [
        "training.gradient_checkpointing=true", "training.base_precision=int8", "training.mixed_precision=bf16",
    ],
    "16 bits": ["training.weights_dtype=bfloat16"],
    "dora": ["adapters.style.kind=dora"],
    "compiled": ["training.compile=blocks", "training.gradient_checkpointing=true"],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("swapped"), "sd", RECIPE)


def trained(
    given: configs.Config, steps: int, micro_batches: int = 2
) -> tuple[Components, list[float], dict[str, dict[str, torch.Tensor]]]:
    """Parts, losses and the state after so many updates with clipped gradients."""
    parts = build(given, torch.device("cpu"), trains=True)
    state, losses = updated(given, parts, steps, samples=2, micro_batches=micro_batches, max_grad_norm=0.05)
    return parts, losses, state.tensors()


@pytest.mark.parametrize(("kind", "updates"), [("recomputed int8 bf16", 3), *long((kind, 20) for kind in KINDS)])
def test_losses_weights_and_moments_are_equal_and_two_blocks_are_there(place, kind, updates):
    """At any time there is memory for two blocks on the device: also what is kept for the backward pass is none."""
    _, losses, whole = trained(place.config(*KINDS[kind]), updates)
    parts, found, state = trained(place.config(*KINDS[kind], SWAP), updates)
    assert found == losses
    assert state.keys() == whole.keys()
    for group, tensors in whole.items():
        assert_equal(state[group], tensors)
    (swap,) = parts.swaps.values()
    assert len(swap) == 5
    assert 0 < swap.device.peak <= swap.largest_bytes < swap.held_bytes <= swap.host.bytes
    waiting = [t for t in [*parts.net.parameters(), *parts.net.buffers()] if waits(t)]
    assert sum(t.nbytes for t in waiting) == swap.held_bytes
    assert not any(p.requires_grad for p in waiting)
    swap.drop()
    assert swap.device.bytes == 0, "nothing else refers to a copy"


@pytest.mark.long  # of the quick tests, test_swapped_training.py
@pytest.mark.parametrize("more", [[], [SWAP], ["optimizer.in_backward=after_norm", "training.channels_last=true"]])
@pytest.mark.parametrize("kind", [*KINDS, "nf4"])
def test_a_state_that_was_saved_goes_on(place, kind, more):
    given = KINDS.get(kind, ["training.base_precision=nf4"])
    place.assert_a_saved_state_goes_on(*given, *more, "ema.post_hoc=[0.05, 0.2]")


@pytest.mark.parametrize(("recomputed", "updates"), [(True, 3), *long([(True, 20), (False, 20)])])
def test_activations_on_the_host_change_no_number(place, monkeypatch, recomputed, updates):
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)  # those of a tiny network are small
    again = [f"training.gradient_checkpointing={str(recomputed).lower()}", "ema.enabled=false"]
    _, losses, whole = trained(place.config(*again), updates)
    parts, found, state = trained(place.config(*again, "training.offload_activations=true", SWAP), updates)
    assert found == losses
    for group, tensors in whole.items():
        assert_equal(state[group], tensors)
    assert parts.offload is not None
    assert parts.offload.host.peak > 0
    assert parts.offload.host.bytes == 0, "what was kept of a pass is gone behind it"


@pytest.mark.long  # of the quick tests, the one of device and host plans blocks that wait
@pytest.mark.parametrize("recomputed", [True, False])
def test_the_plan_leaves_activations_on_the_host_out(place, monkeypatch, recomputed):
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)
    again = [f"training.gradient_checkpointing={str(recomputed).lower()}", "ema.enabled=false"]
    given = {name: place.config(*again, *more) for name, more in (("here", []), ("host", [OFFLOAD]))}
    peaks = {name: predicted(own) for name, own in given.items()}
    # All but weights and what is computed at the moment is elsewhere.
    assert peaks["host"] < peaks["here"]


@pytest.mark.parametrize(("kind", "updates"), [("recomputed int8 bf16", 2), *long((kind, 6) for kind in KINDS)])
def test_two_backward_passes_after_one_forward_pass_find_the_blocks(place, monkeypatch, kind, updates):
    """Of a run that learns the norm of its gradients first, and moves weights in the second pass."""
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)
    _, losses, whole = trained(place.config(*KINDS[kind]), updates, micro_batches=1)
    for more in ([SWAP], [SWAP, OFFLOAD]):
        given = place.config(*KINDS[kind], "optimizer.in_backward=after_norm", *more)
        parts, found, state = trained(given, updates, micro_batches=1)
        assert found == losses
        for group, tensors in whole.items():
            assert_equal(state[group], tensors)
        (swap,) = parts.swaps.values()
        assert 0 < swap.device.peak <= swap.largest_bytes
        assert parts.offload is None or parts.offload.host.bytes == 0 < parts.offload.host.peak


def predicted(given: configs.Config) -> int:
    """Bytes that the passes of a step take in addition to what is held, as they are planned."""
    parts, mesh = outline(given), given.mesh.resolved(1, 1)
    counted = static.count(given, parts, mesh)
    return peak.SimulatedStep(given, parts, counted, accumulates=False, on_gpu=False).peak(4).passes


@pytest.mark.long
def test_a_run_validates_saves_goes_on_draws_and_exports_as_without(place, capsys):
    more = ["training.base_precision=int8"]
    assert place.train("plain", *more) == errors.DONE
    assert place.train("swapped", *more, SWAP, "training.duration=2 steps") == errors.DONE
    assert "5 blocks of unet wait in the host's memory" in capsys.readouterr().out
    assert place.train("swapped", *more, "training.swap_blocks=60%") == errors.DONE
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("plain", group), place.tensors("swapped", group))
    for number in ("learning/loss", "validation/loss"):
        assert place.numbers("plain", number) == place.numbers("swapped", number)
    assert_equal(place.exported("plain"), place.exported("swapped"))
    images = []
    for run, given in (("plain", [SWAP]), ("swapped", ["training.swap_blocks=0"])):
        out = place.folder / f"of {run}"
        command = ["generate", str(place.folder / run), "prompt=a dog", f"out={out}", *given]
        assert main.run(command) == errors.DONE
        assert "with the base in int8" in capsys.readouterr().out
        images.append((out / "000.png").read_bytes())
    assert images[0] == images[1]
    command = ["generate", str(place.folder / "plain"), "prompt=a dog", "training.base_precision=no", f"out={out} no"]
    assert main.run(command) == errors.DONE
    assert "with the base in" not in capsys.readouterr().out


@pytest.mark.long
def test_two_processes_learn_what_they_learn_without(place):
    more = ["training.gradient_checkpointing=true", "training.base_precision=int8"]
    kinds = {"two": more, "two swapped": [*more, SWAP, OFFLOAD]}
    runs = [place.on(name, MESHES["data2"], *own) for name, own in kinds.items()]
    assert forked_runs.together(place.folder, runs) == [[errors.DONE] * 2] * 2
    said = re.search(r"([\d.]+) (MB|kB) of each process \(([\d.]+) (MB|kB) on a node\)", _said(runs[1]))
    assert said
    assert float(said[3]) == pytest.approx(2 * float(said[1]), rel=0.01)
    for group in ("model", "ema", "optimizer"):
        assert_equal(place.tensors("two", group), place.tensors("two swapped", group))
    assert place.numbers("two", "learning/loss") == place.numbers("two swapped", "learning/loss")


def _said(run: dict) -> str:
    return " ".join(Path(f"{run['seen']}.log-0").read_text().split())


def test_the_plan_counts_device_and_host(place):
    """What waits is on no device; the two blocks that compute are among what a step makes."""
    mesh = place.config().mesh.resolved(1, 1)
    found = {}
    for name, more in (("plain", []), ("swapped", [SWAP])):
        given = place.config(*more)
        parts = outline(given)
        count = static.count(given, parts, mesh)
        steps = peak.SimulatedStep(given, parts, count, accumulates=False, on_gpu=False)
        found[name] = parts, count, [steps.peak(1) for _ in range(1 + bool(more))]
    parts, count, (first, again) = found["swapped"]
    _, whole, (before,) = found["plain"]
    (swap,) = build(place.config(SWAP), torch.device("cpu"), trains=True).swaps.values()
    assert count.on_host == swap.held_bytes
    assert count.whole == whole.whole - swap.held_bytes
    assert first == again
    assert before.passes < first.passes <= before.passes + swap.largest_bytes
    assert [line for line in count.notices if "wait in the host's memory" in line] == swapped.notices(
        place.config(SWAP), parts.swaps
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ["adapter.name=full"],
            "the weights of unet are trained, and those that wait .* set optimizer.in_backward=after_norm",
        ),
        (["training.swap_blocks=500"], r"unet has \d+ blocks: set at most"),
        (["training.swap_blocks=1%"], "and 2 are on the device at once: set at least 3"),
        ([OFFLOAD, "training.compile=blocks"], "offload_activations does not work with compile=blocks"),
        (["devices=2", "mesh.ici_fsdp_parallelism=2"], "a mesh with fsdp or tensor has parts of each block"),
    ],
)
def test_what_it_does_not_go_with_is_refused(place, more, why, capsys):
    assert main.run(["plan", str(place.recipe), *place.given(SWAP, *more)]) == errors.REFUSED
    assert re.search(why, " ".join(capsys.readouterr().err.split()))


@dataclass
class Held:
    """Steps that take what is held, and nothing more."""

    count: static.MemoryCount

    def peak(self, micro: int) -> peak.Peak:
        return peak.Peak(micro, self.count.whole, 0, 0, 0)


def test_as_many_blocks_wait_as_a_planned_step_needs(place, monkeypatch):
    monkeypatch.setattr(estimate, "simulated_step", lambda target, parts, count: Held(count))
    given = place.config("training.swap_blocks=auto")

    @cache
    def held(count):
        one = swapped.fixed(given, count)
        return static.count(one, outline(one), one.mesh.resolved(1, 1)).whole

    def found(card):
        def target_of(one):
            return replace(estimate.of(one, one.mesh.resolved(1, 1), None), card=card)

        return waiting.found(given, target_of)

    every = swapped.there(outline(place.config()).family)
    assert found(held(0)) == (0, "training.swap_blocks=auto: no block needs to wait, 0 B stay free")
    for enough in (every, every // 2):
        count, said = found(held(enough))
        assert held(count) <= held(enough)
        assert held(count - 2) > held(enough), "more wait than are needed"
        assert said.startswith(f"training.swap_blocks=auto: {count} of {every} blocks wait, ")
    with pytest.raises(UserError, match=f"and 1 B with all {every} blocks in the host's memory"):
        found(held(every) - 1)
    assert found(None) == (0, "training.swap_blocks=auto: no block waits, as a CPU's memory is the host's")


def test_a_run_and_a_plan_have_the_number_that_was_found(place, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "found", lambda *given: (5, "five wait"))
    assert place.train("open", "training.swap_blocks=auto", "training.duration=1 steps") == errors.DONE
    said = capsys.readouterr().out
    assert "five wait" in said
    assert "5 blocks of unet wait in the host's memory" in said
    assert configs.load(str(place.folder / "open")).config.training.swap_blocks == 5
    for command in (["plan"], ["train", "--dry-run"]):
        assert main.run([*command, str(place.recipe), *place.given("training.swap_blocks=auto")]) == errors.DONE
        assert "five wait" in " ".join(capsys.readouterr().out.split())
    monkeypatch.chdir(place.folder)  # where it writes
    monkeypatch.setattr(peak_rates, "product_flops", lambda device, dtype: 1e11)  # measuring takes seconds
    monkeypatch.setattr(peak_rates, "copy_bytes", lambda device: 1e10)
    assert main.run(["bench", str(place.recipe), *place.given("training.swap_blocks=auto")]) != errors.DONE
    assert "give it, or 0, here" in " ".join(capsys.readouterr().out.split())
