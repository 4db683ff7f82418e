"""Settings that `allow_change` names, in commands: what starts from nothing is said, config.yaml is written once an
update is made with them, and a run that is killed before goes on in either way. Its state: test_change.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_runs
from PIL import Image
from tiny_runs import assert_equal, outcome

from daguerre import errors
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.config import config
from daguerre.errors import UserError
from daguerre.run.resume import check_same_recipe
from daguerre.training import step

SMALL = ["sampling.num_images=0", "checkpoint.export=false", "data.checked_prompts=1", "validation.every=99 steps"]
SMALL += ["checkpoint.every=99 steps", "lr_scheduler.name=constant"]
LION = ["optimizer.name=lion", "optimizer.learning_rate=1e-4", "training.duration=4 steps", "allow_change=[optimizer]"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def train(folder: Path, *given: str) -> int:
    return tiny_runs.train(folder, *SMALL, "training.duration=2 steps", *given)


def killed(monkeypatch, at: int, act) -> None:
    """The run dies before its update of this number."""
    original, calls = step.update, []

    def update(*arguments, **named):
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", update)
        with pytest.raises(Killed):
            act()


DPO = ["objective.name=dpo", "data.preferred_size=large", "data.caption_dropout=0", "ema.enabled=false"]
LCM = ["objective.name=lcm", "data.caption_dropout=0"]


@pytest.mark.parametrize(
    ("old", "new", "networks"),
    [
        ([], DPO, "reference"),
        ([], [*LCM, "objective.teacher.path=a"], "teacher"),
        ([*LCM, "objective.teacher.path=a"], [], "teacher"),
        (DPO, [], ""),
    ],
)
def test_another_loss_is_not_proposed_where_checkpoints_do_not_know_its_networks(old, new, networks, tmp_path):
    before, after = (config.load("quickstart", ["training.global_batch_size=2", *own]).config for own in (old, new))
    with pytest.raises(UserError) as refusal:
        check_same_recipe(before, after, RunFolder(tmp_path))
    assert ("allow_change='[" in str(refusal.value)) is (not networks)
    after = after.model_copy(update={"allow_change": ["objective", "data", "ema"]})
    if not networks:
        assert check_same_recipe(before, after, RunFolder(tmp_path))
        return
    with pytest.raises(UserError, match=f"its loss has other networks .{networks}., and checkpoints stand on those"):
        check_same_recipe(before, after, RunFolder(tmp_path))


LORA = "adapters.lora={name: lora, rank: 4}"


@pytest.mark.parametrize(
    ("new", "goes_on"),
    [
        ("adapters.lora={name: lora, rank: 8}", False),
        ("adapters.lora={name: lora, rank: 4, kind: dora}", False),
        ("adapters.lora={name: lora, rank: 4, targets: [to_q]}", False),
        ("adapters.lora={name: full}", False),
        ("adapters.lora={name: lora, rank: 4, alpha: 2}", True),
        ("adapters.lora={name: lora, rank: 4, dropout: 0.1}", True),
    ],
)
def test_other_weights_to_train_are_not_proposed(new, goes_on, tmp_path):
    before, after = (
        config.load("quickstart_lora", ["training.global_batch_size=2", own]).config for own in (LORA, new)
    )
    with pytest.raises(UserError) as refusal:
        check_same_recipe(before, after, RunFolder(tmp_path))
    assert ("allow_change='[" in str(refusal.value)) is goes_on
    after = after.model_copy(update={"allow_change": ["adapters"]})
    if goes_on:
        assert check_same_recipe(before, after, RunFolder(tmp_path))
        return
    with pytest.raises(UserError, match="checkpoints have the weights of adapters"):
        check_same_recipe(before, after, RunFolder(tmp_path))


@pytest.mark.long  # six starts; of the quick tests, data/test_loader.py
def test_other_data_and_a_crash_before_they_are_in_a_checkpoint(tmp_path, monkeypatch, capsys):
    for name, count in (("few", 3), ("more", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (64, 64), (40 * number, 90, 0)).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text("a cat", encoding="utf-8")
    kept = [each for each in (*tiny_runs.TINY, *SMALL) if not each.startswith(("data.", "validation."))]
    command = ["train", "quickstart", f"output_dir={tmp_path}", *kept, "validation.every=null", "data.source=folder"]

    def on(folder: str, *given: str) -> int:
        return main.run([*command, f"data.path={tmp_path / folder}", *given])

    assert on("few", "training.duration=2 steps") == errors.DONE
    longer = "training.duration=4 steps"
    assert on("more", longer) == errors.REFUSED
    assert "continue on the data as they are with allow_change=[data]" in capsys.readouterr().err
    killed(monkeypatch, 1, lambda: on("more", longer, "allow_change=[data]"))
    assert on("more", longer) == errors.REFUSED, "nothing was made with them"
    killed(monkeypatch, 2, lambda: on("more", longer, "allow_change=[data]"))
    assert on("more", longer) == errors.DONE


@pytest.mark.long  # five runs; another one changes averages
def test_another_optimizer_and_a_crash_on_the_way_there(tmp_path, monkeypatch, capsys):
    assert train(tmp_path) == errors.DONE
    recipe = tmp_path / "tiny" / "config.yaml"
    before = recipe.read_bytes()
    killed(monkeypatch, 1, lambda: train(tmp_path, *LION))
    assert recipe.read_bytes() == before, "nothing was made with the change, and the original command goes on"
    killed(monkeypatch, 2, lambda: train(tmp_path, *LION))
    assert recipe.read_bytes() != before
    capsys.readouterr()
    assert train(tmp_path, *LION[:-1]) == errors.DONE, "what was recorded holds, though no checkpoint has it yet"
    assert "the state of lion starts from nothing: nothing of adamw's is kept" in capsys.readouterr().out
    found = outcome(tmp_path / "tiny")
    other = tmp_path / "other"
    assert train(other) == errors.DONE
    assert train(other, *LION) == errors.DONE
    assert_equal(other / "tiny", found)
    capsys.readouterr()
    assert train(tmp_path, *LION[:-1], "training.duration=5 steps") == errors.DONE
    assert "anew" not in capsys.readouterr().out


@pytest.mark.long  # of the quick tests, training/test_change.py
def test_averages_on_and_off_and_what_cannot_begin_midway(tmp_path, capsys):
    assert train(tmp_path, "ema.enabled=false") == errors.DONE
    assert train(tmp_path, "training.duration=3 steps", "allow_change=[ema]") == errors.DONE
    assert "the averages start from the weights of this checkpoint" in capsys.readouterr().out
    recipe = (tmp_path / "tiny" / "config.yaml").read_bytes()
    for given in ([], ["allow_change=[ema]"]):
        assert train(tmp_path, "training.duration=4 steps", "ema.post_hoc=[0.1]", *given) == errors.REFUSED
        said = capsys.readouterr().err
        assert "so none can begin midway" in said
        assert "allow_change='" not in said
    assert (tmp_path / "tiny" / "config.yaml").read_bytes() == recipe
    assert train(tmp_path, "training.duration=4 steps", "ema.enabled=false", "allow_change=[ema]") == errors.DONE
    assert "the averages are dropped" in capsys.readouterr().out
