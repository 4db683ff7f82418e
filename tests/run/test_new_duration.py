"""A run that goes on with another training.duration while its learning rate falls: asked, exact over restarts."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from tiny_runs import assert_equal, lines, outcome, train

from daguerre import errors
from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.run import schedule
from daguerre.run.resume import StartPoint
from daguerre.training import step
from daguerre.training.pace import Pace

SIZES = BatchSizes(16, 16)
RUN = ["training.duration=60 steps", "lr_scheduler.warmup=10 steps"]


def load(*given):
    return configs.load("quickstart", [*RUN, *given]).config


def beginning(config, done):
    """What the folder of a run holds that did so many updates by this config."""
    schedule = {"duration": config.training.duration, "lr_scheduler": config.lr_scheduler.model_dump(mode="json")}
    checkpoint = None if done is None else Path(f"step-{done:08d}")
    state = {"step": done, "slots": 16 * (done or 0)}
    return StartPoint(checkpoint, {"state": state}, 16, [], schedule)


def settled(old, new, done):
    return schedule.settled(new, beginning(old, done), SIZES, Pace.of(16, None))


def rates(config):
    found = schedule.loop_config(config, SIZES, Pace.of(16, None))
    return [found.share_at(step) for step in range(found.total_steps)]


LONGER = "training.duration=70 steps"
FALLING = ["linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"]


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize(("done", "length"), [(60, 70), (58, 70), (58, 59)])
def test_a_falling_rate_is_not_stretched_unasked(name, done, length):
    """Nor bent: a shorter run is another schedule as well."""
    given = [f"lr_scheduler.name={name}", "lr_scheduler.final=0.1"]
    old, new = load(*given), load(*given, f"training.duration={length} steps")
    with pytest.raises(UserError) as refusal:
        settled(old, new, done)
    said = str(refusal.value)
    assert f"planned for 60 updates with a learning rate that falls until then (lr_scheduler.name={name})" in said
    for choice in ("stretch", "hold", "decay"):
        assert f"lr_scheduler.on_new_duration={choice}" in said


@pytest.mark.parametrize(
    ("given", "done", "length"),
    [
        (["lr_scheduler.name=constant"], 60, 70),
        (["lr_scheduler.name=constant"], 30, 40),
        (["lr_scheduler.name=linear"], 8, 70),
        (["lr_scheduler.name=linear", "lr_scheduler.final=1"], 60, 70),
        (["lr_scheduler.name=warmup_stable_decay"], 50, 70),
        (["lr_scheduler.name=linear"], 60, 60),
        (["lr_scheduler.name=linear"], 60, 50),
        (["lr_scheduler.name=linear"], None, 70),
    ],
    ids=["constant", "shorter", "warming up", "flat", "before the decay", "the same", "over", "nothing done"],
)
def test_where_nothing_jumps_nothing_is_asked(given, done, length):
    old, new = load(*given), load(*given, f"training.duration={length} steps")
    found, told = settled(old, new, done)
    assert (found, told) == (new, [])


def test_stretch_is_the_schedule_of_the_new_duration_and_says_what_jumps():
    old, new = load(), load(LONGER, "lr_scheduler.on_new_duration=stretch")
    found, told = settled(old, new, 60)
    assert rates(found) == rates(load(LONGER))
    assert "was 2 % of its peak in update 60, is 16.7 % in the next one and 1.67 % in the last" in told[0]


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("done", [30, 57, 60])
def test_hold_keeps_the_old_schedule_and_then_its_last_rate(name, done):
    given = [f"lr_scheduler.name={name}", "lr_scheduler.final=0.1"]
    old, new = load(*given), load(*given, LONGER, "lr_scheduler.on_new_duration=hold")
    found, _ = settled(old, new, done)
    if name == "warmup_stable_decay" and done == 30:  # nothing to ask: all updates done were at the peak
        assert rates(found) == rates(load(*given, LONGER))
        return
    assert rates(found) == rates(old) + [pytest.approx(0.1)] * 10


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("done", [57, 60])
def test_a_new_decay_begins_where_the_rate_stands_and_ends_at_the_final_one(name, done):
    given = [f"lr_scheduler.name={name}", "lr_scheduler.final=0.1"]
    old, new = load(*given), load(*given, LONGER, "lr_scheduler.on_new_duration=decay")
    found, _ = settled(old, new, done)
    before, after = rates(old), rates(found)
    assert after[:done] == before[:done]
    assert after[done] == pytest.approx(before[done] if done < 60 else 0.1)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after[done:], after[done + 1 :], strict=False))
    assert after[-1] >= 0.1 - 1e-12
    again = load(*given, LONGER, "lr_scheduler.on_new_duration=decay", "lr_scheduler.restart_from=0.5")
    after = rates(settled(old, again, done)[0])
    assert after[:done] == before[:done]
    assert after[done] == 0.5
    assert after[-1] < 0.2


@pytest.mark.parametrize("choice", ["hold", "decay"])
def test_a_rate_of_nothing_is_refused_with_the_way_out(choice):
    old, new = load(), load(LONGER, f"lr_scheduler.on_new_duration={choice}")
    with pytest.raises(UserError, match=r"nothing more would be learnt.*lr_scheduler.restart_from=0.1"):
        settled(old, new, 60)
    found, _ = settled(old, load(LONGER, f"lr_scheduler.on_new_duration={choice}", "lr_scheduler.restart_from=0.1"), 60)
    assert rates(found)[:60] == rates(old)
    assert rates(found)[60] == 0.1


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_a_shorter_run_that_holds_is_cut_off(name):
    """Its rate stays that of the old schedule, and does not come to the end where it would be nothing."""
    given = [f"lr_scheduler.name={name}"]
    shorter = load(*given, "training.duration=50 steps", "lr_scheduler.on_new_duration=hold")
    found, told = settled(load(*given), shorter, 40)
    assert rates(found) == rates(load(*given))[:50]
    assert "50 updates instead of 60 (lr_scheduler.on_new_duration=hold)" in told[0]
    again, _ = settled(
        found, load(*given, LONGER, "lr_scheduler.on_new_duration=hold", "lr_scheduler.restart_from=0.1"), 50
    )
    assert rates(again)[:50] == rates(found)
    assert rates(again)[-1] > 0


def test_what_was_chosen_holds_for_good():
    """Over restarts of the same command or of another, and over the next change."""
    old = load("lr_scheduler.final=0.1")
    chosen, _ = settled(old, load("lr_scheduler.final=0.1", LONGER, "lr_scheduler.on_new_duration=decay"), 57)
    for given in ([], ["lr_scheduler.on_new_duration=hold"], ["lr_scheduler.on_new_duration=decay"]):
        again, told = settled(chosen, load("lr_scheduler.final=0.1", LONGER, *given), 60)
        assert rates(again) == rates(chosen)
        assert not told
    with pytest.raises(UserError, match="planned for 70 updates"):
        settled(chosen, load("lr_scheduler.final=0.1", "training.duration=80 steps"), 66)
    more = load("lr_scheduler.final=0.1", "training.duration=80 steps", "lr_scheduler.on_new_duration=hold")
    held, _ = settled(chosen, more, 66)
    assert rates(held) == rates(chosen) + [pytest.approx(0.1)] * 10
    grown, told = settled(held, load("lr_scheduler.final=0.1", "training.duration=90 steps"), 80)
    assert rates(grown) == rates(held) + [pytest.approx(0.1)] * 10
    assert not told, "a rate that is held may be held longer"
    back, _ = settled(grown, load("lr_scheduler.final=0.1", LONGER, "lr_scheduler.on_new_duration=hold"), 30)
    assert rates(back) == rates(grown)[:70], "from an older checkpoint the same schedule"


def test_the_fall_of_warmup_stable_decay_stays_the_tenth_that_it_was():
    given = ["lr_scheduler.name=warmup_stable_decay", "lr_scheduler.final=0.1"]
    found, _ = settled(load(*given), load(*given, "training.duration=200 steps", "on_new_duration=hold"), 60)
    assert rates(found)[:60] == rates(load(*given))


def test_the_schedule_is_a_function_of_what_is_recorded(tmp_path):
    old = load("lr_scheduler.final=0.1")
    found, _ = settled(old, load("lr_scheduler.final=0.1", LONGER, "lr_scheduler.on_new_duration=decay"), 57)
    (tmp_path / "config.yaml").write_text(configs.dump(found))
    assert rates(configs.load(str(tmp_path / "config.yaml")).config) == rates(found)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(configs.ConfigError, match=r"restart_from = 0\.1\n +it is for hold and decay"):
        load("lr_scheduler.restart_from=0.1")
    with pytest.raises(configs.ConfigError, match=r"on_new_duration"):
        load("lr_scheduler.name=constant", "lr_scheduler.on_new_duration=hold")
    stage = "{start: %d, planned: 60, name: hold, share: 0.1}"
    with pytest.raises(configs.ConfigError, match="each stage must begin after"):
        load(f"lr_scheduler.stages=[{stage % 60}, {stage % 50}]")


SHORT = ["sampling.num_images=0", "checkpoint.export=false", "data.checked_prompts=1", "validation.every=100 steps"]
CHOSEN = ["training.duration=12 steps", "lr_scheduler.on_new_duration=decay", "lr_scheduler.restart_from=0.5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of eight updates."""
    folder = tmp_path_factory.mktemp("finished")
    assert train(folder, *SHORT) == errors.DONE
    return folder / "tiny"


def learning_rates(run):
    return {line["step"]: line["learning/current_learning_rate"] for line in lines(run) if "learning/loss" in line}


@pytest.mark.long
def test_a_finished_run_grows_by_what_is_chosen_and_goes_on_exactly(finished, tmp_path, monkeypatch, capsys):
    given = [*SHORT, "logging.every=1 step"]
    for name in ("whole", "parts"):
        shutil.copytree(finished, tmp_path / name / "tiny")
    before = (tmp_path / "whole" / "tiny" / "config.yaml").read_bytes()
    assert train(tmp_path / "whole", *given, "training.duration=12 steps") == errors.REFUSED
    assert "lr_scheduler.on_new_duration=stretch" in capsys.readouterr().err
    assert (tmp_path / "whole" / "tiny" / "config.yaml").read_bytes() == before
    assert json.loads((tmp_path / "whole" / "tiny" / "status.json").read_text())["state"] == "finished"

    assert train(tmp_path / "whole", *given, *CHOSEN) == errors.DONE
    expected = outcome(tmp_path / "whole" / "tiny")
    found = learning_rates(tmp_path / "whole" / "tiny")
    assert [found[step] for step in range(9, 13)] == pytest.approx([7.5e-4 * (1 - i / 4) for i in range(4)])

    unharmed, calls = step.update, []

    def signalled(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", signalled)
        assert train(tmp_path / "parts", *given, *CHOSEN) == errors.TERMINATED
    assert main.run(["train", str(tmp_path / "parts" / "tiny")]) == errors.DONE  # as it was recorded
    assert_equal(tmp_path / "parts" / "tiny", expected)
    recorded = configs.load(str(tmp_path / "parts" / "tiny")).config.lr_scheduler
    assert (recorded.on_new_duration, recorded.restart_from) == ("refuse", None), "a choice is for one start"
    assert [stage.model_dump() for stage in recorded.stages] == [
        {"start": 8, "planned": 8, "name": "decay", "share": 0.5}
    ]
