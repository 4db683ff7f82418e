"""A run that is shorter than its recipe's warm-up: the warm-up keeps its share; what a command gives is not touched."""

import pytest

from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.formatting import counted
from daguerre.run import summary
from daguerre.run.schedule import Intervals, intervals, loop_config
from daguerre.training.pace import Pace


def load(*given, recipe="quickstart"):
    """The learning rate's settings and what is said."""
    loaded = configs.load(str(recipe), given)
    return loaded.config.lr_scheduler, " ".join(loaded.notices)


@pytest.mark.parametrize(
    ("duration", "warmup"),
    [("20 steps", "1 steps"), ("49 steps", "2 steps"), ("320 samples", "1 steps"), ("0 steps", "0 steps")],
)
def test_the_warmup_of_a_recipe_keeps_its_share_of_a_short_run(duration, warmup):
    found, said = load(f"training.duration={duration}")
    assert found.warmup == warmup
    assert f'training.duration is "{duration}", too short for the recipe\'s lr_scheduler.warmup of "50 steps"' in said
    assert f"it takes {counted(int(warmup.split()[0]), 'update')} here" in said


@pytest.mark.parametrize("duration", ["50 steps", "1k steps", "1600 samples", "9k steps"])
def test_a_warmup_that_fits_stays(duration):
    found, said = load(f"training.duration={duration}")
    assert (found.warmup, said) == ("50 steps", "")


def test_a_warmup_that_the_command_gives_is_refused_where_it_is_too_long():
    with pytest.raises(ConfigError, match=r"lr_scheduler\.warmup = \"21 steps\"\n *is longer than the run"):
        load("training.duration=20 steps", "lr_scheduler.warmup=21 steps")
    found, said = load("training.duration=20 steps", "lr_scheduler.warmup=20 steps")
    assert (found.warmup, said) == ("20 steps", "")


def test_a_recipe_that_is_shorter_than_the_one_it_extends(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nrun_name: mine\ntraining: {duration: 20 steps}\n")
    assert load(recipe=path)[0].warmup == "1 steps"
    path.write_text("extends: quickstart\ntraining: {duration: 20 steps}\nlr_scheduler: {warmup: 30 steps}\n")
    with pytest.raises(ConfigError, match="longer than the run"):
        load(recipe=path)


def test_the_decay_of_a_recipe_is_shortened_as_well(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: quickstart\n"
        "lr_scheduler: {name: warmup_stable_decay, warmup: 100 steps, decay: 500 steps}\n"
        "training: {duration: 1000 steps}\n"
    )
    found, said = load("training.duration=300 steps", recipe=path)
    assert (found.warmup, found.decay) == ("30 steps", "150 steps")
    assert "lr_scheduler.decay" in said
    found, _ = load("training.duration=10 epochs", recipe=path)
    assert (found.warmup, found.decay) == ("100 steps", "500 steps"), "how long an epoch is, the data tell"


def test_where_only_the_data_tell_it_is_said_at_the_start():
    def said(warmup, total):
        return summary.describe_warmup(Intervals(total, warmup, 0, 10, None, None, None))

    assert said(50, 50) == said(50, 0) == []
    assert "never reaches its peak" in said(500, 21)[0]
    assert "lr_scheduler.warmup='3 steps'" in said(500, 21)[0]


def test_a_run_that_is_to_log_nothing_logs_its_end():
    config = configs.load("quickstart", ["logging.every=null"]).config
    assert not loop_config(config, BatchSizes(16, 16), Pace.of(16, None)).logs(1750), "the loop logs its end by itself"
    often = configs.load("quickstart", ["logging.every=10000000000 steps"]).config
    log = intervals(often, Pace.of(16, None)).log
    assert (log(10**10), log(10**10 - 1)) == (True, False)
