"""`daguerre convert ema`: averages of other widths from the profiles of a run's checkpoints."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import train

from daguerre import errors
from daguerre.cli import main
from daguerre.training import post_hoc


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight updates with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("convert")
    given = ["ema.post_hoc=[0.05,0.2]", "checkpoint.every=2 steps", "checkpoint.keep=4", "sampling.num_images=0"]
    given += ["validation.every=99 steps", "data.checked_prompts=1"]
    assert train(folder, *given) == errors.DONE
    return folder / "tiny"


def unet(pipeline):
    return load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")


def test_a_width_that_was_kept_comes_out_as_it_was(run, tmp_path, capsys):
    assert main.run(["convert", "ema", str(run), "width=0.2", f"out={tmp_path / 'p'}"]) == errors.DONE
    assert "the averaging profile differs by 0.0% from" in capsys.readouterr().out
    kept = load_file(run / "checkpoints" / "step-00000008" / "post_hoc_0_2.safetensors")
    found = unet(tmp_path / "p")
    assert {f"unet.{name}" for name in found} == set(kept)
    for name, tensor in kept.items():
        torch.testing.assert_close(found[name.removeprefix("unet.")], tensor, rtol=1e-4, atol=1e-6)


def test_another_width_is_the_sum_that_its_profile_asks_for(run, capsys):
    assert main.run(["convert", "ema", str(run), "width=0.1"]) == errors.DONE
    kept = [(step, width) for step in (2, 4, 6, 8) for width in (0.05, 0.2)]
    factors, error = post_hoc.coefficients(kept, 8, 0.1)
    said = capsys.readouterr().out
    assert f"the averaging profile differs by {error:.1%} from" in said
    assert ("poor" in said) == (error > post_hoc.POOR)
    found = unet(run / "pipeline-ema-0.1")
    total = torch.zeros_like(found["conv_in.weight"], dtype=torch.float64)
    for factor, (step, width) in zip(factors, kept, strict=True):
        file = f"post_hoc_{str(width).replace('.', '_')}.safetensors"
        total += factor * load_file(run / "checkpoints" / f"step-{step:08d}" / file)["unet.conv_in.weight"].double()
    torch.testing.assert_close(found["conv_in.weight"], total.float(), rtol=1e-5, atol=1e-7)
    assert not torch.equal(found["conv_in.weight"], unet(run / "pipeline")["conv_in.weight"])
    assert main.run(["convert", "ema", str(run), "width=0.1"]) == errors.REFUSED
    assert "exists" in capsys.readouterr().err


def test_a_poor_average_is_said_to_be_one(run, tmp_path, capsys):
    assert main.run(["convert", "ema", str(run), "width=0.01", f"out={tmp_path / 'p'}"]) == errors.DONE
    said = capsys.readouterr().out
    assert "the average is poor" in said
    assert "closer to the stored ones (0.05, 0.2)" in said


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ([], "width\n      must be given"),
        (["width=wide"], 'width = "wide"\n      allowed: a number'),
        (["width=0.4"], "up to 0.2887"),
        (["width=0.1", "seed=3"], "seed: convert ema takes"),
    ],
)
def test_what_it_cannot_do_is_refused(run, given, word, capsys):
    assert main.run(["convert", "ema", str(run), *given]) == errors.REFUSED
    assert word in capsys.readouterr().err


@pytest.mark.long
def test_runs_without_profiles_or_folders_without_a_run(tmp_path, capsys):
    assert train(tmp_path, "training.duration=2 steps", "sampling.num_images=0") == errors.DONE
    capsys.readouterr()
    assert main.run(["convert", "ema", str(tmp_path / "tiny"), "width=0.1"]) == errors.REFUSED
    assert "train with ema.post_hoc=[0.05,0.1]" in capsys.readouterr().err
    assert main.run(["convert", "ema", str(tmp_path), "width=0.1"]) == errors.REFUSED
    assert "give a run folder" in capsys.readouterr().err
    assert main.run(["convert", "latent"]) == errors.REFUSED
    assert "there is no verb `convert latent`" in capsys.readouterr().err
    assert main.run(["convert"]) == errors.DONE
