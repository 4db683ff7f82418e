"""Every shipped recipe trains two updates with its own networks and objective, and goes on from its checkpoint."""

import json

import pytest

from daguerre import cli, config, errors, recipe

SHORT = [
    "training.duration=2 steps",
    "training.global_batch_size=2",
    "training.per_device_batch_size=2",
    "lr_scheduler.warmup=1 step",
    "checkpoint.every=1 step",
    "logging.every=1 step",
    "logging.tensorboard=false",
]


def drawing(name: str) -> list[str]:
    """Overrides that keep the pictures of a recipe few."""
    chosen = config.load(name, ["run_name=x"]).config
    few = ["sampling.num_images=1", "sampling.num_inference_steps=2"] if chosen.sampling.num_images else []
    few += ["validation.num_samples=2", "validation.every=2 steps"] if chosen.validation.every else []
    return few + (["data.checked_prompts=2"] if chosen.data.source == "shapes" else [])


@pytest.mark.parametrize("name", recipe.shipped())
def test_a_recipe_trains_and_goes_on(name, tmp_path, capsys):
    arguments = ["train", name, f"output_dir={tmp_path}", "run_name=short", *SHORT, *drawing(name)]
    assert cli.run(arguments) == errors.DONE
    run = tmp_path / "short"
    assert json.loads((run / "status.json").read_text())["step"] == 2
    assert (run / "report.html").exists()
    assert any((run / "pipeline").iterdir())
    assert cli.run([*arguments, "training.duration=3 steps"]) == errors.DONE
    assert "going on from step-00000002" in capsys.readouterr().out


@pytest.mark.parametrize("name", recipe.shipped())
def test_a_header_says_command_hardware_time_and_result(name):
    head = recipe.shipped()[name].read_text(encoding="utf-8").split("\nrun_name", 1)[0].lower()
    for word in ("command", "hardware", "time", "result", f"daguerre train {name}"):
        assert word in head, f"the header of {name}.yaml does not say its {word}"
    for blank in ("TIME", "RESULT", "PROVISIONAL", "TODO"):
        assert blank not in recipe.shipped()[name].read_text(encoding="utf-8").split()


def test_a_loss_that_couples_samples_is_not_cut_into_micro_batches(tmp_path, capsys):
    cut = ["training.global_batch_size=4", "training.per_device_batch_size=2"]
    assert cli.run(["train", "quickstart_text", f"output_dir={tmp_path}", *cut]) == errors.REFUSED
    assert "cannot be computed as 2 x 2" in capsys.readouterr().err
