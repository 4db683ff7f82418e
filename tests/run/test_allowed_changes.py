"""Settings that `allow_change` names, in commands: what starts from nothing is said, config.yaml is written once an
update is made with them, and a run that is killed before goes on in either way. Its state: test_change.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_runs
from tiny_runs import assert_equal, outcome

from daguerre import errors
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


@pytest.mark.long  # five runs; the next one changes averages
def test_another_optimizer_and_a_crash_on_the_way_there(tmp_path, monkeypatch, capsys):
    assert train(tmp_path) == errors.DONE
    config = tmp_path / "tiny" / "config.yaml"
    before = config.read_bytes()
    killed(monkeypatch, 1, lambda: train(tmp_path, *LION))
    assert config.read_bytes() == before, "nothing was made with the change, and the original command goes on"
    killed(monkeypatch, 2, lambda: train(tmp_path, *LION))
    assert config.read_bytes() != before
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
    config = (tmp_path / "tiny" / "config.yaml").read_bytes()
    for given in ([], ["allow_change=[ema]"]):
        assert train(tmp_path, "training.duration=4 steps", "ema.post_hoc=[0.1]", *given) == errors.REFUSED
        said = capsys.readouterr().err
        assert "so none can begin midway" in said
        assert "allow_change='" not in said
    assert (tmp_path / "tiny" / "config.yaml").read_bytes() == config
    assert train(tmp_path, "training.duration=4 steps", "ema.enabled=false", "allow_change=[ema]") == errors.DONE
    assert "the averages are dropped" in capsys.readouterr().out
