"""What weights predict is told by their errors: closed forms of every kind, random weights, and what `train` does."""

from __future__ import annotations

import re

import huggingface_hub
import numpy as np
import pytest
import tiny_runs
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file

from daguerre import errors
from daguerre.cli import main
from daguerre.families import sd, sdxl
from daguerre.foreign import base_models
from daguerre.models.components import ComponentLoader
from daguerre.models.weights import architectures, resolve
from daguerre.objectives import eps, v
from daguerre.run import probe
from daguerre.run.probe import Sample

KINDS = ("eps", "v", "flow", "edm", "edm of unit variance", "edm of CosXL")


def kinds(own=eps, **settings):
    return probe.kinds(sd.Settings(pretrained_model_name_or_path="x"), own.build(own.Settings(**settings)))


def signs(seed, images=16):
    """Samples whose numbers are 1 or -1: how x0 follows from a noisy one is known exactly."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randint(0, 2, (images, 4, 8, 8), generator=generator).float() * 2 - 1
    return [Sample(x0, torch.randn(x0.shape, generator=generator), {})]


class Exact:
    """The best network of a kind for such samples: E[x0 | x] = tanh(a x / s^2), at the level that c_noise names."""

    def __init__(self, objective):
        self.objective, times = objective, torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:-1]
        if objective.settings.name == "edm":
            times = torch.logspace(-2.5, 2, 20_001, dtype=torch.float64)
        elif objective.settings.schedule.name == "scaled_linear":
            times = times * 998
        self.times, self.c_noise = times, objective.c_noise(times)

    def __call__(self, x, c_noise, cond):
        t = self.times[(self.c_noise - c_noise[0].double()).abs().argmin()]
        a, s = self.objective.path(t)
        p, q = self.objective.target(a, s)
        noisy = x.double() / self.objective.input_scale(a, s)
        x0 = torch.tanh(a * noisy / s**2)
        return p * x0 + q * (noisy - a * x0) / s


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_network_of_a_kind_is_told(kind):
    found = kinds()
    assert tuple(found) == KINDS
    for seed in range(3):
        read = probe.fits(Exact(found[kind]), found, signs(seed))
        assert read.kind is not None, read.lines()
        assert read.kind.kind == kind
        assert read.kind.error < 0.75
        assert read.is_other == (kind != "eps")
        assert f"they predict {kind}: " in read.verdict()
        assert min(fit.error for fit in read.each[1:]) > 1.5 * read.kind.error


def test_what_the_error_is():
    """1 for the best linear denoiser of each kind; and noise that is guessed as zero has an error of (V + s^2) / V."""
    samples = signs(0, 64)
    found = kinds()

    def linear(x, c_noise, cond):  # of velocity at unit variance: E[v | x] = 0
        return torch.zeros_like(x)

    read = {fit.kind: fit for fit in probe.fits(linear, found, samples).each}
    assert read["v"].error == pytest.approx(1, abs=0.02)
    assert read["edm of CosXL"].error == pytest.approx(1, abs=0.02)
    assert read["eps"].loss == pytest.approx(1, abs=0.03)
    assert read["eps"].error_LI.mean(1).tolist() == pytest.approx([1 + sigma**2 for sigma in probe.LEVELS], rel=0.05)


def test_a_network_that_predicts_v_is_told_with_zero_terminal_snr():
    found = kinds(v, schedule={"zero_terminal_snr": True})
    assert next(iter(found)) == "v"
    exact = Exact(found["v"])
    read = {fit.kind: fit for fit in probe.fits(exact, kinds(), signs(1)).each}
    assert read["eps"].loss == pytest.approx(0.69, abs=0.05), "trained as noise, it would begin here"
    assert read["v"].error < 0.6
    assert not probe.fits(exact, found, signs(1)).is_other
    assert probe.fits(exact, kinds(), signs(1)).is_other


@pytest.mark.parametrize("gain", [0.0, 0.3, 1.0])
def test_of_random_weights_nothing_is_told(gain):
    for seed in range(3):
        torch.manual_seed(seed)
        first, last = torch.nn.Conv2d(4, 16, 3, padding=1), torch.nn.Conv2d(16, 4, 3, padding=1)
        layer = torch.nn.Sequential(first, torch.nn.SiLU(), last)
        with torch.no_grad():
            last.weight.mul_(gain)
            read = probe.fits(lambda x, c_noise, cond, layer=layer: layer(x), kinds(), signs(seed))
        assert read.kind is None
        assert not read.is_other
        assert read.verdict().startswith("cannot tell: ")


def test_one_image_and_two_kinds_that_are_near_tell_nothing():
    found = kinds()
    read = probe.fits(Exact(found["v"]), found, signs(0, images=1))
    assert read.kind is None
    assert not read.is_other
    twins = {"eps": found["eps"], "the same": found["eps"]}
    read = probe.fits(Exact(found["eps"]), twins, signs(0))
    assert read.kind is None
    assert "too little" in read.verdict()


@pytest.mark.parametrize(
    ("marks", "scheduler", "says"),
    [(("v_pred", "ztsnr"), "base", True), ((), "base", False), ((), None, False), (("v_pred",), None, False)],
)
def test_a_file_says_what_it_predicts_by_its_marks(marks, scheduler, says, tmp_path, monkeypatch):
    """Merges of models that predict v often have lost them."""
    weights = {"model.diffusion_model.out.2.weight": torch.zeros(1), **dict.fromkeys(marks, torch.zeros(0))}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    place = str(tmp_path / "model.safetensors")
    monkeypatch.setattr(resolve, "_cached", lambda repository, _: tmp_path)
    of_hub = "owner/name/model.safetensors"
    for given in (
        {"pretrained_model_name_or_path": place},
        {"pretrained_model_name_or_path": "x", "unet": place},
        {"pretrained_model_name_or_path": "x", "unet": of_hub},
    ):
        assert ComponentLoader(sd.Settings(**given, scheduler=scheduler), 0).says_prediction == says


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A UNet in a folder of its own: no scheduler says what it predicts."""
    place = tmp_path_factory.mktemp("probe") / "unet"
    torch.manual_seed(0)
    UNet2DConditionModel(
        in_channels=4, out_channels=4, cross_attention_dim=96, block_out_channels=(32, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=1, layers_per_block=1, sample_size=8,
    ).save_pretrained(place)  # fmt: skip
    return place


def arguments(place, silent, *more):
    short = {"training.duration": "2 steps", "lr_scheduler.warmup": "0 steps", "sampling.num_images": "0"}
    short["checkpoint.export"] = "false"
    kept = [each for each in tiny_runs.TINY if each.partition("=")[0] not in short and "model.unet." not in each]
    own = [f"{name}={value}" for name, value in short.items()]
    return ["train", "quickstart", f"output_dir={place}", *kept, *own, f"model.unet={silent}", *more]


def test_train_looks_once_and_says_what_it_saw(silent, tmp_path, capsys):
    assert main.run([*arguments(tmp_path, silent), "--dry-run"]) == errors.DONE
    foreseen = " ".join(capsys.readouterr().out.split())
    assert "before its first update `train` looks at what the weights predict" in foreseen
    assert main.run(arguments(tmp_path, silent)) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert f"no file says what the weights predict; by {probe.IMAGES} images, cannot tell" in said
    longer = ["training.duration=3 steps", "lr_scheduler.on_new_duration=hold", "lr_scheduler.restart_from=0.1"]
    again = [each for each in arguments(tmp_path, silent) if not each.startswith("training.duration")]
    assert main.run([*again, *longer]) == errors.DONE
    assert "what the weights predict" not in capsys.readouterr().out


def test_train_refuses_weights_of_another_kind_before_it_writes_anything(silent, tmp_path, monkeypatch, capsys):
    exact = Exact(kinds()["eps"])
    found = probe.fits(exact, kinds(v, schedule={"zero_terminal_snr": True}), signs(0))
    monkeypatch.setattr(probe, "fits", lambda *_: found)
    assert main.run(arguments(tmp_path, silent)) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert "the weights predict eps, and this recipe trains v: by 16 images" in said
    assert f"{found.own.loss:.3g}" in said
    assert "Set objective.name=eps" in said
    assert "model.probe=false" in said
    assert not (tmp_path / "tiny" / "config.yaml").exists()
    assert main.run(arguments(tmp_path, silent, "model.probe=off")) == errors.DONE
    assert "model.probe is off" in " ".join(capsys.readouterr().out.split())


def images_of(place, count):
    """Images larger than they are trained on, with captions."""
    place.mkdir()
    chance = np.random.default_rng(0)
    for number in range(count):
        pixels = chance.integers(0, 256, (80, 70 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"noise {number}")
    return place


def of_images(place, silent, *more):
    """Arguments of a run on images of a folder, one an update."""
    sets = ("data.", "validation.", "training.global", "training.per_device")
    kept = [each for each in arguments(place, silent) if not each.startswith(sets)]
    return [*kept, "training.global_batch_size=1", "validation.every=null", "data.held_out_fraction=0", *more]


@pytest.mark.long  # of the quick tests, train looks once
def test_one_image_is_trained_on_and_tells_nothing(silent, tmp_path, capsys):
    one = f"data.path={images_of(tmp_path / 'images', 1)}"
    assert main.run(of_images(tmp_path, silent, "data.source=folder", one)) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "no file says what the weights predict, and nobody looks: it takes two images at least" in said
    tiny = ["probe", "quickstart", f"model.unet={silent}", "data.source=folder", one]
    assert main.run(tiny) == errors.REFUSED
    assert "it takes two images at least" in capsys.readouterr().err


@pytest.mark.long  # of the quick tests, the probe of a folder
def test_of_a_cache_the_crops_are_looked_at_that_it_has(silent, tmp_path, capsys):
    """The middle of an image is none of its random crops: a cache has no row of it, and none is damaged."""
    crops = ["data.crop=random", "data.crops=3", f"cache.path={tmp_path / 'cache'}"]
    own = ["data.source=folder", f"data.path={images_of(tmp_path / 'images', 4)}"]
    assert main.run(of_images(tmp_path, silent, *crops, *own)) == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "no file says what the weights predict; by 4 images" in said
    assert "damaged" not in said
    alone = ["data.source=cache", f"data.path={tmp_path / 'cache'}", "run_name=alone"]
    assert main.run(of_images(tmp_path, silent, *crops, *alone)) == errors.DONE
    assert "no file says what the weights predict; by 4 images" in " ".join(capsys.readouterr().out.split())


def test_of_a_loss_around_diffusion_the_settings_inside_are_named(silent, tmp_path, monkeypatch, capsys):
    exact = Exact(kinds()["eps"])
    found = probe.fits(exact, kinds(v, schedule={"zero_terminal_snr": True}), signs(0))
    monkeypatch.setattr(probe, "fits", lambda *_: found)
    lcm = [each for each in arguments(tmp_path, silent) if not each.startswith("objective.")]
    assert main.run([*lcm, "objective.name=lcm", "objective.diffusion.name=v"]) == errors.REFUSED
    assert "Set objective.diffusion.name=eps" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("model", "says"), [("noobai-XL-1.1", "epsilon"), ("noobai-XL-Vpred-1.0", None)])
def test_numbers_that_stand_in_for_a_model_say_what_it_predicts_if_they_know(model, says, tmp_path, monkeypatch):
    """A dry run without the model's files reads the numbers of SDXL, which predicts noise."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    read = ComponentLoader(sdxl.Settings(pretrained_model_name_or_path=f"Laxhar/{model}"), 0)
    with torch.device("meta"):
        assert read.base == architectures.FOLDER / "sdxl"
    assert (read.scheduler() or {}).get("prediction_type") == says
    assert read.says_prediction == (says is not None)
    assert base_models.base(f"Laxhar/{model}").known == (says is not None), "as other trainers' configs name it"


def test_the_command(silent, tmp_path, capsys):
    tiny = [each for each in tiny_runs.TINY if each.startswith("data.")]
    given = ["probe", "quickstart", f"model.unet={silent}", *tiny]
    assert main.run(given) == errors.DONE
    said = capsys.readouterr().out
    rows = [line.split()[-2:] for line in said.splitlines() if re.search(r"(\d+\.?\d* +){2}$", line + " ")]
    assert len(rows) == len(KINDS)
    assert all(float(error) > 0.8 for _, error in rows)
    assert f"{probe.IMAGES} images, each at the noise levels s/a of 0.3, 1.0, 3.0" in " ".join(said.split())
    assert "cannot tell" in said
    assert main.run(["probe"]) == errors.REFUSED
    assert "give a model" in capsys.readouterr().err
    assert main.run(["probe", "z_image_lora"]) == errors.REFUSED
    assert "all predict the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("./nowhere", "no such file or run folder"),
        ("quickstrat", "Did you mean quickstart?"),
        ("nowhere.safetensors", "there is no file"),
        ("https://host/runs/mine", "kept in a local folder or under s3:// or gs://"),
    ],
)
def test_a_model_that_is_nowhere_is_refused_in_words(place, words, capsys):
    assert main.run(["probe", place, "data.path=images"]) == errors.REFUSED
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize("own", ["eps", "v", "flow", "edm"])
def test_a_network_that_was_trained_for_minutes_is_told(own, tmp_path, capsys):
    """Trained from random weights on the quickstart's data; then its UNet alone, of which no file says anything."""
    other = "v" if own == "eps" else "eps"
    kept = [each for each in tiny_runs.TINY if not each.startswith(("training.", "validation.", "checkpoint."))]
    kept = [each for each in kept if not each.startswith(("sampling.", "model.unet.block", "model.unet.attention"))]
    kept += ["model.unet.block_out_channels=[32, 64]", "model.unet.attention_head_dim=[1, 2]", "ema.enabled=false"]
    kept += ["training.duration=300 steps", "training.global_batch_size=16", "sampling.num_images=0"]
    named = [f"objective.name={own}", "objective.schedule.zero_terminal_snr=false"]
    if own in ("flow", "edm"):
        named = [f"objective.name={own}", f"objective.schedule.name={'linear_flow' if own == 'flow' else 'edm'}"]
    assert main.run(["train", "quickstart", f"output_dir={tmp_path}", *kept, *named]) == errors.DONE
    place = f"model.unet={tmp_path / 'tiny' / 'pipeline' / 'unet'}"
    capsys.readouterr()
    for seed in range(2):
        assert main.run(["probe", "quickstart", place, "data.checked_prompts=2", f"seed={seed}"]) == errors.DONE
        assert f"they predict {own}: " in " ".join(capsys.readouterr().out.split())
    refused = [*arguments(tmp_path, place.partition("=")[2], f"objective.name={other}"), "run_name=other"]
    refused += ["objective.schedule.zero_terminal_snr=false"]
    assert main.run(refused) == errors.REFUSED
    assert f"the weights predict {own}, and this recipe trains {other}" in " ".join(capsys.readouterr().err.split())
