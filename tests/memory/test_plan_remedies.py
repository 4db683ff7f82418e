"""The search for settings that fit a card, with steps whose bytes are a formula; what a terminal shows meanwhile."""

from __future__ import annotations

import io
import shlex
from dataclasses import dataclass, replace

import pytest
import torch
from tiny_runs import TINY

from daguerre.cli import plan
from daguerre.cli.options.plan_options import Options
from daguerre.config import config as configs
from daguerre.memory import estimate, remedies, static
from daguerre.memory.estimate import Step
from daguerre.memory.host import Host
from daguerre.memory.peak import Peak
from daguerre.tracking.progress import Stages
from daguerre.training.performance import peak_rates

GIVEN = [*TINY, "training.device=cpu", "training.global_batch_size=8", "training.per_device_batch_size=4"]


@dataclass
class Formula:
    """A step takes what is held, gradients, and 1 MB a sample; half of that with activations computed again."""

    target: estimate.Target
    count: static.MemoryCount

    def peak(self, micro: int) -> Peak:
        each = 500_000 if self.target.given.training.gradient_checkpointing else 1_000_000
        gradients = self.count.bytes_of("gradients")
        return Peak(micro, self.count.whole - gradients, gradients + micro * each, gradients, 0)


def lacking(card: str) -> tuple[Step, static.MemoryCount]:
    target = target_of([], card)
    parts = target.parts()
    count = static.count(target.config, parts, target.mesh)
    return Step(target, Formula(target, count).peak(4), "fp32", None, ()), count


def target_of(more, card: str):
    return plan.prepared("quickstart", [*GIVEN, *more], Options(card=card))[1]


@pytest.fixture
def found(monkeypatch):
    """The overrides that are found for a card, and how many steps were computed for it."""
    monkeypatch.setattr(estimate, "simulated_step", lambda target, parts, count, say: Formula(target, count))
    bare = estimate.outline
    outlined = {}

    def once(config):
        key = (config.training.weights_dtype, config.training.frozen_precision)
        if key not in outlined:
            outlined[key] = bare(config)
        return outlined[key]

    monkeypatch.setattr(estimate, "outline", once)

    def search(card, typed=()):
        step, count = lacking(card)
        said = []
        fitting = remedies.find(step, count, typed, lambda more: target_of(more, card), said.append)
        return fitting, [line.split("=")[0] for line in said]

    return search


def names(fitting) -> set[str]:
    return {override.partition("=")[0] for override in fitting.given}


def test_what_computes_the_same_comes_first_and_costs_least(found):
    """11.4 MB and a sample of 1; half of that with activations computed again, which takes a third more time."""
    fitting, tried = found("12.0MB")
    assert names(fitting) == {"training.gradient_checkpointing", "training.per_device_batch_size"}
    assert fitting.target.sizes.micro == 1
    assert fitting.target.left(fitting.peak) >= 0
    assert fitting.document()["taken_bytes"] == fitting.target.taken(fitting.peak) <= 12.0e6
    assert len(tried) <= 2, "what takes more than one that had no room is not planned"


def test_the_order_is_that_of_what_is_learnt_then_of_the_predicted_time():
    """Blocks and encoders that wait change no number, so they come before a base of 8 bits, however slow the link."""
    given = ["data.source=folder", "data.path=x", "run_name=x"]
    target = plan.prepared("sd15_lora", given, Options(card="4GB", ram="64GB"))[1]
    count = static.count(target.config, target.parts(), target.mesh)
    kept = {kind: float(count.bytes_of(kind)) for kind in static.KINDS}
    rates = replace(peak_rates.of_card("RTX 4060", torch.bfloat16), link=1e9)
    host = Host({}, {}, {}, rates, 2.0, None)
    step = Step(target, Peak(1, 0, 0, 0, 0), "bf16", None, (), host)
    likely = remedies._likely(step, count, kept, ())
    costs = [remedies._cost(step, chosen) for chosen in likely]
    assert costs == sorted(costs)
    alone = {chosen[0].given[0]: remedies._cost(step, chosen) for chosen in likely if len(chosen) == 1}
    base, times = count.bytes_of("weights") + count.bytes_of("quantized"), target.sizes.accumulation
    harm, seconds, _ = alone["training.swap_blocks=100%"]
    assert (harm, seconds) == (0, pytest.approx(2 * base * times / 1e9))
    readers = sum(each.kinds.get("frozen", 0) for each in count.held if each.component == "text_encoder")
    assert alone["training.text_encoders=offload"][1] == pytest.approx(2.0 + readers * times / 1e9)
    assert alone["training.swap_blocks=100%"] < alone["training.base_precision=int8"]
    together = [{remedy.name for remedy in chosen} for chosen in likely]
    assert not any(pair <= chosen for pair in ({"cache", "readers"}, {"int8", "nf4"}) for chosen in together)


@pytest.mark.long  # of the quick tests, what computes the same comes first
def test_then_moments_and_averages_then_weights(found):
    fitting, _ = found("10MB")
    assert "training.weights_dtype" not in names(fitting)
    assert {"optimizer.name", "optimizer.learning_rate"} <= names(fitting) or "ema.enabled" in names(fitting)
    rate = configs.load("quickstart").config.optimizer.learning_rate
    small, _ = found("7MB")
    assert {"optimizer.name", "ema.enabled", "training.weights_dtype"} <= names(small)
    assert small.target.given.optimizer.learning_rate == rate, "the recipe's rate stays"


def test_what_the_user_has_typed_stays(found):
    fitting, _ = found("10MB", typed={"ema.enabled"})
    assert "ema.enabled" not in names(fitting)
    assert found("7MB", typed={"ema.enabled", "optimizer.name"})[0] is None


def test_a_rate_that_the_user_has_typed_goes_with_another_optimizer(found):
    """Only a recipe's own is said again; with it, the optimizer was left out of what is tried."""
    fitting, _ = found("7MB", typed={"optimizer.learning_rate"})
    assert "optimizer.name=adafactor" in fitting.given
    assert "optimizer.learning_rate" not in names(fitting)


def test_nothing_fits(found):
    assert found("1MB") == (None, [])


def test_a_smaller_micro_batch_is_enough(found, monkeypatch):
    step, count = lacking("14MB")
    largest = Formula(step.target, count).peak(2)
    step = Step(step.target, step.peak, "fp32", largest, ())
    fitting = remedies.find(step, count, (), lambda more: target_of(more, "14MB"), lambda stage: None)
    assert fitting.given == ("training.per_device_batch_size=2",)


def test_several_devices_split_what_they_hold_but_not_for_adafactor():
    options = Options(devices=4, card="10MB")
    given = [word for word in GIVEN if word not in ("training.device=cpu", "training.per_device_batch_size=4")]
    target = plan.prepared("quickstart", given, options)[1]
    count = static.count(target.config, target.parts(), target.mesh)
    monstrous = replace(target, card=1 << 40)
    step = Step(monstrous, Formula(monstrous, count).peak(4), "fp32", None, ())
    together = [{remedy.name for remedy in chosen} for chosen in remedies._likely(step, count, {}, ())]
    assert any("fsdp" in chosen for chosen in together)
    assert any("moments" in chosen for chosen in together)
    assert not any({"fsdp", "moments"} <= chosen for chosen in together)
    split = plan.prepared("quickstart", [*given, "mesh.ici_fsdp_parallelism=4"], options)[1]
    assert not {"fsdp", "moments"} & {remedy.name for remedy in remedies.remedies(split.given, split, count)}


def test_the_command_is_whole_and_can_be_pasted(found):
    fitting, _ = found("12.5MB")
    kept = remedies.without_batch_cut(["run_name=a b", "per_batch_size=4", "training.gradient_accumulation_steps=2"])
    assert kept == ["run_name=a b"]
    command = ("daguerre", "train", "quickstart", *kept, *fitting.given)
    lines = remedies.Fitting(fitting.target, fitting.peak, fitting.given, command).lines()
    assert max(map(len, lines)) <= 98
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines[1:])) == list(command)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_stages_keep_one_line_on_a_terminal_and_are_lines_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Stages(stream) as stages:
            stages.say("one")
            stages.say("two")
    assert log.getvalue() == "planning: one\nplanning: two\n"
    assert "planning: one ...\r\x1b[2Kplanning: two ..." in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_a_host_without_room_writes_saves_without_a_copy(found):
    """Where neither averages nor moments may change, and smaller batches are not enough."""
    options = Options(card="1GB", ram="1GB")
    target = plan.prepared("quickstart", GIVEN, options)[1]
    parts = target.parts()
    count = static.count(target.config, parts, target.mesh)
    peak = Formula(target, count).peak(4)
    host = estimate.host_of(target, parts, count, peak)
    least = count.whole + 500_000  # one sample, activations computed again
    ram = host.memory - host.training["tensors"] + least - host.training["the copy of a save"] // 2
    step = Step(replace(target, ram=ram), peak, "fp32", peak, (), host)
    assert step.fits_device
    assert not step.fits

    def again(more):
        return replace(plan.prepared("quickstart", [*GIVEN, *more], options)[1], ram=ram)

    fitting = remedies.find(step, count, {"ema.enabled", "optimizer.name"}, again, lambda stage: None)
    assert "checkpoint.background=false" in fitting.given
    assert fitting.host.memory <= ram
