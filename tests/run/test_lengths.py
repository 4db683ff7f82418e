"""Lengths in samples and epochs of a run that goes on with another batch or another data set: all are counted in what
was trained on. The arithmetic: tests/training/test_pace.py."""

from __future__ import annotations

import json
from pathlib import Path

import data_sets
import pytest
from tiny_runs import lines

from daguerre import errors
from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError
from daguerre.run import lengths, schedule
from daguerre.run.resume import StartPoint
from daguerre.settings import Duration
from daguerre.training.pace import Pace

RECIPE = """
extends: quickstart
run_name: run
model:
  unet:
    block_out_channels: [16, 16]
    down_block_types: [DownBlock2D, CrossAttnDownBlock2D]
    up_block_types: [CrossAttnUpBlock2D, UpBlock2D]
    attention_head_dim: 1
data: {source: folder, resolution: 16, held_out_fraction: 0.2}
training: {global_batch_size: 4}
lr_scheduler: {name: constant}
optimizer: {learning_rate: 1.0e-3}
validation: {every: 1 epochs, num_samples: 1, num_levels: 1}
checkpoint: {every: 1 epochs, keep: 9, export: false}
sampling: {num_images: 0}
logging: {every: 20 samples, tensorboard: false}
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "mine.yaml").write_text(RECIPE)
        data_sets.folder(folder / "images", 40)
        data_sets.folder(folder / "fewer", 20)

    def train(self, duration: str, *given: str, data: str = "images") -> int:
        place = [f"output_dir={self.folder}", f"data.path={self.folder / data}", f"training.duration={duration}"]
        return main.run(["train", str(self.folder / "mine.yaml"), *place, *given])

    @property
    def steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in sorted((self.run / "checkpoints").glob("step-*"))]

    def logged(self, name: str) -> list[int]:
        return [line["step"] for line in lines(self.run) if name in line]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


BATCH = ["training.global_batch_size=8", "allow_change=[training.global_batch_size]"]


@pytest.mark.long  # of the quick tests, training/test_pace.py counts so
def test_after_another_batch_all_lengths_are_counted_in_samples(place, capsys):
    warm = ["data.held_out_fraction=0", "lr_scheduler.warmup=60 samples"]
    assert place.train("1 epochs", *warm) == errors.DONE
    assert place.steps == [10]
    assert place.train("2 epochs", *warm, *BATCH) == errors.DONE
    state = json.loads((place.run / "status.json").read_text())
    assert (state["step"], state["samples"]) == (15, 80)
    assert place.steps == [10, 15]
    assert place.logged("learning/loss") == [5, 10, 13, 15], "20, 40, 60 and 80 samples, at the first update after each"
    # The warm-up ends with a whole update: after 60 samples at first, then after 64.
    rates = {
        line["step"]: line["learning/current_learning_rate"] for line in lines(place.run) if "learning/loss" in line
    }
    assert rates == pytest.approx({5: 16 / 60 * 1e-3, 10: 36 / 60 * 1e-3, 13: 56 / 64 * 1e-3, 15: 1e-3})
    capsys.readouterr()
    assert place.train("2 epochs", *warm, "training.global_batch_size=8") == errors.DONE
    assert "this run is finished: 15 updates" in capsys.readouterr().out


@pytest.mark.long  # of the quick tests, lengths are counted after another batch and more pictures
def test_after_another_data_set_epochs_are_of_the_size_of_their_time(place):
    assert place.train("1 epochs") == errors.DONE
    (first,) = place.steps
    sizes = [len(list((place.folder / name).glob("*.jpg"))) for name in ("images", "fewer")]
    assert place.train("3 epochs", "allow_change=[data]", data="fewer") == errors.DONE
    held = json.loads((place.run / "data.json").read_text())["count"]
    assert 0 < held < sizes[1]
    expected = [first, first + -(-held // 4), first + -(-2 * held // 4)]
    assert place.steps == expected
    assert place.logged("validation/loss") == expected


def load(*given: str):
    return configs.load("quickstart", ["lr_scheduler.warmup=0 steps", *given]).config


def beginning(config, done, pace):
    known = {"duration": config.training.duration, "lr_scheduler": config.lr_scheduler.model_dump(mode="json")}
    documents = {"state": {"step": done, "slots": int(pace.position(done, "samples"))}, "pace": pace.document()}
    return StartPoint(Path(f"step-{done:08d}"), documents, 8, [], known)


@pytest.mark.parametrize("choice", ["hold", "decay"])
def test_a_stage_ends_where_its_samples_do(choice):
    """First the length changes, then the batch: what was planned for 400 samples ends there, and no rate jumps."""
    falls = ["lr_scheduler.name=linear", "lr_scheduler.final=0.1"]
    old, pace = load(*falls, "training.duration=400 samples"), Pace.of(4, None)
    longer = load(*falls, "training.duration=800 samples", f"lr_scheduler.on_new_duration={choice}")
    chosen, _ = schedule.settled(longer, beginning(old, 50, pace), BatchSizes(4, 4), pace)
    steady = schedule.loop_config(chosen, BatchSizes(4, 4), pace)
    assert chosen.lr_scheduler.stages[0].ends == "400 samples"
    again = load(*falls, "training.duration=800 samples")
    for _ in range(2):  # as if the first start had been killed before it saved
        start = beginning(chosen, 60, pace)
        after = schedule.pace_of(start, BatchSizes(8, 8), None)
        found, told = schedule.settled(again, start, BatchSizes(8, 8), after)
        assert not told
        changed = schedule.loop_config(found, BatchSizes(8, 8), after)
        assert changed.total_steps == 60 + (800 - 240) // 8
        for step in range(61):
            assert changed.share_at(step) == pytest.approx(steady.share_at(step))
        for step in range(60, changed.total_steps):
            assert changed.share_at(step) == pytest.approx(steady.share_at(60 + 2 * (step - 60)))
        chosen = chosen.model_copy(update={"lr_scheduler": found.lr_scheduler})


def test_a_checkpoint_that_says_no_pace_has_its_samples(tmp_path):
    """As versions up to 0.1.0 saved it."""
    start = StartPoint(Path("step-00000010"), {"state": {"step": 10, "slots": 60}}, 8, [], {})
    pace = schedule.pace_of(start, BatchSizes(8, 8), 40)
    config = load("training.duration=100 samples")
    assert schedule.intervals(config, pace).total == 15
    assert pace.position(10, "epochs") == 1.5
    same = StartPoint(Path("step-00000010"), {"state": {"step": 10, "slots": 80}}, 8, [], {})
    assert schedule.pace_of(same, BatchSizes(8, 8), 40) == Pace.of(8, 40)


@pytest.mark.parametrize(
    ("text", "epoch", "plain"),
    [
        ("4 epochs up to 64k samples", 225, "900 samples"),
        ("4 epochs up to 64k samples", 475, "1900 samples"),
        ("4 epochs up to 64k samples", 30_525, "64k samples"),
        ("4 epochs up to 64k samples", None, "64k samples"),
        ("4 epochs up to 100 steps", 225, "100 steps"),
        ("4 epochs up to 1k steps", 225, "900 samples"),
        ("3 epochs", 225, "3 epochs"),
    ],
)
def test_a_length_that_follows_the_data(text, epoch, plain):
    assert str(Duration(text)) == text
    assert str(Duration(text).plain(epoch, 4)) == plain


@pytest.mark.parametrize(
    "text",
    [
        *("4 epochs up to 3 epochs", "4 steps up to 3 steps", "4 samples up to 1k samples", "1 epochs up to"),
        *("up to 3 steps", "1 epochs up to 3 steps up to 2 steps"),
    ],
)
def test_what_is_no_such_length(text):
    with pytest.raises(UserError, match="is not a duration"):
        Duration(text)


@pytest.mark.parametrize("field", ["warmup", "decay"])
def test_epochs_up_to_a_limit_may_be_shorter_than_fewer_epochs(field):
    """A warm-up of 10 samples fits into a run of one epoch, whatever number of epochs it is the limit of."""
    given = ["training.duration=1 epochs", "lr_scheduler.name=warmup_stable_decay", "lr_scheduler.warmup=0 epochs"]
    limited = load(*given, f"lr_scheduler.{field}=5 epochs up to 10 samples")
    sized, _ = lengths.fixed(limited, {}, 100, 4)
    assert getattr(sized.lr_scheduler, field) == "10 samples"
    with pytest.raises(ConfigError, match=r"longer than the run"):
        load(*given, f"lr_scheduler.{field}=5 epochs")


@pytest.mark.parametrize("recipe", ["sd15_lora", "sdxl_lora", "cascade_c_lora"])
@pytest.mark.parametrize(("pictures", "samples"), [(3, 300), (10, 1000), (20, 2000), (2000, 64_000)])
def test_recipes_of_loras_size_themselves_by_the_pictures(recipe, pictures, samples):
    """An epoch holds a batch from one picture on, and each is seen a hundred times, as far as that goes."""
    config = configs.load(recipe, ["data.source=folder", "data.path=there"]).config
    (source,) = config.data.sources.values()
    epoch = source.repeats * pictures
    assert epoch >= config.training.global_batch_size
    sized, notices = lengths.fixed(config, {}, epoch, config.training.global_batch_size)
    (said,) = notices
    length = f"training.duration='4 epochs up to 64k samples' is {sized.training.duration}"
    assert said.startswith(f"with this number of samples {length}; checkpoint.every=")
    known = lengths.recorded(sized)
    assert not lengths.fixed(config, known, epoch, config.training.global_batch_size)[1], (
        "said at the first start alone"
    )
    assert Pace.of(4, epoch).steps(sized.training.duration) * 4 == samples
    every = Pace.of(4, epoch).steps(sized.checkpoint.every)
    assert 4 <= -(-samples // 4 // every) <= 8
    assert sized.lr_scheduler.warmup.number <= samples // 8


@pytest.mark.parametrize(("epoch", "told"), [(25, True), (40, True), (41, False), (475, False)])
def test_a_warmup_that_is_half_of_what_few_pictures_make_is_told(epoch, told):
    """Of one picture a hundred views are 25 updates, and the warm-up of the recipes is 20."""
    config = configs.load("sdxl_lora", ["data.source=folder", "data.path=there"]).config
    sized, notices = lengths.fixed(config, {}, epoch, 4)
    said = [each for each in notices if "the warm-up is 20 of the run's" in each]
    assert bool(said) == told
    if epoch == 25:
        assert "of the run's 25 updates" in said[0]
        assert "training.duration='800 samples'), or warm up for less (lr_scheduler.warmup='3 steps')" in said[0]
    assert not lengths.fixed(config, lengths.recorded(sized), epoch, 4)[1], "said at the first start alone"


@pytest.mark.long  # of the quick tests, test_new_duration.py has lengths
def test_the_length_of_the_first_start_holds_when_pictures_are_added(place, capsys):
    """32 of 40 images are trained on: 2 epochs are 16 updates; with 16 left the same command is still as long."""
    following = "2 epochs up to 1k samples"
    assert place.train(following, "checkpoint.every=1 epochs up to 16 samples") == errors.DONE
    assert place.steps == [4, 8, 12, 16]
    recorded = configs.load(str(place.run)).config
    assert (recorded.training.duration, recorded.checkpoint.every) == ("64 samples", "16 samples")
    assert place.train(following) == errors.DONE
    assert " stays " not in capsys.readouterr().out
    assert place.train(following, "allow_change=[data]", data="fewer") == errors.DONE
    assert place.steps == [4, 8, 12, 16]
    said = "training.duration stays '64 samples', which this run was begun with: '{}' would be"
    assert said.format(following) in capsys.readouterr().out
    for more in ([], ["--dry-run"]):
        assert place.train("4 epochs up to 8k samples", *more) == errors.DONE
        told = " ".join(capsys.readouterr().out.split())
        assert said.format("4 epochs up to 8k samples") + " '128 samples' today" in told
    assert place.steps == [4, 8, 12, 16]
