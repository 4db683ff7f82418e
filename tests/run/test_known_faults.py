"""A run that an earlier version wrote says once, when it is continued, what a fault of that version has changed."""

import pytest
import tiny_runs

from daguerre import errors
from daguerre.run import known_faults, trainer

SMALL = ["sampling.num_images=0", "validation.every=99 steps", "checkpoint.export=false", "data.checked_prompts=1"]


@pytest.mark.long
def test_a_run_of_that_version_says_it_until_this_one_has_saved(tmp_path, monkeypatch, capsys):
    concerned = known_faults.Fault(frozenset({"0.0.7"}), lambda run: run["config"]["seed"] == 5, "it learnt too little")
    other = known_faults.Fault(frozenset({"0.0.7"}), lambda run: run["config"]["seed"] == 6, "it learnt too much")
    monkeypatch.setattr(known_faults, "FAULTS", (concerned, other))

    def goes_on(steps):
        assert tiny_runs.train(tmp_path, f"training.duration={steps} steps", "seed=5", *SMALL) == errors.DONE
        return capsys.readouterr().out

    with monkeypatch.context() as earlier:
        earlier.setattr(trainer, "__version__", "0.0.7")
        assert "fault" not in goes_on(2)
    said = goes_on(3)
    assert said.count("a fault of version 0.0.7 that is mended now: it learnt too little") == 1
    assert "too much" not in said
    assert "fault" not in goes_on(4)


def documents(version="0.1.0", family="sd", batch=4, duration="8 steps"):
    config = {"model": {"family": family}, "training": {"global_batch_size": batch, "duration": duration}}
    return {"code": {"version": version}, "config": config, "state": {"step": 8, "slots": 32}}


@pytest.mark.parametrize("family", ["autoencoder", "sd"])
def test_a_kl_autoencoder_that_0_1_0_wrote_is_told_about_its_moments(family):
    assert ("moments" in str(known_faults.notices(documents(family=family)))) == (family == "autoencoder")
    assert not known_faults.notices(documents("0.2.0", family))


@pytest.mark.parametrize(
    ("batch", "duration", "told"),
    [(4, "2 epochs", False), (8, "2 epochs", True), (8, "90 samples", True), (8, "20 steps", False)],
)
def test_a_run_whose_batch_changed_is_told_about_its_lengths(batch, duration, told):
    assert ("global batch was changed" in str(known_faults.notices(documents(batch=batch, duration=duration)))) is told
